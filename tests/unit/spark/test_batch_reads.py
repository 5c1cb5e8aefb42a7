"""Batch reads, planned and read as Spark does it but without a JVM, beside an account of every update."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as d
from pyspark.sql import types as t

import persist_lib as persist
from persist_lib.errors import InvalidUsage, Missing, SchemaMismatch, SinceViolation, TimedOut
from persist_lib.spark import batch_reader, slices
from persist_lib.spark.batch_reader import Part
from persist_lib.spark.source import PersistSource
from tests.unit.spark.worlds import SCHEMA, TINY, World, added, load, read, rows, source

LEASE_MS = 60_000


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[persist.Client]:
    monkeypatch.setenv("PERSIST_CONFIG", json.dumps(TINY))
    with persist.open(f"file:{tmp_path}", config=persist.Config(**TINY)) as opened:
        yield opened


def contents(table: pa.Table | None) -> Any:
    return added(((a, b, v), n) for a, b, v, n in rows(table, "a", "b", "v", "_diff"))


def plain(table: pa.Table | None) -> Counter[Any]:
    return Counter(rows(table, "a", "b", "v", "_diff"))


@pytest.mark.parametrize("seed", range(8))
def test_any_history_reads_as_the_account_says(client: persist.Client, seed: int) -> None:
    rng = random.Random(seed)
    world = World(client)
    for _ in range(rng.randrange(1, 8)):
        world.append(rng, rng.randrange(60), times=rng.randrange(1, 4))
        if rng.random() < 0.4:
            client.compact("orders")
    cut: dict[str, str] = rng.choice([{}, {"partition_bytes": "65536"}])
    for as_of in range(world.upper):
        model = world.contents(as_of)
        assert contents(load(client, None, as_of=str(as_of), diff="true", **cut)) == model
        before = rng.randrange(-1, as_of + 1)
        after = {} if before < 0 else {"from": str(before)}
        found = load(client, None, changes="true", to=str(as_of), **after, **cut)
        updates = added((((a, b, v), at), n) for a, b, v, at, n in rows(found, "a", "b", "v", "_time", "_diff"))
        assert updates == world.changes(None if before < 0 else before, as_of)
    assert contents(load(client, diff="true")) == world.contents(world.upper - 1), "the newest, if none is said"


@pytest.mark.parametrize("limit", [0, 1, 7, 10**6])
def test_a_limit_ends_each_partition_as_soon_as_it_has_so_many_rows(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """As the catalog pushes it down. Spark takes so many of what comes, and would cut a worker that writes on."""
    world, rng, drawn = World(client), random.Random(1), list[int]()
    for _ in range(6):
        world.append(rng, 60)
    every, inner = plain(load(client, diff="true")), batch_reader._all_batches

    def counted(*arguments: Any) -> Iterator[pa.RecordBatch]:
        for batch in inner(*arguments):
            drawn.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(batch_reader, "_all_batches", counted)
    monkeypatch.setattr(batch_reader, "BATCH_ROWS", 8)
    schema = source(client, diff="true").schema()
    reader: Any = source(client, diff="true", limit=str(limit)).reader(schema)
    for partition in reader.partitions():
        drawn.clear()
        found = plain(read(reader, [partition]))
        assert sum(found.values()) == min(limit, sum(drawn))
        assert all(n <= every[one] for one, n in found.items())
        assert sum(drawn[:-1]) < max(limit, 1), "it stops at the first batch that is enough"
    with pytest.raises(InvalidUsage, match="limit"):
        source(client, limit="7").schema()  # nobody but the catalog says it


VALUES: dict[str, list[Any]] = {"a": [-1, 0, 7, 20, 39, 100], "b": ["", "x", "y", "yy", "z"], "v": [0, 1, 2, 3, 4]}


def some_filter(rng: random.Random) -> tuple[d.Filter, Any]:
    """A filter and what it says of a value (None: not true)."""
    name = rng.choice("abv")
    value = rng.choice(VALUES[name])
    at, path = "abv".index(name), (name,)
    some = tuple(rng.sample(VALUES[name], 2))
    found: list[tuple[d.Filter, Any]] = [
        (d.EqualTo(path, value), lambda x: x == value),
        (d.EqualNullSafe(path, value), lambda x: x == value),
        (d.GreaterThan(path, value), lambda x: x is not None and x > value),
        (d.GreaterThanOrEqual(path, value), lambda x: x is not None and x >= value),
        (d.LessThan(path, value), lambda x: x is not None and x < value),
        (d.LessThanOrEqual(path, value), lambda x: x is not None and x <= value),
        (d.In(path, some), lambda x: x in some),
        (d.In(path, (value, None)), lambda x: x == value),
        (d.IsNull(path), lambda x: x is None),
        (d.IsNotNull(path), lambda x: x is not None),
        (d.Not(d.EqualTo(path, value)), lambda x: x is not None and x != value),
        (d.Not(d.EqualNullSafe(path, value)), lambda x: x != value),
        (d.Not(d.In(path, some)), lambda x: x is not None and x not in some),
        (d.Not(d.In(path, (value, None))), lambda x: False),
        (d.Not(d.GreaterThan(path, value)), lambda x: x is not None and x <= value),
        (d.EqualNullSafe(path, None), lambda x: x is None),
        (d.Not(d.EqualNullSafe(path, None)), lambda x: x is not None),
    ]
    if name == "b":
        text = str(value)
        found += [
            (d.StringStartsWith(path, text), lambda x: x is not None and x.startswith(text)),
            (d.StringEndsWith(path, text), lambda x: x is not None and x.endswith(text)),
            (d.Not(d.StringContains(path, text)), lambda x: x is not None and text not in x),
        ]
    chosen, says = rng.choice(found)
    return chosen, lambda data: says(data[at])


@pytest.mark.parametrize("seed", range(6))
def test_pushed_filters_lose_no_row_and_are_exact_but_for_what_is_not_understood(
    client: persist.Client, seed: int
) -> None:
    rng = random.Random(seed)
    world = World(client)
    for _ in range(5):
        world.append(rng, 60)
    model = world.contents(4)
    for _ in range(60):
        filters, tests = zip(*(some_filter(rng) for _ in range(rng.randrange(1, 4))), strict=True)
        wanted = {data: n for data, n in model.items() if all(test(data) for test in tests)}
        found = contents(load(client, list(filters), diff="true", partition_bytes="65536"))
        rest = {data: n for data, n in found.items() if all(test(data) for test in tests)}
        assert rest == wanted, filters
        if not any("None)" in repr(one) for one in filters):
            assert found == wanted, f"{filters} are understood, so that nothing else is read"


@pytest.mark.parametrize("seed", range(4))
def test_filters_on_the_time_leave_their_updates(client: persist.Client, seed: int) -> None:
    rng = random.Random(seed)
    world = World(client)
    for _ in range(5):
        world.append(rng, 20, times=2)
    for _ in range(20):
        at = rng.randrange(-2, 12)
        kind: Any
        kind, says = rng.choice([
            (d.EqualTo, int.__eq__), (d.GreaterThan, int.__gt__), (d.GreaterThanOrEqual, int.__ge__),
            (d.LessThan, int.__lt__), (d.LessThanOrEqual, int.__le__),
        ])  # fmt: skip
        found = rows(load(client, [kind(("_time",), at)], changes="true"), "a", "b", "v", "_time", "_diff")
        model = {(data, time): n for (data, time), n in world.changes(None, 9).items() if says(time, at)}
        assert added((((a, b, v), time), n) for a, b, v, time, n in found) == model


def test_rows_are_repeated_as_often_as_they_are_there(client: persist.Client) -> None:
    with client.open_writer("orders", SCHEMA) as writer:
        writer.compare_and_append([{"a": 1, "b": "x", "v": 1, "_diff": 3}, {"a": 2, "b": "x", "v": 1}], 0, 1)
        assert rows(load(client), "a") == [(1,)] * 3 + [(2,)]
        assert rows(load(client, columns="v, a"), "v", "a") == [(1, 1)] * 3 + [(1, 2)]
        assert rows(load(client, columns=str(["v", "a"])), "v", "a") == [(1, 1)] * 3 + [(1, 2)], "Python's own list"
        writer.compare_and_append([{"a": 9, "b": "x", "v": 1, "_diff": 200_000}], 1, 2)
        table = load(client, [d.EqualTo(("a",), 9)])
        assert table is not None
        assert table.num_rows == 200_000
        writer.compare_and_append([{"a": 2, "b": "x", "v": 1, "_diff": -2}], 2, 3)
        with pytest.raises(InvalidUsage, match=r"negative multiplicity.*option diff"):
            load(client)
        assert len(rows(load(client, diff="true"), "a")) == 3


def test_a_frame_is_of_one_time_however_often_it_is_read(client: persist.Client) -> None:
    world = World(client)
    world.append(random.Random(1), 30)
    made = source(client, diff="true")
    schema = made.schema()
    made = pickle.loads(pickle.dumps(made))  # as Spark does after it has asked for the schema
    model = world.contents(0)
    for _ in range(3):
        world.append(random.Random(1), 30)
        reader = made.reader(schema)
        assert contents(read(reader, reader.partitions())) == model


@pytest.mark.parametrize("kind", ["diff", "changes"])
def test_tasks_go_on_exactly_when_their_parts_are_gone(
    client: persist.Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned without a lease, compacted and collected before and in the middle of reading."""
    world, rng = World(client), random.Random(3)
    for _ in range(9):
        world.append(rng, 300)
    made = source(client, partition_bytes="65536", read_only="true", **{kind: "true"})
    reader = made.reader(made.schema())
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    before = {entry.key for entry in client.blob.list("orders/")}
    found: list[pa.RecordBatch] = []
    for part in parts:
        for batch in reader.read(part):
            found.append(batch)
            if len(found) == 1:
                client.compact("orders")
                for _ in range(3):
                    client.maintain("orders")
    gone = before - {entry.key for entry in client.blob.list("orders/")}
    assert any(key.endswith("parquet") for key in gone), "nothing was collected, so nothing was tried"
    table = pa.Table.from_batches(found)
    if kind == "diff":
        assert contents(table) == world.contents(8)
    else:
        updates = added((((a, b, v), at), n) for a, b, v, at, n in rows(table, "a", "b", "v", "_time", "_diff"))
        assert updates == world.changes(None, 8)


