"""SQL over a snapshot, by each door, is SQL over the same bag of rows: multiplicities, columns, filters, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist

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
DUCKDB = duckdb.connect()
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
