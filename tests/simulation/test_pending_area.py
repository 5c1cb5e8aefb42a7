"""Writers that only put, absorbers, readers, clones and collectors under simulated schedules and faults.

As in `test_simulation`: PERSIST_SIM_SEEDS of them, or the one PERSIST_SIM_SEED. Late uploads, lost answers, crashes at
any operation, pauses beyond any lease. Every read equals the plain list, nothing that is needed is deleted, and at rest
nothing is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, SinceViolation
from persist_lib.format.paths import pending_key, pending_prefix
from persist_lib.ids import ShardId
from persist_lib.pending_area import objects
from persist_lib.simulate import Actor, SimulatedBlob, Story
from persist_lib.simulate.story import DUTIES
from persist_lib.testing import check_world, contents_of, updates_of
from tests.simulation.stories import SEEDS, play, seeds
from tests.unit.pending_area.areas import plain, said
from tests.worlds import SCHEMA

STEPS = 2500
SHARD = ShardId("s")
PASSING = (LeaseExpired, SinceViolation, Determinate, Indeterminate)


class PendingStory(Story):
    """One simulation, how far each writer's batches are acknowledged, and how often what was read."""

    roles: Mapping[str, int] = {"writer": 3, "absorber": 2, "maintainer": 2, "reader": 2}

    def __init__(self, seed: int) -> None:
        super().__init__(seed, steps=STEPS)
        self.acknowledged: Counter[str] = Counter()

    def begin(self, client: persist.Client) -> None:
        pending_area.create(client, SHARD, SCHEMA).close()

    def spawn(self, role: str) -> None:
        """A new process in the place of one that is gone has its name, as its batches are those of a writer."""
        name = role if " " in role else f"{role} {sum(one.startswith(role) for one in self.born)}"
        self.born[name] += 1
        self.simulation.spawn(f"{name}.{self.born[name]}", getattr(self, name.partition(" ")[0]))

    def replace(self, actor: Actor) -> None:
        self.spawn(actor.name.rpartition(".")[0])

    def writer(self, actor: Actor) -> None:
        """Put batches from where it was, or from somewhat before: it does not know how far it came."""
        name = actor.name.partition(".")[0].replace(" ", "-")
        write = pending_area.Writer(self.simulation.url, SHARD, name, SCHEMA, runtime=actor.runtime())
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
            self.repeat(actor, lambda: self.absorb(client), PASSING)

    def absorb(self, client: persist.Client) -> None:
        done = pending_area.absorb(client, SHARD)
        assert not done.disagreements
        assert not done.damaged
        self.did["absorbed"] += done.batches
        self.did["adopted"] += done.adopted
        self.did["discarded"] += done.discarded

    def maintainer(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.upkeep(client, SHARD, actor.random.choice([*DUTIES, "collect"])), PASSING)

    def reader(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.read(actor, client), PASSING)

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
                self.did["beyond" if time >= (reader.upper.time or 0) else "merged"] += 1
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
                self.did["clones"] += 1
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

    def judge(self, client: persist.Client) -> None:
        check_world(client, SHARD)
        self.come_to_rest(client, SHARD, lambda: pending_area.absorb(client, SHARD))
        state = client.inspect(SHARD).state
        assert state.upper.time is not None
        assert state.upper.time >= max(self.acknowledged.values()), "what was acknowledged is lost"
        assert self.pending(client) <= {key for batch in state.trace for key in batch.keys}, "something is left over"
        time = state.upper.time - 1
        with client.open_reader(SHARD) as read, read.snapshot(time, diff=True) as snapshot:
            assert contents_of(snapshot.to_arrow()) == plain(said(0, time + 1), time)


@pytest.mark.parametrize("seed", seeds(min(SEEDS, 6) if SEEDS == 12 else SEEDS))
def test_whatever_the_schedule_every_read_is_the_plain_list_and_nothing_is_left(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(objects, "ADOPT_BYTES", 1 if seed % 2 else 1 << 20)
    assert play(PendingStory(seed)).did["absorbed"] > 3


def test_the_same_seed_gives_the_same_history() -> None:
    assert PendingStory(1).run() == PendingStory(1).run()
