"""Sensors and schedules, evaluated as the daemon does."""

from __future__ import annotations

import datetime as dt
import json
import time
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.resources import Persist
from orchestration.settings import Settings
from persist_lib.core.duties import DUTIES
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from tests.spark.collections import SMALL, write

pytestmark = pytest.mark.dagster
ON_DISK = True


@pytest.fixture
def repository(folder: Path) -> dg.RepositoryDefinition:
    return build_definitions(Settings(location=f"file:{folder}", config=SMALL)).get_repository_def()


def tick(
    repository: dg.RepositoryDefinition,
    name: str,
    instance: dg.DagsterInstance,
    given: Persist,
    cursor: str | None = None,
) -> dg.SensorResult:
    """One evaluation; what it adds to partitions takes effect, as the daemon would see to."""
    with dg.build_sensor_context(
        instance=instance, cursor=cursor, repository_def=repository, resources={"persist": given}
    ) as context:
        data = repository.get_sensor_def(name).evaluate_tick(context)
    for request in data.dynamic_partitions_requests or ():
        instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
    return data  # type: ignore[return-value]


def shards_of(data: dg.SensorResult) -> list[list[str]]:
    """The shards of each run that a tick requests."""
    return [one.run_config["ops"]["compaction_of_shards"]["config"]["shards"] for one in data.run_requests or ()]