def test_what_was_planned_by_a_shards_name_is_read_when_that_is_promoted_and_compacted(client: persist.Client) -> None:
    world, rng = World(client), random.Random(5)
    for _ in range(9):
        world.append(rng, 300)
    made = source(client, read_only="true", diff="true")
    (part,) = made.reader(made.schema()).partitions()
    assert isinstance(part, Part)
    assert isinstance(part.piece, slices.Slice)
    client.upgrade("orders")
    client.controller().promote("orders")
    client.compact("orders")
    for _ in range(3):
        client.maintain("orders")
    with persist.open(client.url, read_only=True) as task:
        found = slices._newer(task, part.piece, Missing("a part is gone"))
        assert found.inputs != part.piece.inputs


def test_a_lease_keeps_history_and_parts_while_a_query_runs(client: persist.Client) -> None:
    world, rng = World(client), random.Random(4)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 0)
    for _ in range(4):
        world.append(rng, 100)
    client.maintain("orders")
    made = source(client, diff="true")
    reader = made.reader(made.schema())
    parts = reader.partitions()
    readers = client.inspect("orders").state.readers
    assert [one.purpose for one in readers.values()] == ["Spark batch read"]
    for _ in range(4):
        world.append(rng, 100)
        client.maintain("orders")
    assert client.inspect("orders").state.since <= persist.at(3)
    assert contents(read(reader, parts)) == world.contents(3)
    reader.partitions()
    assert len(client.inspect("orders").state.readers) == 1, "one reader for the queries of half a lease"


