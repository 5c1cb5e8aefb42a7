"""Small appends on PostgreSQL, one writer's and those of contending ones, each beside a bare compare-and-set."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import psycopg

import persist_lib as persist
from bench.append import SMALL
from bench.bare_log import SETTINGS, BareLog
from bench.figures import Figure, timed
from bench.peer import Peer
from persist_lib.config import Config
from persist_lib.testing.servers import PostgresServer

WARM = 50
"""Appends before anything is measured."""
CROWDS = (2, 16)
"""Processes that contend."""
RATE = {2: 0.5, 16: 0.7}
"""Of the bare rate of as many."""
BLOCK = 50
"""Appends of one side at a time, so that both find their caches warm."""
LEAST_SHARE = 0.25
"""Of an equal share: below that a writer counts as starved."""
ROOT = Path(__file__).parents[1]


def postgres_append(quick: bool) -> list[Figure]:
    """One update of about 1 KiB at a time, beside one row of as many bytes, in blocks by turns on the same server."""
    total = 300 if quick else 4_000
    with (
        PostgresServer() as server,
        TemporaryDirectory(prefix="persist-bench-") as folder,
        persist.open(f"file:{folder}", server.url) as client,
        client.open_writer("small", SMALL) as write,
    ):

        def append(n: int) -> object:
            return write.compare_and_append([{"id": n, "text": "x" * 1000, "_time": n}], n, n + 1)

        for number in range(WARM):
            append(number)
        ours: list[float] = []
        peers: list[float] = []
        with Peer("bench.bare:postgres_log", server.url, row_bytes(server.url)) as bare:
            for number in range(WARM, WARM + total, BLOCK):
                ours += [timed(lambda n=n: append(n)) for n in range(number, number + BLOCK)]  # type: ignore[misc]
                peers += bare.run(BLOCK)
            if bare.answer != total:
                raise SystemExit(f"{total - bare.answer} bare rows were lost")
    late = slice(total // 10, None)
    p50, peer = statistics.median(ours[late]), statistics.median(peers[late])
    slow, slow_peer = (np.percentile(side[late], 99) * 1e3 for side in (ours, peers))
    note = f"p50 of {total}; p99 {slow:.2f} and {slow_peer:.2f} ms"
    return [Figure("postgres-append", p50 * 1e3, peer * 1e3, "ms", "bare compare-and-set", at_most=2.0, note=note,
                   settings=bare.settings)]  # fmt: skip


def row_bytes(url: str) -> int:
    """As large as our rows are at this moment."""
    with psycopg.connect(url) as connection:
        query = "SELECT avg(length(data)) FROM (SELECT data FROM persist.shard_log ORDER BY seqno DESC LIMIT 20) newest"
        return int((connection.execute(query).fetchone() or (1024,))[0])


def contention(quick: bool) -> list[Figure]:
    """Appends per second of 2 and of 16 processes to one shard, beside bare rows of as many, several times by turns.

    Each goes on from its newest upper. The longest that one of them waited, and the rollups that all of them wrote, are
    from all rounds together.
    """
    crowds, seconds, rounds = ((2, 4), 1.0, 1) if quick else (CROWDS, 4.0, 5)
    with PostgresServer() as server, TemporaryDirectory(prefix="persist-bench-") as folder:
        urls = f"file:{folder}", server.url
        with persist.open(*urls) as client, client.open_writer("busy", SMALL) as write:
            for n in range(WARM):
                write.compare_and_append([{"id": n, "text": "x" * 1000, "_time": n}], n, n + 1)
        size = row_bytes(server.url)
        with closing(BareLog.create(server.url, size)) as bare_log:
            settings = SETTINGS + bare_log.durability()
        return [
            figure
            for writers in crowds
            for figure in _contended(
                [_round(writers, seconds, size, urls) for _ in range(rounds)], writers, seconds, settings
            )
        ]


def _round(writers: int, seconds: float, size: int, urls: tuple[str, str]) -> Round:
    """One race of each kind, on the shard that was appended to before."""
    before = _written(urls)
    ours = _race("persist", writers, seconds, size, urls)
    after = _written(urls)
    if after.upper - before.upper != sum(ours.won):
        raise SystemExit(f"{sum(ours.won)} appends were acknowledged, and the shard holds {after.upper - before.upper}")
    bare = _race("bare", writers, seconds, size, urls)
    return Round(ours, bare, after.rollups - before.rollups, after.seqno - before.seqno)


def _contended(found: Sequence[Round], writers: int, seconds: float, settings: str) -> list[Figure]:
    middle = sorted(found, key=lambda one: sum(one.ours.won) / max(1, sum(one.bare.won)))[len(found) // 2]
    worst = min(found, key=lambda one: one.ours.least_share)
    least_bare = min(one.bare.least_share for one in found)
    rollups, due = sum(one.rollups for one in found), sum(one.transitions for one in found) / Config().rollup_every
    ours_ms, bare_ms = max(one.ours.longest_ms for one in found), max(one.bare.longest_ms for one in found)
    name, peer = f"contention-{writers}", f"bare compare-and-set, {writers} processes"
    return [
        Figure(name, sum(middle.ours.won) / seconds, sum(middle.bare.won) / seconds, "/s", peer,
               at_least=RATE.get(writers), note=f"{seconds:g} s each, median of {len(found)} by turns",
               settings=settings),
        Figure(f"{name}-wait", ours_ms, bare_ms, "ms", peer, at_most=2.0, note=f"the longest of {len(found)} rounds",
               settings=settings),
        Figure(f"{name}-least", min(worst.ours.won), statistics.mean(worst.ours.won), "appends", "an equal share",
               at_least=LEAST_SHARE, note=f"worst of {len(found)} rounds; bare {least_bare:.2f}x"),
        Figure(f"{name}-rollups", rollups, due, "rollups", "one for each 128 transitions", at_most=1.25),
    ]  # fmt: skip


class Written(NamedTuple):
    """What the shard holds, and how many rollups were ever written, linked or not."""

    upper: int
    seqno: int
    rollups: int


def _written(urls: tuple[str, str]) -> Written:
    with persist.open(*urls, read_only=True) as client:
        version = client.inspect("busy")
    blobs = Path(urls[0].removeprefix("file:"))
    return Written(version.state.upper.time or 0, version.seqno, sum(1 for _ in blobs.glob("**/rollup/*")))


class Race(NamedTuple):
    """How often each contender won, and the longest that one of them waited for an append."""

    won: list[int]
    longest_ms: float

    @property
    def least_share(self) -> float:
        """The slowest one's part, beside an equal share."""
        return min(self.won) / max(1e-9, statistics.mean(self.won))


class Round(NamedTuple):
    """A race of ours and a bare one, and what ours left: rollups, transitions."""

    ours: Race
    bare: Race
    rollups: int
    transitions: int


def _race(kind: str, writers: int, seconds: float, size: int, urls: tuple[str, str]) -> Race:
    command = [sys.executable, "-m", "bench.contender", kind, str(writers), str(seconds), str(size), *urls]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return Race([won for won, _ in found], max(waited for _, waited in found))
