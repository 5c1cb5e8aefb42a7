"""What users pass as updates, taken apart into lists of rows, Arrow tables and pandas frames; in bounded memory.

Neither pandas nor polars is imported: a caller with a frame has imported pandas, and polars (like anything else that
speaks Arrow's C stream) is read as a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from persist_lib.arguments import is_of
from persist_lib.convert.casting import wrong_type
from persist_lib.convert.codecs import Update, is_row
from persist_lib.convert.rows import build_column
from persist_lib.convert.times import read_values
from persist_lib.errors import InvalidUsage
from persist_lib.schema.empty import empty_table
from persist_lib.schema.models import is_instance
from persist_lib.schema.schema import TIME
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
    if isinstance(data, (pa.Table, pa.RecordBatch)) or _is_pandas(data):
        yield data
    elif hasattr(data, "__arrow_c_stream__"):
        yield from _batches(data)
    elif hasattr(data, "__arrow_c_array__"):
        yield _batch(data)
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
        reader = pa.RecordBatchReader.from_stream(data)
        batch = next(reader, None)
        yield empty_table(reader.schema) if batch is None else batch
        yield from reader
    except pa.ArrowInvalid as error:
        raise _no_structs(data, error) from error


def _batch(data: Any) -> pa.RecordBatch:
    try:
        return pa.record_batch(data)
    except pa.ArrowInvalid as error:
        raise _no_structs(data, error) from error


def _no_structs(data: object, error: Exception) -> InvalidUsage:
    return InvalidUsage(
        f"a {type(data).__qualname__} must consist of structs (none null) with a field for each column: {error}",
        problem="updates", value=data,
    )  # fmt: skip


def _is_pandas(data: object) -> bool:
    return is_of(data, "pandas", "DataFrame")


def from_pandas(wanted: pa.Schema, frame: Any, first_row: int, times: Times | None = None) -> pa.Table:
    """The frame's columns, those in `wanted` of a type that can become theirs; what pandas calls missing is null.

    `times` reads the column of times, where they are a clock.
    """
    arrays, names = [], []
    for index, name in enumerate(frame.columns):
        # SUBTLE: a column may be called 1, or like another one. Both are for the caller to refuse, by name.
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
        return build_column(given if times is None else read_values(given, times, first_row), field, first_row)
    try:
        return pa.array(series, from_pandas=not keeps_nan)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise wrong_type(field, f"pandas {series.dtype}", first_row, series.iloc[0] if len(series) else None) from error
