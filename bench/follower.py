"""A writer or a listener of one shard, as a process: `python -m bench.follower write|listen URL CONSENSUS N`.

It prints a line when it is ready and begins when it reads one. At the end it prints JSON: when each update was
acknowledged, or when it came, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import random
import sys
import time

import persist_lib as persist
from bench.append import SMALL

SHARD = "followed"
WARM = 20
PAUSES_S = (0.002, 0.015)
POLLING = ("head", "scan", "heads")
"""The requests by which a listener could look for news."""


def main(role: str, url: str, consensus: str, count: int) -> None:
    """Append, or listen to, `count` updates after the first `WARM`."""
    with persist.open(url, consensus) as client:
        print(json.dumps(write(client, count) if role == "write" else listen(client, count)), flush=True)


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def write(client: persist.Client, count: int) -> dict[str, object]:
    """Append one update after the other, with pauses, so that the listener waits for each."""
    drawn, acked = random.Random(7), []
    with client.open_writer(SHARD, SMALL) as handle:
        _ready()
        for n in range(1, 1 + WARM + count):
            handle.compare_and_append([{"id": n, "text": "x" * 100, "_time": n}], n, n + 1)
            acked.append(time.monotonic())
            time.sleep(drawn.uniform(*PAUSES_S))
    return {"at": acked}


def listen(client: persist.Client, count: int) -> dict[str, object]:
    """Note when each update came, and how many requests looked for news after the first ones."""
    came, last, before = [], 1 + WARM + count, 0
    with client.open_reader(SHARD) as reader, reader.listen(0, until=last) as events:
        _ready()
        for event in events:
            if isinstance(event, persist.Updates):
                came += [time.monotonic()] * event.table.num_rows
                if len(came) == WARM:
                    before = _polls(client)
        requests = _polls(client) - before
    return {"at": came, "requests": requests}


def _polls(client: persist.Client) -> int:
    counts = client.metrics().operations
    return sum(counts[kind].calls for kind in POLLING if kind in counts)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
