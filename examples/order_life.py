"""The life of an order, as a table: when it moves on after being placed, and what it holds before and after."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

STATES = pa.array(["placed", "changed", "shipped", "cancelled"])
PLACED, CHANGED, SHIPPED, CANCELLED = range(4)


@dataclass(frozen=True, slots=True)
class Contents:
    """What an order holds: its state, and which of its successive prices, articles and notes."""

    state: int
    cents: int = 0
    sku: int = 0
    note: int = 0

    @property
    def versions(self) -> tuple[int, int, int, int]:
        """As a row of numbers."""
        return self.state, self.cents, self.sku, self.note


@dataclass(frozen=True, slots=True)
class Step:
    """`lag` rounds after their cohort, its orders of the ranks in `[lo, hi)` (per mille) go from `old` to `new`."""

    lag: int
    lo: int
    hi: int
    old: Contents
    new: Contents


NEW, _CHANGED, _TWICE = Contents(PLACED), Contents(CHANGED, 1, 0, 1), Contents(CHANGED, 2, 0, 2)
_SHIPPED, _CHANGED_SHIPPED, _TWICE_SHIPPED = Contents(SHIPPED), Contents(SHIPPED, 1, 0, 1), Contents(SHIPPED, 2, 0, 2)

# Ranks: 0-250 change, 0-50 of them twice; 0-850 ship; 850-950 are cancelled; 950-1000 stay open. Consecutive steps of
# an order are at least two rounds apart, so that they never fall on one time.
LIFE = (
    Step(2, 0, 250, NEW, _CHANGED),
    Step(5, 0, 50, _CHANGED, _TWICE),
    Step(3, 850, 920, NEW, Contents(CANCELLED)),
    Step(11, 920, 950, NEW, Contents(CANCELLED, note=1)),
    Step(4, 250, 500, NEW, _SHIPPED),
    Step(9, 500, 850, NEW, _SHIPPED),
    Step(13, 50, 250, _CHANGED, _CHANGED_SHIPPED),
    Step(17, 0, 50, _TWICE, _TWICE_SHIPPED),
    Step(40, 0, 30, _TWICE_SHIPPED, Contents(SHIPPED, 3, 1, 3)),
    Step(60, 250, 300, _SHIPPED, Contents(SHIPPED, 1, 0, 0)),
    Step(250, 500, 530, _SHIPPED, Contents(SHIPPED, 0, 1, 1)),
    Step(300, 250, 260, Contents(SHIPPED, 1, 0, 0), Contents(SHIPPED, 2, 1, 1)),
)
