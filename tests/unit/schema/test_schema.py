"""Schemas: what they are made of, what they refuse, and how they change."""

from __future__ import annotations

import copy
import datetime as dt
import enum
import pickle
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType

import msgspec
import pyarrow as pa
import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NaiveDatetime

from persist_lib.errors import InvalidName, InvalidUsage, SchemaMismatch
from persist_lib.schema.schema import Column, Schema, check_schema, stored_form
from persist_lib.schema.types import format_type, parse_type

CANONICAL = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "string",
    "binary", "date32", "time64[us]", "timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]",
    "timestamp[us, UTC]", "timestamp[ns, Europe/Berlin]", "timestamp[s, +02:00]", "duration[s]", "duration[ms]",
    "duration[us]", "duration[ns]", "decimal128(1, 0)", "decimal128(18, 2)", "decimal128(38, 38)",
    "fixed_size_binary[1]", "fixed_size_binary[16]", "decimal256(39, 0)", "decimal256(76, 76)",
]  # fmt: skip
NESTED = [
    "list<int64>", "list<list<timestamp[us, UTC]>>", "list<float32>[768]", "struct<a: decimal128(18, 2), b: string>",
    'struct<"odd, name": int8, "quo\\"te": list<struct<c: bool>>>', "map<string, list<int64>>",
    "map<fixed_size_binary[2], map<int8, date32>>", "list<decimal256(50, 2)>",
]  # fmt: skip
ORDERS = Schema(key={"order_id": "int64 not null"}, value={"state": "string", "cents": "int64"})


@pytest.mark.parametrize("text", CANONICAL)
def test_a_canonical_type_means_one_arrow_type_and_back(text):
    assert format_type(parse_type(text)) == text
    assert Schema(key={"k": text}) == Schema(key=pa.schema([("k", parse_type(text))]))


@pytest.mark.parametrize("text", NESTED)
def test_a_canonical_nested_type_means_one_arrow_type_and_back(text):
    assert format_type(parse_type(text)) == text
    schema = Schema(key={"k": "int64"}, value={"v": text})
    assert schema == Schema(key={"k": "int64"}, value=pa.schema([("v", parse_type(text))]))


@pytest.mark.parametrize(
    "text",
    [
        "list<>", "list< >", "list<int64>[0]", "list<int64>[70000]", "struct<>", "struct<a int64>", "struct<: int64>",
        "struct<a: int64, a: int64>", "struct<a: >", "map<string>", "map<string, int64, int64>", "map<float64, int64>",
        "map<list<int64>, int64>", "map<string, int64>[2]", "list<int64", "list<int65>", "list<int64 not null>",
        "list<" * 17 + "int8" + ">" * 17, "list<" * 3000 + "int8" + ">" * 3000,
    ],
)  # fmt: skip
def test_what_is_no_nested_type_is_refused(text):
    with pytest.raises(InvalidUsage) as caught:
        Schema(key={"k": "int64"}, value={"v": text})
    assert caught.value.column == "v"
    assert caught.value.problem == "unsupported type"


def test_what_is_within_may_always_be_null():
    """So a type of Arrow's that says otherwise is the same type, and a text that does is refused."""
    strict = pa.list_(pa.field("x", pa.struct([pa.field("a", pa.int64(), nullable=False)]), nullable=False))
    assert format_type(strict) == "list<struct<a: int64>>"
    with pytest.raises(InvalidUsage, match="may always be null"):
        parse_type("struct<a: int64 not null>")


def test_a_nested_column_is_none_of_the_key():
    nested = Schema(key={"k": "list<int64>"})
    with pytest.raises(InvalidUsage, match="a key has plain columns"):
        check_schema(nested)


