"""All that a snapshot can be asked for at once: keys, filter and columns, as of a time of a clock, through every door.

Whatever is asked together, and however the shard is stored, the answer is what Python makes of the whole contents.

SQL over a snapshot, by each door, is SQL over the same bag of rows: multiplicities, columns, filters, limits.
"""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from tests.properties.test_shown_laws import COMPARISONS, bits, literal, small_groups, summed

__all__ = ["small_groups"]

OLDER = persist.Schema({"a": "int64", "b": "string"}, {"v": "int64", "w": "string"}, times="ms")
NEWER = persist.Schema({"a": "int64", "b": "string"}, {"v": "int64", "w": "string", "x": "int64"}, times="ms")
START = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
START_MS = int(START.timestamp() * 1000)
MINUTE = 60_000
INTS, WORDS = st.sampled_from([None, -1, 0, 1, 2, 7]), st.sampled_from([None, "", "a", "ab", "b" * 40])
POOLS: dict[str, st.SearchStrategy[Any]] = {"a": INTS, "b": WORDS, "v": INTS, "w": WORDS, "x": INTS}
DUCKDB = duckdb.connect()
DIFFS = st.sampled_from([1, 1, 1, 2, -1, -2])


def appends(schema: persist.Schema) -> st.SearchStrategy[list[list[dict[str, Any]]]]:
    row = st.fixed_dictionaries({**{name: POOLS[name] for name in schema.names}, "_diff": DIFFS})
    return st.lists(st.lists(row, max_size=25), min_size=1, max_size=3)


@st.composite
def filters(draw: st.DrawFn, schema: persist.Schema) -> pc.Expression:
    found = None
    for _ in range(draw(st.integers(1, 2))):
        column = draw(st.sampled_from(schema.columns))
        one = getattr(pc.field(column.name), draw(st.sampled_from(COMPARISONS)))(
            literal(draw(POOLS[column.name]), column.field.type)
        )
        one = draw(st.sampled_from([one, pc.field(column.name).is_null(), ~one]))
        found = one if found is None else draw(st.sampled_from([found & one, found | one]))
    return found


def in_python(whole: pa.Table, schema: persist.Schema, asked: dict[str, Any]) -> pa.Table:
    """What is asked for, made of the whole contents."""
    table = whole
    if (keys := asked.get("keys")) is not None:
        table = table.filter(pa.array([(r["a"], r["b"]) in keys for r in table.to_pylist()], pa.bool_()))
    if (prefix := asked.get("key")) is not None:
        table = table.filter(pa.array([r["a"] == prefix[0] for r in table.to_pylist()], pa.bool_()))
    if (expression := asked.get("filter")) is not None:
        table = table.filter(expression)
    return table if asked.get("columns") is None else summed(schema, table, asked["columns"])


def joined_up(target: pa.Schema, tables: Any) -> pa.Table:
    return pa.concat_tables([target.empty_table(), *tables])


def append(write: persist.WriteHandle, rows: list[dict[str, Any]], minute: int) -> None:
    time = START_MS + minute * MINUTE
    write.compare_and_append([{**row, "_time": time} for row in rows], time, time + MINUTE)


