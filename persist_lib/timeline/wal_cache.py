"""The newest rows of a timeline's WAL, as one process keeps them in memory: at most some megabytes of them.

What is in its table, and newer than which no transaction is open, goes first; then the oldest rows, where there are too
many. These are read from the WAL when they are needed: see `WalLine.entries`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pyarrow as pa

from persist_lib.catalog.wal import EVOLVED
from persist_lib.errors import Corrupt, InvariantViolated
from persist_lib.format.conform import conform, names_of
from persist_lib.kernel.columns import integers, packed, unpacked
from persist_lib.schema.schema import DIFF, Schema

CHUNK_ROWS = 8192
IDS = b"ids"
"""Under which an entry says the ids of its columns, where their names are others."""
MOST_BYTES = 64 << 20
"""How much of a WAL one process keeps in memory. Beyond that it keeps the newer half, and reads what is older."""
ENTRY_BYTES = 1024
"""What a row of a WAL takes in memory beyond its data, about."""


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

    @property
    def size(self) -> int:
        """What it takes in memory, about."""
        return len(self.data) + ENTRY_BYTES

    @property
    def is_break(self) -> bool:
        """Whether it says that the contents are another table's from its time on, or gone; not that columns came."""
        return self.is_mark and self.chunk != EVOLVED

    def whole_rows(self, schema: Schema) -> pa.Table:
        """Its rows for who writes them to the table. Raises InvariantViolated where these columns are not all it has.

        Columns that are newer than the row have their default in it, or null.
        """
        ids = {column.id for column in schema.columns}
        if lost := [id_ for id_ in _ids(self._decoded()) if id_ not in ids]:
            raise InvariantViolated(
                f"the WAL has the columns {lost} at {self.time} for table {self.table}, which was read without them. "
                "Nothing was written: they would be lost",
                table=self.table, columns=lost,
            )  # fmt: skip
        return self.rows(schema)

    def rows(self, schema: Schema, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows in a reader's columns, or some of these. What is newer than the row has its default in it, or null.

        Columns are the same by their ids. Raises SchemaMismatch where these columns do not hold what it has.
        """
        found = self._decoded()
        names = names_of(found.schema.names, _ids(found), schema)
        what = f"the WAL at {self.time} for table {self.table}"
        return conform(what, found.rename_columns(names), schema, columns, times=False)

    def _decoded(self) -> pa.Table:
        if self._rows is None:
            try:
                self._rows = unpacked(self.data)
            except Corrupt as error:
                raise Corrupt(f"a row of the WAL at {self.time} for table {self.table} does not decode") from error
        found = self._rows
        if found.nbytes > len(self.data):
            self._rows = None  # it was compressed: keeping both would take more memory than `size` says
        return found


def _ids(rows: pa.Table) -> list[str]:
    """The ids of the columns of an entry."""
    said = (rows.schema.metadata or {}).get(IDS)
    return rows.schema.names[:-1] if said is None else msgspec.json.decode(said, type=list[str])


def encoded(rows: pa.Table, schema: Schema) -> Iterator[bytes]:
    """The rows of one table in a transaction, as the WAL keeps them: some thousands of rows each.

    They say the ids of their columns, as the table's columns may have other names when they are read.
    """
    ids = [column.id for column in schema.columns]
    rows = rows.replace_schema_metadata(None if ids == schema.names else {IDS: msgspec.json.encode(ids)})
    compression: Literal["zstd"] | None = "zstd" if rows.num_rows > CHUNK_ROWS // 8 else None
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        yield packed(rows.slice(start, CHUNK_ROWS).combine_chunks(), compression)


def entries_of(updates: pa.Table) -> list[Entry]:
    """What was added among updates of the WAL, in order. What was retracted is applied, and is of no interest."""
    added = updates.filter(pa.array(integers(updates.column(DIFF)) > 0))
    columns = [added.column(name).to_pylist() for name in ("at", "table", "chunk", "rows")]
    return [Entry(*row) for row in zip(*columns, strict=True)]


class Tail:
    """The entries of a WAL with times after `start`, by table, in order. `size` is what they take, in bytes."""

    def __init__(self) -> None:
        self._by_table: dict[str, list[Entry]] = {}
        self.start = self.size = 0

    def add(self, entries: list[Entry]) -> None:
        """Add newer entries. Where there are too many then, the older ones go, and `start` moves."""
        for entry in entries:
            self._by_table.setdefault(entry.table, []).append(entry)
        self.size += sum(entry.size for entry in entries)
        if self.size > MOST_BYTES:
            self._forget_oldest()

    def begin(self, start: int) -> None:
        """Forget everything, and begin after a time."""
        self._by_table.clear()
        self.start, self.size = start, 0

    def of(self, table: str, after: int, to: int) -> list[Entry]:
        return [entry for entry in self._by_table.get(table, ()) if after < entry.time <= to]

    def tables(self) -> list[str]:
        return [table for table, entries in self._by_table.items() if entries]

    def drop(self, table: str, to: int) -> None:
        """Forget a table's entries up to a time, which is not needed any more."""
        entries = self._by_table.get(table)
        if entries and entries[0].time <= to:
            kept = [entry for entry in entries if entry.time > to]
            self.size -= sum(entry.size for entry in entries) - sum(entry.size for entry in kept)
            self._by_table[table] = kept
            if not kept:
                del self._by_table[table]

    def forget(self, to: int) -> None:
        if to > self.start:
            self.start = to
            for table in self.tables():
                self.drop(table, to)

    def _forget_oldest(self) -> None:
        newest_first = sorted((e for es in self._by_table.values() for e in es), key=lambda e: e.time, reverse=True)
        size = 0
        for entry in newest_first:
            size += entry.size
            if size > MOST_BYTES // 2:
                self.forget(entry.time)  # all rows of one time stay, or go
                return
