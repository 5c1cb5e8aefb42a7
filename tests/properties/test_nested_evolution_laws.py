"""Values of nested columns that became wider: they hash, and lie in order, as they did, and are what they were.

Beside a reference that does it value by value: `kernel_updates` says what a value is.
"""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from struct import pack, unpack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.format.conform import conform
from persist_lib.kernel.columns import comparable
from persist_lib.kernel.converting import as_at_first, converted
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.schema.evolution import check_evolution
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import format_type, parse_type
from tests.properties.kernel_updates import TYPES, Value, array_of, order_of, values_of

WIDER = {
    "int8": ["int16", "int64"], "int16": ["int32"], "int32": ["int64"], "uint8": ["uint16", "int16", "uint64"],
    "uint16": ["int32", "uint32"], "uint32": ["uint64", "int64"], "float32": ["float64"],
    "date32": ["timestamp[s]", "timestamp[us]"], "timestamp[s]": ["timestamp[ms]", "timestamp[us]"],
    "timestamp[ms]": ["timestamp[us]"], "decimal128(5, 2)": ["decimal128(9, 2)"],
    "decimal128(9, 2)": ["decimal128(38, 2)"],
}  # fmt: skip
TICKS = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}
DAYS = st.integers(-719_162, 2_932_896)
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    kind: TYPES[kind]
    for kind in [
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float32", "float64", "date32", "string", "decimal128(38, 2)"),
    ]
}
LEAVES |= {
    f"timestamp[{unit}]": st.builds(
        lambda day, more, of=ticks: day * of + more, DAYS, st.sampled_from([0, 1, ticks - 1])
    )
    for unit, ticks in TICKS.items()
}
LEAVES |= {f"decimal128({n}, 2)": st.sampled_from([0, 7, 1 - 10**n, 10**n - 1]) for n in (5, 9)}
START = ["int8", "int32", "uint8", "uint16", "float32", "date32", "timestamp[s]", "decimal128(5, 2)", "string"]
NARROW = pa.list_(pa.struct([pa.field("a", pa.int32())]))