@settings(max_examples=40)
@given(
    data=st.data(), older=appends(OLDER), newer=st.none() | appends(NEWER), reads_older=st.booleans(),
    inline=st.sampled_from([0, 1 << 14]), compacted=st.sampled_from([None, "whole", "advanced", "between"]),
)  # fmt: skip
def test_what_is_asked_together_is_what_python_makes_of_the_whole(
    data: st.DataObject, older: list[list[dict[str, Any]]], newer: list[list[dict[str, Any]]] | None,
    reads_older: bool, inline: int, compacted: str | None,
) -> None:  # fmt: skip
    config = persist.Config(inline_bytes=inline, part_bytes=64 << 10)
    policy = persist.Policy(weight=1e9, advance=0.01)
    with persist.open("memory:", config=config, runtime=persist.Runtime(background=False)) as client:
        write = client.open_writer("s", OLDER)
        write.advance_upper(START)
        for minute, rows in enumerate(older):
            append(write, rows, minute)
        if compacted == "between":
            client.compact("s", policy=policy)
        if newer is not None:
            client.evolve_schema("s", NEWER)
            write = client.open_writer("s", NEWER)
            for minute, rows in enumerate(newer, len(older)):
                append(write, rows, minute)
        schema = OLDER if newer is None or reads_older else NEWER
        read = client.open_reader("s", schema)
        steps = len(older) + len(newer or [])
        minute = data.draw(st.integers(0, steps - 1))
        if compacted == "advanced":
            read.downgrade_since(START + dt.timedelta(minutes=minute))
        if compacted is not None:
            client.compact("s", policy=policy)
        as_of = data.draw(st.sampled_from([
            START_MS + minute * MINUTE, START + dt.timedelta(minutes=minute, seconds=30), f"2026-11-22T12:{minute:02}Z",
        ]))  # fmt: skip
        history = [row for rows in [*older, *(newer or [])][: minute + 1] for row in rows]
        blank = dict.fromkeys(schema.names)
        stored = pa.Table.from_pylist(
            [{**blank, **{name: row[name] for name in row if name in blank or name == "_diff"}} for row in history],
            schema.contents,
        )
        whole = summed(schema, stored, schema.names)
        assert bits(read.snapshot(as_of, diff=True).to_arrow()) == bits(whole)

        for _ in range(2):
            asked: dict[str, Any] = {}
            rows = history or [dict.fromkeys("ab")]
            some = st.sampled_from([(row["a"], row["b"]) for row in rows]) | st.tuples(INTS, WORDS)
            which = data.draw(st.sampled_from(["keys", "keys", "key", "none"]))
            if which == "keys":
                asked["keys"] = data.draw(st.lists(some, max_size=6))
            elif which == "key":
                asked["key"] = (data.draw(some)[0],)
            if data.draw(st.booleans()):
                asked["filter"] = data.draw(filters(schema))
            if data.draw(st.booleans()):
                asked["columns"] = data.draw(st.lists(st.sampled_from(schema.names), unique=True))
            want = in_python(whole, schema, asked)
            check_doors(client, read.snapshot(as_of, **asked, diff=True), want, data)


def check_doors(client: persist.Client, snapshot: persist.Snapshot, want: pa.Table, data: st.DataObject) -> None:
    names = snapshot.schema.names
    want = want.select(names)
    rows = snapshot.to_arrow()
    assert rows.schema.equals(snapshot.schema)
    assert bits(rows) == bits(want)
    streamed = [snapshot.batches(), [snapshot.to_reader().read_all()], [pa.table(snapshot)]]
    tables = data.draw(st.sampled_from(streamed))
    assert joined_up(rows.schema, tables).to_pylist() == rows.to_pylist(), "in the same order"

    splits = snapshot.splits(data.draw(st.integers(1, 4)))
    parts = joined_up(rows.schema, [pickle.loads(pickle.dumps(split)).to_arrow(client.blob) for split in splits])
    if set("ab") <= set(names):
        assert parts.to_pylist() == rows.to_pylist()
    else:  # equal rows may be in several splits
        assert totals(parts) == totals(rows)

    # An engine that wants less of it still: rows that look alike stay apart.
    seen, least = data.draw(st.sampled_from(names)), data.draw(st.sampled_from([None, -1, 0, 2]))
    asked = [name for name in names if name in ("a", "v", "x", "_diff")]
    by = data.draw(st.sampled_from(asked)) if least is not None else None
    some = want if by is None else want.filter(pc.field(by) >= least)
    expected = bits(some.select([seen]))
    if data.draw(st.booleans()):
        relation = snapshot.to_duckdb(DUCKDB)
        relation = relation if by is None else relation.filter(f'"{by}" >= {least}')
        assert bits(relation.project(f'"{seen}"').to_arrow_table()) == expected
    else:
        lazy = snapshot.scan_polars()
        lazy = lazy if by is None else lazy.filter(pl.col(by) >= least)
        assert bits(lazy.select(seen).collect().to_arrow()) == expected


def totals(table: pa.Table) -> dict[str, int]:
    """The sum of the multiplicities of each row, of rows that may be there several times."""
    found: dict[str, int] = {}
    for row in table.to_pylist():
        diff = row.pop("_diff")
        found[repr(row)] = found.get(repr(row), 0) + diff
    return {row: total for row, total in found.items() if total}


