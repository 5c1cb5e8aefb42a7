"""What a million updates cost on S3, in 250 appends, one scan, one compaction, and one scan more.

Each append has keys of its own, so that all sides keep a million rows, and each scan has to find them. Beside
deltalake, and pyiceberg with a SQL catalog and its default FileIO, on the same S3 server. Requests are counted from the
server's own log and priced by the same table for all. Ours has its Consensus on PostgreSQL, or on S3 alone. No figure
has the hourly cost of a database, also not of pyiceberg's catalog.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa

import persist_lib as persist
from bench.append import BULK, bulk_table
from bench.figures import Figure
from bench.peer import Peer
from persist_lib.core.cost import Prices
from persist_lib.testing.servers import PostgresServer, S3Server, use_test_credentials

COLOUR = re.compile(r"\x1b\[\d+m")
REQUEST = re.compile(r'"([A-Z]+) (\S+) HTTP/[\d.]+"')


class Requests(NamedTuple):
    """Requests to S3 by price class."""

    put: int = 0
    get: int = 0
    list: int = 0
    delete: int = 0

    @property
    def dollars(self) -> float:
        """Their price on S3."""
        prices = Prices()
        return sum(count * getattr(prices, kind) for kind, count in zip(self._fields, self, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind.upper()}" for kind, count in zip(self._fields, self, strict=True) if count)


def kind_of(method: str, target: str) -> str:
    """The price class of a request: as S3's price list has it."""
    _, _, query = target.partition("?")
    if method == "GET" and re.search(r"(^|&)(list-type|uploads|prefix|versions)\b", query):
        return "list"
    if method == "DELETE" or (method == "POST" and re.match(r"delete\b", query)):
        return "delete"
    return "get" if method in ("GET", "HEAD") else "put"


class Log:
    """The server's own log of requests."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def during(self, call: Callable[[], object]) -> Requests:
        """The requests that arrived while `call` was carried out."""
        self._read = self._path.stat().st_size
        call()
        with self._path.open() as log:
            log.seek(self._read)
            found = REQUEST.findall(COLOUR.sub("", log.read()))
        return Requests(**Counter(kind_of(*request) for request in found))


class Ours:
    """A shard, appended to by a handle that is kept open."""

    def __init__(self, url: str, consensus: str | None, updates: pa.Table, appends: int) -> None:
        self._urls = url, consensus
        self._updates, self._rows = updates, len(updates) // appends
        self._client = persist.open(*self._urls)
        self._write = self._client.open_writer("bulk", BULK)

    def ingest(self) -> None:
        """Append it all, slice after slice, each at a time of its own."""
        for time, start in enumerate(range(0, len(self._updates), self._rows)):
            rows = self._updates.slice(start, self._rows)
            times = pa.repeat(pa.scalar(time, pa.uint64()), len(rows))
            self._write.compare_and_append(rows.set_column(4, "_time", times), time, time + 1)

    def scan(self) -> int:
        """Read everything afresh; answers how many rows there are."""
        with persist.open(*self._urls) as client, client.open_reader("bulk") as read:
            return read.snapshot((self._write.upper.time or 0) - 1, diff=True).to_arrow().num_rows

    def compact(self) -> None:
        """Do all duties, twice. The second pass collects what the first one replaced and a reader might have read."""
        self._client.maintain("bulk")
        self._client.maintain("bulk")

    def close(self) -> None:
        """Retire the writer."""
        self._client.close()


PHASES = {"ingest": "ingest", "scan": "scan", "compaction": "compact", "scan after": "scan"}
"""What is measured, and by which call."""
Calls = Callable[[str], object]
"""Carries out a call by its name; what it answers of a scan is the rows."""


def cost(quick: bool) -> list[Figure]:
    """Requests and dollars of each phase, per million updates."""
    appends, rows = (20, 1_000) if quick else (250, 4_000)
    use_test_credentials()
    updates = bulk_table(appends * rows, is_shuffled=True)
    found: dict[str, dict[str, Requests]] = {}
    settings = {}
    with (
        S3Server() as server,
        PostgresServer() as database,
        TemporaryDirectory(prefix="persist-bench-") as folder,
    ):
        log = Log(server.root / "log")
        for name, urls in {
            "ours": (server.location("ours"), database.url), "S3 alone": (server.location("alone", "s3+cas"), None),
        }.items():  # fmt: skip
            with closing(Ours(*urls, updates, appends)) as ours:
                found[name] = _measure(log, lambda call, ours=ours: getattr(ours, call)(), len(updates))  # type: ignore[misc]
        source = f"{folder}/rows.arrow"
        plain = updates.drop_columns(["_time", "_diff"])
        with pa.OSFile(source, "wb") as file, pa.ipc.new_file(file, plain.schema) as arrow:
            arrow.write_table(plain)
        for name, start, more in (("deltalake", "delta", ()), ("pyiceberg", "iceberg", (folder,))):
            with Peer(f"bench.lake:{start}", server.url, server.bucket, source, appends, *more) as peer:
                found[name] = _measure(log, lambda call, peer=peer: peer.ask(call), len(updates))  # type: ignore[misc]
                settings[name] = peer.settings
    return _figures(found, settings, 1e6 / (appends * rows))


def _measure(log: Log, call: Calls, rows: int) -> dict[str, Requests]:
    """The requests of each phase. Every scan has to find all there is."""
    found, answers = {}, []
    for phase, name in PHASES.items():
        found[phase] = log.during(lambda name=name: answers.append(call(name)))  # type: ignore[misc]
    counts = [answer for answer in answers if answer is not None]
    if counts != [rows, rows]:
        raise SystemExit(f"{rows} rows were appended, and scans found {counts}")
    return found


def _figures(found: dict[str, dict[str, Requests]], settings: dict[str, str], scale: float) -> list[Figure]:
    figures = []
    for name in ("ours", "S3 alone"):
        suffix = "" if name == "ours" else "-s3-alone"
        for peer in ("deltalake", "pyiceberg"):
            for phase in PHASES if name == "ours" else ("ingest",):
                here, there = found[name][phase], found[peer][phase]
                part = scale if phase == "ingest" else 1.0
                figures.append(
                    Figure(f"cost-{phase.replace(' ', '-')}{suffix}", sum(here) * part, sum(there) * part, "requests",
                           peer, at_most=1.0, note=f"{here} | {there}", settings=settings[peer])
                )  # fmt: skip
            mine, other = (_dollars(found[who], scale) for who in (name, peer))
            figures.append(
                Figure(f"cost{suffix}", mine, other, "$/M", peer, at_most=1.0, note="all, requests only",
                       settings=settings[peer])
            )  # fmt: skip
    return figures


def _dollars(spent: dict[str, Requests], scale: float) -> float:
    return sum(requests.dollars * (scale if phase == "ingest" else 1.0) for phase, requests in spent.items())
