"""Real clients under simulated schedules and faults: PERSIST_SIM_SEEDS of them, or the one PERSIST_SIM_SEED.

With a PERSIST_SEED, a third of the seeds are drawn by it; the others are the same in each run.

Late compare-and-sets and uploads, lost answers, stale heads, pauses beyond any lease, crashes at any operation. The
same seed gives the same history.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, SinceViolation, UpperMismatch
from persist_lib.testing import check_swept, check_world, contents_of, updates_of
from tests.simulation.scheduler import Actor, Chaos, Simulation
from tests.worlds import SCHEMA

SEEDS = int(os.environ.get("PERSIST_SIM_SEEDS", "12"))
ONE = os.environ.get("PERSIST_SIM_SEED")
DRAWN = os.environ.get("PERSIST_SEED")
STEPS = 3000
EAGER = persist.Policy(weight=1e9, advance=0.01)
SHARD = "s"
ROLES = {"writer": 2, "twin": 2, "maintainer": 2, "reader": 1}


class Story:
    """One simulation with the actors of a busy shard, and what each was told."""

    steps = STEPS

    def __init__(self, seed: int, chaos: Chaos = Chaos()) -> None:  # noqa: B008 - a tuple
        self.simulation = Simulation(seed, chaos)
        self.random = self.simulation.random
        self.outcomes: dict[int, str] = {}
        self.bounds: dict[int, tuple[int, int]] = {}
        self.known: dict[int, Any] = {}
        self.born: Counter[str] = Counter()
        self.config = persist.Config(
            lease_ms=10_000, timeout_s=20, rollup_every=self.random.choice([4, 16]), part_bytes=64 * 1024,
            inline_bytes=self.random.choice([0, 700, 16 * 1024]), task_bytes=64 * 1024,
        )  # fmt: skip

    def run(self) -> str:
        with persist.open(self.simulation.location, runtime=self.simulation.clock.runtime()) as client:
            client.open_writer(SHARD, SCHEMA)
        for role, count in ROLES.items():
            for _ in range(count):
                self.spawn(role)
        self.simulation.run(self.steps, lambda actor: self.spawn(actor.name.partition(" ")[0]))
        self.judge()
        return self.simulation.history.hexdigest()

    def spawn(self, role: str) -> None:
        self.born[role] += 1
        self.simulation.spawn(f"{role} {self.born[role]}", getattr(self, role))

    def is_over(self) -> bool:
        return self.simulation.steps > self.steps

    def writer(self, actor: Actor) -> None:
        """Append data of its own, and remember what it was told."""
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, SCHEMA)
            while not self.is_over():
                number = len(self.outcomes) + 1
                self.outcomes[number] = "unknown"
                try:
                    lower = write.fetch_upper().time or 0
                    upper = lower + actor.random.randrange(1, 4)
                    self.bounds[number] = (lower, upper)
                    count = actor.random.choice([1, 3, 20])
                    rows = [self.row(number, i, actor.random.randrange(lower, upper)) for i in range(count)]
                    self.outcomes[number] = self.append(write, rows, lower, upper)
                except (UpperMismatch, LeaseExpired, Determinate):
                    self.outcomes[number] = "no"
                client.heartbeat()
                actor.sleep(actor.random.random())

    def append(self, write: persist.WriteHandle, rows: list[dict[str, Any]], lower: int, upper: int) -> str:
        """An unknown outcome is asked for by its token: then it is known."""
        token = None
        for _ in range(20):
            try:
                if write.machine.runtime.random.random() < 0.3:
                    write.append_async(rows, lower, upper, token=token).result(0)
                else:
                    write.compare_and_append(rows, lower, upper, token=token)
            except Indeterminate as error:
                if "token" not in error.fields:
                    return "unknown"  # it was its registration, or an upload, that got no answer
                token = cast("bytes", error.fields["token"])
            except (UpperMismatch, LeaseExpired, Determinate):
                if token is not None:
                    return "unknown"  # under a new id nobody remembers
                raise
            else:
                return "ack"
        return "unknown"

    def row(self, number: int, i: int, time: int) -> dict[str, Any]:
        return {"id": number * 100 + i, "word": "x", "_time": time, "_diff": 1}

    def twin(self, actor: Actor) -> None:
        """Several writers of identical data: at each time divisible by 10 the row -time, whoever is first."""
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, SCHEMA)
            while not self.is_over():
                try:
                    upper = write.fetch_upper().time or 0
                    lower = max(0, upper - actor.random.randrange(3))
                    # Only its own times are identical: whatever is complete already is cut off.
                    rows = [{"id": -1 - t, "word": "twin", "_time": t} for t in range(upper, upper + 2)]
                    write.append(rows, lower, upper + 2)
                except (UpperMismatch, LeaseExpired, Determinate, Indeterminate):
                    pass
                client.heartbeat()
                actor.sleep(actor.random.random())

    def maintainer(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                duty = actor.random.choice(["maintain", "compact", "roll_up", "collect", "audit_orphans", "expire"])
                options: dict[str, Any] = {"policy": EAGER} if duty in {"maintain", "compact"} else {}
                with suppress(LeaseExpired, Determinate, Indeterminate):
                    getattr(client, duty)(SHARD, **options)
                actor.sleep(actor.random.random())

    def reader(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(LeaseExpired, SinceViolation, Determinate, Indeterminate):
                    self.read(actor, client)
                actor.sleep(actor.random.random())

    def read(self, actor: Actor, client: persist.Client) -> None:
        with client.open_reader(SHARD) as read:
            first = read.since.time or 0
            if not read.fetch_upper().has_passed(first):
                return
            base = contents_of(read.snapshot(first, diff=True).to_arrow())
            heard: dict[Any, int] = {}
            listener = read.listen(first)
            for _ in range(5):
                before = listener.frontier
                for event in listener.poll():
                    if isinstance(event, persist.Updates):
                        for data, time, diff in updates_of(event.table):
                            assert before.is_before(time)
                            assert (data, time) not in heard, f"{data} at {time} came twice"
                            heard[data, time] = diff
                    else:
                        before = event.frontier
                newest = (listener.frontier.time or 0) - 1
                if newest >= first:
                    as_of = actor.random.randint(first, newest)
                    expected = base + Counter({d: diff for (d, time), diff in heard.items() if time <= as_of})
                    found = contents_of(read.snapshot(as_of, diff=True).to_arrow())
                    assert found == expected, f"as of {as_of}"
                    assert self.known.setdefault(as_of, found) == found, f"as of {as_of} it was something else"
                    if actor.random.random() < 0.3:
                        read.downgrade_since(max(first, newest - 5))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def judge(self) -> None:
        clock = self.simulation.clock
        with persist.open(self.simulation.location, runtime=clock.runtime()) as client:
            check_world(client, SHARD)
            upper = client.inspect(SHARD).state.upper.time or 0
            told = contents_of(client.open_reader(SHARD).snapshot(upper - 1, diff=True).to_arrow())
            for as_of, found in self.known.items():
                assert found.keys() <= told.keys(), f"what was there as of {as_of} is gone"
            self.check_contents({int(data[0]): diff for data, diff in told.items()})
            clock.advance(1000)
            client.expire(SHARD)
            for _ in range(8):
                seqno = client.inspect(SHARD).seqno
                client.maintain(SHARD)
                if client.inspect(SHARD).seqno == seqno:
                    break
            else:
                raise AssertionError("maintenance does not come to rest")
            check_swept(client, SHARD)

    def check_contents(self, told: dict[int, int]) -> None:
        assert set(told.values()) <= {1}, "doubled"
        found = Counter(id_ // 100 for id_ in told if id_ >= 0)
        for number, outcome in self.outcomes.items():
            assert not found[number] or outcome != "no", f"append {number} was refused and is there"
            assert found[number] in {0, 1, 3, 20}, f"append {number} is there in part"
            assert found[number] or outcome != "ack", f"append {number} was acknowledged and is lost"
        spans = sorted(self.bounds[number] for number in found if number in self.bounds)
        assert all(left[1] <= right[0] for left, right in pairwise(spans))


def seeds() -> list[int]:
    if ONE:
        return [int(ONE)]
    fresh = SEEDS // 3 if DRAWN else 0
    return [*range(SEEDS - fresh), *random.Random(DRAWN).sample(range(SEEDS, 2**32), fresh)]


@pytest.mark.parametrize("seed", seeds())
def test_whatever_the_schedule_nothing_is_lost_doubled_or_left(seed: int) -> None:
    story = Story(seed)
    try:
        story.run()
    except BaseException:
        print(f"PERSIST_SIM_SEED={seed} .venv/bin/python -m pytest tests/simulation")
        raise
    outcomes = Counter(story.outcomes.values())
    print(f"{dict(outcomes)}, {story.simulation.crashes} crashes, {story.simulation.steps} steps")
    assert outcomes["ack"] > 3


def test_the_same_seed_gives_the_same_history() -> None:
    assert Story(1).run() == Story(1).run()
    assert Story(1).run() != Story(2).run()


def test_without_faults_everything_is_acknowledged() -> None:
    story = Story(3, Chaos(0, 0, 0, 0, 0, 0, 0))
    story.run()
    assert set(story.outcomes.values()) <= {"ack", "no"}
