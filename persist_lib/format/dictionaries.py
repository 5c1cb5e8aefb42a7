"""Text columns that are written from the dictionaries they have in memory, instead of being spelt out and hashed again.

Merged windows have such columns where what was read had short dictionaries. The object is the same, its Arrow schema
included: readers find text.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from persist_lib.kernel.columns import array_of, integers, joined, plain

INDEX = pa.int32()


def stored_as(table: pa.Table, schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema with those of the named text columns as dictionaries that the table has as dictionaries."""
    fields = []
    for field in schema:
        kind = table.schema.field(field.name).type
        if field.name in names and pa.types.is_dictionary(kind) and kind.value_type == field.type:
            field = pa.field(field.name, pa.dictionary(INDEX, field.type), field.nullable)  # noqa: PLW2901 - the same one
        fields.append(field)
    return pa.schema(fields)


def as_stored(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with each column as the schema has it: as a dictionary of distinct values that all occur, or plain."""
    columns = []
    for field in schema:
        column = joined(table.column(field.name))
        columns.append(compacted(column) if pa.types.is_dictionary(field.type) else plain(column))
    return pa.table(columns, schema=schema)


def compacted(column: pa.Array) -> pa.DictionaryArray:
    """The column with a dictionary of distinct values, none of which is null or does not occur.

    A row group stores the whole dictionary that it is given, and a slice has that of the whole table.
    """
    if not pa.types.is_dictionary(column.type):
        return column.dictionary_encode()
    values = plain(column.dictionary)
    if values.null_count or column.type.index_type != INDEX or len(values.unique()) < len(values):
        return plain(column).dictionary_encode()
    nulls = column.indices.null_count
    codes = integers(column.indices)  # null as 0
    occurs = np.zeros(len(values), np.bool_)
    occurs[codes if not nulls else codes[column.indices.is_valid().to_numpy(zero_copy_only=False)]] = True
    if occurs.all():
        return pa.DictionaryArray.from_arrays(column.indices, values)
    moved = (np.cumsum(occurs) - 1).astype(np.int32)
    indices = array_of(moved.take(codes) if len(values) else codes)
    if nulls:
        indices = pa.Array.from_buffers(
            INDEX, len(indices), [column.indices.is_valid().buffers()[1], indices.buffers()[1]]
        )
    return pa.DictionaryArray.from_arrays(indices, values.take(array_of(np.flatnonzero(occurs))))
