"""Arrow columns of other people's types as the schema's types, losslessly or not at all.

What is converted: layouts of the same values (large, view, dictionary, run-end encoded; null for any type), integers of
other widths and units of time where every value fits exactly, floats that are whole numbers (pandas turns integers with
gaps into such), integers that a float holds exactly, decimals without lost digits, instants of another zone, times at
midnight as dates. What is not: text as numbers or bytes, bool as int, times without a zone as instants or back.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.convert.json_columns import canonical_column
from persist_lib.convert.nested import nested_conversion
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.schema.schema import TIME
from persist_lib.schema.types import is_json, plain_type, said_type
from persist_lib.times import END_S

Convert = Callable[[pa.Array, pa.DataType], pa.Array]

PIECE_BYTES = 1 << 30
"""Text and bytes are converted in pieces of about this size: the offsets of the stored types are 32 bits wide."""

DAY_S = 86_400
FIRST_S = -62_135_596_800
"""Where the year 1 begins, in seconds since 1970."""

_is = pa.types


def cast_column(column: pa.ChunkedArray, field: pa.Field, first_row: int = 0) -> pa.ChunkedArray:
    """The column as `field.type`; SchemaMismatch for a type that never fits, InvalidUsage for a value that does not.

    A moment that Arrow holds and no Python value does is refused here, as every read of it would fail. Text becomes
    canonical in a column of JSON.
    """
    found = _cast_column(column, field, first_row)
    if is_json(field):
        return canonical_column(found, field.name, first_row)
    if field.name != TIME and (wrong := unreadable(found)) is not None:
        row = pc.index(wrong, True).as_py()
        value = _as_py(found[row])
        raise InvalidUsage(
            f"column {field.name!r} is {field.type}, and row {first_row + row} has {shown(value)}, which is "
            f"{UNREADABLE}: it could be written, but not be read as a Python value. Change it, or keep it as text",
            problem="value", column=field.name, row=first_row + row, value=value, expected=str(field.type),
        )  # fmt: skip
    return found


UNREADABLE = "no time of a day, or outside of the years 1 to 9999"


def unreadable(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Which values are moments that Arrow holds and no Python value does. None: there is no such value."""
    if (bounds := _bounds(column.type)) is None or column.null_count == len(column):
        return None
    low, high = bounds
    numbers = column.cast(pa.int32() if _is.is_date32(column.type) else pa.int64())
    found = pc.min_max(numbers).as_py()
    if low <= found["min"] and found["max"] < high:
        return None
    return pc.fill_null(pc.or_(pc.less(numbers, low), pc.greater_equal(numbers, high)), False)


@lru_cache(maxsize=256)
def _bounds(kind: pa.DataType) -> tuple[int, int] | None:
    """From which number on, and below which, a moment of this type is a Python value; None where all are."""
    if _is.is_date32(kind):
        return FIRST_S // DAY_S, END_S // DAY_S
    if _is.is_time64(kind):
        return 0, DAY_S * 1_000_000
    if not _is.is_timestamp(kind) or kind.unit == "ns":
        return None
    per_second = {"s": 1, "ms": 1_000, "us": 1_000_000}[kind.unit]
    margin = 0 if kind.tz in (None, "UTC") else DAY_S  # as it is shown in its zone
    return (FIRST_S + margin) * per_second, (END_S - margin) * per_second


def _cast_column(column: pa.ChunkedArray, field: pa.Field, first_row: int) -> pa.ChunkedArray:
    nested = _is.is_nested(field.type)  # whose type says neither that maps are in order nor that no null is within
    if column.type == field.type and not nested:
        return column
    plain = plain_column(column)
    if plain.type == field.type and not nested:
        return plain
    convert = None if _is.is_null(plain.type) else _conversion(plain.type, field.type)
    # Categories of pandas that are of no value have floats as their type.
    is_null = _is.is_null(plain.type) or (_is.is_dictionary(column.type) and plain.null_count == len(plain))
    if convert is None and is_null:
        return pa.chunked_array([pa.nulls(len(plain), field.type)], field.type)
    if convert is None:
        value = next((scalar for scalar in plain if scalar.is_valid), None)
        raise wrong_type(field, str(column.type), first_row, None if value is None else _as_py(value))
    pieces, row = [], first_row
    for chunk in plain.chunks:
        pieces += [_convert(convert, piece, field, row + start) for start, piece in _pieces(chunk)]
        row += len(chunk)
    return pa.chunked_array(pieces, field.type)


