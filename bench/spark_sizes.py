"""Throughput of compaction on Spark over the size of the request and the number of tasks, and a picture of it.

`PERSIST_PICTURES=docs/pictures make bench NAME=spark-sizes` keeps the picture as `spark-throughput.png`.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl

from bench.figures import Figure
from bench.spark import prepared

mpl.use("Agg")  # before pyplot: there is no screen

import matplotlib.pyplot as plt

SIZES, SIZES_QUICK = (1_000_000, 4_000_000, 16_000_000, 24_000_000), (200_000, 400_000)
TASKS = (1, 2, 4, 8)
ROUNDS = 3
NAME = "spark-throughput.png"

Rates = dict[int, dict[int, float]]
"""M updates/s, by updates and tasks."""


def spark_sizes(quick: bool) -> list[Figure]:
    """The best of a few rounds each, after a first one, beside one task of the same size."""
    sizes, rates = SIZES_QUICK if quick else SIZES, Rates()
    for updates in sizes:
        with TemporaryDirectory(prefix="persist-spark-") as folder, prepared(updates, Path(folder), quick) as ours:
            ours.run(ours.tasks())
            for count in TASKS:
                tasks = ours.tasks(count)
                best = min(ours.run(tasks) for _ in range(1 if quick else ROUNDS))
                rates.setdefault(updates, {})[len(tasks)] = updates / best / 1e6
    if pictures := os.environ.get("PERSIST_PICTURES"):
        draw(rates, Path(pictures) / NAME)
    return [
        Figure(f"spark, {updates / 1e6:g} M in {tasks} tasks", rate, found[min(found)], "M/s", "one task")
        for updates, found in rates.items()
        for tasks, rate in found.items()
    ]


def draw(rates: Rates, path: Path) -> None:
    """A line for each number of tasks."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for tasks in sorted({tasks for found in rates.values() for tasks in found}):
        points = [(updates / 1e6, found[tasks]) for updates, found in sorted(rates.items()) if tasks in found]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{tasks} task{'s' * (tasks > 1)}")
    axes.set_xscale("log", base=2)
    axes.set_xticks([updates / 1e6 for updates in sorted(rates)], [f"{u / 1e6:g} M" for u in sorted(rates)])
    axes.set(xlabel="updates in the request", ylabel="M updates/s", ylim=(0, None))
    axes.set_title(f"Compaction on Spark, local[*], {os.cpu_count()} cores, warm")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