def test_no_column_reads_like_a_field_of_another():
    with pytest.raises(InvalidName, match=r"'v\.a' beside the nested 'v'"):
        Schema(key={"v.a": "int64"}, value={"v": "struct<a: int64>"})
    assert Schema(key={"v.a": "int64"}, value={"v": "string"}).names == ["v.a", "v"]


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [
        ("int", "int64"), ("float", "float64"), ("str", "string"), ("bytes", "binary"), ("date", "date32"),
        ("timestamp", "timestamp[us, UTC]"), ("timestamp[us, tz=UTC]", "timestamp[us, UTC]"), ("boolean", "bool"),
        ("decimal(10, 2)", "decimal128(10, 2)"), ("decimal256(10, 2)", "decimal128(10, 2)"),
        ("decimal(39, 1)", "decimal256(39, 1)"), (pa.decimal256(38, 1), "decimal128(38, 1)"),
        (pa.float32(), "float32"), (pa.float64(), "float64"), (pa.large_string(), "string"),
        (pa.string_view(), "string"), (pa.large_binary(), "binary"), (pa.binary_view(), "binary"),
        (pa.date64(), "date32"),
        (pa.decimal64(10, 2), "decimal128(10, 2)"), (pa.dictionary(pa.int8(), pa.large_string()), "string"),
        (pa.run_end_encoded(pa.int32(), pa.int64()), "int64"),
    ],
)  # fmt: skip
def test_other_names_and_encodings_of_a_type_become_the_canonical_one(alias, canonical):
    assert Schema(key={"k": alias}).key == (Column("k", canonical),)


@pytest.mark.parametrize(
    "type_",
    [
        pa.list_(pa.float16()), pa.struct([]), pa.map_(pa.float32(), pa.int64()), pa.float16(),
        pa.dense_union([pa.field("a", pa.int64())]), pa.month_day_nano_interval(),
        pa.dictionary(pa.int8(), pa.float16()), pa.null(),
        pa.time32("s"), pa.time64("ns"), pa.opaque(pa.binary(), "x", "y"), pa.decimal128(5, -2), "int128",
        "decimal128(77, 0)", "decimal128(5, 6)", "timestamp[min]", "fixed_size_binary[0]", "interval", "",
        "int64 not nul", int, None,
        "timestamp[us, Nowhere/At_All]",
    ],
)  # fmt: skip
def test_an_unsupported_type_is_refused_by_column_and_says_what_is_supported(type_):
    with pytest.raises(InvalidUsage) as caught:
        Schema(key={"k": type_})
    assert caught.value.column == "k"
    assert "type" in str(caught.value.problem)
    if isinstance(type_, pa.DataType):
        assert "decimal128(precision, scale)" in str(caught.value)


def test_columns_are_nullable_unless_they_say_otherwise():
    assert [str(c) for c in Schema(key={"a": "int64  not null", "b": pa.int8()}).key] == [
        "a: int64 not null",
        "b: int8",
    ]
    assert Schema(key=pa.schema([pa.field("a", pa.int8(), nullable=False)])).key == (Column("a", "int8", False),)


def test_order_of_columns_is_as_given_and_stored():
    names = ["z", "a", "m"]
    schema = Schema(key=dict.fromkeys(names, "int64"), value={"y": "int8", "b": "int8"})
    assert schema.names == ["z", "a", "m", "y", "b"]
    assert schema.updates.names == [*schema.names, "_time", "_diff"]
    assert schema.contents.names == [*schema.names, "_diff"]
    assert not schema.updates.field("_time").nullable
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(schema), type=Schema).names == schema.names


@pytest.mark.parametrize("name", ["", "_time", "_diff", "a\0b", "a\nb", "\ud800", 7, None])
def test_a_column_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(InvalidName) as caught:
        Schema(key={name: "int64"})
    assert caught.value.name == name


def test_a_name_in_both_key_and_value_is_refused():
    with pytest.raises(InvalidName, match="more than once") as caught:
        Schema(key={"a": "int64"}, value={"a": "string"})
    assert caught.value.name == "a"
    with pytest.raises(InvalidName):
        Schema(key=pa.schema([("a", pa.int8()), ("a", pa.int8())]))


@pytest.mark.parametrize("key", [{}, (), "int64", b"k", 7, None, ["a", "b"], [("a", "int64")]])
def test_what_is_no_columns_is_refused(key):
    with pytest.raises(InvalidUsage):
        Schema(key=key)


