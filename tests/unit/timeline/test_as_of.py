"""Reads of tables as of times that nothing was written at: who completes them, and what the others get."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.timeline import Tables
from tests.unit.timeline.banks import UNIQUE, rows
from tests.worlds import World

MODES = ["yolo", "wal"]


def made(world: World, mode: Any) -> tuple[Tables, int]:
    """A table with one row, an hour ago, and when that was."""
    tables = world.client().controller().tables()
    tables.create("t", UNIQUE, mode=mode)
    time = tables.insert("t", rows((1, 5))).time or 0
    world.clock.advance(3600)
    return tables, time


def uppers(tables: Tables) -> dict[str, int]:
    client = tables.client
    return {name: client.inspect(name).state.upper.time or 0 for name in client.shards()}


@pytest.mark.parametrize("mode", MODES)
def test_others_get_that_it_is_not_complete_at_once_and_the_newest_only_if_they_ask_for_it(
    world: World, mode: str
) -> None:
    tables, time = made(world, mode)
    before, started = uppers(tables), world.clock()
    looking = world.client(read_only=True).controller().tables()
    for reader, as_of in ((looking, "1 minute ago"), (looking, "in a year"), (tables, "in a year")):
        asked: Any = as_of if as_of != "in a year" else world.clock() // 1_000_000 + 31_536_000_000
        with pytest.raises(persist.NotComplete, match="newest=True") as told:
            reader.read("t", asked)
        assert told.value.upper == persist.at(time + 1)
        found = reader.read("t", asked, newest=True)
        assert (found.as_of, found.to_pylist()) == (time, [{"id": 1, "cents": 5}])
        assert world.clock() == started
        with pytest.raises(persist.NotComplete, match="not complete yet"):
            reader.read("t", asked, timeout=2)
        assert world.clock() - started >= 1_999_000_000, "it waits for as long as it was told to"
        started = world.clock()
    assert uppers(tables) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_time_that_is_kept_is_read_although_the_readers_of_the_shards_let_go_of_it(world: World, mode: str) -> None:
    """Leases move one by one: those of a table's shards may be beyond the table's own, by which its since is said."""
    tables, time = made(world, mode)
    later = tables.upsert("t", rows((1, 6))).time or 0
    tables.apply()
    assert tables.read("t").to_pylist() == [{"id": 1, "cents": 6}]
    view = tables._timelines.line("default").view("t")
    for handle in view.handles(view.timeline().last):
        handle.downgrade_since(later)
    assert view.reader.since <= persist.at(time)
    assert tables.read("t", time).to_pylist() == [{"id": 1, "cents": 5}]
    assert tables.read("t", later).to_pylist() == [{"id": 1, "cents": 6}]
