"""Locations that fail as planned: by a script ("the second set"), or at random from a seed.

plan = Script({("compare_and_set", 2): Outcome.HAPPENED_UNKNOWN})
consensus = FaultyConsensus(MemoryConsensus(), plan)
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from persist_lib.errors import Determinate, Indeterminate
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation

T = TypeVar("T")


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
        """Draw faults again."""
        self._is_stopped = False


class _Faulty:
    """What `FaultyBlob` and `FaultyConsensus` share: a plan, and a function to sleep with."""

    plan: Plan
    sleep: Callable[[float], None]

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Let `operation` meet its fate."""
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


def _no_sleep(seconds: float) -> None:
    """Delays take no time unless the test gives a clock to sleep on."""


class FaultyBlob(_Faulty, AroundBlob):
    """A Blob that fails as planned."""

    def __init__(self, inner: Blob, plan: Plan, sleep: Callable[[float], None] = _no_sleep) -> None:
        super().__init__(inner)
        self.plan, self.sleep = plan, sleep


class FaultyConsensus(_Faulty, AroundConsensus):
    """A Consensus that fails as planned."""

    def __init__(self, inner: Consensus, plan: Plan, sleep: Callable[[float], None] = _no_sleep) -> None:
        super().__init__(inner)
        self.plan, self.sleep = plan, sleep