@st.composite
def kinds(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    """A nested type, at most so deep."""
    flat = st.sampled_from(START).map(parse_type)
    inner = flat if depth == 1 else flat | kinds(depth - 1)
    shape = draw(st.sampled_from(["list", "fixed", "struct", "struct", "map"]))
    if shape == "struct":
        return pa.struct([pa.field(f"f{at}", draw(inner)) for at in range(draw(st.integers(1, 2)))])
    if shape == "map":
        return pa.map_(draw(st.sampled_from([pa.string(), pa.int8()])), draw(inner))
    return pa.list_(draw(inner), draw(st.integers(1, 2)) if shape == "fixed" else -1)


@st.composite
def wider(draw: st.DrawFn, kind: pa.DataType) -> pa.DataType:
    """The type after one evolution: any number of numbers are wider, and any structs have more fields."""
    if pa.types.is_struct(kind):
        fields = [field.with_type(draw(wider(field.type))) for field in kind]
        more = draw(st.lists(kinds(1) | st.sampled_from(START).map(parse_type), max_size=1))
        return pa.struct([*fields, *(pa.field(f"f{len(fields)}", one) for one in more)])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, draw(wider(kind.item_type)))
    if pa.types.is_nested(kind):
        return pa.list_(draw(wider(kind.value_type)), kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
    return parse_type(draw(st.sampled_from([format_type(kind), *WIDER.get(format_type(kind), [])])))


def value_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, or null."""
    if pa.types.is_struct(kind):
        found: st.SearchStrategy[Any] = st.tuples(*(value_of(field.type) for field in kind))
    elif pa.types.is_map(kind):
        key = TYPES[format_type(kind.key_type)]
        items = st.dictionaries(key, value_of(kind.item_type), max_size=2)
        found = items.map(lambda given: tuple(sorted(given.items())))
    elif pa.types.is_nested(kind):
        least, most = (kind.list_size,) * 2 if pa.types.is_fixed_size_list(kind) else (0, 3)
        found = st.lists(value_of(kind.value_type), min_size=least, max_size=most).map(tuple)
    else:
        found = LEAVES[format_type(kind)]
    return st.none() | found


def widened(value: Any, one: pa.DataType, other: pa.DataType) -> Any:
    """A value as the wider type has it."""
    if value is None or one == other:
        return value
    if pa.types.is_struct(one):
        fields = [
            widened(*each) for each in zip(value, *([f.type for f in kind] for kind in (one, other)), strict=False)
        ]
        return (*fields, *[None] * (other.num_fields - one.num_fields))
    if pa.types.is_map(one):
        return tuple((key, widened(item, one.item_type, other.item_type)) for key, item in value)
    if pa.types.is_nested(one):
        return tuple(widened(item, one.value_type, other.value_type) for item in value)
    if pa.types.is_floating(one):
        sign, rest = value >> 31, value & 0x7FFFFFFF
        if rest >> 23 == 0xFF:  # infinity, or NaN with what else it says
            return sign << 63 | 0x7FF << 52 | (rest & 0x7FFFFF) << 29
        return int(np.array([value], np.uint32).view(np.float32).astype(np.float64).view(np.uint64)[0])
    return value * (ticks_of(other) // ticks_of(one))


def holds(value: Any, wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether the narrower type has the value."""
    if value is None or wide == narrow:
        return True
    if pa.types.is_struct(wide):
        inner = all(
            holds(*each) for each in zip(value, *([f.type for f in kind] for kind in (wide, narrow)), strict=False)
        )
        return inner and all(more is None for more in value[narrow.num_fields :])
    if pa.types.is_map(wide):
        return all(holds(item, wide.item_type, narrow.item_type) for _, item in value)
    if pa.types.is_nested(wide):
        return all(holds(item, wide.value_type, narrow.value_type) for item in value)
    if pa.types.is_floating(wide):
        if value >> 52 & 0x7FF == 0x7FF:
            return value % (1 << 29) == 0
        double = np.array([value], np.uint64).view(np.float64)
        with np.errstate(over="ignore"):
            return bool(double.astype(np.float32).astype(np.float64) == double)
    if pa.types.is_decimal(wide):
        return abs(value) < 10**narrow.precision
    if pa.types.is_integer(wide):
        info = np.iinfo(narrow.to_pandas_dtype())
        return bool(info.min <= value <= info.max)
    return value % (ticks_of(wide) // ticks_of(narrow)) == 0


def ticks_of(kind: pa.DataType) -> int:
    return TICKS[kind.unit] if pa.types.is_timestamp(kind) else 1


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Schema], list[tuple[int, Value]]]:
    """Schemas, each of which may follow the one before, and values with the number of the one that they are made in."""
    schemas = [Schema({"k": "int64"}, pa.schema([pa.field("v", draw(kinds()))]))]
    for _ in range(draw(st.integers(1, 4))):
        wide = draw(wider(schemas[-1].value[0].field.type))
        try:
            schemas.append(schemas[-1].widen({"v": wide}))
        except InvalidUsage:  # a timestamp for the second time
            continue
    made = st.integers(0, len(schemas) - 1).flatmap(
        lambda at: st.tuples(st.just(at), value_of(schemas[at].value[0].field.type))
    )
    return schemas, draw(st.lists(made, min_size=1, max_size=8))


def table_of(schema: Schema, values: list[Any]) -> pa.Table:
    kind = schema.value[0].field.type
    keys = pa.array(range(len(values)), pa.int64())
    return pa.table([pa.array([0] * len(keys), pa.int64()), array_of(values, kind)], names=["k", "v"])


TWICE = [NARROW, pa.list_(pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.int32())]))]
TWICE.append(pa.list_(pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.int64()), pa.field("c", pa.string())])))


def chain_of(types: list[pa.DataType]) -> list[Schema]:
    schemas = [Schema({"k": "int64"}, pa.schema([pa.field("v", types[0])]))]
    for kind in types[1:]:
        schemas.append(schemas[-1].widen({"v": kind}))
    return schemas


