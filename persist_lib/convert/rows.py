"""Python values as Arrow columns of a schema's types, losslessly or not at all; what dicts and object columns hold.

Arrow alone would cut a datetime down to a date, drop its zone, round to float32 and read text as bytes. So each column
type names the Python types it takes; numpy's and pandas' scalars, subclasses and buffers become those first.

Neither pandas nor polars is imported: a caller with a frame has imported pandas, and polars (like anything else that
speaks Arrow's C stream) is read as a stream.
"""

from __future__ import annotations

import datetime as dt
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.arguments import is_of
from persist_lib.convert.casts import UUID_BYTES, cast_column, lossy, uuid_bytes, wrong_type
from persist_lib.convert.codecs import Update, is_row
from persist_lib.convert.json_columns import REFUSED, Text, document, near_document, no_json
from persist_lib.convert.nested import build_nested, near_nested, python_types
from persist_lib.convert.times import read_values
from persist_lib.errors import InvalidUsage
from persist_lib.schema.empty import empty_table
from persist_lib.schema.models import is_instance
from persist_lib.schema.schema import TIME
from persist_lib.schema.types import is_json
from persist_lib.times import Times

ROWS = 65_536
"""Python rows that become one table: the memory that an endless iterator of rows takes."""
DEEPEST = 16
"""How deep iterables of updates may be nested."""


def pieces(data: object) -> Iterator[Any]:
    """Lists of at most ROWS rows, Arrow tables and batches, and pandas frames, in order."""
    if type(data) is list and len(data) <= ROWS and set(map(type, data)) == {dict}:  # what small appends are
        yield data
        return
    rows: list[Any] = []
    for item in _items(data):
        if is_row(item):
            rows.append(item)
            if len(rows) < ROWS:
                continue
        if rows:
            yield rows
            rows = []
        if not is_row(item):
            yield item
    if rows:
        yield rows


def _items(data: Any, depth: int = 0) -> Iterator[Any]:
    """The rows, and the things with columns, that `data` is made of."""
    if isinstance(data, (pa.Table, pa.RecordBatch)) or is_of(data, "pandas", "DataFrame"):
        yield data
    elif hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
        yield from _batches(data)
    elif isinstance(data, (str, bytes, Mapping, Update)) or is_instance(data) or not isinstance(data, Iterable):
        raise _no_updates(data)
    elif depth == DEEPEST:
        raise InvalidUsage(f"updates are nested more than {DEEPEST} deep; pass one list of them", problem="updates")
    else:
        for item in _iterate(data):
            if is_row(item):
                yield item
            else:
                yield from _items(item, depth + 1)


def _iterate(data: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(data)
    except TypeError as error:  # an array of numpy's without dimensions says that it can
        raise _no_updates(data) from error


def _no_updates(data: object) -> InvalidUsage:
    hint = "Put a single row into a list" if is_row(data) else "Collect a lazy frame first"
    kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
    return InvalidUsage(
        f"updates are an Arrow table, batch or stream, a pandas or polars frame, rows, or an iterable of these; got "
        f"{kind}. {hint}",
        problem="updates", value=data,
    )  # fmt: skip


def _batches(data: Any) -> Iterator[pa.Table | pa.RecordBatch]:
    """The batches of a stream; an empty table where it has none, so that its columns are checked all the same."""
    try:
        if not hasattr(data, "__arrow_c_stream__"):
            yield pa.record_batch(data)
            return
        reader = pa.RecordBatchReader.from_stream(data)
        batch = next(reader, None)
        yield empty_table(reader.schema) if batch is None else batch
        yield from reader
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"a {type(data).__qualname__} must consist of structs (none null) with a field for each column: {error}",
            problem="updates", value=data,
        ) from error  # fmt: skip


