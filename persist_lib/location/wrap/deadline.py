"""The caller's deadline, for stores that wait and for retries. It is a context variable, not an argument."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def within(deadline: Deadline, call: Callable[[], T]) -> T:
    """Return the result of `call`. Its operations on locations in this thread are tried until `deadline`.

    This is no context manager, because an interrupt at its exit would leave the deadline set for the thread.
    """
    former = _deadline.get()
    try:
        _deadline.set(deadline)
        return call()
    finally:
        _deadline.set(former)  # SUBTLE: one call of C, so that an interrupt comes before or after


def deadline_or(runtime: Runtime, timeout_s: float) -> Deadline:
    """Return the caller's deadline, or one in `timeout_s` seconds if there is none."""
    return _deadline.get() or runtime.deadline(timeout_s)


def patience_s(longest_s: float) -> float:
    """Return how many seconds to wait for something: `longest_s`, but not beyond the caller's deadline."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())
