"""One seed makes clock, faults and schedule: actors run real client code, one at a time, as the seed decides.

An actor is a thread that only runs while it has the baton. It gives the baton back before every operation on the
location and whenever it sleeps; the scheduler draws who has it next. The clients have no background threads.
"""

from __future__ import annotations

import gc
import hashlib
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.errors import Determinate, DiskFull, Indeterminate, PersistError
from persist_lib.location import Row, open_location
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.around import Around, AroundBlob, AroundConsensus, Operation, S
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import ManualClock

T = TypeVar("T")
WRITES = frozenset({"set", "compare_and_set", "compare_and_set_many", "commit_commands", "point"})
"""The operations that need room on a disk."""
STEPS_S = (-30.0, -1.0, 1.0, 30.0)
FULL_S = (0.5, 3.0)
"""How long a disk is full."""
LATEST = 300
"""After how many steps at most a late request arrives."""
KEPT_LINES = 40


class Crashed(BaseException):
    """The actor's process is gone: from here on nothing of it reaches the location."""


class NotFinished(AssertionError):
    """Processes did not finish although the faults had ended."""


class Faults(NamedTuple):
    """How often what goes wrong: a chance for each operation (the first five), or for each step of the scheduler.

    refused: it does not happen, and the caller hears so. lost: it does not happen, and there is no answer. unknown: it
    happens, and there is no answer. late: there is no answer, and it happens later. stale_head: Consensus answers an
    older newest row. crash: a process is gone, and another one comes. pause: a process stands still, maybe for longer
    than its lease. clock_step: the store's clock, or a process's, moves. full_disk: for a while nothing can be written.
    """

    refused: float = 0.02
    lost: float = 0.02
    unknown: float = 0.02
    late: float = 0.02
    stale_head: float = 0.3
    crash: float = 0.004
    pause: float = 0.01
    clock_step: float = 0.001
    full_disk: float = 0.0005


NO_FAULTS = Faults(*[0.0] * len(Faults._fields))


class Actor:
    """One process of the simulation."""

    def __init__(self, name: str, run: Callable[[Any], None], world: Simulation) -> None:
        self.name, self.world = name, world
        self.random = random.Random(f"{world.seed} {name}")
        self.baton = threading.Semaphore(0)
        self.wakes_at = 0.0
        self.ahead_s = 0.0
        """How far the clock of its machine is ahead of the right time."""
        self.is_done = self.has_crashed = False
        self.failure: BaseException | None = None
        self._run = run
        self.thread = threading.Thread(target=self._body, name=name, daemon=True)
        self.thread.start()

    def _body(self) -> None:
        self.baton.acquire()
        try:
            if not self.world.is_closed:
                self._run(self)
        except (Crashed, Determinate, Indeterminate):
            self.has_crashed = True  # gone, or given up with an error of the world: another one comes
        except BaseException as error:  # noqa: BLE001 - raised by the scheduler
            self.failure = error
        self.is_done = True
        self.world.returned.release()

    def give_back(self) -> None:
        """Let others run. Returns when it is this actor's turn again."""
        if threading.current_thread() is not self.thread:
            return  # a finalizer, or the check at the end
        if not self.world.is_closed:
            self.world.returned.release()
            self.baton.acquire()
        if self.has_crashed or self.world.is_closed:
            raise Crashed

    def sleep(self, seconds: float) -> None:
        self.wakes_at = self.world.clock.monotonic() + seconds
        self.give_back()

    def runtime(self) -> Runtime:
        """Time and randomness as the scheduler decides them, on a machine whose clock may be wrong."""
        clock = self.world.clock
        return Runtime(
            monotonic=clock.monotonic, sleep=self.sleep, random=self.random, background=False,
            clock_ms=lambda: int(1000 * (clock.monotonic() + self.ahead_s)),
        )  # fmt: skip

    def client(self, config: Config) -> Client:
        """A client all of whose operations the scheduler decides."""
        runtime = self.runtime()
        location = open_location(self.world.url, clock=self.world.clock, runtime=runtime)
        blob, consensus = SimulatedBlob(location.blob, self), SimulatedConsensus(location.consensus, self)
        return open_client(replace(location, blob=blob, consensus=consensus), config=config, runtime=runtime)


