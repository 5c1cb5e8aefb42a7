"""Compactions in rounds by two drivers at once, and by drivers that die right after a commit: one result is linked.

PERSIST_SPARK_KILLS=10 pytest tests/spark/test_rounds_killed.py -k random         # as `make spark-kills` does
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core.plan.compaction import plan_compaction, policy_of
from persist_lib.core.sums import total
from persist_lib.testing import check_swept, check_world, read_history
from tests.spark.collections import Model, contents, write
from tests.spark.places import environment
from tests.spark.rounds_program import ROUNDS
from tests.torture.roles import open_ahead

KILLS = int(os.environ.get("PERSIST_SPARK_KILLS", "1"))
pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parent / "rounds_program.py"
ROOT = PROGRAM.parent.parent.parent
PATIENCE_S = 180.0


class Rounds:
    """A shard that calls for many requests, the drivers that compact it, and what must be in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file:{folder / 'data'}"
        self.client = persist.open(self.url, config=persist.Config(**ROUNDS))
        self.model = Model()

    def append(self, batches: int, seed: int) -> None:
        more = write(self.client, "s", batches=batches, rows=300, seed=seed)
        self.model = Model(self.model.updates + more.updates, more.upper)

    def start(self, name: str, after: int = 0) -> subprocess.Popen[bytes]:
        """A driver that dies after so many commits."""
        with (self.folder / f"log-{name}").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM), self.url, str(self.folder), name, str(after)], cwd=ROOT, stderr=errors,
                stdout=subprocess.PIPE, start_new_session=True, env=environment(PYTHONPATH=str(ROOT)),
            )  # fmt: skip

    def go(self, *names: str) -> None:
        """Let the drivers run their tasks once all of these have planned theirs."""
        wait_until(lambda: all((self.folder / f"planned-{name}").exists() for name in names), f"{names} plan nothing")
        (self.folder / "go").touch()

    def applied(self, driver: subprocess.Popen[bytes], name: str) -> list[int | None]:
        """The commits that a driver tells of at its end: seqnos, and None where another was first."""
        try:
            out, _ = driver.communicate(timeout=PATIENCE_S)
        finally:
            end(driver)
        log = (self.folder / f"log-{name}").read_text()[-3000:]
        assert driver.returncode == 0, log
        found: list[int | None] = json.loads(out.decode().partition("APPLIED ")[2])
        return found

    def died(self, driver: subprocess.Popen[bytes]) -> None:
        """A driver has ended as it was to."""
        try:
            assert driver.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            end(driver)

    def commits(self) -> list[int]:
        """The seqnos of all that compactions committed, by the log."""
        done = {"ApplyCompaction", "KeepContents"}
        check_world(self.client, "s")
        return [row.seqno for row in read_history(self.client, "s")[1] if row.command in done]

    def digest(self) -> tuple[int, int]:
        """What no compaction may change."""
        sums = total(batch.sums for batch in self.client.inspect("s").state.trace)
        return sums.diff_sum, sums.fingerprint

    def check(self) -> None:
        """Read as of some times, and check everything that is stored."""
        for as_of in (0, self.model.upper // 2, self.model.upper - 1):
            assert contents(self.client, "s", as_of) == self.model.contents(as_of), f"as of {as_of}"

    def check_done(self, rng: random.Random) -> None:
        """Nothing is left to compact, and after collection nothing is left that nobody refers to."""
        digest = self.digest()
        plan = plan_compaction(self.client.inspect("s").state, policy_of(self.client.config))
        assert not plan.requests, plan
        self.check()
        with open_ahead(self.url, rng, 2 * ROUNDS["lease_ms"] / 1000) as later:
            seqno = None
            while seqno != later.inspect("s").seqno:
                seqno = later.inspect("s").seqno
                later.maintain("s")
            check_swept(later, "s")
            assert not later.inspect("s").state.writers
        assert self.digest() == digest
        self.check()


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rounds]:
    found = Rounds(tmp_path)
    with found.client:
        yield found


def test_drivers_that_die_right_after_a_commit_leave_the_rest_to_the_next(rounds: Rounds) -> None:
    """The first dies after one of several folds, the second after two; the third does what is left."""
    rounds.append(160, 0)
    digest, seen = rounds.digest(), list[int]()
    rounds.go()
    for name, after in (("first", 1), ("second", 2)):
        rounds.died(rounds.start(name, after))
        seen, before = rounds.commits(), seen
        assert len(seen) == len(before) + after, "what was committed stays, and nothing else is"
        assert rounds.digest() == digest
        rounds.check()
    told = rounds.applied(rounds.start("third"), "third")
    assert len(told) >= 3, "the rest is folds and a merge"
    assert rounds.commits() == seen + told
    assert rounds.digest() == digest
    rounds.check_done(random.Random(0))


def test_two_drivers_that_planned_the_same_rounds_link_each_result_once(rounds: Rounds) -> None:
    """Both plan from the same state. One of them dies after its second commit; the other finishes."""
    rounds.append(160, 1)
    digest = rounds.digest()
    with both(rounds, {"ada": 0, "bob": 2}) as (ada, bob):
        rounds.go("ada", "bob")
        told = rounds.applied(ada, "ada")
        bob.wait(PATIENCE_S)
        commits = rounds.commits()
        mine = {seqno for seqno in told if seqno is not None}
        others = set(commits) - mine
        assert mine <= set(commits)
        assert len(others) == 2 if bob.returncode == -signal.SIGKILL else len(others) < 2
        assert None in told or not others, "who was second knows it"
    assert rounds.digest() == digest
    rounds.check_done(random.Random(0))


@pytest.mark.timeout(300 + 120 * KILLS)
def test_two_drivers_killed_at_random_leave_one_result_of_each_round(rounds: Rounds, rng: random.Random) -> None:
    """Each round appends and starts two drivers; they die after some commit, or are killed at a random moment."""
    killed = died = 0
    for number in range(KILLS):
        rounds.append(60 if number else 160, number)
        digest = rounds.digest()
        (rounds.folder / "go").unlink(missing_ok=True)
        names = {f"ada{number}": rng.choice([0, 1, 2, 4]), f"bob{number}": rng.choice([1, 2, 3])}
        before = len(rounds.commits())
        with both(rounds, names) as drivers:
            rounds.go(*rng.sample(sorted(names), rng.choice([1, 2])))
            victim, moment = rng.choice(drivers), rng.uniform(0, 6)
            begun = time.monotonic()
            while any(driver.poll() is None for driver in drivers):
                assert time.monotonic() - begun < PATIENCE_S
                if time.monotonic() - begun > moment and victim.poll() is None:
                    end(victim)
                    killed += 1
                time.sleep(0.02)
            died += sum(driver.returncode == -signal.SIGKILL for driver in drivers)
        print(f"round {number}: {names}, {len(rounds.commits()) - before} commits")
        assert rounds.digest() == digest
        rounds.check()
    print(f"{died} drivers died, of which {killed} at a random moment")
    assert died
    last = rounds.applied(rounds.start("last"), "last")
    assert None not in last
    rounds.check_done(rng)


@contextmanager
def both(rounds: Rounds, drivers: dict[str, int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Drivers by name, and after how many commits each dies."""
    started = [rounds.start(name, after) for name, after in drivers.items()]
    try:
        yield started
    finally:
        for driver in started:
            end(driver)


def end(driver: subprocess.Popen[bytes]) -> None:
    """Kill a driver with its JVM and what it started. Idempotent."""
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()


def wait_until(what: object, says: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, says
        time.sleep(0.02)
