"""A clock that moves when the test says so, or when code sleeps on it."""

from __future__ import annotations

import random
import threading

from persist_lib.runtime.ambient import Runtime

START_NS = 1_700_000_000_000_000_000


class ManualClock:
    """A clock for `open_location(clock=…)`: calling it returns nanoseconds since the epoch. Sleeping takes no time."""

    def __init__(self, start_ns: int = START_NS) -> None:
        self._now_ns = start_ns
        self._lock = threading.Lock()

    def __call__(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move the clock on by `seconds`. A negative number moves it back, as happens to real clocks."""
        with self._lock:
            self._now_ns += round(seconds * 1_000_000_000)

    def monotonic(self) -> float:
        """The clock in seconds, for deadlines."""
        return self._now_ns / 1_000_000_000

    def sleep(self, seconds: float) -> None:
        """Move the clock on by `seconds` and return at once."""
        self.advance(seconds)

    def runtime(self, seed: int = 0) -> Runtime:
        """A runtime on this clock. It is repeatable, never waits, and does no work in the background."""
        return Runtime(
            monotonic=self.monotonic, sleep=self.sleep, random=random.Random(seed), background=False,
            clock_ms=lambda: self._now_ns // 1_000_000,
        )  # fmt: skip
