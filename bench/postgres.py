"""Small appends on PostgreSQL, one writer's and sixteen contending ones', each beside a bare compare-and-set."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
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
from persist_lib.testing.servers import PostgresServer

WARM = 50
"""Appends before anything is measured."""
BLOCK = 50
"""Appends of one side at a time, so that both find their caches warm."""
WRITERS = 16
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
        with Peer("bench.bare:postgres_log", server.url, _row_bytes(server.url)) as bare:
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


def _row_bytes(url: str) -> int:
    """As large as our rows are at this moment."""
    with psycopg.connect(url) as connection:
        query = "SELECT avg(length(data)) FROM (SELECT data FROM persist.shard_log ORDER BY seqno DESC LIMIT 20) newest"
        return int((connection.execute(query).fetchone() or (1024,))[0])


def contention(quick: bool) -> list[Figure]:
    """Appends per second of 16 processes to one shard, each from its newest upper, beside bare rows of 16 processes."""
    writers, seconds, rounds = (4, 1.0, 1) if quick else (WRITERS, 8.0, 3)
    with PostgresServer() as server, TemporaryDirectory(prefix="persist-bench-") as folder:
        urls = f"file:{folder}", server.url
        with persist.open(*urls) as client, client.open_writer("busy", SMALL) as write:
            for n in range(WARM):
                write.compare_and_append([{"id": n, "text": "x" * 1000, "_time": n}], n, n + 1)
        size = _row_bytes(server.url)
        with closing(BareLog.create(server.url, size)) as bare_log:
            settings = SETTINGS + bare_log.durability()
        pairs = [
            tuple(_race(kind, writers, seconds, size, urls) for kind in ("persist", "bare")) for _ in range(rounds)
        ]
        with persist.open(*urls, read_only=True) as client:
            appended = sum(sum(ours.won) for ours, _ in pairs)
            if (upper := client.inspect("busy").state.upper.time) != appended + WARM:
                raise SystemExit(f"{appended} appends were acknowledged, and the shard holds {upper}")
    ours, bare = sorted(pairs, key=lambda pair: sum(pair[0].won) / max(1, sum(pair[1].won)))[rounds // 2]
    worst, beside = min(pairs, key=lambda pair: pair[0].least_share)
    equal = statistics.mean(worst.won)
    return [
        Figure("contention", sum(ours.won) / seconds, sum(bare.won) / seconds, "/s", "bare compare-and-set, contended",
               at_least=0.7, note=f"{writers} processes, {seconds:g} s, median of {rounds}", settings=settings),
        Figure("contention-least", min(worst.won), equal, "appends", "an equal share", at_least=LEAST_SHARE,
               note=f"worst run; longest wait {worst.longest_ms:.0f} ms; "
                    f"bare {beside.least_share:.2f}x, {beside.longest_ms:.0f} ms"),
    ]  # fmt: skip


class Race(NamedTuple):
    """How often each contender won, and the longest that one of them waited for an append."""

    won: list[int]
    longest_ms: float

    @property
    def least_share(self) -> float:
        """The slowest one's part, beside an equal share."""
        return min(self.won) / max(1e-9, statistics.mean(self.won))


def _race(kind: str, writers: int, seconds: float, size: int, urls: tuple[str, str]) -> Race:
    command = [sys.executable, "-m", "bench.contender", kind, str(writers), str(seconds), str(size), *urls]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return Race([won for won, _ in found], max(waited for _, waited in found))
