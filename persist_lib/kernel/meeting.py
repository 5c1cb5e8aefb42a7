"""Large contents and few changes to them: only what meets is looked at, and nothing but the changes was sorted.

The unit is the data, key and value together. A row of the contents whose data no change has stays as it is. A change
finds its data by search, or else the place where it belongs. Stretches without a change are slices of the contents.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import Flags, Rows, array_of, integers
from persist_lib.kernel.keys import encode_data, search
from persist_lib.kernel.order import columns_in_order, take
from persist_lib.kernel.search import equal_ranges
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema

STRETCH = 8192
"""Rows without a change that are worth a slice. Shorter stretches are copied with the changes around them."""
WIDE = 1 << 62


def met(schema: Schema, contents: pa.Table, changes: pa.Table) -> pa.Table:
    """What both add up to, in canonical order; in pieces.

    Both are in canonical order and have each data once, with no diff of zero. None of their diffs `is_wide`.
    """
    if not changes.num_rows:
        return contents
    if not contents.num_rows:
        return changes
    sides = [columns_in_order(schema, side) for side in (contents, changes)]
    low, high = equal_ranges(sides[0], sides[1], len(schema.key))
    there = low < high
    sums = integers(changes.column(DIFF)).copy()
    sums[there] += integers(contents.column(DIFF))[low[there]]
    changes = changes.set_column(changes.num_columns - 1, DIFF_FIELD, array_of(sums))
    pieces, done = [], 0
    for first, end in _together(low):
        start, stop = int(low[first]), int(high[end - 1])
        pieces.append(contents.slice(done, start - done))
        some = slice(first, end)
        around, at = contents.slice(start, stop - start), low[some] - start
        pieces.append(_laid(around, changes.slice(first, end - first), at, there[some], sums[some] != 0))
        done = stop
    pieces.append(contents.slice(done))
    return pa.concat_tables([piece for piece in pieces if piece.num_rows] or pieces[:1])


def count_through(schema: Schema, changes: pa.Table, contents: pa.Table) -> int:
    """How many of the changes belong before the last row of the contents, or are of its data."""
    # What follows in an encoding starts with 00 or 01, so that nothing of this data is beyond FF.
    return search(schema, changes, encode_data(schema, contents, contents.num_rows - 1) + b"\xff")


def is_wide(table: pa.Table) -> bool:
    """Whether a diff is so large that the sum of two like it may not fit, or that it may be a share of a split sum."""
    extremes = pc.min_max(table.column(DIFF)).as_py()
    return table.num_rows > 0 and not -WIDE < extremes["min"] <= extremes["max"] < WIDE


def _together(places: Rows) -> Iterator[tuple[int, int]]:
    """Ranges of the changes between which there is a stretch without one."""
    edges = np.flatnonzero(np.diff(places) > STRETCH) + 1
    return zip([0, *edges.tolist()], [*edges.tolist(), len(places)], strict=True)


def _laid(contents: pa.Table, changes: pa.Table, at: Rows, there: Flags, left: Flags) -> pa.Table:
    """The contents, without the rows that a change is `there` for; before these places what is `left` of changes."""
    if not contents.num_rows:
        return changes
    count, gone = contents.num_rows, at[there]
    kept = np.ones(count, np.bool_)
    kept[gone] = False
    places = at[left] - np.searchsorted(gone, at[left])  # among the rows that are kept
    order = np.insert(np.flatnonzero(kept), places, count + np.flatnonzero(left))
    return take(pa.concat_tables([contents, changes]), order)
