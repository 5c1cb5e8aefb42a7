"""A clock that moves when the test says so, or when code sleeps on it."""

from __future__ import annotations

import random
import threading

from persist_lib.runtime.ambient import Runtime

START_NS = 1_700_000_000_000_000_000


class ManualClock:
    """Called, it answers nanoseconds since the epoch, as `open_location(clock=…)` wants it. Sleeping takes no time."""

    def __init__(self, start_ns: int = START_NS) -> None:
        self._now_ns = start_ns
        self._lock = threading.Lock()

    def __call__(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move on. A negative number steps back, as real clocks do."""
        with self._lock:
            self._now_ns += round(seconds * 1_000_000_000)

    def monotonic(self) -> float:
        """Seconds, for deadlines."""
        return self._now_ns / 1_000_000_000

    def sleep(self, seconds: float) -> None:
        """Move on by `seconds`, at once."""
        self.advance(seconds)

    def runtime(self, seed: int = 0) -> Runtime:
        """A runtime on this clock: repeatable, never waiting, without background work."""
        return Runtime(monotonic=self.monotonic, sleep=self.sleep, random=random.Random(seed), background=False)