SCHEMA = persist.Schema(key={"a": "int64", "b": "string"}, value={"v": "int64"})
BAGS = st.lists(
    st.tuples(st.sampled_from([None, 1, 2, 3]), st.sampled_from(["", "x"]), st.sampled_from([None, 0, 7, 100])),
    max_size=12,
)
TIMES = st.sampled_from([1, 1, 2, 3, 300])
QUERIES = (
    "select count(*), sum(v), avg(v), min(v) from t",
    "select v, count(*) from t group by all order by all",
    "select count(*) from t where v > 5",
    "select count(*) from t anti join (select 7 as v) using (v)",
    "select sum(v) from (select v from t order by all limit 5)",
    "select count(*) from (select v from t limit 3)",
)
DOORS: dict[str, Callable[[Any], Any]] = {
    "to_duckdb": lambda found: found.to_duckdb(DUCKDB),
    "to_arrow": lambda found: found.to_arrow(),
    "C stream": pa.table,
    "batches": lambda found: pa.concat_tables([found.schema.empty_table(), *found.batches()]),
    "pandas": lambda found: found.to_pandas(),
    "polars": lambda found: found.to_polars(),
    "scan_polars": lambda found: found.scan_polars().collect(),
}
COLUMNS = st.sampled_from([None, ["v"], ["a", "v"], ["a", "b", "v"]])
FILTERS = st.sampled_from([None, pc.field("v") > 5, pc.field("a") == 1, pc.field("b") == "x"])


def answers(door: str, rows: Any) -> list[Any]:
    if door == "to_duckdb":
        rows.create_view("t", replace=True)
    else:
        DUCKDB.register("t", rows)
    try:
        return [DUCKDB.sql(query).fetchall() for query in QUERIES]
    finally:
        DUCKDB.execute("drop view if exists t")


def written(client: persist.Client, shards: int, *appends: list[tuple[Any, int]]) -> Any:
    """A reader of a shard, or of a collection of shards, with these rows at times from 0 on."""
    if shards:
        controller = client.controller()
        controller.create("s", SCHEMA, shards=shards, mode="compare_and_append")
    with controller.open_writer("s") if shards else client.open_writer("s", SCHEMA) as write:
        for time, rows in enumerate(appends):
            given_ = [{**dict(zip(SCHEMA.names, row, strict=True)), "_diff": diff} for row, diff in rows]
            write.compare_and_append([{**one, "_time": time} for one in given_], time, time + 1)
    return controller.open_reader("s") if shards else client.open_reader("s")


@settings(max_examples=12, deadline=None)
@given(
    bag=BAGS, often=TIMES, later=BAGS, gone=BAGS, columns=COLUMNS, filter_=FILTERS, is_compacted=st.booleans(),
    shards=st.sampled_from([0, 2]), n=st.integers(1, 3),
)  # fmt: skip
def test_sql_over_a_snapshot_is_sql_over_the_same_bag(
    bag: list[Any], often: int, later: list[Any], gone: list[Any], columns: list[str] | None,
    filter_: pc.Expression | None, is_compacted: bool, shards: int, n: int,
) -> None:  # fmt: skip
    first = [(row, often if place == 0 else 1) for place, row in enumerate(bag)] + [(row, 1) for row in gone]
    second = [(row, 1) for row in later] + [(row, -1) for row in gone]
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        read = written(client, shards, first, second)
        if is_compacted and not shards:
            client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
        kept = [row for row, times in first[: len(bag)] for _ in range(times)] + later
        whole = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in kept], SCHEMA.data)
        expected = (whole if filter_ is None else whole.filter(filter_)).select(columns or SCHEMA.names)
        with read.snapshot(columns=columns, filter=filter_) as found:
            assert found.count() == expected.num_rows
            want = answers("to_arrow", expected)
            for door, rows in DOORS.items():
                assert answers(door, rows(found)) == want, door
            assert sum(split.to_arrow(client.blob).num_rows for split in found.splits(n)) == expected.num_rows
            assert found.scan_polars().select(pl.len()).collect().item() == expected.num_rows
