"""The border of calls by key: what a user passes as keys, or as rows without times, becomes Arrow tables.

Keys are the key columns alone: an Arrow table or batch, a pandas or polars frame, dicts, or instances of the key's
model; or values, as a list, an Arrow or numpy array or a series, where the key is one column, and tuples of values
where it is several; or an iterable of these. Types are checked and converted as those of updates are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.arguments import is_of, native, shown
from persist_lib.convert.codecs import as_mappings
from persist_lib.convert.filling import Filling
from persist_lib.convert.json_columns import canonical_column, exact_json
from persist_lib.convert.rows import FEW, pieces
from persist_lib.convert.updates import iter_updates, null_refused
from persist_lib.errors import InvalidUsage
from persist_lib.schema.empty import empty_table
from persist_lib.schema.json_text import canonical, text_of
from persist_lib.schema.models import is_instance, values_of
from persist_lib.schema.schema import DIFF, RESERVED, TIME, Schema

ROWS = 65_536
GIVEN = "\0"
"""What the name of a column begins with that says which rows have another column. No column of a schema has it."""


def parse_keys(schema: Schema, keys: object) -> pa.Table:
    """The key columns of all these keys, in their order, with the schema's types. Raises InvalidUsage."""
    only = Schema(schema.key)
    arranged = keys if _has_columns(keys) else _key_rows(schema, keys)
    tables = list(iter_updates(only, arranged, time=0))
    for table in tables:
        _check_ones(table, "keys", (DIFF, 1), (TIME, 0))
    found = _joined(only.data, tables)
    if schema.codec != "json":
        return found
    name = schema.key_names[0]
    return pa.table([canonical_column(found.column(name), name, 0, canonical)], schema=found.schema)


def parse_deletes(schema: Schema, deletes: Any) -> pa.Table:
    """Keys, or rows with a key and value columns: as `parse_keys` or, where they have others, as `parse_partial`."""
    held = list(deletes) if isinstance(deletes, Iterator) else deletes
    parts = [held] if _has_columns(held) else held if isinstance(held, (list, tuple)) else []
    names = {name for part in parts for name in _names_in(part)}
    if schema.codec == "columns" and not names.isdisjoint(column.name for column in schema.value):
        return parse_partial(schema, held)
    return parse_keys(schema, held)


def _names_in(part: Any) -> Iterable[str]:
    if _has_columns(part):
        return _columns(part)
    if is_instance(part):
        return list(values_of(part))
    return list(part) if isinstance(part, Mapping) else []


def parse_rows(schema: Schema, rows: object, *, whole: bool = True, filling: Filling | None = None) -> pa.Table:
    """Rows of the schema's columns, in their order, each there once. `whole`, `filling` are as in `iter_updates`.

    Raises InvalidUsage.
    """
    tables = list(without_times(schema, rows, whole=whole, filling=filling))
    for table in tables:
        _check_ones(table, "rows", (DIFF, 1))
    return _joined(schema.data, tables)


def parse_partial(schema: Schema, rows: object, filling: Filling | None = None) -> pa.Table:
    """Rows of the key and of all or some of the value columns. Raises InvalidUsage.

    What a row lacks is null in it. For each column that some row lacks, a column of GIVEN and its name follows, which
    says of each row whether it has it: so a null that is given stays apart. A frame or table lacks what is not among
    its columns, a dict what is not among its names. JSON and bytes are whole, as they have one value column. A
    `filling` fills key columns alone.
    """
    if schema.codec != "columns":
        return parse_rows(schema, rows)
    held, first = list[Any](), 0
    for piece in pieces(rows):
        held.append(as_mappings(schema, piece, first) if isinstance(piece, list) else piece)
        first += len(piece)
    values = {column.name for column in schema.value if not column.is_dropped}
    absent = {name for piece in held for name in _absent(values, piece)}
    if not absent:
        return parse_rows(schema, held[0] if len(held) == 1 else held, filling=filling)
    loose = tuple(
        msgspec.structs.replace(column, nullable=column.nullable or column.name in absent) for column in schema.value
    )
    pieces_ = [_with_nulls(piece, absent) for piece in held]
    found = parse_rows(msgspec.structs.replace(schema, value=loose), pieces_, filling=filling)
    for field in schema.data:
        if field.name in absent:
            given = np.concatenate([_given(piece, field.name) for piece in held])
            if not field.nullable and (nulls := found.column(field.name).is_null().to_numpy() & given).any():
                raise null_refused(pa.array(np.zeros(len(nulls), np.int8), mask=nulls), field, 0)
            # Not by `pa.array`, which would import pandas.
            marks = pa.Array.from_buffers(pa.uint8(), len(given), [None, pa.py_buffer(given.view(np.uint8))])
            found = found.append_column(GIVEN + field.name, marks)
    return found


