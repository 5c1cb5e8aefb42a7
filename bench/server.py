"""Appends to one shard through a shard server, beside the same without one, and beside bare compare-and-sets.

The server, the clients and the bare log are real processes on one PostgreSQL, which is also tried from some way off.
Clients are threads of a few processes, each with a client, a writer and a connection of its own, and append one update
of about 1 KiB at the next time.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

import persist_lib as persist
from bench.append import SMALL
from bench.figures import Figure
from bench.peer import Peer
from bench.postgres import row_bytes
from bench.served import ROW
from persist_lib.config import Config
from persist_lib.core.formats import NEWEST
from persist_lib.testing.servers import PostgresServer

CROWDS = (2, 16, 200)
PROCESSES = 4
"""Processes over which clients are spread: with more, what is measured is the system that switches between them."""
DIRECT_MOST = 16
"""More clients without a server only wait for each other, and even so many are measured once only."""
AWAY_MS = 1.0
"""How late what goes either way arrives at the store that is away: a database in another zone, or one that waits for a
copy on another machine."""
SHARDS = itertools.count(1)
TURN_S = 0.06
"""How long a race is for each client, at least: where each appends a few times only, the fastest did so by chance."""
BLOCK = 50
"""Appends of one side at a time, so that both find their caches warm."""


class Crowd(NamedTuple):
    """What clients did in `seconds`: how long (s) each append of each of them took."""

    seconds: float
    took: list[list[float]]

    @property
    def per_s(self) -> float:
        """Appends a second of all of them together."""
        return sum(len(one) / sum(one) for one in self.took if one)

    @property
    def spread(self) -> float:
        """How many times as many the fastest client did as the slowest one."""
        counts = [len(one) for one in self.took]
        return max(counts) / max(1e-9, min(counts))

    def percentile_ms(self, percent: float) -> float:
        """The time (ms) that so many percent of the appends took at most."""
        return float(np.percentile(np.concatenate([np.array(one) for one in self.took]), percent)) * 1e3


def server(quick: bool) -> list[Figure]:
    """Appends a second, fairness and p99 of 2, 16 and 200 clients; the latency of a lone one."""
    crowds, seconds, rounds = ((2, 6), 0.5, 1) if quick else (CROWDS, 3.0, 3)
    with PostgresServer() as postgres, TemporaryDirectory(prefix="persist-bench-") as folder:
        urls = f"file:{folder}", postgres.url
        _fresh(urls)
        with (
            Peer("bench.served:server", *urls) as serving,
            Peer("bench.bare:postgres_log", postgres.url, row_bytes(postgres.url)) as bare,
        ):
            served = urls[0], f"persist://127.0.0.1:{serving.ask('port')}"
            figures = _lone(urls, served, bare, 4 if quick else 20)
            for count in crowds:
                figures += _crowd(urls, served, bare, count, seconds, rounds)
        return figures + _away(urls, postgres.port, crowds[1:], seconds, rounds, 4 if quick else 20)


def _away(
    urls: tuple[str, str], port: int, crowds: Sequence[int], seconds: float, rounds: int, blocks: int
) -> list[Figure]:
    """A lone client and the same crowds, where the store is some way off for the server and for the bare log alike."""
    with Peer("bench.away:relay", port, AWAY_MS) as relay:
        url = urls[1].replace(f":{port}/", f":{relay.ask('port')}/")
        with (
            Peer("bench.served:server", urls[0], url) as serving,
            Peer("bench.bare:postgres_log", url, row_bytes(urls[1])) as bare,
        ):
            served = urls[0], f"persist://127.0.0.1:{serving.ask('port')}"
            lone = _lone((urls[0], url), served, bare, blocks, where="-away")
            return lone + [_crowd(urls, served, bare, count, seconds, rounds, is_away=True)[0] for count in crowds]


def _lone(urls: tuple[str, str], served: tuple[str, str], bare: Peer, rounds: int, where: str = "") -> list[Figure]:
    """One client's latency through the server, beside that of one without it, in blocks by turns."""
    with (
        Peer("bench.served:clients", *urls, _fresh(urls), 1, 1) as direct,
        Peer("bench.served:clients", *served, _fresh(urls), 1, 1) as through,
    ):
        took: dict[str, list[float]] = {"direct": [], "through": [], "bare": []}
        for number in range(rounds + 1):
            found = {"direct": direct.run(BLOCK, "one"), "through": through.run(BLOCK, "one"), "bare": bare.run(BLOCK)}
            for kind, seconds in found.items() if number else ():
                took[kind] += seconds
    p50 = {kind: statistics.median(seconds) * 1e3 for kind, seconds in took.items()}
    p99 = {kind: float(np.percentile(seconds, 99)) * 1e3 for kind, seconds in took.items()}
    note = f"p50; p99 {p99['through']:.1f} and {p99['direct']:.1f} ms; bare p50 {p50['bare']:.2f} ms"
    return [
        Figure(f"server-lone{where}", p50["through"], p50["direct"], "ms", "a direct append", at_most=1.5, note=note,
               settings=bare.settings)
    ]  # fmt: skip


