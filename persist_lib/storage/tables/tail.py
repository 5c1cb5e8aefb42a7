"""The newest rows of a timeline's WAL, as one process knows them: what is not in the tables yet, and what just came.

SUBTLE: rows stay here until they are known to be in their table and no open transaction began before them. So what a
transaction has to check when it commits is always here, or the transaction is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from persist_lib.errors import Corrupt
from persist_lib.kernel.columns import integers
from persist_lib.schema.schema import DIFF, Schema

CHUNK_ROWS = 8192


@dataclass(slots=True)
class Entry:
    """One row of the WAL. A mark has a chunk below 0."""

    time: int
    table: str
    chunk: int
    data: bytes
    _rows: pa.Table | None = field(default=None, repr=False)

    @property
    def is_mark(self) -> bool:
        """Whether it says that the table is another one from its time on."""
        return self.chunk < 0

    def rows(self, schema: Schema) -> pa.Table:
        """Its rows in the table's columns. Columns that are newer than the row are null in it."""
        if self._rows is None:
            try:
                self._rows = pa.ipc.open_stream(self.data).read_all()
            except pa.ArrowInvalid as error:
                raise Corrupt(f"a row of the WAL at {self.time} for table {self.table} does not decode") from error
        found = self._rows
        if found.schema.equals(schema.contents):
            return found
        columns = [
            found.column(f.name).cast(f.type) if f.name in found.column_names else pa.nulls(found.num_rows, f.type)
            for f in schema.contents
        ]
        return pa.table(columns, schema=schema.contents)


def encoded(rows: pa.Table) -> Iterator[bytes]:
    """The rows of one table in a transaction, as the WAL keeps them: some thousands of rows each."""
    options = pa.ipc.IpcWriteOptions(compression="zstd" if rows.num_rows > CHUNK_ROWS // 8 else None)
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        sink = pa.BufferOutputStream()
        chunk = rows.slice(start, CHUNK_ROWS).combine_chunks()
        with pa.ipc.new_stream(sink, chunk.schema, options=options) as stream:
            stream.write_table(chunk)
        yield bytes(sink.getvalue())


def entries_of(updates: pa.Table) -> list[Entry]:
    """What was added among updates of the WAL, in order. What was retracted is applied, and is of no interest."""
    added = updates.filter(pa.array(integers(updates.column(DIFF)) > 0))
    columns = [added.column(name).to_pylist() for name in ("at", "table", "chunk", "rows")]
    return [Entry(*row) for row in zip(*columns, strict=True)]


class Tail:
    """The entries of a WAL with times from some time on, by table, in order."""

    def __init__(self) -> None:
        self._by_table: dict[str, list[Entry]] = {}

    def add(self, entries: list[Entry]) -> None:
        """Add newer entries."""
        for entry in entries:
            self._by_table.setdefault(entry.table, []).append(entry)

    def clear(self) -> None:
        """Forget everything."""
        self._by_table.clear()

    def of(self, table: str, after: int, to: int) -> list[Entry]:
        """The entries of a table with times in `(after, to]`."""
        return [entry for entry in self._by_table.get(table, ()) if after < entry.time <= to]

    def first_from(self, table: str, time: int) -> int | None:
        """The time of the table's first row at or after a time; marks do not count."""
        return next((e.time for e in self._by_table.get(table, ()) if e.time >= time and not e.is_mark), None)

    def tables(self) -> list[str]:
        """The tables that have entries."""
        return [table for table, entries in self._by_table.items() if entries]

    def drop(self, table: str, to: int) -> None:
        """Forget a table's entries up to a time."""
        if kept := [entry for entry in self._by_table.get(table, ()) if entry.time > to]:
            self._by_table[table] = kept
        else:
            self._by_table.pop(table, None)