def _absent(names: set[str], piece: Any) -> set[str]:
    """Which of these names one row of a piece lacks, at least."""
    if isinstance(piece, list):
        return names.difference(*([] if not piece else [set.intersection(*map(set, piece))]))
    return names.difference(_columns(piece))


def _columns(piece: Any) -> list[str]:
    return list(piece.schema.names if isinstance(piece, (pa.Table, pa.RecordBatch)) else piece.columns)


def _given(piece: Any, name: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if isinstance(piece, list):
        return np.fromiter((name in row for row in piece), np.bool_, len(piece))
    return np.full(len(piece), name in _columns(piece), np.bool_)


def _with_nulls(piece: Any, names: set[str]) -> Any:
    if isinstance(piece, list):
        nulls = dict.fromkeys(names)
        return [{**nulls, **row} for row in piece]
    lacks = sorted(names.difference(_columns(piece)))
    if not isinstance(piece, (pa.Table, pa.RecordBatch)):
        return piece.assign(**dict.fromkeys(lacks))
    for name in lacks:
        piece = piece.append_column(name, pa.nulls(piece.num_rows))
    return piece


def without_times(
    schema: Schema, updates: object, *, whole: bool = True, filling: Filling | None = None
) -> Iterator[pa.Table]:
    """Updates whose time the caller does not choose, with time 0. Raises InvalidUsage for any other time."""
    try:
        for table in iter_updates(schema, updates, time=0, whole=whole, filling=filling):
            if _first_other(table, TIME, 0) is not None:
                raise _has_times()
            yield table
    except InvalidUsage as error:
        if error.fields.get("column") == TIME and error.fields.get("problem") == "value":
            raise _has_times() from error  # what is wrong with a time does not matter, as none is wanted
        raise


def _has_times() -> InvalidUsage:
    return InvalidUsage(
        f"column {TIME!r}: this call takes the next time itself. Leave the column out, or use compare_and_append, "
        "where the caller says the times",
        problem="time", column=TIME,
    )  # fmt: skip


def _joined(columns: pa.Schema, tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables([empty_table(columns), *(table.select(columns.names) for table in tables)])


def _check_ones(table: pa.Table, what: str, *wanted: tuple[str, int]) -> None:
    for name, only in wanted:
        if (row := _first_other(table, name, only)) is not None:
            raise InvalidUsage(
                f"{what} have no {TIME}, and no {DIFF} other than 1, as each is meant once and now; found {name} "
                f"{table.column(name)[row]} in row {row}. Leave out the columns {' and '.join(RESERVED)}",
                problem="diff", column=name, row=row,
            )  # fmt: skip


def _first_other(table: pa.Table, name: str, only: int) -> int | None:
    """The first row whose column has another value; None if there is none."""
    if table.num_rows <= FEW:  # Arrow's and numpy's own cost is larger than this
        return next((row for row, value in enumerate(table.column(name).to_pylist()) if value != only), None)
    # By DLPack, as `to_numpy` would import pandas. Neither column has nulls.
    chunks = [np.from_dlpack(chunk) for chunk in table.column(name).chunks]
    others = np.flatnonzero(np.concatenate(chunks) != only) if chunks else np.empty(0)
    return int(others[0]) if others.size else None


def _has_columns(keys: object) -> bool:
    """Whether these keys come with names of columns, and are no array of values. Snapshots are such keys."""
    if isinstance(keys, (pa.Table, pa.RecordBatch)) or is_of(keys, "pandas", "DataFrame"):
        return True
    return hasattr(keys, "__arrow_c_stream__") and (hasattr(keys, "columns") or not isinstance(keys, Iterable))


def _key_rows(schema: Schema, keys: Any) -> Any:
    """Values, tuples, dicts and instances as dicts of key columns, in lists of bounded length; arrays as tables.

    Tables among them stay tables, so that a reader of a file may pass one after the other.
    """
    if isinstance(keys, (str, bytes, Mapping)) or is_instance(keys) or not isinstance(keys, Iterable):
        raise _no_keys(schema, keys)
    if (column := _as_column(keys)) is not None and len(schema.key) == 1 and schema.codec != "json":
        return pa.table([column], names=schema.key_names)
    try:
        items = iter(keys)
    except TypeError as error:  # an array of numpy's without dimensions says that it can
        raise _no_keys(schema, keys) from error
    return _lists(schema, items)


def _lists(schema: Schema, items: Iterator[Any]) -> Iterator[Any]:
    rows: list[dict[str, object]] = []
    for index, item in enumerate(items):
        is_table = _has_columns(item)
        if not is_table:
            rows.append(_as_key(schema, item, index))
        if rows and (is_table or len(rows) == ROWS):
            yield rows
            rows = []
        if is_table:
            yield item
    if rows:
        yield rows


def _as_column(keys: Any) -> pa.Array | pa.ChunkedArray | None:
    """An array of values as Arrow has it; None for anything else, and for structs."""
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        return None if pa.types.is_struct(keys.type) else keys
    is_series = is_of(keys, "pandas", "Series", "Index") and keys.dtype != object
    try:
        if is_series or (isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "biufMmSU"):
            return pa.array(keys, from_pandas=is_series)
        if hasattr(keys, "__arrow_c_stream__"):
            column = pa.chunked_array(keys)
            return None if pa.types.is_struct(column.type) else column
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidUsage(f"these keys are no column of values: {error}", problem="keys", value=keys) from error
    return None


def _as_key(schema: Schema, item: Any, index: int) -> dict[str, object]:
    names = schema.key_names
    if is_instance(item):
        found: dict[str, object] = values_of(item)
    elif isinstance(item, Mapping) and (schema.codec != "json" or list(item) == names):
        found = dict(item)
    elif isinstance(item, pa.Scalar):
        found = item.as_py() if isinstance(item, pa.StructScalar) else {names[0]: item.as_py()}
    elif isinstance(item, tuple) and (len(names) > 1 or len(item) == 1):
        if len(item) != len(names):
            raise _wrong_length(schema, item, index)
        found = dict(zip(names, item, strict=True))
    elif len(names) > 1:
        raise _wrong_length(schema, item, index)
    else:
        found = {names[0]: native(item)}
    if schema.codec == "json":
        return {name: exact_json(text_of, value, name, index, "key") for name, value in found.items()}
    return found


def _wrong_length(schema: Schema, item: object, index: int) -> InvalidUsage:
    return InvalidUsage(
        f"key {index} must be a tuple of {len(schema.key)} values or a dict, for the columns {schema.key_names}: got "
        f"{shown(item)}",
        problem="key", row=index, value=item,
    )  # fmt: skip


def _no_keys(schema: Schema, keys: object) -> InvalidUsage:
    example = "[1, 2]" if len(schema.key) == 1 else f"[({', '.join(['...'] * len(schema.key))})]"
    return InvalidUsage(
        f"keys are a table or frame of the key columns {schema.key_names}, or a list of dicts, values or tuples, as in "
        f"{example}: got {shown(keys)}. Put a single key into a list",
        problem="keys", value=keys,
    )  # fmt: skip
