"""Event logs: durable events with 1 and 64 in flight beside a bare append and fsync, bare SQLite, bare LMDB; replays.

A store is written as the event loop writes it, through its writer. With one in flight, each event is waited for before
the next, as the peers do. The loop itself, with a program that adds up and releases nothing, is beside the same append.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.figures import Figure, timed
from bench.peer import Peer
from persist_lib import events as log

SIZE = 1000
FLIGHTS = (1, 64)
PEERS = {
    "disk": ("bench.bare:synced_appends", "a bare append and fsync"),
    "sqlt": ("bench.bare:sqlite_transactions", "bare durable SQLite transactions"),
    "lmdb": ("bench.bare:lmdb_puts", "bare LMDB transactions"),
}
Submit = Callable[[], Future[Any]]


def events(quick: bool) -> list[Figure]:
    """Durable events a second by store and by how many are in flight; the loop's; and events replayed a second."""
    rounds, block, replayed = (1, 50, 2_000) if quick else (9, 1_000, 200_000)
    found: list[Figure] = []
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        for kind, (start, name) in PEERS.items():
            found += _written(kind, start, name, Path(folder), rounds, block)
        found.append(_replayed(Path(folder), rounds, replayed))
    return found


def _written(kind: str, start: str, name: str, folder: Path, rounds: int, block: int) -> list[Figure]:
    with ExitStack() as held:
        peer = held.enter_context(Peer(start, folder / f"bare-{kind}", str(SIZE)))
        writes = {kind: _submits(held.enter_context(log.open_store(f"{kind}:{folder}/{kind}").writer()))}
        if kind == "disk":
            loop = held.enter_context(log.Loop(f"disk:{folder}/loop", _program()))
            writes["loop"] = lambda: loop.submit(b"x" * SIZE)
        keys = [(what, flight) for what in writes for flight in FLIGHTS]
        spent: dict[object, list[float]] = {key: [] for key in (*keys, "bare")}
        for round_ in range(rounds + 1):  # the first one warms up
            for what, flight in keys:
                total = block * (1 if flight == 1 else 4)
                seconds = timed(lambda w=what, f=flight, t=total: _run(writes[w], f, t)) / total  # type: ignore[misc]
                spent[what, flight] += [seconds] if round_ else []
            spent["bare"] += [sum(peer.run(block)) / block] if round_ else []
    per_s = {key: 1 / statistics.median(values) for key, values in spent.items()}
    return [
        Figure(f"events-{what}-{flight}", per_s[what, flight], per_s["bare"], "events/s", name, at_least=0.5,
               note=f"{flight} in flight" + (", with its computing" if what == "loop" else ""), settings=peer.settings)
        for what, flight in keys
    ]  # fmt: skip


def _submits(writer: log.Writer) -> Submit:
    data, ids = b"x" * SIZE, iter(range(writer.last + 1, 1 << 62))
    return lambda: writer.write(next(ids), data)


def _run(submit: Submit, in_flight: int, total: int) -> None:
    waiting: deque[Future[Any]] = deque()
    for _ in range(total):
        waiting.append(submit())
        if len(waiting) >= in_flight:
            waiting.popleft().result()
    for future in waiting:
        future.result()


def _replayed(folder: Path, rounds: int, count: int) -> Figure:
    store = log.open_store(f"disk:{folder}/replayed")
    with store.writer() as writer:
        _run(_submits(writer), 512, count)
    with Peer("bench.bare:plain_reads", folder / "plain", str(count), str(SIZE)) as peer:

        def replay() -> None:
            with store.reader() as reader:
                assert sum(event.payload.nbytes for event in reader.replay()) == count * SIZE

        ours = statistics.median(timed(replay) for _ in range(rounds))
        theirs = statistics.median(peer.run(rounds))
        return Figure(
            "events-replay", count / ours, count / theirs, "events/s", "a plain read of the same bytes",
            note="each verified, and that it follows the one before", settings=peer.settings,
        )  # fmt: skip


def _program() -> log.Program[int]:
    return log.Program(step=lambda state, event: (state + len(event.payload), []), initial=int, release=_nothing)


def _nothing(_: log.Effect) -> None:
    pass
