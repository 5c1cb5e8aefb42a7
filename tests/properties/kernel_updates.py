"""Updates of every type as plain Python, the reference that the byte layer and the kernel are judged by.

A value is None or its bits as Python sees them: an integer for anything of fixed width (floats by their IEEE bits,
decimals unscaled, times as counts), bytes for text and binary, a tuple of such for a list, for the fields of a struct,
and for a map of pairs in the order of their keys. Dates and moments are of the years 1 to 9999, as others
are refused where they come in. Nothing here uses the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from persist_lib.schema.schema import Schema

Value = int | bytes | tuple[Any, ...] | None
Row = tuple[Value, ...]  # the user's columns
Update = tuple[Row, int, int]

NAN, ODD_NAN = 0x7FF8000000000000, 0x7FF8000000000001
_TEXT = st.one_of(
    st.sampled_from(
        ["", "a", "a\0", "a\0\0b", "é", "日本", "\U0010ffff", "x" * 300, "x" * 299 + "y", "x" * 300 + "\0"]
    ),
    st.text("ab\0é\uffff\U0001f600", max_size=20),
).map(str.encode)
_BYTES = st.one_of(
    st.sampled_from([b"", b"\0", b"\0\0", b"\xff", b"\xff" * 9, b"\xff\0", b"z" * 300]),
    st.binary(max_size=20),
)


def _signed(bits: int) -> st.SearchStrategy[int]:
    top = 1 << (bits - 1)
    return st.one_of(st.integers(-3, 3), st.sampled_from([-top, top - 1]), st.integers(-top, top - 1))


def _between(least: int, most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(-3, 3), st.sampled_from([least, most]), st.integers(least, most))


def _unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 3), st.sampled_from([(1 << bits) - 1, 1 << (bits - 1)]))


def _floats(bits: int) -> st.SearchStrategy[int]:
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    quiet = NAN if bits == 64 else 0x7FC00000
    return st.one_of(
        st.sampled_from([0, sign, quiet, quiet | 1, quiet | sign, 1, sign | 1, ones >> 2]), st.integers(0, ones)
    )


TYPES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.integers(0, 1),
    "int8": _signed(8), "int16": _signed(16), "int32": _signed(32), "int64": _signed(64),
    "uint8": _unsigned(8), "uint16": _unsigned(16), "uint32": _unsigned(32), "uint64": _unsigned(64),
    "float32": _floats(32), "float64": _floats(64),
    "string": _TEXT, "binary": _BYTES,
    "date32": _between(-719_162, 2_932_896), "time64[us]": st.integers(0, 86_399_999_999),
    "timestamp[us, UTC]": _between(-62_135_596_800_000_000, 253_402_300_799_999_999),
    "timestamp[ns]": _signed(64), "duration[us]": _signed(64),
    "decimal128(38, 2)": st.one_of(st.integers(-3, 3), st.integers(-(10**37), 10**37)),
    "fixed_size_binary[3]": st.binary(min_size=3, max_size=3),
    "fixed_size_binary[300]": st.sampled_from([bytes(300), bytes(299) + b"\1", b"\xff" * 300]),
}  # fmt: skip


def _some(*kinds: str) -> list[st.SearchStrategy[Any]]:
    return [st.one_of(st.none(), TYPES[kind]) for kind in kinds]


def _lists(kind: str, least: int = 0, most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(*_some(kind), min_size=least, max_size=most).map(tuple)


TYPES["decimal256(70, 1)"] = st.one_of(st.integers(-3, 3), st.integers(-(10**69), 10**69))
TYPES["list<int8>"], TYPES["list<float64>"], TYPES["list<string>"] = map(_lists, ["int8", "float64", "string"])
TYPES["list<float32>[2]"] = _lists("float32", 2, 2)
TYPES["struct<a: string, b: list<float64>, c: bool>"] = st.tuples(*_some("string", "list<float64>", "bool"))
TYPES["list<struct<d: date32, e: decimal128(38, 2)>>"] = st.lists(
    st.one_of(st.none(), st.tuples(*_some("date32", "decimal128(38, 2)"))), max_size=3
).map(tuple)
TYPES["map<string, list<int8>>"] = st.dictionaries(_TEXT, *_some("list<int8>"), max_size=3).map(
    lambda found: tuple(sorted(found.items()))
)
PLAIN = sorted(kind for kind in TYPES if "<" not in kind)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """One to three key columns and up to three value columns."""
    kinds = draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=3))
    keys = len(kinds)
    kinds += draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=3))
    named = {f"c{index}": kind for index, kind in enumerate(kinds)}
    names = list(named)
    return Schema({name: named[name] for name in names[:keys]}, {name: named[name] for name in names[keys:]})


def rows_of(schema: Schema) -> st.SearchStrategy[Row]:
    return st.tuples(*[st.one_of(st.none(), TYPES[column.type]) for column in schema.columns])


def updates_of(
    schema: Schema, *, max_size: int = 30, diffs: st.SearchStrategy[int] | None = None, times: int = 4
) -> st.SearchStrategy[list[Update]]:
    """Updates over few distinct rows, so that they meet."""
    some = st.lists(rows_of(schema), min_size=1, max_size=8)
    diff = st.sampled_from([1, -1, 2, -3]) if diffs is None else diffs
    return some.flatmap(
        lambda rows: st.lists(st.tuples(st.sampled_from(rows), st.integers(0, times), diff), max_size=max_size)
    )


def build(schema: Schema, updates: Sequence[Update]) -> pa.Table:
    """The updates as a table, in the order they are in."""
    columns = [
        array_of([update[0][index] for update in updates], column.field.type)
        for index, column in enumerate(schema.columns)
    ]
    columns += [pa.array([time for _, time, _ in updates], pa.uint64())]
    columns += [pa.array([diff for _, _, diff in updates], pa.int64())]
    return pa.table(columns, schema=schema.updates)


def array_of(values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    """An array of these bits; what lies under nulls is garbage on purpose."""
    if pa.types.is_string(kind):
        return pa.array(values, pa.binary()).cast(kind)
    if pa.types.is_binary(kind) or _is_bytes(kind):
        return pa.array(values, kind)
    if pa.types.is_nested(kind):
        return _nested_of(values, kind)
    valid = pa.array([value is not None for value in values], pa.bool_())
    mask = valid.buffers()[1]
    if pa.types.is_boolean(kind):
        return pa.array([None if value is None else bool(value) for value in values], kind)
    width = kind.bit_width // 8
    bits = [0x5A if value is None else value % (1 << (8 * width)) for value in values]
    data = b"".join(bit.to_bytes(width, "little") for bit in bits)
    return pa.Array.from_buffers(kind, len(values), [mask, pa.py_buffer(data)])


def _nested_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Null lists have items, and null structs fields, that are garbage."""
    mask = pa.array([value is None for value in values], pa.bool_())
    if pa.types.is_struct(kind):
        garbage = (None,) * kind.num_fields
        given = [garbage if value is None else value for value in values]
        columns = [array_of([value[at] for value in given], field.type) for at, field in enumerate(kind)]
        return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)
    if pa.types.is_fixed_size_list(kind):
        given = [(None,) * kind.list_size if value is None else value for value in values]
        inner = array_of([item for value in given for item in value], kind.value_type)
        return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=mask)
    if pa.types.is_map(kind):
        given = [value or () for value in values]
        pairs = [pair for value in given for pair in value]
        inner, items = [array_of([pair[at] for pair in pairs], (kind.key_type, kind.item_type)[at]) for at in (0, 1)]
        return pa.MapArray.from_arrays(_offsets(given), inner, items, type=kind, mask=mask)
    given = [(None,) if value is None else value for value in values]
    inner = array_of([item for value in given for item in value], kind.value_type)
    return pa.ListArray.from_arrays(_offsets(given), inner, type=kind, mask=mask)


