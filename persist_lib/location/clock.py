"""The clock of embedded stores. Only `Consensus.now()` reads it, so one machine's leases are judged by one clock."""

from __future__ import annotations

import time  # noqa: TID251 - an embedded store has no other clock than its machine's; callers may pass their own
from collections.abc import Callable

from persist_lib.runtime.ambient import Runtime

Clock = Callable[[], int]
"""Nanoseconds since the epoch."""

machine_clock: Clock = time.time_ns


def now_ms(clock: Clock) -> int:
    """Milliseconds since the epoch, as `Consensus.now()` answers."""
    return clock() // 1_000_000


class RemoteClock:
    """Another machine's clock: what it said last, and the time that has passed here since. Asked only once.

    A step or a pause here shifts it until the next answer; a lease then ends early or late, and nothing else.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: tuple[int, float] | None = None

    def observe(self, now: int) -> None:
        """An answer of the store said that it is `now` there (ms since the epoch)."""
        self._seen = now, self._runtime.monotonic()

    def now(self, ask: Callable[[], int]) -> int:
        """Milliseconds since the epoch there; `ask` is called when it has never answered yet."""
        if self._seen is None:
            self.observe(ask())
        now, since = self._seen or (0, 0.0)
        return now + int((self._runtime.monotonic() - since) * 1000)
