"""Processes that are killed, and what they tried and were told."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import persist_lib as persist
from persist_lib.ids import uploader_of
from persist_lib.testing import check_swept, check_world, contents_of, updates_of
from tests.counted import count
from tests.torture.roles import LEASE_MS, SHARD, ids_of, open_ahead

ROLES = {"ada": "write", "bob": "write", "mia": "maintain", "rex": "read"}

ROOT = Path(__file__).resolve().parents[2]

ENOUGH = 5
"""A round in which no more was acknowledged shows nothing."""


class Attempt(NamedTuple):
    """One append as its writer logged it; `outcome` is ack, no, or try where it was killed before it knew."""

    number: int
    lower: int
    upper: int
    rows: int
    outcome: str


class Processes:
    """Processes with these roles, forked by a program that has imported everything."""

    def __init__(
        self, url: str, directory: Path, rng: random.Random, env: Mapping[str, str] | None = None, *,
        roles: Mapping[str, str] = ROLES, program: str = "tests.torture.roles",
    ) -> None:  # fmt: skip
        self.rng, self.directory, self.roles = rng, directory, roles
        self.forker = subprocess.Popen(
            [sys.executable, "-m", program, url, str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.pids: dict[str, int] = {}

    def start(self, name: str) -> None:
        assert self.forker.stdin is not None
        assert self.forker.stdout is not None
        print(self.roles[name], name, self.rng.randrange(10**5), file=self.forker.stdin, flush=True)
        self.pids[name] = int(self.forker.stdout.readline())

    def kill(self, name: str) -> None:
        pid = self.pids.pop(name)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count("kills", kills=1)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.002)

    def stacks(self) -> str:
        """Where each thread of each process stands, and what each writer logged last."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        found = [path for word in ("stacks-*", "log-*") for path in sorted(self.directory.glob(word))]
        return "\n".join(f"{path.name}:\n{path.read_text()[-8000:]}" for path in found)

    def close(self) -> None:
        for name in [*self.pids]:
            self.kill(name)
        self.forker.kill()
        self.forker.communicate()


def failures(directory: Path) -> str:
    path = directory / "failures"
    return path.read_text() if path.exists() else ""


def acknowledged(directory: Path) -> int:
    """How many appends were acknowledged so far."""
    return sum(path.read_text().count("ack ") for path in directory.glob("log-*"))


def attempts(directory: Path) -> dict[int, Attempt]:
    found: dict[int, Attempt] = {}
    for path in directory.glob("log-*"):
        for line in path.read_text().splitlines():
            word, *numbers = line.split()
            number = int(numbers[0])
            if word == "try":
                assert number not in found, "a seed came twice"
                lower, upper, rows = map(int, numbers[1:4])
                found[number] = Attempt(number, lower, upper, rows, "try")
            else:
                found[number] = found[number]._replace(outcome=word)
    return found


def judge(
    url: str, tried: dict[int, Attempt], rng: random.Random, *, leases_end_s: float = 10 * LEASE_MS / 1000
) -> None:
    """What is there is what was acknowledged, and of the unknown all or nothing; then everything else is swept."""
    with open_ahead(url, rng, 0) as client:
        check_world(client, SHARD)
        upper = client.inspect(SHARD).state.upper.time or 0
        told = contents_of(client.open_reader(SHARD).snapshot(upper - 1, diff=True).to_arrow())
        there = check_contents(told, tried)
        check_times(client, tried, there)
    with open_ahead(url, rng, leases_end_s) as client:
        for _ in range(8):
            seqno = client.inspect(SHARD).seqno
            client.maintain(SHARD)
            if client.inspect(SHARD).seqno == seqno:
                break
        else:
            raise AssertionError("maintenance does not come to rest")
        check_swept(client, SHARD)
        state = client.inspect(SHARD).state
        assert not state.writers
        assert not state.readers
        uploaders = {uploader_of(key) for batch in state.trace for key in batch.keys}
        assert state.retired.keys() <= uploaders, "an id is remembered while something lies below its prefix"
        assert contents_of(client.open_reader(SHARD).snapshot(upper - 1, diff=True).to_arrow()) == told
    outcomes = Counter(attempt.outcome for attempt in tried.values())
    print(f"{dict(outcomes)}, of the unknown {sum(tried[n].outcome == 'try' for n in there)} are there; upper {upper}")
    assert outcomes["ack"] > ENOUGH, "too little happened"


def check_contents(told: Counter[tuple[object, ...]], tried: dict[int, Attempt]) -> set[int]:
    """Answers the numbers of the appends that are there."""
    multiplicity = Counter({row[0]: diff for row, diff in told.items()})
    assert len(multiplicity) == len(told), "one id in two forms"
    assert set(multiplicity.values()) <= {1}, "doubled"
    there = set()
    for attempt in tried.values():
        found = sum(multiplicity.pop(id_, 0) for id_ in ids_of(attempt.number, attempt.rows))
        assert found in {0, attempt.rows}, f"{attempt} is there in part: {found}"
        if attempt.outcome == "ack":
            assert found == attempt.rows, f"{attempt} was acknowledged and is lost"
        if attempt.outcome == "no":
            assert found == 0, f"{attempt} was refused and is there"
        if found:
            there.add(attempt.number)
    assert not multiplicity, f"nobody wrote {multiplicity}"
    return there


def check_times(client: persist.Client, tried: dict[int, Attempt], there: set[int]) -> None:
    """Appends that are there do not overlap in time, and each update is within the bounds of its append."""
    spans = sorted((tried[n].lower, tried[n].upper) for n in there)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    with client.open_reader(SHARD) as read:
        since, upper = read.since.time or 0, read.fetch_upper()
        for event in read.listen(since, until=upper):
            if isinstance(event, persist.Updates):
                for (id_, _), moment, _ in updates_of(event.table):
                    attempt = tried[id_ // 100]
                    assert attempt.lower <= moment < attempt.upper
