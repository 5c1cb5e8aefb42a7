"""The kernel: sorted runs become one, consolidated, in memory that does not depend on how much there is.

Every run is read ahead a little. What lies at or below the least of the runs' last buffered rows is complete: those
rows are laid end to end, ordered by one integer sort (which merges, as they come in sorted stretches), added up, and
yielded as a window. A window that comes from one run alone is not sorted at all. The last row of a window is carried
into the next, so that equal (data, time) never straddles two.

Time is advanced in the window, before it is added up: `advance_to` for a compaction to a since (the caller clamps it
to the last time of the output's bounds, or updates would leave them), `as_of` for contents. Advancing keeps the order.

And two sorted streams, cut at the same places (`pairs`): so what concerns the same key is compared, in bounded memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.kernel.columns import Rows, array_of, integers, joined, plain, plain_table
from persist_lib.kernel.consolidate import I64_MAX, I64_MIN, OnOverflow, add_up, consolidate
from persist_lib.kernel.keys import encode_cell
from persist_lib.kernel.order import adjacent_ties, columns_in_order, shared_prefix, sort_order
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, TIME_FIELD, Schema

MERGE_BYTES = 256 << 20
WINDOW_BYTES = 8 << 20  # what is merged at a time: windows that fit in the cache are merged fastest
COPIES = 8  # read ahead, laid end to end, ordered and taken: how often a window's bytes are in memory at its peak

Row = list[bytes]
Run = Iterator[pa.Table]


@runtime_checkable
class KeepsDictionaries(Protocol):
    """A run that can leave text columns as dictionaries, which are merged faster."""

    def keep_dictionaries(self) -> None:
        """Do so from the next table on."""


def merge_runs(
    runs: Sequence[Run],
    schema: Schema,
    *,
    advance_to: int | None = None,
    merge_bytes: int = MERGE_BYTES,
    window_rows: int | None = None,
    on_overflow: OnOverflow = "raise",
    dictionaries: bool = False,
) -> Iterator[pa.Table]:
    """Windows of updates in canonical order, consolidated; no (data, time) is in two of them.

    Each run yields tables of `schema.updates` that follow each other in canonical order and are consolidated. Times
    become `max(t, advance_to)`. `merge_bytes` is about the most memory to use, and `window_rows` the most rows to
    buffer. Sums beyond 64 bits raise DiffOverflow, or stay several updates ("split"). With `dictionaries`, text columns
    are left as such where the runs had them so.
    """
    windows = _Merge(schema, advance_to, on_overflow, contents=False).windows(runs, merge_bytes, window_rows)
    return windows if dictionaries else map(plain_table, windows)


def merge_contents(
    runs: Sequence[Run],
    schema: Schema,
    *,
    merge_bytes: int = MERGE_BYTES,
    window_rows: int | None = None,
) -> Iterator[pa.Table]:
    """The contents that updates add up to, in order, as windows of `schema.contents`.

    The runs hold what is at or before the as_of only. DiffOverflow when a multiplicity does not fit in 64 bits.
    """
    windows = _Merge(schema, None, "raise", contents=True).windows(runs, merge_bytes, window_rows)
    return map(plain_table, windows)


class _Merge:
    """One merge. `carry` is what the last window held back."""

    def __init__(self, schema: Schema, advance_to: int | None, on_overflow: OnOverflow, *, contents: bool) -> None:
        self._schema, self._on_overflow, self._contents, self._least = schema, on_overflow, contents, advance_to
        self._target = schema.contents if contents else schema.updates
        self._carry: pa.Table | None = None

    def windows(self, runs: Sequence[Run], merge_bytes: int, window_rows: int | None) -> Iterator[pa.Table]:
        """Window after window, none of them empty."""
        for source in runs:
            if isinstance(source, KeepsDictionaries):
                source.keep_dictionaries()
        ahead = [_Ahead(run, [*self._schema.names, TIME]) for run in runs]
        while ahead:
            quota = min(WINDOW_BYTES, merge_bytes // COPIES) // len(ahead)
            rows = quota if window_rows is None else window_rows // len(ahead)
            for run in ahead:
                run.fill(quota, rows)
            ahead = [run for run in ahead if run.rows]
            limit = min((run.last_row() for run in ahead if not run.is_done), default=None)
            window = self._window([taken for run in ahead if (taken := run.take(limit, through=True))])
            self._carry = None
            if limit is None:
                ahead = []
            elif window.num_rows:
                window, self._carry = hold_back(window)
            if window.num_rows:
                yield self._checked(window)

    def _window(self, taken: list[list[pa.Table]]) -> pa.Table:
        tables = [self._advanced(table) for pieces in taken for table in pieces]
        if self._carry is not None:
            tables.insert(0, self._carry)
        if not tables:
            return empty_table(self._target)
        table = tables[0] if len(tables) == 1 else end_to_end(tables)
        columns = columns_in_order(self._schema, table)
        order = None
        ties = adjacent_ties(columns, self._candidates(taken[0])) if len(taken) == 1 else None
        if ties is None:
            order, ties = sort_order(columns, shared_prefix([table.column(0) for table in tables]))
        # SUBTLE: never "raise" here. What a window carries into the next may yet be retracted there.
        return add_up(table, order, ties, "split")

    def _checked(self, window: pa.Table) -> pa.Table:
        """The window, which is final now; DiffOverflow if a sum had to be split and that is not wanted."""
        if self._on_overflow == "raise":
            diffs = integers(window.column(DIFF))
            if diffs.min() == I64_MIN or diffs.max() == I64_MAX:
                consolidate(self._schema, window, "raise")
        return window

    def _candidates(self, pieces: list[pa.Table]) -> Rows | None:
        """Which rows of one run (behind the carry) can equal the row after them; None for any.

        A run is consolidated, so equal data has ascending times. A sum that was split is the exception; its
        shares are as large as a diff can be. The carry can equal whatever comes first.
        """
        diffs = _joined(pieces, DIFF)
        if diffs.min() == I64_MIN or diffs.max() == I64_MAX:
            return None
        times = _joined(pieces, TIME)
        carried = np.ones(0 if self._carry is None else self._carry.num_rows, np.bool_)
        return np.flatnonzero(np.concatenate([carried, times[:-1] < times[1:]]))

    def _advanced(self, table: pa.Table) -> pa.Table:
        """The table with its times advanced, or without them where contents are wanted."""
        if self._contents:
            return table.drop_columns([TIME])
        times = integers(table.column(TIME))
        if self._least is None or times.min() >= self._least:
            return table
        return table.set_column(table.num_columns - 2, TIME_FIELD, array_of(np.maximum(times, np.uint64(self._least))))


class _Ahead:
    """A run that is read ahead: the tables that wait, and where in them a limit falls, by the columns `names`."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self._run, self._names = run, names
        self._tables: deque[pa.Table] = deque()
        self._bytes = 0
        self.rows = 0
        self.is_done = False

    def fill(self, quota_bytes: int, quota_rows: float = math.inf) -> None:
        """Read until that much waits, or at least one row, or the run ends."""
        while not self.is_done and (self.rows == 0 or (self._bytes < quota_bytes and self.rows < quota_rows)):
            self.read()

    def read(self) -> None:
        """Read one table, or reach the end."""
        table = next(self._run, None)
        if table is None:
            self.is_done = True
        elif table.num_rows:
            self._tables.append(table)
            self._count(table, 1)

    def last_row(self) -> Row:
        """The last row that waits. There is one while the run is not done."""
        return _row(self._tables[-1], self._names, -1)

    def take(self, limit: Row | None, *, through: bool) -> list[pa.Table]:
        """Take what lies below the limit, or `through` it: also what is equal to it. Everything for None."""
        taken = []
        while self._tables and self._is_within(self._tables[0], limit, through):
            taken.append(self._tables.popleft())
        if self._tables and limit is not None:
            first = self._tables.popleft()
            count = _places_of(first, self._names, limit)[through]
            if count:
                taken.append(first.slice(0, count))
            self._tables.appendleft(first.slice(count))
        for table in taken:
            self._count(table, -1)
        return taken

    def _is_within(self, table: pa.Table, limit: Row | None, through: bool) -> bool:
        last = _row(table, self._names, -1)
        return limit is None or last < limit or (through and last == limit)

    def _count(self, table: pa.Table, sign: int) -> None:
        self.rows += sign * table.num_rows
        self._bytes += sign * table.nbytes


