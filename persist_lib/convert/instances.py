"""Rows as instances of pydantic models, of a model that the caller names or of those of the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.convert.codecs import decode_side
from persist_lib.errors import InvalidUsage
from persist_lib.schema.models import Model, is_model, rebuild
from persist_lib.schema.schema import DIFF, Schema


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
    rows = table.select(names).to_pylist() if names else [{} for _ in diffs]
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
    sides = [_side_rows(schema, side, table) for side in (0, 1)]
    made = [_side_maker(schema, side) for side in (0, 1)]
    return [
        (made[0](key, at), made[1](value, at))
        for at, (key, value, diff) in enumerate(zip(*sides, diffs, strict=True))
        for _ in range(diff)
    ]


def _side_rows(schema: Schema, side: int, table: pa.Table) -> list[Any]:
    return decode_side(Schema(schema.key, schema.value, schema.codec), side, table)


def _side_maker(schema: Schema, side: int) -> Callable[[Any, int], Any]:
    model = schema.models[side]
    return (lambda row, _: row) if model is None else lambda row, at: _rebuilt(model, row, at)


def _rebuilt(model: Model, row: Mapping[str, Any], at: int) -> Any:
    try:
        return rebuild(model, row)
    except ValueError as error:  # pydantic's ValidationError is one
        raise InvalidUsage(
            f"row {at}, {shown(dict(row))}, is no {model.__name__}: {error}",
            problem="row", row=at, model=model.__name__,
        ) from error  # fmt: skip
