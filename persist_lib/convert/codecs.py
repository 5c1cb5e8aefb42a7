"""Codecs: Python rows as values of columns, and back.

A row is a dict of columns, a pydantic instance, or an update as the books write it: `((key, value), time, diff)`,
`(key, value)`, or an `Update`. What key and value are is the schema's: instances of its models, any JSON value, bytes,
or (for plain columns) dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from persist_lib.arguments import check_type, shown
from persist_lib.convert.json_columns import exact_json
from persist_lib.errors import InvalidUsage
from persist_lib.schema.json_text import parsed, text_of, value_of
from persist_lib.schema.models import Model, is_instance, is_model, rebuild, values_of
from persist_lib.schema.schema import DIFF, TIME, Column, Schema, check_schema
from persist_lib.schema.types import JSON, UUID
from persist_lib.times import TimeLike


class Update(NamedTuple):
    """One update. Without a time it takes the append's; `value` is None where the schema has no value columns."""

    key: Any
    value: Any = None
    time: TimeLike | None = None
    diff: int | None = None


def is_row(item: object) -> bool:
    """Whether this is one row, and not a collection of some."""
    return isinstance(item, (Mapping, tuple)) or is_instance(item)


def as_mappings(schema: Schema, rows: Sequence[Any], first_row: int = 0) -> Sequence[Mapping[str, Any]]:
    """The rows as mappings of column names to values of those columns."""
    if schema.codec == "columns" and set(map(type, rows)) == {dict}:
        return rows
    return [_as_mapping(schema, row, first_row + index) for index, row in enumerate(rows)]


def decode_rows(schema: Schema, table: pa.Table) -> list[Any]:
    """The rows of updates or contents as Python values: dicts for plain columns, an `Update` each for other codecs."""
    check_schema(schema)
    if not isinstance(table, pa.RecordBatch):
        check_type(table, pa.Table, "table", "read.snapshot().to_arrow()")
    if schema.codec == "columns" and schema.models == (None, None):
        return python_rows(table, schema)
    keys, values = decode_side(schema, 0, table), decode_side(schema, 1, table)
    times = _optional(table, TIME)
    diffs = _optional(table, DIFF)
    return list(map(Update, keys, values, times, diffs))


def python_rows(rows: pa.Table | pa.RecordBatch, schema: Schema) -> list[dict[str, Any]]:
    """Rows of some of a schema's columns as dicts, maps within them as well, uuids as Python's, documents as values."""
    for column in schema.columns:
        if column.type == UUID and (place := rows.schema.get_field_index(column.name)) >= 0:
            ids = rows.column(place).cast(pa.uuid())
            rows = rows.set_column(place, pa.field(column.name, pa.uuid()), ids)
    found: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="strict")
    for name in [one.name for one in schema.columns if one.type == JSON and one.name in rows.schema.names]:
        for row in found:
            row[name] = None if row[name] is None else value_of(row[name])
    return found


def _as_mapping(schema: Schema, row: Any, index: int) -> Mapping[str, Any]:
    if is_instance(row):
        return values_of(row)
    if isinstance(row, Mapping):
        sides = [side for side in ("key", "value") if side in row and schema.codec == "json"]
        return {**row, **{side: exact_json(text_of, row[side], side, index) for side in sides}} if sides else row
    if not isinstance(row, tuple):
        raise _no_row(schema, row, index)
    key, value, time, diff = _parts(schema, row, index)
    found = _encode_side(schema, 0, key, index) | _encode_side(schema, 1, value, index)
    stamps = {name: stamp for name, stamp in ((TIME, time), (DIFF, diff)) if stamp is not None}
    return found | stamps


def _parts(schema: Schema, row: tuple[Any, ...], index: int) -> Update:
    if isinstance(row, Update):
        return row
    if len(row) == 2:
        return Update(*row)
    if len(row) == 3 and isinstance(row[0], tuple) and len(row[0]) == 2:
        return Update(row[0][0], row[0][1], row[1], row[2])
    raise _no_row(schema, row, index)


def _no_row(schema: Schema, row: object, index: int) -> InvalidUsage:
    return InvalidUsage(
        f"row {index} is a {type(row).__name__}; a row is a dict of {schema.shown.names} (and {TIME}, {DIFF}), an "
        f"instance of a pydantic model, (key, value), ((key, value), time, diff) or an Update. Found {shown(row)}",
        problem="row", row=index, value=row,
    )  # fmt: skip


def _encode_side(schema: Schema, side: int, value: Any, index: int) -> dict[str, Any]:
    what = ("key", "value")[side]
    columns: tuple[Column, ...] = (schema.key, schema.shown.value)[side]
    if schema.codec == "json":
        return {what: exact_json(text_of, value, what, index)}
    if schema.codec == "bytes":
        return {what: value}
    if value is None and not columns:
        return {}
    if is_instance(value):
        return _named(values_of(value), columns, what, index)
    if isinstance(value, Mapping):
        return _named(value, columns, what, index)
    model = schema.models[side]
    wanted = f"a {model.__name__}" if model else "a dict of its columns"
    raise InvalidUsage(
        f"the {what} of row {index} must be {wanted}, got {shown(value)}",
        problem="row", row=index, value=value,
    )  # fmt: skip


