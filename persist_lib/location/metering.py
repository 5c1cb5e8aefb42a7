"""Count what a location is asked for: calls, failures, bytes, latencies and dollars, by kind of operation.

A `Meter` belongs to a client and counts all that it asks for; what one call comes to is counted in `spending`. Counts
are exact, also among threads. An attempt that fails is counted too: it was sent, and is paid for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from persist_lib.config import Runtime
from persist_lib.core.cost import FREE, GIB, Cost, Prices
from persist_lib.location.api import Blob, Consensus, Row
from persist_lib.location.around import AroundBlob, AroundConsensus, Operation
from persist_lib.location.caching import CacheCounts
from persist_lib.location.open import Location, open_location, scheme_of
from persist_lib.location.spending import COMMITS, DELETES, GETS, LISTS, PUTS, QUERIES, Tally, tallies

T = TypeVar("T")

CLASS_OF = {
    "get": GETS, "get_range": GETS, "set": PUTS, "list": LISTS, "delete": DELETES, "delete_many": DELETES,
    "uploads": LISTS, "abort_uploads": DELETES,
    "compare_and_set": COMMITS, "compare_and_set_many": COMMITS, "truncate": COMMITS,
    "head": QUERIES, "scan": QUERIES, "list_keys": QUERIES,
}  # fmt: skip
"""What an operation is where the store has no requests of its own."""
BUCKETS = 32
"""Latencies by powers of two of a microsecond, up to half an hour."""

_sending: ContextVar[_Kind | None] = ContextVar("persist_sending", default=None)


class Count(NamedTuple):
    """All operations of a kind: how many, how many of them raised, bytes sent and received, seconds, and their cost.

    `latencies[i]` operations took less than 2**i microseconds, and those before it less than half of that.
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
        """A bound that this share of the operations stayed below, up to twice too high; 0 where there were none."""
        wanted, seen = share * self.calls, 0
        for exponent, count in enumerate(self.latencies):
            seen += count
            if count and seen >= wanted:
                return min(float(2**exponent) / 1e6, self.longest_s)
        return self.longest_s


class _Kind:
    """One kind of operation of one meter: its counts, its prices, and whether its store tells of its requests."""

    __slots__ = (
        "calls", "egress", "failures", "latencies", "longest", "price", "prices", "request", "seconds", "tally",
    )  # fmt: skip

    def __init__(self, kind: str, prices: Prices, by_request: bool) -> None:
        self.tally = Tally()
        self.calls = self.failures = 0
        self.seconds = self.longest = 0.0
        self.latencies = [0] * BUCKETS
        self.prices = (prices.get, prices.put, prices.list, prices.delete, prices.commit, prices.query)
        self.request = None if by_request else CLASS_OF.get(kind)
        self.price = 0.0 if self.request is None else self.prices[self.request]
        self.egress = prices.egress_gib / GIB

    def done(self, failed: bool, sent: int, received: int, seconds: float) -> None:
        """One operation is over."""
        dollars = self.price + received * self.egress
        bucket = min(BUCKETS - 1, int(seconds * 1e6).bit_length())
        with Tally.lock:
            self.calls += 1
            self.failures += failed
            self.seconds += seconds
            self.latencies[bucket] += 1
            self.longest = max(self.longest, seconds)
            self.tally.add(self.request, sent, received, dollars)
            for tally in tallies():
                tally.add(self.request, sent, received, dollars)

    def requested(self, request: int) -> None:
        """One request was sent."""
        with Tally.lock:
            for tally in (self.tally, *tallies()):
                tally.add(request, 0, 0, self.prices[request])

    def count(self) -> Count:
        """What was counted so far."""
        cost = self.tally.cost()
        with Tally.lock:
            return Count(
                self.calls, self.failures, cost.bytes_written, cost.bytes_read, self.seconds, self.longest,
                tuple(self.latencies), cost,
            )  # fmt: skip


