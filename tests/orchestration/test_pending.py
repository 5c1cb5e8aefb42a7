"""Pending areas in Dagster: absorbed where something is due, and red where writers disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.location.api import Newest
from persist_lib.location.open import open_location
from tests.orchestration.runs import execute, ticked, why
from tests.unit.pending_area.areas import said
from tests.worlds import SCHEMA

pytestmark = pytest.mark.dagster
ON_DISK = True
KEY = dg.AssetKey("pending")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with persist.open(tmp_path / "data") as client:
        for name in ("readings", "others"):
            pending_area.create(client, name, SCHEMA).close()
    return tmp_path / "data"


def put(folder: Path, name: str, writer: str, lower: int, upper: int, word: str = "w") -> None:
    with pending_area.Writer(folder, name, writer, SCHEMA) as write:
        write.put(said(lower, upper, word), lower, upper)


def run(folder: Path, instance: dg.DagsterInstance, **config: object) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, "pending", "absorption_of_pending", config, config={})


def tick(folder: Path, instance: dg.DagsterInstance) -> Any:
    return ticked(folder, instance, "pending_schedule", config={})


def test_what_is_due_is_absorbed_and_then_nothing_is_due(folder: Path, instance: dg.DagsterInstance):
    assert "nothing" in tick(folder, instance).skip_message
    put(folder, "readings", "edge-7", 0, 3)
    put(folder, "others", "edge-7", 0, 3)
    assert len(tick(folder, instance).run_requests) == 1
    dry = run(folder, instance, dry_run=True)
    assert {event.asset_key for event in dry.get_asset_observation_events()} == {KEY}
    assert dry.get_asset_materialization_events() == []
    done = run(folder, instance)
    assert done.success
    events = done.get_asset_materialization_events()
    assert [event.partition for event in events] == ["others", "readings"]
    assert instance.get_dynamic_partitions("persist_pending") == ["others", "readings"]
    metadata = events[0].materialization.metadata
    assert (metadata["batches"].value, metadata["updates"].value, metadata["left"].value) == (1, 3, 0)
    assert "nothing" in tick(folder, instance).skip_message, "what is garbage already is not due"


def test_a_damaged_shard_is_named_and_the_others_are_absorbed(folder: Path, instance: dg.DagsterInstance):
    put(folder, "others", "edge-7", 0, 3)
    put(folder, "readings", "edge-7", 0, 3)
    with open_location(f"file:{folder}") as location:
        newest = location.consensus.head("others")
        assert newest is not None
        location.consensus.compare_and_set("others", Newest(newest.seqno), b"damaged")
    assert len(tick(folder, instance).run_requests) == 1
    done = run(folder, instance)
    assert not done.success
    assert [event.partition for event in done.get_asset_materialization_events()] == ["readings"]
    assert "1 of 2 collections: others (" in why(done)
    assert len(tick(folder, instance).run_requests) == 1, "red until it is mended"


def test_writers_that_disagree_fail_the_run_and_the_others_are_absorbed(folder: Path, instance: dg.DagsterInstance):
    put(folder, "readings", "edge-7", 0, 3)
    put(folder, "readings", "edge-8", 0, 3, word="x")
    put(folder, "others", "edge-7", 0, 3)
    done = run(folder, instance)
    assert not done.success
    found = {one.partition: one.materialization.metadata for one in done.get_asset_materialization_events()}
    assert {name: metadata["in_dispute"].value for name, metadata in found.items()} == {"others": 0, "readings": 1}
    assert "run `persist pending choose readings`" in why(done)
    assert len(tick(folder, instance).run_requests) == 1
    with persist.open(folder) as client:
        pending_area.choose(client, "readings", "edge-8")
    assert run(folder, instance).success
    assert "nothing" in tick(folder, instance).skip_message


def test_what_is_pending_waits_for_a_person_only_where_a_run_says_so(folder: Path, instance: dg.DagsterInstance):
    put(folder, "others", "edge-7", 0, 3)
    put(folder, "readings", "edge-7", 0, 3)
    planned = run(folder, instance, apply="by a person")
    assert planned.success
    (made,) = planned.get_asset_materialization_events()
    assert made.asset_key == dg.AssetKey("plans")
    metadata = made.materialization.metadata
    assert (metadata["shards"].value, metadata["steps"].value) == (2, 2)
    assert metadata["bytes"].value
    with persist.open(folder) as client:
        assert client.inspect("readings").state.upper == persist.at(0), "nothing has happened"
    put(folder, "others", "edge-9", 3, 6)
    chosen = {"run_id": planned.run_id}
    applied = execute(folder, instance, "apply", "applying_of_plan", chosen, config={}, apply="by a person")
    assert not applied.success, "others moved"
    assert [(one.asset_key, one.partition) for one in applied.get_asset_materialization_events()] == [(KEY, "readings")]
    with persist.open(folder) as client:
        uppers = [client.inspect(name).state.upper for name in ("readings", "others")]
    assert uppers == [persist.at(3), persist.at(0)]
    assert run(folder, instance).success, "and by itself it waits for none"
    assert not run(folder, instance, apply="later").success
