"""Codecs: rows of models, JSON and bytes become columns and come back as they were."""

from __future__ import annotations

import datetime as dt
import enum
import math
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from persist_lib.convert.updates import Update, decode_rows, iter_updates
from persist_lib.errors import InvalidUsage
from persist_lib.schema.json_text import text_of
from persist_lib.schema.schema import Schema

ORDERS = Schema(key={"order_id": "int64 not null"}, value={"state": "string", "cents": "int64"})
AWARE = dt.datetime(2020, 1, 1, 0, 0, 1, tzinfo=dt.UTC)


def read(schema: Schema, data: object, **defaults: Any) -> pa.Table:
    tables = list(iter_updates(schema, data, **defaults))
    return pa.concat_tables(tables) if tables else schema.updates.empty_table()


def refusal(schema: Schema, data: object, **defaults: Any) -> InvalidUsage:
    with pytest.raises(InvalidUsage) as caught:
        read(schema, data, **defaults)
    return caught.value


class State(enum.Enum):
    NEW = "new"


class OrderKey(BaseModel):
    order_id: int
    token: uuid.UUID


class Order(BaseModel):
    state: State
    price: Decimal = Field(max_digits=10, decimal_places=2, alias="Price")
    at: dt.datetime | None


MODELS = Schema(key=OrderKey, value=Order)
KEY = OrderKey(order_id=1, token=uuid.UUID(int=5))
VALUE = Order(state=State.NEW, Price=Decimal("1.50"), at=AWARE)


def test_updates_of_models_come_back_as_the_models():
    table = read(MODELS, [((KEY, VALUE), 3, -1), (KEY, VALUE), Update(KEY, VALUE, 4, 2)], time=9)
    assert decode_rows(MODELS, table) == [(KEY, VALUE, 3, -1), (KEY, VALUE, 9, 1), (KEY, VALUE, 4, 2)]
    assert table.column("state").to_pylist() == ["new"] * 3
    assert read(MODELS, decode_rows(MODELS, table)).equals(table)


def test_one_model_of_all_columns_and_plain_dicts_are_rows_too():
    class Both(BaseModel):
        order_id: int
        state: str
        cents: int | None

    both = Both(order_id=1, state="new", cents=5)
    plain = {"order_id": 1, "state": "new", "cents": 5}
    assert read(ORDERS, [both, plain], time=3) == read(ORDERS, [plain, both], time=3)
    assert decode_rows(ORDERS, read(ORDERS, [both], time=3)) == [{**plain, "_time": 3, "_diff": 1}]
    keys = Schema(key=OrderKey)
    assert decode_rows(keys, read(keys, [KEY], time=3)) == [Update(KEY, None, 3, 1)]


def test_contents_come_back_without_a_time():
    table = read(MODELS, [(KEY, VALUE)], time=3).drop_columns(["_time"])
    assert decode_rows(MODELS, table) == [Update(KEY, VALUE, None, 1)]
    with pytest.raises(InvalidUsage, match="projection"):
        decode_rows(MODELS, table.select(["order_id"]))


@pytest.mark.parametrize(
    "row", [(KEY,), (KEY, VALUE, 3), (KEY, VALUE, 3, 1, 1), (VALUE, KEY), (1, VALUE), (KEY, "x"), (KEY, None), ()]
)
def test_a_tuple_that_is_no_update_is_refused(row):
    found = refusal(MODELS, [(KEY, VALUE), row], time=0)
    assert (found.problem, found.row) == ("row", 1)


JSON = Schema.json()


def test_json_is_stored_as_canonical_text_and_read_as_values():
    rows = [({"b": 1, "a": [1.0, None, "é"]}, None), (Update([1, 2], {}, 5, -1)), (("x", 1), True)]
    table = read(JSON, rows, time=3)
    assert table.column("key").to_pylist() == ['{"a":[1.0,null,"é"],"b":1}', "[1,2]", '["x",1]']
    assert table.column("value").to_pylist() == ["null", "{}", "true"]
    assert decode_rows(JSON, table)[1] == Update([1, 2], {}, 5, -1)


def test_rows_and_tables_of_the_same_json_are_the_same_updates():
    texts = pa.table({"key": ['{"b": 1,  "a": 2}'], "value": ["[ 1.50 ]"]})
    assert read(JSON, texts, time=0).equals(read(JSON, [{"key": {"a": 2, "b": 1}, "value": [1.5]}], time=0))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, {1: "a"}, {None: 1}, [{(1,): 2}], {1, 2}, b"a", "\ud800", AWARE, object()]
)
def test_what_json_cannot_say_is_refused(value):
    found = refusal(JSON, [("k", 1), ("k", value)], time=0)
    assert (found.problem, found.column, found.row) == ("json", "value", 1)


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "-Infinity", "1e999", '{"a": 1, "a": 2}', "[1,]", "[" * 100_000, '"\\ud800"']
)
def test_text_that_is_no_json_value_is_refused(text):
    found = refusal(JSON, pa.table({"key": ["1", text], "value": ["1", "1"]}), time=0)
    assert (found.problem, found.column, found.row) == ("json", "key", 1)


def test_bytes_are_kept_as_they_are():
    rows = [(b"k", b""), (b"", None), Update(b"\xff", b"v", 1, 5)]
    table = read(Schema.bytes(), rows, time=0)
    assert decode_rows(Schema.bytes(), table) == [(b"k", b"", 0, 1), (b"", None, 0, 1), (b"\xff", b"v", 1, 5)]
    assert refusal(Schema.bytes(), [(None, b"v")], time=0).problem == "null"
    assert refusal(Schema.bytes(), [("k", b"v")], time=0).problem == "type"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(JSONS, JSONS), min_size=1, max_size=3))
def test_json_values_come_back_and_their_text_is_the_only_one(rows):
    table = read(JSON, rows, time=0)
    found = [(update.key, update.value) for update in decode_rows(JSON, table)]
    assert repr(found) == repr([(key, value) for key, value in rows]) or found == rows
    assert [text_of(key) for key, _ in found] == table.column("key").to_pylist()
    assert read(JSON, table).equals(table)
