"""The caller's deadline, for stores that wait and for what retries them: not an argument of every operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from persist_lib.config import Deadline, Runtime

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


@contextmanager
def within(deadline: Deadline) -> Iterator[None]:
    """Operations of this thread in the block are tried until `deadline`. Other threads need a block of their own."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline_or(runtime: Runtime, timeout_s: float) -> Deadline:
    """The caller's deadline, or one that starts now."""
    return _deadline.get() or runtime.deadline(timeout_s)


def patience_s(longest_s: float) -> float:
    """How long to wait for something: `longest_s`, but not beyond the caller's deadline."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())
