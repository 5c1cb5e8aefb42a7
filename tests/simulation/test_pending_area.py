"""Writers that only put, absorbers, readers, clones and collectors under simulated schedules and faults.

As in `test_simulation`: PERSIST_SIM_SEEDS of them, or the one PERSIST_SIM_SEED. Late uploads, lost answers, crashes at
any operation, pauses beyond any lease. Every read equals the plain list, nothing that is needed is deleted, and at rest
nothing is left over.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, SinceViolation
from persist_lib.format.paths import pending_key, pending_prefix
from persist_lib.ids import ShardId
from persist_lib.pending_area import objects
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import check_swept, check_world, contents_of, updates_of
from tests.simulation.scheduler import Actor, Chaos, SimulatedBlob, Simulation
from tests.unit.pending_area.areas import plain, said
from tests.worlds import SCHEMA

SEEDS = int(os.environ.get("PERSIST_SIM_SEEDS", "6"))
ONE = os.environ.get("PERSIST_SIM_SEED")
STEPS = 2500
EAGER = persist.Policy(weight=1e9, advance=0.01)
SHARD = ShardId("s")
ROLES = {"writer": 3, "absorber": 2, "maintainer": 2, "reader": 2}
PASSING = (LeaseExpired, SinceViolation, Determinate, Indeterminate)


class Story:
    """One simulation, how far each writer's batches are acknowledged, and how often what was read."""

    def __init__(self, seed: int, chaos: Chaos = Chaos()) -> None:  # noqa: B008 - a tuple
        self.simulation = Simulation(seed, chaos)
        self.random = self.simulation.random
        self.acknowledged: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.born: Counter[str] = Counter()
        self.config = persist.Config(
            lease_ms=10_000, timeout_s=20, rollup_every=self.random.choice([4, 16]), part_bytes=64 * 1024,
            inline_bytes=self.random.choice([0, 700, 16 * 1024]), task_bytes=64 * 1024,
        )  # fmt: skip

    def run(self) -> str:
        with persist.open(self.simulation.location, runtime=self.simulation.clock.runtime()) as client:
            pending_area.create(client, SHARD, SCHEMA).close()
        for role, count in ROLES.items():
            for number in range(count):
                self.spawn(f"{role} {number}")
        self.simulation.run(STEPS, lambda actor: self.spawn(actor.name.rpartition(".")[0]))
        self.judge()
        return self.simulation.history.hexdigest()

    def spawn(self, name: str) -> None:
        """A new process in the place of one that is gone: the same name, if it is a writer."""
        self.born[name] += 1
        self.simulation.spawn(f"{name}.{self.born[name]}", getattr(self, name.partition(" ")[0]))

    def is_over(self) -> bool:
        return self.simulation.steps > STEPS

    def writer(self, actor: Actor) -> None:
        """Put batches from where it was, or from somewhat before: it does not know how far it came."""
        name = actor.name.partition(".")[0].replace(" ", "-")
        clock = self.simulation.clock
        runtime = Runtime(monotonic=clock.monotonic, sleep=actor.sleep, random=actor.random, background=False)
        write = pending_area.Writer(self.simulation.url, SHARD, name, SCHEMA, runtime=runtime)
        write._puts = SimulatedBlob(self.simulation.location.blob, actor)
        lower = max(0, self.acknowledged[name] - actor.random.randrange(4))
        while not self.is_over():
            upper = lower + actor.random.randrange(1, 6)
            with suppress(Determinate, Indeterminate):
                write.put(said(lower, upper), lower, upper, timeout=5)
                self.acknowledged[name] = max(self.acknowledged[name], upper)
                lower = upper - (actor.random.random() < 0.1)
            actor.sleep(actor.random.choice([0.1, 0.5, 3]))

    def absorber(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*PASSING):
                    done = pending_area.absorb(client, SHARD)
                    assert not done.disagreements
                    assert not done.damaged
                    self.seen["absorbed"] += done.batches
                    self.seen["adopted"] += done.adopted
                    self.seen["discarded"] += done.discarded
                actor.sleep(actor.random.random())

    def maintainer(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                duty = actor.random.choice(
                    ["maintain", "compact", "roll_up", "collect", "collect", "audit_orphans", "expire"]
                )
                options: dict[str, Any] = {"policy": EAGER} if duty in {"maintain", "compact"} else {}
                with suppress(*PASSING):
                    getattr(client, duty)(SHARD, **options)
                actor.sleep(actor.random.random())

    def reader(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*PASSING):
                    self.read(actor, client)
                actor.sleep(actor.random.random())

    def read(self, actor: Actor, client: persist.Client) -> None:
        with ExitStack() as stack:
            readers = [stack.enter_context(pending_area.acquire_read_handle(client, SHARD))]
            first = readers[0].since.time or 0
            self.follow(actor, client, stack, readers, stack.enter_context(readers[0].listen(first)), first)

    def follow(
        self, actor: Actor, client: persist.Client, stack: ExitStack, readers: list[pending_area.PendingReader],
        listener: pending_area.PendingListen, first: int,
    ) -> None:  # fmt: skip
        heard: Counter[Any] = Counter()
        frontier = first + 1
        for _ in range(6):
            reader = actor.random.choice(readers)
            with suppress(persist.TimedOut):
                time = frontier + actor.random.randrange(6)
                assert contents_of(reader.contents(time, timeout=1, diff=True)) == plain(said(0, time + 1), time), (
                    f"as of {time}"
                )
                self.seen["beyond" if time >= (reader.upper.time or 0) else "merged"] += 1
            for event in listener.poll():
                if isinstance(event, persist.Updates):
                    for data, time, diff in updates_of(event.table):
                        assert time >= frontier
                        heard[data, time] += diff
                else:
                    frontier = event.frontier.time or 0
            self.check_heard(heard, first + 1, frontier)
            draw = actor.random.random()
            if draw < 0.3:
                readers.append(stack.enter_context(reader.clone()))
                self.seen["clones"] += 1
            elif draw < 0.5 and len(readers) > 1:
                readers.remove(reader)
                reader.close()
            elif draw < 0.7:
                reader.downgrade_since(max(0, frontier - 4))
            client.heartbeat()
            actor.sleep(actor.random.random())

    def check_heard(self, heard: Counter[Any], lower: int, upper: int) -> None:
        expected: Counter[Any] = Counter()
        for one in said(lower, upper):
            expected[(one["id"], one["word"]), one["_time"]] += one["_diff"]
        assert heard == expected, f"of [{lower}, {upper})"

    def pending(self, client: persist.Client) -> set[str]:
        return {pending_key(SHARD, entry.key) for entry in client.blob.list(pending_prefix(SHARD))}

    def judge(self) -> None:
        clock = self.simulation.clock
        with persist.open(self.simulation.location, runtime=clock.runtime()) as client:
            check_world(client, SHARD)
            clock.advance(1000)
            client.expire(SHARD)
            for _ in range(12):
                before = client.inspect(SHARD).seqno
                pending_area.absorb(client, SHARD)
                client.maintain(SHARD)
                if client.inspect(SHARD).seqno == before:
                    break
            else:
                raise AssertionError("it does not come to rest")
            check_swept(client, SHARD)
            state = client.inspect(SHARD).state
            assert state.upper.time is not None
            assert state.upper.time >= max(self.acknowledged.values()), "what was acknowledged is lost"
            assert self.pending(client) <= {key for batch in state.trace for key in batch.keys}, (
                "something is left over"
            )
            time = state.upper.time - 1
            with client.open_reader(SHARD) as read, read.snapshot(time, diff=True) as snapshot:
                assert contents_of(snapshot.to_arrow()) == plain(said(0, time + 1), time)


def seeds() -> list[int]:
    return [int(ONE)] if ONE else [*range(SEEDS)]


@pytest.mark.parametrize("seed", seeds())
def test_whatever_the_schedule_every_read_is_the_plain_list_and_nothing_is_left(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(objects, "ADOPT_BYTES", 1 if seed % 2 else 1 << 20)
    story = Story(seed)
    try:
        story.run()
    except BaseException:
        print(f"PERSIST_SIM_SEED={seed} .venv/bin/python -m pytest tests/simulation/test_pending_area.py")
        raise
    print(f"{dict(story.seen)}, {story.simulation.crashes} crashes, {story.simulation.steps} steps")
    assert story.seen["absorbed"] > 3


def test_the_same_seed_gives_the_same_history() -> None:
    assert Story(1).run() == Story(1).run()
