"""The caller's deadline and stop: context variables, not arguments.

A stop ends work on blobs at the next request. Consensus is not concerned: work that is stopped still retires its ids.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from persist_lib.errors import Determinate
from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")
V = TypeVar("V")

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def within(deadline: Deadline, call: Callable[[], T]) -> T:
    """Return the result of `call`. Its operations on locations in this thread are tried until `deadline`.

    This is no context manager, because an interrupt at its exit would leave the deadline set for the thread.
    """
    return _having(_deadline, deadline, call)


def _having(variable: ContextVar[V], value: V, call: Callable[[], T]) -> T:
    former = variable.get()
    try:
        variable.set(value)
        return call()
    finally:
        variable.set(former)  # one call of C, so that an interrupt comes before or after


def deadline_or(runtime: Runtime, timeout_s: float) -> Deadline:
    """Return the caller's deadline, or one in `timeout_s` seconds if there is none."""
    return _deadline.get() or runtime.deadline(timeout_s)


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
    return _having(_is_stopped, is_stopped, call)


def check_not_stopped() -> None:
    """Raise Stopped if the work of this thread was stopped."""
    is_stopped = _is_stopped.get()
    if is_stopped is not None and is_stopped():
        raise Stopped