def test_history_that_is_gone_is_an_error_in_words(client: persist.Client) -> None:
    world, rng = World(client), random.Random(5)
    client.open_writer("orders", SCHEMA).close()
    client.set_retention("orders", 0)
    world.append(rng, 100)
    made = source(client, diff="true", read_only="true")
    reader = made.reader(made.schema())
    parts = reader.partitions()
    for _ in range(6):
        world.append(rng, 100)
        client.maintain("orders")
    client.compact("orders")
    client.maintain("orders")
    with pytest.raises(SinceViolation, match="as_of 0 is before since"):
        read(reader, parts)
    with pytest.raises(SinceViolation, match="as_of 0 is before since"):
        load(client, as_of="0")
    with pytest.raises(SinceViolation):
        load(client, changes="true")


def test_reading_does_not_end_the_history_of_others(client: persist.Client) -> None:
    world, rng = World(client), random.Random(6)
    for _ in range(4):
        world.append(rng, 10)
    load(client, diff="true")
    load(client, as_of="2", diff="true")
    assert client.inspect("orders").state.since == persist.at(0)
    load(client, as_of="0", diff="true")


def test_an_empty_shard_is_an_empty_frame(client: persist.Client) -> None:
    client.open_writer("orders", SCHEMA).close()
    assert load(client) is None
    assert load(client, changes="true") is None
    reader = source(client).reader(source(client).schema())
    assert list(reader.read(d.InputPartition(None))) == [], "Spark's own partition, where there is none"
    with pytest.raises(TimedOut, match="upper has to pass 0, and upper is"):
        load(client, as_of="0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"asof": "3"}, "Did you mean as_of"),
        ({"as_of": ""}, "as_of .* is empty"),
        ({"columns": "a,x"}, "no column 'x'"),
        ({"columns": "a,a"}, "occurs twice"),
        ({"columns": "a,"}, "list of names"),
        ({"columns": "['a'"}, "list of names"),
        ({"columns": "[a]"}, "list of names"),
        ({"columns": "['a', 1]"}, "list of names"),
        ({"diff": "yes"}, "true or false"),
        ({"diff": "true", "changes": "true"}, "exclude"),
        ({"changes": "true", "as_of": "0"}, "not as_of"),
        ({"changes": "false", "from": "0"}, "from is about changes"),
        ({"as_of": "-1"}, r"must be an integer in \[0, 2\*\*64\), got -1$"),
        ({"as_of": "yesterday"}, "plain integers, not a clock"),
        ({"partition_bytes": "many"}, "number of bytes"),
        ({"path": "others"}, "about one table"),
        ({"table": "../x"}, "name must be"),
        ({"location": "memory:"}, "lives in one process"),
        ({"consensus": "postgresql://me:secret@h/db"}, "holds a password"),
    ],
)
def test_wrong_options_are_refused_in_words(client: persist.Client, options: dict[str, str], said: str) -> None:
    World(client).append(random.Random(1), 3)
    with pytest.raises(persist.PersistError, match=said) as told:
        load(client, None, **options)
    assert "secret" not in str(told.value)


