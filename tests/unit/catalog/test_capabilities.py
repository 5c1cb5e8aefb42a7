"""Capabilities: who may read from when on, who holds history, who writes. Listed, acquired, downgraded and dropped.

Tending ends the leases of readers and writers that died, and names who holds back what cannot be given up.
"""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.frontier import at
from tests.renditions import Told, create, write
from tests.worlds import SCHEMA, World, row


def listed(controller: Controller, kind: str) -> list[tuple[str, str, object]]:
    """Owner, id and since of each capability of a kind, but for the layer's own hold."""
    found = controller.capabilities("c")
    return [(one.owner, one.id, one.since) for one in found if one.kind == kind and one.id != "collection"]


def test_to_read_is_acquired_downgraded_and_dropped(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(4))
    looking = world.client(read_only=True).controller()
    assert listed(looking, "read") == []
    with controller.open_reader("c", owner="the report") as reader:
        ((owner, id_, since),) = listed(looking, "read")
        assert (owner, since) == ("the report", at(0))
        reader.downgrade_since(2)
        assert listed(looking, "read") == [("the report", id_, at(2))]
        controller.alter("c", retention=0)
        controller.tend("c")
        assert reader.snapshot(2).to_arrow().num_rows == sum(1 for n in told.contents(2).values() if n)
        with pytest.raises(persist.SinceViolation):
            reader.snapshot(1)
    assert listed(looking, "read") == []


def test_a_hold_is_acquired_downgraded_and_dropped(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(4))
    controller.set_hold("c", "audit", 1)
    assert listed(controller, "hold") == [("", "audit", at(1))]
    controller.set_hold("c", "audit", 2)
    assert listed(controller, "hold") == [("", "audit", at(2))]
    with pytest.raises(persist.SinceViolation):
        controller.set_hold("c", "audit", 1)
    controller.release_hold("c", "audit")
    assert listed(controller, "hold") == []
    with pytest.raises(persist.HoldConflict):
        controller.release_hold("c", "audit")


def test_to_write_is_acquired_and_dropped(world: World) -> None:
    controller = create(world.client(), shards=2)
    with controller.open_writer("c", owner="the loader") as writer, controller.open_writer("c") as other:
        writer.upsert([{"id": 1, "word": "a"}])
        shards = controller.describe("c").active.shards
        found = [(one.shard, one.owner) for one in controller.capabilities("c") if one.kind == "write"]
        assert sorted(found) == sorted((shard, "the loader") for shard in shards)
        other.upsert([{"id": 2, "word": "b"}])
        writer.upsert([{"id": 3, "word": "c"}])
        found = [(one.shard, one.owner) for one in controller.capabilities("c") if one.kind == "write"]
        assert sorted(found) == sorted((shard, owner) for shard in shards for owner in ("", "the loader"))
        with writer.stage() as stage:
            stage.write([{"id": 4, "word": "d"}])
            assert sum(owner == "the loader" for owner, _, _ in listed(controller, "write")) == 2 * len(shards)
    with pytest.raises(persist.InvalidUsage, match="owner"):
        controller.open_writer("c", owner=7)  # type: ignore[arg-type]
    assert listed(controller, "write") == []


def test_what_is_being_made_has_none_yet(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker died before its shards were there."""
    controller = create(world.client())
    with monkeypatch.context() as patch:
        patch.setattr("persist_lib.catalog.effects.make_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            controller.make_rendition("c")
    assert listed(world.client().controller(), "write") == []


def made(world: World) -> Controller:
    """A collection of ten times, of which the newest is kept."""
    controller = world.client().controller()
    controller.create("c", SCHEMA, shards=2, mode="compare_and_append", retention=0)
    with controller.open_writer("c") as write:
        write.compare_and_append([row(1, time=time) for time in range(10)], 0, 10)
    return controller


def test_tending_alone_ends_a_dead_readers_lease_and_history_goes(world: World) -> None:
    controller = made(world)
    dead = world.client().controller().open_reader("c", owner="dashboard")
    dead.snapshot(9)
    waits = controller.tend().waiting
    assert waits
    assert all("dashboard" in step.reason for step in waits)
    assert controller.describe("c").since == at(0)
    world.clock.advance(3600)
    done = controller.tend()
    assert {step.action for step in done.steps} >= {"expire", "move hold"}
    assert not done.waiting
    assert controller.describe("c").since == at(9)
    assert controller.tend().steps == ()


def test_what_waits_names_a_hold(world: World) -> None:
    controller = made(world)
    controller.set_hold("c", "audit", 3)
    controller.tend()
    (waits,) = controller.tend().waiting
    assert "hold audit" in waits.reason
    assert controller.describe("c").since == at(3)


def test_a_dropped_collection_does_not_wait_for_readers_that_died(world: World) -> None:
    controller = made(world)
    world.client().controller().open_reader("c", owner="dashboard").snapshot(9)
    done = controller.drop("c")
    assert done.waiting
    assert any("dashboard" in step.reason for step in done.waiting)
    world.clock.advance(3600)
    assert not controller.tend().waiting
    assert not controller.catalog.fetch().collections
