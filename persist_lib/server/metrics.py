"""What a server tells of itself in figures, in the text format of Prometheus.

The number of series does not grow with shards or clients. Names of shards, which clients without rights on them do not
see, are in it only where the server's operator asks for some, and then of the busiest few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from persist_lib.core.groups import CHANGES_MOST
from persist_lib.errors import (
    Damage,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    PersistError,
    TimedOut,
)
from persist_lib.runtime.reread import Reread
from persist_lib.server.access import Access, Certificates, Load
from persist_lib.server.row_push import Pushing
from persist_lib.shard.funnels import SHARDS_MOST, Funnels

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COMMANDS = tuple(1 << n for n in range(CHANGES_MOST.bit_length()))
OUTCOMES: tuple[tuple[type[PersistError], str], ...] = (
    (NotAuthenticated, "denied"), (NotAllowed, "denied"), (Overloaded, "overloaded"), (TimedOut, "timed_out"),
    (Indeterminate, "unknown"), (InvalidUsage, "invalid"), (Determinate, "failed"), (Damage, "damaged"),
)  # fmt: skip
"""The outcome of a call that ended with an error; the first that fits."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def outcome_of(error: PersistError) -> str:
    """An error as one of a few words."""
    return next((told for kind, told in OUTCOMES if isinstance(error, kind)), "refused")


class Measures:
    """The figures of one server. Safe to use from several threads.

    `named`: how many shards are named, those whose commits took the most time; the others are in the sums only.
    `clock_s` tells seconds since 1970. `location` shows what the server asks of its own location.
    """

    def __init__(self, named: int, clock_s: Callable[[], float], location: Collector | None = None) -> None:
        self._registry = CollectorRegistry()
        if location is not None:
            self._registry.register(location)
        self.now = clock_s
        self._shards = None if named == 0 else _Shards(named)
        if self._shards is not None:
            self._registry.register(self._shards)
        ProcessCollector(registry=self._registry)
        registry = self._registry
        self._calls = Counter(
            "persist_server_calls",
            "Calls that were answered, by what came of them",
            ["call", "outcome"],
            registry=registry,
        )
        self._call_seconds = Histogram(
            "persist_server_call_seconds",
            "How long calls took, their waiting included",
            ["call"],
            buckets=SECONDS,
            registry=registry,
        )
        self._refusals = Counter(
            "persist_server_refusals", "Commands that the state of a shard refused", ["refusal"], registry=registry
        )
        self._received = Counter("persist_server_received_bytes", "Bytes of the messages of calls", registry=registry)
        self._sent = Counter("persist_server_sent_bytes", "Bytes of answers", registry=registry)
        self._commit_seconds = Histogram(
            "persist_server_commit_seconds", "How long the store took for a row, until it was known to be there",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._row_commands = Histogram(
            "persist_server_row_commands", "How many commands a row answered", buckets=COMMANDS, registry=registry
        )

    def tell(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Show what `value` returns at the time of each look as the gauge `persist_server_{name}`."""
        Gauge(f"persist_server_{name}", what, registry=self._registry).set_function(value)

    def served(self, call: str, outcome: str, seconds: float, received: int, sent: int) -> None:
        self._calls.labels(call, outcome).inc()
        self._call_seconds.labels(call).observe(seconds)
        self._received.inc(received)
        self._sent.inc(sent)

    def refused(self, refusal: str) -> None:
        self._refusals.labels(refusal).inc()

    def committed(self, shard: str, commands: int, seconds: float) -> None:
        """A row of a shard that answers so many commands is there, and was so many seconds on its way."""
        self._commit_seconds.observe(seconds)
        self._row_commands.observe(commands)
        if self._shards is not None:
            self._shards.committed(shard, commands, seconds)

    def shown(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(slots=True)
class _Commits:
    shard: str
    rows: int = 0
    commands: int = 0
    seconds: float = 0.0


class _Shards(Collector):
    """The commits of the shards that took the most time of those in memory: as many shards as funnels."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._of: dict[str, _Commits] = {}

    def committed(self, shard: str, commands: int, seconds: float) -> None:
        with self._lock:
            found = self._of[shard] = self._of.pop(shard, _Commits(shard))
            found.rows += 1
            found.commands += commands
            found.seconds += seconds
            if len(self._of) > SHARDS_MOST:
                del self._of[next(iter(self._of))]

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            named = nlargest(self._most, self._of.values(), key=attrgetter("seconds"))
            for name, what in (
                ("rows", "Rows of one of the shards whose commits took the most time"),
                ("commands", "Commands that these rows answered"),
                ("seconds", "How long the store took for these rows"),
            ):
                family = CounterMetricFamily(f"persist_server_shard_commit_{name}", what, labels=["shard"])
                for one in named:
                    family.add_metric([one.shard], getattr(one, name))
                yield family


SOCKETS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED = "01"


def figures(
    measures: Measures, funnels: Funnels, load: Load, pushing: Pushing, access: Access | None,
    certificates: Certificates | None, port: int,
) -> None:  # fmt: skip
    """Have `measures` show them."""
    tell = measures.tell
    tell("shards", "Shards whose states are in memory", funnels.known)
    tell("queued_commands", "Commands that wait for their turn, of all shards", lambda: sum(funnels.waiting()))
    longest = "Commands that wait, of the shard with the most"
    tell("longest_queue_commands", longest, lambda: max(funnels.waiting(), default=0))
    tell("commands_under_way", "Commands and other calls that are not answered yet", lambda: load.commands)
    tell("bytes_under_way", "Bytes of the messages of these", lambda: load.bytes)
    tell("clients_under_way", "Clients with something under way", lambda: load.clients)
    tell("subscribers", "Clients that get new rows", pushing.clients)
    if SOCKETS[0].exists():
        tell("connections", "Connections to the port of clients", lambda: connections(port))
    if access is not None:
        _tell_of(measures, "token_file", "the token file", access.file)
    if certificates is not None:
        _tell_of(measures, "certificate", "the TLS files", certificates.files)
        expiry = "Seconds until the first certificate of the chain expires"
        tell("certificate_expiry_seconds", expiry, lambda: certificates.not_after() - measures.now())


def _tell_of(measures: Measures, name: str, what: str, files: Reread[Any]) -> None:
    """Show what became of files that are read again when they change."""

    def now() -> Reread[Any]:
        files.get()
        return files

    measures.tell(
        f"{name}_failures", f"Versions of {what} that could not be read or were wrong", lambda: now().failures
    )
    stale = f"1 while the newest version of {what} is wrong, and a former one is in force"
    measures.tell(f"{name}_stale", stale, lambda: now().is_stale)


def connections(port: int) -> int:
    """How many TCP connections this machine's side of `port` has. 0 if it cannot be known."""
    found, here = 0, f":{port:04X}"
    for path in SOCKETS:
        try:
            lines = path.read_text().splitlines()[1:]
        except OSError:
            continue
        fields = (line.split(maxsplit=4) for line in lines)
        found += sum(one[1].endswith(here) and one[3] == ESTABLISHED for one in fields)
    return found