def from_pandas(wanted: pa.Schema, frame: Any, first_row: int, times: Times | None = None) -> pa.Table:
    """The frame's columns, those in `wanted` of a type that can become theirs; what pandas calls missing is null.

    `times` reads the column of times, where they are a clock.
    """
    arrays, names = [], []
    for index, name in enumerate(frame.columns):
        # A column may be called 1, or like another one. Both are for the caller to refuse, by name.
        field = wanted.field(name) if isinstance(name, str) and name in wanted.names else None
        arrays.append(_from_series(frame.iloc[:, index], field, first_row, times if name == TIME else None))
        names.append(name if isinstance(name, str) else repr(name))
    return pa.Table.from_arrays(arrays, names=names)


def _has_mixed_categories(series: Any) -> bool:
    """Whether these are categories that Arrow has no one type for; those that are in use may still have one."""
    return str(series.dtype) == "category" and series.cat.categories.inferred_type.startswith("mixed")


def _from_series(
    series: Any, field: pa.Field | None, first_row: int, times: Times | None
) -> pa.Array | pa.ChunkedArray:
    if field is None:  # about to be refused as an extra column
        return pa.nulls(len(series))
    keeps_nan = pa.types.is_floating(field.type) and not field.nullable
    if series.dtype == object or _has_mixed_categories(series):
        values = series.tolist()
        try:
            missing = [False] * len(values) if keeps_nan else series.isna().tolist()
        except ArithmeticError:  # a signalling NaN compares with nothing: it is for the column to refuse
            missing = [False] * len(values)
        given = [None if gone else value for value, gone in zip(values, missing, strict=True)]
        if is_json(field):  # as in all columns, text is that of a document
            given = [Text(value) if type(value) is str else value for value in given]
        return build_column(given if times is None else read_values(given, times, first_row), field, first_row)
    try:
        return pa.array(series, from_pandas=not keeps_nan)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise wrong_type(field, f"pandas {series.dtype}", first_row, series.iloc[0] if len(series) else None) from error


Values = Sequence[Any]
_is = pa.types
_NONE = type(None)
FEW = 16
_EXACT = 1 << 53
_EPOCH = {True: dt.datetime(1970, 1, 1, tzinfo=dt.UTC), False: dt.datetime(1970, 1, 1)}  # noqa: DTZ001 - naive on purpose
_MICROSECOND = dt.timedelta(microseconds=1)
_TICKS = (np.datetime64, np.timedelta64)


class _Nanoseconds(NamedTuple):
    """A time or duration finer than Python's: numpy's and pandas' are in nanoseconds."""

    nanoseconds: int
    has_zone: bool


class _Zone(ValueError):
    """A time with a zone where there must be none, or without one where there must be. Its text says what was found."""


class Taking(NamedTuple):
    """What a column type takes: Python types, how to make an array of their values, and how to bring others nearer."""

    types: frozenset[type]
    build: Callable[[Values], pa.Array]
    near: Callable[[Any], Any] | None = None


def build_column(values: Values, field: pa.Field, first_row: int = 0, taking: Taking | None = None) -> pa.Array:
    """An array of `field.type`; SchemaMismatch for another kind of value, InvalidUsage for one that does not fit.

    `taking` is `taking_of(field)`, for callers that have it at hand: looking it up costs more than a small column.
    """
    taking, given = taking or taking_of(field), values
    if not set(map(type, values)) <= taking.types:
        values = [_native(value, taking) for value in values]
        if not set(map(type, values)) <= taking.types:
            row = next(row for row, value in enumerate(values) if type(value) not in taking.types)
            raise _misfit(values[row], given[row], taking, field, first_row + row)
    try:
        return taking.build(values)
    except _REFUSALS as error:
        raise _first_failing(values, given, taking, field, first_row) from error


_REFUSALS = (pa.ArrowException, InvalidUsage, OverflowError, *REFUSED)


def _misfit(value: object, given: object, taking: Taking, field: pa.Field, row: int) -> InvalidUsage:
    if type(value) is float and taking.near is _near_int:
        return lossy(field, row, given)
    return wrong_type(field, type(given).__name__, row, given)


