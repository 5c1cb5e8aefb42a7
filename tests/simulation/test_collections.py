"""Two writers, two listeners, a controller that hands over and a tender at one collection, as one seed decides.

Requests are lost, late and doubled, heads are stale, processes pause beyond their leases and crash. Whatever a listener
adds up to, and whatever anybody reads as of a time, is what everybody else reads there, for ever.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter
from persist_lib.errors import (
    Determinate,
    HandoverRefused,
    Indeterminate,
    LeaseExpired,
    NotFound,
    SinceViolation,
    UpperMismatch,
)
from persist_lib.testing import contents_of, updates_of
from persist_lib.testing.model import Row, summed
from tests.simulation.scheduler import Actor, Chaos, Simulation
from tests.worlds import SCHEMA

SEEDS = int(os.environ.get("PERSIST_COLLECTION_SEEDS", "4"))
STEPS = 2500
ROLES = {"writer": 2, "listener": 2, "controller": 1, "tender": 1}
WORLD = (LeaseExpired, SinceViolation, UpperMismatch, HandoverRefused, NotFound, Determinate, Indeterminate)


class Story:
    """One simulation, and what was told in it."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed, Chaos())
        self.random = self.simulation.random
        self.config = persist.Config(lease_ms=10_000, timeout_s=20, part_bytes=64 * 1024)
        self.known: dict[int, Counter[Row]] = {}
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()
        self.number = self.handovers = self.commands = 0
        self.born: Counter[str] = Counter()

    def run(self) -> str:
        with persist.open(self.simulation.location, runtime=self.simulation.clock.runtime()) as client:
            client.controller().create("c", SCHEMA, shards=2, mode="compare_and_append", retention=3)
        for role, count in ROLES.items():
            for _ in range(count):
                self.spawn(role)
        self.simulation.run(STEPS, lambda actor: self.spawn(actor.name.partition(" ")[0]))
        self.judge()
        return self.simulation.history.hexdigest()

    def spawn(self, role: str) -> None:
        self.born[role] += 1
        self.simulation.spawn(f"{role} {self.born[role]}", getattr(self, role))

    def is_over(self) -> bool:
        return self.simulation.steps > STEPS

    def writer(self, actor: Actor) -> None:
        """Append a row of its own to each of several shards, or none of them."""
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*WORLD), client.controller().open_writer("c") as writer:
                    for _ in range(6):  # it keeps what it has read of promises
                        self.write(writer)
                        client.heartbeat()
                        actor.sleep(actor.random.random())

    def write(self, writer: CollectionWriter) -> None:
        self.number += 1
        number = self.number
        rows = [{"id": number * 10 + i, "word": "x"} for i in range(3)]
        if number % 2:
            writer.append_now(rows)
            self.acknowledged.add(number)
            return
        upper = writer.fetch_upper().time or 0
        try:
            writer.compare_and_append([{**row, "_time": upper} for row in rows], upper, upper + 1)
            self.acknowledged.add(number)
        except UpperMismatch:
            self.refused.add(number)

    def listener(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*WORLD):
                    self.listen(actor, client)
                actor.sleep(actor.random.random())

    def listen(self, actor: Actor, client: persist.Client) -> None:
        with client.controller().open_reader("c") as reader:
            as_of = max(reader.since.time or 0, (reader.fetch_upper().time or 0) - 2)
            if not reader.fetch_upper().has_passed(as_of):
                return
            total = self.learn(as_of, contents_of(reader.snapshot(as_of, diff=True).to_arrow()))
            with reader.listen(as_of) as listen:
                for _ in range(8):
                    for event in listen.poll():
                        if isinstance(event, persist.Updates):
                            for data, _, diff in updates_of(event.table):
                                total[data] += diff
                        elif event.frontier.time is not None:
                            total = self.learn(event.frontier.time - 1, Counter(summed(total.items())))
                    client.heartbeat()
                    actor.sleep(actor.random.random())

    def learn(self, as_of: int, found: Counter[Row]) -> Counter[Row]:
        assert self.known.setdefault(as_of, found) == found, f"as of {as_of} it was something else"
        return Counter(found)

    def controller(self, actor: Actor) -> None:
        """Make a copy, copy, hand over, copy the rest; a command that got no answer is repeated by its id."""
        with actor.client(self.config) as client:
            controller = client.controller()
            while not self.is_over():
                self.commands += 1
                made, handed = f"make-{self.commands}", f"hand-{self.commands}"
                number: int | None = None
                for _ in range(6):
                    with suppress(*WORLD):
                        shards = actor.random.randrange(1, 4) if number is None else None
                        if number is None:
                            shards = 1 + self.commands % 3
                            number = controller.make_rendition("c", shards=shards, copy=True, command=made).number
                        controller.copy_rendition("c", number)
                        controller.hand_over("c", number, command=handed)
                        controller.copy_rendition("c", number, to_end=True)
                        self.handovers += 1
                        break
                    client.heartbeat()
                actor.sleep(3 * actor.random.random())

    def tender(self, actor: Actor) -> None:
        """Do the duty, and finish copies that a controller left: writers wait for them."""
        with actor.client(self.config) as client:
            controller = client.controller()
            while not self.is_over():
                with suppress(*WORLD):
                    self.tend(controller)
                client.heartbeat()
                actor.sleep(actor.random.random())

    def tend(self, controller: Any) -> None:
        controller.tend("c")
        active = controller.describe("c").active
        if active.copies is not None and active.start is not None and active.upper < persist.at(active.start):
            controller.copy_rendition("c", active.number, to_end=True)

    def judge(self) -> None:
        clock = self.simulation.clock
        with persist.open(self.simulation.location, runtime=clock.runtime()) as client:
            controller = client.controller()
            clock.advance(1000)
            for shard in client.shards():
                client.expire(shard)
            for _ in range(3):
                self.tend(controller)
            with controller.open_reader("c") as reader:
                upper = reader.fetch_upper().time or 0
                told = contents_of(reader.snapshot(upper - 1, diff=True).to_arrow())
                for as_of in range(reader.since.time or 0, upper):
                    self.learn(as_of, contents_of(reader.snapshot(as_of, diff=True).to_arrow()))
            for as_of, found in self.known.items():
                assert found.keys() <= told.keys(), f"what was there as of {as_of} is gone"
            assert set(told.values()) <= {1}, "doubled"
            there = Counter(data[0] // 10 for data in told)
            assert set(there.values()) <= {3}, "a part of an append"
            assert self.acknowledged <= there.keys(), "an acknowledged append is lost"
            assert not self.refused & there.keys(), "a refused append is there"
            assert len(controller.describe("c").pending) == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_is_read_of_a_collection_is_what_everybody_reads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of the stories writers promise ahead of what they write, as they do where times are a clock."""
    if seed % 2:
        monkeypatch.setattr(CollectionWriter, "_ahead", lambda _, promise: persist.at((promise.time or 0) + 2))
    story = Story(seed)
    story.run()
    print(f"{story.handovers} handovers, {len(story.acknowledged)} appends, {story.simulation.crashes} crashes")
    assert story.acknowledged
