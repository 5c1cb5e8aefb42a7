"""Processes whose clocks differ by days, step and drift share a shard: clocks change who is live, and nothing else.

On files each process tells the time by its own clock, so one that is ahead retires everybody again and again. On
PostgreSQL only the server's counts.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import persist_lib as persist
from tests import servers
from tests.torture.processes import ENOUGH, ROLES, ROOT, Processes, attempts, failures, judge
from tests.torture.roles import SCHEMA, SHARD

SECONDS = float(os.environ.get("PERSIST_CLOCKS_SECONDS", "3"))
AT_MOST_SECONDS = 150.0
"""A machine with other work may not have started all that writes after three seconds."""
CLOCKS = Path(__file__).parent / "clocks"
DAY_S = 86_400.0
MIXES = {
    "days apart": {"ada": "+3d", "bob": "-3d", "mia": "+3d", "rex": "drifting"},
    "all step and drift": {"ada": "stepping", "bob": "drifting", "mia": "stepping", "rex": "stepping"},
}


def run(url: str, directory: Path, clocks: dict[str, str], rng: random.Random) -> None:
    """Let all work for a while, each by its own clock, and judge what is there."""
    with persist.open(*url.split(" ")) as client:
        client.open_writer(SHARD, SCHEMA)
    path = os.pathsep.join([str(CLOCKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with ExitStack() as started:
        all_ = {
            name: Processes(url, directory, rng, {"PERSIST_TEST_CLOCK": clocks[name], "PYTHONPATH": path})
            for name in ROLES
        }
        for processes in all_.values():
            started.callback(processes.close)
        for name, processes in all_.items():
            processes.start(name)
        began = time.monotonic()
        while (took := time.monotonic() - began) < SECONDS or not has_done_enough(directory):
            assert failures(directory) == ""
            assert took < SECONDS + AT_MOST_SECONDS, f"too little was done:\n{stacks(all_)}"
            time.sleep(0.1)
    assert failures(directory) == ""
    judge(url, attempts(directory), rng, leases_end_s=7 * DAY_S)


def stacks(all_: dict[str, Processes]) -> str:
    return "\n".join(one.stacks() for one in all_.values())


def has_done_enough(directory: Path) -> bool:
    """Whether both writers had appends acknowledged, and together enough of them."""
    numbers = [attempt.number for attempt in attempts(directory).values() if attempt.outcome == "ack"]
    return len(numbers) > ENOUGH and len({number // 10**9 for number in numbers}) == 2


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mix", [*MIXES])
def test_clocks_that_differ_by_days_change_no_answer_on_files(tmp_path: Path, mix: str, rng: random.Random) -> None:
    run(f"file:{tmp_path}/data", tmp_path, MIXES[mix], rng)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(300)
def test_nor_do_they_on_postgresql(tmp_path: Path, rng: random.Random) -> None:
    log = servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")
    run(f"file:{tmp_path}/data {log}", tmp_path, MIXES["all step and drift"], rng)


def test_the_clock_of_a_process_is_as_wrong_as_it_is_told_to_be() -> None:
    """Or these tests would show nothing: also in what a client starts to renew its leases."""
    program = (
        "import time; from persist_lib.location.contract import machine_clock; print(time.time(), machine_clock())"
    )
    for told, days in (("+3d", 3), ("-3d", -3), ("", 0)):
        env = {**os.environ, "PERSIST_TEST_CLOCK": told, "PYTHONPATH": str(CLOCKS)}
        said = subprocess.run([sys.executable, "-P", "-c", program], env=env, cwd=ROOT, capture_output=True, check=True)
        seconds, nanoseconds = said.stdout.split()
        for shown in (float(seconds), int(nanoseconds) / 1e9):
            assert abs(shown - time.time() - days * DAY_S) < 60
