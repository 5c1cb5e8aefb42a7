"""A statement that loses a race: it takes what the other one did into account, and loses nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog.records import TableMode
from persist_lib.testing import Rival
from persist_lib.timeline import Tables
from tests.unit.timeline.banks import UNIQUE, read, rows
from tests.worlds import World

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
