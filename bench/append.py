"""Appends: small ones beside a bare durable SQLite transaction, bulk ones beside bare Parquet."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import persist_lib as persist
from bench.figures import Figure, in_turn, timed

SMALL = persist.Schema(key={"id": "int64"}, value={"text": "string"})
BULK = persist.Schema(key={"id": "int64"}, value={"sku": "string", "cents": "int64", "state": "string"})


def small_append(quick: bool) -> list[Figure]:
    """One update of about 1 KiB at a time, file + SQLite, beside one insert of as many bytes in a bare transaction.

    Flat is what an append adds to the bare transactions of its own moment, late beside early. Not the ratio to them:
    while SQLite's log still grows, in the first 500 or so, each sync takes both twice as long. That makes the early
    ratio small, and the late one look as if appends had become slower.
    """
    total, window = (1_200, 200) if quick else (10_200, 400)
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        bare = _bare_transactions(Path(folder) / "bare.sqlite")
        with persist.open(f"file:{folder}/data") as client, client.open_writer("small", SMALL) as write:
            ours, peers = [], []
            for number in range(total):
                row = [{"id": number, "text": "x" * 1000, "_time": number}]
                ours.append(timed(lambda row=row, n=number: write.compare_and_append(row, n, n + 1)))  # type: ignore[misc]
                peers.append(timed(bare))
    early, late = slice(100, 100 + window), slice(-window, None)
    first, last = (added(ours[moment], peers[moment]) for moment in (early, late))
    peer = statistics.median(peers[100:])
    p50 = statistics.median(ours[100:])
    return [
        Figure("small-append", p50 * 1e3, peer * 1e3, "ms", "bare durable SQLite transaction", at_most=3.0,
               note=f"p50 of {total}; p99 {np.percentile(ours[100:], 99) * 1e3:.2f} ms"),
        Figure("small-append-flat", last * 1e3, first * 1e3, "ms more", "the 100th append", at_most=1.25,
               note=f"added to the bare one: the {total - window}th on, the 100th on"),
    ]  # fmt: skip


def added(ours: Sequence[float], bare: Sequence[float]) -> float:
    """Seconds that ours take longer than bare ones, in the middle."""
    return statistics.median(ours) - statistics.median(bare)


def bulk_append(quick: bool) -> list[Figure]:
    """One append of a million updates in key order and one in random order, beside `write_table` of the same table."""
    rows, rounds = (100_000, 3) if quick else (1_000_000, 5)
    found = []
    for name, is_shuffled in (("bulk-append", False), ("bulk-append-shuffled", True)):
        table = bulk_table(rows, is_shuffled)
        with (
            TemporaryDirectory(prefix="persist-bench-") as folder,
            persist.open(f"file:{folder}/data") as client,
            client.open_writer("bulk", BULK) as write,
        ):
            ours, peer = in_turn(
                lambda table=table, write=write: _append(write, table),  # type: ignore[misc]
                lambda table=table, folder=folder: pq.write_table(table, f"{folder}/bare.parquet"),  # type: ignore[misc]
                rounds,
            )
        # Speed, not seconds: more is better.
        found.append(
            Figure(name, rows / ours / 1e6, rows / peer / 1e6, "M/s", "pyarrow.parquet.write_table", at_least=0.5,
                   note="sorted, hashed, digested and synced")
        )  # fmt: skip
    return found


def bulk_table(rows: int, is_shuffled: bool) -> pa.Table:
    """Updates with an integer key, a sku, cents and a state, all at time 0, in key order or not."""
    random = np.random.default_rng(7)
    ids = random.permutation(rows) if is_shuffled else np.arange(rows)
    skus = pa.array([f"sku-{n:05d}" for n in range(20_000)]).take(pa.array(random.integers(0, 20_000, rows)))
    states = pa.array(["placed", "shipped", "cancelled"]).take(pa.array(random.integers(0, 3, rows)))
    columns = [
        pa.array(ids), skus, pa.array(random.integers(100, 100_000, rows)), states,
        pa.array(np.zeros(rows, np.uint64)), pa.array(np.ones(rows, np.int64)),
    ]  # fmt: skip
    return pa.table(columns, schema=BULK.updates)


def _append(write: persist.WriteHandle, table: pa.Table) -> None:
    upper = write.upper.time or 0
    moved = table.set_column(4, table.schema.field(4), pa.array(np.full(table.num_rows, upper, np.uint64)))
    write.compare_and_append(moved, upper, upper + 1)


def _bare_transactions(path: Path) -> Callable[[], None]:
    connection = apsw.Connection(str(path))
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        list(connection.execute(f"PRAGMA {pragma}"))
    connection.execute("CREATE TABLE log (key TEXT, seqno INTEGER, data BLOB, PRIMARY KEY (key, seqno))")
    numbers = iter(range(10**9))

    def insert() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO log VALUES ('small', ?, ?)", (next(numbers), b"x" * 1500))
        connection.execute("COMMIT")

    return insert
