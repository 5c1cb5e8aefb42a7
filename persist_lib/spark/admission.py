"""How much of what is new goes into one batch of a stream: by bytes, updates or times, whichever is reached first.

A batch ends between two times if it can. One time that is more than a batch may have, and the contents that a stream
starts with, are cut by key. Limits are about what is stored, before it is added up; each batch has something, however
small the limits are, and a cut by key is no finer than the row groups of parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persist_lib.core.state import Batch, State
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import integers
from persist_lib.read.handle import ReadHandle
from persist_lib.schema.schema import TIME
from persist_lib.shard.runs import Stored, boundaries, inputs_of, newest_schema, overlapping
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
        """Whether there is no limit."""
        return self == Limits()

    def allows(self, size: float, updates: int, times: int = 0) -> bool:
        """Whether a batch may have so much."""
        return (
            (self.bytes is None or size <= self.bytes)
            and (self.updates is None or updates <= self.updates)
            and (self.times is None or times <= self.times)
        )


Times = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Admission:
    """Chooses where batches end. Keeps what it has counted, as a long batch is met again and again."""

    def __init__(self, handle: ReadHandle, limits: Limits) -> None:
        self._handle, self._limits = handle, limits
        self._counted: dict[tuple[int, int, int], tuple[int, Times, Numbers]] = {}

    def next(self, position: Position, state: State, target: Antichain) -> Position:
        """Where the batch after `position` ends; `position` itself where there is nothing new before `target`."""
        end = Updates(target.time)
        if isinstance(position, Updates) and (position.at is None or at(position.at) >= target):
            return position
        if self._limits.is_none():
            return end
        if isinstance(position, Contents):
            key = self._cut(Section(position.as_of), position.key, state)
            return Updates(position.as_of + 1) if key is None else Contents(position.as_of, key)
        if position.until is not None:
            key = self._cut(Section(None, position.at or 0, position.until), position.key, state)
            return Updates(position.until) if key is None else position._replace(key=key)
        return self._updates(position.at or 0, state, target)

    def _cut(self, section: Section, key: bytes, state: State) -> bytes | None:
        """The key at which the next batch of a section ends that has come to `key`; None for its end."""
        inputs = tuple(overlapping(section.inputs(state), key or None, None))
        parts = [part for run in inputs for part in run.parts]
        size, rows = sum(part.size for part in parts), sum(part.rows for part in parts)
        if not rows or self._limits.allows(size, rows):
            return None
        budget = min(self._limits.bytes or size, (self._limits.updates or rows) * size // rows)
        machine = self._handle.machine
        wanted = max(1, budget // FINEST)
        seen = 0
        for cut, size in sorted(boundaries(machine.reads, ShardId(machine.shard), inputs, state.schemas, wanted)):
            if cut > key and seen >= budget:
                return cut
            # Pieces that begin before the key have been delivered, but for the rest of one in each run.
            seen += size if cut >= key else 0
        return None

    def _updates(self, lower: int, state: State, target: Antichain) -> Position:
        """The end of a batch that starts at a time."""
        size, updates, times = 0.0, 0, 0
        for batch in state.trace:
            if batch.count == 0 or batch.upper <= at(lower):
                continue
            if not batch.lower < target:
                break
            if self._limits.times is None and self._limits.allows(size + batch.size, updates + batch.count):
                size, updates = size + batch.size, updates + batch.count
                continue
            weight = batch.size / batch.count
            for time, count in self._count(batch, lower, target, state):
                size, updates, times = size + weight * count, updates + count, times + 1
                if not self._limits.allows(size, updates, times):
                    return Updates(time) if updates > count else self._within(time, state, target)
        return Updates(target.time)

    def _within(self, time: int, state: State, target: Antichain) -> Position:
        """The end of a batch that starts with a time that is too much for one."""
        until = min(time + 1, MAX_TIME)
        key = self._cut(Section(None, time, until), BEGINNING, state)
        return Updates(at(until).meet(target).time) if key is None else Updates(time, until, key)

    def _count(self, batch: Batch, lower: int, target: Antichain, state: State) -> list[tuple[int, int]]:
        """How many updates of a batch are at which time, from `lower` on and before `target`, in order."""
        place = (*batch.id, int(batch.born))
        if place not in self._counted or self._counted[place][0] > lower:
            kept = dict(list(self._counted.items())[-FINEST:])
            self._counted = {**kept, place: (lower, *self._look(batch, lower, state))}
        _, times, counts = self._counted[place]
        wanted = times >= np.uint64(lower)
        if target.time is not None:
            wanted &= times < np.uint64(target.time)
        return list(zip(times[wanted].tolist(), counts[wanted].tolist(), strict=True))

    def _look(self, batch: Batch, lower: int, state: State) -> tuple[Times, Numbers]:
        """The same for all times from `lower` on, from the column `_time` alone if the parts do not tell."""
        inputs = inputs_of((batch,), lower)
        ends = {time for run in inputs for part in run.parts for time in (part.time_lower, part.time_upper)}
        if len(ends) == 1:
            return np.array([*ends], np.uint64), np.array([batch.count])
        machine, schema = self._handle.machine, newest_schema(state.schemas[0], state.schemas, inputs)
        stored = Stored(machine.reads, ShardId(machine.shard), state.schemas, schema)
        found: dict[int, int] = {}
        for run in stored.streams(inputs, ()):
            for table in run:
                times, counts = np.unique(integers(table.column(TIME)), return_counts=True)
                for time, count in zip(times.tolist(), counts.tolist(), strict=True):
                    found[time] = found.get(time, 0) + count
        order = sorted(found)
        return np.array(order, np.uint64), np.array([found[time] for time in order], np.int64)
