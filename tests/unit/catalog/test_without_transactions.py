"""Collections where Consensus has no transactions (S3 alone): what works, and what is refused clearly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import persist_lib as persist
from persist_lib.frontier import at
from tests import servers
from tests.renditions import Listening, Told, check, write
from tests.worlds import SCHEMA, World, row, updates

pytestmark = pytest.mark.slow


@pytest.fixture
def world() -> Iterator[World]:
    servers.use_test_credentials()
    name = f"t{os.urandom(8).hex()}"
    server = servers.s3_server()
    made = World(server.location(name), 0, server.location(name, "s3+cas"))
    yield made
    made.close()


@pytest.mark.parametrize(("mode", "shards"), [("append", 3), ("compare_and_append", 1)])
def test_definite_appends_and_one_shard_work_across_handovers(world: World, mode: str, shards: int) -> None:
    told, controller = Told(), world.client().controller()
    controller.create("c", SCHEMA, shards=shards, mode=mode)  # type: ignore[arg-type]
    write(controller, told, range(3))
    with controller.open_reader("c") as reader:
        listening = Listening(reader, 0, told)
        controller.make_rendition("c", shards=shards, copy=True)
        controller.copy_rendition("c", 2)
        start = controller.hand_over("c", 2)
        controller.copy_rendition("c", 2, to_end=True)
        told.copy(2, 1)
        told.hand_over(2, start)
        write(controller, told, range(3, 5))
        if mode == "compare_and_append":
            with controller.open_writer("c") as writer:
                assert writer.upsert([{"id": 999, "word": "x"}]).time == 5
                with pytest.raises(persist.InvalidUsage, match="store with transactions"):
                    writer.compare_and_append([row(1, "p", 6)], 6, 7, producer=("p", 0))
                with pytest.raises(persist.UpperMismatch):
                    writer.compare_and_append([], 10**9, 10**9 + 1)
            told.last.append(updates([row(999, "x", 5)]), at(5), at(6))
        listening.poll()
    assert controller.describe("c").promised == told.last.upper, "what was refused promised nothing"
    check(controller, told, 0, (told.last.upper.time or 1) - 1)


def test_a_table_with_a_wal_works_and_what_changes_several_shards_is_refused_before_it_is_decided(world: World) -> None:
    tables = world.client().controller().tables()
    schema = persist.Schema({"id": "int64 not null"}, {"cents": "int64"}, unique=True)
    for name in ("a", "b"):
        tables.create(name, schema, mode="wal", shards=2)
    with tables.transaction() as t:
        t.insert("a", [{"id": n, "cents": n} for n in range(5)])
        t.insert("b", [{"id": 1, "cents": 1}])
    tables.controller.tend()
    assert (len(tables.read("a").to_pylist()), tables.lag().rows) == (5, 0)
    tables.controller.make_rendition("a", shards=3, copy=True)
    tables.controller.copy_rendition("a", 2)
    for dry_run in (True, False):
        with pytest.raises(persist.InvalidUsage, match=r"table 'a' .* WAL.*transactions.*Nothing was changed"):
            tables.controller.hand_over("a", 2, dry_run=dry_run)
    assert tables.controller.describe("a").pending == ()
    tables.upsert("a", [{"id": 1, "cents": 9}])
    tables.controller.drop_rendition("a", 2)
    wider = persist.Schema(schema.key, {"cents": "int64", "x": "int64"}, unique=True, times="ms")
    for dry_run in (True, False):
        with pytest.raises(persist.InvalidUsage, match=r"table 'a' .* an evolution .*transactions"):
            tables.controller.evolve("a", wider, dry_run=dry_run)
    assert tables.controller.describe("a").schema == tables.controller.describe("b").schema
    tables.drop("a")
    assert tables.list() == ["b"]


def test_several_shards_that_exclude_writers_are_refused(world: World) -> None:
    controller = world.client().controller()
    with pytest.raises(persist.InvalidUsage, match="transactions"):
        controller.create("c", SCHEMA, shards=2, mode="compare_and_append")
    controller.create("c", SCHEMA, mode="compare_and_append")
    with pytest.raises(persist.InvalidUsage, match="transactions"):
        controller.make_rendition("c", shards=2, copy=True)
    assert [one.number for one in controller.describe("c").renditions] == [1]