def wrong_type(field: pa.Field, found: str, row: int, value: object) -> SchemaMismatch:
    """The error for a column that holds another kind of values."""
    kind = said_type(field)
    return SchemaMismatch(
        f"column {field.name!r} is {kind} and takes no {found}: row {row} has {shown(value)}. "
        f"{_advice(field, found)}",
        problem="type", column=field.name, row=row, value=value, expected=kind, found=found,
    )  # fmt: skip


def lossy(field: pa.Field, row: int, value: object, reason: str = "") -> InvalidUsage:
    """The error for a value of a fitting kind that the column cannot hold exactly."""
    why = f" ({reason})" if reason else ""
    advice = "change the value, or use a wider column"
    if field.name == TIME and _is.is_timestamp(field.type):
        advice = f'cut times to whole {field.type.unit} first, or give the next shard a finer clock, times="us"'
    return InvalidUsage(
        f"column {field.name!r} is {field.type}, which cannot hold {shown(value)} of row {row} exactly{why}. "
        f"Nothing is rounded or cut silently: {advice}",
        problem="value", column=field.name, row=row, value=value, expected=str(field.type),
    )  # fmt: skip


def _advice(field: pa.Field, found: str) -> str:
    target = field.type
    if is_json(field):
        return "In a column, its text is taken: to_json in Spark and DuckDB, json.dumps in Python"
    if field.name == TIME and _is.is_integer(target):
        return (
            "The times of this shard are plain integers, not a clock. Only a shard that was created with "
            'persist.Schema(…, times="ms") takes clock times'
        )
    if _is.is_timestamp(target) and ("timestamp" in found or "datetime" in found):
        if target.tz:
            return (
                'Say which zone the times are in: .dt.tz_localize("UTC") in pandas, .dt.replace_time_zone("UTC") in '
                'polars, pc.assume_timezone(column, "UTC") in Arrow'
            )
        return "Drop the zone after converting to the one you mean"
    if _is.is_string(target) and "bin" in found:
        return "Decode the bytes to text first"
    return "Convert it first, or use a schema with that type"


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without dictionaries, run ends, and the names that Arrow has for uuids and JSON."""
    if (kind := plain_type(column.type)) != column.type:
        return plain_column(pa.chunked_array([chunk.storage for chunk in column.chunks], kind))
    if _is.is_run_end_encoded(column.type):
        kind = _LARGE.get(column.type.value_type, column.type.value_type)
        chunks = [_expanded(chunk, kind) for chunk in column.chunks]
        return plain_column(pa.chunked_array(chunks, kind))
    if _is.is_dictionary(column.type):
        kind = _LARGE.get(column.type.value_type, column.type.value_type)
        chunks = [_decoded(piece, kind) for chunk in column.chunks for piece in _short(chunk)]
        return plain_column(pa.chunked_array(chunks, kind))
    return column


_LARGE = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _expanded(chunk: pa.RunEndEncodedArray, kind: pa.DataType) -> pa.Array:
    """The values, also of views, which Arrow does not expand either. A slice keeps its offset."""
    if chunk.type.value_type != kind:
        wanted, children = pa.run_end_encoded(chunk.type.run_end_type, kind), [chunk.run_ends, chunk.values.cast(kind)]
        chunk = pa.RunEndEncodedArray.from_buffers(wanted, len(chunk), [None], 0, chunk.offset, children)
    return pc.run_end_decode(chunk)


def _decoded(piece: pa.DictionaryArray, kind: pa.DataType) -> pa.Array:
    """The values. Arrow decodes no dictionary of views, which is what polars has for Categorical and Enum."""
    if piece.type.value_type != kind:
        piece = pa.DictionaryArray.from_arrays(piece.indices, piece.dictionary.cast(kind))
    return piece.dictionary_decode()


def _short(chunk: pa.DictionaryArray) -> Iterator[pa.DictionaryArray]:
    """Pieces of a dictionary-encoded array whose decoded values fit into 32-bit offsets."""
    kind, longest = chunk.type.value_type, 1
    if is_text(kind) or _is_bytes(kind):
        wide = chunk.dictionary.cast(pa.large_binary())  # view layouts know no binary_length
        longest = pc.max(pc.binary_length(wide)).as_py() or 1
    rows = max(1, PIECE_BYTES // longest)
    return (chunk.slice(start, rows) for start in range(0, len(chunk), rows))


def _pieces(chunk: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """The chunk in halves of halves, each small enough for 32-bit offsets; and where each starts."""
    if chunk.nbytes <= PIECE_BYTES or len(chunk) <= 1 or not (is_text(chunk.type) or _is_bytes(chunk.type)):
        yield 0, chunk
        return
    middle = len(chunk) // 2
    yield from _pieces(chunk.slice(0, middle))
    yield from ((middle + start, piece) for start, piece in _pieces(chunk.slice(middle)))


def _convert(convert: Convert, chunk: pa.Array, field: pa.Field, row: int) -> pa.Array:
    try:
        return convert(chunk, field.type)
    except pa.ArrowException as error:
        index = _first_failing(convert, chunk, field.type)
        raise lossy(field, row + index, _as_py(chunk[index]), str(error) * _is.is_nested(field.type)) from error


def _first_failing(convert: Convert, chunk: pa.Array, target: pa.DataType) -> int:
    """The first row that does not convert, by halving."""
    low, high = 0, len(chunk) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            convert(chunk.slice(low, middle + 1 - low), target)
            low = middle + 1
        except pa.ArrowException:
            high = middle
    return low


def wrong_places(
    values: pa.Array, convert: Callable[[pa.Array], pa.Array], refused: tuple[type[Exception], ...]
) -> list[int]:  # fmt: skip
    """The places of the values that do not convert, by halves of halves."""
    found: list[int] = []
    waiting = [(0, len(values))]
    while waiting:
        start, end = waiting.pop()
        try:
            convert(values.slice(start, end - start))
        except refused:
            middle = (start + end) // 2
            if end - start == 1:
                found.append(start)
            else:
                waiting += [(start, middle), (middle, end)]
    return found


def _as_py(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):  # nanoseconds, years beyond Python's
        return f"{getattr(scalar, 'value', 'a value')} as {scalar.type}"


def _conversion(source: pa.DataType, target: pa.DataType) -> Convert | None:
    """How to get from one type to the other; None where values of one are not values of the other."""
    if _is.is_nested(target):
        return nested_conversion(source, target, _child)
    if _is.is_fixed_size_binary(target) and not _is.is_decimal(target):
        if target.byte_width == UUID_BYTES and is_text(source):
            return _uuids
        return _fixed if _is_bytes(source) else None
    if _is.is_floating(target) and _is.is_floating(source):
        return _narrow if source.bit_width > target.bit_width else _cast
    if _is.is_timestamp(target):
        return _cast if _is.is_timestamp(source) and (source.tz is None) == (target.tz is None) else None
    ways = next((ways for test, ways in _WAYS if test(target)), ())
    return next((way for test, way in ways if test(source)), None)


def _child(source: pa.Field, target: pa.Field) -> Callable[[pa.Array], pa.Array] | None:
    """How to convert what is within a nested value."""
    kind = plain_column(pa.chunked_array([], source.type)).type
    same = _is.is_null(kind) or (kind == target.type and not _is.is_nested(kind))
    convert = None if same else _conversion(kind, target.type)
    if not same and convert is None:
        return None

    def converted(array: pa.Array) -> pa.Array:
        found = plain_column(pa.chunked_array([array]))
        if _is.is_null(kind):
            return pa.nulls(len(array), target.type)
        plain = found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()
        plain = plain if convert is None else convert(plain, target.type)
        if unreadable(pa.chunked_array([plain])) is not None:
            raise pa.ArrowInvalid(UNREADABLE)
        return plain

    return converted


def is_text(kind: pa.DataType) -> bool:
    """Whether it is text, in any layout."""
    return bool(_is.is_string(kind) or _is.is_large_string(kind) or _is.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    fixed = _is.is_fixed_size_binary(kind) and not _is.is_decimal(kind)
    return bool(fixed or _is.is_binary(kind) or _is.is_large_binary(kind) or _is.is_binary_view(kind))


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    return array.cast(target, safe=True)


def _fixed(array: pa.Array, target: pa.DataType) -> pa.Array:
    # A cast between fixed-size types does not exist, and one from variable length refuses other lengths.
    return array.cast(pa.large_binary()).cast(target, safe=True)


def _uuids(array: pa.Array, target: pa.DataType) -> pa.Array:
    return pa.array([None if text is None else uuid_bytes(text) for text in array.to_pylist()], target)


def uuid_bytes(text: str) -> bytes:
    """The 16 bytes of the usual text of a UUID, in either case. Raises pa.ArrowInvalid for any other text."""
    if _UUID.fullmatch(text) is None:
        raise pa.ArrowInvalid("it is no UUID, as in 018f4e7a-5b1c-7d3e-9a60-2f4c8b7d1e05")
    return bytes.fromhex(text.replace("-", ""))


def fixed_of_json(text: str) -> bytes:
    """16 bytes of their text in JSON: the usual text of a UUID, or base64. Raises ValueError, as pa.ArrowInvalid is."""
    return uuid_bytes(text) if len(text) == _UUID_TEXT else base64.b64decode(text, validate=True)


UUID_BYTES, _UUID_TEXT = 16, 36
_UUID = re.compile("-".join(f"[0-9a-fA-F]{{{count}}}" for count in (8, 4, 4, 4, 12)))


def _whole(array: pa.Array, target: pa.DataType) -> pa.Array:
    # Beyond its 53 (24, 11) bits a float is always whole, because it was rounded: that id is no longer an id.
    exact = {16: 1 << 11, 32: 1 << 24, 64: 1 << 53}[array.type.bit_width]
    wide = array.cast(pa.float64())
    if pc.any(pc.greater(pc.abs(wide), float(exact))).as_py():
        raise pa.ArrowInvalid("beyond what a float tells apart")
    return wide.cast(target, safe=True)


def _narrow(array: pa.Array, target: pa.DataType) -> pa.Array:
    narrow = array.cast(target, safe=False)
    same = pc.or_(pc.equal(narrow.cast(array.type), array), pc.is_nan(array))
    return _only_if(same, narrow)


def _rescale(array: pa.Array, target: pa.DataType) -> pa.Array:
    # In two steps: Arrow refuses to cast integers to a decimal that could not hold the largest of them.
    return array.cast(pa.decimal128(20, 0)).cast(target, safe=True)


def _midnight(array: pa.Array, target: pa.DataType) -> pa.Array:
    days = array.cast(target, safe=False)
    return _only_if(pc.equal(days.cast(array.type), array), days)


def _only_if(same: pa.Array, converted: pa.Array) -> pa.Array:
    if pc.all(same).as_py() is False:
        raise pa.ArrowInvalid("loses information")
    return converted


Test = Callable[[pa.DataType], bool]
_WAYS: tuple[tuple[Test, tuple[tuple[Test, Convert], ...]], ...] = (
    (_is.is_string, ((is_text, _cast),)),
    (_is.is_binary, ((_is_bytes, _cast),)),
    (_is.is_integer, ((_is.is_floating, _whole), (_is.is_integer, _cast), (_is.is_decimal, _cast))),
    (_is.is_floating, ((_is.is_integer, _cast),)),
    (_is.is_decimal, ((_is.is_integer, _rescale), (_is.is_decimal, _cast))),
    (_is.is_date32, ((lambda kind: _is.is_timestamp(kind) and kind.tz is None, _midnight), (_is.is_date64, _cast))),
    (_is.is_time64, ((_is.is_time, _cast),)),
    (_is.is_duration, ((_is.is_duration, _cast),)),
)
"""By the type that is wanted, from which others it is made, and how."""
