"""Nested columns at the border: each level exactly, or refused with its row; from Arrow, Python, models and JSON."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pydantic
import pytest

import persist_lib as persist
from persist_lib.convert.lines import nested_json
from persist_lib.convert.updates import iter_updates
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import parse_type

STRUCT = "struct<a: int64, b: list<date32>>"


def made(type_: str, given: Any) -> list[Any]:
    """What a column of this type has after it was given values, or a column of Arrow's."""
    schema = Schema(key={"k": "int64"}, value={"v": type_})
    count = len(given)
    if isinstance(given, pa.Array | pa.ChunkedArray):
        data: Any = pa.table({"k": range(count), "v": given})
    else:
        data = [{"k": at, "v": value} for at, value in enumerate(given)]
    (table,) = iter_updates(schema, data, time=0)
    table.validate(full=True)
    assert table.schema.equals(schema.updates)
    return list(table.column("v").combine_chunks().to_pylist(maps_as_pydicts="strict"))


DAY = dt.date(2026, 1, 1)


@pytest.mark.parametrize(
    ("type_", "given", "kept"),
    [
        ("list<int64>", [[1, None], (2,), None, [], np.array([3])], [[1, None], [2], None, [], [3]]),
        ("list<float32>[2]", [[1, 2.5], None, (None, 0)], [[1.0, 2.5], None, [None, 0.0]]),
        ("list<float32>[2]", [None, None], [None, None]),
        (STRUCT, [{"a": 1, "b": [DAY]}, {}, None], [{"a": 1, "b": [DAY]}, {"a": None, "b": None}, None]),
        ("map<string, int64>", [{"b": 1, "a": None}, [("x", 2)], {}, None], [{"a": None, "b": 1}, {"x": 2}, {}, None]),
        ("list<map<int8, list<string>>>", [[{2: ["x"], 1: None}, None]], [[{1: None, 2: ["x"]}, None]]),
        ("list<decimal256(40, 1)>", [[Decimal("1.5"), 2]], [[Decimal("1.5"), Decimal("2.0")]]),
    ],
)
def test_python_values_are_taken_exactly(type_: str, given: list[Any], kept: list[Any]) -> None:
    assert made(type_, given) == kept


def test_the_order_of_a_map_does_not_count() -> None:
    """It is that of the keys, from wherever the map comes, so that equal maps are equal rows."""
    kind = pa.map_(pa.string(), pa.int64())
    for given in ([{"b": 1, "a": 2}], [[("a", 2), ("b", 1)]], pa.array([[("b", 1), ("a", 2)]], kind)):
        assert list(made("map<string, int64>", given)[0]) == ["a", "b"]
    assert made("map<string, int64>", pa.array([[{"key": "b", "value": 1}, {"key": "a", "value": 2}]]))[0] == {
        "a": 2, "b": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        [[("b", 1), ("c", 2)], [("a", 3)], None, [], [("a", 4), ("b", 5)]],  # in order, map by map
        [[("b", 1)], [("c", 3), ("a", 2)], [("b", 4)]],
        [[("a", 1), ("b", 2)], [("b", 2), ("a", 1)]],
    ],
)
def test_maps_are_sorted_one_by_one(given: list[Any]) -> None:
    """Whether all of them are in order already, or some."""
    kind = pa.map_(pa.string(), pa.int64())
    found = made("map<string, int64>", pa.array(given, kind))
    assert [value if value is None else list(value.items()) for value in found] == [
        value if value is None else sorted(value) for value in given
    ]


HIDDEN = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array([7, 8, 9]), mask=pa.array([True, False]))


@pytest.mark.parametrize(
    ("type_", "given", "kept"),
    [
        ("list<string>", pa.array([["a"], None], pa.large_list(pa.large_string())), [["a"], None]),
        ("list<string>", pa.array([["a"], None], pa.list_view(pa.string_view())), [["a"], None]),
        ("list<string>", pa.array([["a", None]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), [["a", None]]),
        ("list<int64>", pa.array([[], None, [None]], pa.list_(pa.null())), [[], None, [None]]),
        ("list<int64>", HIDDEN, [None, [9]]),
        ("list<int64>", HIDDEN.slice(1), [[9]]),
        ("list<int16>[1]", pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)), [[1], [2]]),
        ("list<int16>[1]", HIDDEN, [None, [9]]),
        (STRUCT, pa.array([{"b": [DAY]}, None]), [{"a": None, "b": [DAY]}, None]),
        ("struct<a: int64, b: string>", pa.array([{"b": "x", "a": 1}]).slice(0, 1), [{"a": 1, "b": "x"}]),
        ("map<int64, float64>", pa.array([[(2, 1.0), (1, None)], None], pa.map_(pa.int8(), pa.float32())),
         [{1: None, 2: 1.0}, None]),
        ("list<timestamp[us, UTC]>", pa.array([[0]], pa.list_(pa.timestamp("ms", "UTC"))),
         [[dt.datetime(1970, 1, 1, tzinfo=dt.UTC)]]),
    ],
)  # fmt: skip
def test_layouts_of_arrow_are_taken_exactly(type_: str, given: pa.Array, kept: list[Any]) -> None:
    assert made(type_, given) == kept
    assert made(type_, pa.chunked_array([given.slice(0, 1), given.slice(1)])) == kept