AT_LAST = (chain_of(TWICE), [(0, ((1,), None)), (1, ((2**40, 5), (None, None))), (2, ((1, 2**40, b"x"), (1, 2, None)))])


@given(chains())
@example(AT_LAST)
def test_a_value_hashes_as_when_it_was_made_in_each_wider_type(case: tuple[list[Schema], list[Any]]) -> None:
    """Alone and among many, and other values otherwise: so a row is retracted in any of the types."""
    schemas, values = case
    types = [schema.value[0].field.type for schema in schemas]
    made = [hash_rows(schemas[at], table_of(schemas[at], [value]))[0] for at, value in values]
    for number, schema in enumerate(schemas):
        there = [
            (widened(value, types[at], types[number]), made[k]) for k, (at, value) in enumerate(values) if at <= number
        ]
        table = table_of(schema, [value for value, _ in there] * 5)
        assert hash_rows(schema, table).tolist() == [hashed for _, hashed in there] * 5
        assert len({hashed for _, hashed in there}) == len({value for value, _ in there})


@given(chains())
@example(AT_LAST)
def test_each_step_may_follow_and_says_what_values_are_hashed_as(case: tuple[list[Schema], list[Any]]) -> None:
    schemas, _ = case
    for older, newer in pairwise(schemas):
        check_evolution(older, newer)
        if newer != older:
            with pytest.raises(SchemaMismatch):
                check_evolution(newer, older)


@given(chains())
@example(AT_LAST)
def test_values_keep_their_order_and_are_the_same_in_the_wider_type(case: tuple[list[Schema], list[Any]]) -> None:
    """Old and new parts merge by the order of the newest columns: each is in this order already."""
    schemas, values = case
    types = [schema.value[0].field.type for schema in schemas]
    newest = types[-1]
    for number, kind in enumerate(types):
        mine = [value for at, value in values if at == number]
        array = array_of([None, *mine], kind).slice(1)
        wide, held = converted(array, newest)
        wide.validate(full=True)
        assert held is None
        assert wide.type == newest
        assert values_of(pa.chunked_array([wide])) == [widened(value, kind, newest) for value in mine]
        assert ranks(comparable(array)) == ranks(comparable(wide)) == by_hand(schemas[number], mine)


def ranks(cells: pa.Array) -> list[int]:
    found = [b"" if cell is None else b"\1" + cell for cell in cells.to_pylist()]
    return [sorted(set(found)).index(one) for one in found]


def by_hand(schema: Schema, values: list[Any]) -> list[int]:
    found = [order_of(schema, (0, value)) for value in values]
    return [sum(other < one for other in {repr(each): each for each in found}.values()) for one in found]


@given(chains())
@example(AT_LAST)
def test_an_older_type_has_exactly_the_values_that_were_of_it(case: tuple[list[Schema], list[Any]]) -> None:
    """Readers in older columns have those values, and are refused any other."""
    schemas, values = case
    types = [schema.value[0].field.type for schema in schemas]
    newest = [widened(value, types[at], types[-1]) for at, value in values]
    for number, kind in enumerate(types):
        array = array_of(newest, types[-1])
        narrow, which = converted(array, kind)
        flags = [True] * len(newest) if which is None else which.tolist()
        assert flags == [holds(value, types[-1], kind) for value in newest]
        back = values_of(pa.chunked_array([narrow]))
        assert all(
            widened(one, kind, types[-1]) == other for one, other, held in zip(back, newest, flags, strict=True) if held
        )
        rows = table_of(schemas[-1], newest).append_column("_diff", pa.array([1] * len(newest), pa.int64()))
        if all(flags):
            assert values_of(conform("rows", rows, schemas[number], times=False).column("v")) == back
        else:
            with pytest.raises(SchemaMismatch, match="newest columns"):
                conform("rows", rows, schemas[number], times=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("struct<a: int64>", "struct<b: string, a: int64>"),
        ("struct<a: int64, b: string>", "struct<a: int64>"),
        ("struct<a: int64>", "struct<b: int64>"),
        ("struct<a: int64>", "struct<a: int32, b: string>"),
        ("struct<a: int64>", "struct<a: string>"),
        ("list<int64>", "list<int64>[2]"),
        ("list<int64>[2]", "list<int64>[3]"),
        ("list<float32>", "float64"),
        ("list<timestamp[us]>", "list<timestamp[ns]>"),
        ("map<int32, int64>", "map<int64, int64>"),
        ("map<string, int64>", "list<struct<key: string, value: int64>>"),
        ("struct<a: decimal128(5, 2)>", "struct<a: decimal128(5, 3)>"),
        ("uint64", "struct<a: uint64>"),
        ("list<date32>", "list<timestamp[us, UTC]>"),
    ],
)
def test_what_no_wider_type_is_is_refused(one: str, other: str) -> None:
    schema = Schema({"k": "int64"}, {"v": one})
    with pytest.raises(InvalidUsage, match=r"column \(v: .*\) cannot become"):
        schema.widen({"v": other})
    with pytest.raises(SchemaMismatch, match="cannot become"):
        check_evolution(schema, Schema({"k": "int64"}, {"v": other}))


