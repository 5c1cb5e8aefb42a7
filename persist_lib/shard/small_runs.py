"""Small runs, gathered: fetched and decoded in parallel, laid end to end, and put in order by one sort.

Streaming a run costs something for every window, however little of the run is in it. So hundreds of small runs cost far
more than their updates do. The runs that fit into memory together are therefore read whole, and become one run. Runs
that are too large for that are streamed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.core.plan.fan_in import SMALL, row_bytes, weight
from persist_lib.core.plan.requests import TaskInput
from persist_lib.format.digest import CHUNK
from persist_lib.kernel.columns import array_of, integers, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keys import encode_data, search
from persist_lib.schema.schema import TIME, TIME_FIELD, Schema
from persist_lib.shard.runs import Stored, ahead, read_part, shares

MOST_BYTES = 1 << 30
"""Arrow's text columns have offsets of 32 bits; this stays well below."""
PIECE_BYTES = 1 << 20
SHARE_ROWS, MOST_SHARES = 1 << 16, 4
"""The fewest rows that are worth a share of the keys for one core, and the most shares: each is found by search."""
LONG_ROWS = 1 << 13
"""Rows that a run has, on average, where runs are cut into shares. Of many short ones the searches take longer."""
FEW_ROWS = 1 << 13
"""A run whose parts have so few rows is not filtered by itself: of hundreds of them that costs more than the rest."""
AHEAD = 8
"""Runs that are read ahead while one is waited for, or as many as the pool has threads."""


class Gathered(NamedTuple):
    """One run in memory, consolidated; and the runs that are not part of it."""

    table: pa.Table | None
    rest: list[TaskInput]

    def streams(self, stored: Stored) -> list[Iterator[pa.Table]]:
        runs = stored.streams(self.rest)
        return runs if self.table is None else [pieces(self.table), *runs]


def gather(
    stored: Stored, inputs: Sequence[TaskInput], advance_to: int | None, limit_bytes: int, pool: Executor
) -> Gathered:
    """The smallest of the runs as one table of `stored.schema.updates`, as many as `limit_bytes` hold.

    Times become `max(t, advance_to)`. A sum beyond 64 bits stays several updates. A single run is not gathered.
    """

    def read(run: TaskInput) -> pa.Table:
        return advanced(_read_run(stored, run, None, times=True), advance_to)

    found = _gather(stored, stored.schema, inputs, limit_bytes, pool, read, fewest=2)()
    return found if found.table is None else found._replace(table=_in_one_piece(found.table))


Narrow = tuple[Schema, Sequence[str] | None, Callable[[pa.Table], pa.Table]]
"""Some columns that are gathered, as rows of another schema: that, the columns to read, and what makes the rows."""


def gather_contents(
    stored: Stored, inputs: Sequence[TaskInput], limit_bytes: int, pool: Executor, narrow: Narrow | None = None
) -> Callable[[], Gathered]:
    """The same for contents as of a time that no update is after, as `schema.contents`, in a few pieces.

    A single run is gathered, too. Reading is begun; the answer waits for it.
    """

    schema, columns, finish = narrow or (stored.schema, None, None)

    def read(run: TaskInput) -> pa.Table:
        table = _read_run(stored, run, columns, times=False)
        return table if finish is None else finish(table)

    return _gather(stored, schema, inputs, limit_bytes, pool, read, fewest=1)