def _crowd(
    urls: tuple[str, str], served: tuple[str, str], bare: Peer, count: int, seconds: float, rounds: int,
    *, is_away: bool = False,
) -> list[Figure]:  # fmt: skip
    """So many clients, in turn through the server, without it, and one process with a bare log."""
    through, direct, rates = list[Crowd](), list[Crowd](), list[float]()
    seconds = max(seconds, TURN_S * count)
    for _ in range(rounds):
        through.append(_race(served, _fresh(urls), count, seconds))
        rates.append(1 / statistics.mean(bare.run(max(BLOCK, int(250 * seconds)))))
        if count <= DIRECT_MOST and not direct and not is_away:
            direct.append(_race(urls, _fresh(urls), count, seconds))
    ratios = [ours.per_s / rate for ours, rate in zip(through, rates, strict=True)]
    middle = sorted(range(rounds), key=ratios.__getitem__)[rounds // 2]
    ours, fair = through[middle], max(through, key=lambda one: one.spread)
    without = statistics.median(one.per_s for one in direct) if direct else 0.0
    told = f"without it {without:.0f} /s" if direct else "not run without it"
    note = f"{seconds:.3g} s each, median of {rounds}; p50 {ours.percentile_ms(50):.1f} ms, {told}"
    name, where = f"server-{count}", ""
    if is_away:
        name, where = f"{name}-away", f", {AWAY_MS:g} ms away"
    return [
        Figure(name, ours.per_s, rates[middle], "/s", f"bare compare-and-sets of one process{where}",
               at_least=1.0, note=note, settings=bare.settings),
        Figure(f"server-{count}-fair", fair.spread, 1.0, "x", "the slowest client", at_most=2.0,
               note=f"the fastest, worst of {rounds} rounds"),
        Figure(f"server-{count}-p99", ours.percentile_ms(99), ours.percentile_ms(50), "ms", "its median"),
    ]  # fmt: skip


def _fresh(urls: tuple[str, str]) -> str:
    """A new shard. One that nobody maintains gets batch after batch, which clients have to read when they open it."""
    shard = f"busy-{next(SHARDS)}"
    with persist.open(*urls, config=Config(format=NEWEST)) as client, client.open_writer(shard, SMALL) as write:
        for _ in range(20):
            write.append_now([ROW])
    return shard


def _race(urls: tuple[str, str], shard: str, count: int, seconds: float) -> Crowd:
    shares = [share for share in _shares(count) if share]
    with ExitStack() as stack:
        started = [Peer("bench.served:clients", *urls, shard, share, seconds) for share in shares]  # all at once
        peers = [stack.enter_context(one) for one in started]
        with ThreadPoolExecutor(len(peers)) as pool:
            found: Sequence[str] = list(pool.map(lambda peer: peer.ask("run"), peers))
    return Crowd(seconds, [took for one in found for took in json.loads(one)])


def _shares(count: int) -> list[int]:
    return [count // PROCESSES + (place < count % PROCESSES) for place in range(PROCESSES)]
