"""Batches and streams of collections, planned and read as Spark does it but without a JVM, across handovers."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.shard.admin import create_if_missing
from persist_lib.spark.source import PersistSource
from tests.unit.spark.test_streaming_reads import Sink
from tests.unit.spark.worlds import SCHEMA, TINY, Data, Stream, added, drawn, load, read, rows, source

WIDE = persist.Schema(key={"a": "int64 not null", "b": "string"}, value={"v": "int64", "more": "string"})


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[persist.Client]:
    monkeypatch.setenv("PERSIST_CONFIG", json.dumps(TINY))
    with persist.open(f"file:{tmp_path}", config=persist.Config(**TINY)) as opened:
        yield opened


class Told:
    """A collection, and an account of every update ever written to each of its renditions."""

    def __init__(self, client: persist.Client, shards: int = 3) -> None:
        self.controller: Controller = client.controller()
        self.controller.create("orders", SCHEMA, shards=shards, mode="compare_and_append")
        self.renditions: dict[int, list[tuple[Data, int, int]]] = {1: []}
        self.starts, self.upper, self.schema = [(0, 1)], 0, SCHEMA

    def active(self, time: int) -> int:
        return next(number for start, number in reversed(self.starts) if start <= time)

    def append(self, rng: random.Random, count: int, *, times: int = 1, negative: bool = True) -> None:
        fresh, table = drawn(rng, self.upper, count, times=times, negative=negative)
        if self.schema == WIDE:
            table = table.append_column("more", pa.nulls(len(fresh), pa.string()))
        with self.controller.open_writer("orders") as writer:
            writer.compare_and_append(table, self.upper, self.upper + times)
        self.renditions[self.starts[-1][1]] += fresh
        self.upper += times

    def hand_over(self, shards: int, *, schema: persist.Schema | None = None, drop: int | None = None) -> None:
        """To a copy with other shards, maybe one column more, maybe without the rows whose `a` is `drop`."""

        def transform(table: pa.Table) -> pa.Table:
            if schema == WIDE and "more" not in table.column_names:
                table = table.append_column("more", pa.nulls(table.num_rows, pa.string()))
            kept = [a != drop for a in table.column("a").to_pylist()]
            return table.filter(pa.array(kept, pa.bool_()))

        made = self.controller.make_rendition("orders", shards=shards, schema=schema, copy=True).number
        self.controller.copy_rendition("orders", made, transform=transform)
        start = self.controller.hand_over("orders", made)
        self.controller.copy_rendition("orders", made, transform=transform, to_end=True)
        self.renditions[made] = [u for u in self.renditions[self.starts[-1][1]] if u[0][0] != drop]
        self.starts.append((start, made))
        self.schema = schema or self.schema
        assert start == self.upper

    def contents(self, as_of: int) -> Counter[Data]:
        updates = self.renditions[self.active(as_of)]
        return added((data, diff) for data, time, diff in updates if time <= as_of)

    def changes(self, after: int | None, to: int) -> Counter[tuple[Data, int]]:
        """The updates in `(after, to]`: at each time what differs from the time before."""
        found: Counter[tuple[Data, int]] = Counter()
        before: Counter[Data] = Counter() if after is None else self.contents(after)
        for time in range(0 if after is None else after + 1, to + 1):
            now = self.contents(time)
            for data in now.keys() | before.keys():
                if now[data] != before[data]:
                    found[data, time] = now[data] - before[data]
            before = now
        return found


def told(client: persist.Client, rng: random.Random) -> Told:
    """Two handovers, each with something before and after it."""
    world = Told(client, rng.randrange(1, 4))
    world.append(rng, rng.randrange(60), times=2)
    world.hand_over(rng.randrange(1, 5), drop=rng.randrange(40))
    world.append(rng, rng.randrange(1, 60), times=rng.randrange(1, 3))
    world.hand_over(rng.randrange(1, 4), schema=WIDE, drop=rng.randrange(40))
    world.append(rng, rng.randrange(1, 60))
    return world


def read_all(made: PersistSource) -> pa.Table | None:
    reader: Any = made.reader(made.schema())
    return read(reader, reader.partitions())


def contents(table: pa.Table | None) -> Any:
    return added(((a, b, v), n) for a, b, v, n in rows(table, "a", "b", "v", "_diff"))


def updates(table: pa.Table | None) -> Any:
    return added((((a, b, v), t), n) for a, b, v, t, n in rows(table, "a", "b", "v", "_time", "_diff"))


@pytest.mark.parametrize("seed", range(6))
def test_any_history_reads_as_the_account_and_the_library_say(client: persist.Client, seed: int) -> None:
    rng = random.Random(seed)
    world = told(client, rng)
    cut: dict[str, str] = rng.choice([{}, {"partition_bytes": "65536"}])
    where = {"filter": "a BETWEEN 3 AND 30 AND b <> 'yy'"}
    with world.controller.open_reader("orders") as reader:
        for as_of in range(world.upper):
            model = world.contents(as_of)
            found = load(client, None, table="orders", as_of=str(as_of), diff="true", **cut)
            assert contents(found) == model == contents(reader.snapshot(as_of, diff=True).to_arrow())
            some = load(client, None, table="orders", as_of=str(as_of), diff="true", **cut, **where)
            kept = {d: n for d, n in model.items() if 3 <= d[0] <= 30 and d[1] not in (None, "yy")}
            assert contents(some) == kept
            before = rng.randrange(-1, as_of + 1)
            after: dict[str, str] = {} if before < 0 else {"from": str(before)}
            wanted = world.changes(None if before < 0 else before, as_of)
            moved = load(client, None, table="orders", changes="true", to=str(as_of), **after, **cut)
            assert updates(moved) == wanted
            assert updates(reader.changes(None if before < 0 else before, as_of).to_arrow()) == wanted
            moved = load(client, None, table="orders", changes="true", to=str(as_of), **after, **cut, **where)
            assert updates(moved) == {
                (d, t): n for (d, t), n in wanted.items() if 3 <= d[0] <= 30 and d[1] not in (None, "yy")
            }
    assert contents(load(client, table="orders", diff="true")) == world.contents(world.upper - 1)


def test_a_filter_on_a_column_that_old_renditions_lack_is_exact(client: persist.Client) -> None:
    world = told(client, random.Random(3))
    with world.controller.open_writer("orders") as write:
        write.upsert([{"a": 100, "b": "x", "v": 1, "more": "said"}])
    for as_of in range(world.upper):
        assert (
            rows(load(client, None, table="orders", as_of=str(as_of), diff="true", filter="more = 'said'"), "a") == []
        )
        none = load(client, table="orders", as_of=str(as_of), diff="true", filter="more IS NULL", columns="a")
        total = sum(world.contents(as_of).values())
        assert sum(diff for (diff,) in rows(none, "_diff")) == total
    found = load(client, table="orders", changes="true", filter="more = 'said'", columns="a")
    assert rows(found, "a", "_time", "_diff") == [(100, world.upper, 1)]


def test_a_frame_is_of_one_time_whatever_is_handed_over_and_goes_on_without_its_lease(client: persist.Client) -> None:
    rng = random.Random(5)
    world = Told(client)
    world.append(rng, 50)
    made = source(client, diff="true")
    schema = made.schema()
    made = pickle.loads(pickle.dumps(made))  # as Spark does after it has asked for the schema
    model = world.contents(0)
    reader: Any = made.reader(schema)
    early = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    world.controller.rename("orders", "renamed")
    world.controller.rename("renamed", "orders")
    world.hand_over(2, drop=1)
    world.append(rng, 50)
    world.controller.alter("orders", retention=0)
    world.controller.tend("orders")
    assert contents(read(reader, early)) == model, "its lease keeps the old rendition"
    assert contents(read(reader, reader.partitions())) == model


def test_an_old_time_whose_columns_cannot_be_given_has_the_columns_of_then(client: persist.Client) -> None:
    controller = client.controller()
    controller.create("orders", SCHEMA, mode="compare_and_append")
    with controller.open_writer("orders") as write:
        write.compare_and_append([{"a": 1, "b": "x", "v": 1, "_time": 0}], 0, 1)
    other = persist.Schema(key={"a": "int64 not null"}, value={"w": "string"})
    made = controller.make_rendition("orders", schema=other).number
    with controller.open_writer("orders", rendition=made) as write:
        write.compare_and_append([{"a": 1, "w": "z", "_time": 1}], 0, 2)
    controller.hand_over("orders", made)
    assert rows(load(client, table="orders", as_of="0"), "a", "b", "v") == [(1, "x", 1)]
    assert rows(load(client, table="orders"), "a", "w") == [(1, "z")]
    with pytest.raises(persist.SchemaChanged):
        load(client, None, table="orders", changes="true", **{"from": "0"})


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"table": "order"}, persist.NotFound, "no table 'order'"),
        ({"table": ""}, persist.InvalidUsage, "option table .* is empty"),
        ({"table": "a//b"}, persist.InvalidName, "a collection's name"),
        ({"table": "orders", "path": "others"}, persist.InvalidUsage, "about one table"),
        ({"shard": "orders"}, persist.InvalidUsage, "no option shard any more: it is table now"),
        ({"collection": "orders"}, persist.InvalidUsage, "no option collection any more: it is table now"),
        ({"table": "orders", "where": "a = 1"}, persist.InvalidUsage, "no option where any more: it is filter now"),
        ({"tabel": "orders"}, persist.InvalidUsage, "Did you mean table"),
        ({}, persist.InvalidUsage, "needs the option table"),
        ({"table": "orders", "as_of": "99"}, persist.TimedOut, "99"),
        ({"table": "orders", "as_of": "x"}, persist.InvalidUsage, "x"),
        ({"table": "orders", "changes": "true", "from": "3", "to": "1"}, persist.InvalidUsage, "go forward"),
        ({"table": "orders", "columns": "z"}, persist.InvalidUsage, "table orders has no column"),
        ({"table": "orders", "filter": "z = 1"}, persist.InvalidUsage, "z"),
    ],
)
def test_what_is_asked_wrongly_says_so(
    client: persist.Client, options: dict[str, str], error: type[Exception], says: str
) -> None:
    told(client, random.Random(1))
    with pytest.raises(error, match=says):
        read_all(PersistSource({"location": client.url, **options}))


def test_of_a_shard_and_a_collection_of_one_name_the_shard_is_the_table(client: persist.Client) -> None:
    world = Told(client)
    world.append(random.Random(2), 20)
    schema = persist.Schema(key={"k": "int64"})
    create_if_missing(client.machine("orders"), schema, None)  # as locations of before may have it
    with client.open_writer("orders", schema, layer="pending") as write:  # a layer's name is not looked for
        write.compare_and_append([{"k": 7}], 0, 1)
    assert rows(load(client), "k") == [(7,)]


def test_an_empty_collection_has_columns_and_no_rows(client: persist.Client) -> None:
    client.controller().create("orders", SCHEMA, shards=2)
    assert load(client, table="orders") is None
    sink = Sink()
    query = stream(client, sink)
    query.start()
    assert drain(query) == 1
    assert sink.batches == {0: []}


def test_a_reader_that_may_not_write_reads_what_is_promised(client: persist.Client) -> None:
    world = told(client, random.Random(7))
    before = list(client.consensus.list_keys())
    found = load(client, table="orders", diff="true", read_only="true")
    assert contents(found) == world.contents(world.upper - 1)
    assert list(client.consensus.list_keys()) == before
    moved = load(client, table="orders", changes="true", read_only="true")
    assert updates(moved) == world.changes(None, world.upper - 1)


# --- streams ---


def stream(client: persist.Client, sink: Any, **options: str) -> Stream:
    return Stream(client, sink, changes="true", table="orders", **options)


def started(query: Stream) -> Stream:
    query.start()
    return query


def drain(query: Stream) -> int:
    done = 0
    while query.step():
        done += 1
        assert done < 800, "it does not end"
    return done


LIMITS: list[dict[str, str]] = [
    {}, {"max_updates": "1"}, {"max_updates": "17"}, {"max_times": "1"}, {"max_bytes": "2000"},
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", range(2))
def test_a_stream_has_each_change_once_across_handovers(
    client: persist.Client, limits: dict[str, str], seed: int
) -> None:
    rng = random.Random(seed)
    world, sink = Told(client), Sink()
    world.append(rng, 50, times=2)
    query = stream(client, sink, hold="h", **limits)
    query.start()
    assert query.step()
    world.hand_over(2, drop=3)
    world.append(rng, 30)
    world.hand_over(4, drop=5)
    world.append(rng, 30, times=2)
    drain(query)
    expected = added(((data, 1), diff) for data, diff in world.contents(1).items())
    expected.update(world.changes(1, world.upper - 1))
    assert sink.updates() == expected
    assert not query.step()
    world.append(rng, 10)
    drain(query)
    assert sink.contents() == world.contents(world.upper - 1)
    [hold] = [one.since for one in world.controller.capabilities("orders") if one.id == "h"]
    assert hold is not None
    assert hold <= persist.at(world.upper - 1)
    query.start()
    assert not query.step()


def test_a_stream_of_rows_follows_a_collection_over_a_handover(client: persist.Client) -> None:
    world, found = Told(client), list[Any]()
    query = Stream(client, lambda _, table: found.extend(rows(table, "a", "b", "v")), table="orders")
    for seed in range(2):
        world.append(random.Random(seed), 30, negative=False)
        drain(query if seed else started(query))
        world.hand_over(1)
    assert Counter(found) == world.contents(1)


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_that_is_killed_at_any_step_is_exact(client: persist.Client, seed: int) -> None:
    """Its hold keeps old renditions while it is stopped, whatever the retention is."""
    rng = random.Random(seed)
    world, sink = Told(client, rng.randrange(1, 4)), Sink()
    world.append(rng, 40, times=2)
    world.controller.alter("orders", retention=0)
    limits = rng.choice(LIMITS)
    query = stream(client, sink, hold="h", **limits)
    query.start()
    first = None
    for _ in range(40):
        act = rng.choice(["append", "hand over", "plan", "run", "finish", "restart", "tend", "step"])
        if act == "append":
            world.append(rng, rng.randrange(20), times=rng.randrange(1, 3))
        elif act == "hand over" and len(world.starts) < 4 and world.upper > world.starts[-1][0]:
            world.hand_over(rng.randrange(1, 4), drop=rng.randrange(40))
        elif act == "plan":
            query.plan(rng.choice([None, ReadAllAvailable()]))
        elif act in ("run", "finish") and len(query.planned) > query.done:
            query.run()
            if act == "finish":
                query.finish()
        elif act == "restart":
            query.start()
        elif act == "tend":
            world.controller.tend("orders")
        elif act == "step":
            query.step()
        if first is None and query.planned:
            first = json.loads(query.planned[0])["began"]["contents"]
    drain(query)
    if len(world.starts) > 1 and world.upper == world.starts[-1][0]:
        world.append(rng, 1)
        drain(query)
    first = json.loads(query.planned[0])["began"]["contents"]
    expected = added(((data, first), diff) for data, diff in world.contents(first).items())
    expected.update(world.changes(first, world.upper - 1))
    assert sink.updates() == added(expected.items())


def test_a_stream_from_a_time_before_a_handover_and_available_now(client: persist.Client) -> None:
    rng = random.Random(4)
    world, sink = told(client, rng), Sink()
    query = stream(client, sink, **{"from": "0"})
    query.start("available now")
    world.append(rng, 20)
    while query.plan(ReadAllAvailable()):
        query.run()
        query.finish()
    assert sink.updates() == world.changes(0, world.upper - 2), "what came after the start of the trigger is not read"
    assert len(sink.batches) == 1, "one batch across both handovers"


def test_a_hold_and_a_checkpoint_belong_to_one_collection(client: persist.Client) -> None:
    world = Told(client)
    query = stream(client, Sink(), hold="mine")
    query.start()
    for seed in range(2):
        world.append(random.Random(seed), 20)
        assert query.step()
    other = stream(client, Sink(), hold="mine")
    other.start()
    with pytest.raises(persist.HoldConflict, match=r"table orders has a hold mine already.*persist hold release"):
        other.step()
    for name, says in [("collection", "retention"), ("copy-r2", "copies"), (" ", "empty")]:
        wrong = stream(client, Sink(), hold=name)
        with pytest.raises(persist.InvalidUsage, match=says):
            drain(started(wrong))
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 0, 1)
    moved = Stream(client, Sink(), changes="true", table="s")
    moved.planned, moved.done = query.planned, query.done
    with pytest.raises(persist.InvalidUsage, match="now reads table s"):
        moved.start()


def test_a_stream_whose_hold_was_released_says_what_is_gone(client: persist.Client) -> None:
    rng = random.Random(6)
    world = Told(client)
    world.append(rng, 20)
    query = stream(client, Sink(), hold="h")
    query.start()
    assert query.step()
    world.controller.release_hold("orders", "h")
    world.controller.alter("orders", retention=0)
    world.hand_over(2)
    world.append(rng, 20, times=3)
    world.controller.tend("orders")
    world.controller.tend("orders")
    with pytest.raises(persist.SinceViolation, match="table orders: this stream has read up to"):
        drain(started(query))


def test_a_large_handover_is_cut_into_batches_and_tasks(client: persist.Client) -> None:
    count = 30_000
    controller = client.controller()
    controller.create("orders", SCHEMA, shards=3, mode="compare_and_append")
    table = pa.table({
        "a": pa.array(range(count), pa.int64()), "b": ["x"] * count, "v": pa.array(range(count), pa.int64())
    })  # fmt: skip
    with controller.open_writer("orders") as write:
        write.append_now(table)
    made = controller.make_rendition("orders", shards=2, copy=True).number

    def one_more(rows: pa.Table) -> pa.Table:
        more = pc.add(rows["v"], pa.scalar(1, pa.int64()))
        return rows.set_column(rows.schema.get_field_index("v"), "v", more)

    controller.copy_rendition("orders", made, transform=one_more)
    query = stream(client, sink := Sink(), max_updates="10000", **{"from": "0"})
    query.start()
    drain(query)
    controller.hand_over("orders", made)
    controller.copy_rendition("orders", made, transform=one_more, to_end=True)
    with controller.open_writer("orders") as write:
        write.advance_upper(2)
    done = drain(query)
    assert done >= 4, "60,000 updates are read, some 10,000 at a time"
    assert all(batch for number, batch in sink.batches.items() if number)
    expected = added([(((a, "x", a), 1), -1) for a in range(count)] + [(((a, "x", a + 1), 1), 1) for a in range(count)])
    assert sink.updates() == expected
    options = {"from": "0", "changes": "true", "table": "orders"}
    made_ = source(client, **options, partition_bytes="65536")
    reader: Any = made_.reader(made_.schema())
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    assert len(parts) > 2, "ranges of keys are tasks of their own"
    assert updates(read(reader, parts)) == expected
