"""How long after a commit in PostgreSQL a listener of the collection has it, and what looking that often costs.

One process has all of it: an instance of the source in a thread, a client that commits one row at a time, and a
listener of the collection, on files. The peer is a loop that asks PostgreSQL for the decoded change itself, without a
pause: what the server needs. An instance looks at intervals, so on average half of one is added.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

import persist_lib as persist
from bench.figures import Figure, timed
from persist_lib.sources import Files, Postgres, Sources
from persist_lib.testing.servers import PostgresServer

INTERVALS_S = (0.02, 0.2, 1.0)
BARE = "pg_logical_slot_get_binary_changes in a loop without a pause; a server with its defaults"
FILES = "the same of a folder of files"
DECODED = """
SELECT count(*) FROM pg_logical_slot_get_binary_changes(
    'bench', NULL, NULL, 'proto_version', '1', 'publication_names', 'bench')
"""


def postgres_lag(quick: bool) -> list[Figure]:
    """The lag at several intervals, beside the server's own; and what a look without news costs."""
    rounds = 3 if quick else 50
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="persist-bench-"))
        server = stack.enter_context(PostgresServer({"wal_level": "logical"}))
        sql = stack.enter_context(psycopg.connect(server.url, autocommit=True))
        client = stack.enter_context(persist.open(f"file:{folder}/data"))
        sql.execute("CREATE TABLE orders (id int PRIMARY KEY, cents int)")
        sql.execute("CREATE PUBLICATION bench FOR TABLE orders")
        sql.execute("SELECT pg_create_logical_replication_slot('bench', 'pgoutput')")
        bare = statistics.median(_bare(sql, 10_000 + n) for n in range(rounds))
        sql.execute("SELECT pg_drop_replication_slot('bench')")
        sources = client.controller().sources()
        sources.create("orders", Postgres(url=server.url, table="public.orders"))
        sources.run("orders", until_idle=True)
        figures = [_lag(sources, sql, bare, interval_s, rounds) for interval_s in INTERVALS_S[: 2 if quick else 3]]
        return [*figures, *_looks(sources, folder, rounds)]


def _bare(sql: psycopg.Connection[Any], id_: int) -> float:
    """Seconds from a commit until a loop without a pause has its change from the server."""
    sql.execute("INSERT INTO orders VALUES (%s, 1)", [id_])
    start = time.perf_counter()
    while sql.execute(DECODED).fetchone() == (0,):
        pass
    return time.perf_counter() - start


def _lag(sources: Sources, sql: psycopg.Connection[Any], bare: float, interval_s: float, rounds: int) -> Figure:
    first = 100_000 + int(interval_s * 10_000) * 100
    lags = []
    with _ingesting(sources, interval_s), sources.controller.open_reader("orders") as reader:
        upper = reader.fetch_upper().time or 1
        with reader.listen(upper - 1) as listener:
            events = iter(listener)
            for n in range(first, first + rounds):
                time.sleep(interval_s * (n % 7) / 7)  # a commit may come at any moment between two looks
                sql.execute("INSERT INTO orders VALUES (%s, 1)", [n])
                start = time.perf_counter()
                while n not in _ids(next(events)):
                    pass
                lags.append(time.perf_counter() - start)
    lags.sort()
    note = f"p90 {lags[int(0.9 * (len(lags) - 1))]:.3f} s, {rounds} commits"
    name = f"lag-p50-looking-each-{interval_s:g}-s"
    return Figure(name, statistics.median(lags), bare, "s", "PostgreSQL's own decoding", note=note, settings=BARE)


def _ids(event: object) -> list[int]:
    found: list[int] = event.table.column("id").to_pylist() if isinstance(event, persist.Updates) else []
    return found


def _looks(sources: Sources, folder: str, rounds: int) -> Iterator[Figure]:
    """What a step without news costs: requests to the location, and time. The peer asks no server."""
    Path(folder, "in").mkdir()
    schema = persist.Schema({"id": "int32 not null"}, {"cents": "int32"})
    sources.create("files", Files(place=f"{folder}/in", format="jsonl"), schema)
    mine, theirs = (_look(sources, name, rounds) for name in ("orders", "files"))
    yield Figure("look-without-news-requests", mine[0], theirs[0], "requests", FILES)
    yield Figure("look-without-news", mine[1], theirs[1], "s", FILES)


def _look(sources: Sources, name: str, rounds: int) -> tuple[float, float]:
    instance = sources.open(name)
    try:
        instance.step()
        with persist.Spending() as spent:
            times = [timed(instance.step) for _ in range(rounds)]
        return spent.cost.requests / rounds, statistics.median(times)
    finally:
        instance.close()


@contextmanager
def _ingesting(sources: Sources, interval_s: float) -> Iterator[None]:
    is_over = threading.Event()
    others = Sources(sources.client.controller())
    thread = threading.Thread(
        target=lambda: others.run("orders", stop=is_over.is_set, interval_s=interval_s), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        others.close()
