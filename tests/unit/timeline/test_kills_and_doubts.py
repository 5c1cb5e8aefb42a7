"""A process that dies between any two requests, answers that get lost: all of a transaction is there, or nothing."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.catalog.records import TableMode
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate
from persist_lib.timeline import Tables
from tests.circles import by_day
from tests.unit.timeline.banks import UNIQUE, read, rows
from tests.worlds import DiesAt, Killed, World

BEFORE = {1: 50, 2: 50}
AFTER = {1: 40, 2: 60}


def world_with(mode: TableMode, shards: int = 2) -> tuple[World, Tables]:
    world = World()
    tables = world.client(persist.Config(inline_bytes=0)).controller().tables()
    tables.create("a", UNIQUE, mode=mode, shards=shards)
    tables.create("b", UNIQUE)
    tables.insert("a", rows((1, 50)))
    tables.insert("b", rows((2, 50)))
    return world, tables


def total(tables: Tables, as_of: int | None = None) -> dict[int, int]:
    as_of = tables.read_time() if as_of is None else as_of
    return read(tables, "a", as_of) | read(tables, "b", as_of)


def move(tables: Tables) -> None:
    with tables.transaction() as t:
        t.update("a", {"cents": 40}, keys=[1])
        t.upsert("b", rows((2, 60)))


def all_of_it(tables: Tables) -> None:
    """A commit, an applier, giving up what is applied, and a read."""
    move(tables)
    tables.apply()
    tables.tidy()
    total(tables)


def test_a_process_that_dies_between_any_two_requests_leaves_all_or_nothing() -> None:
    world, _ = world_with("wal")
    plan = DiesAt(1 << 30)
    tables = world.client(persist.Config(inline_bytes=0), plan=plan).controller().tables()
    plan.is_armed = True
    all_of_it(tables)
    count = plan.seen
    outcomes = []
    for number in by_day(range(1, count + 1), 4):
        world, others = world_with("wal")
        plan = DiesAt(number)
        tables = world.client(persist.Config(inline_bytes=0), plan=plan).controller().tables()
        plan.is_armed = True
        with pytest.raises(Killed):
            all_of_it(tables)
        found = total(others)
        assert found in (BEFORE, AFTER), f"killed at request {number} of {count}"
        outcomes.append(found == AFTER)
        fresh = world.client().controller().tables()
        fresh.apply()
        assert total(fresh) == found
        world.clock.advance(10 * 60)  # the leases of the dead end
        while fresh.tidy():
            pass
        assert total(fresh) == total(others) == found
        fresh.upsert("a", rows((1, 7)))
        assert total(others) == {**found, 1: 7}
    assert outcomes == sorted(outcomes), "once it is committed it stays"
    assert (outcomes[0], outcomes[-1]) == (False, True)


def test_after_an_interrupt_in_a_commit_the_token_of_the_transaction_tells() -> None:
    class Interrupted:
        is_armed = False

        def decide(self, operation: Operation) -> Fate:
            if self.is_armed and operation.kind == "compare_and_set":
                raise KeyboardInterrupt
            return Fate()

    world, others = world_with("wal")
    plan = Interrupted()
    tables = world.client(plan=plan).controller().tables()
    tables.upsert("a", rows((1, 51)))
    t = tables.transaction()
    t.upsert("a", rows((1, 52)))
    plan.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        t.commit()
    plan.is_armed = False
    assert t.token
    assert others.outcome(t.token) is None
    assert read(others, "a") == read(tables, "a") == {1: 51}
    with tables.transaction() as again:
        again.upsert("a", rows((1, 52)))
    assert others.outcome(again.token) == again.time


@pytest.mark.parametrize("mode", ["yolo", "wal"])
def test_clocks_that_differ_and_go_back_do_not_turn_times_around(mode: TableMode) -> None:
    """The Consensus store's clock gives the times; when it goes back, the timeline's upper does."""
    world, tables = world_with(mode)
    first = tables.upsert("a", rows((1, 1)))
    world.clock.advance(-3600)
    second = tables.upsert("b", rows((2, 2)))
    world.clock.advance(7200)
    third = tables.upsert("a", rows((1, 3)))
    assert first.time is not None
    assert second.time == first.time + 1
    assert third.time is not None
    assert third.time > second.time + 3_000_000
    assert total(tables, second.time) == {1: 1, 2: 2}


def test_a_process_whose_leases_ended_reads_right_and_its_transaction_is_refused() -> None:
    world, others = world_with("wal")
    tables = world.client().controller().tables()
    assert total(tables) == BEFORE
    t = tables.transaction()
    t.update("a", {"cents": 1}, keys=[1])
    tables._timelines.line("default").reset()  # as if it had been away for longer than its leases
    for number in range(3):
        others.upsert("b", rows((2, number)))
        others.apply()
        others.tidy()
        others.client.heartbeat()  # its own readers let go of what they have read
    assert total(tables) == {1: 50, 2: 2}
    with pytest.raises(persist.WriteConflict, match="lease"):
        t.commit()
    assert total(others) == {1: 50, 2: 2}
