"""The difference between what a collection was and what it is, as updates at one time: in one pass over both.

All shards of both sides come in key order, and are merged as runs of updates: the old rows retracted, the new ones
added. So it takes bounded memory, however large the renditions are and however little they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from persist_lib.errors import DiffOverflow
from persist_lib.kernel.columns import array_of, at_time, integers
from persist_lib.kernel.consolidate import I64_MIN
from persist_lib.kernel.merge import merge_runs
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema


def difference(
    schema: Schema, old: Sequence[Iterator[pa.Table]], new: Sequence[Iterator[pa.Table]], time: int, merge_bytes: int
) -> Iterator[pa.Table]:
    """The updates at `time` that make the contents `new` of the contents `old`, in order: tables of `schema.updates`.

    Both sides are tables of `schema.contents`, each run in key order.
    """
    runs = [_timed(retracted(run), time) for run in old] + [_timed(run, time) for run in new]
    return merge_runs(runs, schema, merge_bytes=merge_bytes)


def retracted(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows with their diffs turned around."""
    for table in tables:
        diffs = integers(table.column(DIFF))
        if diffs.size and diffs.min() == I64_MIN:
            raise DiffOverflow(
                f"a row has the multiplicity {I64_MIN}, and no one update can retract that", total=I64_MIN
            )
        yield table.set_column(table.schema.get_field_index(DIFF), DIFF_FIELD, array_of(np.negative(diffs)))


def _timed(tables: Iterator[pa.Table], time: int) -> Iterator[pa.Table]:
    return (at_time(table, time) for table in tables)