def _offsets(values: Sequence[Any]) -> pa.Array:
    return pa.array(accumulate(map(len, values), initial=0), pa.int32())


def read(schema: Schema, table: pa.Table) -> list[Update]:
    """The updates of a table; time 0 where it has none."""
    columns = [values_of(table.column(column.name)) for column in schema.columns]
    rows = list(zip(*columns, strict=True))
    times = table.column("_time").to_pylist() if "_time" in table.schema.names else [0] * table.num_rows
    return list(zip(rows, times, table.column("_diff").to_pylist(), strict=True))


def values_of(column: pa.ChunkedArray) -> list[Value]:
    return [value for chunk in column.chunks for value in _values(chunk)]


def _values(array: pa.Array) -> list[Value]:
    kind = array.type
    if pa.types.is_nested(kind):
        return [None if not scalar.is_valid else _inner(scalar, kind) for scalar in array]
    if pa.types.is_string(kind):
        array = array.cast(pa.binary())
    if pa.types.is_binary(array.type) or _is_bytes(kind):
        found: list[Value] = array.to_pylist()
        return found
    if pa.types.is_boolean(kind):
        return [None if value is None else int(value) for value in array.to_pylist()]
    width = kind.bit_width // 8
    data = array.buffers()[1].to_pybytes() if array.buffers()[1] else b""
    signed = not (pa.types.is_unsigned_integer(kind) or pa.types.is_floating(kind))
    starts = range(array.offset * width, (array.offset + len(array)) * width, width)
    bits = [int.from_bytes(data[start : start + width], "little", signed=signed) for start in starts]
    return [bit if scalar.is_valid else None for bit, scalar in zip(bits, array, strict=True)]