def test_options_that_are_missing_say_so(client: persist.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="needs the option location"):
        PersistSource({"table": "orders"}).schema()
    with pytest.raises(InvalidUsage, match="needs the option table"):
        PersistSource({"location": client.url}).schema()
    World(client).append(random.Random(1), 3)
    monkeypatch.setenv("PERSIST_LOCATION", client.url)
    assert PersistSource({"path": "orders"}).schema().names == ["a", "b", "v"]
    with pytest.raises(persist.NotFound):
        PersistSource({"path": "nothing"}).schema()


def test_a_schema_that_is_passed_picks_columns(client: persist.Client) -> None:
    World(client).append(random.Random(1), 30)
    made = source(client, diff="true")
    reader = made.reader(t.StructType([t.StructField("v", t.LongType())]))
    table = read(reader, reader.partitions())
    assert table is not None
    assert table.column_names == ["v"]
    with pytest.raises(SchemaMismatch, match="no column 'w'"):
        made.reader(t.StructType([t.StructField("w", t.LongType())]))
    with pytest.raises(SchemaMismatch, match="column v of table orders is bigint"):
        made.reader(t.StructType([t.StructField("v", t.StringType())]))


def test_times_of_a_clock_are_timestamps_and_texts(client: persist.Client) -> None:
    schema = persist.Schema(key={"k": "int64"}, times="ms")
    moments = [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2, 3)]
    with client.open_writer("clock", schema) as writer:
        writer.compare_and_append([{"k": i, "_time": at} for i, at in enumerate(moments)], 0, "2026-01-04")
    assert rows(load(client, table="clock", as_of="2026-01-02"), "k") == [(0,), (1,)]
    found = load(client, None, table="clock", **{"from": "2026-01-01"})
    assert rows(found, "k", "_time") == [(1, moments[1]), (2, moments[2])]
    some = load(client, [d.GreaterThan(("_time",), moments[1])], table="clock", changes="true")
    assert rows(some, "k") == [(2,)]
    with pytest.raises(TimedOut, match="2026-02-01"):
        load(client, table="clock", as_of="2026-02-01")


