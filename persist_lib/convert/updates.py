"""The border: what a user passes becomes Arrow tables with exactly `schema.updates`, or a typed error says why not.

Everything behind the border trusts names, order, types and nullability of columns, and that no diff is zero or null.
Values are converted losslessly or refused (`casting`, `rows`). Errors carry `problem`, and where they apply `column`,
`row` (counted over the whole input, from 0), `value` and `expected`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import did_you_mean, shown
from persist_lib.convert.casts import cast_column
from persist_lib.convert.codecs import Update, as_mappings, decode_rows
from persist_lib.convert.filling import Filling, check_added
from persist_lib.convert.json_columns import Text, canonical_column
from persist_lib.convert.rows import Taking, build_column, from_pandas, pieces, taking_of
from persist_lib.convert.times import read_column, read_values
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.frontier import MAX_TIME, Antichain
from persist_lib.schema.json_text import canonical
from persist_lib.schema.schema import DIFF, TIME, Column, Schema
from persist_lib.schema.types import JSON
from persist_lib.schema.widening import default_of
from persist_lib.times import PLAIN, Times

__all__ = ["Update", "check_times", "decode_rows", "iter_updates"]


def iter_updates(
    schema: Schema, data: object, *, time: object = None, times: Times | None = None, whole: bool = True,
    filling: Filling | None = None,
) -> Iterator[pa.Table]:  # fmt: skip
    """Tables with exactly `schema.updates`, in the order of `data`; none for no updates. Errors come as it is consumed.

    `data` is an Arrow table, batch or stream (also polars frames and struct series, and whatever else speaks Arrow's C
    stream), a pandas frame, a list of rows, or any iterable of these; a row is a dict, a pydantic instance, or
    `((key, value), time, diff)`. Columns come in any order, and no others. All of them that have no default, if
    `whole`; else value columns that may be null may be left out, and are null then, as in rows of programs that do not
    know a new column. Columns that a writer fills may be left out where there is a `filling`, and are refused else.

    Where `_diff` is missing it is +1; where `_time` is missing it is `time`, or else it is refused.
    In a pandas frame a missing value is null: None, NA, NaT, and NaN too, except that a float column that is not null
    keeps NaN as the number it is. Everywhere else NaN is a value. A pandas index is ignored.

    Where the schema's times are a clock, `_time` may hold what `convert.times` reads. `times` has the call's now.
    """
    times = times or Times(schema.times, _no_clock)
    stamps = {} if time is None else {TIME: times.parse(time, "time")}
    return _iter(schema, data, {DIFF: 1, **stamps, **_absent(schema, whole)}, times, filling)


def _no_clock() -> int:
    raise InvalidUsage("there is no clock here by which a time could be relative to now; pass the time itself")


def check_times(table: pa.Table, lower: Antichain, upper: Antichain, times: Times = PLAIN) -> None:
    """Raise InvalidUsage unless all times are in `[lower, upper)`. Fields: least, most, lower, upper, row, value."""
    column = table.column(TIME)
    if not len(column):
        return
    least, most = _range(column)
    if lower.is_before(least) and upper.has_passed(most):
        return
    low = 0 if lower.time is None else lower.time
    high = low if lower.is_top() else (MAX_TIME + 1 if upper.time is None else upper.time)
    row, time = next((row, time) for row, time in enumerate(column.to_pylist()) if not low <= time < high)
    show = times.show
    bounds = f"[{show(lower.time)}, {show(upper.time)})"
    raise InvalidUsage(
        f"times must be in [lower, upper) = {bounds}; found {show(least)} to {show(most)}, first outside is "
        f"{show(time)} in row {row}. Append what is at later times later; what is before lower is complete and cannot "
        "change",
        problem="time bounds", least=least, most=most, lower=lower, upper=upper, row=row, value=time,
    )  # fmt: skip


def _range(times: pa.ChunkedArray) -> tuple[int, int]:
    if len(times) <= 64:  # most appends; Arrow's and numpy's own cost is larger than this
        few = times.to_pylist()
        return min(few), max(few)
    found = pc.min_max(times).as_py()
    return found["min"], found["max"]


@lru_cache(maxsize=256)
def _absent(schema: Schema, whole: bool) -> dict[str, Any]:
    """The columns that a row need not have, and what they are in it then."""
    return {
        column.name: None if column.default is None else _said(column, column.default)
        for column in schema.value
        if not column.fill and (column.is_dropped or column.default is not None or (column.nullable and not whole))
    }


def _said(column: Column, default: str) -> Any:
    """A default as a row would say it."""
    return Text(default) if column.type == JSON else default_of(column.type, default).as_py()


def _iter(
    schema: Schema, data: object, defaults: dict[str, Any], times: Times, filling: Filling | None
) -> Iterator[pa.Table]:
    fill = _Fill(filling, schema.fills) if filling is not None and schema.fills else None
    defaults = defaults if fill is None else {**defaults, **dict.fromkeys(schema.fills)}
    reader = times if schema.times is not None else None
    first_row = 0
    for piece in pieces(data):
        if isinstance(piece, list):
            table = _from_rows(schema, piece, defaults, first_row, reader, fill)
        elif isinstance(piece, (pa.Table, pa.RecordBatch)):
            table = _from_columns(schema, piece, defaults, first_row, reader, fill)
        else:
            frame = from_pandas(schema.updates, piece, first_row, reader)
            table = _from_columns(schema, frame, defaults, first_row, reader, fill)
        if table.num_rows:
            yield table
        first_row += table.num_rows


class _Fill(NamedTuple):
    filling: Filling
    columns: Mapping[str, Column]

    def rows(self, arrays: list[Any], schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
        for name, column in self.columns.items():
            missing = np.fromiter((name not in row for row in rows), np.bool_, len(rows))
            if missing.any():
                self._into(arrays, schema.get_field_index(name), column, missing)

    def whole(self, arrays: list[Any], schema: pa.Schema, found: Sequence[str]) -> None:
        for name, column in self.columns.items():
            if name not in found and len(arrays[-1]):
                self._into(arrays, schema.get_field_index(name), column, np.ones(len(arrays[-1]), np.bool_))

    def _into(self, arrays: list[Any], place: int, column: Column, missing: npt.NDArray[np.bool_]) -> None:
        chunks = arrays[-1].chunks if isinstance(arrays[-1], pa.ChunkedArray) else [arrays[-1]]
        check_added(column.name, missing, np.concatenate([np.from_dlpack(chunk) for chunk in chunks]))
        arrays[place] = self.filling.into(column, arrays[place], missing)


@lru_cache(maxsize=256)
def _plan(schema: Schema) -> tuple[frozenset[str], tuple[tuple[str, pa.Field, Taking, bool], ...]]:
    """What building columns from rows needs of a schema: looking it up in Arrow takes longer than an append may."""
    columns = tuple((field.name, field, taking_of(field), field.nullable) for field in schema.updates)
    return frozenset(name for name, *_ in columns), columns


def _from_rows(
    schema: Schema, rows: list[Any], defaults: dict[str, Any], first_row: int, reader: Times | None, fill: _Fill | None
) -> pa.Table:
    mappings = as_mappings(schema, rows, first_row)
    names, columns = _plan(schema)
    _check_row_names(schema, names, mappings, first_row)
    arrays = []
    for name, field, taking, nullable in columns:
        values = _values(schema, mappings, name, defaults, first_row)
        if reader is not None and name == TIME:
            values = read_values(values, reader, first_row)
        array = build_column(values, field, first_row, taking)
        arrays.append(array)
        if not nullable and array.null_count and (fill is None or name not in fill.columns):
            raise null_refused(array, field, first_row)
    if 0 in values:
        raise _zero(array, first_row)
    if fill is not None:
        fill.rows(arrays, schema.updates, mappings)
        _check_filled(fill, arrays, schema.updates, first_row)
    # Half the cost of Table.from_arrays, for reasons of Arrow's.
    return pa.Table.from_batches([pa.RecordBatch.from_arrays(arrays, schema=schema.updates)])


def _check_filled(fill: _Fill, arrays: list[Any], fields: pa.Schema, first_row: int) -> None:
    """Refuse nulls that rows say in columns that are filled, and not null."""
    for name in fill.columns:
        if not fields.field(name).nullable and (array := arrays[fields.get_field_index(name)]).null_count:
            raise null_refused(array, fields.field(name), first_row)


def _values(
    schema: Schema, rows: Sequence[Mapping[str, Any]], name: str, defaults: dict[str, Any], first_row: int
) -> list[Any]:
    if (default := defaults.get(name)) is not None:
        return [row.get(name, default) for row in rows]
    try:
        return [row[name] for row in rows]
    except KeyError as error:
        if name in defaults:
            return [row.get(name) for row in rows]
        index = next(index for index, row in enumerate(rows) if name not in row)
        raise _missing(schema, name, list(rows[index]), first_row + index) from error


def _check_row_names(schema: Schema, known: frozenset[str], rows: Sequence[Mapping[str, Any]], first_row: int) -> None:
    """Refuse columns that the schema does not have. Missing ones are found where they are read."""
    for index, row in enumerate(rows):
        if not row.keys() <= known:
            raise _extra(schema, [name for name in row if name not in known], first_row + index)


def _from_columns(
    schema: Schema,
    rows: pa.Table | pa.RecordBatch,
    defaults: dict[str, Any],
    first_row: int,
    reader: Times | None,
    fill: _Fill | None,
) -> pa.Table:
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    _check_names(schema, table.column_names, defaults)
    columns = []
    for field in schema.updates:
        if field.name in table.column_names:
            column = table.column(field.name)
            if reader is not None and field.name == TIME:
                column = read_column(column, reader, first_row)
            column = _checked(column, field, first_row)
        else:
            column = _repeat(defaults[field.name], field, table.num_rows)
        if schema.codec == "json" and field.name in schema.names:
            column = canonical_column(column, field.name, first_row, canonical)
        columns.append(column)
    # Not by `pc.equal` with 0, for which Arrow imports pandas: that takes longer than many appends.
    if pc.all(columns[-1].cast(pa.bool_())).as_py() is False:
        raise _zero(columns[-1], first_row)
    if fill is not None:
        fill.whole(columns, schema.updates, table.column_names)
    return pa.Table.from_arrays(columns, schema=schema.updates)


def _checked(column: pa.ChunkedArray, field: pa.Field, first_row: int) -> pa.ChunkedArray:
    """The column as the schema has it, and valid: text that is no UTF-8 would fail later readers of the shard."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"column {field.name!r} of the rows from {first_row} is not sound Arrow data: {error}",
            problem="unsound", column=field.name, row=first_row,
        ) from error  # fmt: skip
    cast = cast_column(column, field, first_row)
    if not field.nullable and cast.null_count:
        raise null_refused(cast, field, first_row)
    return cast