class Simulation:
    """The scheduler, the clock and the network. Its location is in memory, and its own."""

    def __init__(self, seed: int, faults: Faults = Faults(), keep_lines: int | None = KEPT_LINES) -> None:  # noqa: B008 - a tuple
        self.seed, self.faults = seed, faults
        self.random = random.Random(f"{seed} scheduler")
        self.clock = ManualClock()
        self.began_s = self.clock.monotonic()
        self.location = open_location("memory:", create=True, clock=self.clock, runtime=self.clock.runtime(seed))
        self.url = self.location.url
        self.returned = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.history = hashlib.sha256()
        self.lines: deque[str] = deque(maxlen=keep_lines)
        """The end of the history, or all of it: a line for each operation, crash, pause and step of a clock."""
        self.steps = self.crashes = 0
        self.longest_pause_s = 30.0
        self.delayed: list[tuple[int, Callable[[], object]]] = []
        self.heads: dict[str, list[Row]] = {}
        self.full_until = 0.0
        self.operations: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """How often each kind of fault struck."""
        self.is_closed = False

    def spawn(self, name: str, run: Callable[[Any], None]) -> Actor:
        self.actors.append(Actor(name, run, self))
        return self.actors[-1]

    def run(self, most_steps: int, on_crash: Callable[[Actor], None]) -> None:
        """Run until all actors are done; from `most_steps` on without faults. Raises NotFinished if it takes too long.

        The collector of cyclic garbage is off. It runs finalizers when it likes, and those of handles retire
        their ids: the same seed would not give the same history.
        """
        gc.disable()
        try:
            self._run(most_steps, on_crash)
        finally:
            gc.enable()
            self._close()

    def _run(self, most_steps: int, on_crash: Callable[[Actor], None]) -> None:
        while living := [actor for actor in self.actors if not actor.is_done]:
            self.steps += 1
            if self.steps >= 10 * most_steps:
                names = ", ".join(actor.name for actor in living)
                raise NotFinished(f"without faults everything should have finished, and these did not: {names}")
            if self.steps == most_steps:
                self.faults, self.full_until = NO_FAULTS, 0.0
            self._deliver()
            self._strike(living)
            awake = [actor for actor in living if actor.wakes_at <= self.clock.monotonic()]
            if not awake:
                first = min(living, key=lambda actor: actor.wakes_at)
                self.clock.advance(max(0.001, first.wakes_at - self.clock.monotonic()))
                continue
            actor = self.random.choice(awake)
            self.clock.advance(self.random.choice([0.0001, 0.001, 0.01]))
            if self.random.random() < self.faults.crash:
                actor.has_crashed = True
                self._struck("crash", actor.name)
            elif self.random.random() < self.faults.pause:
                seconds = self.random.choice([0.1, 2, self.longest_pause_s])
                actor.wakes_at = self.clock.monotonic() + seconds
                self._struck("pause", actor.name, seconds)
                continue
            actor.baton.release()
            self.returned.acquire()
            if actor.failure is not None:
                raise actor.failure
            if actor.is_done and actor.has_crashed:
                self.crashes += 1
                on_crash(actor)
        self._deliver(everything=True)

    def _close(self) -> None:
        """End the threads of actors that a failure left in the middle."""
        self.is_closed = True
        for actor in self.actors:
            if not actor.is_done:
                actor.baton.release()
                actor.thread.join(5)

    def _strike(self, living: list[Actor]) -> None:
        """Step a clock, or fill the disk. Faults that cannot strike draw nothing."""
        if self.faults.clock_step and self.random.random() < self.faults.clock_step:
            whose, seconds = self.random.choice([None, *living]), self.random.choice(STEPS_S)
            if whose is None:
                self.clock.step(seconds)
            else:
                whose.ahead_s += seconds
            self._struck("clock_step", "the store" if whose is None else whose.name, seconds)
        if self.faults.full_disk and self.random.random() < self.faults.full_disk:
            seconds = self.random.choice(FULL_S)
            self.full_until = self.clock.monotonic() + seconds
            self.note("full_disk", seconds)

    def _struck(self, fault: str, *words: object) -> None:
        self.struck[fault] += 1
        self.note(fault, *words)

    def note(self, *words: object) -> None:
        line = " ".join(map(str, words))
        self.history.update(line.encode() + b"\n")
        self.lines.append(f"{self.steps:>6} {self.clock.monotonic() % 1e5:9.4f} {line}")

    def around(self, actor: Actor, operation: Operation, call: Callable[[], T]) -> T:
        """One operation: others first, then its fate."""
        actor.give_back()
        fate = self._fate(actor, operation.kind)
        self.operations[operation.kind] += 1
        if fate != "done":
            self.struck[fate] += 1
        self.note(self.clock(), actor.name, operation.kind, operation.key, operation.size, fate)
        if fate == "full_disk":
            raise DiskFull(f"simulated: no room for {operation.kind}", path=operation.key, free=0)
        if fate == "refused":
            raise Determinate(f"simulated: {operation.kind} did not happen")
        if fate == "late":
            self.delayed.append((self.steps + actor.random.randrange(1, LATEST), call))
        if fate in {"lost", "late"}:
            raise Indeterminate(f"simulated: {operation.kind} got no answer")
        answer = call()
        if fate == "unknown":
            raise Indeterminate(f"simulated: the answer of {operation.kind} was lost")
        return answer

    def _fate(self, actor: Actor, kind: str) -> str:
        draw = actor.random.random()
        if kind in WRITES and self.clock.monotonic() < self.full_until:
            return "full_disk"
        for name in ("refused", "lost", "unknown", "late"):
            rate = getattr(self.faults, name)
            if draw < rate:
                return name
            draw -= rate
        return "done"

    def _deliver(self, *, everything: bool = False) -> None:
        """Let late requests arrive, long after their senders gave up."""
        due = [entry for entry in self.delayed if everything or entry[0] <= self.steps]
        self.delayed = [entry for entry in self.delayed if entry not in due]
        for _, call in due:
            try:
                call()
            except PersistError:
                continue


class _Simulated(Around[S]):
    def __init__(self, inner: S, actor: Actor) -> None:
        super().__init__(inner)
        self.actor = actor

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.actor.world.around(self.actor, operation, call)


class SimulatedBlob(_Simulated[Blob], AroundBlob):
    """A Blob on the simulated network."""


class SimulatedConsensus(_Simulated[Consensus], AroundConsensus):
    """A Consensus on the simulated network, whose head may be stale."""

    def head(self, key: str) -> Row | None:
        world = self.actor.world
        newest = super().head(key)
        heads = world.heads.setdefault(key, [])
        if newest is not None and newest not in heads[-1:]:
            heads.append(newest)
        if not heads or self.actor.random.random() >= world.faults.stale_head:
            return newest
        given = self.actor.random.choice(heads[-4:])
        world.struck["stale_head"] += given != newest
        return given