def _inner(scalar: Any, kind: pa.DataType) -> tuple[Value, ...]:
    if pa.types.is_struct(kind):
        return tuple(_values(pa.array([scalar], kind).field(at))[0] for at in range(kind.num_fields))
    if pa.types.is_map(kind):
        inner = scalar.values
        return tuple(zip(_values(inner.field(0)), _values(inner.field(1)), strict=True))
    return tuple(_values(scalar.values))


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)


def order_of(schema: Schema, row: Row) -> tuple[Any, ...]:
    """A Python sort key for the contract's order: nulls first, floats by their total order."""
    return tuple(_nulls_first(value, column.field.type) for value, column in zip(row, schema.columns, strict=True))


def _nulls_first(value: Value, kind: pa.DataType) -> tuple[Any, ...]:
    return (0,) if value is None else (1, _total_order(value, kind))


def _total_order(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_map(kind):
        kinds = (kind.key_type, kind.item_type)
        return [(1, _without_end(map(_nulls_first, pair, kinds))) for pair in value]
    if pa.types.is_struct(kind):
        return _without_end(map(_nulls_first, value, [field.type for field in kind]))
    if pa.types.is_nested(kind):
        return [_nulls_first(item, kind.value_type) for item in value]
    if not pa.types.is_floating(kind):
        return value
    sign = 1 << (kind.bit_width - 1)
    return value if value < sign else sign - 1 - value


def _without_end(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without the nulls at its end."""
    fields = list(found)
    while fields and fields[-1] == (0,):
        fields.pop()
    return fields


def in_order(schema: Schema, updates: Iterable[Update]) -> list[Update]:
    return sorted(updates, key=lambda update: (order_of(schema, update[0]), update[1]))


def totals(updates: Iterable[Update], advance_to: int = 0, upper_time: int | None = None) -> dict[tuple[Row, int], int]:
    """What updates amount to: a sum for each (row, time), zeros left out."""
    sums: Counter[tuple[Row, int]] = Counter()
    for row, time, diff in updates:
        advanced = max(time, advance_to)
        sums[row, advanced if upper_time is None else min(advanced, upper_time)] += diff
    return {at: total for at, total in sums.items() if total}
