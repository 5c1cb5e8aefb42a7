"""A shard that nobody maintained for thousands of appends: how it is filled, copied to other stores, and what is in it.

python -m tests.integration.left_alone file:/tmp/shard 20000
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from persist_lib.config import KIB
from persist_lib.ids import SeqNo
from persist_lib.location import open_location

SCHEMA = persist.Schema({"key": "int64"}, {"state": "string", "amount": "int64"})
STATES = np.array(["open", "shipped", "returned", "cancelled", "lost"])
SHARD = "s"
KEYS = 1_000_000
INLINE, OBJECT, MANY = 100, 1_500, 20_000
"""Updates of an append that fits into the state, of one that is an object, and of one of several objects."""
ROWS = 1000


class Filled(NamedTuple):
    """What was appended: the appends, the updates, and a sum over what they add up to."""

    appends: int
    updates: int
    digest: int


def rows_of(number: int) -> int:
    """How many updates the append with this number has: half of them are small, one of a hundred has many parts."""
    if number % 100 == 99:
        return MANY
    return OBJECT if number % 2 else INLINE


def updates(rng: np.random.Generator, rows: int, time: int) -> pa.Table:
    """Updates at one time, of which a tenth are retractions."""
    keys = rng.integers(0, KEYS, rows)
    return pa.table({
        "key": keys, "state": STATES[keys % len(STATES)], "amount": rng.integers(0, 1 << 40, rows),
        "_time": np.full(rows, time, np.uint64), "_diff": np.where(rng.random(rows) < 0.1, -1, 1),
    })  # fmt: skip


def digest_of(table: pa.Table) -> int:
    """A sum over rows, each as often as its diff says, which is the same however rows are cut, ordered and added up."""
    with np.errstate(over="ignore"):
        mixed = table.column("key").to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= table.column("amount").to_numpy().astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed += pc.binary_length(table.column("state")).to_numpy().astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        return int((mixed * table.column("_diff").to_numpy().astype(np.uint64)).sum(dtype=np.uint64))


def fill(location: str, appends: int, consensus: str | None = None) -> Filled:
    """Append so often, and do no maintenance."""
    rng, count, digest = np.random.default_rng(1), 0, 0
    config = persist.Config(part_bytes=64 * KIB)
    with persist.open(location, consensus, config=config) as client, client.open_writer(SHARD, SCHEMA) as writer:
        for number in range(appends):
            table = updates(rng, rows_of(number), number)
            writer.compare_and_append(table, number, number + 1)
            count, digest = count + table.num_rows, (digest + digest_of(table)) % 2**64
    return Filled(appends, count, digest)


def copy(location: str, to: str, consensus: str | None) -> None:
    """Copy a location as it is, object by object and row by row, to other stores."""
    source, target = open_location(location), open_location(to, consensus, create=True)
    with ThreadPoolExecutor(8) as pool:

        def put(key: str) -> None:
            target.blob.set(key, source.blob.get(key) or b"")

        for _ in pool.map(put, [entry.key for entry in source.blob.list(f"{SHARD}/")]):
            pass
    newest = None
    while rows := source.consensus.scan(SHARD, SeqNo(newest.seqno + 1 if newest else 0), ROWS):
        for row in rows:
            assert target.consensus.compare_and_set(SHARD, newest, row.data)
            newest = row.newest
    source.close()
    target.close()


def contents(client: persist.Client) -> int:
    """The digest of the contents at the newest time, as they are read."""
    with client.open_reader(SHARD) as read:
        return sum(digest_of(table) for table in read.snapshot(diff=True).batches()) % 2**64


if __name__ == "__main__":
    print(json.dumps(fill(sys.argv[1], int(sys.argv[2]))._asdict()))
