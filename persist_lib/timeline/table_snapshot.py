"""The contents of a table as of a time, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.held import Named
from persist_lib.relation.row_selection import RowSelection, View
from persist_lib.relation.snapshot import MemoryContents, PlaceContents, SnapshotOf
from persist_lib.runtime.ambient import Runtime


class TableSnapshot(SnapshotOf[PlaceContents | MemoryContents]):
    """A table's contents as of the time `as_of`: each row as often as it is there, and `diff` as of a shard's snapshot.

    They are read when they are asked for, in bounded memory. Where rows are in the WAL and not in the table yet, they
    are in memory, whole: that is what the filter, the keys and the columns of the call leave of them.
    """

    def __init__(
        self, name: str, as_of: int, view: View, parts: Sequence[PlaceContents | MemoryContents], runtime: Runtime
    ) -> None:
        super().__init__(Named("table", name), as_of, view, parts, runtime, Spending())

    def _read_now(self) -> TableSnapshot:
        """The same in memory, as the reader of its shards is closed after this."""
        parts = [MemoryContents(self._view.schema, self._consolidated_table())]
        return TableSnapshot(self.name, self.as_of, self._view, parts, self._runtime)


def in_memory(name: str, as_of: int, wanted: RowSelection, rows: pa.Table, runtime: Runtime) -> TableSnapshot:
    """The wanted rows, which were read already, with all their columns."""
    view = View(wanted.shown or wanted.schema, wanted.columns, 0, diff=wanted.diff)
    return TableSnapshot(name, as_of, view, [MemoryContents(wanted.schema, wanted.narrowed(rows))], runtime)
