"""Sixteen writers of one shard, each as fast as it can, under simulated schedules: counted, not timed.

An attempt that was too late is work for nothing, and is bounded: writers take turns, and everybody gets some. When the
state is full, one of them makes room; when a rollup is due, one of them writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest

import persist_lib as persist
from persist_lib.location.wrap.around import Operation
from persist_lib.simulate import NO_FAULTS, Actor, Simulation
from persist_lib.testing import check_world
from tests.worlds import SCHEMA

T = TypeVar("T")
WRITERS = 16
SHARD = "busy"
STEPS = 100_000


class Crowd(Simulation):
    """Writers that race until there are so many appends, and what each of them asked of the location meanwhile."""

    def __init__(self, seed: int, appends: int, word: str) -> None:
        super().__init__(seed, NO_FAULTS)
        self.appends, self.word = appends, word
        self.config = persist.Config(timeout_s=1000, lease_ms=10_000_000)
        self.won: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.transitions = 0

    def race(self) -> None:
        with persist.open(self.location, config=self.config, runtime=self.clock.runtime()) as client:
            client.open_writer(SHARD, SCHEMA)
        for number in range(WRITERS):
            self.spawn(f"writer {number}", self.writer)
        self.run(STEPS, lambda actor: pytest.fail(f"{actor.name} is gone"))
        with persist.open(self.location, runtime=self.clock.runtime()) as client:
            check_world(client, SHARD)
            version = client.inspect(SHARD)
            assert version.state.upper.time == self.won.total()
            self.transitions = version.seqno

    def writer(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, SCHEMA)
            upper = write.fetch_upper().time or 0
            while self.won.total() < self.appends:
                try:
                    write.compare_and_append([{"id": upper, "word": self.word, "_time": upper}], upper, upper + 1)
                except persist.UpperMismatch:
                    upper = write.upper.time or 0
                else:
                    upper += 1
                    self.won[actor.name] += 1

    def around(self, actor: Actor, operation: Operation, call: Callable[[], T]) -> T:
        kind = operation.kind
        if kind == "set":
            kind = "rollup" if "/rollup/" in operation.key else "part"
        self.asked[kind] += 1
        return super().around(actor, operation, call)


@pytest.mark.parametrize("seed", range(3))
def test_few_attempts_are_in_vain_and_every_writer_gets_its_share(seed: int) -> None:
    crowd = Crowd(seed, 960, "x")
    crowd.race()
    least, equal = min(crowd.won[actor.name] for actor in crowd.actors), crowd.won.total() / WRITERS
    print(crowd.asked, sorted(crowd.won.values()), crowd.steps)
    assert crowd.asked["compare_and_set"] < 1.6 * crowd.won.total()
    assert crowd.asked["rollup"] == crowd.transitions // crowd.config.rollup_every
    assert least >= equal / 4


@pytest.mark.parametrize("seed", range(2))
def test_a_full_state_is_given_room_by_one_of_them(seed: int) -> None:
    """Of appends of 8 KiB it holds about 128."""
    crowd = Crowd(seed, 300, "x" * 8192)
    crowd.race()
    print(crowd.asked, sorted(crowd.won.values()))
    assert 1 <= crowd.asked["part"] <= 4