def _repeat(value: Any, field: pa.Field, count: int) -> pa.ChunkedArray:
    column = pa.nulls(count, field.type) if value is None else pa.repeat(pa.scalar(value, field.type), count)
    return pa.chunked_array([column], field.type)


def _check_names(schema: Schema, names: list[str], defaults: dict[str, Any]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SchemaMismatch(
            f"column {twice[0]!r} occurs {names.count(twice[0])} times in {shown(names)}; give each its own name",
            problem="duplicate column", column=twice[0], found=names,
        )  # fmt: skip
    if extra := [name for name in names if name not in schema.updates.names]:
        raise _extra(schema, extra, None)
    for name in schema.updates.names:
        if name not in names and name not in defaults:
            raise _missing(schema, name, names, None)


def null_refused(column: pa.Array | pa.ChunkedArray, field: pa.Field, first_row: int) -> InvalidUsage:
    """The error for a null in a column that takes none."""
    row = first_row + pc.index(pc.is_null(column), True).as_py()
    advice = _NULL_ADVICE.get(field.name, "Leave these rows out, or give them a value")
    return InvalidUsage(
        f"column {field.name!r} is {field.type} not null, and row {row} has null ({column.null_count} rows have). "
        f"{advice}",
        problem="null", column=field.name, row=row, value=None, expected=f"{field.type} not null",
    )  # fmt: skip


_NULL_ADVICE = {
    DIFF: f"Leave the column {DIFF} out for +1 everywhere",
    TIME: f"Every update has a time: an integer in [0, {MAX_TIME}]",
}


def _zero(column: pa.Array | pa.ChunkedArray, first_row: int) -> InvalidUsage:
    row = first_row + pc.index(column, pa.scalar(0, column.type)).as_py()
    return InvalidUsage(
        f"column {DIFF!r}: row {row} has 0, which changes nothing; leave such rows out (+1 adds, -1 retracts)",
        problem="zero diff", column=DIFF, row=row, value=0, expected="int64, not 0",
    )  # fmt: skip


def _missing(schema: Schema, name: str, found: list[str], row: int | None) -> InvalidUsage:
    where = "" if row is None else f" in row {row}"
    if name == TIME:
        return InvalidUsage(
            f"column {TIME!r} is missing{where}, and the append covers more than one time: add the time of each update",
            problem="missing time", column=TIME, row=row, found=found,
        )  # fmt: skip
    how = ": this call fills in nothing" if name in schema.fills else ", with null where there is no value"
    return SchemaMismatch(
        f"column {name!r} is missing{where}; found {shown(found)}, expected {schema.shown.names} and {TIME}, {DIFF}. "
        f"Add it{how}",
        problem="missing column", column=name, row=row, found=found, expected=schema.updates.names,
    )  # fmt: skip


def _extra(schema: Schema, names: Sequence[object], row: int | None) -> SchemaMismatch:
    where = "" if row is None else f" of row {row}"
    meant = did_you_mean(names[0], schema.names)
    return SchemaMismatch(
        f"columns {shown(list(names))}{where} are not in the schema {schema}. {meant}Drop them, or evolve the "
        "schema (schema.add) and open the shard again with it",
        problem="extra column", column=names[0], row=row, found=list(names), expected=schema.updates.names,
    )  # fmt: skip
