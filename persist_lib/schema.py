"""What a shard's updates look like: typed key and value columns, and how they may change.

A `Schema` is the user's columns; on the wire they are followed by `_time: uint64` and `_diff: int64`, both non-null.
Column types are canonical strings (`int64`, `string`, `timestamp[us, UTC]`, `decimal128(18, 2)`), so that a schema is
the same bytes in every release of Arrow. Schemas evolve additively: new nullable value columns at the end.

Codecs turn Python values into columns: plain columns (the default), a pydantic model, one JSON column, opaque bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec
import pyarrow as pa

from persist_lib.errors import InvalidName, InvalidUsage, SchemaMismatch

TIME = "_time"
DIFF = "_diff"
RESERVED = (TIME, DIFF)
TIME_FIELD = pa.field(TIME, pa.uint64(), nullable=False)
DIFF_FIELD = pa.field(DIFF, pa.int64(), nullable=False)

Codec = Literal["columns", "json", "bytes"]

_SIMPLE: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(),
    "date32": pa.date32(), "time64[us]": pa.time64("us"),
}  # fmt: skip
_ALIASES = {"int": "int64", "double": "float64", "str": "string", "utf8": "string",
            "large_string": "string", "large_utf8": "string", "string_view": "string", "bytes": "binary",
            "large_binary": "binary", "binary_view": "binary", "date": "date32", "boolean": "bool", "float": "float64",
            "timestamp": "timestamp[us, UTC]"}  # fmt: skip
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, *(?:tz=)?([\w/+:-]+))?\]")
_DURATION = re.compile(r"duration\[(s|ms|us|ns)\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), *(-?\d+)\)")
_FIXED = re.compile(r"fixed_size_binary\[(\d+)\]")


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One column: its name, its canonical type, and whether null is allowed."""

    name: str
    type: str
    nullable: bool = True

    @property
    def field(self) -> pa.Field:
        """The column in Arrow."""
        return pa.field(self.name, parse_type(self.type), nullable=self.nullable)


class Schema(msgspec.Struct, frozen=True, array_like=True):
    """Key and value columns. `Schema.of(...)` is the way to build one; it checks every name and type."""

    key: tuple[Column, ...]
    value: tuple[Column, ...] = ()
    codec: Codec = "columns"

    @classmethod
    def of(cls, key: object, value: object = (), *, codec: Codec = "columns") -> Schema:
        """From mappings of name to type, Arrow schemas, or pydantic models. A type may end in ` not null`."""
        built = cls(_columns(key, "key"), _columns(value, "value"), codec)
        names = [column.name for column in built.columns]
        if not built.key:
            raise InvalidUsage("a schema needs at least one key column")
        for name in names:
            if name in RESERVED or not name or names.count(name) > 1:
                raise InvalidName(f"column names must be unique, not empty, and not {RESERVED}: got {names}", name=name)
        return built

    @property
    def columns(self) -> tuple[Column, ...]:
        """Key columns, then value columns."""
        return self.key + self.value

    @property
    def names(self) -> list[str]:
        """The names of `columns`."""
        return [column.name for column in self.columns]

    @property
    def key_names(self) -> list[str]:
        """The names of the key columns."""
        return [column.name for column in self.key]

    @property
    def data(self) -> pa.Schema:
        """The user's columns in Arrow."""
        return _arrow(self)[0]

    @property
    def updates(self) -> pa.Schema:
        """The user's columns, then `_time` and `_diff`: what is stored and what `listen` yields."""
        return _arrow(self)[1]

    @property
    def contents(self) -> pa.Schema:
        """The user's columns, then `_diff`: what a snapshot yields."""
        return _arrow(self)[2]

    def check_additive(self, newer: Schema) -> None:
        """Raise SchemaMismatch unless `newer` only adds nullable value columns at the end."""
        added = newer.value[len(self.value) :]
        if newer.key != self.key or newer.value[: len(self.value)] != self.value or newer.codec != self.codec:
            raise SchemaMismatch(
                "a schema may only gain value columns at its end; keys, types, names and order stay as they are. "
                f"The shard has {self}; asked was {newer}",
                actual=self, expected=newer,
            )  # fmt: skip
        if not all(column.nullable for column in added):
            raise SchemaMismatch(f"a new column must be nullable, as older updates have no value for it: {added}")

    def __str__(self) -> str:
        def side(columns: tuple[Column, ...]) -> str:
            return ", ".join(f"{c.name}: {c.type}{'' if c.nullable else ' not null'}" for c in columns)

        return f"({side(self.key)}) -> ({side(self.value)})"


@lru_cache(maxsize=1024)
def _arrow(schema: Schema) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
    fields = [column.field for column in schema.columns]
    return pa.schema(fields), pa.schema([*fields, TIME_FIELD, DIFF_FIELD]), pa.schema([*fields, DIFF_FIELD])


@lru_cache(maxsize=1024)
def parse_type(text: str) -> pa.DataType:
    """The Arrow type of a canonical type string; InvalidUsage names the supported ones."""
    text = _ALIASES.get(text, text)
    if text in _SIMPLE:
        return _SIMPLE[text]
    if match := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(match[1], tz=match[2])
    if match := _DURATION.fullmatch(text):
        return pa.duration(match[1])
    if match := _DECIMAL.fullmatch(text):
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= 38 and 0 <= scale <= precision:
            return pa.decimal128(precision, scale)
    if (match := _FIXED.fullmatch(text)) and 1 <= int(match[1]) <= 4096:
        return pa.binary(int(match[1]))
    raise InvalidUsage(
        f"column type {text!r} is not supported; use {', '.join(_SIMPLE)}, timestamp[us] or timestamp[us, UTC], "
        "duration[us], decimal128(p, s), fixed_size_binary[n]",
        type=text,
    )


def format_type(type_: pa.DataType) -> str:
    """The canonical string of an Arrow type; InvalidUsage where Persist cannot store it."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_timestamp(type_):
        return f"timestamp[{type_.unit}{', ' + type_.tz if type_.tz else ''}]"
    if pa.types.is_decimal128(type_):
        return f"decimal128({type_.precision}, {type_.scale})"
    if pa.types.is_fixed_size_binary(type_):
        return f"fixed_size_binary[{type_.byte_width}]"
    text = {"date32[day]": "date32", "halffloat": "float16"}.get(str(type_), str(type_))
    text = _ALIASES.get(text, text)
    parse_type(text)
    return text


def _columns(side: object, what: str) -> tuple[Column, ...]:
    if isinstance(side, pa.Schema):
        return tuple(Column(f.name, format_type(f.type), f.nullable) for f in side)
    if isinstance(side, Mapping):
        return tuple(_column(name, type_) for name, type_ in side.items())
    if isinstance(side, (tuple, list)) and all(isinstance(c, Column) for c in side):
        return tuple(side)
    raise InvalidUsage(f"the {what} must map column names to types or be an Arrow schema, got {side!r}")


def _column(name: object, type_: object) -> Column:
    if not isinstance(name, str):
        raise InvalidName(f"a column's name must be a string, got {name!r}", name=name)
    if isinstance(type_, pa.DataType):
        return Column(name, format_type(type_))
    if not isinstance(type_, str):
        raise InvalidUsage(f"column {name!r}: the type must be a string or an Arrow type, got {type_!r}")
    text, nullable = type_, True
    if text.endswith(" not null"):
        text, nullable = text.removesuffix(" not null"), False
    return Column(name, format_type(parse_type(text)), nullable)
