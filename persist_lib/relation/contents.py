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
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.core.plan.fan_in import SHARE, row_bytes, weight
from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.trace import GROUP_ROWS
from persist_lib.kernel.columns import Rows, at_time, integers
from persist_lib.kernel.consolidate import I64_MAX, I64_MIN, add_up, consolidate
from persist_lib.kernel.keys import encode_cell
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.meeting import count_through, is_wide, met
from persist_lib.kernel.merge import WINDOW_BYTES, merge_contents
from persist_lib.kernel.order import adjacent_ties, columns_in_order
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.runs import Stored, ahead, look_up, read_groups
from persist_lib.shard.small_runs import Gathered, gather_contents, pieces

LIGHT = 2
"""The base weighs this many times what all other runs do, at least; otherwise all of them are put in order together."""


class Form(NamedTuple):
    """What pieces of runs are made to before they meet: rows of a schema, in its order, each data once in a piece.

    `columns` are those to read (None: all). Pieces are joined where the last row of one and the first row of the next
    are equal in the columns `joined`.
    """

    schema: Schema
    columns: Sequence[str] | None
    finish: Callable[[pa.Table], pa.Table]
    times: bool
    joined: Sequence[str]

    @classmethod
    def whole(cls, schema: Schema, base: Sequence[TaskInput]) -> Form:
        """All columns. Updates of several times are added up."""
        if is_one_time(base):
            return cls(schema, None, _as_it_is, False, ())
        return cls(schema, None, partial(_settle, schema), True, schema.names)


def stream(stored: Stored, inputs: Sequence[TaskInput], merge_bytes: int, pool: Executor) -> Iterator[pa.Table]:
    """The contents in key order, as tables of bounded size."""
    base, others = _apart(stored, inputs)
    found = gather_contents(stored, others, merge_bytes // SHARE, pool)()
    form = Form.whole(stored.schema, base)
    read: Iterator[pa.Table] = chain.from_iterable(stored.streams(base))
    finished = map(form.finish, read) if form.times else (table.drop_columns([TIME]) for table in read)
    tables = starmap(partial(met, stored.schema), _meetings(stored, form, finished, found, merge_bytes))
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
    if columns is not None and is_one_time(base) and not others:
        narrow = [table for run in base for table in read_groups(stored, run, columns, _as_it_is, pool, times=False)]
        if not any(map(is_wide, narrow)):
            return list(_spread(base, pool)(shown, narrow))
    form = Form.whole(stored.schema, base)
    read, found = _begun(stored, base, others, form, merge_bytes, pool)
    meetings = _meetings(stored, form, read, found, merge_bytes)
    return list(_spread(base, pool)(lambda pair: shown(met(form.schema, *pair)), meetings))


def projected_at_once(
    stored: Stored, inputs: Sequence[TaskInput], form: Form, merge_bytes: int, pool: Executor
) -> list[pa.Table] | None:
    """A projection of the contents with all key columns, in pieces. None where the changes do not fit into memory."""
    base, others = _apart(stored, inputs)
    read, found = _begun(stored, base, others, form, merge_bytes, pool)
    if found.rest:
        return None
    meetings = _meetings(stored, form, read, found, merge_bytes)
    return list(_spread(base, pool)(lambda pair: met(form.schema, *pair), meetings))


def _begun(
    stored: Stored, base: Sequence[TaskInput], others: Sequence[TaskInput], form: Form, merge_bytes: int, pool: Executor
) -> tuple[Iterator[pa.Table], Gathered]:
    narrow = None if form.schema is stored.schema else form[:3]
    found = gather_contents(stored, others, merge_bytes, pool, narrow)
    read = [read_groups(stored, run, form.columns, form.finish, pool, times=form.times) for run in base]
    return chain.from_iterable(read), found()


def _spread(base: Sequence[TaskInput], pool: Executor) -> Callable[..., Iterator[pa.Table]]:
    """`map`, in the pool if there is much to do."""
    return partial(ahead, pool) if sum(part.rows for run in base for part in run.parts) > GROUP_ROWS else map


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
    stored: Stored, form: Form, read: Iterator[pa.Table], found: Gathered, merge_bytes: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Pieces of contents in order, each with the changes up to its last row; the last piece has no rows.

    Compaction splits a sum that does not fit into 64 bits. Such a sum shows in diffs as large as they can be,
    and has to be added up again, to raise DiffOverflow if it does not fit. So from the first diff on that is large, all
    that is left is merged; and all of it where some changes do not fit into memory.
    """
    schema = form.schema
    none = empty_table(schema.contents)
    left = none if found.table is None else found.table
    must_merge = bool(found.rest) or is_wide(left)
    contents = _seamless(schema, form.joined, read)
    for piece in chain(contents, [none]):
        if must_merge or is_wide(piece):
            runs = [_timed(chain([piece], contents)), _timed(pieces(left)), *stored.streams(found.rest)]
            yield from ((window, none) for window in merge_contents(runs, schema, merge_bytes=merge_bytes))
            return
        count = count_through(schema, left, piece) if piece.num_rows else left.num_rows
        yield piece, left.slice(0, count)
        left = left.slice(count)


def _timed(contents: Iterable[pa.Table]) -> Iterator[pa.Table]:
    return (at_time(table, 0) for table in contents if table.num_rows)


def _as_it_is(table: pa.Table) -> pa.Table:
    return table


def may_be_split(table: pa.Table) -> bool:
    """Whether a diff is as large as a diff can be. Then it may be a share of a sum that did not fit."""
    extremes = pc.min_max(table.column(DIFF)).as_py()
    return extremes["min"] == I64_MIN or extremes["max"] == I64_MAX


def _settle(schema: Schema, table: pa.Table) -> pa.Table:
    data = table.drop_columns([TIME])
    ties = adjacent_ties(columns_in_order(schema, data), _may_tie(table))
    # A run is in order, so the ties are known. If it were not, `consolidate` would sort it.
    return consolidate(schema, data, "split") if ties is None else add_up(data, None, ties, "split")


def _may_tie(table: pa.Table) -> Rows | None:
    """The rows whose data can equal that of the next row; None when any row's can.

    A run is consolidated, so equal data has ascending times. A sum that was split is the exception. Its shares
    are as large as a diff can be.
    """
    if table.num_rows == 0 or may_be_split(table):
        return None
    times = integers(table.column(TIME))
    return np.flatnonzero(times[:-1] < times[1:])


def _seamless(schema: Schema, joined: Sequence[str], tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The tables that have rows, such that no two that follow one another have equal `joined` columns at their seam.

    A sum that does not fit stays split, so that it shows that it does not.
    """
    last: pa.Table | None = None
    for table in tables:
        if not table.num_rows:
            continue
        if last is None:
            last = table
        elif joined and all(
            encode_cell(last.column(name), last.num_rows - 1) == encode_cell(table.column(name), 0) for name in joined
        ):
            both = consolidate(schema, pa.concat_tables([last, table]), "split")
            last = both if both.num_rows else None
        else:
            yield last
            last = table
    if last is not None:
        yield last
