"""Runs of a trace as streams of updates: opened from Blob, cut to a key range, filtered to their registered bounds.

Snapshots, listeners, splits in other processes and merge tasks all read through this module.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain, count, islice
from typing import NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums
from persist_lib.errors import Missing
from persist_lib.format.descriptions import add_up
from persist_lib.format.digest import CHUNK
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import ALONE_ROWS, BATCH_ROWS, StoredPart, decode_inline, open_part, open_run, within
from persist_lib.format.paths import blob_key
from persist_lib.format.predicate import Where
from persist_lib.format.range_reader import ChunkedReader, Map
from persist_lib.format.value_bounds import condition_of
from persist_lib.ids import ShardId
from persist_lib.kernel.keys import may_reach
from persist_lib.location.api import Blob
from persist_lib.location.wrap import chunk_cache
from persist_lib.schema.evolution import has_ids_of, named_as, number_of
from persist_lib.schema.schema import TIME, Schema

A = TypeVar("A")
B = TypeVar("B")
AHEAD = 4
"""Parts, and row groups, that are read ahead."""
TOGETHER = 64
"""What is inline that one thread decodes: handing a single row to another thread costs more than decoding it."""
SMALL_BYTES = 1 << 16
FEW = 16
"""How many objects of at most so many bytes one thread reads, if all threads have two such shares at least."""


def inputs_of(batches: Iterable[Batch], lower: int = 0, upper: int | None = None) -> tuple[TaskInput, ...]:
    """The runs of these batches, restricted to times in `[lower, upper)` (None: no bound)."""
    found = list[TaskInput]()
    for batch in batches:
        first, end = batch.lower.time or 0, batch.upper.time
        first = first if first > lower else lower
        end = end if upper is None or (end is not None and end < upper) else upper
        runs = (batch.parts,) if len(batch.runs) == 1 else batch.run_parts()
        found += [TaskInput(run, first, end) for run in runs]
    return tuple(found)


def overlapping(inputs: Sequence[TaskInput], key_lower: bytes | None, key_upper: bytes | None) -> list[TaskInput]:
    """The same runs without the parts that can hold no update in the key range and in the run's times."""
    kept = []
    for run in inputs:
        if len(run.parts) == 1:  # most runs, of a shard of small appends
            if _may_hold(run.parts[0], run, key_lower, key_upper):
                kept.append(run)
            continue
        # The parts of a run are in the order of their keys, so that a large run need not be looked through.
        first, end = 0, len(run.parts)
        if key_lower is not None:
            first = bisect_left(run.parts, True, key=lambda part: may_reach(part.key_upper, key_lower))
        if key_upper is not None:
            end = bisect_left(run.parts, key_upper, key=lambda part: part.key_lower)
        parts = tuple(part for part in run.parts[first:end] if _may_hold(part, run, key_lower, key_upper))
        if parts:
            kept.append(TaskInput(parts, run.lower, run.upper))
    return kept


def may_keep(
    where: Where | None, inputs: Sequence[TaskInput], schemas: Sequence[Schema], schema: Schema
) -> list[TaskInput]:
    """The same runs without the parts in which, by what the state says of them, no row is one that a filter keeps.

    `schemas` are the shard's, `schema` is the one in which the filter names columns. Nothing is read.
    """
    if where is None or not where.names:
        return list(inputs)
    wanted = newest_schema(schema, schemas, inputs)
    known = [
        None if part.inline is not None else condition_of(part, schemas[part.schema], wanted, where.names)
        for run in inputs
        for part in run.parts
    ]
    if all(condition is None for condition in known):
        return list(inputs)
    kept, places = set(where.holding(known, wanted.data)), count()
    left = [tuple(part for part in run.parts if next(places) in kept) for run in inputs]
    return [TaskInput(parts, run.lower, run.upper) for run, parts in zip(inputs, left, strict=True) if parts]


def newest_schema(schema: Schema, schemas: Sequence[Schema], inputs: Iterable[TaskInput]) -> Schema:
    """The reader's schema, or the newest of the parts if that is newer, with the reader's names and types.

    `schemas` are the shard's, oldest first. What it has more than the reader's is to be left out of what is read.
    """
    newest = max((part.schema for run in inputs for part in run.parts), default=0)
    own = number_of(schema, schemas) if has_ids_of(schema, schemas) else len(schemas) - 1
    if own >= newest and schema == schemas[own]:
        return schema
    return named_as(schemas[max(own, newest)], schema)


