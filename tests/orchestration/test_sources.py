"""Sources in Dagster: ingested where something is new and no instance is at work; paused and failed ones shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from jobs.load import loads_for
from orchestration import sources as orchestrated
from orchestration.resources import Persist
from orchestration.sensors import loads
from orchestration.sources import Try, asked_now
from persist_lib.sources import Collection, Decoding, Files, Ingestion, Meaning, News, Sources
from persist_lib.sources.health import Report
from tests.orchestration.runs import defined, execute, why
from tests.orchestration.runs import metadata as recorded
from tests.spark.collections import SMALL

pytestmark = pytest.mark.dagster
ON_DISK = True
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
KEY = dg.AssetKey("sources")


class Fed:
    """Sources on folders."""

    def __init__(self, client: persist.Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.controller = client.controller()
        self.sources = Sources(self.controller)

    def create(self, name: str, **options: Any) -> None:
        place = self.folder / name
        place.mkdir(parents=True)
        self.sources.create(name, Files(place=str(place), format="jsonl"), SCHEMA, **options)

    def write(self, name: str, *rows: object) -> None:
        with (self.folder / name / "a.jsonl").open("a") as file:
            for row in rows:
                file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")

    def count(self, name: str) -> int:
        with self.controller.open_reader(name) as reader:
            return len(reader.snapshot().to_pylist()) if persist.at(0) < reader.fetch_upper() else 0


@pytest.fixture
def fed(client: persist.Client, tmp_path: Path) -> Iterator[Fed]:
    orchestrated.MEMORIES.clear()
    found = Fed(client, tmp_path / "in")
    yield found
    found.sources.close()
    found.controller.close()


def run(folder: Path, instance: dg.DagsterInstance, **config: object) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, "ingest", "ingest_of_sources", config)


def metadata(result: dg.ExecuteInProcessResult, partition: str | None) -> dict[str, Any]:
    return recorded(result, "sources", partition)


def tick(
    folder: Path, instance: dg.DagsterInstance, cursor: str | None = None, sensor: str = "source_news"
) -> Any:  # fmt: skip
    """What a sensor says: with the names of sources in `run_requests`, in its order."""
    given = Persist(location=f"file:{folder}", config=SMALL)
    repository = defined(folder).get_repository_def()
    with dg.build_sensor_context(
        instance=instance, repository_def=repository, resources={"persist": given}, cursor=cursor
    ) as context:
        data: Any = repository.get_sensor_def(sensor).evaluate_tick(context)
    given.teardown_after_execution(dg.build_init_resource_context())
    return data


def asked(data: Any) -> list[str]:
    return [
        name for one in data.run_requests for name in one.run_config["ops"]["ingest_of_sources"]["config"]["sources"]
    ]


def test_a_run_ingests_what_is_new_and_says_how_it_is(fed: Fed, folder: Path, instance: dg.DagsterInstance) -> None:
    fed.create("orders")
    fed.create("bills")
    fed.write("orders", *({"id": n, "word": "a"} for n in range(200)), "bad")
    result = run(folder, instance)
    assert result.success
    assert (fed.count("orders"), fed.count("bills")) == (200, 0)
    found = metadata(result, "orders")
    assert (found["messages"], found["errors"], found["state"], found["lag"]) == (201, 1, "idle", 0)
    assert found["messages_per_s"] > 0
    assert found["time"] == fed.sources.show("orders").time
    assert [one.data["partition"] for one in found["partitions"].records] == ["a.jsonl"]
    assert metadata(result, None)["sources"] == 1
    assert instance.get_materialized_partitions(KEY) == {"orders"}
    assert instance.get_dynamic_partitions("persist_sources") == ["orders"]
    assert {(one.check_name, one.passed) for one in result.get_asset_check_evaluations()} == {
        ("lag", True), ("errors", True), ("held_back", True), ("unread", True),
    }  # fmt: skip
    again = run(folder, instance)
    assert [event for event in again.all_events if event.is_step_materialization] == []
    assert metadata(again, None)["sources"] == 0


@pytest.mark.spark
def test_what_is_much_is_loaded_on_spark(
    fed: Fed, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Callable[[], int]] = []

    def in_small_tasks(*given: Any) -> Any:
        found, tasks_run = loads_for(*given)
        ran.append(tasks_run)
        return None if found is None else found._replace(task_bytes=1_000), tasks_run

    monkeypatch.setattr(Ingestion, "step_bytes", 500)
    monkeypatch.setattr(orchestrated, "loads_for", in_small_tasks)
    fed.create("orders", meaning=Meaning(envelope="upsert"))
    fed.write("orders", *({"id": n % 70, "word": f"w{n}"} for n in range(200)), "bad")
    result = run(folder, instance, engine="spark")
    assert result.success
    found = metadata(result, "orders")
    assert (found["messages"], found["errors"], found["lag"]) == (201, 1, 0)
    assert fed.count("orders") == 70
    assert [count() > 3 for count in ran] == [True]
    refused = run(folder, instance, sources=["orders"], engine="sparkle")
    assert not refused.success
    assert "engine must be one of auto, local, spark" in str(refused.all_events)


def test_an_engine_is_only_asked_of_files(fed: Fed, folder: Path, instance: dg.DagsterInstance) -> None:
    fed.create("orders")
    fed.write("orders", {"id": 1, "word": "a"})
    assert run(folder, instance).success
    fed.sources.create("copies", Collection(name="orders"), SCHEMA)
    refused = run(folder, instance, sources=["copies"], engine="spark")
    assert not refused.success
    assert "is not loaded by tasks, as collection is read in order" in str(refused.all_events)
    assert run(folder, instance, sources=["copies"]).success
    assert fed.count("copies") == 1


def test_a_source_that_fails_is_told_and_the_others_are_ingested(
    fed: Fed, folder: Path, instance: dg.DagsterInstance
) -> None:
    fed.create("bad", meaning=Meaning(most_errors=0))
    fed.create("good")
    fed.create("rests")
    fed.write("bad", "garbage")
    fed.write("good", {"id": 1, "word": "a"})
    fed.write("rests", {"id": 1, "word": "a"})
    fed.sources.pause("rests", why="the disk is full")
    result = run(folder, instance, sources=["bad", "good", "rests", "typo"])
    assert not result.success
    assert "2 of 4 sources" in why(result)
    assert "most_errors is 0" in why(result)
    assert "no source 'typo'" in why(result)
    assert (fed.count("good"), fed.count("rests")) == (1, 0)
    assert (metadata(result, "bad")["state"], "most_errors" in metadata(result, "bad")["why"]) == ("failed", True)
    rests = metadata(result, "rests")
    assert (rests["state"], rests["why"]) == ("paused", "the disk is full")
    assert instance.get_materialized_partitions(KEY) == {"good"}


def test_the_sensor_asks_for_what_is_new_and_skips_with_a_reason(
    fed: Fed, folder: Path, instance: dg.DagsterInstance
) -> None:
    assert tick(folder, instance).skip_message == "0 sources"
    fed.create("orders")
    fed.create("rests")
    fed.write("rests", {"id": 1, "word": "a"})
    fed.sources.pause("rests")
    data = tick(folder, instance)
    assert (asked(data), data.skip_message) == ([], "2 sources: 1 with nothing new, 1 paused")
    fed.write("orders", {"id": 1, "word": "a"})
    data = tick(folder, instance)
    assert asked(data) == ["orders"]
    assert run(folder, instance, sources=["orders"]).success
    orchestrated.MEMORIES.clear()
    assert asked(tick(folder, instance, data.cursor)) == [], "it stopped, and nothing is new"


def test_a_cancelled_run_is_not_asked_for_again_before_a_person_ingests(
    fed: Fed, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("orders", "bills"):
        fed.create(name)
        fed.write(name, {"id": 1, "word": "a"})
    job = defined(folder).resolve_job_def("ingest")
    config = {"ops": {"ingest_of_sources": {"config": {"sources": ["orders"]}}}}
    instance.create_run_for_job(job, run_config=config, status=dg.DagsterRunStatus.CANCELED)
    assert asked(tick(folder, instance)) == ["bills"]
    instance.create_run_for_job(job, run_config=config, status=dg.DagsterRunStatus.FAILURE)
    orchestrated.MEMORIES.clear()
    assert asked(tick(folder, instance)) == ["bills", "orders"]


def test_a_source_with_something_new_and_nothing_at_work_is_red_without_a_run(
    fed: Fed, folder: Path, instance: dg.DagsterInstance
) -> None:
    def watch(cursor: str | None = None) -> tuple[dict[str, bool], str]:
        data = tick(folder, instance, cursor, "source_watch")
        return {one.check_name: one.passed for one in data.asset_events}, data.cursor

    assert watch()[0] == {}, "there is no source, so there is no verdict"
    fed.create("orders")
    fed.write("orders", {"id": 1, "word": "a"})
    found, cursor = watch()
    assert (found["instances"], found["errors"], found["held_back"]) == (False, True, True)
    assert watch(cursor)[0] == {}, "nothing has changed"
    assert run(folder, instance, sources=["orders"]).success
    found, cursor = watch(cursor)
    assert found["instances"]
    fed.write("orders", {"id": 2, "word": "a"})
    found, cursor = watch(cursor)
    assert found == {}, "a run may be about to begin"
    assert not watch(cursor)[0]["instances"]


def test_a_good_source_does_not_hide_a_bad_one(fed: Fed, folder: Path, instance: dg.DagsterInstance) -> None:
    for name, rows in (("bad", ["garbage"]), ("good", [{"id": 1, "word": "a"}])):
        fed.create(name)
        fed.write(name, *rows)
    assert run(folder, instance, sources=["bad", "good"], errors=0).success
    key = dg.AssetCheckKey(KEY, "errors")
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    assert found.status.value == "FAILED"
    assert "bad: 1 messages were bad" in str(found.evaluation and found.evaluation.description)


def test_what_an_instance_has_at_work_is_left_to_it(fed: Fed, folder: Path, instance: dg.DagsterInstance) -> None:
    fed.create("orders")
    fed.write("orders", {"id": 1, "word": "a"})
    report = Report(fed.controller, fed.sources.find("orders").health, "x", "ms")
    report.say("running", "")
    data = tick(folder, instance)
    assert (asked(data), data.skip_message) == ([], "1 sources: 1 with an instance at work")
    report.say("stopped", "")
    report.close()
    orchestrated.MEMORIES.clear()
    assert asked(tick(folder, instance)) == ["orders"]


def test_runs_that_are_not_finished_are_not_asked_for_again(
    fed: Fed, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("orders", "bills"):
        fed.create(name)
        fed.write(name, {"id": 1, "word": "a"})
    job = defined(folder).resolve_job_def("ingest")
    config = {"ops": {"ingest_of_sources": {"config": {"sources": ["orders"]}}}}
    instance.create_run_for_job(job, run_config=config, status=dg.DagsterRunStatus.STARTED)
    data = tick(folder, instance)
    assert asked(data) == ["bills"]
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTING)
    assert "for all that is new is not finished" in (tick(folder, instance).skip_message or "")


def test_what_gets_no_further_is_asked_for_after_growing_pauses() -> None:
    tries: dict[str, Try] = {}
    now, asked_at = 0, []
    for _ in range(200):
        found = asked_now([News("s", "new", "more", 5)], (), tries, now)
        asked_at += [now] if found.now else []
        tries = loads(found.cursor, Try)
        now += 30_000
    pauses = [later - sooner for sooner, later in pairwise(asked_at)]
    assert pauses[:6] == [30_000, 60_000, 120_000, 240_000, 480_000, 960_000]
    assert asked_now([News("s", "new", "more", 6)], (), tries, now).now == ("s",), "it got further"
    assert asked_now([News("s", "unread", "no disk", 6)], (), tries, now).reason.endswith("(no disk)")
    assert loads("nonsense", Try) == loads("[1]", Try) == loads(None, Try) == {}


def test_the_checks_judge_all_sources(fed: Fed, folder: Path, instance: dg.DagsterInstance) -> None:
    fed.create("orders")
    fed.sources.create("words", Collection("orders"), SCHEMA, decoding=Decoding(decoder="rows"))
    fed.write("orders", "bad", "worse")
    fed.sources.run("orders", until_idle=True)
    fed.write("orders", {"id": 1, "word": "a"})
    definitions = defined(folder)
    names = ("instances", "lag", "errors", "held_back", "unread")
    checks = dg.AssetSelection.checks(*(dg.AssetCheckKey(KEY, name) for name in names))
    job = dg.define_asset_job("judge", selection=checks)
    judge = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("judge")

    def verdicts(**limits: Any) -> dict[str, tuple[bool, str]]:
        config = {"ops": {"source_checks": {"config": limits}}}
        done = judge.execute_in_process(instance=instance, run_config=config)
        assert done.success, "a warning fails no run"
        return {one.check_name: (one.passed, one.description or "") for one in done.get_asset_check_evaluations()}

    found = verdicts(errors_share=None)
    assert {name: one[0] for name, one in found.items()} == {**dict.fromkeys(names, True), "instances": False}
    assert found["instances"][1].startswith("orders: something new is there, and no instance and no run ingests it")
    strict = verdicts(instances=1, errors=1, behind_s=0)
    assert {name: one[0] for name, one in strict.items()} == {
        "instances": False, "lag": False, "errors": False, "held_back": True, "unread": True,
    }  # fmt: skip
    assert "orders: 2 messages were bad" in strict["errors"][1]
    assert "words" in strict["instances"][1]