def _first_failing(values: Values, given: Values, taking: Taking, field: pa.Field, first_row: int) -> InvalidUsage:
    for row, value in enumerate(values):
        try:
            taking.build([value])
        except _Zone as error:
            return wrong_type(field, str(error), first_row + row, given[row])
        except _REFUSALS as error:
            if taking is _DOCUMENTS:
                return no_json(field.name, first_row + row, given[row], error)
            return lossy(field, first_row + row, given[row], str(error) * _is.is_nested(field.type))
    return lossy(field, first_row, given, "together")


def taking_of(field: pa.Field) -> Taking:
    """What a column takes."""
    return _DOCUMENTS if is_json(field) else _taking_of(field.type)


@lru_cache(maxsize=1024)
def _taking_of(kind: pa.DataType) -> Taking:
    if _is.is_nested(kind):
        return Taking(_with_none(*python_types(kind)), build_nested(kind, build_column), near_nested(kind))
    if _is.is_timestamp(kind):
        return Taking(_with_none(dt.datetime, _Nanoseconds), lambda values: _timestamps(values, kind), _near_datetime)
    if _is.is_duration(kind):
        return Taking(_with_none(dt.timedelta, _Nanoseconds), lambda values: _durations(values, kind), _near_timedelta)
    if _is.is_float32(kind):
        return Taking(_with_none(float, int), lambda values: _cast(pa.array(values, pa.float64()), kind))
    if _is.is_decimal(kind):
        return Taking(_with_none(Decimal, int), lambda values: _decimals(values, kind))
    if _is.is_time64(kind):
        return Taking(_with_none(dt.time), lambda values: _times(values, kind))
    if _is.is_date32(kind):
        return Taking(_with_none(dt.date), lambda values: pa.array(values, kind), _near_date)
    if _is.is_integer(kind):
        return Taking(_with_none(int), _integers(kind), _near_int)
    if _is.is_string(kind):
        return Taking(_with_none(str), _byte_strings(kind, str.encode))
    if _is.is_binary(kind):
        return Taking(_with_none(bytes), _byte_strings(kind, bytes))
    types = (bool,) if _is.is_boolean(kind) else (float, int) if _is.is_floating(kind) else (bytes,)
    near = _near_uuid if kind == pa.binary(UUID_BYTES) else None
    return Taking(_with_none(*types), lambda values: pa.array(values, kind), near)


def _with_none(*types: type) -> frozenset[type]:
    return frozenset((_NONE, *types))


_DOCUMENTS = Taking(
    _with_none(dict, list, str, int, float, bool, Text),
    lambda values: pa.array([None if value is None else document(value) for value in values], pa.string()),
    near_document,
)


def _native(value: Any, taking: Taking) -> Any:
    """The value as one of the plain Python types, if it is one in disguise; as it is otherwise."""
    if type(value) in taking.types:
        return value
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas' missing values, without importing it
        return None
    value = _undisguised(value)
    return value if taking.near is None or type(value) in taking.types else taking.near(value)


def _undisguised(value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.floating) and value.itemsize <= 8:
        return float(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, *_TICKS)):  # IntEnum and the like
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return value.as_py() if isinstance(value, pa.Scalar) else value


def _near_uuid(value: Any) -> Any:
    if (type(value).__module__, type(value).__name__) == ("uuid", "UUID"):
        return value.bytes
    try:
        return uuid_bytes(value) if type(value) is str else value
    except pa.ArrowInvalid:
        return value


def _near_int(value: Any) -> Any:
    is_whole = type(value) is float and value.is_integer() and abs(value) <= _EXACT
    return int(value) if is_whole else value


