"""The cost of a block of code: `Spending` counts all requests to locations in its block, by any client.

    with Spending() as spent:
        table = snapshot.to_arrow()
    spent.cost

Counts are exact, also with threads: the work of a thread of `Runtime.pool` counts for the code that submitted it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import msgspec

from persist_lib.arguments import check_type
from persist_lib.core.cost import GIB, Cost, Prices
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.telemetry import Observer, process

T = TypeVar("T")
P = ParamSpec("P")
Report = TypeVar("Report", bound=msgspec.Struct)

CLASSES = ("gets", "puts", "lists", "deletes", "commits", "queries")
GETS, PUTS, LISTS, DELETES, COMMITS, QUERIES = range(len(CLASSES))


class Rates:
    """The prices of requests of each class and of received bytes, in dollars, at one store."""

    __slots__ = ("egress", "prices")

    def __init__(self, prices: Prices) -> None:
        self.prices = (prices.get, prices.put, prices.list, prices.delete, prices.commit, prices.query)
        self.egress = prices.egress_gib / GIB

    def dollars(self, request: int | None, received: int) -> float:
        return (0.0 if request is None else self.prices[request]) + received * self.egress

    def tell(self, observer: Observer, event: Event) -> None:
        """Tell of one event; what no meter counts is not told."""


Event = tuple[Rates, bool, int, int, float, int | None]
"""One operation or request: its rates, whether it failed, bytes sent and received, seconds, and the request's class.

If a store reports the requests of an operation separately, they have a class and the operation has none.
"""
MANY = 1024
"""The most events that are kept one by one before they are added up."""


class Sums:
    """Requests by class, bytes and dollars, added up. The adding thread holds `Tally.lock`."""

    __slots__ = ("classes", "dollars", "received", "sent")

    def __init__(self) -> None:
        self.classes = [0] * len(CLASSES)
        self.sent = self.received = 0
        self.dollars = 0.0

    def add(self, event: Event) -> None:
        rates, _, sent, received, _, request = event
        if request is not None:
            self.classes[request] += 1
        self.sent += sent
        self.received += received
        self.dollars += rates.dollars(request, received)

    def add_cost(self, cost: Cost) -> None:
        for index, name in enumerate(CLASSES):
            self.classes[index] += getattr(cost, name)
        self.sent += cost.bytes_written
        self.received += cost.bytes_read
        self.dollars += cost.dollars

    def cost(self) -> Cost:
        gets, puts, lists, deletes, commits, queries = self.classes
        return Cost(self.received, self.sent, gets, puts, lists, deletes, commits, queries, self.dollars)


class Tally(list[Event]):
    """Events that are not added up yet, and the sums of those that are.

    Noting an event only appends it to this list. That is atomic and takes no lock, so operations do not wait.
    """

    sums: Sums | None = None
    """None before anything was added up. It has no constructor, because each small append makes a tally."""
    lock: ClassVar[threading.Lock] = threading.Lock()
    """Held by a thread that adds up; one lock for all tallies."""

    def add_up(self) -> Sums:
        """Move the events of the list into the sums. The caller holds `lock`. Events noted later stay listed."""
        sums = self.sums = self.sums or Sums()
        events = self[:]
        del self[: len(events)]
        for event in events:
            sums.add(event)
        return sums

    def add_cost(self, cost: Cost) -> None:
        with Tally.lock:
            self.add_up().add_cost(cost)

    def cost(self) -> Cost:
        if len(self) == 1 and self.sums is None:  # a small append
            rates, _, sent, received, _, request = self[0]
            if request == COMMITS:
                return Cost(received, sent, commits=1, dollars=rates.dollars(request, received))
        with Tally.lock:
            return self.add_up().cost()


def _renew(tally: type[Tally]) -> None:
    tally.lock = threading.Lock()


enrol(Tally, Stage.COUNTS, _renew)


def note(own: Tally, event: Event) -> None:
    """Count `event` for `own` and for every `Spending` in whose block it happened."""
    own.append(event)
    if process.observer is not None:
        event[0].tell(process.observer, event)
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
"""The tallies that count an operation of this thread, next to its meter."""


class Spending:
    """Counts the requests to locations within its block; `cost` is their sum. Blocks nest: an outer one counts all."""

    __slots__ = ("_tally", "_token")

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = Tally() if tally is None else check_type(tally, Tally, "tally", "another one's, or none")
        self._token: Token[tuple[Tally, ...]] | None = None

    @property
    def cost(self) -> Cost:
        """What was spent in the block so far."""
        return self._tally.cost()

    def again(self) -> Spending:
        """Return another block with the same sums. Each thread and each step of an iterator must enter its own."""
        return Spending(self._tally)

    def __enter__(self) -> Self:
        outer = _open.get()
        # By identity, as two lists of equal events are equal. Nested in itself, a block counts once.
        if not (outer and any(tally is self._tally for tally in outer)):
            self._token = _open.set((*outer, self._tally))
        return self

    def __exit__(self, *_error: object) -> None:
        if self._token is not None:
            _open.reset(self._token)
            self._token = None

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items. Counts the cost of producing them, not what their consumer does in between."""
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
    """Decorate a function that returns a report, so that the report's `cost` is the cost of the call."""

    @wraps(call)
    def measured(*args: P.args, **kwargs: P.kwargs) -> Report:
        with Spending() as spent:
            report = call(*args, **kwargs)
        return msgspec.structs.replace(report, cost=spent.cost)

    return measured
