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
    """Another machine's clock: its last known time, plus the time that has passed here since. It is asked only once.

    A step or a pause of the local clock shifts it until the next answer. A lease then ends early or late, nothing else.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: tuple[int, float] | None = None

    @property
    def last(self) -> int:
        """The time in the last answer, in ms since the epoch; 0 if none had one."""
        return self._seen[0] if self._seen else 0

    def observe(self, now: int) -> None:
        """Note that the store's clock was at `now` (ms since the epoch) in an answer that just arrived."""
        self._seen = now, self._runtime.monotonic()

    def now(self, ask: Callable[[], int]) -> int:
        """Return the remote time in ms since the epoch. Calls `ask` for it if no answer was observed yet."""
        if self._seen is None:
            self.observe(ask())
        now, since = self._seen or (0, 0.0)
        return now + int((self._runtime.monotonic() - since) * 1000)
