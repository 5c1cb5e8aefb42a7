"""Counts of the operations on a location, by kind: calls, failures, bytes, latencies and dollars.

A `Meter` belongs to a client and counts all of its operations. The module `spending` counts what a single call costs.
Counts are exact, also with several threads. A failed attempt counts too, because it was sent and is billed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import msgspec

from persist_lib.core.cost import FREE, Cost, Prices
from persist_lib.location.api import Blob, Consensus, Newest, Row
from persist_lib.location.wrap.around import Around, AroundBlob, AroundConsensus, Operation, S
from persist_lib.location.wrap.chunk_cache import CacheCounts
from persist_lib.location.wrap.spending import (
    CLASSES,
    COMMITS,
    DELETES,
    GETS,
    LISTS,
    PUTS,
    QUERIES,
    Event,
    Rates,
    Sums,
    Tally,
    note,
    tallies,
)
from persist_lib.runtime.ambient import Runtime
from persist_lib.telemetry import Observer, process

T = TypeVar("T")

CLASS_OF = {
    "get": GETS, "get_range": GETS, "set": PUTS, "point": PUTS, "list": LISTS, "delete": DELETES,
    "delete_many": DELETES, "uploads": LISTS, "abort_uploads": DELETES,
    "compare_and_set": COMMITS, "compare_and_set_many": COMMITS, "truncate": COMMITS,
    "rewind": COMMITS,
    "head": QUERIES, "scan": QUERIES, "list_keys": QUERIES, "heads": QUERIES, "debts": QUERIES, "losing": QUERIES,
}  # fmt: skip
"""The request class of each operation, for stores that do not report their requests themselves."""
BUCKETS = 32
"""The number of latency buckets: powers of two of a microsecond, up to half an hour."""

_sending: ContextVar[tuple[Tally, _Kind] | None] = ContextVar("persist_sending", default=None)


class Count(NamedTuple):
    """All operations of a kind: how many, how many of them raised, bytes sent and received, seconds, and their cost.

    `latencies[i]` is how many operations took less than 2**i microseconds, but at least half of that.
    """

    calls: int = 0
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    latencies: tuple[int, ...] = ()
    cost: Cost = Cost()

    def below_s(self, share: float) -> float:
        """Return seconds that this share (0 to 1) of the operations stayed below, up to twice too high; 0 if none."""
        wanted, seen = share * self.calls, 0
        for exponent, count in enumerate(self.latencies):
            seen += count
            if count and seen >= wanted:
                return min(float(2**exponent) / 1e6, self.longest_s)
        return self.longest_s


class _Kind(Rates):
    """One kind of operation of one meter: its counts, prices, and request class if it is always one request."""

    __slots__ = ("calls", "failures", "latencies", "longest", "name", "request", "seconds", "sums")

    def __init__(self, kind: str, prices: Prices, by_request: bool) -> None:
        super().__init__(prices)
        self.name = kind
        self.request = None if by_request else CLASS_OF.get(kind)
        self.clear()

    def clear(self) -> None:
        self.sums = Sums()
        self.calls = self.failures = 0
        self.seconds = self.longest = 0.0
        self.latencies = [0] * BUCKETS

    def add(self, event: Event, *, is_operation: bool) -> None:
        self.sums.add(event)
        if is_operation:
            _, failed, _, _, seconds, _ = event
            self.calls += 1
            self.failures += failed
            self.seconds += seconds
            self.latencies[min(BUCKETS - 1, int(seconds * 1e6).bit_length())] += 1
            self.longest = max(self.longest, seconds)

    def is_operation(self, event: Event) -> bool:
        """Whether an event is an operation, or one of the requests of an operation whose store tells them apart."""
        return event[5] is None or self.request is not None

    def tell(self, observer: Observer, event: Event) -> None:
        _, failed, sent, received, seconds, request = event
        if self.is_operation(event):
            observer.operated(self.name, seconds, sent, received, failed=failed)
        if request is not None or received:
            kind, count = ("", 0) if request is None else (CLASSES[request], 1)
            observer.requested(kind, count, self.dollars(request, received))

    def count(self) -> Count:
        sums = self.sums
        return Count(
            self.calls, self.failures, sums.sent, sums.received, self.seconds, self.longest, tuple(self.latencies),
            sums.cost(),
        )  # fmt: skip


class _Kinds(Tally):
    """A tally that adds up events in the counts of their kinds, not in its own sums."""

    def add_up(self) -> Sums:
        events = self[:]
        del self[: len(events)]
        for event in events:
            kind = event[0]
            if isinstance(kind, _Kind):
                kind.add(event, is_operation=kind.is_operation(event))
        return _NOTHING


_NOTHING = Sums()


class Meter:
    """Counts by kind: `get`, `get_range`, `set`, `delete`, `delete_many`, `list` of Blob, the methods of Consensus."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        self.monotonic = monotonic or Runtime().monotonic
        self.tally: Tally = _Kinds()
        self._kinds: dict[str, _Kind] = {}
        self._elsewhere = Tally()

    def charge(self, cost: Cost) -> None:
        """Add the cost of work that another process, such as a Spark task, did for this code."""
        for tally in (self._elsewhere, *tallies()):
            tally.add_cost(cost)
        if process.observer is not None:
            for kind in CLASSES:
                process.observer.requested(kind, getattr(cost, kind), 0.0)
            process.observer.requested("", 0, cost.dollars)

    def elsewhere(self) -> Cost:
        return self._elsewhere.cost()

    def counts(self) -> dict[str, Count]:
        """Return the counts so far, by kind. Kinds without any call are left out."""
        with Tally.lock:
            self.tally.add_up()
            return {name: kind.count() for name, kind in self._kinds.copy().items() if kind.calls}

    def calls(self, kind: str) -> int:
        return self.counts().get(kind, Count()).calls

    def reset(self) -> dict[str, Count]:
        """Return the counts by kind and start from zero. No operation is lost or counted twice."""
        with Tally.lock:
            self.tally.add_up()
            kinds = self._kinds.copy()
            found = {name: kind.count() for name, kind in kinds.items() if kind.calls}
            for kind in kinds.values():
                kind.clear()
            return found

    def kind(self, name: str, prices: Prices, *, by_request: bool) -> _Kind:
        found = self._kinds.get(name)
        return self._kinds.setdefault(name, _Kind(name, prices, by_request)) if found is None else found

    def measure(
        self, operation: Operation, call: Callable[[], T], prices: Prices = FREE, *, by_request: bool = False
    ) -> T:
        """Run `call`, count it and return its result. `by_request`: the store calls `requested` for each request."""
        name, _, sent = operation
        kind = self.kind(name, prices, by_request=by_request)
        token = _sending.set((self.tally, kind)) if by_request else None
        started = self.monotonic()
        try:
            result = call()
        except BaseException:
            note(self.tally, (kind, True, sent, 0, self.monotonic() - started, kind.request))
            raise
        finally:
            if token is not None:
                _sending.reset(token)
        received = _size(result) if name in RECEIVING else 0
        note(self.tally, (kind, False, sent, received, self.monotonic() - started, kind.request))
        return result


