"""The contents of a table as of a time, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.catalog.snapshot import CollectionSnapshot
from persist_lib.format.predicate import Where
from persist_lib.relation.conversions import Rows
from persist_lib.relation.projection import narrowed
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    from persist_lib.relation.row_selection import RowSelection

ROWS = 65_536


class TableSnapshot(Rows):
    """A table's contents as of the time `as_of`: each row as often as it is there, and `diff` as of a shard's snapshot.

    They are read when they are asked for, in bounded memory. Where rows are in the WAL and not in the table yet, they
    are in memory, whole: that is what the filter, the keys and the columns of the call leave of them.
    """

    def __init__(
        self, name: str, as_of: int, schema: Schema, wanted: RowSelection, inner: CollectionSnapshot | pa.Table
    ) -> None:
        self.name, self.as_of, self.diff = name, as_of, wanted.diff
        self._schema, self._columns, self._inner = schema, wanted.columns, inner

    def __repr__(self) -> str:
        return f"TableSnapshot({self.name!r}, as_of={self._schema.show_as_of(self.as_of)})"

    @property
    def contents_schema(self) -> pa.Schema:
        """The columns, then `_diff`."""
        return narrowed(self._schema.contents, self._columns)

    def consolidated(self) -> Iterator[pa.Table]:
        """Each distinct row once, with `_diff`, as tables of bounded size."""
        inner = self._inner
        if isinstance(inner, CollectionSnapshot):
            return inner.consolidated()
        return (inner.slice(start, ROWS) for start in range(0, inner.num_rows, ROWS))

    def consolidated_table(self) -> pa.Table:
        """Each distinct row once, with `_diff`, as one table."""
        return self._inner.consolidated_table() if isinstance(self._inner, CollectionSnapshot) else self._inner

    def consolidated_selection(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the distinct rows that `where` keeps; rows that look alike stay apart."""
        if isinstance(self._inner, CollectionSnapshot):
            return self._inner.consolidated_selection(names, where)
        kept = (table if where is None else where.kept(table) for table in self.consolidated())
        return (table.select(list(names)) for table in kept)

    def check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        if isinstance(self._inner, CollectionSnapshot):
            self._inner.check_readable()

    def shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._schema

    def release(self) -> None:
        """Stop keeping what is read from. Idempotent."""
        if isinstance(self._inner, CollectionSnapshot):
            self._inner.release()

    def _named(self) -> str:
        return f"this snapshot of table {self.name!r} as of {self._schema.show_as_of(self.as_of)}"

    __reduce__ = not_pickled("A snapshot", "Pass its rows, as in snapshot.to_arrow()")
