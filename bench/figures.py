"""The result of a benchmark: our figure beside a peer's, measured in the same run, and the target for their ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of `make bench`. `ratio` is ours over the peer's; `at_least` or `at_most` is what it has to keep.

    `settings` is how the peer is configured; empty where the figure is beside a bound or our own figure.

    With `--quick` sizes are small and fixed costs weigh more, so targets are shown but not judged.
    """

    name: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    settings: str = ""

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.ours / self.peer if self.peer else float("inf")

    @property
    def target(self) -> str:
        """What the ratio has to be, in words."""
        if self.at_least is not None:
            most = "" if self.at_most is None else f", <= {self.at_most:g}x"
            return f">= {self.at_least:g}x{most}"
        return f"<= {self.at_most:g}x" if self.at_most is not None else "-"

    def is_met(self) -> bool:
        """Whether the target holds."""
        if self.at_least is not None and self.ratio < self.at_least:
            return False
        return self.at_most is None or self.ratio <= self.at_most


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turn(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, run in turn so that a machine's drift touches both alike. The first round warms up."""
    return beside(lambda: timed(ours), lambda: timed(peer), rounds)


def beside(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Like `in_turn`, for calls that return their own seconds: a peer measures by the clock of its own process."""
    pairs = [(ours(), peer()) for _ in range(rounds + 1)][1:]
    best = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
    return best if rounds % 2 else (statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs))


def peak_mib() -> float:
    """The most memory that this process has ever had resident.

    SUBTLE: `getrusage` returns the peak of the parent process if that was higher: a child inherits its parent's peak,
    and keeps it through exec.
    """
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024
