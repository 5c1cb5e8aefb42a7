"""How much of what is new goes into one batch of a stream: by bytes, updates or times, whichever is reached first.

A batch ends between two times if it can. One time that is more than a batch may have, and the contents that a stream
starts with, are cut by key. Limits are about what is stored, before it is added up; each batch has something, however
small the limits are, and a cut by key is no finer than the row groups of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persist_lib.core.state import Batch, State
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import integers
from persist_lib.relation.reader import ReadHandle
from persist_lib.schema.schema import TIME
from persist_lib.shard.runs import Stored, inputs_of, newest_schema, overlapping
from persist_lib.shard.stretches import stretches
from persist_lib.spark.offsets import BEGINNING, Contents, Position, Updates
from persist_lib.spark.slices import Section

DEFAULT_BYTES = 1 << 30
FINEST = 16
"""Into so many pieces a section is cut at most, for one batch of about the limit."""


class Limits(NamedTuple):
    """The most that one batch should have: stored bytes, updates, and times at which there are updates."""

    bytes: int | None = None
    updates: int | None = None
    times: int | None = None

    def is_none(self) -> bool:
        return self == Limits()

    def allows(self, size: float, updates: int, times: int = 0) -> bool:
        return (
            (self.bytes is None or size <= self.bytes)
            and (self.updates is None or updates <= self.updates)
            and (self.times is None or times <= self.times)
        )


class Source(NamedTuple):
    """A shard, and the state of it that is read now."""

    handle: ReadHandle
    state: State


Times = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Admission:
    """Chooses where batches end. Keeps what it has counted, as a long batch is met again and again."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counted: dict[tuple[str, int, int, int], tuple[int, Times, Numbers]] = {}

    def next(self, position: Position, sources: Sequence[Source], target: Antichain) -> Position:
        """Where the batch after `position` ends; `position` itself where there is nothing new before `target`.

        The sources are the shards that it is read from, all of one rendition.
        """
        end = Updates(target.time)
        if isinstance(position, Updates) and (position.at is None or at(position.at) >= target):
            return position
        if self._limits.is_none():
            return end
        if isinstance(position, Contents):
            return self.cut_contents(position, [(source, Section(position.as_of)) for source in sources])
        if position.until is not None:
            section = Section(None, position.at or 0, position.until)
            return self.cut_time(position, [(source, section) for source in sources])
        if len(sources) == 1:
            return self._updates(position.at or 0, sources[0], target)
        return self._updates_of_many(position.at or 0, sources, target)

    def cut_contents(self, position: Contents, sections: Sequence[tuple[Source, Section]]) -> Position:
        """Where the batch after a position in the contents ends."""
        key = self._cut(sections, position.key)
        return Updates(position.as_of + 1) if key is None else Contents(position.as_of, key)

    def cut_time(self, position: Updates, sections: Sequence[tuple[Source, Section]]) -> Updates:
        """Where the batch ends that continues within one time; these are the sections that it is read from."""
        until = min((position.at or 0) + 1, MAX_TIME) if position.until is None else position.until
        key = self._cut(sections, position.key)
        return Updates(until) if key is None else Updates(position.at, until, key)

    def _cut(self, sections: Sequence[tuple[Source, Section]], key: bytes) -> bytes | None:
        """The key at which the next batch of sections ends that has come to `key`; None for their end."""
        found = [
            (source, tuple(overlapping(section.inputs(source.state), key or None, None)))
            for source, section in sections
        ]
        parts = [part for _, inputs in found for run in inputs for part in run.parts]
        size, rows = sum(part.size for part in parts), sum(part.rows for part in parts)
        if not rows or self._limits.allows(size, rows):
            return None
        budget = min(self._limits.bytes or size, (self._limits.updates or rows) * size // rows)
        wanted = max(1, budget // FINEST)
        lying = [
            stretch
            for (handle, state), inputs in found
            for stretch in stretches(handle.machine.reads, ShardId(handle.shard), inputs, state.schemas, wanted)
        ]
        seen = 0
        for cut, _, size in sorted(lying):
            if cut > key and seen >= budget:
                return cut
            # Pieces that begin before the key have been delivered, but for the rest of one in each run.
            seen += size if cut >= key else 0
        return None

    def _updates(self, lower: int, source: Source, target: Antichain) -> Position:
        size, updates, times = 0.0, 0, 0
        for batch in _batches(source.state, lower, target):
            if self._limits.times is None and self._limits.allows(size + batch.size, updates + batch.count):
                size, updates = size + batch.size, updates + batch.count
                continue
            weight = batch.size / batch.count
            for time, count in self._count(batch, lower, target, source):
                size, updates, times = size + weight * count, updates + count, times + 1
                if not self._limits.allows(size, updates, times):
                    return Updates(time) if updates > count else self._within(time, [source], target)
        return Updates(target.time)

    def _updates_of_many(self, lower: int, sources: Sequence[Source], target: Antichain) -> Position:
        """The same where several shards are written at the same times."""
        batches = [batch for source in sources for batch in _batches(source.state, lower, target)]
        total = sum(batch.size for batch in batches), sum(batch.count for batch in batches)
        if self._limits.times is None and self._limits.allows(*total):
            return Updates(target.time)
        size, updates, times = 0.0, 0, 0
        merged = merge(*(self._weighed(source, lower, target) for source in sources))
        for time, found in groupby(merged, itemgetter(0)):
            counts = [(count, weight) for _, count, weight in found]
            count = sum(count for count, _ in counts)
            size, updates, times = size + sum(c * w for c, w in counts), updates + count, times + 1
            if not self._limits.allows(size, updates, times):
                return Updates(time) if updates > count else self._within(time, sources, target)
        return Updates(target.time)

    def _weighed(self, source: Source, lower: int, target: Antichain) -> Iterator[tuple[int, int, float]]:
        """Times of a shard in order: how many updates, and about how many bytes each of them has."""
        for batch in _batches(source.state, lower, target):
            for time, count in self._count(batch, lower, target, source):
                yield time, count, batch.size / batch.count

    def _within(self, time: int, sources: Sequence[Source], target: Antichain) -> Position:
        """The end of a batch that starts with a time that is too much for one."""
        until = min(time + 1, MAX_TIME)
        section = Section(None, time, until)
        end = self.cut_time(Updates(time, until, BEGINNING), [(source, section) for source in sources])
        return end if end.until is not None else Updates(at(until).meet(target).time)

    def _count(self, batch: Batch, lower: int, target: Antichain, source: Source) -> list[tuple[int, int]]:
        """How many updates of a batch are at which time, from `lower` on and before `target`, in order."""
        place = (source.handle.shard, *batch.id, int(batch.born))
        if place not in self._counted or self._counted[place][0] > lower:
            kept = dict(list(self._counted.items())[-FINEST:])
            self._counted = {**kept, place: (lower, *self._look(batch, lower, source))}
        _, times, counts = self._counted[place]
        wanted = times >= np.uint64(lower)
        if target.time is not None:
            wanted &= times < np.uint64(target.time)
        return list(zip(times[wanted].tolist(), counts[wanted].tolist(), strict=True))

    def _look(self, batch: Batch, lower: int, source: Source) -> tuple[Times, Numbers]:
        """The same for all times from `lower` on, from the column `_time` alone if the parts do not tell."""
        inputs = inputs_of((batch,), lower)
        ends = {time for run in inputs for part in run.parts for time in (part.time_lower, part.time_upper)}
        if len(ends) == 1:
            return np.array([*ends], np.uint64), np.array([batch.count])
        machine, state = source.handle.machine, source.state
        schema = newest_schema(state.schemas[0], state.schemas, inputs)
        stored = Stored(machine.reads, ShardId(machine.shard), state.schemas, schema)
        found: dict[int, int] = {}
        for run in stored.streams(inputs, ()):
            for table in run:
                times, counts = np.unique(integers(table.column(TIME)), return_counts=True)
                for time, count in zip(times.tolist(), counts.tolist(), strict=True):
                    found[time] = found.get(time, 0) + count
        order = sorted(found)
        return np.array(order, np.uint64), np.array([found[time] for time in order], np.int64)


def _batches(state: State, lower: int, target: Antichain) -> Iterator[Batch]:
    for batch in state.trace:
        if batch.count and not batch.upper <= at(lower):
            if not batch.lower < target:
                return
            yield batch
