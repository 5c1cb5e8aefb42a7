"""Which rows of a table somebody wants: read from shards, or kept of rows that are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.arguments import parse_flag
from persist_lib.errors import InvalidUsage
from persist_lib.format.predicate import Where
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keys import slice_sorted
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import take
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.projection import projection_of
from persist_lib.relation.reader import ReadHandle, parse_columns
from persist_lib.relation.row_selection import keys_of
from persist_lib.relation.snapshot import KeyRange, Snapshot
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    import pyarrow.compute as pc


class Wanted(NamedTuple):
    """Rows by their keys and by a filter, and the columns of them that are wanted (None: all)."""

    schema: Schema
    range_: KeyRange = KeyRange()
    keys: Keys | None = None
    where: Where | None = None
    columns: tuple[str, ...] | None = None
    diff: bool = False
    """Whether the reader wants each distinct row once, with `_diff`, and not each row as often as it is there."""

    @classmethod
    def of(
        cls, schema: Schema, *, columns: object = None, key: Sequence[object] | None = None,
        key_from: Sequence[object] | None = None, key_to: Sequence[object] | None = None, keys: object = None,
        filter: pc.Expression | None = None,  # noqa: A002 - what every reader of Arrow calls it
        diff: bool = False,
    ) -> Wanted:  # fmt: skip
        """What the arguments of a read say. Raises InvalidUsage."""
        range_ = KeyRange.of(schema, key, key_from, key_to)
        if keys is not None and range_ != KeyRange():
            raise InvalidUsage("pass either keys, or key, or key_from and key_to", keys=keys)
        found = None if keys is None else keys_of(schema, keys)
        names, where = parse_columns(schema, "the table", columns), Where.of(schema.data, filter)
        return cls(schema, range_, found, where, names, parse_flag(diff, "diff"))

    def whole(self) -> Wanted:
        """The same rows with all their columns."""
        return self._replace(columns=None)

    def snapshot(self, handle: ReadHandle, time: int) -> Snapshot:
        """These rows of a shard, each distinct one once, as of a time that this process knows to be complete."""
        return Snapshot(
            handle, handle.acquire(time), time, self.range_, self.columns, Spending(), self.where, self.keys, diff=True
        )

    def kept(self, rows: pa.Table) -> pa.Table:
        """Those of some rows, which are in canonical order, with all their columns."""
        if self.range_ != KeyRange():
            rows = slice_sorted(self.schema, rows, self.range_.lower, self.range_.upper)
        if self.keys is not None:
            rows = take(rows, self.keys.find(rows))
        return rows if self.where is None else self.where.kept(rows)

    def narrowed(self, rows: pa.Table) -> pa.Table:
        """The wanted columns of rows, added up."""
        if self.columns is None:
            return rows
        names = [f.name for f in self.schema.contents if f.name in self.columns or f.name == "_diff"]
        narrow = rows.select(names)
        schema = projection_of(self.schema, self.columns)
        return narrow if schema is None else consolidate(schema, narrow.select([*schema.names, "_diff"])).select(names)


def by_keys(schema: Schema, keys: Keys) -> Wanted:
    """All rows that have these keys."""
    return Wanted(schema, keys=keys)


def added_up(schema: Schema, *tables: pa.Table) -> pa.Table:
    """Tables of contents, added up, in canonical order."""
    return consolidate(schema, pa.concat_tables([empty_table(schema.contents), *tables]))