def test_a_codec_must_be_known_and_fit_its_columns():
    with pytest.raises(InvalidUsage, match="codec"):
        Schema(key={"a": "int64"}, codec="avro")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match=r"Schema\.json\(\)"):
        Schema(key={"a": "int64"}, codec="json")
    assert str(Schema.json()) == "json: (key: string not null) -> (value: string not null)"
    assert str(Schema.bytes()) == "bytes: (key: binary not null) -> (value: binary)"


def test_the_stored_bytes_of_a_schema_never_change():
    golden = bytes.fromhex(
        "939193a86f726465725f6964a5696e743634c29293a57374617465a6737472696e67c393a563656e7473a5696e743634c3a7636f6c756d6e73"
    )
    assert msgspec.msgpack.encode(stored_form(ORDERS)) == golden
    clock = Schema(ORDERS.key, ORDERS.value, times="ms")
    assert msgspec.msgpack.encode(stored_form(clock)) == b"\x94" + golden[1:] + b"\xa2ms", "only where it is set"
    for schema in (ORDERS, clock, Schema.json("us"), Schema.bytes("ms")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored_form(schema)), type=Schema) == schema
    assert msgspec.msgpack.decode(golden, type=Schema) == ORDERS


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({"unique": True}, "c0c3"),
        ({"non_negative": True}, "c0c2c3"),
        ({"unique": True, "non_negative": True}, "c0c3c3"),
    ],
)
def test_constraints_are_stored_after_the_other_fields_and_only_if_they_are_set(flags: dict[str, bool], more: str):
    schema = Schema(ORDERS.key, ORDERS.value, **flags)  # type: ignore[arg-type]
    plain = msgspec.msgpack.encode(stored_form(ORDERS))
    stored = msgspec.msgpack.encode(stored_form(schema))
    assert stored == bytes([plain[0] + len(bytes.fromhex(more))]) + plain[1:] + bytes.fromhex(more)
    assert msgspec.msgpack.decode(stored, type=Schema) == schema
    assert pickle.loads(pickle.dumps(schema)) == schema
    assert str(schema) == f"{ORDERS}, {', '.join(flags)}"


def test_constraints_stay_as_a_schema_evolves():
    schema = Schema(ORDERS.key, ORDERS.value, unique=True)
    wider = (*ORDERS.value, Column("more", "int64"))
    schema.check_additive(Schema(ORDERS.key, wider, unique=True))
    for other in (Schema(ORDERS.key, wider), Schema(ORDERS.key, wider, unique=True, non_negative=True)):
        with pytest.raises(SchemaMismatch, match="the constraints are unique, and cannot become"):
            schema.check_additive(other)
    for wrong in (1, "yes", None):
        with pytest.raises(InvalidUsage, match="unique must be True or False"):
            Schema(ORDERS.key, ORDERS.value, unique=wrong)  # type: ignore[arg-type]
    assert Schema.json(unique=True).constraints == ("unique",)
    assert Schema.bytes(non_negative=True).constraints == ("non_negative",)


def test_decoding_checks_a_stored_schema_too():
    with pytest.raises(InvalidName):
        msgspec.msgpack.decode(msgspec.msgpack.encode([[["_time", "int64", True]], [], "columns"]), type=Schema)
    with pytest.raises(InvalidUsage):
        msgspec.msgpack.decode(msgspec.msgpack.encode([[["a", "int65", True]], [], "columns"]), type=Schema)


def test_a_schema_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        ORDERS.key = ()  # type: ignore[misc]
    assert hash(ORDERS) == hash(Schema(key=ORDERS.key, value=ORDERS.value))


def test_a_schema_reads_like_a_function_from_key_to_value():
    assert str(ORDERS) == "(order_id: int64 not null) -> (state: string, cents: int64)"


def test_a_new_nullable_value_column_at_the_end_is_additive():
    ORDERS.check_additive(ORDERS)
    ORDERS.check_additive(Schema(ORDERS.key, (*ORDERS.value, Column("note", "string"))))


