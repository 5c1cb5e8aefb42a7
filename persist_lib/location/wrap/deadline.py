"""The caller's deadline and stop, context variables and not arguments; and retries for as long as they allow.

A stop ends work on blobs at the next request. Consensus is not concerned: work that is stopped still retires its ids.

Operations that only read, or that have the same effect when done twice, are retried after any failure of the world. A
compare-and-set is retried only after `Determinate`. Sent again after an unknown outcome, it could lose against itself,
and its caller would mistake its own success for another writer's. `Damage`, refusals and wrong usage are never retried.

This is our own loop, because libraries such as stamina and tenacity read the clock and draw their jitter themselves,
and a simulation has to control both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from persist_lib.errors import Determinate, DiskFull, Indeterminate
from persist_lib.location.api import Blob, Change, Consensus
from persist_lib.location.wrap.around import Around, AroundBlob, AroundConsensus, Operation, S
from persist_lib.runtime.ambient import Backoff, Deadline, Runtime

T = TypeVar("T")
V = TypeVar("V")

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def within(deadline: Deadline, call: Callable[[], T]) -> T:
    """Return the result of `call`. Its operations on locations in this thread are tried until `deadline`.

    This is no context manager, because an interrupt at its exit would leave the deadline set for the thread.
    """
    return having(_deadline, deadline, call)


def having(variable: ContextVar[V], value: V, call: Callable[[], T]) -> T:
    """Return the result of `call`, in which a context variable has this value."""
    former = variable.get()
    if former is value:
        return call()
    try:
        variable.set(value)
        return call()
    finally:
        variable.set(former)  # one call of C, so that an interrupt comes before or after


def patience_s(longest_s: float) -> float:
    """Return how many seconds to wait for something: `longest_s`, but not beyond the caller's deadline."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())


_is_stopped: ContextVar[Callable[[], bool] | None] = ContextVar("persist_is_stopped", default=None)


class Stopped(Determinate):
    """The caller stopped this work. What was asked for was not done."""

    def __init__(self, message: str = "this work was stopped; nothing more was committed", **fields: object) -> None:
        super().__init__(message, **fields)


def unless(is_stopped: Callable[[], bool], call: Callable[[], T]) -> T:
    """Return the result of `call`. Once `is_stopped` says so, each request to a Blob in it raises Stopped.

    This also concerns the threads of `Runtime.pool` that `call` uses.
    """
    return having(_is_stopped, is_stopped, call)


def check_not_stopped() -> None:
    """Raise Stopped if the work of this thread was stopped."""
    is_stopped = _is_stopped.get()
    if is_stopped is not None and is_stopped():
        raise Stopped


FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 1.0
TIMEOUT_S = 60.0
"""How long to retry a call that has no deadline."""

ONCE = frozenset({"compare_and_set", "compare_and_set_many", "commit_commands", "rewind"})
"""Operations that have another effect when done twice."""

READS = frozenset({"get", "get_range", "list", "uploads", "head", "scan", "list_keys", "heads", "debts", "losing"})
"""Operations that change nothing: when they fail, nothing can have happened."""


def retry(call: Callable[[], T], *, is_idempotent: bool, deadline: Deadline) -> T:
    """Run `call` until it succeeds, fails for good, or the deadline has passed. Returns its result.

    Raises its last failure. SUBTLE: if any failure left the outcome unknown, that one is raised instead, because a
    later determinate failure says nothing about the earlier attempt.
    """
    backoff, doubt = None, None
    while True:
        try:
            return call()
        except (Determinate, Indeterminate) as error:
            backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            if isinstance(error, Indeterminate):
                doubt = error
                if not is_idempotent:
                    raise
            if isinstance(error, (DiskFull, Stopped)):
                raise doubt or error from error.__cause__  # waiting makes no room
            if deadline.remaining_s() <= backoff.pause_s / 2:
                raise doubt or error from error.__cause__
        deadline.pause(backoff.take())


class _Retrying(Around[S]):
    def __init__(self, inner: S, runtime: Runtime | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(inner)
        self.runtime, self.timeout_s = runtime or Runtime(), timeout_s

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Retry as the kind of operation allows. The store waits no longer than the same deadline."""
        known = _deadline.get()
        deadline = known or self.runtime.deadline(self.timeout_s)
        tried = partial(retry, call, is_idempotent=operation.kind not in ONCE, deadline=deadline)
        try:
            return within(deadline, tried) if known is None else tried()
        except Indeterminate as error:
            if operation.kind not in READS:
                raise
            raise Determinate(
                f"could not read {operation.key!r} ({operation.kind}): {error.message}. Nothing was changed; try again",
                key=operation.key,
            ) from error

    def deadline(self) -> Deadline:
        return _deadline.get() or self.runtime.deadline(self.timeout_s)


class RetryingBlob(_Retrying[Blob], AroundBlob):
    """A Blob that retries. After an unknown outcome, `delete` may return False for an object that it deleted itself."""

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Retry as the kind of operation allows. Each attempt is made only if the caller was not stopped."""
        return super().around(operation, lambda: _unless_stopped(call))

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete several objects, and retry those that could not be deleted. Returns the errors that remain."""
        deadline = self.deadline()
        return within(deadline, lambda: self._delete_many(keys, deadline))

    def _delete_many(self, keys: Sequence[str], deadline: Deadline) -> dict[str, Exception]:
        again = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            delete = partial(_unless_stopped, partial(self.inner.delete_many, keys))
            failures = retry(delete, is_idempotent=True, deadline=deadline)
            is_passing = any(isinstance(error, (Determinate, Indeterminate)) for error in failures.values())
            if not is_passing or deadline.remaining_s() <= again.pause_s / 2:
                return failures
            deadline.pause(again.take())
            keys = list(failures)


class RetryingConsensus(_Retrying[Consensus], AroundConsensus):
    """A Consensus that retries, but a compare-and-set only if it certainly did not happen."""

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        """As that of the store. Without changes it only asks whether there are transactions, and is tried again."""
        if changes:
            return super().compare_and_set_many(changes)
        deadline = self.deadline()
        ask = partial(self.inner.compare_and_set_many, changes)
        return within(deadline, partial(retry, ask, is_idempotent=True, deadline=deadline))


def _unless_stopped(call: Callable[[], T]) -> T:
    check_not_stopped()
    return call()
