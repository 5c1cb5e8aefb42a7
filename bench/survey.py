"""A pass over idle shards: what a survey costs, in time and in requests, beside a look at each shard.

The shards are copies of one, whose rows are put into the tables directly: a log does not say whose it is. Each survey
is by a new client, which starts from what the location remembers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import apsw
import psycopg

import persist_lib as persist
from bench.append import SMALL
from bench.figures import Figure, timed
from persist_lib.ids import SeqNo
from persist_lib.location.api import START_BYTES, Row
from persist_lib.location.embedded import CONSENSUS
from persist_lib.testing.servers import PostgresServer

TRANSITIONS = 16
"""In each shard's log."""
SHARE = 20
"""One of so many shards changes."""
LIMITS_S = {1_000: 0.3, 10_000: 2.0}
ROUNDS = 5
SAMPLE = 1_000
"""So many shards are looked at one by one; all of them take as much longer as they are more."""


class Place(NamedTuple):
    """Where the shards are, and how rows get there without commits."""

    name: str
    urls: tuple[str, str | None]
    fill: Callable[[Sequence[str], Sequence[Row]], None]


def survey(quick: bool) -> list[Figure]:
    """Surveys of 1,000 and of 10,000 shards on SQLite and on PostgreSQL: the first, of idle ones, of 5 % changed."""
    found = []
    with PostgresServer() as server:
        for shards in (50,) if quick else LIMITS_S:
            with TemporaryDirectory(prefix="persist-bench-") as folder:
                url = f"file:{folder}/data"
                found += _surveys(shards, Place("sqlite", (url, None), partial(_fill_sqlite, f"{folder}/data")))
            with TemporaryDirectory(prefix="persist-bench-") as folder:
                url = f"{server.url}?persist_schema=survey_{shards}"
                place = Place("postgresql", (f"file:{folder}/data", url), partial(_fill_postgres, server.url, shards))
                found += _surveys(shards, place)
    return found


def _surveys(shards: int, place: Place) -> list[Figure]:
    names = [f"shard-{number:05d}" for number in range(shards)]
    with persist.open(*place.urls):
        place.fill(names, _rows_of_one())
    one_by_one = _by_looking_at_each(place, names[:SAMPLE]) * shards / len(names[:SAMPLE])
    first, first_s = _survey(place)
    idle = [_survey(place) for _ in range(ROUNDS)]
    idle_s = statistics.median(seconds for _, seconds in idle)
    _change(place, names[::SHARE])
    changed, changed_s = _survey(place)
    for one in (first, changed, *(one for one, _ in idle)):
        if len(one.looks) != shards or one.waiting or one.unread or one.due("compaction"):
            raise SystemExit(f"{place.name}: {one.waiting} shards wait, {len(one.unread)} could not be read")
    limit = LIMITS_S.get(shards, min(LIMITS_S.values()))
    name = f"survey-{place.name}-{shards}"
    return [
        Figure(f"{name}-idle", idle_s * 1e3, limit * 1e3, "ms", "the limit", at_most=1.0, note=_requests(idle[0][0])),
        Figure(f"{name}-changed", changed_s * 1e3, one_by_one * 1e3, "ms", "a census of each shard",
               note=f"{len(names[::SHARE])} of them; {_requests(changed)}"),
        Figure(f"{name}-first", first_s * 1e3, one_by_one * 1e3, "ms", "a census of each shard",
               note=_requests(first)),
    ]  # fmt: skip


def _requests(found: persist.Survey) -> str:
    cost = found.cost
    return f"{cost.requests:,} requests: {cost.queries:,} of Consensus, {cost.requests - cost.queries} of Blob"


def _survey(place: Place) -> tuple[persist.Survey, float]:
    with persist.open(*place.urls) as client:
        found: list[persist.Survey] = []
        seconds = timed(lambda: found.append(client.survey()))
        return found[0], seconds


def _by_looking_at_each(place: Place, names: Sequence[str]) -> float:
    with persist.open(*place.urls) as client:
        return timed(lambda: [client.census(name) for name in names])


def _change(place: Place, names: Sequence[str]) -> None:
    with persist.open(*place.urls) as client:
        for name in names:
            with client.open_writer(name, SMALL) as write:
                write.advance_upper((write.fetch_upper().time or 0) + 1)


def _rows_of_one() -> list[Row]:
    """The log of a shard with some data, and nothing to do."""
    with persist.open("memory:") as client:
        with client.open_writer("one", SMALL) as write:
            write.compare_and_append([{"id": n, "text": "x" * 50, "_time": 0} for n in range(20)], 0, 1)
            while client.inspect("one").seqno < TRANSITIONS - 1:
                write.advance_upper((write.fetch_upper().time or 0) + 1)
        return client.consensus.scan("one", SeqNo(0), 2 * TRANSITIONS)


def _fill_sqlite(folder: str, names: Sequence[str], rows: Sequence[Row]) -> None:
    with closing(apsw.Connection(str(Path(folder, CONSENSUS)))) as connection, connection:
        every = ((name, *row) for name in names for row in rows)
        connection.executemany("INSERT INTO consensus (key, seqno, data) VALUES (?, ?, ?)", every)


def _fill_postgres(url: str, shards: int, names: Sequence[str], rows: Sequence[Row]) -> None:
    schema, newest = f"survey_{shards}", rows[-1]
    heads = [(name, newest.seqno, newest.data[:START_BYTES]) for name in names]
    every = [(name, *row) for name in names for row in rows]
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for table, columns, values in (("head", "start", heads), ("log", "data", every)):
            into = f"COPY {schema}.shard_{table} (key, seqno, {columns}) FROM STDIN (FORMAT binary)"
            with cursor.copy(into) as copy:
                copy.set_types(["text", "int8", "bytea"])
                for value in values:
                    copy.write_row(value)