def test_filters_are_in_the_types_of_columns(client: persist.Client) -> None:
    schema = persist.Schema(
        key={"k": "int64"},
        value={"p": "decimal128(12, 2)", "at": "timestamp[ms, UTC]", "n": "timestamp[s]", "d": "date32", "u": "uint64",
               "x": "binary", "f": "float64", "y": "bool"},
    )  # fmt: skip
    at = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    plain = at.replace(tzinfo=None)
    row = {"p": Decimal("1.50"), "at": at, "n": plain, "d": at.date(), "u": 2**64 - 1, "x": b"1", "f": 1.0, "y": True}
    with client.open_writer("types", schema) as writer:
        writer.compare_and_append([{"k": 1, **row}, {"k": 2, **dict.fromkeys(row)}], 0, 1)
    for name, value in (*row.items(), ("u", Decimal(2**64 - 1))):
        found = rows(load(client, [d.EqualTo((name,), value)], table="types"), "k")
        assert found == [(1,)], name
    later = at + dt.timedelta(microseconds=1)
    for one in (d.LessThan(("at",), later), d.LessThan(("p",), Decimal("1.505")), d.LessThan(("at",), plain)):
        assert (1,) in rows(load(client, [one], table="types"), "k"), f"{one} is not exact in the column's type"


def test_the_option_where_is_exact(client: persist.Client) -> None:
    world, rng = World(client), random.Random(21)
    for _ in range(4):
        world.append(rng, 100, times=2)
    model = world.contents(7)
    cases: list[tuple[str, Any]] = [
        ("a = 7", lambda a, b, v: a == 7),
        ("a BETWEEN 5 AND 9 and b IN ('x', 'yy')", lambda a, b, v: 5 <= a <= 9 and b in {"x", "yy"}),
        ("b IS NULL AND v <> 2", lambda a, b, v: b is None and v not in {None, 2}),
        ("`b` >= 'x' AND a < 20 AND v IS NOT NULL", lambda a, b, v: b is not None and b >= "x" and a < 20 and v),
        ("v NOT IN (1, 2)", lambda a, b, v: v == 3),
        ("b = ''", lambda a, b, v: b == ""),
    ]
    for text, says in cases:
        found = contents(load(client, diff="true", filter=text))
        assert found == {data: n for data, n in model.items() if says(*data)}, text
    found = rows(load(client, changes="true", filter="_time >= 3 AND _time < 5"), "a", "b", "v", "_time", "_diff")
    assert added((((a, b, v), at), n) for a, b, v, at, n in found) == world.changes(2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "ends too early"), ("a", "ends too early"), ("w = 1", "'w' is no column"),
        ("a = 'x'", "a comparison with 'x' exactly to column 'a', which is int64"),
        ("a = 1 OR b = 'x'", "AND is expected"), ("a LIKE 'x'", "'LIKE' after a"), ("a = 1;", "not understood"),
        ("b NOT IN (1)", r"with \[Decimal\('1'\)\] exactly to column 'b', which is string"),
        ("_time = 1", "'_time' is no column"), ("a IN ()", "no value"),
    ],
)  # fmt: skip
def test_a_wrong_where_is_refused_in_words(client: persist.Client, text: str, said: str) -> None:
    World(client).append(random.Random(1), 3)
    with pytest.raises(InvalidUsage, match=said):
        load(client, filter=text)


@pytest.mark.parametrize("read_only", ["true", "false"])
def test_a_process_that_plans_does_not_trust_what_it_knew(
    client: persist.Client, read_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark asks for the schema in one process and for the partitions in another, which may know an older state."""
    world, rng = World(client), random.Random(22)
    world.append(rng, 30)
    clients: dict[str, persist.Client] = {}
    process = "planner"

    def client_here(location: str, consensus: str | None, *, read_only: bool) -> persist.Client:
        if process not in clients:
            clients[process] = persist.open(location, consensus, read_only=read_only)
        return clients[process]

    monkeypatch.setattr("persist_lib.spark.batch_reader.client_of", client_here)
    made = source(client, diff="true", read_only=read_only)
    made.reader(made.schema()).partitions()
    for _ in range(3):
        world.append(rng, 30)
    process = "another"
    schema = made.schema()
    process = "planner"
    reader = made.reader(schema)
    assert contents(read(reader, reader.partitions())) == world.contents(3)
    for one in clients.values():
        one.close()
