"""What a million updates cost on S3, in 250 appends, one scan, one compaction, and one scan more.

Beside deltalake, and pyiceberg with a SQL catalog and its default FileIO, on the same S3 server. Requests are those
that the server's own log tells of, so they are counted alike for all, and priced by the same table. Ours has its
Consensus on PostgreSQL, or on S3 alone; what a database costs by the hour, pyiceberg's catalog too, is in no figure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

import persist_lib as persist
from bench.append import BULK, bulk_table
from bench.figures import Figure
from persist_lib.core.cost import Prices
from persist_lib.testing.servers import CREDENTIALS, PostgresServer, S3Server, use_test_credentials

COLOUR = re.compile(r"\x1b\[\d+m")
REQUEST = re.compile(r'"([A-Z]+) (\S+) HTTP/[\d.]+"')


class Table(Protocol):
    """One of those that are compared."""

    def append(self, updates: pa.Table, time: int) -> None:
        """Append durably."""

    def scan(self) -> int:
        """Read everything afresh; answers how many rows there are."""

    def compact(self) -> None:
        """Make it few files, and delete the others."""


class Requests(NamedTuple):
    """Requests to S3 by price class."""

    put: int = 0
    get: int = 0
    list: int = 0
    delete: int = 0

    @property
    def dollars(self) -> float:
        """What S3 takes for them."""
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
    """A shard."""

    def __init__(self, url: str, consensus: str | None) -> None:
        self._urls = url, consensus
        self._client = persist.open(*self._urls)
        self._write = self._client.open_writer("bulk", BULK)

    def append(self, updates: pa.Table, time: int) -> None:
        """See `Table`."""
        times = pa.repeat(pa.scalar(time, pa.uint64()), len(updates))
        self._write.compare_and_append(updates.set_column(4, "_time", times), time, time + 1)

    def scan(self) -> int:
        """See `Table`."""
        with persist.open(*self._urls) as client, client.open_reader("bulk") as read:
            return read.snapshot((self._write.upper.time or 0) - 1).to_arrow().num_rows

    def compact(self) -> None:
        """All duties. The second time collects what the first has replaced, as a reader might still have read it."""
        self._client.maintain("bulk")
        self._client.maintain("bulk")

    def close(self) -> None:
        """Retire the writer."""
        self._client.close()


class Delta:
    """A Delta table, appended to by a handle that is kept open."""

    def __init__(self, server: S3Server, schema: pa.Schema) -> None:
        self._url = f"s3://{server.bucket}/delta"
        self._options = CREDENTIALS | {
            "AWS_REGION": CREDENTIALS["AWS_DEFAULT_REGION"], "AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true",
            "AWS_CONDITIONAL_PUT": "etag",
        }  # fmt: skip
        self._table = DeltaTable.create(self._url, schema, storage_options=self._options)

    def append(self, updates: pa.Table, time: int) -> None:  # noqa: ARG002 - it has a version of its own
        """See `Table`."""
        write_deltalake(self._table, updates, mode="append")

    def scan(self) -> int:
        """See `Table`."""
        return DeltaTable(self._url, storage_options=self._options).to_pyarrow_table().num_rows

    def compact(self) -> None:
        """See `Table`."""
        self._table.optimize.compact()
        self._table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


class Iceberg:
    """An Iceberg table, appended to by a handle that is kept open."""

    def __init__(self, server: S3Server, schema: pa.Schema, folder: str) -> None:
        self._properties = {
            "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"s3://{server.bucket}/iceberg",
            "s3.endpoint": server.url, "s3.region": CREDENTIALS["AWS_DEFAULT_REGION"],
            "s3.access-key-id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        }  # fmt: skip
        self._catalog = SqlCatalog("bench", **self._properties)
        self._catalog.create_namespace("bench")
        self._table = self._catalog.create_table("bench.bulk", schema)

    def append(self, updates: pa.Table, time: int) -> None:  # noqa: ARG002 - it has a version of its own
        """See `Table`."""
        self._table.append(updates)

    def scan(self) -> int:
        """See `Table`."""
        return SqlCatalog("bench", **self._properties).load_table("bench.bulk").scan().to_arrow().num_rows

    def compact(self) -> None:
        """It has none: it is overwritten with what is read from it."""
        self._table.overwrite(self._table.scan().to_arrow())


PHASES = ("ingest", "scan", "compaction", "scan after")


def cost(quick: bool) -> list[Figure]:
    """Requests and dollars of each phase, per million updates."""
    appends, rows = (20, 1_000) if quick else (250, 4_000)
    use_test_credentials()
    updates = bulk_table(rows, is_shuffled=True)
    plain = updates.drop_columns(["_time", "_diff"])
    with (
        S3Server() as server,
        PostgresServer() as database,
        TemporaryDirectory(prefix="persist-bench-") as folder,
    ):
        log = Log(server.root / "log")

        def measure(table: Table, given: pa.Table) -> dict[str, Requests]:
            return _measure(log, table, given, appends)

        found = {}
        for name, urls in {
            "ours": (server.location("ours"), database.url), "S3 alone": (server.location("alone", "s3+cas"), None),
        }.items():  # fmt: skip
            ours = Ours(*urls)
            found[name] = measure(ours, updates)
            ours.close()
        found["deltalake"] = measure(Delta(server, plain.schema), plain)
        found["pyiceberg"] = measure(Iceberg(server, plain.schema, folder), plain)
    return _figures(found, 1e6 / (appends * rows))


def _measure(log: Log, table: Table, updates: pa.Table, appends: int) -> dict[str, Requests]:
    """The requests of each phase. Every scan has to find all there is."""

    def ingest() -> None:
        for number in range(appends):
            table.append(updates, number)

    counts: list[int] = []
    calls = ingest, lambda: counts.append(table.scan()), table.compact, lambda: counts.append(table.scan())
    found = {phase: log.during(call) for phase, call in zip(PHASES, calls, strict=True)}
    if any(count not in (len(updates), len(updates) * appends) for count in counts):
        raise SystemExit(f"{table} holds {counts} rows")
    return found


def _figures(found: dict[str, dict[str, Requests]], scale: float) -> list[Figure]:
    figures = []
    for name in ("ours", "S3 alone"):
        suffix = "" if name == "ours" else "-s3-alone"
        for peer in ("deltalake", "pyiceberg"):
            for phase in PHASES if name == "ours" else PHASES[:1]:
                here, there = found[name][phase], found[peer][phase]
                part = scale if phase == "ingest" else 1.0
                figures.append(
                    Figure(f"cost-{phase.replace(' ', '-')}{suffix}", sum(here) * part, sum(there) * part, "requests",
                           peer, at_most=1.0, note=f"{here} | {there}")
                )  # fmt: skip
            mine, other = (_dollars(found[who], scale) for who in (name, peer))
            figures.append(Figure(f"cost{suffix}", mine, other, "$/M", peer, at_most=1.0, note="all, requests only"))
    return figures


def _dollars(spent: dict[str, Requests], scale: float) -> float:
    return sum(requests.dollars * (scale if phase == "ingest" else 1.0) for phase, requests in spent.items())
