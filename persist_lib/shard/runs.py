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

from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums
from persist_lib.errors import Missing
from persist_lib.format.descriptions import add_up
from persist_lib.format.digest import CHUNK
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import ALONE_ROWS, BATCH_ROWS, PartRun, StoredPart, decode_inline, verified, within
from persist_lib.format.paths import blob_key
from persist_lib.format.predicate import Where
from persist_lib.format.range_reader import ChunkedReader, Map
from persist_lib.format.value_bounds import condition_of
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import Rows, plain_table
from persist_lib.kernel.keys import may_reach
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import Spread, take
from persist_lib.location.api import Blob
from persist_lib.location.wrap import chunk_cache
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import has_ids_of, named_as, number_of
from persist_lib.schema.schema import TIME, Schema

A = TypeVar("A")
B = TypeVar("B")
AHEAD = 4
"""Parts, and row groups, that are read ahead, where the pool does not say how many."""
AHEAD_BYTES = 512 << 20
"""No more parts are read ahead than have this many bytes together, as stored."""
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
        """One stream of sorted updates for each run, of these columns (None: all) with `_time` and `_diff`.

        Nothing is fetched before it is asked for.
        """
        batch_rows = ALONE_ROWS if len(inputs) == 1 else BATCH_ROWS
        return [
            PartRun(
                [source_of(self.blob, self.shard, part, run, self.schemas) for part in run.parts],
                self.schema, lo=self.key_lower, hi=self.key_upper, columns=columns, where=self.where,
                batch_rows=batch_rows,
            )
            for run in overlapping(inputs, self.key_lower, self.key_upper)
        ]  # fmt: skip

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
    most = min(threads, max(1, AHEAD_BYTES // max(1, *(part.size for part in run.parts))))
    parts = iter([opened(run.parts[0], pool.map)]) if alone else ahead(pool, opened, run.parts, most)
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
        whole = verified(source.key, source.fetch(0, part.size), part.digests)
        file = PartFile(source.key, whole, stored.schema, columns, times=needed, where=stored.where, at=part.at)
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
    for run in Stored(blob, shard, schemas, schema).streams(inputs):
        yield from run


Prefetch = Callable[[Iterable[tuple[int, int]]], None]
"""Fetches byte ranges of the object at once."""


MANY_ROWS = 1 << 14
"""In a part of so many rows, text that repeats stays encoded, as few rows of a row group are wanted. Of smaller ones,
finding out what repeats costs more."""


class _Hit(NamedTuple):
    """A row group that holds some of the keys: in which rows, and the key columns of those."""

    group: int
    rows: Rows
    keys: pa.Table


def find_rows(file: PartFile, keys: Keys, prefetch: Prefetch | None = None, spread: Spread | None = None) -> pa.Table:
    """The rows of a part that have one of the keys, in canonical order, with the columns that the file was opened for.

    `prefetch` is called with the bytes that are about to be read: first the key columns of the row groups that can
    hold a key, then the other columns of those that do. `spread` is a pool's `map`, to read
    row groups in parallel.
    """
    names, rest = file.key_columns()
    chosen = [
        (group, within) for group, (least, most) in enumerate(file.bounds) if len(within := keys.between(least, most))
    ]
    # A row group that is alone is read by all columns in parallel instead.
    use_threads, each = spread is not None and len(chosen) < 2, map if spread is None or len(chosen) < 2 else spread

    def look(wanted: tuple[int, Keys]) -> _Hit:
        group, within = wanted
        table = file.read_group(group, names, use_threads=use_threads)
        rows = within.find(table)
        return _Hit(group, rows, plain_table(take(table, rows)))

    _ahead(prefetch, file, [group for group, _ in chosen], names)
    hits = [hit for hit in each(look, chosen) if hit.rows.size]
    _ahead(prefetch, file, [hit.group for hit in hits], rest)
    found = each(lambda hit: _whole(hit, file.read_group(hit.group, rest, use_threads=use_threads)), hits)
    return file.conformed(list(found))


def _ahead(prefetch: Prefetch | None, file: PartFile, groups: Sequence[int], names: Sequence[str]) -> None:
    if prefetch is not None and groups:
        prefetch(file.column_ranges(groups, names))


def _whole(hit: _Hit, rest: pa.Table) -> pa.Table:
    """The rows of a hit with all columns; `rest` has the other columns of the whole row group."""
    taken = plain_table(take(rest, hit.rows))
    fields = [*hit.keys.schema, *taken.schema]
    return pa.table([*hit.keys.columns, *taken.columns], schema=pa.schema(fields))


def holding(inputs: Sequence[TaskInput], keys: Keys) -> tuple[TaskInput, ...]:
    """The same runs without the parts that can hold none of the keys."""
    kept = []
    for run in inputs:
        parts = tuple([part for part in run.parts if keys.any_between(part.key_lower, part.key_upper)])
        if parts:
            kept.append(run if len(parts) == len(run.parts) else TaskInput(parts, run.lower, run.upper))
    return tuple(kept)


def look_up(
    stored: Stored, inputs: Sequence[TaskInput], keys: Keys, columns: Sequence[str] | None, pool: Executor
) -> pa.Table:
    """All updates that have one of the keys, without their times, run after run; each run's in canonical order.

    `columns` are the wanted ones (None: all). Key columns and `_diff` always come along.
    """
    wanted = None if columns is None else [*stored.schema.key_names, *columns]
    target = stored.schema.contents
    if wanted is not None:
        target = pa.schema([field for field in target if field.name in {*wanted, target.names[-1]}])
    pairs = [(run, part) for run in holding(inputs, keys) for part in run.parts]
    # The pool's `map` is not for the pool's threads, which would wait for each other. So the heaviest part, mostly the
    # base of all, is looked through by this thread, which gives its row groups to the pool. So is what is inline, which
    # is here already and a row or two: another thread would take longer to be told of it.
    objects = [place for place, (_, part) in enumerate(pairs) if part.inline is None]
    heaviest = max(objects, key=lambda place: pairs[place][1].rows, default=None)

    def look(places: Iterable[int], parallel: Spread | None = None) -> list[tuple[int, pa.Table]]:
        return [(place, _of_part(stored, *pairs[place], keys, wanted, parallel)) for place in places]

    light = shares((place for place in objects if place != heaviest), lambda at: pairs[at][1:], pool)
    under_way = [pool.submit(look, places) for places in light]
    found = dict(look(place for place, (_, part) in enumerate(pairs) if part.inline is not None))
    found.update([] if heaviest is None else look([heaviest], pool.map))
    found.update(chain.from_iterable(future.result() for future in under_way))
    tables = [found[place].select(target.names) for place in range(len(pairs))]
    return pa.concat_tables([empty_table(target), *tables])


def _of_part(
    stored: Stored, run: TaskInput, part: Part, keys: Keys, columns: Sequence[str] | None, parallel: Spread | None
) -> pa.Table:
    source = source_of(stored.blob, stored.shard, part, run, stored.schemas)
    times = source.time_lower is not None or source.time_upper is not None
    # Where both bounds are the same key, it is that of all rows, and one of the wanted ones, as the part was kept.
    is_whole = part.key_lower == part.key_upper
    keys = keys if is_whole else keys.between(part.key_lower, part.key_upper)
    repeats = part.rows >= MANY_ROWS
    if part.inline is not None:
        table = decode_inline(source.key, part.inline, source.schema, stored.schema, columns=columns, at=part.at)
        found = table if is_whole else take(table, keys.find(table))
    elif part.size <= CHUNK:
        whole = verified(source.key, source.fetch(0, part.size), part.digests)
        file = PartFile(source.key, whole, stored.schema, columns, times=times, at=part.at, dictionaries=repeats)
        found = find_rows(file, keys, None, parallel)
    else:
        reader = ChunkedReader(source.key, source.size, source.digests, source.fetch, parallel=parallel or map)
        file = PartFile(source.key, reader, stored.schema, columns, times=times, at=part.at, dictionaries=repeats)
        found = find_rows(file, keys, reader.prefetch, parallel)
    found = within(found, source.time_lower, source.time_upper)
    return found.drop_columns([TIME]) if TIME in found.schema.names else found
