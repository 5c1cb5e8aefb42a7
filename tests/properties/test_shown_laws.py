"""Filters and projections: what is pruned, filtered early or added up piece by piece is what the whole says."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import reduce
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.format.predicate import Where
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.conversions import selected
from persist_lib.relation.projection import added_up, projection_of

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.sampled_from([-128, -1, 0, 1, 127]),
    "int64": st.sampled_from([-(2**63), -1, 0, 7, 2**53 + 1, 2**63 - 1]),
    "uint64": st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]),
    "float64": st.sampled_from([float("nan"), float("-inf"), -1.5, -0.0, 0.0, 1.5, float("inf")]),
    "float32": st.sampled_from([float("nan"), -0.0, 0.0, 1.5]),
    "bool": st.booleans(),
    "string": st.sampled_from(["", "a", "a\0", "ab", "b", "ÿ", "\U0010ffff", "x" * 70, "x" * 70 + "y", "z" * 5000]),
    "binary": st.sampled_from([b"", b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 5000, b"\xff" * 70]),
    "fixed_size_binary[2]": st.sampled_from([b"\0\0", b"ab", b"\xff\xff", b"\x80\0"]),
    "date32": st.sampled_from([dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2020, 2, 29), dt.date(9999, 12, 31)]),
    "time64[us]": st.sampled_from([dt.time(), dt.time(12, 30, 0, 1), dt.time(23, 59, 59, 999_999)]),
    "timestamp[s]": st.sampled_from([dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31), dt.datetime(2020, 1, 1)]),  # noqa: DTZ001
    "timestamp[ns]": st.sampled_from([dt.datetime(1700, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 1)]),  # noqa: DTZ001
    "timestamp[us, UTC]": st.sampled_from([dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (1, 1960, 9999)]),
    "duration[ms]": st.sampled_from([dt.timedelta(days=-1), dt.timedelta(), dt.timedelta(days=1, milliseconds=1)]),
    "decimal128(5, 2)": st.sampled_from([Decimal("-999.99"), Decimal("-0.01"), Decimal(0), Decimal("999.99")]),
    "decimal128(38, 0)": st.sampled_from([Decimal(-(10**37)), Decimal(-1), Decimal(2**64), Decimal(10**37)]),
}  # fmt: skip
KINDS = st.sampled_from(sorted(VALUES))
COMPARISONS = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[persist.Schema, list[list[dict[str, Any]]]]:
    """A schema of one or two key columns and some others, and rows of a few appends."""
    kinds = draw(st.lists(KINDS, min_size=2, max_size=4))
    names = "abcd"[: len(kinds)]
    keys = draw(st.integers(1, len(kinds)))
    columns = dict(zip(names, kinds, strict=True))
    schema = persist.Schema(
        key={name: columns[name] for name in names[:keys]}, value={name: columns[name] for name in names[keys:]}
    )
    one = st.fixed_dictionaries({name: st.none() | VALUES[kind] for name, kind in columns.items()})
    appends = st.lists(
        st.lists(st.tuples(one, st.sampled_from([1, 1, 2, -1, -2])), max_size=20), min_size=1, max_size=4
    )
    return schema, [[{**row, "_diff": diff} for row, diff in rows] for rows in draw(appends)]


def literal(value: Any, kind: pa.DataType) -> pc.Expression:
    return pc.scalar(pa.scalar(value, kind))


@st.composite
def filters(draw: st.DrawFn, schema: persist.Schema) -> pc.Expression:
    """An expression on its columns."""

    def leaf() -> pc.Expression:
        column = draw(st.sampled_from(schema.columns))
        field, kind, values = pc.field(column.name), column.field.type, VALUES[column.type]
        what = draw(st.sampled_from(["compare", "compare", "compare", "in", "null", "valid", "columns", "cast"]))
        if what == "in":
            return field.isin(pa.array(draw(st.lists(values | st.none(), max_size=3)), kind))
        if what == "null":
            return field.is_null(nan_is_null=draw(st.booleans()))
        if what == "columns":
            return field == pc.field(draw(st.sampled_from([c.name for c in schema.columns if c.type == column.type])))
        if what == "cast" and pa.types.is_string(kind):
            return pc.starts_with(field, draw(values))
        if what == "valid":
            return field.is_valid()
        return getattr(field, draw(st.sampled_from(COMPARISONS)))(literal(draw(values), kind))

    found = leaf()
    for _ in range(draw(st.integers(0, 2))):
        other = leaf()
        found = draw(st.sampled_from([found & other, found | other, ~found & other, ~(found | other)]))
    return found


@pytest.fixture(scope="module", autouse=True)
def small_groups() -> Iterator[None]:
    """Row groups of four rows, so that there are some to prune."""
    with mock.patch("persist_lib.format.parquet.GROUP_ROWS", 4):
        yield


def bits(table: pa.Table) -> Counter[str]:
    """The rows, with NaN and -0.0 told apart from others."""
    return Counter(map(repr, table.to_pylist()))


def filtered(table: pa.Table, expression: pc.Expression) -> pa.Table:
    return table.filter(expression)


@settings(max_examples=100)
@given(data=st.data(), world=worlds(), inline=st.sampled_from([0, 1 << 14]), is_compacted=st.booleans())
def test_a_filter_leaves_what_the_filter_of_the_whole_leaves(
    data: st.DataObject, world: tuple[persist.Schema, list[list[dict[str, Any]]]], inline: int, is_compacted: bool
) -> None:
    schema, appends = world
    config = persist.Config(inline_bytes=inline, part_bytes=64 << 10)
    with persist.open("memory:", config=config, runtime=persist.Runtime(background=False)) as client:
        write, read = client.open_shard("s", schema)
        for time, rows in enumerate(appends):
            write.compare_and_append(rows, time, time + 1)
        if is_compacted:
            if data.draw(st.booleans()):
                read.downgrade_since(len(appends) - 1)
            client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
        snapshot = read.snapshot(len(appends) - 1, diff=True)
        whole = snapshot.to_arrow()
        names = data.draw(st.lists(st.sampled_from(schema.names), unique=True))
        for expression in [data.draw(filters(schema)) for _ in range(3)]:
            want = filtered(whole, expression)
            found = read.snapshot(snapshot.as_of, filter=expression, diff=True)
            assert found.to_arrow().equals(want) or bits(found.to_arrow()) == bits(want)
            streamed = pa.concat_tables([want.slice(0, 0), *found.batches()])
            assert found.to_arrow().to_pylist().__repr__() == streamed.to_pylist().__repr__()
            assert bits(pa.concat_tables([split.to_arrow(client.blob) for split in found.splits(3)])) == bits(want)
            pruned = [*selected(found, [*names, "_diff"], None)]
            assert bits(pa.concat_tables([want.select([*names, "_diff"]).slice(0, 0), *pruned])) == bits(
                want.select([*names, "_diff"])
            )
            narrow = read.snapshot(snapshot.as_of, filter=expression, columns=names, diff=True)
            expected = summed(schema, want, names)
            assert bits(narrow.to_arrow()) == bits(expected)
            assert bits(pa.concat_tables([expected.slice(0, 0), *narrow.batches()])) == bits(expected)
            if len(names) == len(schema.names):
                assert [repr(r) for r in narrow.to_pylist()] == [repr(r) for r in want.to_pylist()], "in key order"


def summed(schema: persist.Schema, table: pa.Table, names: list[str]) -> pa.Table:
    """The projection of a small table, added up in Python."""
    order = [name for name in schema.names if name in names]
    sums: dict[str, list[Any]] = {}
    for row in table.to_pylist():
        diff = row.pop("_diff")
        values = [row[name] for name in order]
        kept = sums.setdefault(repr(values), [values, 0])
        kept[1] += diff
    rows = [dict(zip(order, values, strict=True)) | {"_diff": total} for values, total in sums.values() if total]
    return pa.Table.from_pylist(rows, table.select([*order, "_diff"]).schema)


ROWS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from([None, "a", "b", "c" * 50]), st.integers(-2, 2)), max_size=60
)


@given(chunks=st.lists(ROWS, max_size=12), memory=st.sampled_from([1, 2_000, 20_000, 1 << 28]))
def test_rows_that_are_added_up_in_temporary_files_are_those_added_up_in_memory(
    chunks: list[list[tuple[int, str | None, int]]], memory: int
) -> None:
    schema = persist.Schema(key={"n": "int64"}, value={"s": "string", "t": "string"})
    projected = projection_of(schema, ["n", "s"])
    assert projected is not None
    tables = [
        pa.Table.from_pylist([{"n": n, "s": s, "_diff": d} for n, s, d in rows], projected.contents) for rows in chunks
    ]
    found = pa.concat_tables([projected.contents.empty_table(), *added_up(tables, projected, memory)])
    whole = pa.concat_tables([projected.contents.empty_table(), *tables])
    assert found.equals(consolidate(projected, whole)) or found.num_rows == 0
    (total,) = added_up([table.select(["_diff"]) for table in tables], None, memory)
    want = sum(d for rows in chunks for _, _, d in rows)
    assert total.to_pylist() == ([{"_diff": want}] if want else [])


def test_the_names_of_a_filter_are_those_that_it_looks_at() -> None:
    columns = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64())])
    cases: list[tuple[pc.Expression, tuple[str, ...]]] = [
        (pc.field("a") == 1, ("a",)), (pc.scalar(True), ()),
        ((pc.field("a") == 1) | pc.field("c").is_nan(), ("a", "c")),
        (pc.field("b") == "FieldPath(0)", ("b",)), (pc.field("b") == "a", ("b",)), (pc.field("b") == "a c", ("b",)),
        (reduce(lambda x, y: x & y, [pc.field("c") > 1] * 3), ("c",)),
    ]  # fmt: skip
    odd = pa.schema([("a b", pa.int64()), ('"', pa.int64()), ("ü\n", pa.int64()), ("b", pa.int64())])
    for name in odd.names:
        where = Where.of(odd, pc.field(name) == 1)
        assert where is not None
        assert where.names == (name,)
    for expression, names in cases:
        where = Where.of(columns, expression)
        assert where is not None
        assert where.names == names
