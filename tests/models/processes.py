"""A process of a replay: a thread with a client of its own, which stops before each request to the location."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.location import Location, open_location
from persist_lib.location.api import Change, Consensus, Newest
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from persist_lib.testing import Fate, FaultyConsensus, ManualClock, Outcome

T = TypeVar("T")
LEASE_MS = 3_600_000
MOST_REQUESTS = 1_000
"""In one step of a model that change nothing that it has."""
SETS = frozenset({"compare_and_set", "compare_and_set_many"})
WRITES = SETS | {"set", "delete_many", "truncate"}


class Mismatch(AssertionError):
    """The real code does not do what the model does, or comes to another state."""


class World(Protocol):
    """What processes share."""

    url: str
    config: persist.Config
    clock: ManualClock
    inner: Location
    processes: dict[str, Process]

    def counts(self, process: Process) -> bool:
        """Whether the request before which a process waits changes something that the model has."""
        ...

    def wrapped(self, process: Process, consensus: Consensus) -> Consensus:
        """The Consensus of a process, with more around it."""
        ...


class Gone(BaseException):
    """The process was killed."""


class _Gate:
    """Stops a process before each of its requests."""

    process: Process

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.process.request(operation, call)


class GatedBlob(_Gate, AroundBlob):
    """A Blob whose requests the driver lets through one by one."""


class GatedConsensus(_Gate, AroundConsensus):
    """A Consensus whose requests the driver lets through one by one. It has the clock of its process."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        self.process.sent = {key: (expected, data)}
        return super().compare_and_set(key, expected, data)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        if changes:
            self.process.sent = changes
        return super().compare_and_set_many(changes)

    def now(self) -> int:
        return self.inner.now() + self.process.ahead_ms


def _no_sleep(_seconds: float) -> None:
    """The clock stands still: what waits makes requests for ever, and `MOST_REQUESTS` are too many."""


class Process:
    """A thread with a client of its own. It runs one call after another, and waits before each request.

    `waits_for` is the kind of that request; None: its call is over, and `answer` or `error` is what came of it.
    """

    def __init__(self, name: str, world: World) -> None:
        self.name, self._world = name, world
        self.ahead_ms = 0
        self.sent: Mapping[str, Change] = {}
        self.waits_for: str | None = None
        self.asks = ""
        self.answer: Any = None
        self.error: BaseException | None = None
        self.expects: int | None = None
        self.fate = Fate()
        self._call: Callable[[], Any] | None = None
        self._is_gone = False
        self._baton, self._returned = threading.Semaphore(0), threading.Semaphore(0)
        self._did: tuple[str, Any] = ("", None)
        location = open_location(world.url, clock=world.clock)
        blob, consensus = GatedBlob(location.blob), GatedConsensus(FaultyConsensus(location.consensus, self))
        blob.process = consensus.process = self
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        runtime = replace(world.clock.runtime(len(world.processes)), sleep=_no_sleep)
        self.client = persist.open(
            replace(location, blob=blob, consensus=world.wrapped(self, consensus)), config=world.config, runtime=runtime
        )
        self._thread.start()

    def decide(self, operation: Operation) -> Fate:
        """The fate of a request, for `FaultyConsensus`."""
        return self.fate if operation.kind == "compare_and_set" else Fate()

    def _body(self) -> None:
        while True:
            self._baton.acquire()
            if self._is_gone or self._call is None:
                return
            try:
                self.answer = self._call()
            except Gone:
                return
            except BaseException as error:  # noqa: BLE001 - the driver looks at it
                self.error = error
            self._call = self.waits_for = None
            self._returned.release()

    def request(self, operation: Operation, call: Callable[[], T]) -> T:
        """One request: wait for the driver, then send it."""
        if threading.current_thread() is not self._thread:
            return call()
        if self._is_gone:  # what it would still do on its way out
            raise Gone
        self.waits_for, self.asks = operation.kind, operation.key
        self._returned.release()
        self._baton.acquire()
        if self._is_gone:
            raise Gone
        self._did = (operation.kind, None)
        answer = call()
        self._did = (operation.kind, answer)
        return answer

    def start(self, call: Callable[[], Any]) -> None:
        """Begin a call, up to its first request. What is left of the one before must change nothing."""
        self.finish()
        self.answer = self.error = None
        self._call = call
        self._go()

    def _go(self) -> None:
        self._baton.release()
        self._returned.acquire()

    def step(self) -> tuple[str, Any]:
        """Let one request through. Its kind and answer."""
        if self.waits_for is None:
            raise Mismatch(f"{self.name} has nothing more to do: it ended with {self.error or self.answer!r}")
        self._go()
        return self._did

    def reads(self, *until: str) -> None:
        """Let requests through, until the next one is of one of these kinds, or changes what the model has."""
        self.reads_until(lambda: self.waits_for in until)

    def reads_until(self, is_there: Callable[[], bool]) -> None:
        """Let requests through, until this is so, or the next one changes what the model has."""
        for _ in range(MOST_REQUESTS):
            if self.waits_for is None or is_there() or self._world.counts(self):
                return
            self.step()
        raise Mismatch(f"{self.name} waits for something, at {self._said()}")

    def does(self, *kinds: str) -> Any:
        """Let reads and lost races through, and then a request of these kinds, which must be the next that counts."""
        while True:
            self.reads(*kinds)
            if self.waits_for not in kinds:
                raise Mismatch(f"{self.name} should {' or '.join(kinds)} now, and {self._said()}")
            kind, answer = self.step()
            if kind not in SETS or answer:
                return answer

    def commits(self) -> None:
        """Let a compare-and-set through that counts and wins."""
        while True:
            self.reads()
            if self.waits_for not in SETS:
                raise Mismatch(f"{self.name} should commit now, and {self._said()}")
            if self.step()[1]:
                return

    def commits_in_doubt(self, outcome: Outcome) -> None:
        """Let lost races through, and then a compare-and-set that would win, with this outcome."""
        while True:
            self.reads()
            if self.waits_for != "compare_and_set":
                raise Mismatch(f"{self.name} should commit now, and {self._said()}")
            if self._wins():
                self.fate = Fate(outcome)
                self.step()
                self.fate = Fate()
                return
            self.step()

    def _wins(self) -> bool:
        heads = {key: self._world.inner.consensus.head(key) for key in self.sent}
        return all(
            (None if head is None else head.seqno) == (None if was is None else was.seqno)
            for head, was in ((head, self.sent[key][0]) for key, head in heads.items())
        )

    def lost(self) -> None:
        """Let lost races through, and reads, until the next request would change something."""
        self.reads()
        while self.waits_for in SETS and not self._wins():
            self.step()
            self.reads()

    def finish(self, *errors: type[PersistError]) -> Any:
        """Let the rest of a call through, which changes nothing. Its answer, or its error if it is one of these."""
        self.lost()
        if self.waits_for is not None:
            raise Mismatch(f"{self.name} should be done, and {self._said()}")
        error, self.error = self.error, None
        if errors and not isinstance(error, errors):
            raise Mismatch(f"{self.name} should be refused with {errors[0].__name__}, and ended with {error!r}")
        if error is not None and not errors:
            raise error
        return error or self.answer

    def _said(self) -> str:
        return f"is at {self.waits_for}" if self.waits_for else f"ended with {self.error or self.answer!r}"

    def kill(self) -> None:
        """It stops where it is, for ever."""
        self._is_gone = True
        self._baton.release()
        self._thread.join()