def _named(found: Mapping[str, Any], columns: tuple[Column, ...], what: str, index: int) -> dict[str, Any]:
    """Refuse a value where the key belongs, or another model's instance."""
    names = {column.name for column in columns}
    if found.keys() != names:
        raise InvalidUsage(
            f"the {what} of row {index} has {shown(list(found))}, and its columns are {sorted(names)}",
            problem="row", row=index, value=dict(found),
        )  # fmt: skip
    return dict(found)


def decode_side(schema: Schema, side: int, table: pa.Table) -> list[Any]:
    """The keys (side 0) or values (side 1) of a table's rows, as the schema's codec and models have them."""
    columns: tuple[Column, ...] = (schema.key, schema.value)[side]
    missing = [column.name for column in columns if column.name not in table.column_names]
    if missing:
        raise InvalidUsage(
            f"rows of {schema} need all columns, and {missing} are not among {table.column_names}; read without a "
            "projection, or as a table",
            problem="missing column", column=missing[0],
        )  # fmt: skip
    if not columns:
        return [None] * table.num_rows
    if schema.codec == "json":
        texts = table.column(columns[0].name).to_pylist()
        return [exact_json(parsed, text, columns[0].name, row) for row, text in enumerate(texts)]
    if schema.codec == "bytes":
        return table.column(columns[0].name).to_pylist()
    rows = python_rows(table.select([column.name for column in columns]), schema)
    model: Model | None = schema.models[side]
    return rows if model is None else [rebuild(model, row) for row in rows]


def _optional(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def rows_as_models(schema: Schema, table: pa.Table, model: Model | None = None) -> list[Any]:
    """The rows of contents as instances of `model`, or as pairs of instances of the schema's models.

    Each comes as often as its `_diff` says. Raises InvalidUsage for a row that a model refuses, a model that the
    columns do not fill, no model at all, and a negative multiplicity.
    """
    diffs = table.column(DIFF).to_pylist()
    if any(diff < 0 for diff in diffs):
        row = next(row for row, diff in enumerate(diffs) if diff < 0)
        raise InvalidUsage(
            f"row {row} is there {diffs[row]} times, and there cannot be such an instance; read it as a table",
            problem="negative multiplicity", row=row, value=diffs[row],
        )  # fmt: skip
    if model is None:
        return _pairs(schema, table, diffs)
    if not is_model(model):
        raise InvalidUsage(f"model must be a pydantic model class: got {shown(model)}", problem="model")
    if schema.codec != "columns":
        raise InvalidUsage(
            f"the shard holds {schema.codec} values, not the columns of {model.__name__}: use persist.decode_rows",
            problem="model", model=model.__name__,
        )  # fmt: skip
    names = [name for name in model.model_fields if name in table.column_names]
    if missing := [name for name, f in model.model_fields.items() if f.is_required() and name not in names]:
        raise InvalidUsage(
            f"{model.__name__} needs {missing}, and the columns are {table.column_names}",
            problem="missing column", column=missing[0], model=model.__name__,
        )  # fmt: skip
    rows = python_rows(table.select(names), schema) if names else [{} for _ in diffs]
    return [
        _rebuilt(model, row, at) for at, (row, diff) in enumerate(zip(rows, diffs, strict=True)) for _ in range(diff)
    ]


def _pairs(schema: Schema, table: pa.Table, diffs: list[int]) -> list[Any]:
    if schema.models == (None, None):
        raise InvalidUsage(
            "this shard was not opened with pydantic models: pass one, as in to_models(Order), or open it with "
            "persist.Schema(key=OrderKey, value=Order)",
            problem="model",
        )
    plain = Schema(schema.key, schema.value, schema.codec)
    sides = [decode_side(plain, side, table) for side in (0, 1)]

    def made(side: int, row: Any, at: int) -> Any:
        model = schema.models[side]
        return row if model is None else _rebuilt(model, row, at)

    return [
        (made(0, key, at), made(1, value, at))
        for at, (key, value, diff) in enumerate(zip(*sides, diffs, strict=True))
        for _ in range(diff)
    ]


def _rebuilt(model: Model, row: Mapping[str, Any], at: int) -> Any:
    try:
        return rebuild(model, row)
    except ValueError as error:  # pydantic's ValidationError is one
        raise InvalidUsage(
            f"row {at}, {shown(dict(row))}, is no {model.__name__}: {error}",
            problem="row", row=at, model=model.__name__,
        ) from error  # fmt: skip
