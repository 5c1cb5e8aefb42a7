"""Nested values as bytes: their order is the values' own, and equal bytes are equal values, however they lie."""

from __future__ import annotations

import math
import struct
from datetime import date
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist_lib.kernel.columns import array_of, comparable
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.gather import rows_of
from persist_lib.kernel.order import adjacent_ties, columns_in_order, sort_order
from persist_lib.schema.schema import Schema

FLAT: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint16(): st.integers(0, 65535),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    pa.binary(): st.binary(max_size=9) | st.just(b"\0\xff\0"),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.decimal128(38, 2): st.decimals(-(10**6), 10**6, places=2),
    pa.decimal256(70, 0): st.integers(-(10**69), 10**69).map(Decimal),
    pa.date32(): st.dates(),
}


def nullable(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def kinds(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    """A type, nested at the outside, at most `depth` deep."""
    inner = st.sampled_from(list(FLAT)) if depth == 1 else st.sampled_from(list(FLAT)) | kinds(depth - 1)
    shape = draw(st.sampled_from(["list", "large", "fixed", "struct", "map"]))
    if shape == "list":
        return pa.list_(draw(inner))
    if shape == "large":
        return pa.large_list(draw(inner))
    if shape == "fixed":
        return pa.list_(draw(inner), draw(st.integers(1, 3)))
    if shape == "map":
        return pa.map_(draw(st.sampled_from([pa.string(), pa.int64()])), draw(inner))
    return pa.struct([pa.field(f"f{place}", draw(inner)) for place in range(draw(st.integers(1, 3)))])


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if kind in FLAT:
        return FLAT[kind]
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: nullable(values_of(field.type)) for field in kind})
    if pa.types.is_map(kind):
        pairs = st.dictionaries(values_of(kind.key_type), nullable(values_of(kind.item_type)), max_size=3)
        return pairs.map(lambda found: sorted(found.items()))
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return st.lists(nullable(values_of(kind.value_type)), min_size=size, max_size=size)
    return st.lists(nullable(values_of(kind.value_type)), max_size=3)


def encoded(value: Any, kind: pa.DataType) -> bytes:
    """The cell of a value, by the words of `kernel.nested`, one byte after the other."""
    return b"\1" if value is None else b"\2" + body(value, kind)


def body(value: Any, kind: pa.DataType) -> bytes:
    if pa.types.is_struct(kind):
        cells = [encoded(value[field.name], field.type) for field in kind]
        while cells and cells[-1] == b"\1":
            cells.pop()
        return b"".join(cells) + b"\0"
    if pa.types.is_map(kind):
        entry = pa.struct([pa.field("k", kind.key_type), pa.field("v", kind.item_type)])
        return b"".join(encoded({"k": key, "v": item}, entry) for key, item in value) + b"\0"
    if pa.types.is_nested(kind):
        return b"".join(encoded(item, kind.value_type) for item in value) + b"\0"
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        is_fixed = pa.types.is_fixed_size_binary(kind)
        return value if is_fixed else value.replace(b"\0", b"\0\xff") + b"\0\0"
    if isinstance(value, bool):
        return bytes([value])
    width = kind.bit_width // 8
    if isinstance(value, float):
        return int(rank(value, kind)[1]).to_bytes(width, "big")
    if isinstance(value, date):
        value = (value - date(1970, 1, 1)).days
    if isinstance(value, Decimal):
        value = int(value.scaleb(kind.scale))
    top = 0 if pa.types.is_unsigned_integer(kind) else 1 << (8 * width - 1)
    return int(value + top).to_bytes(width, "big")


def rank(value: Any, kind: pa.DataType) -> Any:
    """What compares as the value does, by the words of the contract."""
    if value is None:
        return (0,)
    if pa.types.is_struct(kind):
        found = [rank(value[field.name], field.type) for field in kind]
        while found and found[-1] == (0,):
            found.pop()
        return (1, found)
    if pa.types.is_map(kind):
        entry = pa.struct([pa.field("k", kind.key_type), pa.field("v", kind.item_type)])
        return (1, [rank({"k": key, "v": item}, entry) for key, item in value])
    if pa.types.is_nested(kind):
        return (1, [rank(item, kind.value_type) for item in value])
    if pa.types.is_floating(kind):
        width = kind.bit_width
        if width == 32:
            bits = struct.unpack(">I", np.array(value, ">f4").tobytes())[0]
        else:
            bits = struct.unpack(">Q", struct.pack(">d", value))[0]
        top = 1 << (width - 1)
        return (1, bits ^ (2 * top - 1) if bits & top else bits | top)
    return (1, value.encode() if isinstance(value, str) else value)


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.DataType, list[Any]]:
    kind = draw(kinds())
    return kind, draw(st.lists(nullable(values_of(kind)), min_size=1, max_size=6))


