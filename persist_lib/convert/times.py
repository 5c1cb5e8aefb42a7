"""The column `_time` where times are a clock: what callers write becomes integers, and integers become timestamps.

A column of Arrow may hold timestamps with a zone in any unit, dates, ISO texts, or integers. Rows may hold whatever
`persist_lib.times` reads, numpy's and pandas' timestamps included. The way out is `timestamp[ms, UTC]` (or us), as
people expect in a frame: it holds the same 64 bits, so what comes out goes in again as the same integers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.convert.casts import cast_column, is_text, plain_column
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import TIME, TIME_FIELD, Schema
from persist_lib.times import END_S, PER_SECOND, Times, Unit

FEW = 64
_is = pa.types
_PLAIN = frozenset((int, type(None)))
_MOMENTS = frozenset((dt.datetime, type(None)))


def read_column(column: pa.ChunkedArray, times: Times, first_row: int) -> pa.ChunkedArray:
    """A column of times as integers. Raises InvalidUsage, with the row, for one that is no time of the clock."""
    unit, plain = _unit(times), plain_column(column)
    kind = plain.type
    if is_text(kind):
        return _of_texts(plain, times, first_row)
    if _is.is_date(kind):
        plain = plain.cast(pa.timestamp("s")).cast(pa.timestamp("s", "UTC"))  # a date is its first moment in UTC
    if _is.is_timestamp(plain.type):
        wanted = pa.field(TIME, pa.timestamp(unit, "UTC"), nullable=False)
        return _in_range(cast_column(plain, wanted, first_row).cast(pa.int64()), plain, unit, first_row)
    return _in_range(cast_column(plain, TIME_FIELD, first_row), plain, unit, first_row)


def read_values(values: Sequence[Any], times: Times, first_row: int) -> list[Any]:
    """Python values as integers; None, and what is no time at all, as they are."""
    unit, kinds = _unit(times), set(map(type, values))
    if kinds <= _MOMENTS and not any(value is not None and value.utcoffset() is None for value in values):
        column = pa.chunked_array([pa.array(values, pa.timestamp("us", "UTC"))])  # many at once, as exactly
        return read_column(column, times, first_row).to_pylist()
    found = list(values) if kinds <= _PLAIN else _parsed(values, times, first_row)
    end = END_S * PER_SECOND[unit]
    for row, value in enumerate(found):
        if type(value) is int and not 0 <= value < end:
            raise _beyond(value, unit, first_row + row)
    return found


def shown_times(schema: Schema, table: pa.Table) -> pa.Table:
    """Updates as callers see them: `schema.changes`. Nothing is copied."""
    if schema.times is None:
        return table
    at = table.schema.get_field_index(TIME)
    stamps = table.column(at).cast(pa.int64(), safe=False).cast(schema.time_field.type)
    return table.set_column(at, schema.time_field, stamps)


def _parsed(values: Sequence[Any], times: Times, first_row: int) -> list[Any]:
    found: list[Any] = []
    for row, value in enumerate(values, first_row):
        if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas' missing values
            found.append(None)
        elif type(value) is int:
            found.append(value)
        elif type(value) is float and value.is_integer() and abs(value) <= 1 << 53:  # integers beside gaps, in pandas
            found.append(int(value))
        else:
            found.append(_one(value, times, row))
    return found


def _one(value: object, times: Times, row: int) -> int:
    try:
        return times.parse(value, TIME)
    except InvalidUsage as error:
        raise InvalidUsage(
            f"row {row}: {error.message}", problem="value", column=TIME, row=row, value=value,
            expected=f"timestamp[{times.unit}, UTC]",
        ) from error  # fmt: skip


def _of_texts(texts: pa.ChunkedArray, times: Times, first_row: int) -> pa.ChunkedArray:
    """ISO texts by Arrow, where it reads them all; otherwise each different text by itself."""
    unit = _unit(times)
    kind = pa.timestamp(unit, "UTC")
    try:
        texts.slice(0, FEW).cast(pa.string()).cast(kind)  # first a few, as Arrow continues to the end after an error
        found = texts.cast(pa.string()).cast(kind).cast(pa.int64())
    except pa.ArrowInvalid:
        encoded = texts.cast(pa.large_string()).combine_chunks().dictionary_encode()
        encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
        different = encoded.dictionary.to_pylist()
        rows = [
            pc.index(encoded.indices, pa.scalar(place, encoded.indices.type)).as_py()
            for place in _wrong(different, times)
        ]
        if rows:
            row = min(rows)
            _one(different[encoded.indices[row].as_py()], times, first_row + row)
        read = pa.array([times.parse(text, TIME) for text in different], pa.int64())
        found = pa.chunked_array([read.take(encoded.indices)])
    return _in_range(found, texts, unit, first_row)


def _wrong(texts: Sequence[str], times: Times) -> list[int]:
    """The places of those that are no times."""
    found = []
    for place, text in enumerate(texts):
        try:
            times.parse(text, TIME)
        except InvalidUsage:
            found.append(place)
    return found


def _in_range(found: pa.ChunkedArray, given: pa.ChunkedArray, unit: Unit, first_row: int) -> pa.ChunkedArray:
    if found.null_count == len(found):
        return found.cast(pa.uint64())
    bounds = pc.min_max(found).as_py()
    end = END_S * PER_SECOND[unit]
    if bounds["min"] < 0 or bounds["max"] >= end:
        wrong = pc.or_(pc.less(found, 0), pc.greater_equal(found, end))
        row = pc.index(wrong, True).as_py()
        raise _beyond(found[row].as_py(), unit, first_row + row, str(given[row]))
    return found.cast(pa.uint64())


def _beyond(value: int, unit: Unit, row: int, given: str | None = None) -> InvalidUsage:
    text = shown(value) if given is None else given
    why = (
        "before 1970-01-01T00:00:00Z, where the shard's clock starts" if value < 0
        else f"after the year 9999, as the shard's clock counts {unit} since 1970: is it in another unit?"
    )  # fmt: skip
    return InvalidUsage(
        f"column {TIME!r}: row {row} has {text}, which is {why}",
        problem="value", column=TIME, row=row, value=value, expected=f"timestamp[{unit}, UTC]",
    )  # fmt: skip


def _unit(times: Times) -> Unit:
    if times.unit is None:
        raise AssertionError("times that are plain integers are read as any other column")
    return times.unit
