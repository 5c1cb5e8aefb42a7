"""Consolidation: equal (data, time) added up exactly, zeros dropped.

Sums are exact. One beyond a signed 64-bit integer either raises DiffOverflow or, where nobody asks for the number yet
(a compaction), stays as few updates as amount to it: a poisoned key never wedges the rest of its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.errors import DiffOverflow
from persist_lib.kernel.columns import Flags, Rows, array_of, integers
from persist_lib.kernel.keys import encode_cell
from persist_lib.kernel.order import Spread, adjacent_ties, columns_in_order, sort_order, take
from persist_lib.schema.schema import DIFF, Schema

OnOverflow = Literal["raise", "split"]
Diffs = npt.NDArray[np.int64]

I64_MIN, I64_MAX = -(1 << 63), (1 << 63) - 1
_LOW = np.int64(0xFFFF_FFFF)
_HALF = np.int64(32)
FEW = 4
"""Rows that are compared by their encodings, one by one: of so few, each call of numpy costs more than a row."""


def consolidate(
    schema: Schema, table: pa.Table, on_overflow: OnOverflow = "raise", spread: Spread = map
) -> pa.Table:  # fmt: skip
    """The table in canonical order and consolidated; data alone is added up where it has no `_time` column.

    `spread` is `map`, or that of a pool, which puts columns in order side by side.
    """
    if table.num_rows == 0:
        return table
    columns = columns_in_order(schema, table)
    if table.num_rows <= FEW and (found := _of_few(table, columns)) is not None:
        return found
    ties, order = adjacent_ties(columns), None
    if ties is None:
        order, ties = sort_order(columns)
    return add_up(table, order, ties, on_overflow, spread)


def _of_few(table: pa.Table, columns: Sequence[pa.Array]) -> pa.Table | None:
    """A few rows, consolidated; None where a sum is beyond 64 bits."""
    places, diffs = range(table.num_rows), table.column(DIFF).to_pylist()
    rows = [b"".join([encode_cell(column, place) for column in columns]) for place in places] if len(places) > 1 else []
    sums = dict[int, int]()
    first = 0
    for place in sorted(places, key=rows.__getitem__) if rows else places:
        first = first if sums and rows[place] == rows[first] else place
        sums[first] = sums.get(first, 0) + diffs[place]
    if any(not I64_MIN <= total <= I64_MAX for total in sums.values()):
        return None
    kept = {place: total for place, total in sums.items() if total}
    if list(kept) == list(places):
        return table
    if not kept:
        return table.slice(0, 0)
    return _chosen(table, np.array(list(kept)), None, np.array(list(kept.values())), map)


def add_up(
    table: pa.Table, order: Rows | None, ties: Flags, on_overflow: OnOverflow, spread: Spread = map
) -> pa.Table:  # fmt: skip
    """Consolidate rows that are in canonical order (None: as they are), where `ties[i]` says row i equals the next."""
    diffs = integers(table.column(DIFF))
    if order is not None:
        diffs = diffs.take(order)
    if not ties.any():
        kept = None if diffs.all() else np.flatnonzero(diffs)
        return _chosen(table, order, kept, None if kept is None else diffs[kept], spread)
    starts = np.flatnonzero(np.concatenate([[True], ~ties]))
    sums, over = exact_sums(diffs, starts)
    if over:
        if on_overflow == "raise":
            raise _overflow(table, starts if order is None else order[starts], over)
        starts, sums = _split(starts, sums, over)
    nonzero = sums != 0
    return _chosen(table, order, starts[nonzero], sums[nonzero], spread)


def exact_sums(diffs: Diffs, starts: Rows) -> tuple[Diffs, dict[int, int]]:
    """The sums of the groups that begin at `starts`; exact ones, by group, for those beyond 64 bits (which are 0)."""
    most = int(np.diff(starts, append=len(diffs)).max())
    if most * max(abs(int(diffs.min())), abs(int(diffs.max()))) <= I64_MAX:
        return np.add.reduceat(diffs, starts), {}
    # Halves of 32 bits cannot overflow in groups of fewer than 2**31 updates.
    high = np.add.reduceat(diffs >> _HALF, starts)
    low = np.add.reduceat(diffs & _LOW, starts)
    carried = high + (low >> _HALF)
    fits = (carried >= -(1 << 31)) & (carried < (1 << 31))
    sums = np.where(fits, (carried << _HALF) | (low & _LOW), 0)
    over = {int(group): (int(high[group]) << 32) + int(low[group]) for group in np.flatnonzero(~fits)}
    return sums, over


def _split(starts: Rows, sums: Diffs, over: dict[int, int]) -> tuple[Rows, Diffs]:
    """Each sum beyond 64 bits as several that fit, of the same row."""
    shares = {group: _shares(total) for group, total in over.items()}
    times = np.ones(len(starts), np.int64)
    times[list(shares)] = [len(share) for share in shares.values()]
    sums = np.repeat(sums, times)
    begins = np.cumsum(times) - times
    for group, share in shares.items():
        sums[begins[group] : begins[group] + len(share)] = share
    return np.repeat(starts, times), sums


def _shares(total: int) -> list[int]:
    limit = I64_MAX if total > 0 else I64_MIN
    whole, rest = divmod(total, limit)
    return [limit] * whole + [rest] * (rest != 0)


def _overflow(table: pa.Table, rows: Rows, over: dict[int, int]) -> DiffOverflow:
    group, total = next(iter(over.items()))
    data = table.drop_columns([DIFF]).slice(int(rows[group]), 1).to_pylist()[0]
    return DiffOverflow(
        f"the diffs of {data} add up to {total}, which is beyond a signed 64-bit integer; retract some of them",
        data=data, total=total,
    )  # fmt: skip


def _chosen(
    table: pa.Table, order: Rows | None, kept: Rows | None, sums: Diffs | None, spread: Spread
) -> pa.Table:  # fmt: skip
    if kept is not None:
        order = kept if order is None else order.take(kept)
    if order is None:
        return table
    if sums is None:
        return take(table, order, spread)
    rest = take(table.drop_columns([DIFF]), order, spread)
    return rest.append_column(table.schema.field(DIFF), array_of(sums))