def _near_date(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        day = value.astype("datetime64[D]")
        return day.item() if day == value or np.isnat(value) else value
    if isinstance(value, dt.datetime) and value.tzinfo is None and value == dt.datetime.combine(value, dt.time()):
        return value.date()
    return value


def _near_datetime(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        return _near_tick(value, "datetime64")
    if not isinstance(value, dt.datetime):
        return value
    if getattr(value, "nanosecond", 0):
        return _Nanoseconds(value.to_datetime64().astype(np.int64).item(), value.tzinfo is not None)  # type: ignore[attr-defined]
    return dt.datetime.combine(value.date(), value.timetz())


def _near_timedelta(value: Any) -> Any:
    if isinstance(value, np.timedelta64):
        return _near_tick(value, "timedelta64")
    if not isinstance(value, dt.timedelta):
        return value
    if getattr(value, "nanoseconds", 0):
        return _Nanoseconds(value.to_timedelta64().astype(np.int64).item(), False)  # type: ignore[attr-defined]
    return dt.timedelta(days=value.days, seconds=value.seconds, microseconds=value.microseconds)


def _near_tick(value: Any, kind: str) -> Any:
    """A numpy time as Python's where that is exact, else in nanoseconds, else as it is."""
    if np.isnat(value):
        return None
    for unit in ("us", "ns"):
        tick = value.astype(f"{kind}[{unit}]")
        if tick == value and tick.astype(value.dtype) == value:
            return tick.item() if unit == "us" else _Nanoseconds(tick.astype(np.int64).item(), False)
    return value


def _integers(kind: pa.DataType) -> Callable[[Values], pa.Array]:
    """A few are handed over as they lie in memory: `pa.array` spends three times as long, and appends are often few.

    The first `pa.array` of a process even imports pandas, where it is installed, which takes a second.
    """
    code = "bhiq"[kind.bit_width.bit_length() - 4]
    code = code if _is.is_signed_integer(kind) else code.upper()

    def build(values: Values) -> pa.Array:
        if len(values) > FEW or None in values:
            return pa.array(values, kind)
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(array(code, values))])

    return build


def _byte_strings(kind: pa.DataType, encode: Callable[[Any], bytes]) -> Callable[[Values], pa.Array]:
    """The same for text and bytes: offsets, and the bytes themselves."""

    def build(values: Values) -> pa.Array:
        if len(values) > FEW or None in values:
            return pa.array(values, kind)
        encoded = [encode(value) for value in values]
        offsets = array("i", accumulate(map(len, encoded), initial=0))
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
        return pa.Array.from_buffers(kind, len(values), buffers)

    return build


def _timestamps(values: Values, kind: pa.DataType) -> pa.Array:
    has_zone = kind.tz is not None
    if any(value is not None and _has_zone(value) != has_zone for value in values):
        raise _Zone("datetime without a zone" if has_zone else "datetime with a zone")
    coarse, fine = pa.timestamp("us", tz=kind.tz and "UTC"), pa.timestamp("ns", tz=kind.tz)
    return _cast(_finest(values, _EPOCH[has_zone], coarse, fine), kind)


def _has_zone(value: dt.datetime | _Nanoseconds) -> bool:
    return value.has_zone if isinstance(value, _Nanoseconds) else value.utcoffset() is not None


def _durations(values: Values, kind: pa.DataType) -> pa.Array:
    return _cast(_finest(values, dt.timedelta(0), pa.duration("us"), pa.duration("ns")), kind)


def _finest(values: Values, zero: Any, coarse: pa.DataType, fine: pa.DataType) -> pa.Array:
    """The values in microseconds, or all in nanoseconds where one is."""
    if not any(type(value) is _Nanoseconds for value in values):
        return pa.array(values, coarse)

    def ticks(value: Any) -> int | None:
        if value is None or isinstance(value, _Nanoseconds):
            return None if value is None else value.nanoseconds
        return int((value - zero) // _MICROSECOND) * 1000

    return pa.array([ticks(value) for value in values], pa.int64()).cast(fine)


def _times(values: Values, kind: pa.DataType) -> pa.Array:
    if any(value is not None and value.tzinfo is not None for value in values):
        raise _Zone("time with a zone")
    return pa.array(values, kind)


def _decimals(values: Values, kind: pa.DataType) -> pa.Array:
    return pa.array([Decimal(value) if type(value) is int else value for value in values], kind)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """As `kind`, exactly; the error is found again value by value."""
    return cast_column(pa.chunked_array([array]), pa.field("", kind)).chunk(0)
