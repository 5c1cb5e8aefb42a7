"""The driver of a compaction is killed (SIGKILL) while tasks write, and around the commit: the shard stays right."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import persist_lib as persist
from tests.spark.collections import SMALL, check, parts_of, referred, stored, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
LEASE_MS = 1500
PROGRAM = Path(__file__).parent.parent.parent / "jobs" / "compact.py"


@pytest.mark.parametrize("new_parts", [1, 4, 8])
def test_a_killed_driver_leaves_a_correct_shard_and_only_orphans(tmp_path: Path, new_parts: int) -> None:
    folder = tmp_path / "data"
    config = {**SMALL, "lease_ms": LEASE_MS}
    with persist.open(f"file:{folder}", config=persist.Config(**config)) as client:
        model = write(client, "s", batches=5, seed=new_parts)
        before = set(parts_of(folder, "s"))
        driver = start(folder, config, tmp_path / "log")
        try:
            wait_for(driver, folder, before, new_parts)
        finally:
            kill_group(driver)
        check(client, "s", model)
        time.sleep(LEASE_MS / 1000 + 0.5)
        client.expire("s")
        assert client.census("s").writers == 0
        client.maintain("s")
        client.maintain("s")
        check(client, "s", model)
        assert client.census("s").batches == 1
        assert stored(client, "s") == referred(client, "s")


def start(folder: Path, config: dict[str, object], log: Path) -> subprocess.Popen[bytes]:
    """The program, in a process group of its own, so that its JVM and workers can be ended with it."""
    env = {**os.environ, "PERSIST_CONFIG": json.dumps(config), "PERSIST_SPARK_MASTER": "local[2,4]"}
    command = [sys.executable, str(PROGRAM), "--location", f"file:{folder}", "--engine", "spark"]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


def wait_for(driver: subprocess.Popen[bytes], folder: Path, before: set[Path], new_parts: int) -> None:
    """Until tasks have written so many parts, or the program is done; then kill the driver alone."""
    deadline = time.monotonic() + 200
    while len(set(parts_of(folder, "s")) - before) < new_parts:
        assert time.monotonic() < deadline, "no task wrote anything"
        if driver.poll() is not None:
            break
        time.sleep(0.005)
    assert set(parts_of(folder, "s")) - before, "it was killed before any task had written"
    driver.kill()
    driver.wait()


def kill_group(driver: subprocess.Popen[bytes]) -> None:
    """What the driver started continues for a moment, as zombies do; then it ends too."""
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
