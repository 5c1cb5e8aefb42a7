"""Rows of one rendition in the columns of another: where one schema only has more value columns than the other."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from persist_lib.errors import SchemaChanged
from persist_lib.kernel.consolidate import consolidate
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME, Schema


def is_additive(one: Schema, other: Schema) -> bool:
    """Whether the two differ at most by value columns at the end that one of them does not have."""
    few, many = sorted((one.value, other.value), key=len)
    same = (one.key, one.codec, one.times) == (other.key, other.codec, other.times)
    return same and many[: len(few)] == few and all(column.nullable for column in many[len(few) :])


def check_additive(collection: str, wanted: Schema, found: Schema, time: int) -> None:
    """Raise SchemaChanged unless rows of `found` can be given in the columns of `wanted`."""
    if not is_additive(wanted, found):
        raise SchemaChanged(
            f"collection {collection!r}: from {wanted.show(time)} on it has the schema {found}, and this reader has "
            f"{wanted}, in which its rows cannot be given. Open a reader in the new schema and read from there, or "
            "listen with replace=True, which takes all old rows out and gives all new ones",
            collection=collection, time=time, actual=found, expected=wanted,
        )  # fmt: skip


def conformed(tables: Iterator[pa.Table], found: Schema, wanted: Schema) -> Iterator[pa.Table]:
    """Tables of `found` (contents, or updates) in the columns of `wanted`, in the same order.

    Columns that are not there are null. SUBTLE: where columns are left out, rows that become equal are added up within
    a table; those of two tables stay apart, as rows in order with the same key may be many.
    """
    if found == wanted:
        yield from tables
        return
    for table in tables:
        target = wanted.updates if TIME in table.schema.names else wanted.contents
        narrow = widened(table, target)
        if table.num_columns > narrow.num_columns:
            narrow = consolidate(wanted, pa.concat_tables([empty_table(target), narrow]))
        if narrow.num_rows:
            yield narrow


def widened(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The columns of `target`, in its order; those that the table does not have are null."""
    columns = [
        table.column(field.name) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in target
    ]
    return pa.table(columns, schema=target)
