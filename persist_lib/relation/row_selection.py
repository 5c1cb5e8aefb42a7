"""Which rows and columns a read is of: keys, and a filter. They are read of shards, or kept of rows in memory.

And how contents of several shards are shown: in the reader's columns, added up where rows of two shards look alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec
import pyarrow as pa

from persist_lib.arguments import did_you_mean, parse_flag, shown
from persist_lib.convert.by_key import parse_keys
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.format.conform import conform, differs, in_type, names_of
from persist_lib.format.predicate import Where
from persist_lib.kernel.columns import joined, packed, plain, unpacked
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keys import after_prefix, encode_key, slice_sorted
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import take
from persist_lib.relation.projection import added_up, narrowed, projected_rows, projection_of
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import fill, is_prefix, named_as
from persist_lib.schema.schema import TIME, Column, Schema

if TYPE_CHECKING:
    import pyarrow.compute as pc


class KeyRange(NamedTuple):
    """Encoded keys in `[lower, upper)`; None means no bound."""

    lower: bytes | None = None
    upper: bytes | None = None

    @classmethod
    def of(
        cls, schema: Schema, key: Sequence[object] | None, key_from: Sequence[object] | None,
        key_to: Sequence[object] | None,
    ) -> KeyRange:  # fmt: skip
        """The keys that start with `key`, or those in `[key_from, key_to)`: values of the leading key columns."""
        if key is not None and (key_from is not None or key_to is not None):
            raise InvalidUsage("pass either key, or key_from and key_to", key=key)
        if key is not None:
            start = encode_key(schema, _tuple(key))
            return cls(start, after_prefix(start))
        lower = None if key_from is None else encode_key(schema, _tuple(key_from))
        upper = None if key_to is None else encode_key(schema, _tuple(key_to))
        return cls(lower, upper)

    def meet(self, other: KeyRange) -> KeyRange:
        lowers = [bound for bound in (self.lower, other.lower) if bound is not None]
        uppers = [bound for bound in (self.upper, other.upper) if bound is not None]
        return KeyRange(max(lowers, default=None), min(uppers, default=None))


class RowSelection(NamedTuple):
    """Rows by their keys and by a filter, and the columns of them that are to be read (None: all)."""

    schema: Schema
    range_: KeyRange = KeyRange()
    keys: Keys | None = None
    where: Where | None = None
    columns: tuple[str, ...] | None = None
    diff: bool = False
    """Whether the reader wants each distinct row once, with `_diff`, and not each row as often as it is there."""
    shown: Schema | None = None
    """The reader's columns, where rows have some that were added since."""

    def whole(self) -> RowSelection:
        return self._replace(columns=None)

    def within(self, newer: Schema) -> RowSelection:
        """The same of rows that have more columns, which are left out."""
        if newer == self.schema:
            return self
        columns = tuple(self.schema.names) if self.columns is None else self.columns
        return self._replace(schema=newer, columns=columns, shown=self.schema)

    def kept(self, rows: pa.Table) -> pa.Table:
        """Those of some rows, which are in canonical order, with all their columns."""
        if self.range_ != KeyRange():
            rows = slice_sorted(self.schema, rows, self.range_.lower, self.range_.upper)
        if self.keys is not None:
            rows = take(rows, self.keys.find(rows))
        return rows if self.where is None else self.where.kept(rows)

    def narrowed(self, rows: pa.Table) -> pa.Table:
        return projected_rows(self.schema, self.columns, rows)


class ReadArguments(TypedDict, total=False):
    """Which rows and columns a read is of: the arguments of a snapshot (`ReadHandle.snapshot` says what they mean)."""

    columns: Sequence[str] | None
    key: Sequence[object] | None
    key_from: Sequence[object] | None
    key_to: Sequence[object] | None
    keys: object
    filter: pc.Expression | None
    diff: bool


class Asked(NamedTuple):
    """The same, as a caller passed them."""

    columns: object = None
    key: Sequence[object] | None = None
    key_from: Sequence[object] | None = None
    key_to: Sequence[object] | None = None
    keys: object = None
    filter: pc.Expression | None = None
    diff: bool = False

    def of(self, schema: Schema, what: str = "the table") -> RowSelection:
        """What they say of rows of this schema, which `what` has. Raises InvalidUsage."""
        range_ = KeyRange.of(schema, self.key, self.key_from, self.key_to)
        if self.keys is not None and range_ != KeyRange():
            raise InvalidUsage("pass either keys, or key, or key_from and key_to", keys=self.keys)
        found = None if self.keys is None else keys_of(schema, self.keys)
        names, where = parse_columns(schema, what, self.columns), Where.of(schema.data, self.filter)
        return RowSelection(schema, range_, found, where, names, parse_flag(self.diff, "diff"))


def by_keys(schema: Schema, keys: Keys) -> RowSelection:
    """All rows that have these keys."""
    return RowSelection(schema, keys=keys)


def summed(schema: Schema, *tables: pa.Table) -> pa.Table:
    """Tables of contents, added up, in canonical order."""
    return consolidate(schema, pa.concat_tables([empty_table(schema.contents), *tables]))


def parse_columns(schema: Schema, what: str, columns: object) -> tuple[str, ...] | None:
    """The names of columns to read, in the schema's order; None for all. Raises InvalidUsage for others."""
    if columns is None:
        return None
    if isinstance(columns, (str, bytes, Mapping)) or not isinstance(columns, Iterable):
        raise InvalidUsage(
            f"columns must be a list of names, some of {schema.names}: got {shown(columns)}", columns=columns
        )
    names = tuple(columns)
    if unknown := [name for name in names if not isinstance(name, str) or name not in schema.names]:
        meant = did_you_mean(unknown[0], schema.names)
        raise InvalidUsage(f"{what} has no columns {shown(unknown)}. {meant}It has {schema.names}", columns=columns)
    return tuple(name for name in schema.names if name in names)


def keys_of(schema: Schema, keys: object) -> Keys:
    """The distinct keys among what a caller passed. Raises InvalidUsage."""
    return Keys.of(schema, parse_keys(schema, keys))


def packed_keys(keys: Keys) -> bytes:
    """Keys as bytes, which compare, hash and pickle as a split does."""
    return packed(keys.table.combine_chunks())


@lru_cache(maxsize=8)
def unpacked_keys(schema: Schema, data: bytes) -> Keys:
    """The keys again, which are in order."""
    return Keys(schema, unpacked(data))


def _tuple(values: object) -> tuple[object, ...]:
    if not isinstance(values, (tuple, list)):
        raise InvalidUsage(f"a key is a tuple of values of the leading key columns, got {shown(values)}", key=values)
    return tuple(values)


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

    Columns that are not there are null. Where columns are left out, rows that become equal are added up within
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
