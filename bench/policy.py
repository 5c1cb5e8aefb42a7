"""What the compaction policy does to append histories, without data. It compares the number of batches with their
bound, and write amplification with log2(n), with maintenance every k appends.

    python -m bench.policy            python -m bench.policy --quick

Of tables whose rows change it also says what a read of the newest contents has to do, with and without contents that
are kept ahead. The histories include difficult ones: ruler sequences, huge and tiny by turns, growing, shrinking, and
updates that cancel out when they meet. Every step goes through the real state machine, so a plan that it would refuse
shows here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import log2
from random import Random
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import bench.figures
from persist_lib.core.plan.compaction import Policy, batch_bound
from persist_lib.core.plan.simulate import Simulation

AMPLIFICATION = 1 / log2(1.5)
"""Rewritings per update and per log2(n): each finds an update in a batch at least 1.5 times larger."""

Sizes = Callable[[int], list[int]]


class Figure(NamedTuple):
    """One history under one rhythm of maintenance. Amplification is updates rewritten per update appended."""

    history: str
    every: int
    appends: int
    updates: int
    batches: int
    bound: float
    amplification: float
    target: float

    @property
    def is_met(self) -> bool:
        """Whether both stay within."""
        return self.batches <= self.bound and self.amplification <= self.target


def _random(appends: int) -> list[int]:
    random = Random(appends)
    return [int(2 ** random.uniform(0, 16)) for _ in range(appends)]


HISTORIES: dict[str, Sizes] = {
    "one by one": lambda n: [1] * n,
    "a thousand each": lambda n: [1000] * n,
    "random, over 16 octaves": _random,
    "ruler (1 2 1 4 1 2 1 8 …)": lambda n: [i & -i for i in range(1, n + 1)],
    "ruler, backwards": lambda n: [n // (i & -i) + 1 for i in range(1, n + 1)],
    "huge and tiny by turns": lambda n: [100_000 if i % 2 else 1 for i in range(n)],
    "one huge, then tiny": lambda n: [1_000_000] + [1] * (n - 1),
    "growing by a tenth": lambda n: [int(1.1 ** (i % 200)) + 1 for i in range(n)],
    "shrinking by a tenth": lambda n: [int(1.1 ** (200 - i % 200)) + 1 for i in range(n)],
    "growing, just within the rule": lambda n: [int(1.5**i) + 1 for i in range(min(n, 80))],
    "mostly empty": lambda n: [0 if i % 7 else 5 for i in range(n)],
}


def figures(name: str, sizes: list[int], every: int, *, lag: int | None = None, distinct: int | None = None) -> Figure:
    """Append `sizes` with maintenance every `every` appends, since trailing upper by `lag`."""
    simulation = Simulation(left=None if distinct is None else lambda _, request: min(request.count, distinct))
    for number, size in enumerate(sizes, 1):
        simulation.append(size)
        if number % every == 0:
            if lag is not None:
                simulation.advance(max(0, number - lag))
            simulation.maintain()
    simulation.maintain()
    appended = max(simulation.appended, 2)
    # Since that follows rewrites, too, once it has passed a third of a batch: each update is passed once.
    target = 1 + AMPLIFICATION * log2(appended) + (3 if lag is not None else 0)
    return Figure(
        name, every, len(sizes), simulation.appended, simulation.most, batch_bound(appended),
        simulation.rewritten / appended, target,
    )  # fmt: skip


def run(quick: bool = False) -> list[Figure]:
    """All histories, under a few rhythms."""
    return list(_runs(200 if quick else 2000, (1, 16) if quick else (1, 7, 100)))


def _runs(appends: int, rhythms: tuple[int, ...]) -> Iterator[Figure]:
    for every in rhythms:
        for name, sizes in HISTORIES.items():
            yield figures(name, sizes(appends), every)
        yield figures("one by one, since follows", [1] * appends, every, lag=10)
        yield figures("updates in place (300 keys)", [20] * appends, every, lag=10, distinct=300)


class Life(NamedTuple):
    """A table whose rows change: what reads do for each row, on average and at worst after maintenance, what is
    rewritten for each update, and how many updates are stored for each row at the end.
    """

    history: str
    ahead: float
    mean: float
    worst: float
    rewritten: float
    stored: float


CHANGES: dict[str, tuple[int, int]] = {
    "rows are only added": (800, 800), "updates": (1600, 0), "upserts, a third new": (1333, 267),
    "4 deletes : 1": (800, -480),
}  # fmt: skip
"""Updates of a step, and how many rows they leave more."""


def life(history: str, ahead: float, lag: int | None, *, rows: int = 400_000, steps: int = 400) -> Life:
    """Load rows, change some 800 in each step, and maintain every 10 steps. Since stays, or is `lag` steps behind."""
    simulation = Simulation(policy=Policy(ahead=ahead))
    simulation.append(rows)
    simulation.maintain()
    loaded, reads = simulation.rewritten, list[float]()
    updates, added = CHANGES[history]
    for step in range(1, steps + 1):
        simulation.append(updates, rows=added)
        if step % 10 == 0:
            if lag is not None:
                simulation.advance(max(0, step - lag))
            simulation.maintain()
            reads.append(simulation.read())
    kept, state = simulation.state.contents, simulation.state
    stored = (state.count + (0 if kept is None else kept.count)) / sum(batch.diff_sum for batch in state.trace)
    name = f"{history}, since {'stays' if lag is None else f'{lag} behind'}"
    rewritten = (simulation.rewritten - loaded) / (steps * updates)
    return Life(name, ahead, sum(reads) / len(reads), max(reads), rewritten, stored)


def show_lives(console: Console) -> None:
    """Print what reads do, with contents ahead and without."""
    table = Table("history", "ahead", "read, mean", "read, worst", "rewritten", "stored")
    for lag in (None, 20):
        for history in CHANGES:
            for ahead in (0, 1 / 8, 1 / 16, 1 / 32):
                one = life(history, ahead, lag)
                table.add_row(one.history, f"{ahead:.3f}", *(f"{one[place]:.2f}" for place in range(2, 6)))
    console.print(table)


def show(found: list[Figure], console: Console) -> None:
    """Print them as a table."""
    table = Table("history", "every", "updates", "batches", "bound", "rewritten", "target", "")
    for figure in found:
        table.add_row(
            figure.history, str(figure.every), f"{figure.updates:,}", str(figure.batches), f"{figure.bound:.0f}",
            f"{figure.amplification:.2f}", f"{figure.target:.1f}", "" if figure.is_met else "missed",
            style=None if figure.is_met else "red",
        )  # fmt: skip
    console.print(table)


def policy(quick: bool) -> list[bench.figures.Figure]:
    """For `make bench`: the worst history beside its bound, and beside its target of amplification."""
    found = run(quick)
    show(found, Console())
    fullest = max(found, key=lambda figure: figure.batches / figure.bound)
    busiest = max(found, key=lambda figure: figure.amplification / figure.target)
    return [
        bench.figures.Figure(
            "batches after maintenance", fullest.batches, fullest.bound, "batches", "2*log2(n) + c", at_most=1,
            note=f"worst of {len(found)}: {fullest.history}, every {fullest.every}",
        ),
        bench.figures.Figure(
            "write amplification", busiest.amplification, busiest.target, "x", "c*log2(n)", at_most=1,
            note=f"worst of {len(found)}: {busiest.history}, every {busiest.every}",
        ),
    ]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a target is missed."""
    found = run("--quick" in arguments)
    show(found, Console())
    show_lives(Console())
    return 0 if all(figure.is_met for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
