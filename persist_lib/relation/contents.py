"""The contents that runs add up to as of a time: streamed in bounded memory, or as one table, on all cores.

All updates of the runs are at or before that time. The sum of each distinct data is exact; one that does not fit raises
DiffOverflow.

The heaviest run is the base: it is read row group by row group, and never sorted. All other runs are gathered and added
up, and each row group meets those of these changes that belong into its range (`kernel.meeting`). Runs are merged
instead where the others weigh half as much as the base or do not fit into memory, or where sums may not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain, starmap

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.plan.fan_in import SHARE, weight
from persist_lib.core.trace import GROUP_ROWS
from persist_lib.kernel.columns import Rows, at_time, integers
from persist_lib.kernel.consolidate import I64_MAX, I64_MIN, add_up, consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.meeting import count_through, is_wide, met
from persist_lib.kernel.merge import WINDOW_BYTES, merge_contents
from persist_lib.kernel.order import adjacent_ties, columns_in_order
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.schema.width import row_bytes
from persist_lib.shard.lookup import look_up
from persist_lib.shard.runs import Stored, ahead, read_groups
from persist_lib.shard.small_runs import Gathered, gather_contents, pieces

LIGHT = 2
"""The base weighs this many times what all other runs do, at least; otherwise all of them are put in order together."""


def stream(stored: Stored, inputs: Sequence[TaskInput], merge_bytes: int, pool: Executor) -> Iterator[pa.Table]:
    """The contents in key order, as tables of bounded size."""
    base, others = _apart(stored, inputs)
    found = gather_contents(stored, others, merge_bytes // SHARE, pool)
    read: Iterator[pa.Table] = chain.from_iterable(stored.streams(base))
    if is_one_time(base):
        contents: Iterator[pa.Table] = map(_timeless, read)
    else:
        contents = _seamless(stored.schema, map(partial(_settle, stored.schema), read))
    tables = starmap(partial(met, stored.schema), _meetings(stored, contents, found, merge_bytes))
    return (piece for table in tables for piece in pieces(table, WINDOW_BYTES))


def at_once(
    stored: Stored,
    inputs: Sequence[TaskInput],
    columns: Sequence[str] | None,
    shown: Callable[[pa.Table], pa.Table],
    merge_bytes: int,
    pool: Executor,
) -> list[pa.Table]:
    """The contents, with at least the wanted columns, in pieces, each as `shown` makes it."""
    base, others = _apart(stored, inputs)
    spread = partial(ahead, pool) if sum(part.rows for run in base for part in run.parts) > GROUP_ROWS else map
    is_plain = is_one_time(base)
    if columns is not None and is_plain and not others:
        narrow = [table for run in base for table in read_groups(stored, run, columns, _as_it_is, pool, times=False)]
        if not any(map(is_wide, narrow)):
            return list(spread(shown, narrow))
    finish = _as_it_is if is_plain else partial(_settle, stored.schema)
    # Begun before the others are read: the pool decodes the first row groups while these are put in order.
    read = [read_groups(stored, run, None, finish, pool, times=not is_plain) for run in base]
    contents = chain.from_iterable(read) if is_plain else _seamless(stored.schema, chain.from_iterable(read))
    found = gather_contents(stored, others, merge_bytes, pool)
    meetings = _meetings(stored, contents, found, merge_bytes)
    return list(spread(lambda pair: shown(met(stored.schema, *pair)), meetings))


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


def _apart(stored: Stored, inputs: Sequence[TaskInput]) -> tuple[Sequence[TaskInput], Sequence[TaskInput]]:
    """The base, if there is one, and the other runs."""
    each = row_bytes(stored.schema)
    weights = [weight(run.parts, each) for run in inputs]
    heaviest = max(weights, default=0)
    if heaviest < LIGHT * (sum(weights) - heaviest):
        return (), inputs
    base = weights.index(heaviest) if weights else 0
    return inputs[base : base + 1], [*inputs[:base], *inputs[base + 1 :]]


def _meetings(
    stored: Stored, contents: Iterator[pa.Table], found: Gathered, merge_bytes: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Pieces of contents in order, each with the changes up to its last row; the last piece has no rows.

    SUBTLE: compaction splits a sum that does not fit into 64 bits. Such a sum shows in diffs as large as they can be,
    and has to be added up again, to raise DiffOverflow if it does not fit. So from the first diff on that is large, all
    that is left is merged; and all of it where some changes do not fit into memory.
    """
    none = empty_table(stored.schema.contents)
    left = none if found.table is None else found.table
    must_merge = bool(found.rest) or is_wide(left)
    for piece in chain((piece for piece in contents if piece.num_rows), [none]):
        if must_merge or is_wide(piece):
            runs = [_timed(chain([piece], contents)), _timed(pieces(left)), *stored.streams(found.rest)]
            yield from ((window, none) for window in merge_contents(runs, stored.schema, merge_bytes=merge_bytes))
            return
        count = count_through(stored.schema, left, piece) if piece.num_rows else left.num_rows
        yield piece, left.slice(0, count)
        left = left.slice(count)


def _timed(contents: Iterable[pa.Table]) -> Iterator[pa.Table]:
    return (at_time(table, 0) for table in contents if table.num_rows)


def _timeless(updates: pa.Table) -> pa.Table:
    return updates.drop_columns([TIME])


def _as_it_is(table: pa.Table) -> pa.Table:
    return table


def may_be_split(table: pa.Table) -> bool:
    """Whether a diff is as large as a diff can be. Then it may be a share of a sum that did not fit."""
    extremes = pc.min_max(table.column(DIFF)).as_py()
    return extremes["min"] == I64_MIN or extremes["max"] == I64_MAX


def _settle(schema: Schema, table: pa.Table) -> pa.Table:
    """The contents of some updates of a consolidated run."""
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


def _seamless(schema: Schema, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Contents that follow one another, such that each data is there once.

    The last data of one may be the first data of the next. SUBTLE: two rows at a seam are two data, or one data whose
    sum did not fit and was split. The shares of a split sum are kept as they are, so that it shows that it was split.
    """
    last: pa.Table | None = None
    for table in tables:
        if not table.num_rows:
            continue
        if last is not None:
            end = last.num_rows - 1
            seam = consolidate(schema, pa.concat_tables([last.slice(end), table.slice(0, 1)]), "split")
            if seam.num_rows == 2 and not may_be_split(seam):
                yield last
            else:
                yield last.slice(0, end)
                table = pa.concat_tables([seam, table.slice(1)])  # noqa: PLW2901 - with what it has of the last one
        last = table if table.num_rows else None
    if last is not None:
        yield last
