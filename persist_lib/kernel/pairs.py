"""Two sorted streams, cut at the same places: so that what concerns the same key can be compared, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import pyarrow as pa

from persist_lib.kernel.columns import joined, plain
from persist_lib.kernel.keys import encode_cell

PAIR_BYTES = 4 << 20
"""How much of each stream is read before the two are cut."""

Row = list[bytes]


def pairs(
    left: Iterator[pa.Table], right: Iterator[pa.Table], names: Sequence[str], empty: pa.Table,
    pair_bytes: int | None = None,
) -> Iterator[tuple[pa.Table, pa.Table]]:  # fmt: skip
    """Tables of both streams. Rows that are equal in the columns `names` are all in the same pair.

    Both streams are in canonical order, of which `names` are the leading columns, and have the columns of `empty`. No
    pair is wholly empty. Rows that are equal in `names` are held together, however many they are.
    """
    sides = (_Side(left, names, empty), _Side(right, names, empty))
    while True:
        for side in sides:
            side.fill(PAIR_BYTES if pair_bytes is None else pair_bytes)
        limit = min((side.last() for side in sides if not side.is_done), default=None)
        taken = tuple(side.take_below(limit) for side in sides)
        if any(table.num_rows for table in taken):
            yield taken
        elif limit is not None:  # all that waits of some stream has one key
            for side in sides:
                if not side.is_done and side.last() == limit:
                    side.read()
        if limit is None:
            return


class _Side:
    """One of the streams: the tables that wait."""

    def __init__(self, tables: Iterator[pa.Table], names: Sequence[str], empty: pa.Table) -> None:
        self._tables, self._names, self._empty = tables, names, empty
        self._held: list[pa.Table] = []
        self._bytes = 0
        self.is_done = False

    def fill(self, least: int) -> None:
        """Read until that many bytes wait, or the stream ends."""
        while not self.is_done and self._bytes < least:
            self.read()

    def read(self) -> None:
        """Read one table that has rows, or find that there is none."""
        for table in self._tables:
            if table.num_rows:
                self._held.append(table)
                self._bytes += max(1, table.nbytes)
                return
        self.is_done = True

    def last(self) -> Row:
        """The last row that waits. There is one while the stream is not done."""
        return self._row(self._held[-1], -1)

    def take_below(self, limit: Row | None) -> pa.Table:
        """Take what is before the limit; everything for None."""
        taken: list[pa.Table] = []
        rest: list[pa.Table] = []
        for table in self._held:
            if rest or (limit is not None and self._row(table, -1) >= limit):
                count = 0 if rest or limit is None else self._count_below(table, limit)
                taken.append(table.slice(0, count))
                rest.append(table.slice(count))
            else:
                taken.append(table)
        self._held = [table for table in rest if table.num_rows]
        self._bytes = sum(max(1, table.nbytes) for table in self._held)
        return pa.concat_tables([self._empty, *(table for table in taken if table.num_rows)])

    def _row(self, table: pa.Table, index: int) -> Row:
        return [encode_cell(table.column(name), index) for name in self._names]

    def _count_below(self, table: pa.Table, limit: Row) -> int:
        """How many rows of a table are before the limit: column by column, among those that tie so far."""
        start, end = 0, table.num_rows
        for name, cell in zip(self._names, limit, strict=True):
            cells = _Cells(plain(table.column(name)))
            start, end = bisect_left(cells, cell, start, end), bisect_right(cells, cell, start, end)
            if start == end:
                break
        return start


class _Cells:
    """A column's encoded values, as bisect wants them."""

    def __init__(self, column: pa.Array) -> None:
        self._column = joined(column)

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> bytes:
        return encode_cell(self._column, index)
