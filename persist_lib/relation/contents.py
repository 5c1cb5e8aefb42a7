"""The contents that runs add up to as of a time: streamed in bounded memory, or as one table, on all cores.

All updates of the runs are at or before that time. The sum of each distinct data is exact; one that does not fit raises
DiffOverflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.plan.fan_in import SHARE
from persist_lib.kernel.columns import Rows, integers
from persist_lib.kernel.consolidate import I64_MAX, I64_MIN, add_up, consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.merge import Run, merge_contents
from persist_lib.kernel.order import adjacent_ties, columns_in_order
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.lookup import look_up
from persist_lib.shard.runs import Parallel, Stored, read_whole
from persist_lib.shard.small_runs import Gathered, gather_contents

SLICE_ROWS = 1 << 17
"""Rows of one part that a thread adds up at a time."""


def stream(stored: Stored, inputs: Sequence[TaskInput], merge_bytes: int, pool: Executor) -> Iterator[pa.Table]:
    """The contents in key order, as tables of bounded size."""
    if is_one_time(inputs):
        return _settled(stored.streams(inputs), stored.schema, merge_bytes)
    return _merged(stored, gather_contents(stored, inputs, merge_bytes // SHARE, pool), merge_bytes)


def at_once(
    stored: Stored,
    inputs: Sequence[TaskInput],
    columns: Sequence[str] | None,
    merge_bytes: int,
    pool: Executor,
) -> pa.Table | None:
    """The contents as one table with at least the wanted columns; None when the caller has to stream them.

    They have to be streamed when compaction split a sum. That sum has to be added up again, to raise DiffOverflow if it
    does not fit.
    """
    empty = empty_table(stored.schema.contents)
    if is_one_time(inputs):
        found = read_whole(stored, inputs, columns, lambda table, _: table, pool, times=False)
        empty = empty.select([name for name in empty.schema.names if columns is None or name in (*columns, DIFF)])
        table = pa.concat_tables([empty, *(piece.select(empty.schema.names) for piece in found)])
    elif len(inputs) == 1:
        settle = partial(_settle, stored.schema)
        table = pa.concat_tables(
            [empty, *_joined(stored.schema, read_whole(stored, inputs, None, settle, pool, times=True))]
        )
    else:
        gathered = gather_contents(stored, inputs, merge_bytes, pool)
        if gathered.rest or gathered.table is None:
            return pa.concat_tables([empty, *_merged(stored, gathered, merge_bytes)])
        table = gathered.table.drop_columns([TIME])
    return None if may_be_split(table) else table


def of_keys(
    stored: Stored, inputs: Sequence[TaskInput], keys: Keys, columns: Sequence[str] | None, pool: Executor
) -> pa.Table:
    """The contents that have one of the keys, as one table with at least the wanted columns."""
    if columns is not None and is_one_time(inputs):
        table = look_up(stored, inputs, keys, columns, pool)
        if not may_be_split(table):
            return table
    return consolidate(stored.schema, look_up(stored, inputs, keys, None, pool))


def is_one_time(inputs: Sequence[TaskInput]) -> bool:
    """Whether this is one run whose updates all have one time. Then it is consolidated, and needs no merge."""
    times = {time for run in inputs for part in run.parts for time in (part.time_lower, part.time_upper)}
    return len(inputs) <= 1 and len(times) <= 1


def _merged(stored: Stored, gathered: Gathered, merge_bytes: int) -> Run:
    """The contents of the gathered table, whose updates all have one time, and of the runs beside it."""
    runs = gathered.streams(stored)
    if gathered.table is not None and not gathered.rest:
        return _settled(runs, stored.schema, merge_bytes)
    return merge_contents(runs, stored.schema, merge_bytes=merge_bytes)


def _settled(runs: Sequence[Run], schema: Schema, merge_bytes: int) -> Run:
    """The contents of one consolidated run.

    SUBTLE: compaction splits a sum that does not fit into 64 bits. Such a sum shows in diffs as large as they can be,
    and has to be added up again, to raise DiffOverflow if it does not fit.
    """
    for run in runs:
        for table in run:
            if may_be_split(table):
                yield from merge_contents([chain([table], run)], schema, merge_bytes=merge_bytes)
                return
            yield table.drop_columns([TIME])


def may_be_split(table: pa.Table) -> bool:
    """Whether a diff is as large as a diff can be. Then it may be a share of a sum that did not fit."""
    extremes = pc.min_max(table.column(DIFF)).as_py()
    return extremes["min"] == I64_MIN or extremes["max"] == I64_MAX


def _settle(schema: Schema, table: pa.Table, parallel: Parallel) -> pa.Table:
    """The contents of a part of a consolidated run, by slices."""
    slices = [table.slice(start, SLICE_ROWS) for start in range(0, table.num_rows, SLICE_ROWS)]
    found = _joined(schema, list(parallel(partial(_settle_slice, schema), slices)))
    return pa.concat_tables(found) if found else table.slice(0, 0).drop_columns([TIME])


def _settle_slice(schema: Schema, table: pa.Table) -> pa.Table:
    data = table.drop_columns([TIME])
    ties = adjacent_ties(columns_in_order(schema, data), _may_tie(table))
    # A run is in order, so the ties are known. If it were not, `consolidate` would sort it.
    return consolidate(schema, data, "split") if ties is None else add_up(data, None, ties, "split")


def _may_tie(table: pa.Table) -> Rows | None:
    """The rows whose data can equal that of the next row; None when any row's can.

    A run is consolidated, so equal data has ascending times. SUBTLE: a sum that was split is the exception. Its shares
    are as large as a diff can be.
    """
    if table.num_rows == 0 or may_be_split(table):
        return None
    times = integers(table.column(TIME))
    return np.flatnonzero(times[:-1] < times[1:])


def _joined(schema: Schema, tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Join contents that follow one another, so that each data is there once.

    The last data of one may be the first data of the next. SUBTLE: two rows at a seam are two data, or one data whose
    sum did not fit and was split. The shares of a split sum are kept as they are, so that a reader can see the split.
    """
    found: list[pa.Table] = []
    for table in tables:
        if not table.num_rows:
            continue
        if not found:
            found.append(table)
            continue
        last = found.pop()
        end = last.num_rows - 1
        seam = consolidate(schema, pa.concat_tables([last.slice(end), table.slice(0, 1)]), "split")
        if seam.num_rows == 2 and not may_be_split(seam):
            found += [last, table]
        else:
            met = (last.slice(0, end), pa.concat_tables([seam, table.slice(1)]))
            found += [piece for piece in met if piece.num_rows]
    return found