RECEIVING = frozenset({"get", "get_range", "head", "scan"})


def _size(result: object) -> int:
    match result:
        case bytes():
            return len(result)
        case Row():
            return len(result.data)
        case [*rows]:
            return sum(len(row.data) for row in rows if isinstance(row, Row))
        case _:
            return 0


def requested(request: int) -> None:
    """Count a request of this class. Stores call it if their operations may take several requests or none."""
    if (sending := _sending.get()) is not None:
        tally, kind = sending
        note(tally, (kind, False, 0, 0, 0.0, request))


class _Metered(Around[S]):
    def __init__(self, inner: S, meter: Meter, prices: Prices = FREE, *, by_request: bool = False) -> None:
        super().__init__(inner)
        self.meter, self.prices, self.by_request = meter, prices, by_request

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.meter.measure(operation, call, self.prices, by_request=self.by_request)


class MeteredBlob(_Metered[Blob], AroundBlob):
    """A Blob whose operations are counted."""


class MeteredConsensus(_Metered[Consensus], AroundConsensus):
    """A Consensus whose operations are counted."""

    def __init__(self, inner: Consensus, meter: Meter, prices: Prices = FREE, *, by_request: bool = False) -> None:
        super().__init__(inner, meter, prices, by_request=by_request)
        self._commit = meter.kind("compare_and_set", prices, by_request=by_request)

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        """Count it as `around` would, but faster, because a small append consists of this one call."""
        if self.by_request:
            return super().compare_and_set(key, expected, data)
        meter, kind, has_failed = self.meter, self._commit, True
        started = meter.monotonic()
        try:
            won = self.inner.compare_and_set(key, expected, data)
            has_failed = False
        finally:
            note(meter.tally, (kind, has_failed, len(data), 0, meter.monotonic() - started, COMMITS))
        return won


class Metrics(msgspec.Struct, frozen=True):
    """What a client did with its location so far: its operations by kind, and the counts of its cache, if it has one.

    `cost` includes the work of other processes for this client.
    """

    operations: dict[str, Count]
    cost: Cost
    cache: CacheCounts | None = None
    lease_failures: int = 0
    """How often leases could not be renewed, or their renewal not be started. Each failure is logged and retried."""
