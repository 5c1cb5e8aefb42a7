"""Snapshots and changes as Arrow streams, frames, relations of DuckDB and instances, with the real libraries."""

from __future__ import annotations

import datetime as dt
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pydantic
import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, InvalidUsage, LeaseExpired, SinceViolation, TimedOut
from persist_lib.relation.engines import dataset_of
from persist_lib.testing import contents_of
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, WIDER, World, row


@pytest.fixture(scope="module")
def read() -> Iterator[persist.ReadHandle]:
    """A reader of a shard that no test changes."""
    world = World()
    client = world.client(TINY)
    filled(client)
    yield client.open_reader("s")
    world.close()


EVERYTHING = persist.Schema(
    key={"id": "int64"},
    value={
        "flag": "bool", "small": "int8", "large": "uint64", "real": "float64", "single": "float32", "text": "string",
        "raw": "binary", "fixed": "fixed_size_binary[3]", "day": "date32", "clock": "time64[us]",
        "naive": "timestamp[ns]", "instant": "timestamp[us, UTC]", "span": "duration[ms]", "money": "decimal128(18, 2)",
    },
)  # fmt: skip


def everything(ids: Iterator[int] | range = range(8)) -> list[dict[str, Any]]:
    """Rows with values and nulls of every type."""
    full = {
        "flag": True, "small": -5, "large": 2**64 - 1, "real": float("nan"), "single": -0.0, "text": "ä\0\U0010ffff",
        "raw": b"\xff\x00", "fixed": b"abc", "day": dt.date(1900, 1, 1), "clock": dt.time(1, 2, 3, 4),
        "naive": dt.datetime(2020, 1, 1), "instant": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),  # noqa: DTZ001
        "span": dt.timedelta(days=-1), "money": Decimal("-1.50"),
    }  # fmt: skip
    empty = dict.fromkeys(full)
    return [{"id": each, **(full if each % 2 else empty)} for each in ids]


def in_duckdb(query: str, snap: Any) -> duckdb.DuckDBPyRelation:
    relation = duckdb.sql(query)
    assert relation is not None
    return relation


