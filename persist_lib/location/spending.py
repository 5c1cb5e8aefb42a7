"""What code spends on locations: `Spending` counts what its block asks for, whichever client does the asking.

    with Spending() as spent:
        table = snapshot.to_arrow()
    spent.cost

Counts are exact, also among threads: those of `Runtime.pool` count for whoever gave them the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import msgspec

from persist_lib.core.cost import Cost

T = TypeVar("T")
P = ParamSpec("P")
Report = TypeVar("Report", bound=msgspec.Struct)

CLASSES = ("gets", "puts", "lists", "deletes", "commits", "queries")
GETS, PUTS, LISTS, DELETES, COMMITS, QUERIES = range(len(CLASSES))


class Tally:
    """Requests by class, bytes and dollars, while they are counted. Whoever adds holds `Tally.lock`."""

    __slots__ = ("classes", "dollars", "received", "sent")

    lock: ClassVar[threading.Lock] = threading.Lock()
    """One for all, as an operation adds to several."""

    def __init__(self) -> None:
        self.classes = [0] * len(CLASSES)
        self.sent = self.received = 0
        self.dollars = 0.0

    def add(self, request: int | None, sent: int, received: int, dollars: float) -> None:
        """One operation or request more."""
        if request is not None:
            self.classes[request] += 1
        self.sent += sent
        self.received += received
        self.dollars += dollars

    def add_cost(self, cost: Cost) -> None:
        """What was counted in another process."""
        for index, name in enumerate(CLASSES):
            self.classes[index] += getattr(cost, name)
        self.sent += cost.bytes_written
        self.received += cost.bytes_read
        self.dollars += cost.dollars

    def cost(self) -> Cost:
        """What was counted so far. Takes the lock."""
        with Tally.lock:
            gets, puts, lists, deletes, commits, queries = self.classes
            return Cost(self.received, self.sent, gets, puts, lists, deletes, commits, queries, self.dollars)


def _fresh_lock() -> None:
    """SUBTLE: in a forked child, a lock that another thread held during the fork would stay held for ever."""
    Tally.lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)

_open: ContextVar[tuple[Tally, ...]] = ContextVar("persist_spending", default=())
tallies = _open.get
"""Whom an operation of this thread is counted for, beside its meter."""


class Spending:
    """Counts what is asked of locations within its block, as `cost`. They nest, and the outer one has all."""

    __slots__ = ("_tally", "_tokens")

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = tally or Tally()
        self._tokens: list[Token[tuple[Tally, ...]]] = []

    @property
    def cost(self) -> Cost:
        """What it came to so far."""
        return self._tally.cost()

    def again(self) -> Spending:
        """Another one that adds to the same: each thread, and each step of an iterator, enters its own."""
        return Spending(self._tally)

    def __enter__(self) -> Self:
        outer = _open.get()
        self._tokens.append(_open.set(outer if self._tally in outer else (*outer, self._tally)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.reset(self._tokens.pop())

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; what it takes to make them is counted, and not what their consumer does in between."""
        iterator, nothing = iter(items), object()
        while True:
            with self.again():
                item: Any = next(iterator, nothing)
            if item is nothing:
                return
            yield item


def charged(call: Callable[P, Report]) -> Callable[P, Report]:
    """Of what answers a report: with the report's `cost` being what the call came to."""

    @wraps(call)
    def measured(*args: P.args, **kwargs: P.kwargs) -> Report:
        with Spending() as spent:
            report = call(*args, **kwargs)
        return msgspec.structs.replace(report, cost=spent.cost)

    return measured
