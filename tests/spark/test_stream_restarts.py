"""A stream whose driver and whose tasks are killed at random: each update arrives once, and its history is kept.

`make stream-kills N=50` kills it more often.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from tests.spark.places import environment
from tests.unit.spark.worlds import SCHEMA, TINY, World, added

KILLS = int(os.environ.get("PERSIST_STREAM_KILLS", "3"))
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300 + 120 * KILLS)]
PROGRAM = Path(__file__).parent / "stream_program.py"
ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 400.0
LONGEST_S = 240 + 10 * KILLS
"""How long it may take to read what is left. While drivers start, more is appended than they read."""


def test_a_stream_that_is_killed_at_random_delivers_each_update_once(tmp_path: Path) -> None:
    """Each round appends, compacts and collects while the stream runs, and kills the driver or a task of it."""
    rng = random.Random(seed := random.SystemRandom().getrandbits(32))
    print(f"seed {seed}")
    drivers = tasks = 0
    with persist.open(f"file:{tmp_path / 'data'}", config=persist.Config(**TINY)) as client:
        world = World(client)
        client.open_writer("orders", SCHEMA).close()
        client.set_retention("orders", 2)
        for _ in range(4):
            world.append(rng, 300)
        for number in range(KILLS):
            with running(tmp_path, f"log{number}") as driver:
                before = planned(tmp_path)
                wanted = rng.randrange(1, 6)
                deadline = time.monotonic() + PATIENCE_S
                while planned(tmp_path) < before + wanted:
                    assert time.monotonic() < deadline, (tmp_path / f"log{number}").read_text()[-3000:]
                    if driver.poll() is not None:
                        assert tasks, (tmp_path / f"log{number}").read_text()[-3000:]
                        break  # the task that was killed was the one that plans
                    world.append(rng, rng.randrange(1, 120), times=rng.randrange(1, 3))
                    if rng.random() < 0.3:
                        client.maintain("orders")
                    if planned(tmp_path) > before and rng.random() < 0.2:
                        tasks += kill_a_task(driver, rng)
                    time.sleep(rng.random() / 4)
                time.sleep(rng.random() / 2)
                drivers += driver.poll() is None
            client.maintain("orders")
        hold = client.inspect("orders").state.holds["etl"]
        assert hold.opaque.startswith(b"Spark stream")
        program(tmp_path, "now", "last")
        found = delivered(tmp_path)
        print(f"{drivers} drivers and {tasks} tasks were killed, {planned(tmp_path)} batches")
        first = json.loads((tmp_path / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
        as_of = first["began"]["contents"]
        expected = Counter({(data, as_of): n for data, n in world.contents(as_of).items()})
        expected.update(world.changes(as_of, world.upper - 1))
        assert len(found) == len({row[:4] for row in found}), "an update came twice"
        assert added((((a, b, v), at), n) for a, b, v, at, n in found) == expected
        assert drivers, "no kill struck"


@contextlib.contextmanager
def running(folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """The stream, in a process group of its own, which is killed at the end."""
    with (folder / log).open("wb") as out:
        driver = subprocess.Popen(command(folder, "run"), env=env(), stdout=out, stderr=out, start_new_session=True)
    try:
        yield driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def program(folder: Path, what: str, log: str) -> str:
    """What the program prints."""
    done = subprocess.run(
        command(folder, what), env=env(), capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    (folder / log).write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def command(folder: Path, what: str) -> list[str]:
    return [sys.executable, str(PROGRAM), what, f"file:{folder / 'data'}", str(folder)]


def env() -> dict[str, str]:
    return environment(PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(TINY))


def planned(folder: Path) -> int:
    """How many batches are in the query's offset log."""
    log = folder / "checkpoint" / "offsets"
    return len([entry for entry in log.iterdir() if entry.name.isdigit()]) if log.exists() else 0


def delivered(folder: Path) -> list[tuple[Any, ...]]:
    """The rows in the files that the sink's log names."""
    [line] = [line for line in program(folder, "count", "count").splitlines() if line.startswith("ROWS ")]
    return [tuple(row) for row in json.loads(line.removeprefix("ROWS "))]


def kill_a_task(driver: subprocess.Popen[bytes], rng: random.Random) -> int:
    """Kill one of the driver's Python workers, if there is one: Spark starts its task again."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == driver.pid and b"pyspark.daemon" in (entry / "cmdline").read_bytes():
                found.append((int(entry.name), int(fields[1])))
    parents = {parent for _, parent in found}
    workers = [pid for pid, _ in found if pid not in parents and pid != driver.pid]
    if not workers:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(workers), signal.SIGKILL)
        return 1
    return 0
