"""How long after the acknowledgement of an append a listener has it, through a shard server and without one.

On PostgreSQL with its defaults. Server, writer and listener are processes of their own; the listener waits for each
update. Without a server it polls the database at its usual interval.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

import persist_lib as persist
from bench.append import SMALL
from bench.figures import Figure
from bench.follower import SHARD, WARM
from persist_lib.testing.servers import PostgresServer

LIMIT_MS = 5.0
ROOT = Path(__file__).parents[1]
POLLING = "PostgreSQL with its defaults; the listener polls each 10 to 20 ms"


class Run(NamedTuple):
    """Milliseconds from each acknowledgement to the update's coming, and the requests that looked for news."""

    lags_ms: Sequence[float]
    requests: int

    def told(self) -> str:
        """In words."""
        p99 = float(np.percentile(self.lags_ms, 99))
        return f"p50 of {len(self.lags_ms)}; p99 {p99:.2f} ms; {self.requests} requests looked for news"


def push(quick: bool) -> list[Figure]:
    """The lag through a server, beside 5 ms and beside the lag without one; and how many updates came unasked."""
    count = 30 if quick else 1_000
    with PostgresServer() as server:
        runs = []
        for is_served in (False, True):
            with TemporaryDirectory(prefix="persist-bench-") as folder:
                store = f"{server.url}?persist_schema=push_{int(is_served)}"
                with persist.open(f"file:{folder}", store) as client, client.open_writer(SHARD, SMALL) as write:
                    write.compare_and_append([{"id": 0, "text": "x"}], 0, 1)
                if is_served:
                    with _serving(f"file:{folder}", store) as url:
                        runs.append(_run(f"file:{folder}", url, count))
                else:
                    runs.append(_run(f"file:{folder}", store, count))
    direct, served = runs
    p50, beside = statistics.median(served.lags_ms), statistics.median(direct.lags_ms)
    unasked = count - served.requests
    return [
        Figure("push-lag-p50", p50, LIMIT_MS, "ms", "the limit", at_most=1.0, note=served.told()),
        Figure("push-lag-beside-polling", p50, beside, "ms", "a listener without a server", note=direct.told(),
               settings=POLLING),
        Figure("push-updates-unasked", unasked, count, "updates", "all of them", at_least=1.0),
    ]  # fmt: skip


def _run(url: str, consensus: str, count: int) -> Run:
    command = [sys.executable, "-m", "bench.follower"]
    processes = [
        subprocess.Popen(
            [*command, role, url, consensus, str(count)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for role in ("listen", "write")
    ]  # fmt: skip
    try:
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit("a follower of the benchmark did not begin")
        for process in processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        came, acked = (json.loads(process.communicate(timeout=600)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if len(came["at"]) != WARM + count != len(acked["at"]):
        raise SystemExit(f"{len(acked['at'])} updates were written, and {len(came['at'])} came")
    lags = [(at - ack) * 1e3 for at, ack in zip(came["at"], acked["at"], strict=True)]
    # An update may come before its writer has its acknowledgement: then it took no time.
    return Run([max(0.001, lag) for lag in lags[WARM:]], came["requests"])


@contextmanager
def _serving(url: str, consensus: str) -> Iterator[str]:
    """A shard server in a process of its own, and its URL."""
    command = [sys.executable, "-m", "persist_lib.cli", "--location", url, "--consensus", consensus, "--json"]
    with subprocess.Popen(
        [*command, "serve", "--listen", "127.0.0.1:0", "--drain", "1"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            yield f"persist://{json.loads(line)['listening']}"
        finally:
            process.terminate()
            process.wait()