@given(columns(), st.integers(0, 3))
@example((pa.list_(pa.float64()), [[0.0], [-0.0], [math.nan], [], None, [None]]), 0)
@example((pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.int64())]), [{"a": None, "b": None}, None]), 0)
@example((pa.list_(pa.string()), [["a", "b"], ["ab"], ["a\0", "b"], ["a"], [""], [None]]), 1)
def test_the_bytes_compare_as_the_values(case: tuple[pa.DataType, list[Any]], skipped: int) -> None:
    """In any slice, too, and equal bytes are equal values."""
    kind, values = case
    array = pa.array(values[:skipped] + values, kind).slice(min(skipped, len(values)))
    ranks = [rank(value, kind) for value in values]
    found = [(0,) if cell is None else (1, cell) for cell in comparable(array).to_pylist()]
    for one, his in zip(ranks, found, strict=True):
        for other, its in zip(ranks, found, strict=True):
            assert (one < other) == (his < its)
            assert (one == other) == (his == its)


@given(columns(), st.integers(0, 3))
@example((pa.list_(pa.struct([pa.field("a", pa.int8()), pa.field("b", pa.string())])), [[{"a": 1, "b": "\0"}]]), 0)
@example((pa.struct([pa.field("a", pa.bool_()), pa.field("b", pa.float32())]), [{"a": True, "b": -0.0}]), 1)
@example((pa.list_(pa.binary(), 2), [[b"\0", b"x" * 300], None, [None, b""]]), 2)
def test_the_bytes_are_those_that_one_would_write_by_hand(case: tuple[pa.DataType, list[Any]], skipped: int) -> None:
    """However the column lies: they are made a column at a time."""
    kind, values = case
    array = pa.array(values[:skipped] + values, kind).slice(min(skipped, len(values)))
    cells = [None if value is None else body(value, kind) for value in values]
    assert comparable(array).to_pylist() == cells
    assert comparable(pa.chunked_array([array.slice(1), array])).to_pylist() == cells[1:] + cells


@given(columns(), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=9))
@example((pa.list_(pa.int8(), 2), [[1, 2], [3, 4]]), 1, [1, 1, 0])
@example((pa.struct([pa.field("a", pa.decimal256(50, 1))]), [{"a": Decimal(1)}, {"a": Decimal(2)}]), 1, [1, 1, 0])
@example((pa.map_(pa.string(), pa.list_(pa.bool_())), [[("a", [True]), ("b", [])], None, []]), 2, [2, 0, 1, 0])
def test_rows_are_taken_as_arrow_takes_them(case: tuple[pa.DataType, list[Any]], skipped: int, at: list[int]) -> None:
    """Of slices, and of lists of such, too."""
    kind, values = case
    array = pa.array(values[:skipped] + values, kind).slice(min(skipped, len(values)))
    lists = pa.ListArray.from_arrays(pa.array([0, len(values) // 2, len(values)], pa.int32()), array)
    for rows, count in ((array, len(values)), (lists, 2)):
        places = pa.array([place % count for place in at], pa.int64())
        found = rows_of(rows, places)
        found.validate(full=True)
        assert found.type == rows.type
        assert comparable(found).equals(comparable(pc.take(rows, places)))
        if pa.types.is_list(found.type):  # nulls have no items
            assert len(found.values) == pc.sum(found.value_lengths(), min_count=0).as_py()


@given(columns(), st.data())
def test_values_order_the_rows_whose_keys_tie(case: tuple[pa.DataType, list[Any]], data: st.DataObject) -> None:
    """Columns behind a nested one, too; and whether rows are in order, and which are equal, is found the same way."""
    kind, values = case
    draw_row = st.tuples(st.integers(0, 3), st.integers(0, len(values) - 1), st.integers(0, 2))
    rows = data.draw(st.lists(draw_row, min_size=1, max_size=30)) * data.draw(st.sampled_from([1, 4]))
    columns = [
        pa.array([key for key, _, _ in rows], pa.int64()),
        pa.array([values[at] for _, at, _ in rows], kind),
        pa.array([last for _, _, last in rows], pa.int64()),
    ]
    ranks = [(key, rank(values[at], kind), last) for key, at, last in rows]
    order, ties = sort_order(columns)
    ordered = [ranks[row] for row in order]
    assert ordered == sorted(ranks)
    equal = [one == other for one, other in pairwise(ordered)]
    assert ties.tolist() == equal
    in_order = [rows_of(column, array_of(order)) for column in columns]
    found = adjacent_ties(in_order)
    assert found is not None
    assert found.tolist() == equal
    assert (adjacent_ties(columns) is None) == (ranks != sorted(ranks))
    candidates = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(equal), max_size=len(equal))))
    some = adjacent_ties(in_order, candidates)
    assert some is not None
    assert some.tolist() == [tie and at in candidates for at, tie in enumerate(equal)]


