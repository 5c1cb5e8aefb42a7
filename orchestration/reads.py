"""Proof that a compaction changed no read: what the shard holds at several times, computed before and after.

The contents are read as any reader would and summed up by their fingerprint, in bounded memory. At the newest time that
sum must also be what appends have added up in the state all along, which no compaction takes part in.
"""

from __future__ import annotations

from typing import NamedTuple

from persist_lib.client import Client
from persist_lib.kernel.fingerprint import diff_sum_of, diffs_of, fingerprint
from persist_lib.read.handle import ReadHandle


class Contents(NamedTuple):
    """What a shard holds as of one time: how many distinct data, the sum of diffs, the fingerprint of all."""

    rows: int
    diff_sum: int
    fingerprint: int


class ReadProbe:
    """Reads a shard at the same times again and again. Keeps history there by a lease, until `close`."""

    def __init__(self, client: Client, shard: str, points: int) -> None:
        self._handle: ReadHandle = client.open_reader(shard, purpose="compaction check")
        state = client.inspect(shard).state
        self.expected = state.fingerprint
        upper = state.upper.time
        since = self._handle.since.time
        self.points = () if upper is None or since is None or upper <= since else spread(since, upper - 1, points)

    def measure(self) -> dict[int, Contents]:
        """The contents at each point."""
        return {as_of: self._contents(as_of) for as_of in self.points}

    def close(self) -> None:
        """Let history go."""
        self._handle.close()

    def _contents(self, as_of: int) -> Contents:
        count = diffs = print_ = 0
        with self._handle.snapshot(as_of) as snapshot:
            for table in snapshot.batches():
                count += table.num_rows
                diffs += diff_sum_of(diffs_of(table))
                print_ += fingerprint(self._handle.schema, table)
        return Contents(count, diffs, print_ % 2**64)


def spread(first: int, last: int, points: int) -> tuple[int, ...]:
    """At most `points` times from first to last, both included, evenly."""
    if points < 1:
        return ()
    if points == 1:
        return (last,)
    return tuple(sorted({first + (last - first) * i // (points - 1) for i in range(points)}))
