"""Try again what failed, where that is safe, for as long as the caller's deadline allows.

What only reads, or does the same when done twice, is tried again after any failure of the world. A compare-and-set is
tried again only after `Determinate`: sent again after an unknown outcome it could lose against itself, and its caller
would take its own success for somebody else's. `Damage`, refusals and wrong usage are never tried again.

Our own loop and not a library: stamina and tenacity read the clock and draw their jitter by themselves, and a
simulation has to decide both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from persist_lib.errors import Determinate, DiskFull, Indeterminate
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from persist_lib.location.wrap.deadline import deadline_or, within
from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")
FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 1.0
TIMEOUT_S = 60.0
"""For calls outside of any deadline."""

ONCE = frozenset({"compare_and_set", "compare_and_set_many", "rewind"})
"""Operations that are not the same when done twice."""

READS = frozenset({"get", "get_range", "list", "uploads", "head", "scan", "list_keys"})
"""Operations that change nothing: when they fail, nothing can have happened."""


def retry(call: Callable[[], T], *, is_idempotent: bool, deadline: Deadline) -> T:
    """`call` until it succeeds, fails for good, or the deadline has passed: then its last failure.

    SUBTLE: if any of the failures left the outcome unknown, that is what is raised: a later determinate failure says
    nothing about the earlier attempt.
    """
    pause, doubt = FIRST_PAUSE_S, None
    while True:
        try:
            return call()
        except (Determinate, Indeterminate) as error:
            if isinstance(error, Indeterminate):
                doubt = error
                if not is_idempotent:
                    raise
            if isinstance(error, DiskFull):
                raise doubt or error from error.__cause__  # waiting makes no room
            if deadline.remaining_s() <= pause / 2:
                raise doubt or error from error.__cause__
        deadline.pause(pause)
        pause = min(LONGEST_PAUSE_S, pause * 2)


class _Retrying:
    """What both have: a runtime, and how long to try outside of any deadline."""

    runtime: Runtime
    timeout_s: float

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Retry as the kind of operation allows. The store knows the deadline too, and waits no longer than that."""
        deadline = self.deadline()
        try:
            return within(deadline, lambda: retry(call, is_idempotent=operation.kind not in ONCE, deadline=deadline))
        except Indeterminate as error:
            if operation.kind not in READS:
                raise
            raise Determinate(
                f"could not read {operation.key!r} ({operation.kind}): {error.message}. Nothing was changed; try again",
                key=operation.key,
            ) from error

    def deadline(self) -> Deadline:
        """The caller's, or one that starts now."""
        return deadline_or(self.runtime, self.timeout_s)


class RetryingBlob(_Retrying, AroundBlob):
    """A Blob that tries again. After an unknown outcome, `delete` may answer False for what it deleted itself."""

    def __init__(self, inner: Blob, runtime: Runtime | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(inner)
        self.runtime, self.timeout_s = runtime or Runtime(), timeout_s

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Only what could not be deleted is tried again."""
        deadline = self.deadline()
        return within(deadline, lambda: self._delete_many(keys, deadline))

    def _delete_many(self, keys: Sequence[str], deadline: Deadline) -> dict[str, Exception]:
        pause = FIRST_PAUSE_S
        failures = retry(lambda: self.inner.delete_many(keys), is_idempotent=True, deadline=deadline)
        while failures and deadline.remaining_s() > pause / 2 and any(map(_is_of_the_world, failures.values())):
            deadline.pause(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)
            left = list(failures)
            failures = retry(lambda left=left: self.inner.delete_many(left), is_idempotent=True, deadline=deadline)  # type: ignore[misc]
        return failures


class RetryingConsensus(_Retrying, AroundConsensus):
    """A Consensus that tries again, but a compare-and-set only when it certainly did not happen."""

    def __init__(self, inner: Consensus, runtime: Runtime | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(inner)
        self.runtime, self.timeout_s = runtime or Runtime(), timeout_s


def _is_of_the_world(error: Exception) -> bool:
    return isinstance(error, (Determinate, Indeterminate))
