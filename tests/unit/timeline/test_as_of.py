"""Reads of tables as of times that nothing was written at: who completes them, and what the others get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.timeline import Tables
from tests.unit.timeline.banks import UNIQUE, rows
from tests.worlds import World

MODES = ["yolo", "wal"]


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


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
def test_a_client_that_may_write_completes_what_the_stores_clock_has_passed_with_one_commit(
    world: World, mode: str
) -> None:
    tables, time = made(world, mode)
    before, started = uppers(tables), world.clock()
    assert tables.read("t", "1 minute ago").to_pylist() == [{"id": 1, "cents": 5}]
    now = world.clock() // 1_000_000
    moved = {name: upper for name, upper in uppers(tables).items() if upper != before[name]}
    assert set(moved.values()) == {now + 1}, "up to the store's clock, and not further"
    if mode == "wal":
        assert len(moved) == 1, "the WAL, and never a table"
    world.requests.clear()
    for ago in ("59 minutes ago", "1 hour ago", "30 s ago", "now"):
        assert tables.read("t", ago).as_of >= time
    assert world.count("compare_and_set", "compare_and_set_many") == 0, "one commit serves an hour of questions"
    assert world.clock() == started, "it waits for nothing"
    assert (tables.upsert("t", rows((1, 6))).time or 0) == now + 1


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
def test_a_waiting_reader_gets_it_when_another_client_writes(world: World, mode: str) -> None:
    tables, _ = made(world, mode)
    looking = world.client(read_only=True).controller().tables()
    acting = world.clock.sleep
    asked = world.clock() // 1_000_000 + 10
    wrote: list[int] = []

    def sleep(seconds: float) -> None:
        acting(seconds)
        if not wrote:
            wrote.append(tables.upsert("t", rows((2, 7))).time or 0)

    object.__setattr__(looking.client.runtime, "sleep", sleep)
    found = looking.read("t", asked, timeout=60)
    assert found.as_of == asked
    assert len(found.to_pylist()) == (2 if wrote[0] <= asked else 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_table_is_empty_with_its_columns(world: World, mode: Any) -> None:
    tables = world.client().controller().tables()
    tables.create("t", UNIQUE, mode=mode, shards=2)
    for client in (world.client(), world.client(read_only=True)):
        found = client.controller().tables().read("t", columns=["cents"])
        assert found.to_arrow().num_rows == 0
        assert found.schema.names == ["cents"]
    with world.client().controller().open_reader("t") as reader:
        assert reader.snapshot().to_arrow().schema.names == ["id", "cents"]
        assert reader.changes(None).to_arrow().num_rows == 0


@pytest.mark.parametrize("what", ["shard", "collection"])
def test_a_new_shard_or_collection_is_empty_with_its_columns(world: World, what: str) -> None:
    client = world.client()
    client.open_writer("s", UNIQUE).close()
    client.controller().create("c", UNIQUE, shards=2)
    for one in (client, world.client(read_only=True)):
        with one.open_reader("s") if what == "shard" else one.controller().open_reader("c") as reader:
            snapshot = reader.snapshot(filter=some_filter(), columns=["cents"])
            assert (snapshot.as_of, snapshot.to_pylist(), snapshot.size) == (-1, [], 0)
            assert snapshot.schema.names == ["cents"]
            assert reader.snapshot(keys=[1]).to_arrow().num_rows == 0
            assert [split.to_arrow().num_rows for split in reader.snapshot().splits(3)] in ([], [0])
            assert list(reader.snapshot().to_polars()["id"]) == []
            changes = reader.changes(None)
            assert (changes.from_, changes.to, changes.to_arrow().num_rows) == (None, -1, 0)


def some_filter() -> Any:
    return pc.field("cents") > 1