def test_discovery_makes_new_shards_partitions_and_has_them_counted_once(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", rows=5)
    write(client, "b", rows=5)
    first = tick(repository, "shard_discovery", instance, given)
    assert instance.get_dynamic_partitions("persist_shards") == ["a", "b"]
    assert len(first.run_requests or ()) == 1, "one run for all new shards"
    assert not first.asset_events
    second = tick(repository, "shard_discovery", instance, given, first.cursor)
    assert not second.run_requests
    write(client, "c", rows=5)
    third = tick(repository, "shard_discovery", instance, given, second.cursor)
    assert [request.run_key for request in third.run_requests or ()] == [f"c@{client.inspect('c').seqno}"]


def test_discovery_takes_many_new_shards_in_several_ticks(
    client: persist.Client,
    repository: dg.RepositoryDefinition,
    instance: dg.DagsterInstance,
    given: Persist,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestration.sensors.NEW_AT_ONCE", 3)
    for n in range(7):
        write(client, f"s{n}", batches=1, rows=1)
    keys = set()
    for expected in (3, 6, 7):
        data = tick(repository, "shard_discovery", instance, given)
        keys |= {request.run_key for request in data.run_requests or ()}
        assert len(instance.get_dynamic_partitions("persist_shards")) == expected
    assert len(keys) == 3
    assert not tick(repository, "shard_discovery", instance, given).run_requests


def test_debts_of_all_shards_are_one_run(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    for name in ("a", "b"):
        write(client, name, batches=6, rows=5)
    write(client, "tidy", batches=1, rows=5)
    data = tick(repository, "compaction_debt", instance, given)
    (shards,) = shards_of(data)
    assert sorted(shards) == ["a", "b"]
    assert set(json.loads(data.cursor or "")) == {"a", "b"}


def test_debt_is_asked_for_until_it_is_paid(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", batches=6, rows=5)
    first = tick(repository, "compaction_debt", instance, given)
    assert shards_of(first) == [["a"]]
    second = tick(repository, "compaction_debt", instance, given, first.cursor)
    assert shards_of(second) == [], "the pause after the first attempt"
    later = json.dumps({"a": [1, 0]})
    third = tick(repository, "compaction_debt", instance, given, later)
    assert shards_of(third) == [["a"]]
    keys = {one.run_key for data in (first, third) for one in data.run_requests or ()}
    assert len(keys) == 2, "Dagster starts a run only once for each key"
    client.compact("a")
    fourth = tick(repository, "compaction_debt", instance, given, third.cursor)
    assert (shards_of(fourth), fourth.cursor) == ([], "{}")


def test_shards_of_unfinished_runs_are_not_asked_for_and_the_others_do_not_wait_for_them(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", batches=6, rows=5)
    first = tick(repository, "compaction_debt", instance, given)
    (request,) = first.run_requests or ()
    job = repository.get_job("compaction")
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, run_config=request.run_config)
    write(client, "b", batches=6, rows=5)
    data = tick(repository, "compaction_debt", instance, given, json.dumps({"a": [1, 0]}))
    assert shards_of(data) == [["b"]]


@pytest.mark.parametrize("by", ["the sensor", "a person", "everything", "the asset"])
def test_a_cancel_holds_until_a_later_run_visits_the_shard(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist, by: str
) -> None:
    write(client, "a", batches=6, rows=5)
    write(client, "b", batches=6, rows=5)
    cancelled, about_a = dg.DagsterRunStatus.CANCELED, {"ops": {"compaction_of_shards": {"config": {"shards": ["a"]}}}}
    job = repository.get_job("maintenance" if by == "everything" else "compaction")
    if by == "the asset":
        cancelled_run = instance.create_run_for_job(
            repository.get_job("__ASSET_JOB"), status=cancelled, tags={"dagster/partition": "a"},
            asset_selection=frozenset({dg.AssetKey("compaction")}),
        )  # fmt: skip
        assert cancelled_run.asset_selection
    else:
        instance.create_run_for_job(job, status=cancelled, run_config=None if by == "everything" else about_a)
    data = tick(repository, "compaction_debt", instance, given, json.dumps({"a": [1, 0]}))
    assert shards_of(data) == ([] if by == "everything" else [["b"]])
    if by == "everything":
        assert "2 are held back, as their run was cancelled" in (data.skip_message or "")  # type: ignore[attr-defined]
    dry = {"ops": {"compaction_of_shards": {"config": {"dry_run": True}}}}
    compaction = repository.get_job("compaction")
    instance.create_run_for_job(compaction, status=dg.DagsterRunStatus.SUCCESS, run_config=dry)
    assert ["a"] not in shards_of(tick(repository, "compaction_debt", instance, given)), "it was only looked at"
    instance.create_run_for_job(compaction, status=dg.DagsterRunStatus.FAILURE, run_config=about_a)
    assert "a" in {one for some in shards_of(tick(repository, "compaction_debt", instance, given)) for one in some}


def test_a_thousand_debts_are_runs_of_a_bounded_size(
    client: persist.Client,
    repository: dg.RepositoryDefinition,
    instance: dg.DagsterInstance,
    given: Persist,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestration.sensors.CHUNK", 3)
    for n in range(7):
        write(client, f"s{n}", batches=6, rows=1)
    data = tick(repository, "compaction_debt", instance, given)
    assert sorted(len(shards) for shards in shards_of(data)) == [1, 3, 3]
    assert sorted(shard for shards in shards_of(data) for shard in shards) == [f"s{n}" for n in range(7)]


def test_a_sensor_asks_a_shard_server_once_for_all_shards(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for n in range(7):
        write(client, f"s{n}", batches=6, rows=1)
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as store:
        server = ShardServer(store, "127.0.0.1:0")
        url = f"persist://127.0.0.1:{server.start()}"
        settings = Settings(location=f"file:{folder}", consensus=url, config=SMALL)
        repository = build_definitions(settings).get_repository_def()
        given = Persist(location=f"file:{folder}", consensus=url, config=SMALL)
        data = tick(repository, "compaction_debt", instance, given)
        assert server._calls.looks._asked == 1
        assert store.metrics().operations["heads"].calls == 1, "nobody else asked for them"
        given.teardown_after_execution(dg.build_init_resource_context())
        server.stop(0.1)
    assert [sorted(shards) for shards in shards_of(data)] == [[f"s{n}" for n in range(7)]]


def test_debts_are_what_the_settings_say(client: persist.Client, folder: Path, instance: dg.DagsterInstance) -> None:
    write(client, "a", batches=1, rows=50)
    write(client, "a", batches=1, rows=5)
    for weight, indebted in ((0.5, []), (1e9, [["a"]])):
        settings = {**SMALL, "compaction_weight": weight}
        repository = build_definitions(Settings(location=f"file:{folder}", config=settings)).get_repository_def()
        given = Persist(location=f"file:{folder}", config=settings)
        data = tick(repository, "compaction_debt", instance, given)
        assert shards_of(data) == indebted
        given.teardown_after_execution(dg.build_init_resource_context())


def test_a_schedule_runs_only_where_something_is_due(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    assert "nothing is due on any of 0 shards" in skipped(repository, "leases_schedule", instance, given)
    write(client, "a", batches=1, rows=5)
    assert "nothing is due on any of 1 shards" in skipped(repository, "leases_schedule", instance, given)
    assert skipped(repository, "census_schedule", instance, given) == ""
    client.survey(done={"census": ["a"]})
    assert "nothing is due" in skipped(repository, "census_schedule", instance, given)
    with persist.open(client.url, config=persist.Config(lease_ms=100), runtime=Runtime(background=False)) as short:
        short.open_reader("a")
        time.sleep(0.2)
        assert skipped(repository, "leases_schedule", instance, given) == ""
    instance.create_run_for_job(repository.get_job("leases"), status=dg.DagsterRunStatus.STARTED)
    assert "not finished" in skipped(repository, "leases_schedule", instance, given)


def skipped(repository: dg.RepositoryDefinition, name: str, instance: dg.DagsterInstance, given: Persist) -> str:
    """Why a schedule's tick requests nothing; empty if it requests a run."""
    at = dt.datetime(2026, 1, 4, 3, 41, tzinfo=dt.UTC)
    schedule = repository.get_schedule_def(name)
    with dg.build_schedule_context(
        instance=instance, scheduled_execution_time=at, repository_def=repository, resources={"persist": given}
    ) as context:
        data = schedule.evaluate_tick(context)
    assert bool(data.run_requests) != bool(data.skip_message)
    return data.skip_message or ""


def test_every_schedule_requests_a_valid_run(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", batches=6, rows=5)
    requested: set[str] = set()
    assert {one.name for one in repository.schedule_defs} == {
        "collections_schedule",
        "fleet_schedule",
        "pending_schedule",
        "prune_schedule",
        *(f"{duty.name}_schedule" for duty in DUTIES if duty.schedule),
    }
    for schedule in repository.schedule_defs:
        at = dt.datetime(2026, 1, 4, 3, 41, tzinfo=dt.UTC)
        with dg.build_schedule_context(
            instance=instance, scheduled_execution_time=at, repository_def=repository, resources={"persist": given}
        ) as context:
            data = schedule.evaluate_tick(context)
        for request in data.run_requests or ():
            assert dg.validate_run_config(repository.get_job(schedule.job_name), request.run_config)
            requested.add(schedule.name)
    of_duties = {"compaction_schedule", "census_schedule", "orphans_schedule", "scrub_schedule"}
    assert requested == {*of_duties, "fleet_schedule", "prune_schedule"}
