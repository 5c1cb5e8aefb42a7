"""What `bench.server` starts in processes of their own: the shard server, and clients of it or of the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import persist_lib as persist
from bench.append import SMALL
from bench.peer import Ready
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer

ROW = {"id": 1, "text": "x" * 1000}


@contextmanager
def server(blobs: str, consensus: str) -> Iterator[Ready]:
    """A shard server, as `persist serve` starts it. `port` tells where it listens."""
    with persist.open(blobs, consensus) as client:
        serving = ShardServer(client, "127.0.0.1:0")
        port = serving.start()
        try:
            yield Ready("", {"port": lambda: port, "cpu_s": time.process_time})
        finally:
            serving.stop()


@contextmanager
def clients(blobs: str, consensus: str, shard: str, count: str, seconds: str) -> Iterator[Ready]:
    """So many clients, each with a thread, a connection and a writer of its own, which append at the next time.

    Leases last 15 minutes and are not renewed in the background, as that takes a process each. `run` lets all of them
    append for so many seconds. It answers in JSON how long (s) each append of each took.
    """
    with ExitStack() as stack:
        runtime = Runtime(background=False)
        opened = [stack.enter_context(persist.open(blobs, consensus, runtime=runtime)) for _ in range(int(count))]
        writers = [stack.enter_context(client.open_writer(shard, SMALL)) for client in opened]
        for write in writers:
            write.append_now([ROW])
        yield Ready("", {"run": lambda: _race(writers, float(seconds)), "one": lambda: writers[0].append_now([ROW])})


def _race(writers: list[persist.WriteHandle], seconds: float) -> str:
    took: list[list[float]] = [[] for _ in writers]
    barrier = threading.Barrier(len(writers))
    errors: list[BaseException] = []

    def run(place: int) -> None:
        write, mine = writers[place], took[place]
        barrier.wait()
        last = time.perf_counter()
        until = last + seconds
        try:
            while last < until:
                write.append_now([ROW], timeout=60)
                now = time.perf_counter()
                mine.append(now - last)
                last = now
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return json.dumps(took)
