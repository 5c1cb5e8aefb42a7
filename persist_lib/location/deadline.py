"""The caller's deadline, for stores that wait and for what retries them: not an argument of every operation."""

from __future__ import annotations

from contextvars import ContextVar

from persist_lib.config import Deadline, Runtime

_deadline: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


class within:  # noqa: N801 - used like the functions of contextlib
    """Operations of this thread in the block are tried until `deadline`. Other threads need a block of their own.

    A class and not a generator: every operation goes through two of them, and a small append notices.
    """

    __slots__ = ("_former", "_now")

    def __init__(self, deadline: Deadline) -> None:
        self._now = deadline

    def __enter__(self) -> None:
        self._former = _deadline.set(self._now)

    def __exit__(self, *_: object) -> None:
        _deadline.reset(self._former)


def deadline_or(runtime: Runtime, timeout_s: float) -> Deadline:
    """The caller's deadline, or one that starts now."""
    return _deadline.get() or runtime.deadline(timeout_s)


def patience_s(longest_s: float) -> float:
    """How long to wait for something: `longest_s`, but not beyond the caller's deadline."""
    deadline = _deadline.get()
    return longest_s if deadline is None else min(longest_s, deadline.remaining_s())
