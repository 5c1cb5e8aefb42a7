"""Tending ends the leases of readers and writers that died, and names who holds back what cannot be given up."""

from __future__ import annotations

from persist_lib.catalog import Controller
from persist_lib.frontier import at
from tests.worlds import SCHEMA, World, row


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