def _gather(
    stored: Stored, schema: Schema, inputs: Sequence[TaskInput], limit: int, pool: Executor,
    read: Callable[[TaskInput], pa.Table], fewest: int,
) -> Callable[[], Gathered]:  # fmt: skip
    chosen = _chosen(stored, inputs, limit := min(limit, MOST_BYTES), small_only=fewest > 1)
    if len(chosen) < fewest:
        return lambda: Gathered(None, list(inputs))
    tables: dict[int, pa.Table] = {}
    held = 0
    # Not all of them, if they turn out to be larger than estimated.
    handed = takewhile(lambda _: held < limit, shares(chosen, lambda place: inputs[place].parts, pool))
    most = max(AHEAD, getattr(pool, "width", AHEAD))
    results = ahead(pool, lambda share: [(place, read(inputs[place])) for place in share], handed, most)

    def result() -> Gathered:
        nonlocal held
        for place, table in chain.from_iterable(results):
            tables[place] = table
            held += table.nbytes
        rest = [run for place, run in enumerate(inputs) if place not in tables]
        # If no two runs share keys, this is the final order already, and nothing is sorted.
        places = sorted(tables, key=lambda place: inputs[place].parts[0].key_lower)
        runs = [tables.pop(place) for place in places]
        whole = _added_up(schema, runs, pool)
        if stored.where is not None and schema is stored.schema:
            whole = stored.where.roughly(whole)
        return Gathered(whole, rest)

    return result


def _added_up(schema: Schema, runs: Sequence[pa.Table], pool: Executor) -> pa.Table:
    """Runs, each in order, as one that is consolidated. Of many rows each core adds up a share of the keys."""
    rows = sum(run.num_rows for run in runs)
    shares = min(int(getattr(pool, "width", 1)), MOST_SHARES, rows // SHARE_ROWS)
    if shares < 2 or rows < len(runs) * LONG_ROWS:
        return _one_share(schema, runs)
    longest = max(runs, key=lambda run: run.num_rows)
    cuts = [encode_data(schema, longest, longest.num_rows * share // shares) for share in range(1, shares)]
    places = [[0, *(search(schema, run, cut) for cut in cuts), run.num_rows] for run in runs]

    def added_up(share: int) -> pa.Table:
        bounds = [(at[share], at[share + 1]) for at in places]
        cut = [run.slice(start, end - start) for run, (start, end) in zip(runs, bounds, strict=True)]
        return _one_share(schema, [run for run in cut if run.num_rows] or cut[:1])

    return pa.concat_tables(pool.map(added_up, range(shares)))


def _one_share(schema: Schema, runs: Sequence[pa.Table]) -> pa.Table:
    return consolidate(schema, _in_one_piece(pa.concat_tables(runs)), "split")


def _in_one_piece(table: pa.Table) -> pa.Table:
    return pa.table([joined(column) for column in table.columns], schema=table.schema)


def advanced(table: pa.Table, advance_to: int | None) -> pa.Table:
    """The table with no time before `advance_to`."""
    if advance_to is None:
        return table
    at = table.schema.get_field_index(TIME)
    return table.set_column(at, TIME_FIELD, array_of(np.maximum(integers(table.column(at)), np.uint64(advance_to))))


def pieces(table: pa.Table, piece_bytes: int = PIECE_BYTES) -> Iterator[pa.Table]:
    """The table in small pieces, like those of a streamed run."""
    rows = max(1, piece_bytes * table.num_rows // max(1, table.nbytes))
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


def _chosen(stored: Stored, inputs: Sequence[TaskInput], limit: int, *, small_only: bool) -> list[int]:
    """The places of the runs that fit together, the smallest first.

    Where not all fit, a merge (which needs times) only gathers small ones. Others it streams in less memory.
    """
    each = row_bytes(stored.schema)
    weights = [weight(run.parts, each) for run in inputs]
    most = limit // SMALL if small_only and sum(weights) > limit else limit
    chosen: list[int] = []
    for place in sorted(range(len(inputs)), key=weights.__getitem__):
        limit -= weights[place]
        if limit < 0 or weights[place] > most:
            break
        # Of a larger part, a key range needs only some chunks.
        if stored.is_unbounded() or all(part.size <= CHUNK for part in inputs[place].parts):
            chosen.append(place)
    return chosen


def _read_run(stored: Stored, run: TaskInput, columns: Sequence[str] | None, *, times: bool) -> pa.Table:
    if all(part.rows <= FEW_ROWS and part.size <= CHUNK for part in run.parts):
        stored = stored._replace(where=None)
    tables = [read_part(stored, run, part, columns, times=times) for part in run.parts]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)
