"""One seed makes clock, faults and schedule: actors run real client code, one at a time, as the seed decides.

An actor is a thread that only runs while it has the baton. It gives the baton back before every operation on the
location and whenever it sleeps; the scheduler draws who has it next. The clients have no background threads.
"""

from __future__ import annotations

import gc
import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate
from persist_lib.location import Row, open_location
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import ManualClock

T = TypeVar("T")


class Crashed(BaseException):
    """The actor's process is gone: from here on nothing of it reaches the location."""


class Chaos(NamedTuple):
    """How often what goes wrong, per operation."""

    refused: float = 0.02
    lost: float = 0.02
    unknown: float = 0.02
    late: float = 0.02
    stale_head: float = 0.3
    crash: float = 0.004
    pause: float = 0.01


class Actor:
    """One process of the simulation."""

    def __init__(self, name: str, run: Callable[[Actor], None], world: Simulation) -> None:
        self.name, self.world = name, world
        self.random = random.Random(f"{world.seed} {name}")
        self.baton = threading.Semaphore(0)
        self.wakes_at = 0.0
        self.is_done = self.has_crashed = False
        self.failure: BaseException | None = None
        self._run = run
        self.thread = threading.Thread(target=self._body, name=name, daemon=True)
        self.thread.start()

    def _body(self) -> None:
        self.baton.acquire()
        try:
            self._run(self)
        except (Crashed, Determinate, Indeterminate):
            self.has_crashed = True  # gone, or given up with an error of the world: another one comes
        except BaseException as error:  # noqa: BLE001 - told by the scheduler
            self.failure = error
        self.is_done = True
        self.world.returned.release()

    def give_back(self) -> None:
        """Let others run; returns when it is this actor's turn again."""
        if threading.current_thread() is not self.thread:
            return  # a finalizer, or the judge
        self.world.returned.release()
        self.baton.acquire()
        if self.has_crashed:
            raise Crashed

    def sleep(self, seconds: float) -> None:
        self.wakes_at = self.world.clock.monotonic() + seconds
        self.give_back()

    def client(self, config: persist.Config) -> persist.Client:
        """A client all of whose operations the scheduler decides."""
        clock = self.world.clock
        runtime = Runtime(
            monotonic=clock.monotonic,
            sleep=self.sleep,
            random=self.random,
            background=False,
            clock_ms=lambda: clock() // 1_000_000,
        )
        location = open_location(self.world.url, clock=clock, runtime=runtime)
        blob, consensus = SimulatedBlob(location.blob, self), SimulatedConsensus(location.consensus, self)
        return persist.open(replace(location, blob=blob, consensus=consensus), config=config, runtime=runtime)


class Simulation:
    """The scheduler, the clock and the network."""

    def __init__(self, seed: int, chaos: Chaos) -> None:
        self.seed, self.chaos = seed, chaos
        self.random = random.Random(f"{seed} scheduler")
        self.clock = ManualClock()
        self.location = open_location("memory:", create=True, clock=self.clock, runtime=self.clock.runtime(seed))
        self.url = self.location.url
        self.returned = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.history = hashlib.sha256()
        self.steps = 0
        self.delayed: list[tuple[int, Callable[[], object]]] = []
        self.heads: dict[str, list[Row]] = {}
        self.crashes = 0

    def spawn(self, name: str, run: Callable[[Actor], None]) -> Actor:
        self.actors.append(Actor(name, run, self))
        return self.actors[-1]

    def run(self, most_steps: int, on_crash: Callable[[Actor], None]) -> None:
        """Run until all actors are done, then end the chaos; AssertionError when that takes too long.

        SUBTLE: the collector of cyclic garbage is off. It runs finalizers when it likes, and those of handles retire
        their ids: the same seed would not give the same history.
        """
        gc.disable()
        try:
            self._run(most_steps, on_crash)
        finally:
            gc.enable()

    def _run(self, most_steps: int, on_crash: Callable[[Actor], None]) -> None:
        while living := [actor for actor in self.actors if not actor.is_done]:
            self.steps += 1
            assert self.steps < 10 * most_steps, "without faults everything should have finished"
            if self.steps == most_steps:
                self.chaos = Chaos(0, 0, 0, 0, 0, 0, 0)
            self._deliver()
            awake = [actor for actor in living if actor.wakes_at <= self.clock.monotonic()]
            if not awake:
                first = min(living, key=lambda actor: actor.wakes_at)
                self.clock.advance(max(0.001, first.wakes_at - self.clock.monotonic()))
                continue
            actor = self.random.choice(awake)
            self.clock.advance(self.random.choice([0.0001, 0.001, 0.01]))
            if self.random.random() < self.chaos.crash:
                actor.has_crashed = True
            elif self.random.random() < self.chaos.pause:
                actor.wakes_at = self.clock.monotonic() + self.random.choice([0.1, 2, 30])
                continue
            actor.baton.release()
            self.returned.acquire()
            if actor.failure is not None:
                raise actor.failure
            if actor.is_done and actor.has_crashed:
                self.crashes += 1
                on_crash(actor)
        self._deliver(everything=True)

    def note(self, *words: object) -> None:
        self.history.update(" ".join(map(str, words)).encode() + b"\n")

    def around(self, actor: Actor, operation: Operation, call: Callable[[], T]) -> T:
        """One operation: others first, then its fate."""
        actor.give_back()
        chaos, draw = self.chaos, actor.random.random()
        fate = "done"
        for name in ("refused", "lost", "unknown", "late"):
            rate = getattr(chaos, name)
            if draw < rate and fate == "done":
                fate = name
            draw -= rate
        self.note(self.clock(), actor.name, operation.kind, operation.key, operation.size, fate)
        if fate == "refused":
            raise Determinate(f"simulated: {operation.kind} did not happen")
        if fate == "late":
            self.delayed.append((self.steps + actor.random.randrange(1, 300), call))
        if fate in {"lost", "late"}:
            raise Indeterminate(f"simulated: {operation.kind} got no answer")
        answer = call()
        if fate == "unknown":
            raise Indeterminate(f"simulated: the answer of {operation.kind} was lost")
        return answer

    def _deliver(self, *, everything: bool = False) -> None:
        """What was under way arrives, after whoever sent it has long given up."""
        due = [entry for entry in self.delayed if everything or entry[0] <= self.steps]
        self.delayed = [entry for entry in self.delayed if entry not in due]
        for _, call in due:
            try:
                call()
            except persist.PersistError:
                continue


class SimulatedBlob(AroundBlob):
    """A Blob on the simulated network."""

    def __init__(self, inner: Any, actor: Actor) -> None:
        super().__init__(inner)
        self.actor = actor

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.actor.world.around(self.actor, operation, call)


class SimulatedConsensus(AroundConsensus):
    """A Consensus on the simulated network, whose head may be stale."""

    def __init__(self, inner: Any, actor: Actor) -> None:
        super().__init__(inner)
        self.actor = actor

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.actor.world.around(self.actor, operation, call)

    def head(self, key: str) -> Row | None:
        world = self.actor.world
        newest = super().head(key)
        heads = world.heads.setdefault(key, [])
        if newest is not None and newest not in heads[-1:]:
            heads.append(newest)
        is_stale = self.actor.random.random() < world.chaos.stale_head
        return self.actor.random.choice(heads[-4:]) if heads and is_stale else newest
