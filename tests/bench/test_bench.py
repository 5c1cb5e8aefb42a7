"""The benchmarks run, judge their targets, and say so by their exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.append import added, bulk_append, small_append
from bench.cost import Log, cost, kind_of
from bench.figures import Figure, in_turn
from bench.kernel import kernel
from bench.postgres import contention, postgres_append
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


def test_appends_are_as_flat_as_what_they_add_to_bare_ones_whatever_a_sync_takes() -> None:
    """While syncs take twice as long for both, the ratio to the bare ones is 2.0, and later 3.1."""
    early, late = added([800, 810, 5000], [400, 390, 410]), added([610, 600, 590], [200, 190, 900])
    assert (early, late) == (410, 400)


def test_a_benchmark_is_run_by_name_and_an_unknown_one_is_named() -> None:
    done = bench("policy", "--quick")
    assert done.returncode == 0, done.stderr
    assert "batches after maintenance" in done.stdout
    unknown = bench("speed")
    assert unknown.returncode == 2
    assert "speed" in unknown.stderr
    assert all(name in unknown.stderr for name in BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [small_append, bulk_append, snapshot, kernel, postgres_append])
def test_every_benchmark_measures_both_sides(measure: Callable[[bool], list[Figure]]) -> None:
    figures = measure(True)
    assert figures
    assert all(figure.ours > 0 and figure.peer > 0 for figure in figures)


@pytest.mark.slow
def test_every_contender_s_appends_are_counted_and_the_slowest_named() -> None:
    figures = {figure.name: figure for figure in contention(True)}
    for crowd in "contention-2", "contention-4":
        assert figures[crowd].ours > 0
        assert figures[crowd].peer > 0
        assert figures[f"{crowd}-wait"].ours > 0
        least = figures[f"{crowd}-least"]
        assert 0 <= least.ours <= least.peer
        rollups = figures[f"{crowd}-rollups"]
        assert abs(rollups.ours - rollups.peer) <= 1 + rollups.peer / 4


@pytest.mark.slow
def test_the_requests_of_every_phase_are_counted_for_all_and_priced_alike() -> None:
    figures = {(figure.name, figure.peer_name): figure for figure in cost(True)}
    for peer in ("deltalake", "pyiceberg"):
        ingest, dollars = figures["cost-ingest", peer], figures["cost", peer]
        assert ingest.ours == 1_000  # a PUT an append, and nothing else (of a thousand updates each here)
        assert ingest.peer >= 2_000
        assert 0.005 < dollars.ours < dollars.peer
        assert figures["cost-scan-after", peer].ours <= figures["cost-scan", peer].ours


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("PUT", "/b/k", "put"),
        ("POST", "/b/k?uploads", "put"),
        ("PUT", "/b/k?partNumber=1&uploadId=x", "put"),
        ("POST", "/b/k?uploadId=x", "put"),
        ("GET", "/b/list-type=2", "get"),
        ("HEAD", "/b/k", "get"),
        ("GET", "/b?list-type=2&prefix=x", "list"),
        ("GET", "/b?prefix=x&uploads", "list"),
        ("DELETE", "/b/k", "delete"),
        ("POST", "/b?delete", "delete"),
    ],
)
def test_requests_are_priced_as_the_price_list_has_it(method: str, target: str, kind: str) -> None:
    assert kind_of(method, target) == kind


def test_only_what_the_log_gained_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = '127.0.0.1 - - [21/Nov/2026 00:21:30] "\x1b[33mHEAD /b/k HTTP/1.1\x1b[0m" 404 -\n'
    path.write_text(line * 3)

    def more() -> None:
        with path.open("a") as log:
            log.write(line * 2 + line.replace("HEAD", "PUT"))

    assert Log(path).during(more)._asdict() == {"put": 1, "get": 2, "list": 0, "delete": 0}
