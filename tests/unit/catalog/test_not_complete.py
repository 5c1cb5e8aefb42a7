"""The contents as of a time are the same for ever: no reader of any carrier answers for a time that is not complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import persist_lib as persist
from persist_lib.client import Client
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
Rows = list[tuple[int, str]]


class Answer(NamedTuple):
    as_of: int
    rows: Rows


class Carrier(NamedTuple):
    """How a table is made on a carrier, how a row is added to it now, and how it is read."""

    make: Callable[[Client], object]
    add: Callable[[Client, int], object]
    read: Callable[[Client, int | None], Any]


def rows_of(snapshot: Any) -> Answer:
    rows = sorted((row["id"], row["word"]) for row in snapshot.to_arrow().to_pylist())
    return Answer(snapshot.as_of, rows)


def a_shard() -> Carrier:
    def add(client: Client, n: int) -> None:
        with client.open_writer("s", SCHEMA) as write:
            write.append_now([{"id": n, "word": "w"}])

    def read(client: Client, as_of: int | None) -> Any:
        with client.open_reader("s") as reader, reader.snapshot(as_of, timeout=0.001) as snapshot:
            return rows_of(snapshot)

    return Carrier(lambda client: client.open_writer("s", SCHEMA).close(), add, read)


def a_collection(shards: int) -> Carrier:
    def add(client: Client, n: int) -> None:
        with client.controller() as controller, controller.open_writer("c") as write:
            write.append_now([{"id": n, "word": "w"}])

    def read(client: Client, as_of: int | None) -> Any:
        with client.controller() as controller, controller.open_reader("c") as reader:
            return rows_of(reader.snapshot(as_of, timeout=0.001))

    def make(client: Client) -> None:
        client.controller().create("c", SCHEMA, shards=shards, mode="compare_and_append")

    return Carrier(make, add, read)


def a_table(mode: Any, shards: int = 1) -> Carrier:
    def make(client: Client) -> None:
        tables = client.controller().tables()
        tables.create("t", SCHEMA, mode=mode, shards=shards)
        tables.create("beside", SCHEMA)

    def add(client: Client, n: int) -> None:
        with client.controller() as controller, controller.tables() as tables:
            if n % 2:
                tables.insert("beside", [{"id": n, "word": "w"}])
            tables.insert("t", [{"id": n, "word": "w"}])
            tables.insert("beside", [{"id": -n, "word": "w"}])  # so that this one is behind its timeline

    def read(client: Client, as_of: int | None) -> Any:
        with client.controller() as controller, controller.tables() as tables:
            return rows_of(tables.read("t", as_of))

    return Carrier(make, add, read)


CARRIERS = {
    "shard": a_shard(), "collection of 1": a_collection(1), "collection of 3": a_collection(3),
    "direct": a_table("yolo"), "direct of 3": a_table("yolo", 3), "wal": a_table("wal"),
}  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


@pytest.mark.parametrize("read_only", [True, False], ids=["read only", "writes"])
@pytest.mark.parametrize("carrier", list(CARRIERS))
def test_what_was_read_as_of_a_time_is_read_as_of_it_for_ever(world: World, carrier: str, read_only: bool) -> None:
    one, writer = CARRIERS[carrier], world.client()
    one.make(writer)
    told: dict[int, Rows] = {}

    def look(as_of: int | None) -> bool:
        reader = world.client(read_only=read_only)
        error, found = None, Answer(-1, [])
        try:
            found = one.read(reader, as_of)
        except persist.NotComplete as raised:
            error = raised
        if error is not None:
            assert as_of == error.as_of, "it says what was asked for"
            assert error.upper <= persist.at(error.as_of)
            return False
        assert as_of in (None, found.as_of)
        if found.as_of >= 0:
            assert told.setdefault(found.as_of, found.rows) == found.rows
        else:
            assert found.rows == []
        return True

    assert look(None), "a new table is empty, and can be read"
    for n in range(1, 5):
        now = world.clock() // 1_000_000
        looks = [look(as_of) for as_of in (None, now, now + 1, now + 700, None)]
        assert looks[0]
        assert looks[-1]
        assert not looks[3], "a time to come"
        one.add(writer, n)
        for as_of in list(told):
            assert look(as_of)
        if n % 2:
            world.clock.advance(1)
    assert look(None)
    assert {len(rows) for rows in told.values()} >= {1, 4}
