"""Decoded updates in the columns of their reader, whose schema may be another one of the shard's.

Columns are the same by their ids (`schema.evolution`): they get the reader's names first (`names_of`), and then its
types, and what it has that they do not say (`conform`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from persist_lib.errors import Corrupt, InvalidUsage, SchemaMismatch
from persist_lib.kernel.columns import plain
from persist_lib.kernel.converting import converted
from persist_lib.kernel.keys import slice_sorted
from persist_lib.schema.evolution import column_of, fill, free
from persist_lib.schema.schema import DIFF, RESERVED, TIME, Schema
from persist_lib.schema.types import format_type
from persist_lib.schema.widening import is_alike


def names_of(stored: Sequence[str], ids: Sequence[str], schema: Schema) -> list[str]:
    """The names that a reader has for stored columns, of these ids, and then `_time` and `_diff`.

    What its schema does not have gets a name that nothing else has.
    """
    if schema.all_plain and list(ids) == list(stored[: len(ids)]):
        return list(stored)
    known = {column.id: column.name for column in schema.columns}
    taken, found = {*known.values(), *RESERVED}, list[str]()
    for id_ in ids:
        name = known.get(id_) or free(id_, taken)
        taken.add(name)
        found.append(name)
    return [*found, *stored[len(ids) :]]


def counted_at(table: pa.Table, at: int | None) -> pa.Table:
    """The updates with all their times at `at`; as they are if it is None."""
    if at is None:
        return table
    place, kind = table.schema.get_field_index(TIME), pa.uint64()
    times = pa.repeat(pa.scalar(at, kind), table.num_rows)
    return table.set_column(place, pa.field(TIME, kind, nullable=False), times)


def conform(
    key: str, table: pa.Table, schema: Schema, columns: Sequence[str] | None = None, *, times: bool = True
) -> pa.Table:
    """The table as another schema of the shard has it; its columns have the names of that schema already.

    Columns that it lacks have their default, or null. Narrower values become wide ones. Corrupt where the rest differs;
    SchemaMismatch where a schema that is older cannot hold what is stored.
    """
    target = schema.updates if times else schema.contents
    if columns is not None:
        target = pa.schema([field for field in target if field.name in {*columns, TIME, DIFF}])
    if table.schema.equals(target):
        return table.replace_schema_metadata(None)
    present = set(table.schema.names)
    arrays = []
    for field in target:
        if field.name not in present:
            arrays.append(_filled(key, field, schema, table.num_rows))
            continue
        column, stored = table.column(field.name), table.schema.field(field.name)
        if differs(stored.type, field.type):
            column = in_type(key, column, field)
        if stored.nullable and not field.nullable and column.null_count:
            raise _older(key, f"nulls in column {field.name!r}, which are not allowed")
        arrays.append(column)
    fields = [pa.field(field.name, array.type, field.nullable) for field, array in zip(target, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def cut(
    key: str, table: pa.Table, schema: Schema, columns: Sequence[str] | None, lo: bytes | None, hi: bytes | None, *,
    times: bool = True,
) -> pa.Table:  # fmt: skip
    """The rows of a sorted table with `lo <= key < hi`, as another schema of the shard has them (see `conform`).

    A bound may continue behind the key. So all columns count, as the reader's schema has them, where all are read.
    """
    if columns is not None:
        return conform(key, slice_sorted(schema, table, lo, hi), schema, columns, times=times)
    return slice_sorted(schema, conform(key, table, schema, times=times), lo, hi)


def _filled(key: str, field: pa.Field, schema: Schema, count: int) -> pa.Array:
    column = column_of(schema, field.name)
    if column is None or not column.may_lack:
        raise _not_of(key, field)
    return fill(column, count)


def in_type(key: str, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """A column of another type than `field`, which one of the schemas of the shard has. `key` names it in errors.

    Parquet has no seconds: what is stored in ms is narrowed to them.
    """
    try:
        stored, wanted = format_type(_value_type(column.type)), format_type(field.type)
    except InvalidUsage as error:
        raise _not_of(key, field) from error
    if not is_alike(stored, wanted):
        raise _not_of(key, field)
    values, fits = converted(plain(column), field.type)
    if fits is not None and not fits.all():
        raise _older(key, f"values in column {field.name!r} that {wanted} does not hold")
    return pa.chunked_array([values], field.type)


def _not_of(key: str, field: pa.Field) -> Corrupt:
    return Corrupt(f"{key}: column {field.name!r} is not the {field.type} of the shard's schema", key=key)


def _older(key: str, what: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{key} has {what} in the columns that were asked for: the schema has evolved. Open it in the newest columns",
        problem="older columns", key=key,
    )  # fmt: skip


def differs(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values are of another type, and not just dictionaries of this one."""
    return _value_type(stored) != wanted


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
