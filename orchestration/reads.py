"""Proof that a compaction changed no read: the shard's contents at several times are compared before and after it.

The contents are read as any reader reads them, and summed up as a fingerprint, in bounded memory. At the newest time it
must also equal the fingerprint that appends have added up in the state, which no compaction changes.

With a budget only a sample is read: key ranges between the bounds of the parts that are compacted, each at one time. If
the rows of one key are lost, at the times that are read, this is found with the probability `share`; a whole read finds
it always.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

from persist_lib.client import Client
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import Plan
from persist_lib.core.state import Part, State
from persist_lib.core.sums import Sums
from persist_lib.format.descriptions import add_up
from persist_lib.format.digest import CHUNK
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.reader import ReadHandle
from persist_lib.shard.runs import inputs_of, overlapping

RANGES = 64
"""The most key ranges among which a sample is drawn."""
AROUND = 3
"""What a read of some keys takes besides them: about so many chunks of large parts, or so many small parts."""


class Piece(NamedTuple):
    """Contents that are compared: encoded keys in `[lower, upper)` (None: no bound) at one time."""

    as_of: int
    lower: bytes | None = None
    upper: bytes | None = None


class ReadProbe:
    """Reads a shard at the same times repeatedly. It keeps the history for these times by a lease, until `close`.

    `points` is the number of times. `budget_bytes` is the most that all measuring reads, before and after together;
    None: no limit, so everything is read at each time. `seed` decides what a sample holds; None: a new one.
    """

    def __init__(
        self, client: Client, shard: str, points: int, *, budget_bytes: int | None = None, seed: int | None = None
    ) -> None:
        self._client = client
        self._spent = Spending()
        self._measured = 0
        self.seed = client.runtime.entropy() & 0xFFFFFFFF if seed is None else seed
        self.budget_bytes = budget_bytes
        with ExitStack() as undo:
            self._handle: ReadHandle = client.open_reader(shard, purpose="compaction check")
            undo.callback(self._handle.close)
            state = client.inspect(shard).state
            self.expected = state.fingerprint
            times = self._times(state, points)
            self.is_whole = bool(times)
            """Whether the contents at the newest time are read whole. Otherwise they say nothing of `expected`."""
            self.share = 1.0 if times else 0.0
            """The share of the keys that is read, by the updates of the largest run that is compacted."""
            self.pieces: tuple[Piece, ...] = tuple(Piece(time) for time in times)
            self._afterwards: tuple[Piece, ...] = ()
            if budget_bytes is not None and times and budget_bytes < 2 * len(times) * state.size:
                self._sample(shard, state, times, budget_bytes)
            undo.pop_all()

    @property
    def points(self) -> tuple[int, ...]:
        """The times at which something is read."""
        return tuple(sorted({piece.as_of for piece in (*self.pieces, *self._afterwards)}))

    @property
    def cost(self) -> Cost:
        """What all measuring has cost so far: requests, bytes and dollars."""
        return self._spent.cost

    @property
    def newest(self) -> Piece | None:
        """All contents at the newest time, if they are read whole. They must add up to `expected`."""
        return Piece(self.points[-1]) if self.is_whole else None

    def measure(self) -> dict[Piece, Sums]:
        """What each piece adds up to.

        Where only the newest time fits whole, and only once, the first call leaves it out: `expected` stands for it.
        """
        pieces = self.pieces + (self._afterwards if self._measured else ())
        self._measured += 1
        with self._spent.again():
            return {piece: self._contents(piece) for piece in pieces}

    def says(self) -> str:
        """What was read, in one sentence for a verdict."""
        cost = self.cost
        what = f"{self.share:.0%} of the keys" if self.share < 1 else "all keys"
        how = f", chosen with seed {self.seed}" if self.budget_bytes is not None and self.pieces else ""
        at = ", ".join(map(self.show, self.points)) or "no time"
        return f"read {what} at {at}{how}: {cost.bytes_read:,} bytes, ${cost.dollars:.6g}"

    def show(self, time: int) -> str:
        """A time of the shard for people."""
        return self._handle.schema.show(time)

    def close(self) -> None:
        """Close the reader, which gives up the history that it kept."""
        self._handle.close()

    def _times(self, state: State, points: int) -> tuple[int, ...]:
        upper, since = state.upper.time, self._handle.since.time
        if upper is None or since is None or upper <= since or points < 1:
            return ()
        if self.budget_bytes is None:
            return spread(since, upper - 1, points)
        rng = random.Random(self.seed)  # noqa: S311 - a sample, which its seed makes again
        return tuple(sorted({*(rng.randint(since, upper - 1) for _ in range(points - 1)), upper - 1}))

    def _sample(self, shard: str, state: State, times: tuple[int, ...], budget: int) -> None:
        """Choose what is read for the budget: the newest time whole, once, if it fits, then key ranges at random."""
        self.pieces, self.share = (), 0.0
        self.is_whole = state.size <= budget
        if self.is_whole:
            self._afterwards, self.share = (Piece(times[-1]),), 1.0
            budget -= state.size
        plan = self._client.compact(shard, dry_run=True).plan
        rng = random.Random(self.seed)  # noqa: S311 - a sample, which its seed makes again
        ranges, weights = _ranges(plan)
        order = list(range(len(ranges)))
        rng.shuffle(order)
        read = 0
        for at in order:
            piece = Piece(rng.choice(times), *ranges[at])
            cost = _bytes_of(state, plan, piece)
            if cost <= budget:
                budget -= cost
                read += weights[at]
                self.pieces += (piece,)
        if not self.is_whole:
            self.share = read / max(1, sum(weights))

    def _contents(self, piece: Piece) -> Sums:
        with self._handle.snapshot(piece.as_of, diff=True) as snapshot:
            split = snapshot.of_keys(piece.lower, piece.upper)
            return add_up(self._handle.schema, split.batches(self._client.blob))


def spread(first: int, last: int, points: int) -> tuple[int, ...]:
    """At most `points` times from first to last, both included, evenly."""
    if points < 1:
        return ()
    if points == 1:
        return (last,)
    return tuple(sorted({first + (last - first) * i // (points - 1) for i in range(points)}))


def _ranges(plan: Plan) -> tuple[list[tuple[bytes | None, bytes | None]], list[int]]:
    """Key ranges and the updates in each: the parts of the largest run that is compacted, several to a range.

    SUBTLE: not the bounds of all runs. Those of runs alike are close together, and the ranges between them hold little.
    """
    runs = inputs_of(batch for request in plan.requests for batch in request.inputs)
    parts = max((run.parts for run in runs), key=lambda parts: sum(part.rows for part in parts), default=())
    groups = [parts[at : at + -(-len(parts) // RANGES)] for at in range(0, len(parts), -(-len(parts) // RANGES) or 1)]
    edges = [None, *(group[0].key_lower for group in groups[1:]), None]
    return list(pairwise(edges)), [sum(part.rows for part in group) for group in groups]


def _bytes_of(state: State, plan: Plan, piece: Piece) -> int:
    """About the most that reading a piece takes, before and after the compaction together.

    A compaction writes no more than it reads, in parts of which a key range takes its own bytes and some around them.
    """
    compacted = {batch.id for request in plan.requests for batch in request.inputs}
    before = [(batch.id in compacted, part) for batch in state.trace for part in _parts_of(batch, piece)]
    same = sum(_size(part) for is_in, part in before if not is_in)
    inputs = sum(_size(part) for is_in, part in before if is_in)
    everything = sum(request.size for request in plan.requests)
    around = AROUND * min(CHUNK, max((request.part_bytes for request in plan.requests), default=0))
    return 2 * same + inputs + min(inputs + around, everything)


def _parts_of(batch: object, piece: Piece) -> Sequence[Part]:
    runs = overlapping(inputs_of([batch], 0, piece.as_of + 1), piece.lower, piece.upper)  # type: ignore[list-item]
    return [part for run in runs for part in run.parts]


def _size(part: Part) -> int:
    return 0 if part.inline is not None else part.size
