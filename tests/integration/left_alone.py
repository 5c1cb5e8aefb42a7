"""Shards that nobody maintained for thousands of appends: a program, so that memory is that of one process.

python -m tests.integration.left_alone fill file:/tmp/shard 20000
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pyarrow as pa

import persist_lib as persist
from persist_lib.config import KIB

SCHEMA = persist.Schema({"key": "int64"}, {"state": "string", "amount": "int64"})
STATES = np.array(["open", "shipped", "returned", "cancelled", "lost"])
SHARD = "s"
KEYS = 1_000_000
INLINE, OBJECT, MANY = 100, 1_500, 20_000
"""Updates of an append that is stored in the state, as one object, and as several objects."""


def rows_of(number: int) -> int:
    """How many updates the append with this number has: half are small, one of a hundred has many parts."""
    if number % 100 == 99:
        return MANY
    return OBJECT if number % 2 else INLINE


def updates(rng: np.random.Generator, rows: int, time: int) -> pa.Table:
    """Updates at one time: one of ten takes back a row that an earlier one may have added."""
    keys = rng.integers(0, KEYS, rows)
    return pa.table({
        "key": keys, "state": STATES[keys % len(STATES)], "amount": rng.integers(0, 1 << 40, rows),
        "_time": np.full(rows, time, np.uint64), "_diff": np.where(rng.random(rows) < 0.1, -1, 1),
    })  # fmt: skip


def fill(location: str, consensus: str | None, appends: int) -> dict[str, float]:
    rng, started = np.random.default_rng(1), time.monotonic()
    config = persist.Config(part_bytes=64 * KIB)
    with persist.open(location, consensus, config=config) as client, client.open_writer(SHARD, SCHEMA) as writer:
        for number in range(appends):
            writer.compare_and_append(updates(rng, rows_of(number), number), number, number + 1)
            if number % 1000 == 999:
                print(number, time.monotonic() - started, file=sys.stderr, flush=True)
        state = client.inspect(SHARD).state
    return {
        "seconds": time.monotonic() - started,
        "batches": len(state.trace),
        "updates": state.count,
        "bytes": state.size,
        "parts": sum(len(b.parts) for b in state.trace),
        "inline": state.inline_size,
    }


if __name__ == "__main__":
    print(json.dumps(fill(sys.argv[1], None, int(sys.argv[2]))))
