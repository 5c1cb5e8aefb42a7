"""Count what a location is asked for: calls, failures, bytes and seconds by kind.

Counts are exact, also among threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from persist_lib.config import Runtime
from persist_lib.location.api import Blob, Consensus, Row
from persist_lib.location.around import AroundBlob, AroundConsensus, Operation

T = TypeVar("T")


class Count(NamedTuple):
    """All operations of a kind: how many, how many of them raised, the bytes sent and received, the time they took."""

    calls: int = 0
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


class Meter:
    """Counts by kind: `get`, `get_range`, `set`, `delete`, `delete_many`, `list` of Blob, the methods of Consensus."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        self.monotonic = monotonic or Runtime().monotonic
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}

    def add(self, kind: str, more: Count) -> None:
        """Add `more` to what was counted."""
        with self._lock:
            old = self._counts.get(kind, Count())
            self._counts[kind] = Count(*(a + b for a, b in zip(old, more, strict=True)))  # type: ignore[arg-type]

    def counts(self) -> dict[str, Count]:
        """What was counted so far, by kind."""
        with self._lock:
            return dict(self._counts)

    def calls(self, kind: str) -> int:
        """How many operations of this kind there were."""
        return self._counts.get(kind, Count()).calls

    def reset(self) -> dict[str, Count]:
        """Answer the counts and start from zero, with nothing counted twice or lost in between."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts

    def measure(self, operation: Operation, call: Callable[[], T]) -> T:
        """Carry out `call` and count it."""
        started = self.monotonic()
        try:
            result = call()
        except BaseException:
            self.add(operation.kind, Count(1, 1, operation.size, 0, self.monotonic() - started))
            raise
        self.add(operation.kind, Count(1, 0, operation.size, _size(result), self.monotonic() - started))
        return result


def _size(result: object) -> int:
    """The bytes of data in an answer."""
    match result:
        case bytes():
            return len(result)
        case Row():
            return len(result.data)
        case [*rows]:
            return sum(len(row.data) for row in rows if isinstance(row, Row))
        case _:
            return 0


class MeteredBlob(AroundBlob):
    """A Blob whose operations are counted."""

    def __init__(self, inner: Blob, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count it."""
        return self.meter.measure(operation, call)


class MeteredConsensus(AroundConsensus):
    """A Consensus whose operations are counted."""

    def __init__(self, inner: Consensus, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count it."""
        return self.meter.measure(operation, call)