WAYS: dict[str, Callable[[Any], pa.Table]] = {
    "pa.table": pa.table,
    "pa.RecordBatchReader": lambda found: pa.RecordBatchReader.from_stream(found).read_all(),
    "to_reader": lambda found: found.to_reader().read_all(),
    "pl.DataFrame": lambda found: pl.DataFrame(found).to_arrow(),
    "pl.from_arrow": lambda found: pl.select(pl.from_arrow(found).struct.unnest()).to_arrow(),  # type: ignore[union-attr,unused-ignore]
    "duckdb.sql": lambda snap: in_duckdb("select * from snap", snap).to_arrow_table(),
    "to_duckdb": lambda found: found.to_duckdb().to_arrow_table(),
    "to_duckdb of a connection": lambda found: found.to_duckdb(duckdb.connect()).to_arrow_table(),
    "scan_polars": lambda found: found.scan_polars().collect().to_arrow(),
    "to_polars": lambda found: found.to_polars().to_arrow(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_door_gives_the_contents_with_their_multiplicities(read: persist.ReadHandle, way: str) -> None:
    for as_of in (0, 20, 39):
        with read.snapshot(as_of, diff=True) as snapshot:
            whole = snapshot.to_arrow()
            found = WAYS[way](snapshot)
            assert found.schema.names == whole.schema.names == ["id", "word", "_diff"]
            assert contents_of(found.cast(whole.schema)) == contents_of(whole)
    with read.changes(10, 20) as changes:
        found = WAYS[way](changes)
        assert found.cast(changes.schema).to_pylist() == changes.to_pylist()


@pytest.mark.parametrize("way", WAYS)
def test_every_door_takes_every_type_and_nulls(world: World, way: str) -> None:
    write, read = world.client().open_shard("all", EVERYTHING)
    write.compare_and_append(everything(), 0, 1)
    snapshot = read.snapshot(0, diff=True)
    found = WAYS[way](snapshot)
    assert found.num_rows == 8
    for name in EVERYTHING.names:
        if (way, name) == ("duckdb.sql", "span") or ("duckdb" in way and name == "span"):
            continue  # DuckDB's intervals are no durations
        want = snapshot.to_arrow().column(name)
        got = found.column(name).cast(want.type)
        assert repr(got.to_pylist()) == repr(want.to_pylist()), name


def test_a_stream_reads_in_bounded_memory_and_only_what_is_consumed(world: World) -> None:
    client = world.client(TINY)
    rows = 60_000
    table = pa.table(
        {"id": range(rows), "word": [f"{n:030}" for n in range(rows)], "_time": pa.array([0] * rows, pa.uint64())}
    )
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append(table, 0, 1)
    read = client.open_reader("s")
    parts = sum(len(batch.parts) for batch in client.inspect("s").state.trace)
    assert parts > 10
    world.requests.clear()
    reader = read.snapshot(0, diff=True).to_reader()
    first = reader.read_next_batch()
    assert 0 < first.num_rows <= 1 << 14
    assert world.count("get", "get_range") <= 2
    assert first.num_rows + reader.read_all().num_rows == rows
    assert world.count("get", "get_range") <= parts + 2


def test_a_requested_schema_is_cast_to_or_refused(read: persist.ReadHandle) -> None:
    snapshot = read.snapshot(39, diff=True)
    asked = snapshot.schema.set(0, pa.field("id", pa.int32()))
    assert pa.table(snapshot, schema=asked).schema == asked
    assert pa.schema(snapshot) == snapshot.schema
    with pytest.raises((pa.ArrowException, TypeError, ValueError)):
        pa.table(snapshot, schema=pa.schema([("other", pa.int64())]))
    with pytest.raises((pa.ArrowException, TypeError, ValueError)):
        pa.table(snapshot, schema=snapshot.schema.set(1, pa.field("word", pa.date32())))


@pytest.mark.parametrize("name", EVERYTHING.names)
def test_duckdb_filters_of_every_type_are_exact(world: World, name: str) -> None:
    write, read = world.client(TINY).open_shard("all", EVERYTHING)
    rows = everything()
    rows += [
        {**rows[1], "id": 100, "real": 0.0, "single": float("nan")},
        {**rows[1], "id": 101, "text": "", "raw": b""},
    ]
    write.compare_and_append(rows, 0, 1)
    connection = duckdb.connect()
    connection.register("lazy", dataset_of(read.snapshot(0, diff=True)))
    connection.execute("create table whole as select * from lazy")
    values = connection.execute(f"select distinct {name} from whole where {name} is not null").fetchall()
    texts = [row[0] for row in connection.execute(f"select distinct {name}::varchar from whole").fetchall()]
    assert values
    for column in ("id", "*"):
        for operator in ("=", "<>", "<", ">=", "is distinct from"):
            for text in texts:
                literal = "null" if text is None else "'" + text.replace("'", "''") + "'"
                where = f"{name} {operator} {literal}::{_kind(connection, name)}"
                counts = [
                    connection.execute(f"select {column} from {table} where {where} order by id").fetchall()
                    for table in ("lazy", "whole")
                ]
                assert repr(counts[0]) == repr(counts[1]), where
    for where in (f"{name} is null", f"{name} is not null", f"{name} in (select {name} from whole where id < 3)"):
        counts = [
            connection.execute(f"select id from {t} where {where} order by id").fetchall() for t in ("lazy", "whole")
        ]
        assert counts[0] == counts[1], where
    joined = f"select l.id, r.id from whole r join {{}} l using ({name}) where r.id = 1 order by all"
    assert connection.execute(joined.format("lazy")).fetchall() == connection.execute(joined.format("whole")).fetchall()


def _kind(connection: duckdb.DuckDBPyConnection, name: str) -> str:
    return str(connection.execute(f"select typeof({name}) from whole limit 1").fetchall()[0][0])


def test_engines_have_decimals_of_more_than_38_digits_as_text(world: World) -> None:
    schema = persist.Schema(
        {"id": "int64"},
        {"x": "decimal256(50, 3)", "l": "list<decimal256(40, 0)>", "m": "map<string, decimal256(40, 1)>"},
    )
    rows = [
        {
            "id": 1,
            "x": Decimal("12345678901234567890123456789012345678901234567.125"),
            "l": [Decimal(5), None],
            "m": {},
        },
        {"id": 2, "x": Decimal("0.000"), "l": [], "m": {"a": Decimal("-0.5")}},
        {"id": 3, "x": None, "l": None, "m": None},
    ]
    client = world.client()
    client.open_writer("s", schema).compare_and_append(rows, 0, 1)
    with client.open_reader("s").snapshot(0) as snap:
        frame = snap.to_polars().sort("id")
        assert frame["x"].to_list() == ["12345678901234567890123456789012345678901234567.125", "0.000", None]
        assert frame["l"].to_list() == [["5", None], [], None]
        lazy = snap.scan_polars()
        assert lazy.filter(pl.col("x") == "0.000").select("id").collect()["id"].to_list() == [2]
        assert lazy.filter(pl.col("x").is_null()).collect()["id"].to_list() == [3]
        with duckdb.connect() as connection:
            of = snap.to_duckdb(connection)
            assert of.filter("x = '0.000'").project("id, m['a']").fetchall() == [(2, "-0.5")]
            assert of.filter("x > '1' and id < 9").project("id, l").fetchall() == [(1, ["5", None])]
            assert of.filter("x is null").project("id").fetchall() == [(3,)]
            assert of.project("id").order("id").fetchall() == [(1,), (2,), (3,)]


def test_what_pandas_has_no_column_for_is_refused_with_the_way_that_works(world: World) -> None:
    client = world.client()
    writer = client.open_writer("s", persist.Schema({"id": "int64"}, {"m": "map<int32, list<uuid>>"}))
    writer.compare_and_append([{"id": 1, "m": {1: [bytes(16)]}}], 0, 1)
    with client.open_reader("s").snapshot(0) as snap:
        with pytest.raises(InvalidUsage, match=r"pandas\.ArrowDtype"):
            snap.to_pandas()
        assert len(snap.to_pandas(types_mapper=pd.ArrowDtype)) == 1


def test_duckdb_joins_two_snapshots_and_counts_each_row(read: persist.ReadHandle) -> None:
    now, before = read.snapshot(39, diff=True), read.snapshot(20, diff=True)
    relation = duckdb.sql("select count(*) from now join before using (id, word)")
    assert relation is not None
    joined = relation.fetchall()
    keys = [{(r["id"], r["word"]) for r in s.to_pylist() if r["word"] is not None} for s in (now, before)]
    assert joined == [(len(keys[0] & keys[1]),)]
    relation = now.to_duckdb()
    rows = now.to_pylist()
    assert relation.aggregate("count(*)").fetchall() == [(len(rows),)]
    assert relation.aggregate("sum(_diff)").fetchall() == [(sum(r["_diff"] for r in rows),)]
    assert Counter(relation.project("word").fetchall()) == Counter((r["word"],) for r in rows), "rows stay apart"
    negative = [r for r in rows if r["_diff"] < 0 and r["id"] > 3]
    assert relation.filter("_diff < 0 and id > 3").project("id").fetchall() == [(r["id"],) for r in negative]
    assert relation.filter("word is null").aggregate("count(*)").fetchall() == [(sum(r["word"] is None for r in rows),)]


@pytest.mark.parametrize(
    "predicate",
    [
        pl.col("id") > 7, pl.col("id") == 7, pl.col("id") != 7, pl.col("id") <= 7, pl.col("word") == "a",
        pl.col("word").is_null(), pl.col("word").is_not_null() & (pl.col("id") < 12), pl.col("id").is_between(3, 9),
        (pl.col("id") > 20) | (pl.col("word") == "b"), ~(pl.col("word") == "a"), pl.col("word").is_in(["a"]),
        pl.col("_diff") < 0, (pl.col("_diff") > 1) & (pl.col("id") > 5), pl.col("word").str.starts_with("a"),
        pl.col("id") + 1 > 7, (pl.col("id") > 5) & (pl.col("id") * 2 < 20), pl.col("id") > 2**40,
        ~((pl.col("id") > 5) & (pl.col("word").str.len_chars() > 0)), pl.lit(True), pl.col("word") > "a",
        pl.col("word").eq_missing("a"), pl.col("id") > -1.5, pl.col("id") == pl.col("_diff"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", [None, ["word"]])
def test_a_lazy_scan_of_polars_gives_what_polars_gives_of_the_whole(
    read: persist.ReadHandle, predicate: pl.Expr, columns: list[str] | None
) -> None:
    for snapshot in (read.snapshot(39, diff=True), read.snapshot(39, filter=pc.field("id") > 2, diff=True)):
        want = snapshot.to_polars().filter(predicate)
        found = snapshot.scan_polars().filter(predicate)
        if columns is not None:
            want, found = want.select(columns), found.select(columns)
        assert found.collect().equals(want)
        assert found.head(2).collect().equals(want.head(2))
        assert found.select(pl.len()).collect().item() == len(want)


def test_polars_filters_of_every_type_are_exact(world: World) -> None:
    write, read = world.client().open_shard("all", EVERYTHING)
    write.compare_and_append(everything(), 0, 1)
    snapshot = read.snapshot(0, diff=True)
    frame = snapshot.to_polars()
    for name in frame.columns:
        for value in (frame[name][0], frame[name][1]):
            if value is None or isinstance(value, (bytes, dt.time)):
                continue
            for predicate in (pl.col(name) == value, pl.col(name) > value, pl.col(name) <= value):
                assert snapshot.scan_polars().filter(predicate).collect().equals(frame.filter(predicate)), name


def test_engines_read_only_the_columns_and_rows_that_they_need(
    read: persist.ReadHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str]] = []
    selected = persist.Snapshot._selected

    def spy(self: persist.Snapshot, names: Any, where: Any) -> Any:
        asked.append((sorted(names), str(where and where.expression)))
        return selected(self, names, where)

    monkeypatch.setattr(persist.Snapshot, "_selected", spy)
    snapshot = read.snapshot(39, diff=True)
    lazy, relation = snapshot.scan_polars(), snapshot.to_duckdb()
    long = pl.col("word").str.len_chars() > 2
    lazy.filter((pl.col("id") > 5) & long).select("id").collect()
    lazy.filter((pl.col("id") > 5) | long).collect()
    lazy.filter(pl.col("id") > 5.5).select("id").collect()
    lazy.filter(pl.col("_diff") > 1).select("id").collect()
    relation.filter("id > 5").project("id").fetchall()
    relation.filter("word = 'a' and _diff > 1").project("id").fetchall()
    assert asked == [
        (["id", "word"], "(id > 5)"), (["_diff", "id", "word"], "None"), (["id"], "None"), (["_diff", "id"], "None"),
        (["id"], "(id > 5)"), (["_diff", "id", "word"], "None"),
    ]  # fmt: skip


@pytest.mark.parametrize("way", [name for name in WAYS if name != "to_polars"])
def test_a_door_of_a_closed_handle_says_so(world: World, way: str) -> None:
    client = world.client(TINY)
    filled(client)
    read = client.open_reader("s")
    snapshot, changes = read.snapshot(39, diff=True), read.changes(3)
    read.close()
    for found in (snapshot, changes):
        # DuckDB's own errors have the text of what it was told.
        kind = duckdb.Error if way == "duckdb.sql" else LeaseExpired
        with pytest.raises(kind, match="reader was closed"):
            WAYS[way](found)


def test_what_is_lazy_says_that_its_handle_was_closed_in_the_meantime(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    read = client.open_reader("s")
    snapshot = read.snapshot(39, diff=True)
    reader, relation, frame = snapshot.to_reader(), snapshot.to_duckdb(), snapshot.scan_polars()
    read.close()
    for consume in (reader.read_all, relation.fetchall, frame.collect):
        with pytest.raises(Exception, match="closed"):
            consume()
    read = client.open_reader("s")
    released = read.snapshot(39, diff=True)
    frame = released.scan_polars()
    released.release()
    with pytest.raises(Exception, match="released"):
        frame.collect()
    with pytest.raises(InvalidUsage, match="released"):
        pa.table(released)
    other = world.client(TINY)
    closed = other.open_reader("s", purpose="x").snapshot(39, diff=True)
    frame = closed.scan_polars()
    other.close()
    with pytest.raises(Exception, match="closed"):
        frame.collect()


def test_damage_keeps_its_type_where_it_can_and_its_message_everywhere(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    (key, *_) = [entry.key for entry in world.inner.blob.list("s/") if "rollup" not in entry.key]
    snapshot = client.open_reader("s").snapshot(39, diff=True)
    data = bytearray(world.inner.blob.get(key) or b"")
    data[len(data) // 2] ^= 1
    world.inner.blob.delete(key)
    world.inner.blob.set(key, bytes(data))
    with pytest.raises(Corrupt):
        pa.table(snapshot)
    for consume in (lambda: snapshot.to_duckdb().fetchall(), lambda: snapshot.scan_polars().collect()):
        with pytest.raises(Exception, match="digest"):
            consume()


def test_a_relation_outlives_the_names_that_it_was_made_with(read: persist.ReadHandle) -> None:
    count = read.snapshot(39, diff=True).to_arrow().num_rows
    relation = read.snapshot(39, diff=True).to_duckdb(duckdb.connect())
    frame = read.snapshot(39, diff=True).scan_polars()
    gc.collect()
    assert relation.aggregate("count(*)").fetchall() == [(count,)]
    assert frame.collect().height == count


def test_wrong_arguments_of_doors_are_refused(read: persist.ReadHandle) -> None:
    snapshot = read.snapshot(39, diff=True)
    for connection in ("x", 5, object()):
        with pytest.raises(InvalidUsage, match="connection"):
            snapshot.to_duckdb(connection)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("duckdb", lambda s: s.to_duckdb(), "sql"), ("polars", lambda s: s.to_polars(), "polars"),
        ("polars.io.plugins", lambda s: s.scan_polars(), "polars"), ("pandas", lambda s: s.to_pandas(), "pandas"),
    ],
)  # fmt: skip
def test_what_is_not_installed_is_named_with_its_extra(
    read: persist.ReadHandle, monkeypatch: pytest.MonkeyPatch, module: str, call: Callable[[Any], Any], extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(InvalidUsage, match=rf"persist-lib\[{extra}\]"):
        call(read.snapshot(39, diff=True))


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [persist.Config(), TINY])
@pytest.mark.parametrize("maintained", [False, True])
def test_changes_are_what_lies_between_two_contents(world: World, config: persist.Config, maintained: bool) -> None:
    client = world.client(config)
    model = filled(client)
    read = client.open_reader("s")
    if maintained:
        client.maintain("s")
    for from_, to in [(0, 39), (0, 0), (39, 39), (3, 4), (3, None), (17, 23), (None, 5), (None, None), (None, 0)]:
        changes = read.changes(from_, to)
        table = changes.to_arrow()
        assert table.schema == SCHEMA.updates
        times = table.column("_time").to_pylist()
        end = 39 if to is None else to
        assert all((from_ is None or from_ < time) and time <= end for time in times)
        assert len({(r["id"], r["word"], r["_time"]) for r in table.to_pylist()}) == table.num_rows, "consolidated"
        sums: Counter[Any] = Counter()
        for r in table.to_pylist():
            sums[r["id"], r["word"]] += r["_diff"]
        before = Counter() if from_ is None else Counter(model.contents(from_))
        want = Counter(model.contents(end))
        want.subtract(before)
        assert {k: v for k, v in sums.items() if v} == {k: v for k, v in want.items() if v}
        assert pa.concat_tables([table.slice(0, 0), *changes.batches()]) == table
        assert changes.to_pylist() == changes.to_polars().to_dicts() == table.to_pylist()
        assert len(changes.to_pandas()) == table.num_rows


def test_changes_have_exact_times_and_edges(world: World) -> None:
    write, read = world.client().open_shard("s", SCHEMA)
    rows = [row(n, "w", n) for n in range(5)]
    write.compare_and_append([*rows, row(1, "w", 1), row(9, "x", 3, 1), row(9, "x", 3, -1)], 0, 5)
    assert [(r["id"], r["_time"], r["_diff"]) for r in read.changes(0, 3).to_pylist()] == [
        (1, 1, 2),
        (2, 2, 1),
        (3, 3, 1),
    ]
    assert read.changes(4).to_pylist() == []
    assert (read.changes(2).to, read.changes(2).from_) == (4, 2)
    with pytest.raises(InvalidUsage, match="forward"):
        read.changes(3, 2)
    with pytest.raises(TimedOut):
        read.changes(3, 5, timeout=0.01)
    with pytest.raises(TimedOut):
        read.changes(5, timeout=0.01)
    write.finish(5)
    assert read.changes(4, 2**64 - 1).to_pylist() == []
    assert len(read.changes(None).to_pylist()) == 5
    for wrong in (-2, 2**64, "1", 1.5, True):
        with pytest.raises(InvalidUsage):
            read.changes(wrong)
        with pytest.raises(InvalidUsage):
            read.changes(0, wrong)


def test_changes_respect_since(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    read = client.open_reader("s")
    kept = read.changes(9, 30)
    want = kept.to_arrow()
    read.downgrade_since(10)
    for _ in range(3):
        client.maintain("s")
    with pytest.raises(SinceViolation):
        read.changes(9)
    with pytest.raises(SinceViolation):
        read.changes(None)
    assert read.changes(10, 30).to_arrow() == want.filter(pc.field("_time") > 10)
    assert kept.to_arrow() == want, "what was held is read as it was"
    late = client.open_reader("s")
    assert late.since == persist.at(10)
    with pytest.raises(SinceViolation):
        late.changes(9)


def test_changes_of_an_older_schema_add_up_what_became_equal(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1, "w", 0)], 0, 1)
    client.evolve_schema("s", WIDER)
    newer = client.open_writer("s", WIDER)
    rows = [{"id": 1, "word": "w", "more": n, "_time": n} for n in (1, 2)]
    newer.compare_and_append([*rows, {"id": 1, "word": "w", "more": 7, "_time": 1}], 1, 3)
    assert [(r["_time"], r["_diff"]) for r in read.changes(0).to_pylist()] == [(1, 2), (2, 1)]
    assert read.snapshot(2, diff=True).to_pylist() == [{"id": 1, "word": "w", "_diff": 4}]


# --- models -----------------------------------------------------------------------------------------------------------


class OrderKey(pydantic.BaseModel):
    order_id: int


class Order(pydantic.BaseModel):
    state: str
    cents: int | None = None


class Flat(pydantic.BaseModel):
    order_id: int
    state: str


def test_rows_come_back_as_instances(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("o", persist.Schema(key=OrderKey, value=Order))
    write.compare_and_append([(OrderKey(order_id=1), Order(state="a", cents=5))] * 2, 0, 1)
    write.compare_and_append([(OrderKey(order_id=2), Order(state="b"))], 1, 2)
    pairs = [(OrderKey(order_id=1), Order(state="a", cents=5))] * 2 + [(OrderKey(order_id=2), Order(state="b"))]
    assert read.snapshot(diff=True).to_models() == pairs
    flat = read.snapshot(diff=True).to_models(Flat)
    assert flat == [Flat(order_id=1, state="a")] * 2 + [Flat(order_id=2, state="b")]
    assert flat[0] is not flat[1]
    assert read.snapshot(columns=["state"], diff=True).to_models(Order) == [Order(state="a")] * 2 + [Order(state="b")]
    assert read.changes(0).to_models(Flat) == [Flat(order_id=2, state="b")]


def test_instances_that_cannot_be_are_refused(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1, None, 0), row(2, "w", 0, -1)], 0, 1)

    class Word(pydantic.BaseModel):
        id: int
        word: str

    class More(pydantic.BaseModel):
        id: int
        more: int

    with pytest.raises(InvalidUsage, match="-1 times"):
        read.snapshot(diff=True).to_models(Word)
    one = read.snapshot(key=(1,), diff=True)
    with pytest.raises(InvalidUsage, match=r"row 0.*no Word"):
        one.to_models(Word)
    with pytest.raises(InvalidUsage, match="needs"):
        one.to_models(More)
    with pytest.raises(InvalidUsage, match="not opened with"):
        one.to_models()
    for wrong in (5, "x", dict, object()):
        with pytest.raises(InvalidUsage, match="pydantic"):
            one.to_models(wrong)  # type: ignore[arg-type]
