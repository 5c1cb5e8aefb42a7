"""Writes to a stream with 1, 10 and 1,000 in flight, beside plain appends and bare durable transactions; and seals.

All of them write one update of about 1 KiB at a time to one SQLite file, by turns, in blocks. With one in flight, each
write is waited for before the next, as a plain append and a bare transaction are.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import count
from tempfile import TemporaryDirectory

import persist_lib as persist
from bench.figures import Figure, timed
from bench.peer import Peer
from persist_lib import streams as streaming

SCHEMA = persist.Schema(key={"id": "int64"}, value={"text": "string"})
FLIGHTS = (1, 10, 1_000)
ROW_BYTES = "1400"


def streams(quick: bool) -> list[Figure]:
    """Writes a second by how many are in flight, and how long a seal takes, alone and behind a write."""
    rounds, block = (1, 60) if quick else (9, 600)
    with (
        TemporaryDirectory(prefix="persist-bench-") as folder,
        persist.open(f"file:{folder}/data") as client,
        streaming.open(client) as runtime,
        client.open_writer("plain", SCHEMA) as plain,
        Peer("bench.bare:sqlite_transactions", f"{folder}/bare.sqlite", ROW_BYTES) as bare,
    ):
        write, _ = runtime.create_or_load("stream", SCHEMA)
        numbers, times = count(), count()

        def update(time: int) -> list[dict[str, object]]:
            return [{"id": next(numbers), "text": "x" * 1000, "_time": time}]

        def writes(in_flight: int, total: int) -> None:
            waiting: deque[object] = deque()
            for _ in range(total):
                waiting.append(write.write(update((write.upper.time or 0) + 50)))
                if len(waiting) >= in_flight:
                    waiting.popleft().result()  # type: ignore[attr-defined]
            runtime.flush()

        def appends() -> None:
            for _ in range(block):
                time = next(times)
                plain.compare_and_append(update(time), time, time + 1)

        def seal() -> None:
            write.seal((write.upper.time or 0) + 1).result()

        def write_and_seal() -> None:
            time = write.upper.time or 0
            write.write(update(time))
            write.seal(time + 1).result()

        writes(10, 50)
        for act in (appends, seal, write_and_seal):
            act()
        bare.run(block)
        spent: dict[object, list[float]] = {key: [] for key in (*FLIGHTS, "plain", "bare", "seal", "both")}
        for _ in range(rounds):
            for in_flight in FLIGHTS:
                total = block if in_flight < 1_000 else max(block, 2_000)
                spent[in_flight].append(timed(lambda n=in_flight, t=total: writes(n, t)) / total)  # type: ignore[misc]
            spent["plain"].append(timed(appends) / block)
            spent["bare"].append(sum(bare.run(block)) / block)
            spent["seal"] += [timed(seal) for _ in range(20)]
            spent["both"] += [timed(write_and_seal) for _ in range(20)]
        middle = {key: statistics.median(values) for key, values in spent.items()}
        settings = bare.settings
    per_s = {key: 1 / seconds for key, seconds in middle.items()}
    beside_plain = [
        Figure(f"stream-writes-{n}", per_s[n], per_s["plain"], "a second", "plain appends, one after the other",
               note=f"{per_s[n] / per_s['bare']:.2f} of bare transactions")
        for n in FLIGHTS
    ]  # fmt: skip
    return [
        *beside_plain,
        Figure("stream-writes-bare", per_s[1], per_s["bare"], "a second", "bare durable SQLite transactions",
               settings=settings),
        Figure("stream-seal", middle["seal"] * 1e3, middle["plain"] * 1e3, "ms", "a plain append",
               note=f"alone; with a write before it {middle['both'] * 1e3:.2f} ms for both"),
    ]  # fmt: skip