@pytest.mark.parametrize(
    ("type_", "given", "error", "said"),
    [
        ("list<int64>", ["abc"], SchemaMismatch, "takes no str"),
        ("list<int64>", [{1, 2}], SchemaMismatch, "takes no set"),
        ("list<int64>", [[1], [1.5]], InvalidUsage, "row 1"),
        ("list<float32>[2]", [[1, 2], [1]], InvalidUsage, "2 items are wanted, and a list has 1"),
        ("list<float32>[2]", pa.array([[1.0, 2.0], [1.0]]), InvalidUsage, "row 1"),
        (STRUCT, [{"a": 1}, {"c": 1}], InvalidUsage, r"\['c'\] are no fields"),
        (STRUCT, [[1]], SchemaMismatch, "takes no list"),
        (STRUCT, pa.array([{"c": 1}]), SchemaMismatch, "takes no struct"),
        (STRUCT, pa.array([{"a": "1"}]), SchemaMismatch, "takes no struct"),
        (STRUCT, pa.array([{"a": 1}, {"a": 1.5}]), InvalidUsage, "row 1"),
        ("list<date32>", pa.array([[4_000_000]], pa.list_(pa.int32())), SchemaMismatch, "takes no list"),
        ("list<date32>", pa.ListArray.from_arrays(
            pa.array([0, 1], pa.int32()), pa.array([4_000_000], pa.int32()).cast(pa.date32())), InvalidUsage, "years"),
        ("map<string, int64>", [{"a": 1}, [("b", 1), ("b", 2)]], InvalidUsage, "the key b is there twice"),
        ("map<string, int64>", [{None: 1}], InvalidUsage, "row 0"),
        ("map<string, int64>", [[1]], InvalidUsage, "a dict, or a list of pairs"),
        ("map<string, int64>", pa.array([[("a", 1), ("a", 1)]], pa.map_(pa.string(), pa.int8())), InvalidUsage, "tw"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_row(type_: str, given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        made(type_, given)


class Item(pydantic.BaseModel):
    sku: str
    price: Decimal = pydantic.Field(max_digits=10, decimal_places=2)


class Key(pydantic.BaseModel):
    id: int


class Order(pydantic.BaseModel):
    items: list[Item]
    marks: dict[str, list[int] | None] | None = None


class Tree(pydantic.BaseModel):
    kids: list[Tree]


def test_models_within_models_are_structs_and_come_back() -> None:
    schema = Schema(key=Key, value=Order)
    assert [str(column) for column in schema.value] == [
        "items: list<struct<sku: string, price: decimal128(10, 2)>> not null",
        "marks: map<string, list<int64>>",
    ]
    order = Order(items=[Item(sku="a", price=Decimal("1.50"))], marks={"x": [1], "y": None})
    with persist.open("memory:") as client:
        with client.open_writer("orders", schema) as write:
            write.compare_and_append([(Key(id=1), order), {"id": 2, "items": order.items, "marks": None}], 0, 1)
        with client.open_reader("orders", schema) as read:
            rows = read.snapshot(0).to_models()
    assert rows == [(Key(id=1), order), (Key(id=2), Order(items=order.items))]
    with pytest.raises(InvalidUsage, match="holds itself"):
        Schema(key=Key, value=Tree)


DEEP = "struct<l: list<int32>, m: map<int64, timestamp[us, UTC]>, d: decimal128(5, 2), b: binary>"


def test_json_is_decoded_by_the_type() -> None:
    field = pa.field("v", parse_type(DEEP))
    texts = [b'{"l":[1,null],"m":{"5":"2026-01-01T00:00:00Z"},"d":1.25,"b":"YQ=="}', None, "{}"]
    first, *rest = nested_json.column_of(texts, field).to_pylist(maps_as_pydicts="strict")
    assert first == {"l": [1, None], "m": {5: dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}, "d": Decimal("1.25"), "b": b"a"}
    assert rest == [None, {"l": None, "m": None, "d": None, "b": None}]


@pytest.mark.parametrize(
    "text",
    [b'{"q":1}', b"[1]", b'{"l":["a"]}', b"{},{}", b'{"l":[99999999999]}', b'{"d":1.255}',
     b'{"m":{"1":"2026-01-01T00:00:00"}}', b"", b'{"l":'],
)  # fmt: skip
def test_json_that_is_not_of_the_type_is_refused(text: bytes) -> None:
    with pytest.raises((InvalidUsage, msgspec.DecodeError)):
        nested_json.column_of([b"{}", text], pa.field("v", parse_type(DEEP)))


def test_the_row_of_wrong_json_is_said() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"column 'v': .* got .str. - at row 11\.l\[0\]"):
        nested_json.column_of([b"{}", b'{"l":["a"]}'], pa.field("v", parse_type(DEEP)), 10)
