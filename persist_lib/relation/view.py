"""Contents of several shards as one reader sees them: in its columns, added up where rows of two shards look alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa

from persist_lib.errors import SchemaMismatch
from persist_lib.format.conform import conform, differs, in_type, names_of
from persist_lib.kernel.columns import joined, plain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.projection import added_up, narrowed, projection_of
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import fill, is_prefix, named_as
from persist_lib.schema.schema import TIME, Column, Schema


class View(msgspec.Struct, frozen=True):
    """How contents of shards are shown to one reader: in its columns, some of them if `columns` says so.

    Where `adds_up`, rows that look alike may come from several shards, and are added up. All that it is given and
    gives has each distinct row once; `diff` says whether the reader wants that, or each row as often as it is there.
    """

    schema: Schema
    columns: tuple[str, ...] | None
    merge_bytes: int
    adds_up: bool = False
    diff: bool = False

    @property
    def shown(self) -> pa.Schema:
        """The Arrow schema of what is shown."""
        return narrowed(self.schema.contents, self.columns)

    def one(self, tables: Iterator[pa.Table], found: Schema) -> Iterator[pa.Table]:
        """Contents of one shard, which has the schema `found`. With `columns` they are projected to these already."""
        if self.columns is None:
            return conformed(tables, found, self.schema)
        return (widened(table, self.shown) for table in tables)

    def of(self, shards: Iterable[tuple[Iterator[pa.Table], Schema]]) -> Iterator[pa.Table]:
        """Contents of several shards, each with its schema."""
        tables = (table for one, found in shards for table in self.one(one, found))
        if not self.adds_up:
            return tables
        return added_up(tables, projection_of(self.schema, self.columns or ()), self.merge_bytes)


def conformed(tables: Iterator[pa.Table], found: Schema, wanted: Schema) -> Iterator[pa.Table]:
    """Tables of `found` (contents, or updates) in the columns of `wanted`, in the same order.

    Columns that are not there are null. SUBTLE: where columns are left out, rows that become equal are added up within
    a table; those of two tables stay apart, as rows in order with the same key may be many.
    """
    if found == wanted:
        yield from tables
        return
    is_additive = is_prefix(found, wanted) or is_prefix(wanted, found)
    names = dict(zip(found.names, named_as(found, wanted).names, strict=True))
    for table in tables:
        target = wanted.updates if TIME in table.schema.names else wanted.contents
        if is_additive:
            narrow = widened(table, target)
        else:
            renamed = table.rename_columns([names.get(name, name) for name in table.column_names])
            narrow = conform("rows", renamed, wanted, times=TIME in target.names)
        if table.num_columns > narrow.num_columns:
            narrow = consolidate(wanted, pa.concat_tables([empty_table(target), narrow]))
        if narrow.num_rows:
            yield narrow


def in_older_columns(rows: pa.Table, schema: Schema, newest: Schema, what: str, **fields: object) -> pa.Table:
    """Contents in the columns of `newest`, which may have more than `schema`, in those of this, for what retracts them.

    Raises SchemaMismatch where that would lose something of them: not what rows have that do not say a column.
    """
    added = [column for column in newest.columns if column.name not in schema.contents.names]
    if any(_says(column, joined(rows.column(column.name))) for column in added):
        names = [column.name for column in added]
        raise SchemaMismatch(
            f"{what} has the columns {names} since this program opened it, and rows of these keys have something in "
            "them, which it cannot retract. Nothing was written; open it in the newest columns",
            expected=schema, found=rows.schema.names, **fields,
        )  # fmt: skip
    return rows.select(schema.contents.names) if added else rows


def _says(column: Column, values: pa.Array) -> bool:
    """Whether a row has something else in a column than those that do not say it."""
    if column.default is None:
        return bool(values.null_count < len(values))
    return not plain(values).equals(fill(column, len(values)))


def recast(table: pa.Table, found: Schema, wanted: Schema) -> pa.Table:
    """Contents, or updates, of one schema of a table in the columns of another one; they are not added up.

    Raises SchemaMismatch where these do not hold what is there.
    """
    if found == wanted:
        return table
    names = names_of(table.column_names, [column.id for column in found.columns], wanted)
    return conform("rows", table.rename_columns(names), wanted, times=TIME in table.column_names)


def widened(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The columns of `target`, in its order; those that the table does not have are null."""

    def of(field: pa.Field) -> pa.Array | pa.ChunkedArray:
        if field.name not in table.schema.names:
            return pa.nulls(table.num_rows, field.type)
        column = table.column(field.name)
        return in_type("rows", column, field) if differs(column.type, field.type) else column

    return pa.table([of(field) for field in target], schema=target)
