"""Sensors and schedules, evaluated as the daemon does."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.resources import Persist
from orchestration.settings import Settings
from persist_lib.core.duties import DUTIES
from tests.spark.collections import SMALL, write

pytestmark = pytest.mark.dagster


@pytest.fixture
def repository(folder: Path) -> dg.RepositoryDefinition:
    return build_definitions(Settings(location=f"file:{folder}", config=SMALL)).get_repository_def()


@pytest.fixture
def given(folder: Path) -> Iterator[Persist]:
    resource = Persist(location=f"file:{folder}", config=SMALL)
    yield resource
    resource.teardown_after_execution(dg.build_init_resource_context())


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


def test_discovery_makes_new_shards_partitions_and_counts_them_once(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", rows=5)
    first = tick(repository, "shard_discovery", instance, given)
    assert instance.get_dynamic_partitions("persist_shards") == ["a"]
    assert [request.run_key for request in first.run_requests or ()] == [f"a@{client.inspect('a').seqno}"]
    assert [event.partition for event in first.asset_events] == ["a"]
    second = tick(repository, "shard_discovery", instance, given, first.cursor)
    assert not second.run_requests
    assert not second.asset_events


def test_discovery_observes_what_changed_since_the_last_tick(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", rows=5)
    write(client, "b", rows=5)
    first = tick(repository, "shard_discovery", instance, given)
    assert instance.get_dynamic_partitions("persist_shards") == ["a", "b"]
    assert len(first.run_requests or ()) == 1, "one run for all new shards"
    write(client, "b", rows=5)
    second = tick(repository, "shard_discovery", instance, given, first.cursor)
    assert [event.partition for event in second.asset_events] == ["b"]
    batches = second.asset_events[0].metadata["batches"].value
    assert batches == client.census("b").batches


def test_debts_of_all_shards_are_one_run_and_are_asked_for_once(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    for name in ("a", "b"):
        write(client, name, batches=6, rows=5)
    write(client, "tidy", batches=1, rows=5)
    first = tick(repository, "compaction_debt", instance, given)
    assert first.run_requests is not None
    (request,) = first.run_requests
    assert request.run_config["ops"]["compaction_of_shards"]["config"]["shards"] == ["a", "b"]
    assert set(json.loads(first.cursor or "")["asked"]) == {"a", "b"}
    with client.open_reader("a"):
        pass  # transitions, but no data
    second = tick(repository, "compaction_debt", instance, given, first.cursor)
    assert not second.run_requests
    write(client, "a", batches=6, rows=5)
    third = tick(repository, "compaction_debt", instance, given, first.cursor)
    assert [one.run_config["ops"]["compaction_of_shards"]["config"]["shards"] for one in third.run_requests or ()] == [
        ["a"]
    ]


def test_debts_are_what_the_settings_say(client: persist.Client, folder: Path, instance: dg.DagsterInstance) -> None:
    write(client, "a", batches=1, rows=50)
    write(client, "a", batches=1, rows=5)
    for weight, indebted in ((0.5, []), (1e9, [["a"]])):
        settings = {**SMALL, "compaction_weight": weight}
        repository = build_definitions(Settings(location=f"file:{folder}", config=settings)).get_repository_def()
        given = Persist(location=f"file:{folder}", config=settings)
        data = tick(repository, "compaction_debt", instance, given)
        asked = [one.run_config["ops"]["compaction_of_shards"]["config"]["shards"] for one in data.run_requests or ()]
        assert asked == indebted
        given.teardown_after_execution(dg.build_init_resource_context())


def test_debts_wait_while_a_compaction_is_queued(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> None:
    write(client, "a", batches=6, rows=5)
    job = repository.get_job("compaction")
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    data = tick(repository, "compaction_debt", instance, given)
    assert not data.run_requests
    assert "queued or running" in str(data.skip_message)  # type: ignore[attr-defined]


def test_every_schedule_requests_a_valid_run(repository: dg.RepositoryDefinition, instance: dg.DagsterInstance) -> None:
    assert {one.name for one in repository.schedule_defs} == {
        f"{duty.name}_schedule" for duty in DUTIES if duty.schedule
    }
    for schedule in repository.schedule_defs:
        at = dt.datetime(2026, 1, 4, 3, 41, tzinfo=dt.UTC)
        with dg.build_schedule_context(instance=instance, scheduled_execution_time=at) as context:
            data = schedule.evaluate_tick(context)
        assert len(data.run_requests or ()) == 1
        job = repository.get_job(schedule.job_name)
        assert dg.validate_run_config(job, (data.run_requests or [])[0].run_config)