class Meter:
    """Counts by kind: `get`, `get_range`, `set`, `delete`, `delete_many`, `list` of Blob, the methods of Consensus."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        self.monotonic = monotonic or Runtime().monotonic
        self._kinds: dict[str, _Kind] = {}
        self._elsewhere = Tally()

    def charge(self, cost: Cost) -> None:
        """Add what another process spent on behalf of this code, as Spark's tasks do."""
        with Tally.lock:
            for tally in (self._elsewhere, *tallies()):
                tally.add_cost(cost)

    def elsewhere(self) -> Cost:
        """What other processes spent so far."""
        return self._elsewhere.cost()

    def counts(self) -> dict[str, Count]:
        """What was counted so far, by kind."""
        return {name: kind.count() for name, kind in self._kinds.copy().items()}

    def calls(self, kind: str) -> int:
        """How many operations of this kind there were."""
        return self._kinds[kind].calls if kind in self._kinds else 0

    def reset(self) -> dict[str, Count]:
        """Answer the counts and start from zero. What is under way is counted in neither."""
        kinds, self._kinds = self._kinds, {}
        return {name: kind.count() for name, kind in kinds.items()}

    def measure(
        self, operation: Operation, call: Callable[[], T], prices: Prices = FREE, *, by_request: bool = False
    ) -> T:
        """Carry out `call` and count it; `by_request` where the store calls `requested` for each of its requests."""
        name, _, sent = operation
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds.setdefault(name, _Kind(name, prices, by_request))
        token = _sending.set(kind) if by_request else None
        started = self.monotonic()
        try:
            result = call()
        except BaseException:
            kind.done(True, sent, 0, self.monotonic() - started)
            raise
        finally:
            if token is not None:
                _sending.reset(token)
        kind.done(False, sent, _size(result) if name in RECEIVING else 0, self.monotonic() - started)
        return result


RECEIVING = frozenset({"get", "get_range", "head", "scan"})


def _size(result: object) -> int:
    """The bytes of data in an answer."""
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
    """A store sent a request of this class. Called by stores for which an operation may take several, or none."""
    if (kind := _sending.get()) is not None:
        kind.requested(request)


class MeteredBlob(AroundBlob):
    """A Blob whose operations are counted."""

    def __init__(self, inner: Blob, meter: Meter, prices: Prices = FREE, *, by_request: bool = False) -> None:
        super().__init__(inner)
        self.meter, self.prices, self.by_request = meter, prices, by_request

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count it."""
        return self.meter.measure(operation, call, self.prices, by_request=self.by_request)


class MeteredConsensus(AroundConsensus):
    """A Consensus whose operations are counted."""

    def __init__(self, inner: Consensus, meter: Meter, prices: Prices = FREE, *, by_request: bool = False) -> None:
        super().__init__(inner)
        self.meter, self.prices, self.by_request = meter, prices, by_request

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count it."""
        return self.meter.measure(operation, call, self.prices, by_request=self.by_request)


def metered(location: Location, meter: Meter, prices: Prices | None = None) -> Location:
    """The same location, counted by `meter`; `prices` where they are not those that the schemes of its URLs have."""
    blob, consensus = scheme_of(location.url), scheme_of(location.consensus_url)
    return replace(
        location,
        blob=MeteredBlob(location.blob, meter, prices or blob.prices, by_request=blob.tells_requests),
        consensus=MeteredConsensus(
            location.consensus, meter, prices or consensus.prices, by_request=consensus.tells_requests
        ),
    )


def open_metered(
    url: str, consensus: str | None, meter: Meter, prices: Prices | None = None, *, create: bool, read_only: bool
) -> Location:
    """Open a location, with the requests that this takes counted as `open`. The location is not metered yet."""
    scheme = scheme_of(url)
    if not scheme.tells_requests and consensus is not None:
        scheme = scheme_of(consensus)
    return meter.measure(
        Operation("open", url), lambda: open_location(url, consensus, create=create, read_only=read_only),
        prices or scheme.prices, by_request=scheme.tells_requests,
    )  # fmt: skip


class Metrics(msgspec.Struct, frozen=True):
    """What a client asked of its location so far: operations by kind, what that and other
    processes' work for it cost, and how often its cache, if it has one, spared it the asking.
    """

    operations: dict[str, Count]
    cost: Cost
    cache: CacheCounts | None = None
