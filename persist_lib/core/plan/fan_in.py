"""How many sorted runs one merge may read side by side, and in which groups more than that are merged first.

A merge reads every run at once: of each it holds a chunk and a row group. So its memory grows with the number of runs,
not with their size. Small runs are gathered into memory instead, as long as they fit. What does not fit is merged in
several rounds: neighbouring batches first, each group of them a request that is committed on its own, then their
results. Each round divides the number of runs by the size of the groups, so every update is rewritten O(log n) times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from persist_lib.core.state import Batch, Part
from persist_lib.core.trace import CHUNK_BYTES, GROUP_BYTES, GROUP_ROWS
from persist_lib.schema.schema import Schema

SHARE = 4
"""Gathered updates are in memory four times: as read, laid end to end, as numbers to sort, and in order."""
SMALL = 8
"""A run is small if this many like it can be gathered. Larger ones are streamed where not all can be gathered."""
OPEN_BYTES = 1 << 20
"""What an open part takes besides: its footer, and a window's worth of decoded rows."""
FEWEST = 4
"""A merge reads this many runs whatever they take. With fewer, rounds would rewrite much to gain little."""
MOST_RUNS = 4096
MOST_PARTS = 1 << 14
"""The most runs and objects of one request. Its transition names them all, some 300 bytes each."""
HEAVY = 4
"""A batch that holds this many times what can be gathered waits for the last round, and is rewritten only there."""

Run = tuple[Part, ...]


TEXT_BYTES = 16
"""The assumed size of a value of varying length."""


def row_bytes(schema: Schema) -> int:
    """About how many bytes an update of this schema takes in memory, where only the schema is known."""
    return sum(_width(field.type) for field in schema.updates)


def _width(kind: Any) -> int:
    try:
        return -(-int(kind.bit_width) // 8)
    except ValueError:
        return TEXT_BYTES


def weight(run: Iterable[Part], each: int) -> int:
    """About how many bytes a run takes in memory, where a row takes `each`."""
    return sum(max(part.size, part.rows * each) for part in run)


def streaming_bytes(run: Iterable[Part]) -> int:
    """About how many bytes of memory the stream of a run takes: a chunk, and a row group, twice."""
    return max((_streaming(part) for part in run), default=0)


def _streaming(part: Part) -> int:
    group = min(part.size, GROUP_BYTES, part.size * GROUP_ROWS // max(1, part.rows))
    return OPEN_BYTES + min(part.size, CHUNK_BYTES) + 2 * group


class Room(NamedTuple):
    """The memory of one merge, in bytes: for updates that are gathered, and for runs that are streamed."""

    gathered: int
    streamed: int

    @classmethod
    def of(cls, merge_bytes: int) -> Room:
        """The room in a task that may use `merge_bytes`. The windows that are merged take the rest."""
        return cls(merge_bytes // SHARE, merge_bytes * 3 // 4)


class _Group:
    """Runs that are to be merged together, and what they take."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._gathered = self._streamed = self.runs = self._parts = 0

    def add(self, runs: Iterable[Run], each: int) -> bool:
        """Add the runs. Returns whether all still fit."""
        for run in runs:
            heft = weight(run, each)
            self.runs, self._parts = self.runs + 1, self._parts + len(run)
            if heft * SMALL <= self._room.gathered and self._gathered + heft <= self._room.gathered:
                self._gathered += heft
            else:
                self._streamed += streaming_bytes(run)
        fits = self._streamed <= self._room.streamed and self.runs <= MOST_RUNS and self._parts <= MOST_PARTS
        return fits or self.runs <= FEWEST


def fit(runs: Iterable[Run], each: int, room: Room) -> bool:
    """Whether one merge can read all these runs. `each` is the bytes of a row in memory."""
    return _Group(room).add(runs, each)


def grouped(runs: Sequence[Run], each: int, room: Room) -> list[int]:
    """Where groups of neighbouring runs start such that each of them fits: (0,) if all fit together."""
    starts, group = [0], _Group(room)
    for index, run in enumerate(runs):
        if not group.add([run], each) and index > starts[-1]:
            starts.append(index)
            group = _Group(room)
            group.add([run], each)
    return starts


def slices(
    batches: Sequence[Batch], each: int, room: Room, merged_runs: Callable[[Batch], Sequence[Run]] = Batch.run_parts
) -> list[tuple[int, int]]:
    """Which slices of the batches are to be merged first, so that all of them can be merged later. Empty if they fit.

    Heavy batches are left out as long as others can be merged. A batch that does not fit by itself is a slice, too.
    `merged_runs` are those of a batch that the last merge reads side by side, which of clusters are not all.
    """
    if fit((run for batch in batches for run in merged_runs(batch)), each, room):
        return []
    heavy = frozenset(
        place
        for place, batch in enumerate(batches)
        if len(batch.runs) <= 1 or len(merged_runs(batch)) < len(batch.runs)
        if weight(batch.parts, each) > HEAVY * room.gathered
    )
    return list(_slices(batches, each, room, heavy)) or list(_slices(batches, each, room, frozenset()))


def _slices(batches: Sequence[Batch], each: int, room: Room, heavy: frozenset[int]) -> Iterator[tuple[int, int]]:
    """The same with the places of those that are heavy."""
    start, group = 0, _Group(room)
    for index, batch in enumerate(batches):
        runs, is_heavy = batch.run_parts(), index in heavy
        if is_heavy or (not group.add(runs, each) and index > start):
            if _reduces(batches[start:index]):
                yield start, index
            start, group = index + is_heavy, _Group(room)
            if not is_heavy:
                group.add(runs, each)
    if _reduces(batches[start:]):
        yield start, len(batches)


def _reduces(batches: Sequence[Batch]) -> bool:
    """Whether merging them leaves fewer runs."""
    return sum(len(batch.runs) for batch in batches) > 1
