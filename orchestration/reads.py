"""Proof that a compaction changed no read: the shard's contents at several times are compared before and after it.

The contents are read as any reader reads them, and summed up as a fingerprint, in bounded memory. At the newest time it
must also equal the fingerprint that appends have added up in the state, which no compaction changes.
"""

from __future__ import annotations

from persist_lib.client import Client
from persist_lib.core.sums import Sums
from persist_lib.format.sums import add_up
from persist_lib.read.handle import ReadHandle


class ReadProbe:
    """Reads a shard at the same times repeatedly. It keeps the history for these times by a lease, until `close`."""

    def __init__(self, client: Client, shard: str, points: int) -> None:
        self._handle: ReadHandle = client.open_reader(shard, purpose="compaction check")
        state = client.inspect(shard).state
        self.expected = state.fingerprint
        upper = state.upper.time
        since = self._handle.since.time
        self.points = () if upper is None or since is None or upper <= since else spread(since, upper - 1, points)

    def measure(self) -> dict[int, Sums]:
        """The contents at each point."""
        return {as_of: self._contents(as_of) for as_of in self.points}

    def close(self) -> None:
        """Close the reader, which gives up the history that it kept."""
        self._handle.close()

    def _contents(self, as_of: int) -> Sums:
        with self._handle.snapshot(as_of) as snapshot:
            return add_up(self._handle.schema, snapshot.batches())


def spread(first: int, last: int, points: int) -> tuple[int, ...]:
    """At most `points` times from first to last, both included, evenly."""
    if points < 1:
        return ()
    if points == 1:
        return (last,)
    return tuple(sorted({first + (last - first) * i // (points - 1) for i in range(points)}))
