"""Looking up keys: the updates that have one of them, out of the parts and row groups that can hold one.

A part is left out by its bounds in the state, a row group by its bounds in the part's own metadata. Of the other row
groups the key columns are read first, and the rest only where a key was found. What is in memory is a row group for
each thread, and the updates that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.state import Part
from persist_lib.format.digest import CHUNK
from persist_lib.format.parquet import PartFile
from persist_lib.format.parts import decode_inline, open_part, within
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.kernel.columns import Rows, plain_table
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.order import Spread, take
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME
from persist_lib.shard.runs import Stored, shares, source_of

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
        data = source.fetch(0, part.size)
        file = open_part(
            source.key,
            data,
            part.digests,
            stored.schema,
            columns=columns,
            times=times,
            at=part.at,
            dictionaries=repeats,
        )
        found = find_rows(file, keys, None, parallel)
    else:
        reader = ChunkedReader(source.key, source.size, source.digests, source.fetch, parallel=parallel or map)
        file = PartFile(source.key, reader, stored.schema, columns, times=times, at=part.at, dictionaries=repeats)
        found = find_rows(file, keys, reader.prefetch, parallel)
    found = within(found, source.time_lower, source.time_upper)
    return found.drop_columns([TIME]) if TIME in found.schema.names else found