def open_runs(
    blob: Blob,
    shard: ShardId,
    inputs: Sequence[TaskInput],
    schemas: Sequence[Schema],
    schema: Schema,
    key_lower: bytes | None = None,
    key_upper: bytes | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: Where | None = None,
    batch_rows: int = BATCH_ROWS,
) -> list[Iterator[pa.Table]]:
    """One stream of sorted updates for each run. Nothing is fetched before it is asked for."""
    return [
        open_run(
            [source_of(blob, shard, part, run, schemas) for part in run.parts],
            schema, key_lower=key_lower, key_upper=key_upper, columns=columns, where=where, batch_rows=batch_rows,
        )
        for run in overlapping(inputs, key_lower, key_upper)
    ]  # fmt: skip


class Stored(NamedTuple):
    """Where runs are stored, the schemas of their parts, the schema to read them in, and which rows are wanted.

    `where` leaves out rows that are not wanted as far as they are easily told; it is not exact.
    """

    blob: Blob
    shard: ShardId
    schemas: Sequence[Schema]
    schema: Schema
    key_lower: bytes | None = None
    key_upper: bytes | None = None
    where: Where | None = None

    def is_unbounded(self) -> bool:
        return self.key_lower is None and self.key_upper is None and self.where is None

    def streams(self, inputs: Sequence[TaskInput], columns: Sequence[str] | None = None) -> list[Iterator[pa.Table]]:
        """One stream for each run, of these columns (None: all) with `_time` and `_diff`."""
        return open_runs(
            self.blob, self.shard, inputs, self.schemas, self.schema, self.key_lower, self.key_upper,
            columns=columns, where=self.where, batch_rows=ALONE_ROWS if len(inputs) == 1 else BATCH_ROWS,
        )  # fmt: skip

    def sums(self, inputs: Sequence[TaskInput]) -> Sums:
        """The sums over the updates, read in bounded memory. Raises Damage if a part is not what was written."""
        return add_up(self.schema, chain.from_iterable(self.streams(inputs)))


def read_groups(
    stored: Stored,
    run: TaskInput,
    columns: Sequence[str] | None,
    finish: Callable[[pa.Table], pa.Table],
    pool: Executor,
    *,
    times: bool,
) -> Iterator[pa.Table]:
    """The wanted updates of a run in order, a row group at a time, each as `finish` makes it.

    Parts are fetched and row groups decoded and finished in the pool, a few of them ahead.
    """

    def opened(part: Part, parallel: Map = map) -> list[Callable[[], pa.Table]]:
        return _groups(stored, run, part, columns, parallel, times=times)

    # The pool's `map` is not for the pool's threads, which would wait for each other.
    alone, threads = len(run.parts) == 1, getattr(pool, "width", AHEAD)
    parts = iter([opened(run.parts[0], pool.map)]) if alone else ahead(pool, opened, run.parts, threads)
    return ahead(pool, lambda group: finish(group()), chain.from_iterable(parts), threads)


def read_part(
    stored: Stored, run: TaskInput, part: Part, columns: Sequence[str] | None = None, *, times: bool
) -> pa.Table:
    """A part's wanted updates, verified, as a table. It always has `_diff`, and `_time` if `times` is true."""
    [whole] = _groups(stored, run, part, columns, map, times=times, is_cut=False)
    return whole()


def ahead(pool: Executor, call: Callable[[A], B], items: Iterable[A], most: int = AHEAD) -> Iterator[B]:
    """What the calls give, in order. They are made in the pool, `most` of them ahead, which bounds memory.

    The first ones are begun at once.
    """
    left = iter(items)
    waiting = deque(pool.submit(call, item) for item in islice(left, most))

    def results() -> Iterator[B]:
        while waiting:
            done = waiting.popleft()
            waiting.extend(pool.submit(call, item) for item in islice(left, 1))
            yield done.result()

    return results()


