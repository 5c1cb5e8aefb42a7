"""The caller's stop: it ends work on blobs at the next request. It is a context variable, as the deadline is.

Consensus is not concerned: work that is stopped still retires its ids.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from persist_lib.errors import Determinate

T = TypeVar("T")

_is_stopped: ContextVar[Callable[[], bool] | None] = ContextVar("persist_is_stopped", default=None)


class Stopped(Determinate):
    """The caller stopped this work. What was asked for was not done."""

    def __init__(self, message: str = "this work was stopped; nothing more was committed", **fields: object) -> None:
        super().__init__(message, **fields)


def unless(is_stopped: Callable[[], bool], call: Callable[[], T]) -> T:
    """Return the result of `call`. Once `is_stopped` says so, each request to a Blob in it raises Stopped.

    This also concerns the threads of `Runtime.pool` that `call` uses.
    """
    former = _is_stopped.get()
    try:
        _is_stopped.set(is_stopped)
        return call()
    finally:
        _is_stopped.set(former)


def check_not_stopped() -> None:
    """Raise Stopped if the work of this thread was stopped."""
    is_stopped = _is_stopped.get()
    if is_stopped is not None and is_stopped():
        raise Stopped
