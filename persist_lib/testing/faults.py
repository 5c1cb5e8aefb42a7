"""What a test controls: a clock; locations that fail as planned; rivals, for races without threads; and recordings.

plan = Script({("compare_and_set", 2): Outcome.HAPPENED_UNKNOWN})
consensus = FaultyConsensus(MemoryConsensus(), plan)

rival = Rival(consensus)
rival.before_next(lambda: other_writer.append(…))
writer.append(…)                                  # loses the race, on every machine, every time
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from persist_lib.errors import Determinate, Indeterminate
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.open import Location
from persist_lib.location.wrap.around import Around, AroundBlob, AroundConsensus, Operation, S
from persist_lib.runtime.ambient import Runtime

T = TypeVar("T")
START_NS = 1_700_000_000_000_000_000


class ManualClock:
    """A clock for `open_location(clock=…)`: calling it returns nanoseconds since the epoch. Sleeping takes no time."""

    def __init__(self, start_ns: int = START_NS) -> None:
        self._now_ns = start_ns
        self._ahead_ns = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        return self._now_ns + self._ahead_ns

    def advance(self, seconds: float) -> None:
        """Move the clock on by `seconds`. A negative number moves it back, as happens to real clocks."""
        with self._lock:
            self._now_ns += round(seconds * 1_000_000_000)

    def step(self, seconds: float) -> None:
        """Set the clock on by `seconds`, or back where that is negative. No time passes: deadlines stay as they are."""
        with self._lock:
            self._ahead_ns += round(seconds * 1_000_000_000)

    def monotonic(self) -> float:
        """The clock in seconds, for deadlines."""
        return self._now_ns / 1_000_000_000

    def sleep(self, seconds: float) -> None:
        """Move the clock on by `seconds` and return at once."""
        self.advance(seconds)

    def runtime(self, seed: int = 0) -> Runtime:
        """A runtime on this clock. It is repeatable, never waits, and does no work in the background."""
        return Runtime(
            monotonic=self.monotonic, sleep=self.sleep, random=random.Random(seed), background=False,
            clock_ms=lambda: self() // 1_000_000,
        )  # fmt: skip


class Outcome(Enum):
    """What becomes of an operation."""

    DONE = "it happens and answers"
    HAPPENED_UNKNOWN = "it happens, and Indeterminate is raised"
    LOST_UNKNOWN = "it does not happen, and Indeterminate is raised"
    REFUSED = "it does not happen, and Determinate is raised"


class Fate(NamedTuple):
    """An outcome, and how long it takes."""

    outcome: Outcome = Outcome.DONE
    delay_s: float = 0.0


class Plan(Protocol):
    """Decides the fate of each operation. One plan may serve a Blob and a Consensus, from several threads."""

    def decide(self, operation: Operation) -> Fate:
        """Return the fate of this operation. It is called once for each operation."""
        ...


class Script:
    """A plan that gives the n-th operation of a kind (counted from 1) its outcome. All other operations are done.

    `seen` counts the operations so far, by kind.
    """

    def __init__(self, fates: Mapping[tuple[str, int], Outcome | Fate]) -> None:
        self._fates = dict(fates)
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()

    def decide(self, operation: Operation) -> Fate:
        with self._lock:
            self.seen[operation.kind] += 1
            fate = self._fates.get((operation.kind, self.seen[operation.kind]), Fate())
        return fate if isinstance(fate, Fate) else Fate(fate)


class Chances:
    """A plan that draws each outcome with its probability, and a delay of up to `delay_s` seconds.

    The rest of the probability is `DONE`. The same seed gives the same fates. After `stop` every operation is done
    until `go_on`, so that a test can check that everything finishes once the faults stop.
    """

    def __init__(self, seed: int, chances: Mapping[Outcome, float], delay_s: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._outcomes = [*chances, Outcome.DONE]
        self._weights = [*chances.values(), 1.0 - sum(chances.values())]
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._is_stopped = False

    def decide(self, operation: Operation) -> Fate:  # noqa: ARG002 - all operations have the same chances
        with self._lock:
            if self._is_stopped:
                return Fate()
            (outcome,) = self._random.choices(self._outcomes, self._weights)
            return Fate(outcome, self._random.uniform(0, self._delay_s))

    def stop(self) -> None:
        """Let every operation be done from now on."""
        self._is_stopped = True

    def go_on(self) -> None:
        self._is_stopped = False


def _no_sleep(seconds: float) -> None:
    """Delays take no time unless the test gives a clock to sleep on."""


class _Faulty(Around[S]):
    def __init__(self, inner: S, plan: Plan, sleep: Callable[[float], None] = _no_sleep) -> None:
        super().__init__(inner)
        self.plan, self.sleep = plan, sleep

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        outcome, delay_s = self.plan.decide(operation)
        if delay_s:
            self.sleep(delay_s)
        if outcome is Outcome.REFUSED:
            raise Determinate(f"planned failure: {operation.kind} {operation.key!r} did not happen")
        if outcome is Outcome.LOST_UNKNOWN:
            raise Indeterminate(f"planned failure: {operation.kind} {operation.key!r} may have happened")
        answer = call()
        if outcome is Outcome.HAPPENED_UNKNOWN:
            raise Indeterminate(f"planned failure: {operation.kind} {operation.key!r} may have happened")
        return answer


class FaultyBlob(_Faulty[Blob], AroundBlob):
    """A Blob that fails as planned."""


class FaultyConsensus(_Faulty[Consensus], AroundConsensus):
    """A Consensus that fails as planned."""


RACED = frozenset({"compare_and_set", "compare_and_set_many", "commit_commands"})
"""Through a shard server, the commands are sent where a client would make its compare-and-set otherwise."""


class Rival(AroundConsensus):
    """A Consensus that calls an act just before a compare-and-set: each act once, in the order of `before_next`."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self._acts: deque[Callable[[], object]] = deque()

    def before_next(self, act: Callable[[], object]) -> None:
        """Call `act` just before the next compare-and-set that has no act yet. The act may use this same Consensus."""
        self._acts.append(act)

    @property
    def waiting(self) -> int:
        """How many acts have not been called yet. It is 0 at the end of a test in which every race took place."""
        return len(self._acts)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind in RACED and self._acts:
            # Taken off before it is called: the act's own compare-and-sets must not race against it again.
            acts, self._acts = self._acts, deque()
            act = acts.popleft()
            try:
                act()
            finally:
                self._acts.extendleft(reversed(acts))
        return call()


class _Recording(Around[S]):
    def __init__(self, inner: S, requests: list[Operation]) -> None:
        super().__init__(inner)
        self.requests = requests

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        self.requests.append(operation)
        return call()


class RecordingBlob(_Recording[Blob], AroundBlob):
    """A Blob whose operations are appended to `requests` before they are carried out."""


class RecordingConsensus(_Recording[Consensus], AroundConsensus):
    """A Consensus whose operations are appended to `requests` before they are carried out."""


class RecordingLocation:
    """A location that records its requests in `requests`, in order. Pass `location` to the code under test."""

    def __init__(self, location: Location) -> None:
        self.requests: list[Operation] = []
        self.blob = RecordingBlob(location.blob, self.requests)
        self.consensus = RecordingConsensus(location.consensus, self.requests)
        self.location = replace(location, blob=self.blob, consensus=self.consensus)

    def count(self, *kinds: str) -> int:
        """How many requests of these kinds there were (of any kind, if none is given)."""
        return sum(1 for request in self.requests if not kinds or request.kind in kinds)

    def clear(self) -> None:
        self.requests.clear()
