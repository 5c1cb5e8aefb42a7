"""Rows as often as they are there: contents, which have each distinct row once with `_diff`, as a bag of rows.

This comes last, after all sums over runs, shards and tails, and after filter and projection: runs hold +1 and -1 of one
row. Where nothing is negative, a projection that is added up and then repeated is the same bag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import Rows, integers
from persist_lib.kernel.consolidate import I64_MAX
from persist_lib.kernel.order import take
from persist_lib.schema.schema import DIFF

BATCH_ROWS = 1 << 16
"""The most rows of a table that has repeated ones."""
MOST_ROWS = 10**8
"""The most rows that are built whole, in memory. Streams have no limit."""


def repeated(tables: Iterable[pa.Table], what: str) -> Iterator[pa.Table]:
    """Each row of consolidated tables as often as its `_diff` says, without `_diff`, in tables of bounded size.

    Raises InvalidUsage that names a row with a negative `_diff`; `what` names the contents for it.
    """
    for table in tables:
        if _is_bag(table):
            yield table.drop_columns([DIFF])
            continue
        diffs = integers(table.column(DIFF))
        check_rows(table, diffs, what)
        yield from _repeated(table.drop_columns([DIFF]), diffs)


def built(table: pa.Table, what: str) -> pa.Table:
    """The same as one table. Raises InvalidUsage, before it is built, if it were more than `MOST_ROWS` rows."""
    data = table.drop_columns([DIFF])
    if data.num_columns and _is_bag(table):
        check_count(table.num_rows, what)
        return data
    diffs = integers(table.column(DIFF))
    check_rows(table, diffs, what)
    check_count(total(diffs), what)
    if not data.num_columns:
        return blank(total(diffs))
    return pa.concat_tables([data.slice(0, 0), *_repeated(data, diffs)])


def places(diffs: Rows, size: int = BATCH_ROWS) -> Iterator[Rows]:
    """The place of each row as often as its diff says, `size` at a time. No diff is negative; their sum fits in i64."""
    ends = np.cumsum(diffs)
    for start in range(0, int(ends[-1]) if len(ends) else 0, size):
        yield np.searchsorted(ends, np.arange(start, min(start + size, int(ends[-1]))), side="right")


def total(diffs: Rows) -> int:
    """The exact sum."""
    return (int((diffs >> 32).sum()) << 32) + int((diffs & 0xFFFF_FFFF).sum())


def _is_bag(table: pa.Table) -> bool:
    """Whether each row is there once. It looks at each chunk where it is, as most contents are so, in many chunks."""
    extremes = pc.min_max(table.column(DIFF)).as_py()
    return bool(extremes["min"] == 1 == extremes["max"])


def is_once(diffs: Rows) -> bool:
    """Whether each row is there once."""
    return not diffs.size or bool(diffs.min() == 1 == diffs.max())


def check_rows(table: pa.Table, diffs: Rows, what: str) -> None:
    """Raise InvalidUsage that names a row with a negative multiplicity, if there is one."""
    if diffs.size and diffs.min() < 0:
        at = int(diffs.argmin())
        row, diff = table.slice(at, 1).drop_columns([DIFF]).to_pylist()[0], int(diffs[at])
        raise InvalidUsage(
            f"{what} has the row {row} {diff} times, so it has no rows to give: more was taken away than was there. "
            "Read it with diff=True, which gives each distinct row once with its multiplicity _diff",
            problem="negative multiplicity", row=row, value=diff,
        )  # fmt: skip


def check_count(count: int, what: str) -> None:
    """Raise InvalidUsage for more rows than are built whole."""
    if count > MOST_ROWS:
        raise InvalidUsage(
            f"{what} has {count:,} rows, and at most {MOST_ROWS:,} are built in memory. Read it with diff=True, which "
            "gives each distinct row once with its multiplicity _diff, or as a stream, by batches()",
            problem="too many", rows=count, most_rows=MOST_ROWS,
        )  # fmt: skip


def blank(rows: int) -> pa.Table:
    """A table of so many rows without columns."""
    return pa.table({DIFF: pa.nulls(rows, pa.int8())}).select([])


def _repeated(data: pa.Table, diffs: Rows) -> Iterator[pa.Table]:
    if is_once(diffs):
        yield data
    elif total(diffs) > I64_MAX:
        for row in range(data.num_rows):
            yield from _repeated(data.slice(row, 1), diffs[row : row + 1])
    else:
        for chosen in places(diffs):
            first, last = int(chosen[0]), int(chosen[-1])  # all chunks would be joined for each of the pieces
            rows = take(data.slice(first, last - first + 1), chosen - first)
            yield rows if data.num_columns else blank(len(chosen))
