"""What writers of one collection have to agree on: for each time, the sum of the diffs and the fingerprint.

Both are sums modulo 2**64, so that they can be added up in any order, and updates that cancel out count as none. The
same updates in other batches, however they are cut and whoever wrote them, give the same sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.kernel.fingerprint import diffs_of, hash_rows
from persist_lib.schema.schema import TIME, Schema

U64 = npt.NDArray[np.uint64]


class TimeSums(NamedTuple):
    """For each time that has updates, ascending: their diff sum and their fingerprint, modulo 2**64."""

    times: U64
    diffs: U64
    prints: U64

    def between(self, lower: int, upper: int) -> TimeSums:
        """Those of the times in `[lower, upper)`."""
        first, last = np.searchsorted(self.times, np.array([lower, upper], np.uint64))
        return TimeSums(*(column[first:last] for column in self))

    def first_difference(self, other: TimeSums) -> int | None:
        """The earliest time at which both are not the same; None if there is none."""
        both = added([self, TimeSums(other.times, np.negative(other.diffs), np.negative(other.prints))])
        return int(both.times[0]) if len(both.times) else None


NONE = TimeSums(*(np.empty(0, np.uint64) for _ in range(3)))


def sums_of(schema: Schema, tables: Iterable[pa.Table]) -> TimeSums:
    """The sums by time over the updates of these tables."""
    total = NONE
    for table in tables:
        if table.num_rows:
            diffs = diffs_of(table)
            prints = hash_rows(schema, table) * diffs
            times = table.column(TIME).to_numpy().astype(np.uint64, copy=False)
            total = added([total, TimeSums(times, diffs, prints)])
    return total


def added(sums: Iterable[TimeSums]) -> TimeSums:
    """All of them together; times at which they cancel out are left out."""
    columns = [np.concatenate(column) for column in zip(*sums, strict=True)]
    times, order = np.unique(columns[0], return_inverse=True)
    totals = []
    for values in columns[1:]:
        total = np.zeros(len(times), np.uint64)
        np.add.at(total, order, values)
        totals.append(total)
    kept = (totals[0] != 0) | (totals[1] != 0)
    return TimeSums(times[kept], totals[0][kept], totals[1][kept])
