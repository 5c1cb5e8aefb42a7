"""The clock of embedded stores. Only `Consensus.now()` reads it, so one machine's leases are judged by one clock."""

from __future__ import annotations

import time  # noqa: TID251 - an embedded store has no other clock than its machine's; callers may pass their own
from collections.abc import Callable

Clock = Callable[[], int]
"""Nanoseconds since the epoch."""

machine_clock: Clock = time.time_ns


def now_ms(clock: Clock) -> int:
    """Milliseconds since the epoch, as `Consensus.now()` answers."""
    return clock() // 1_000_000