def test_no_value_is_looked_at_where_keys_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take longer than all else."""
    columns = [pa.array([3, 1, 2]), pa.array([[1], [2], [3]], pa.list_(pa.int64()))]
    monkeypatch.setattr("persist_lib.kernel.order.comparable", lambda _: pytest.fail("a value was looked at"))
    order, _ = sort_order(columns)
    assert order.tolist() == [1, 2, 0]
    assert adjacent_ties([rows_of(column, array_of(order)) for column in columns]) is not None


@given(columns())
def test_rows_are_sorted_and_hashed_by_them(case: tuple[pa.DataType, list[Any]]) -> None:
    """The few and the many alike."""
    kind, values = case
    many = values * 20
    schema = Schema(key={"k": "int64"}, value=pa.schema([pa.field("v", kind)]))
    columns = [pa.array([0] * len(many), pa.int64()), pa.array(many, schema.data.field("v").type)]
    table = pa.table(columns, names=["k", "v"])
    order, ties = sort_order(columns_in_order(schema, table))
    ranks = [rank(many[row], kind) for row in order]
    assert ranks == sorted(ranks)
    assert ties.tolist() == [one == other for one, other in pairwise(ranks)]
    hashes = hash_rows(schema, table)
    few = np.concatenate([hash_rows(schema, table.slice(at, 1)) for at in range(len(values))])
    assert hashes[: len(values)].tolist() == few.tolist()
    assert len(set(hashes.tolist())) == len({repr(one) for one in ranks})


def test_a_field_more_changes_no_value_without_it() -> None:
    """Neither order nor fingerprint."""
    narrow = pa.struct([pa.field("a", pa.int64())])
    wide = pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.list_(narrow))])
    older = pa.array([{"a": 1}, {"a": None}, None], narrow)
    newer = pa.array([{"a": 1, "b": None}, {"a": None, "b": None}, None], wide)
    assert comparable(older).equals(comparable(newer))


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([pa.field("a", pa.string())])])
def test_what_lies_under_nulls_does_not_count(kind: pa.DataType) -> None:
    """Two arrays of the same values."""
    if pa.types.is_list(kind):
        offsets, gone = pa.array([0, 2, 3], pa.int32()), pa.array([True, False])
        hidden = pa.ListArray.from_arrays(offsets, pa.array([7, 8, 9]), mask=gone)
        plain = pa.array([None, [9]], kind)
    else:
        hidden = pa.StructArray.from_arrays([pa.array(["x", "y"])], ["a"], mask=pa.array([True, False]))
        plain = pa.array([None, {"a": "y"}], kind)
    assert comparable(hidden).equals(comparable(plain))


def test_the_bytes_are_durable() -> None:
    """They are part of fingerprints that states keep for ever: what they are, and what they hash to, never changes."""
    struct_ = pa.struct([pa.field("a", pa.int16()), pa.field("b", pa.map_(pa.string(), pa.list_(pa.bool_())))])
    value = [{"a": -2, "b": [("x\0", [True, None]), ("y", None)]}, None, {"a": 1, "b": None}]
    encoded = comparable(pa.array([value], pa.list_(struct_)))[0].as_py()
    text = b"\x02x\0\xff\0\0"
    entries = b"\x02" + text + b"\x02" + b"\x02\x01" + b"\x01" + b"\x00" + b"\x00" + b"\x02" + b"\x02y\0\0" + b"\x00"
    first = b"\x02" + b"\x02\x7f\xfe" + b"\x02" + entries + b"\x00" + b"\x00"
    assert encoded == first + b"\x01" + b"\x02\x02\x80\x01\x00" + b"\x00"
    schema = Schema(key={"k": "int64"}, value=pa.schema([pa.field("v", pa.list_(struct_))]))
    table = pa.table({"k": [1], "v": pa.array([value], schema.data.field("v").type)})
    assert hash_rows(schema, table).tolist() == [13936221945158764499]
