"""Processes that append to the same place.

    python -m bench.contender persist|bare WRITERS SECONDS ROW_BYTES BLOBS CONSENSUS

Each process has its own connection. When all are ready, they append for SECONDS as fast as they can. A line of JSON is
printed with the number of appends that each won and the slowest append of each (ms).

The processes are forked from one that has imported everything and has no connection: sixteen starts of Python would
take longer than the race. Leases last 15 minutes and are not renewed in the background, as that takes a process each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier

import persist_lib as persist
from bench.append import SMALL
from bench.bare_log import BareLog
from persist_lib.runtime.ambient import Runtime

Append = Callable[[], bool]
"""Tries one append, from the newest known upper or row. Returns whether it won."""


@contextmanager
def ours(_size: int, url: str, consensus: str) -> Iterator[Append]:
    """A writer of the shard `busy`. If it was too late, it continues from the upper in the error."""
    with (
        persist.open(url, consensus, runtime=Runtime(background=False)) as client,
        client.open_writer("busy", SMALL) as write,
    ):
        row = {"id": os.getpid(), "text": "x" * 1000}
        assert write.id  # registered by now
        upper = write.upper.time or 0

        def append() -> bool:
            nonlocal upper
            try:
                write.compare_and_append([{**row, "_time": upper}], upper, upper + 1)
            except persist.UpperMismatch as mismatch:
                upper = mismatch.actual.time
                return False
            upper += 1
            return True

        yield append


@contextmanager
def bare(size: int, _url: str, consensus: str) -> Iterator[Append]:
    """A connection to the bare log. If it was too late, it reads which row is the newest."""
    log = BareLog(consensus, size)
    log.refresh()

    def append() -> bool:
        if not log.try_append():
            log.refresh()
            return False
        return True

    yield append
    log.close()


KINDS = {"persist": ours, "bare": bare}


def race(
    kind: str, seconds: float, size: int, urls: tuple[str, str], start: Barrier, answers: multiprocessing.Queue[object]
) -> None:
    """Run one process of the race, and put its result into `answers`."""
    with KINDS[kind](size, *urls) as append:
        start.wait()
        won, slowest, begun = 0, 0.0, time.monotonic()
        last, end = begun, begun + seconds
        while last < end:
            is_won, now = append(), time.monotonic()
            if is_won:
                won, slowest, last = won + 1, max(slowest, now - last), now
            elif now >= end:
                break
        answers.put((won, max(slowest, end - last) * 1e3))


def warm_up() -> None:
    """Do one append in memory, so that everything it needs is imported."""
    with persist.open("memory:") as client, client.open_writer("warm", SMALL) as write:
        write.compare_and_append([{"id": 1, "text": "x", "_time": 0}], 0, 1)


def main(kind: str, writers: int, seconds: float, size: int, *urls: str) -> None:
    """Start the processes, and print their results."""
    warm_up()
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(writers), context.Queue()
    racing = [context.Process(target=race, args=(kind, seconds, size, urls, start, answers)) for _ in range(writers)]
    for process in racing:
        process.start()
    found = [answers.get(timeout=seconds + 300) for _ in racing]
    for process in racing:
        process.join()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