def test_a_timestamp_within_gets_a_finer_unit_once() -> None:
    schema = Schema({"k": "int64"}, {"v": "list<struct<t: timestamp[s], n: int32>>"})
    once = schema.widen({"v": "list<struct<t: timestamp[ms], n: int32>>"})
    assert once.value[0].first_type == "list<struct<t: timestamp[s], n: int32>>"
    more = once.widen({"v": "list<struct<t: timestamp[ms], n: int64, u: timestamp[s]>>"})
    assert more.value[0].first_type == "list<struct<t: timestamp[s], n: int32, u: timestamp[s]>>"
    with pytest.raises(InvalidUsage, match="cannot become"):
        more.widen({"v": "list<struct<t: timestamp[us], n: int64, u: timestamp[s]>>"})
    last = more.widen({"v": "list<struct<t: timestamp[ms], n: int64, u: timestamp[us]>>"})
    assert last.value[0].first_type == more.value[0].first_type


def test_a_field_alone_leaves_no_mark() -> None:
    """It changes no bytes of older values."""
    schema = Schema({"k": "int64"}, {"v": "map<string, struct<a: int64>>"})
    more = schema.widen({"v": "map<string, struct<a: int64, b: decimal128(5, 2)>>"})
    assert more.value[0].first_type == ""
    assert more.widen({"v": "map<string, struct<a: int64, b: decimal128(9, 2)>>"}).value[0].first_type == ""


def test_the_bytes_that_wider_values_are_hashed_by_are_durable() -> None:
    """Numbers that the first type has are as in that; other integers are of 64 bits, whatever type they have now."""
    schema = Schema({"k": "int64"}, {"v": "struct<a: int16, b: uint8, c: float32, d: date32>"})
    for a, b in (("int32", "uint16"), ("int64", "int64")):
        schema = schema.widen({"v": f"struct<a: {a}, b: {b}, c: float64, d: timestamp[ms]>"})
        made = [
            {"a": 1, "b": 2, "c": 0.5, "d": dt.datetime.fromisoformat("1970-01-02")},
            {"a": -70_000, "b": 300, "c": 0.1, "d": dt.datetime.fromisoformat("1970-01-01 00:00:00.001")},
        ]
        table = pa.table({"k": [1, 1], "v": pa.array(made, schema.value[0].field.type)})
        first, other = as_at_first(table.column("v").chunk(0), parse_type(schema.value[0].first_type)).to_pylist()
        cells = [b"\x80\x01", b"\x02", pack(">I", 0xBF000000), pack(">I", (1 << 31) + 1)]
        assert first == b"".join(b"\2" + cell for cell in cells) + b"\0"
        words = [-70_000 % (1 << 64), 300, unpack(">Q", pack(">d", 0.1))[0] | 1 << 63, (1 << 63) + 1]
        assert other == b"".join(b"\3" + pack(">Q", word) for word in words) + b"\0"
        assert hash_rows(schema, table).tolist() == [5582440768915597043, 17861567112768285965]
