"""What Dagster stores of a pass, and what of it goes again: on SQLite, and on PostgreSQL as its storage."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import DagsterEventType
from dagster._serdes import serialize_value

import persist_lib as persist
from orchestration import fleet, reports
from orchestration.definitions import build_definitions
from orchestration.mount import Mount
from orchestration.pruning import needed_runs
from orchestration.settings import KEEP_RUNS_DAYS, Settings, resolved
from persist_lib.errors import InvalidUsage
from tests.orchestration.conftest import NO_LOGS
from tests.orchestration.dagster_dev import database
from tests.orchestration.runs import defined, execute
from tests.orchestration.test_passes import recorded, run, summary
from tests.spark.collections import SCHEMA, damage_a_part, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
AT_ONCE = 1e-7
"""Days after which everything that is finished is old."""


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    home = tmp_path / "dagster"
    home.mkdir()
    if request.param == "sqlite":
        with dg.DagsterInstance.local_temp(str(home), NO_LOGS) as made:
            yield made
        return
    pytest.importorskip("dagster_postgres", reason="PostgreSQL as Dagster's storage needs dagster-postgres")
    storage = {"storage": {"postgres": {"postgres_url": database(f"dagster_{tmp_path.name}")}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dg.DagsterInstance.local_temp(str(home), {**NO_LOGS, **storage}) as made:
            assert "Postgres" in type(made.event_log_storage).__name__
            yield made


def move(client: persist.Client, name: str, batches: int = 1) -> None:
    with client.open_writer(name, SCHEMA) as writer:
        for _ in range(batches):
            at = writer.fetch_upper().time or 0
            writer.compare_and_append([], at, at + 1)


def prune(folder: Path, instance: dg.DagsterInstance, **config: Any) -> int:
    """How many runs went."""
    before = instance.get_runs_count()
    assert execute(folder, instance, "prune", "pruning_of_runs", {"days": AT_ONCE, **config}).success
    return before + 1 - instance.get_runs_count()


def materialized(instance: dg.DagsterInstance, duty: str) -> set[str]:
    return instance.get_materialized_partitions(dg.AssetKey(duty))


def test_a_census_is_recorded_once_an_hour_unless_its_verdict_changes(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "a", batches=1, rows=3)
    assert recorded(run(folder, instance, "census")) == [("census", "a"), ("census", None)]
    move(client, "a")
    again = run(folder, instance, "census")
    assert recorded(again) == [("census", None)]
    assert (summary(again)["visited"], summary(again)["unrecorded"]) == (1, 1)
    assert client.survey().due("census") == ["a"], "it is not settled, as it is not recorded"
    write(client, "a", batches=40, rows=1, seed=5)
    assert ("census", "a") in recorded(run(folder, instance, "census")), "the check fails now"
    move(client, "a")
    assert ("census", "a") not in recorded(run(folder, instance, "census"))
    monkeypatch.setattr(reports, "RECORDED_EACH_S", 0.0)
    assert ("census", "a") in recorded(run(folder, instance, "census")), "an hour later, also without a change"
    assert client.survey().due("census") == []
    move(client, "a")
    monkeypatch.setattr(reports, "RECORDED_EACH_S", 3600.0)
    assert ("census", "a") in recorded(run(folder, instance, "census", shards=["a"], everything=True))


def test_what_is_recorded_of_a_shard_is_small(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "a", batches=6, rows=5)
    result = run(folder, instance, "census")
    sizes = {
        str(entry.dagster_event.event_type_value): len(serialize_value(entry))
        for entry in instance.all_logs(result.run_id) if entry.dagster_event and entry.dagster_event.partition
    }  # fmt: skip
    assert sizes["ASSET_MATERIALIZATION"] < 5100, sizes
    [event] = [one for one in result.all_events if one.is_step_materialization]
    figures = event.step_materialization_data.materialization.metadata
    assert {"batches", "debt", "size", "upper", "dollars_month"} <= figures.keys()
    report = str(figures["report"].value)
    assert "| parts | 6 |" in report
    assert "6 batches, 30 updates" in report


def test_old_runs_go_but_none_that_has_the_newest_word_on_a_partition(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("a", "idle"):
        write(client, name, batches=6, rows=5)
    first = run(folder, instance, "leases", everything=True).run_id
    second = run(folder, instance, "leases", everything=True).run_id
    last = run(folder, instance, "leases", shards=["a"], everything=True).run_id
    assert prune(folder, instance, dry_run=True) == 0
    assert prune(folder, instance, days=1.0) == 0
    assert prune(folder, instance) == 3, "the first one, and two runs of this"
    there = {one.run_id for one in instance.get_runs()}
    assert first not in there
    assert {second, last} <= there, "one has the newest word on the idle shard"
    assert materialized(instance, "leases") == {"a", "idle"}
    assert {one.run_id for one in instance.fetch_materializations(dg.AssetKey("leases"), limit=9).records} == {
        second, last,
    }  # fmt: skip


def test_verdicts_of_runs_that_are_gone_are_gone_as_well(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "a", batches=6, rows=5)
    runs = [run(folder, instance, "census", everything=True).run_id for _ in range(3)]
    key = dg.AssetCheckKey(dg.AssetKey("census"), "batch_count_within_bound")

    def judged() -> set[str]:
        found = instance.event_log_storage.get_asset_check_execution_history(key, limit=99)
        return {one.run_id for one in found}

    assert judged() == set(runs)
    assert prune(folder, instance) == 2
    assert judged() == {runs[-1]}


def test_runs_with_damage_and_failed_partitions_stay_and_runs_of_others_too(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidUsage("planted")

    @dg.job
    def mine() -> None: ...

    assert mine.execute_in_process(instance=instance).success
    write(client, "good", batches=6, rows=5)
    write(client, "bad", batches=6, rows=5)
    assert run(folder, instance, "scrub", everything=True).success
    damage_a_part(folder, "bad")
    broken = run(folder, instance, "scrub", everything=True, scrub_all=True)
    assert not broken.success
    assert run(folder, instance, "leases", everything=True).success
    with monkeypatch.context() as patched:
        patched.setattr(persist.Client, "expire", refuse)
        failed = run(folder, instance, "leases", everything=True)
        assert not failed.success
    key = dg.AssetCheckKey(dg.AssetKey("scrub"), "parts_undamaged")

    def bad() -> list[str | None]:
        found = instance.event_log_storage.get_asset_check_partition_info([key])
        return [one.partition_key for one in found if one.latest_execution_status.value == "FAILED"]

    assert "bad" in bad()
    prune(folder, instance)
    there = {one.run_id for one in instance.get_runs()}
    assert broken.run_id in there
    assert failed.run_id in there, "the partitions are red because of it"
    assert "bad" in bad()
    planned = instance.get_records_for_run(failed.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    assert planned.records
    assert run(folder, instance, "leases", everything=True).success
    prune(folder, instance)
    assert failed.run_id not in {one.run_id for one in instance.get_runs()}, "they are green again"
    assert "mine" in {one.job_name for one in instance.get_runs()}


def test_every_duty_runs_on_this_storage(client: persist.Client, folder: Path, instance: dg.DagsterInstance) -> None:
    for name in ("a", "b"):
        write(client, name, batches=6, rows=5)
    done = run(folder, instance, "maintenance", everything=True)
    assert done.success
    duties = {"compaction", "census", "garbage", "leases", "orphans", "publication", "retention", "rollups", "scrub"}
    assert {duty for duty in duties if materialized(instance, duty) == {"a", "b"}} == duties
    for _ in range(2):  # the first one counts what the rollups moved
        idle = run(folder, instance, "maintenance")
    assert summary(idle)["visited"] == 0


def test_what_the_fleet_stores_is_bounded_and_goes_but_for_the_newest_pages(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("busy", "calm"):
        write(client, name, batches=40 if name == "busy" else 1, rows=5)

    def report() -> str:
        done = defined(folder).resolve_job_def("fleet").execute_in_process(instance=instance)
        assert done.success
        return done.run_id

    def stored(run_id: str) -> dict[str, int]:
        events = (one for one in instance.all_logs(run_id) if one.dagster_event and one.dagster_event.asset_key)
        found: dict[str, int] = {}
        for one in events:
            key = str(one.dagster_event and one.dagster_event.asset_key and one.dagster_event.asset_key.path[-1])
            found[key] = max(found.get(key, 0), len(serialize_value(one)))
        return found

    first = report()
    sizes = stored(first)
    assert (set(sizes), sizes["fleet"] < 50_000, sizes["shard_page"] < 60_000, sizes["tables"] < 3000) == (
        {"fleet", "shard_page", "tables"}, True, True, True,
    ), sizes  # fmt: skip
    second = report()
    assert set(stored(second)) == {"fleet"}, "pages are made once a day, and of tables that did not move only a verdict"
    third = report()
    assert prune(folder, instance) == 1, "the second one; the first has the newest page"
    assert {one.run_id for one in instance.get_runs()} >= {first, third}
    now = fleet.clock()
    monkeypatch.setattr(fleet, "clock", lambda: now + fleet.PAGES_EACH_S + 5)
    move(client, "busy")
    move(client, "calm")
    last = report()
    assert prune(folder, instance) == 3, "what is newer has all of it; and the two runs of this"
    assert {first, third}.isdisjoint(one.run_id for one in instance.get_runs())
    assert materialized(instance, "shard_page") == {"busy"}
    assert materialized(instance, "tables") == {"busy", "calm"}
    assert last in {one.run_id for one in instance.get_runs()}


def test_the_schedule_prunes_unless_all_runs_are_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(**settings: Any) -> Any:
        definitions = build_definitions(Settings(location=f"file:{tmp_path}", **settings))
        repository = definitions.get_repository_def()
        with dg.build_schedule_context(scheduled_execution_time=dt.datetime.now(dt.UTC)) as context:
            data = repository.get_schedule_def("prune_schedule").evaluate_tick(context)
        return [one.run_config["ops"]["pruning_of_runs"]["config"]["days"] for one in data.run_requests or ()]

    assert asked() == [KEEP_RUNS_DAYS] == [30]
    assert asked(keep_runs_days=7) == [7]
    assert asked(keep_runs_days=0) == []
    monkeypatch.setenv("PERSIST_KEEP_RUNS_DAYS", "0.5")
    assert asked() == [0.5]
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(InvalidUsage, match="keep_runs_days"):
            resolved(Settings(location="memory:"), {"PERSIST_KEEP_RUNS_DAYS": wrong})


def test_a_run_that_has_the_newest_verdict_stays_for_that_alone(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    """A verdict without a partition has no materialization that would keep its run."""
    verdict = dg.AssetCheckKey(dg.AssetKey("census"), "batch_count_within_bound")

    @dg.op
    def judges(context) -> None:  # Dagster reads annotations, which are text here
        judged = dg.AssetCheckEvaluation(
            asset_key=verdict.asset_key, check_name=verdict.name, passed=False, metadata={}
        )
        context.log_event(judged)

    @dg.job
    def leases() -> None:
        judges()

    runs = [leases.execute_in_process(instance=instance).run_id for _ in range(2)]
    assert needed_runs(instance, Mount(), []) == {runs[-1]}
