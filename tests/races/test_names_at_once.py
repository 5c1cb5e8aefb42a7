"""A shard and a collection of one name, made at the same moment: one of both is refused, whoever is first at each step.

Two makers stand before each of their requests. One takes some, then the other some; then each runs to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

import persist_lib as persist
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.around import AroundConsensus, Operation
from tests.gated import LONG_S
from tests.worlds import SCHEMA, World

T = TypeVar("T")
Make = Callable[[Client], object]
ROW = [{"id": 1, "word": "w"}]


def a_shard(client: Client) -> persist.WriteHandle:
    return client.open_writer("n", SCHEMA)


def an_opened_shard(client: Client) -> persist.WriteHandle:
    """Made by another process that died before it could look again."""
    return client.open_writer("n", SCHEMA)


def a_collection(client: Client) -> object:
    return client.controller().create("n", SCHEMA, mode="compare_and_append")


def a_renamed_collection(client: Client) -> object:
    return client.controller().rename("other", "n")


class Maker(AroundConsensus):
    """Makes something in a thread that stands still before each of its requests."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self._thread: threading.Thread | None = None
        self._stands, self._goes = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None
        self.made: object = None
        self.is_done = False

    def start(self, make: Make, client: Client) -> None:
        def run() -> None:
            try:
                self.made = make(client)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.error = error
            self.is_done = True
            self._stands.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self._stands.acquire(timeout=LONG_S)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            self._stands.release()
            assert self._goes.acquire(timeout=LONG_S)
        return call()

    def go(self, steps: int = 1_000) -> int:
        """Take so many steps, and return how many there were to take."""
        for step in range(steps):
            if self.is_done:
                return step
            self._goes.release()
            assert self._stands.acquire(timeout=LONG_S)
        return steps


def maker(world: World) -> tuple[Maker, Client]:
    location = world.reach()
    made = Maker(location.consensus)
    world.seed += 1
    client = persist.open(replace(location, consensus=made), runtime=world.runtime(world.seed))
    world.clients.append(client)
    return made, client


def raced(shard: Make, collection: Make, steps: tuple[int, int], *, shard_ends_first: bool) -> bool:
    """Whether both had that many steps to take. Checks that not both were made, and that what was made can be used."""
    world = World()
    try:
        before = world.client()
        before.controller().create("other", SCHEMA, mode="compare_and_append")
        if shard is an_opened_shard:
            before.machine("n").commit(lambda _state, _now: c.Create(SCHEMA))
        (one, his), (other, theirs) = maker(world), maker(world)
        one.start(shard, his)
        other.start(collection, theirs)
        taken = one.go(steps[0]), other.go(steps[1])
        for each in (one, other) if shard_ends_first else (other, one):
            each.go()
        errors = [each.error for each in (one, other) if each.error is not None]
        assert errors, "both were made"
        assert all(isinstance(error, persist.NameTaken) for error in errors), errors
        after = world.client().controller()
        after.tend()
        assert ("n" in after.list()) == (other.error is None)
        assert "other" in after.list() or collection is a_renamed_collection
        if isinstance(one.made, persist.WriteHandle):
            one.made.append_now(ROW)
        if other.error is None:
            after.open_writer("n").append_now(ROW)
        return taken == steps
    finally:
        world.close()


MAKES = [(a_shard, a_collection), (a_shard, a_renamed_collection), (an_opened_shard, a_collection)]


@pytest.mark.parametrize("one", range(12))
@pytest.mark.parametrize(("shard", "collection"), MAKES)
def test_never_both(shard: Make, collection: Make, one: int) -> None:
    for other in range(one % 3, 60, 3):
        if not raced(shard, collection, (one, other), shard_ends_first=bool(other // 3 % 2)):
            break
