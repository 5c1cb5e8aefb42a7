"""The caller's deadline, for stores that wait and for what retries them: not an argument of every operation."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def within(deadline: Deadline, call: Callable[[], T]) -> T:
    """What `call` answers. What it asks of locations in this thread is tried until `deadline`.

    No context manager: an interrupt at its exit would leave the deadline to every later operation of the thread.
    """
    former = _deadline.get()
    try:
        _deadline.set(deadline)
        return call()
    finally:
        _deadline.set(former)  # SUBTLE: one call of C, so that an interrupt comes before or after


def deadline_or(runtime: Runtime, timeout_s: float) -> Deadline:
    """The caller's deadline, or one that starts now."""
    return _deadline.get() or runtime.deadline(timeout_s)


def patience_s(longest_s: float) -> float:
    """How long to wait for something: `longest_s`, but not beyond the caller's deadline."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())