@pytest.mark.parametrize(
    ("newer", "reason"),
    [
        (Schema(ORDERS.key, (*ORDERS.value, Column("note", "string", False))), "must be nullable"),
        (Schema(ORDERS.key, ORDERS.value[:1]), "cents: int64.* is missing; say schema.drop"),
        (Schema(ORDERS.key, ORDERS.value[::-1]), "state: string.* not in its place"),
        (Schema(ORDERS.key, {"state": "string", "cents": "int32"}), "cents: int64.* cannot become .*cents: int32"),
        (Schema(ORDERS.key, {"state": "string", "cents": "int64 not null"}), "cents: int64 not null"),
        (Schema({"id": "int64 not null"}, ORDERS.value), "the key changes"),
        (Schema((*ORDERS.key, Column("region", "string")), ORDERS.value), "the key changes: .*region: string"),
        (Schema.json(), "cannot become json"),
    ],
)
def test_every_other_change_is_refused_with_both_schemas(newer, reason):
    with pytest.raises(SchemaMismatch, match=reason) as caught:
        ORDERS.check_additive(newer)
    assert caught.value.actual == ORDERS
    assert caught.value.expected == newer


def test_a_new_column_is_nullable_where_there_are_constraints_too():
    unique = Schema(ORDERS.key, ORDERS.value, unique=True)
    with pytest.raises(SchemaMismatch, match="must be nullable"):
        unique.check_additive(Schema(ORDERS.key, (*ORDERS.value, Column("note", "string", False)), unique=True))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Cents = NewType("Cents", int)


class Everything(BaseModel):
    id: int
    name: str | None
    price: Decimal = Field(max_digits=10, decimal_places=2)
    tax: Annotated[Decimal, Field(max_digits=5, decimal_places=3)] | None = None
    colour: Colour
    size: Literal["s", "m", None]  # noqa: PYI061 - this spelling is what is tested
    token: uuid.UUID
    at: dt.datetime
    aware: AwareDatetime
    naive: NaiveDatetime | None
    day: dt.date
    hour: dt.time
    took: dt.timedelta
    raw: bytes
    ratio: float
    flag: bool
    small: Annotated[int, pa.int8()]
    cents: Cents
    aliased: int = Field(alias="Other")


def test_a_models_fields_become_columns_and_only_optional_ones_are_nullable():
    assert [str(column) for column in Schema(key=Everything).key] == [
        "id: int64 not null", "name: string", "price: decimal128(10, 2) not null", "tax: decimal128(5, 3)",
        "colour: string not null", "size: string", "token: string not null", "at: timestamp[us, UTC] not null",
        "aware: timestamp[us, UTC] not null", "naive: timestamp[us]", "day: date32 not null",
        "hour: time64[us] not null", "took: duration[us] not null", "raw: binary not null", "ratio: float64 not null",
        "flag: bool not null", "small: int8 not null", "cents: int64 not null", "aliased: int64 not null",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "annotation",
    [list[Any], dict[str, Decimal], list, Decimal, int | str, Any, object, Literal[1, "a"], tuple[int, int], complex],
)
def test_a_models_field_without_a_column_type_is_refused_by_name(annotation):
    model = type(
        "Odd", (BaseModel,), {"__annotations__": {"odd": annotation}, "model_config": {"arbitrary_types_allowed": True}}
    )
    with pytest.raises(InvalidUsage, match=r"Odd\.odd: no column type") as caught:
        Schema(key=model)
    assert caught.value.column == "odd"


def test_a_model_with_extra_fields_is_refused():
    class Loose(BaseModel):
        model_config = ConfigDict(extra="allow")
        id: int

    with pytest.raises(InvalidUsage, match="extra fields"):
        Schema(key=Loose)


class Key(BaseModel):
    id: int


class Value(BaseModel):
    state: str | None


def test_models_travel_with_copies_and_pickles_but_are_not_part_of_the_schema():
    schema = Schema(key=Key, value=Value)
    for other in (pickle.loads(pickle.dumps(schema)), copy.copy(schema), copy.deepcopy(schema)):
        assert other.models == (Key, Value)
    plain = Schema(key={"id": "int64 not null"}, value={"state": "string"})
    assert schema == plain
    assert msgspec.msgpack.encode(schema) == msgspec.msgpack.encode(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(schema), type=Schema).models == (None, None)
