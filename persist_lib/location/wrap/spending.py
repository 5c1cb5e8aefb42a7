"""What code spends on locations: `Spending` counts what its block asks for, whichever client does the asking.

    with Spending() as spent:
        table = snapshot.to_arrow()
    spent.cost

Counts are exact, also among threads: those of `Runtime.pool` count for whoever gave them the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import msgspec

from persist_lib.arguments import check_type
from persist_lib.core.cost import GIB, Cost, Prices
from persist_lib.runtime.forks import Stage, enrol

T = TypeVar("T")
P = ParamSpec("P")
Report = TypeVar("Report", bound=msgspec.Struct)

CLASSES = ("gets", "puts", "lists", "deletes", "commits", "queries")
GETS, PUTS, LISTS, DELETES, COMMITS, QUERIES = range(len(CLASSES))


class Rates:
    """What requests of each class and bytes cost, where an operation was carried out."""

    __slots__ = ("egress", "prices")

    def __init__(self, prices: Prices) -> None:
        self.prices = (prices.get, prices.put, prices.list, prices.delete, prices.commit, prices.query)
        self.egress = prices.egress_gib / GIB

    def dollars(self, request: int | None, received: int) -> float:
        """The price of one request and of the bytes that came back."""
        return (0.0 if request is None else self.prices[request]) + received * self.egress


Event = tuple[Rates, bool, int, int, float, int | None]
"""One operation or request: its rates, whether it failed, bytes sent and received, seconds, and the request's class.

A request that is told of beside its operation has a class, and the operation has none.
"""
MANY = 1024
"""So many are remembered one by one before they are added up."""


class Sums:
    """Requests by class, bytes and dollars, added up. Whoever adds holds the lock of tallies."""

    __slots__ = ("classes", "dollars", "received", "sent")

    def __init__(self) -> None:
        self.classes = [0] * len(CLASSES)
        self.sent = self.received = 0
        self.dollars = 0.0

    def add(self, event: Event) -> None:
        """One more."""
        rates, _, sent, received, _, request = event
        if request is not None:
            self.classes[request] += 1
        self.sent += sent
        self.received += received
        self.dollars += rates.dollars(request, received)

    def add_cost(self, cost: Cost) -> None:
        """What was counted in another process."""
        for index, name in enumerate(CLASSES):
            self.classes[index] += getattr(cost, name)
        self.sent += cost.bytes_written
        self.received += cost.bytes_read
        self.dollars += cost.dollars

    def cost(self) -> Cost:
        """All of it."""
        gets, puts, lists, deletes, commits, queries = self.classes
        return Cost(self.received, self.sent, gets, puts, lists, deletes, commits, queries, self.dollars)


class Tally(list[Event]):
    """What is not added up yet, and the sums of what is.

    SUBTLE: to note something is to append to a list: atomic, without a lock, and all that an operation waits for.
    """

    sums: Sums | None = None
    """None before anything was added up. A small append makes one of these, so it has no constructor of its own."""
    lock: ClassVar[threading.Lock] = threading.Lock()
    """Held by whoever adds up, one for all tallies."""

    def add_up(self) -> Sums:
        """Empty the list into the sums. Holds the lock; what is noted meanwhile stays in the list."""
        sums = self.sums = self.sums or Sums()
        events = self[:]
        del self[: len(events)]
        for event in events:
            sums.add(event)
        return sums

    def add_cost(self, cost: Cost) -> None:
        """What was counted in another process."""
        with Tally.lock:
            self.add_up().add_cost(cost)

    def cost(self) -> Cost:
        """What was noted so far."""
        if len(self) == 1 and self.sums is None:  # a small append
            rates, _, sent, received, _, request = self[0]
            if request == COMMITS:
                return Cost(received, sent, commits=1, dollars=rates.dollars(request, received))
        with Tally.lock:
            return self.add_up().cost()


class _Lock:
    """Renews the lock of all tallies."""

    def after_fork_in_child(self) -> None:
        """SUBTLE: in a forked child, a lock that another thread held during the fork would stay held for ever."""
        Tally.lock = threading.Lock()


_lock = _Lock()
enrol(_lock, Stage.COUNTS)


def note(own: Tally, event: Event) -> None:
    """Count it for `own`, and for all in whose block it happened."""
    own.append(event)
    for tally in _open.get():
        tally.append(event)
        if len(tally) >= MANY:
            with Tally.lock:
                tally.add_up()
    if len(own) >= MANY:
        with Tally.lock:
            own.add_up()


_open: ContextVar[tuple[Tally, ...]] = ContextVar("persist_spending", default=())
tallies = _open.get
"""Whom an operation of this thread is counted for, beside its meter."""


class Spending:
    """Counts what is asked of locations within its block, as `cost`. They nest, and the outer one has all."""

    __slots__ = ("_tally", "_token")

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = Tally() if tally is None else check_type(tally, Tally, "tally", "another one's, or none")
        self._token: Token[tuple[Tally, ...]] | None = None

    @property
    def cost(self) -> Cost:
        """What it came to so far."""
        return self._tally.cost()

    def again(self) -> Spending:
        """Another one that adds to the same: each thread, and each step of an iterator, enters its own."""
        return Spending(self._tally)

    def __enter__(self) -> Self:
        outer = _open.get()
        # SUBTLE: by identity, as two lists of the same are equal. Within itself it counts once.
        if not (outer and any(tally is self._tally for tally in outer)):
            self._token = _open.set((*outer, self._tally))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _open.reset(self._token)
            self._token = None

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; what it takes to make them is counted, and not what their consumer does in between."""
        check_type(items, Iterable, "items", "[1, 2, 3]")  # type: ignore[type-abstract]
        return self._over(items)

    def _over(self, items: Iterable[T]) -> Iterator[T]:
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
