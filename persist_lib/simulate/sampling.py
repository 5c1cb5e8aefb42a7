"""Rows of any schema, made of nothing but a seed and a number: the same ones on every machine.

Values are ordinary ones and those that programs get wrong: null, NaN, -0.0, the empty text, the ends of a range. The
first column that has room for it holds the row's number, so that no two rows are equal; where no column has room, rows
may be, and the ledger counts them.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as is_

from persist_lib.schema.schema import DIFF_FIELD, TIME_FIELD, Schema
from persist_lib.schema.types import is_json

NULLS = 0.1
ODD = 0.2
"""The share of values that are taken from the odd ones of their type."""
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, 5e-324)
TEXTS = ("", "a", "\0", "ab", "ä€𝄞", " x ")
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
HALF = 1 << 62


class Sampler:
    """Makes rows of one schema."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self.schema, self.seed = schema, seed
        self.named = next((field.name for field in schema.data if _has_room(field.type)), None)
        """The column that holds the row's number; None: rows may be equal."""

    @property
    def is_named_by_key(self) -> bool:
        """Whether the number is in the key, so that no two rows have the same one."""
        return self.named in self.schema.key_names

    def table(
        self, numbers: Sequence[int], times: Sequence[int] | None = None, diffs: Sequence[int] = (), variant: int = 0
    ) -> pa.Table:
        """The rows of these numbers; with `times` and `diffs`, which are 1 if left out, as updates.

        Rows of another `variant` have the same key, and other values.
        """
        rows = [self.row(number, variant) for number in numbers]
        fields = list(self.schema.data)
        columns = [pa.array([row[field.name] for row in rows], field.type) for field in fields]
        if times is not None:
            fields, columns = [*fields, TIME_FIELD], [*columns, pa.array(times, TIME_FIELD.type)]
            fields, columns = [*fields, DIFF_FIELD], [*columns, pa.array(diffs or [1] * len(rows), DIFF_FIELD.type)]
        return pa.table(columns, schema=pa.schema(fields))

    def row(self, number: int, variant: int = 0) -> dict[str, Any]:
        """The row of a number, whose values Arrow takes; or another one with the same key."""
        row = self._row(number, random.Random(f"{self.seed} row {number}"))
        other = self._row(number, random.Random(f"{self.seed} row {number} {variant}")) if variant else row
        return row | {column.name: other[column.name] for column in self.schema.value}

    def _row(self, number: int, draw: random.Random) -> dict[str, Any]:
        row = {}
        for field in self.schema.data:
            holds = field.name == self.named
            is_null = not holds and field.nullable and draw.random() < NULLS
            value = None if is_null else self._value(field, draw, number if holds else None)
            row[field.name] = value
        return row

    def _value(self, field: pa.Field, draw: random.Random, number: int | None) -> Any:
        if self.schema.codec == "json" or is_json(field):
            inner = draw.choice([number, f"r{number}", {"a": [number, None]}]) if number is not None else draw.random()
            return json.dumps(inner, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return value_of(field.type, draw, number)


def _has_room(type_: pa.DataType) -> bool:
    """Whether a column can hold any row's number."""
    return (
        type_ in {pa.int64(), pa.uint64(), pa.int32(), pa.uint32(), pa.float64(), pa.string(), pa.binary()}
        or is_.is_timestamp(type_) or (is_.is_decimal(type_) and type_.precision - type_.scale >= 12)
        or (is_.is_fixed_size_binary(type_) and type_.byte_width >= 8)
    )  # fmt: skip


def value_of(type_: pa.DataType, draw: random.Random, number: int | None = None) -> Any:
    """A value of a type; the one that holds a number, where one is given and the type has room for it."""
    if number is not None and _has_room(type_):
        return _naming(type_, number)
    if is_.is_nested(type_):
        return _nested(type_, draw)
    is_odd = draw.random() < ODD
    if is_.is_boolean(type_):
        return draw.random() < 0.5
    if is_.is_integer(type_):
        return _integer(type_, draw, is_odd=is_odd)
    if is_.is_floating(type_):
        return draw.choice(FLOATS) if is_odd else float(draw.randrange(-1000, 1000)) / 8
    if is_.is_string(type_):
        return draw.choice(TEXTS) if is_odd else f"word {draw.randrange(1000)}"
    if is_.is_fixed_size_binary(type_):
        return draw.randbytes(type_.byte_width)
    if is_.is_binary(type_):
        return b"" if is_odd else draw.randbytes(draw.randrange(1, 12))
    return _scalar(type_, draw.randrange(-(10**6), 10**6), is_odd=is_odd)


def _integer(type_: pa.DataType, draw: random.Random, *, is_odd: bool) -> int:
    least = 0 if is_.is_unsigned_integer(type_) else -(1 << (type_.bit_width - 1))
    most = least + (1 << type_.bit_width) - 1
    return draw.choice([least, most, 0]) if is_odd else draw.randrange(max(least, -100), min(most, 10_000))


def _scalar(type_: pa.DataType, drawn: int, *, is_odd: bool) -> Any:
    """A decimal, a date, a time of day, a moment or a duration."""
    if is_.is_decimal(type_):
        most = 10**type_.precision - 1
        return decimal.Decimal((drawn < 0, tuple(map(int, str(most if is_odd else abs(drawn) % most))), -type_.scale))
    if is_.is_date(type_):
        return (EPOCH + dt.timedelta(days=drawn % 50_000)).date()
    if is_.is_time(type_):
        return (EPOCH + dt.timedelta(microseconds=abs(drawn) * 80_000)).time()
    if is_.is_duration(type_):
        return dt.timedelta(seconds=drawn)
    return _moment(type_, abs(drawn))


def _moment(type_: pa.DataType, seconds: int) -> dt.datetime:
    return (EPOCH + dt.timedelta(seconds=seconds)).replace(tzinfo=dt.UTC if type_.tz else None)


def _naming(type_: pa.DataType, number: int) -> Any:
    """The value that holds a number, which may be negative."""
    if is_.is_unsigned_integer(type_):
        return number if number >= 0 else (1 << 32) - 1 + number
    if is_.is_floating(type_):
        return float(number)
    if is_.is_string(type_):
        return f"row {number}"
    if is_.is_fixed_size_binary(type_):
        return (number + HALF).to_bytes(type_.byte_width, "big")
    if is_.is_binary(type_):
        return f"row {number}".encode()
    if is_.is_timestamp(type_):
        return _moment(type_, number + (1 << 30))
    return decimal.Decimal(number) if is_.is_decimal(type_) else number


def _nested(type_: pa.DataType, draw: random.Random) -> Any:
    def inner(within: pa.DataType) -> Any:
        return None if draw.random() < NULLS else value_of(within, draw)

    if is_.is_struct(type_):
        return {field.name: inner(field.type) for field in type_}
    if is_.is_map(type_):
        keys = {repr(key): key for key in (value_of(type_.key_type, draw) for _ in range(draw.randrange(4)))}
        return [(key, inner(type_.item_type)) for key in sorted(keys.values())]  # as they are stored
    count = type_.list_size if is_.is_fixed_size_list(type_) else draw.choice([0, 1, 3])
    return [inner(type_.value_type) for _ in range(count)]