def shares(items: Iterable[A], parts_of: Callable[[A], Sequence[Part]], pool: Executor) -> list[list[A]]:
    """The items as they are handed out to threads: what is inline by many, small objects by a few, others one by one.

    An item is read from these parts.
    """
    inline, small, large = list[A](), list[A](), list[A]()
    for item in items:
        stored = sum([part.size for part in parts_of(item) if part.inline is None])
        (large if stored > SMALL_BYTES else small if stored else inline).append(item)
    few = max(1, min(FEW, len(small) // (2 * int(getattr(pool, "width", AHEAD)))))
    handed = ((inline, TOGETHER), (small, few), (large, 1))
    return [some[start : start + most] for some, most in handed for start in range(0, len(some), most)]


def _groups(
    stored: Stored, run: TaskInput, part: Part, columns: Sequence[str] | None, parallel: Map, *, times: bool,
    is_cut: bool = True,
) -> list[Callable[[], pa.Table]]:  # fmt: skip
    """How to decode the wanted updates of a part, which is fetched and verified: by row groups, or (uncut) at once.

    Of a large part that is not wanted whole, only the chunks around the wanted row groups and columns are fetched.
    """
    source, lo, hi = source_of(stored.blob, stored.shard, part, run, stored.schemas), stored.key_lower, stored.key_upper
    needed = times or source.time_lower is not None or source.time_upper is not None

    def wanted(table: pa.Table) -> pa.Table:
        table = within(table, source.time_lower, source.time_upper)
        if stored.where is not None:
            table = stored.where.roughly(table)
        return table if times or TIME not in table.schema.names else table.drop_columns([TIME])

    if part.inline is not None:
        inline = decode_inline(
            source.key, part.inline, source.schema, stored.schema, columns=columns, lo=lo, hi=hi, at=part.at
        )
        return [lambda: wanted(inline)]
    if part.size > CHUNK and not (stored.is_unbounded() and columns is None):
        reader = ChunkedReader(source.key, source.size, source.digests, source.fetch, parallel=parallel)
        file = PartFile(source.key, reader, stored.schema, columns, times=needed, where=stored.where, at=source.at)
        reader.prefetch(file.wanted_ranges(lo, hi))
    else:
        data = source.fetch(0, part.size)
        file = open_part(
            source.key, data, part.digests, stored.schema,
            columns=columns, times=needed, where=stored.where, at=part.at,
        )  # fmt: skip
    groups = file.groups(lo, hi)
    if not is_cut or len(groups) < 2:
        return [lambda: wanted(file.read(lo, hi, use_threads=is_cut))]
    return [partial(lambda group: wanted(file.read(lo, hi, [group], use_threads=False)), group) for group in groups]


def _may_hold(part: Part, run: TaskInput, key_lower: bytes | None, key_upper: bytes | None) -> bool:
    if part.time_upper < run.lower or (run.upper is not None and part.time_lower >= run.upper):
        return False
    # SUBTLE: a bound that was cut short may be below a longer key that it is a prefix of, and a bound of the range may
    # continue behind the key. A part's `key_upper` is inclusive.
    return may_reach(part.key_upper, key_lower) and (key_upper is None or part.key_lower < key_upper)


def source_of(blob: Blob, shard: ShardId, part: Part, run: TaskInput, schemas: Sequence[Schema]) -> StoredPart:
    """How to fetch a part, and which of its updates count."""
    key = blob_key(shard, part.key)

    def fetch(start: int, end: int) -> bytes:
        if part.inline is not None:
            return part.inline[start:end]
        data = chunk_cache.fetch(blob, key, start, end, part.size, part.digests)
        if data is None:
            raise Missing(
                f"{key} is not there, though a state refers to it. "
                "If a reader's lease ended, history was given up: open a new handle. "
                "Otherwise restore the object from a copy",
                key=key, shard=shard,
            )  # fmt: skip
        return data

    lower = run.lower if part.time_lower < run.lower else None
    upper = run.upper if run.upper is not None and part.time_upper >= run.upper else None
    return StoredPart(
        key, part.size, part.digests, schemas[part.schema], lower, upper, fetch, part.inline is not None, part.at
    )


def read_updates(
    blob: Blob,
    shard: ShardId,
    batches: Iterable[Batch],
    lower: int,
    upper: int | None,
    schemas: Sequence[Schema],
    schema: Schema,
) -> Iterator[pa.Table]:
    """The updates of these batches with times in `[lower, upper)`, as they are: run after run."""
    inputs = inputs_of(batches, lower, upper)
    for run in open_runs(blob, shard, inputs, schemas, schema):
        yield from run
