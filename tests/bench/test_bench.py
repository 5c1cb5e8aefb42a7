"""The benchmarks run, judge their targets, and say so by their exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.append import bulk_append, small_append
from bench.figures import Figure, in_turn
from bench.kernel import kernel
from bench.snapshot import snapshot

ROOT = Path(__file__).parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize(
    ("ours", "bounds", "met"),
    [
        (2.0, {"at_least": 2.0}, True),
        (1.9, {"at_least": 2.0}, False),
        (2.0, {"at_most": 2.0}, True),
        (2.1, {"at_most": 2.0}, False),
        (9.0, {}, True),
    ],
)
def test_a_target_is_met_or_missed(ours: float, bounds: dict[str, float], met: bool) -> None:
    assert Figure("f", ours, 1.0, "x", "peer", **bounds).is_met() is met  # type: ignore[arg-type]


def test_both_sides_are_measured_in_turn() -> None:
    calls: list[str] = []
    in_turn(lambda: calls.append("ours"), lambda: calls.append("peer"), 3)
    assert calls == ["ours", "peer"] * 4


def test_a_benchmark_is_run_by_name_and_an_unknown_one_is_named() -> None:
    done = bench("policy", "--quick")
    assert done.returncode == 0, done.stderr
    assert "batches after maintenance" in done.stdout
    unknown = bench("speed")
    assert unknown.returncode == 2
    assert "speed" in unknown.stderr
    assert all(name in unknown.stderr for name in BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [small_append, bulk_append, snapshot, kernel])
def test_every_benchmark_measures_both_sides(measure: Callable[[bool], list[Figure]]) -> None:
    figures = measure(True)
    assert figures
    assert all(figure.ours > 0 and figure.peer > 0 for figure in figures)