def _row(table: pa.Table, names: Sequence[str], index: int) -> Row:
    return [encode_cell(table.column(name), index) for name in names]


def _places_of(table: pa.Table, names: Sequence[str], limit: Row) -> tuple[int, int]:
    """Where the rows that are equal to the limit start and end: column by column, among those that tie so far."""
    rows, start, end = range(table.num_rows), 0, table.num_rows
    for name, cell in zip(names, limit, strict=True):
        encoded = partial(encode_cell, joined(table.column(name)))
        start, end = bisect_left(rows, cell, start, end, key=encoded), bisect_right(rows, cell, start, end, key=encoded)
        if start == end:
            break
    return start, end


def end_to_end(tables: list[pa.Table]) -> pa.Table:
    """The tables as one, every column one array. Where only some have a dictionary, none keeps it."""
    for index, name in enumerate(tables[0].schema.names):
        if len({table.schema.types[index] for table in tables}) > 1:
            tables = [_without_dictionary(table, index, name) for table in tables]
    table = pa.concat_tables(tables)
    return pa.table([joined(column) for column in table.columns], schema=table.schema)


def _without_dictionary(table: pa.Table, index: int, name: str) -> pa.Table:
    array = plain(table.column(index))
    return table.set_column(index, pa.field(name, array.type, table.schema.field(index).nullable), array)


def _joined(pieces: list[pa.Table], name: str) -> npt.NDArray[Any]:
    arrays = [integers(piece.column(name)) for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def hold_back(window: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The window without its last (data, time), and that: several updates where a sum was split."""
    names = [name for name in window.schema.names if name != DIFF]
    last = window.num_rows - 1
    row = _row(window, names, last)
    while last > 0 and _row(window, names, last - 1) == row:
        last -= 1
    return window.slice(0, last), window.slice(last)


PAIR_BYTES = 4 << 20
"""How much of each stream is read before the two are cut."""


def pairs(
    left: Iterator[pa.Table], right: Iterator[pa.Table], names: Sequence[str], empty: pa.Table,
    pair_bytes: int | None = None,
) -> Iterator[tuple[pa.Table, pa.Table]]:  # fmt: skip
    """Tables of both streams. Rows that are equal in the columns `names` are all in the same pair.

    Both streams are in canonical order, of which `names` are the leading columns, and have the columns of `empty`. No
    pair is wholly empty. Rows that are equal in `names` are held together, however many they are.
    """
    sides = (_Ahead(left, names), _Ahead(right, names))
    while True:
        for side in sides:
            side.fill(PAIR_BYTES if pair_bytes is None else pair_bytes)
        limit = min((side.last_row() for side in sides if not side.is_done), default=None)
        ours, theirs = (pa.concat_tables([empty, *side.take(limit, through=False)]) for side in sides)
        if ours.num_rows or theirs.num_rows:
            yield ours, theirs
        elif limit is not None:  # all that waits of some stream has one key
            for side in sides:
                if not side.is_done and side.last_row() == limit:
                    side.read()
        if limit is None:
            return
