"""Where the bytes of runs lie among the keys: what is needed to cut a request or a snapshot into even key ranges.

Each run may span all keys, so parts' bounds alone say little: a dozen appends of a few parts each all start at about
the same key. Large parts are looked into, a bounded number of them, and the others are taken to be like these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

from persist_lib.core.plan.clusters import By, ends
from persist_lib.core.plan.cutting import Stretch
from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import Part
from persist_lib.format.parquet import PartFile, inner_keys
from persist_lib.format.parts import StoredPart, decode_inline
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import integers
from persist_lib.location.api import Blob
from persist_lib.schema.schema import Schema
from persist_lib.shard.runs import Stored, source_of

MOST_LOOKS = 64
"""Parts that are looked into, each at the price of reading its last chunk."""
MOST_SAMPLED, VALUES = 32, 256
"""Runs of which some values are looked at, and how many of each."""
FEW_GROUPS = 32
"""A part of an earlier release shows nothing but its row groups. If it has at most so many, all its keys are read."""


class Within(NamedTuple):
    """How to cut between updates of one key. Those of the same data up to the time `settled` stay together.

    `schema` is the one in which the updates are put in order.
    """

    schema: Schema
    settled: int


Looks = Callable[[Callable[[StoredPart], list[Stretch]], Iterable[StoredPart]], Iterator[list[Stretch]]]
"""Like `map`; an executor's map looks into several parts at once."""


def stretches(
    blob: Blob,
    shard: ShardId,
    inputs: Sequence[TaskInput],
    schemas: Sequence[Schema],
    wanted_bytes: int,
    parallel: Looks = map,
    *,
    within: Within | None = None,
) -> list[Stretch]:
    """The bytes of the runs by their keys, fine enough to be cut into ranges of about `wanted_bytes`.

    With `within`, bounds continue behind a key where many updates have that key, so that these can be cut as well.

    Raises Missing if a part is gone, and Damage if one is damaged.
    """
    # A range takes as much from each run as the others leave to it.
    grain = wanted_bytes // max(1, len(inputs))
    every = [(run, part) for run in inputs for part in run.parts]
    large = [i for i, (_, part) in enumerate(every) if part.inline is None and part.size > grain]
    worth = [i for i in large if within is not None or every[i][1].key_lower < every[i][1].key_upper]
    chosen = _sample(worth, every)
    sources = [source_of(blob, shard, every[index][1], every[index][0], schemas) for index in chosen]
    look = _look_into if within is None else partial(_look_into, within=within)
    found = list(parallel(look, sources))
    # What follows the key in a bound starts with 00 or 01, so that nothing of this key is beyond FF.
    end = b"" if within is None else b"\xff"
    whole = [
        Stretch(part.key_lower, part.key_upper + end, part.size)
        for index, (_, part) in enumerate(every)
        if index not in chosen
    ]
    return [*chain.from_iterable(found), *whole]


def sample(
    stored: Stored, inputs: Sequence[TaskInput], column: int, parallel: Callable[..., Iterator[list[int]]] = map
) -> list[tuple[int, float]]:
    """Some values of a column of integers, dates or times, as integers, each with the bytes that it stands for.

    They are from a row group of each of the heaviest runs; of lighter ones, and these may be newer, the bounds count.
    Nulls are left out.
    """
    ordered = sorted(inputs, key=lambda run: -sum(part.size for part in run.parts))
    heaviest, lighter = ordered[:MOST_SAMPLED], ordered[MOST_SAMPLED:]
    found = [*zip(heaviest, parallel(partial(_values_of, stored, column), heaviest), strict=True)]
    by = By(stored.schema.columns[column].id, stored.schema.columns[column].type)
    found += [(run, list(ends(run.parts, stored.schemas, by) or ())) for run in lighter]
    return [(one, sum(part.size for part in run.parts) / len(values)) for run, values in found for one in values]


def _values_of(stored: Stored, column: int, run: TaskInput) -> list[int]:
    """Some values of a row group in the middle of a run."""
    name = stored.schema.names[column]
    part = run.parts[len(run.parts) // 2]
    source = source_of(stored.blob, stored.shard, part, run, stored.schemas)
    if part.inline is not None:
        table = decode_inline(source.key, part.inline, source.schema, stored.schema, columns=[name])
    else:
        reader = ChunkedReader(source.key, source.size, source.digests, source.fetch)
        file = PartFile(source.key, reader, stored.schema, [name], times=False)
        table = file.read(None, None, [len(file.bounds) // 2], use_threads=False)
    values = integers(table.column(name).drop_null())
    found: list[int] = values[:: max(1, len(values) // VALUES)].tolist()
    return found


def _sample(indices: list[int], every: Sequence[tuple[TaskInput, Part]]) -> dict[int, None]:
    """At most MOST_LOOKS of the parts, in the order of the runs: the larger a part, the likelier it is one of them."""
    if len(indices) <= MOST_LOOKS:
        return dict.fromkeys(indices)
    step = sum(every[index][1].size for index in indices) / MOST_LOOKS
    chosen: dict[int, None] = {}
    seen, due = 0.0, step / 2
    for index in indices:
        seen += every[index][1].size
        if seen >= due:
            chosen[index] = None
            due += step * (1 + (seen - due) // step)
    return chosen


def _look_into(source: StoredPart, within: Within | None = None) -> list[Stretch]:
    """A part by its row groups, and these by the keys that are noted for them; in older parts by their keys."""
    reader = ChunkedReader(source.key, source.size, source.digests, source.fetch)
    file = PartFile(source.key, reader, source.schema, at=source.at)
    spans = file.byte_ranges(range(len(file.bounds)))
    groups = [Stretch(*bounds, end - start) for bounds, (start, end) in zip(file.bounds, spans, strict=True)]
    noted = file.inner_keys()
    if noted is None and len(groups) > FEW_GROUPS:
        return groups
    if noted is None:
        tables = (file.read_group(index, source.schema.key_names, use_threads=False) for index in range(len(groups)))
        noted = [inner_keys(source.schema, table) for table in tables]
    starts = [[] for _ in groups] if within is None else file.starts()
    return [
        stretch
        for group, keys, rows in zip(groups, noted, starts, strict=True)
        for stretch in _finer(group, [row.cut(_settled(within, source)) for row in rows] or [group.lower, *keys])
    ]


def _settled(within: Within | None, source: StoredPart) -> int | None:
    """Up to which time updates of the same data stay together: always, where a column was added since."""
    return within.settled if within is not None and source.schema == within.schema else MAX_TIME


def _finer(group: Stretch, starts: list[bytes]) -> Iterator[Stretch]:
    """A row group, cut where rows start that lie at even distances in it."""
    for lower, upper in pairwise([*starts, group.upper]):
        yield Stretch(lower, max(lower, upper), group.size // len(starts))
