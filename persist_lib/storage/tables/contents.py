"""The contents of a table as of a time, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.format.predicate import Where
from persist_lib.read.doors import Doors
from persist_lib.schema.schema import Schema
from persist_lib.storage.snapshot import CollectionSnapshot

ROWS = 65_536


class TableSnapshot(Doors):
    """A table's contents as of the time `as_of`: each distinct row once, with its multiplicity `_diff`.

    They are read when they are asked for, in bounded memory. Where rows are in the WAL and not in the table yet, they
    are in memory, whole: that is what the filter, the keys and the columns of the call leave of them.
    """

    def __init__(
        self, name: str, as_of: int, schema: Schema, columns: Sequence[str] | None, inner: CollectionSnapshot | pa.Table
    ) -> None:
        self.name, self.as_of = name, as_of
        self._schema, self._columns, self._inner = schema, columns, inner

    def __repr__(self) -> str:
        return f"TableSnapshot({self.name!r}, as_of={self._schema.show(self.as_of)})"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        contents = self._schema.contents
        if self._columns is None:
            return contents
        return pa.schema([f for f in contents if f.name in self._columns or f.name == "_diff"])

    def batches(self) -> Iterator[pa.Table]:
        """All rows, as tables of bounded size."""
        inner = self._inner
        if isinstance(inner, CollectionSnapshot):
            return inner.batches()
        return (inner.slice(start, ROWS) for start in range(0, inner.num_rows, ROWS))

    def to_arrow(self) -> pa.Table:
        """All rows as one table."""
        return self._inner.to_arrow() if isinstance(self._inner, CollectionSnapshot) else self._inner

    def selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the rows that `where` keeps. Rows that look alike stay apart."""
        if isinstance(self._inner, CollectionSnapshot):
            return self._inner.selected(names, where)
        kept = (table if where is None else where.kept(table) for table in self.batches())
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

    __reduce__ = not_pickled("A snapshot", "Pass its rows, as in snapshot.to_arrow()")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
