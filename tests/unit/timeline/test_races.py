"""A statement that loses a race: it takes what the other one did into account, and loses nothing of it.

A process that dies between any two requests, answers that get lost: all of a transaction is there, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog.records import TableMode
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Rival
from persist_lib.timeline import Tables
from tests.circles import by_day
from tests.unit.timeline.banks import UNIQUE, read, rows
from tests.worlds import DiesAt, Killed, World

More = pc.add(pc.field("cents"), 1)


def racing(mode: TableMode) -> tuple[Rival, Tables, Tables]:
    """A rival, the tables that it races against, and its own."""
    world = World()
    others = world.client().controller().tables()
    others.create("a", UNIQUE, mode=mode, shards=2)
    others.insert("a", rows((1, 10), (2, 20)))
    rival = Rival(world.inner.consensus)
    tables = world.client(rival=rival).controller().tables()
    tables.upsert("a", rows((2, 21)))  # its writers are registered
    others.upsert("a", rows((2, 20)))
    tables.read("a")
    return rival, tables, others


@pytest.mark.parametrize("mode", ["yolo", "wal"])
@pytest.mark.parametrize(
    ("theirs", "mine", "after"),
    [
        (lambda t: t.update("a", {"cents": More}, [1]), lambda t: t.update("a", {"cents": More}, [1]), {1: 12, 2: 20}),
        (
            lambda t: t.insert("a", rows((3, 30))),
            lambda t: t.update("a", {"cents": 0}, filter=pc.field("cents") >= 20),
            {1: 10, 2: 0, 3: 0},
        ),
        (
            lambda t: t.update("a", {"cents": 1}, [2]),
            lambda t: t.delete("a", filter=pc.field("cents") >= 20),
            {1: 10, 2: 1},
        ),
        (lambda t: t.delete("a", [1]), lambda t: t.update("a", {"cents": More}), {2: 21}),
    ],
)
def test_what_the_other_did_is_seen(
    mode: TableMode, theirs: Callable[[Tables], object], mine: Callable[[Tables], object], after: dict[int, int]
) -> None:
    rival, tables, others = racing(mode)
    rival.before_next(lambda: theirs(others))
    mine(tables)
    assert rival.waiting == 0
    assert read(tables, "a") == read(others, "a") == after


def test_a_transaction_goes_on_where_others_changed_other_keys() -> None:
    rival, tables, others = racing("wal")
    t = tables.transaction()
    t.upsert("a", rows((1, 11)))
    rival.before_next(lambda: others.upsert("a", rows((2, 22))))
    t.commit()
    assert read(others, "a") == {1: 11, 2: 22}
    t = tables.transaction()
    t.upsert("a", rows((1, 12)))
    rival.before_next(lambda: others.upsert("a", rows((1, 13))))
    with pytest.raises(persist.WriteConflict):
        t.commit()
    assert read(others, "a") == {1: 13, 2: 22}


def test_in_yolo_mode_two_statements_share_a_time_only_where_no_read_came_in_between() -> None:
    """What was read stays: a read moves the tables that lag, so that a statement at work then gets a later time."""
    for reads in (False, True):
        world = World()
        others = world.client().controller().tables()
        for name in ("a", "b"):
            others.create(name, UNIQUE, mode="yolo")
            others.insert(name, rows((1, 1)))
        rival = Rival(world.inner.consensus)
        tables = world.client(rival=rival).controller().tables()
        tables.upsert("b", rows((1, 2)))  # its writer is registered
        found: list[tuple[int, dict[int, int]]] = []
        first: list[int] = []

        def theirs(others: Tables = others, first: list[int] = first) -> None:
            first.append(others.upsert("a", rows((1, 3))).time or 0)

        def a_read(others: Tables = others, found: list[tuple[int, dict[int, int]]] = found) -> None:
            time = others.read_time()
            found.append(
                (time, read(others, "a", time) | {-id_: cents for id_, cents in read(others, "b", time).items()})
            )

        rival.before_next(lambda theirs=theirs, a_read=a_read, reads=reads: (theirs(), a_read() if reads else None))  # type: ignore[misc]
        time = tables.upsert("b", rows((1, 4))).time or 0
        assert rival.waiting == 0
        assert (time == first[0], time > first[0]) == (not reads, reads)
        for as_of, contents in found:
            assert contents == {1: 3, -1: 2}
            assert (
                read(others, "a", as_of) | {-id_: cents for id_, cents in read(others, "b", as_of).items()} == contents
            )
        now = others.read_time()
        assert (read(others, "a", now), read(others, "b", now)) == ({1: 3}, {1: 4})
        assert (others.upsert("a", rows((1, 5))).time or 0) > time, "what begins after both has a later time than both"


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
