"""A payments ledger killed at random and at each step, on every kind of store, and while its log moves to another one.

PERSIST_EVENT_KILLS says how often in all; `make event-kills`. Each kill is judged before the next start: no webhook
speaks of an event that is not in the log, no acknowledged payment is lost, each is made once, balances add up.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib import events
from persist_lib.testing.servers import state_of
from tests import eventlogs, servers
from tests.counted import count
from tests.torture.event_ledger import Processes, Receiver, World, log_of, until
from tests.torture.event_program import Job

KILLS = int(os.environ.get("PERSIST_EVENT_KILLS", "0"))
"""None: the short form."""
SEED = os.environ.get("PERSIST_SEED", "5")
KINDS = eventlogs.KINDS if KILLS else ("disk", "sqlt", "lmdb")
RANDOM_KILLS = max(3, KILLS // (2 * len(KINDS)))
STEPS = max(4, KILLS // (2 * len(KINDS)))
PAIRS = [*itertools.permutations(KINDS, 2)] if KILLS else [("disk", "sqlt"), ("lmdb", "disk")]
PAYMENTS = 40
pytestmark = [pytest.mark.torture, pytest.mark.timeout(120 + 5 * KILLS)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    servers.use_test_credentials()
    found = Processes()
    yield found
    found.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver(5)
    yield found
    found.close()


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    seed = f"{time.time_ns() if SEED == 'fresh' else SEED} {request.node.name}"
    print(f"seed {seed}")
    return random.Random(seed)


def finish(processes: Processes, world: World, job: Job) -> tuple[int, int]:
    """Run a job to its end. Returns how many steps it took, and at how many it can be paused."""
    status = processes.wait(processes.start(job))
    world.learn(job)
    assert status == 0, world.notes(job)
    [counts] = [rest.split() for said, rest in world.notes(job) if said == "stopped"]
    return int(counts[0]), int(counts[1])


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_no_webhook_is_sent_whose_event_is_not_in_the_log(
    kind: str, tmp_path: Path, processes: Processes, receiver: Receiver, dice: random.Random
) -> None:
    world, store = World(tmp_path, receiver), eventlogs.specifier(kind, tmp_path)
    for _ in range(RANDOM_KILLS):
        job = world.job(store)
        pid = processes.start(job)
        awaited = dice.choice(("open", "ack"))  # a store may take a while for its first event
        until(lambda job=job, awaited=awaited: world.has_said(job, awaited), "it does not start")
        time.sleep(dice.choice((0.0, 0.02, 0.1, 0.3)) * dice.random())
        os.kill(pid, signal.SIGKILL)
        count("kills", kills=1)
        assert processes.wait(pid) == signal.SIGKILL, world.notes(job)
        world.learn(job)
        world.judge(store)
    finish(processes, world, world.job(store, count=10))
    assert world.judge(store) > RANDOM_KILLS
    world.check_all_told()
    assert len(receiver.got) >= len(world._expected)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_each_step_neither(
    kind: str, tmp_path: Path, processes: Processes, receiver: Receiver, dice: random.Random
) -> None:
    """A step is a call of the driver, of the system for durable bytes, or of the webhook; before it, and after it."""
    world, store = World(tmp_path, receiver), eventlogs.specifier(kind, tmp_path)
    steps, _ = finish(processes, world, world.job(store, count=PAYMENTS))
    for step in sorted(dice.sample(range(steps), min(steps, STEPS))):
        at, status = step, 0
        while status == 0:  # where more events share a commit than before, it comes to its end in fewer steps
            job = world.job(store, count=PAYMENTS, dies_at=at)
            status = processes.wait(processes.start(job))
            world.learn(job)
            world.judge(store)
            at //= 2
        assert status == signal.SIGKILL, world.notes(job)
        count("kills", kills=1)
    finish(processes, world, world.job(store, count=10))
    world.judge(store)
    world.check_all_told()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rock"])  # which one process at a time can open
def test_paused_and_overtaken_it_acknowledges_and_releases_nothing_more(
    kind: str, tmp_path: Path, processes: Processes, receiver: Receiver, dice: random.Random
) -> None:
    world, store = World(tmp_path, receiver), eventlogs.specifier(kind, tmp_path)
    _, steps = finish(processes, world, world.job(store, count=PAYMENTS))
    overtaken = 0
    for at in sorted(dice.sample(range(steps), min(steps, STEPS))):
        job = world.job(store, count=10 * PAYMENTS, stops_at=at)
        pid = processes.start(job)
        try:
            until(lambda pid=pid: state_of(pid) == "T", "it does not come to that step")
            was_writer = world.has_said(job, "open")
            finish(processes, world, world.job(store, count=10))
            last = world.judge(store)
        finally:
            os.kill(pid, signal.SIGCONT)
        status = processes.wait(pid)
        if status == 0 and not was_writer:  # paused before it claimed the log, it is the successor
            world.learn(job)
            world.judge(store)
            continue
        assert status != 0, "it wrote after its successor"
        *told, (word, why) = world.notes(job)
        assert word == "failed"
        overtaken += "Fenced" in why
        acknowledged = [int(rest.split()[1]) for said, rest in told if said == "ack"]
        assert max(acknowledged, default=0) < last, "it was told more than its successor found"
        assert world.judge(store) == last, "it wrote after its successor"
    assert overtaken > STEPS // 3
    finish(processes, world, world.job(store, count=10))
    world.judge(store)
    world.check_all_told()


def whole_logs(*stores: str) -> list[str]:
    """The stores on which a loop would go on alone. An empty one is as one that is not there: it begins a new log."""
    found = []
    for specifier in stores:
        with events.open_store(specifier) as store:
            try:
                looked = events.look(store)
                if looked.last and not looked.elsewhere.store:
                    found.append(specifier)
            except persist.NotFound:
                continue
    return found


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("both", [False, True], ids=["moved", "both"])
def test_killed_while_it_moves_to_another_store_it_is_one_log(
    pair: tuple[str, str], both: bool, tmp_path: Path, processes: Processes, receiver: Receiver, dice: random.Random
) -> None:
    world = World(tmp_path, receiver)
    first, second = (eventlogs.specifier(kind, tmp_path / side) for side, kind in zip("ab", pair, strict=True))
    for side in "ab":
        (tmp_path / side).mkdir()
    finish(processes, world, world.job(first, count=PAYMENTS))
    before = world.judge(first)
    steps, died = 60, 0
    for round_ in range(3):
        at = dice.randrange(2, steps) if round_ < 2 else dice.randrange(steps, 3 * steps)
        job = world.job(second, source=first, both=both, count=PAYMENTS, dies_at=at)
        status = processes.wait(processes.start(job))
        assert status in {0, signal.SIGKILL}, world.notes(job)
        died += status != 0
        world.learn(job)
        one, other = log_of(first), log_of(second)
        assert one[: len(other)] == other[: len(one)], "two logs"
        assert both or len(whole_logs(first, second)) <= 1, "each could continue alone"
        world.judge(first if len(one) >= len(other) else second)
    assert died > 0
    finish(processes, world, world.job(second, source=first, both=both, count=10))
    assert world.judge(second) > before
    world.check_all_told()
    assert log_of(first)[:before] == log_of(second)[:before]
    assert whole_logs(first, second) == ([first, second] if both else [second])
