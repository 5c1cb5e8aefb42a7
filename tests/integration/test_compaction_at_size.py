"""The memory of a compaction grows neither with updates, batches, parts, rows of a group, nor with one key's history.

Each size is filled and compacted in processes of their own. `make size` and `make skew` do it at full size on Spark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from persist_lib.config import MIB

UPDATES = int(os.environ.get("PERSIST_SIZE_UPDATES", "0"))
BATCHES = int(os.environ.get("PERSIST_SIZE_BATCHES", "24"))
HOT = os.environ.get("PERSIST_SIZE_HOT", "0")
LIMIT_MIB = 512
SMALL = {"merge_bytes": 16 * MIB, "part_bytes": 2 * MIB, "task_bytes": 4 * MIB}
"""So small that 1x is already more than fits into a merge at once."""
SLACK_MIB = 64


def run(*arguments: object, **config: int) -> dict[str, Any]:
    """Run the program, and return its figures."""
    command = [sys.executable, "-m", "tests.integration.sizes", *map(str, arguments)]
    env = {**os.environ, "PERSIST_CONFIG": json.dumps(config)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peak(folder: Path, count: int, *shape: object) -> dict[str, Any]:
    location = f"file:{folder}/{count}-{'-'.join(map(str, shape))}"
    run("fill", location, count, *shape, **SMALL)
    figures = run("compact", location, **SMALL)
    print(location.rpartition("/")[2], figures)
    return figures


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("once", "eightfold"),
    [
        ((250_000, "--batches", 12), (2_000_000, "--batches", 12)),
        ((100_000, "--batches", 60), (800_000, "--batches", 480)),
        ((250_000, "--batches", 6, "--hot", 0.9), (2_000_000, "--batches", 6, "--hot", 0.9)),
        ((250_000, "--batches", 6, "--hot", 0.9), (250_000, "--batches", 48, "--hot", 0.9)),
        ((120_000, "--batches", 12, "--width", 200), (960_000, "--batches", 12, "--width", 200)),
    ],
    ids=["updates", "batches", "one key", "batches of one key", "wide rows"],
)
def test_eight_times_as_much_takes_the_same_memory(
    tmp_path: Path, once: tuple[Any, ...], eightfold: tuple[Any, ...]
) -> None:
    small, large = peak(tmp_path, *once), peak(tmp_path, *eightfold)
    assert large["peak_mib"] < small["peak_mib"] + SLACK_MIB
    assert large["fds"] <= small["fds"] + 2
    assert large["batches_after"] <= 4


@pytest.mark.skipif(not UPDATES, reason="make size and make skew run it")
def test_a_task_on_spark_stays_within_512_mib(tmp_path: Path) -> None:
    location = f"file:{tmp_path}/data"
    print(run("fill", location, UPDATES, "--batches", BATCHES, "--hot", HOT))
    figures = run("compact", location, "--engine", "spark")
    print(figures, f"{figures['updates_in'] / figures['seconds'] / 1e6:.2f} M updates/s read")
    assert figures["peak_mib"] <= LIMIT_MIB
    assert figures["most_rows"] < 3 * figures["mean_rows"] + 1_000_000, "no task has much more than the others"
