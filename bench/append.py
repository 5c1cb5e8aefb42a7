"""Appends: small ones beside a bare durable SQLite transaction, bulk ones beside bare Parquet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from tempfile import TemporaryDirectory

import apsw
import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.peer import Peer

SMALL = persist.Schema(key={"id": "int64"}, value={"text": "string"})
BULK = persist.Schema(key={"id": "int64"}, value={"sku": "string", "cents": "int64", "state": "string"})


def small_append(quick: bool) -> list[Figure]:
    """One update of about 1 KiB at a time, file + SQLite, beside one insert of as many bytes in a bare transaction.

    The two take turns, a block of appends each, so that both find their caches warm. In the middle of the history only
    our appends go on. "Flat" compares what an append adds to the bare transactions of the same period, late and early,
    in time. It does not compare ratios: while SQLite's log still grows, in the first 500 or so, each sync takes twice
    as long for both. That makes the early ratio small, and the late one look as if appends had become slower.
    """
    total, in_turn, window, block = (600, 300, 100, 50) if quick else (100_000, 10_000, 500, 100)
    ours: list[float] = []
    peers: list[float] = []
    late: list[float] = []
    with (
        TemporaryDirectory(prefix="persist-bench-") as folder,
        persist.open(f"file:{folder}/data") as client,
        client.open_writer("small", SMALL) as write,
    ):

        def append(times: int) -> None:
            for number in range(len(ours), len(ours) + times):
                row = [{"id": number, "text": "x" * 1000, "_time": number}]
                ours.append(timed(lambda row=row, n=number: write.compare_and_append(row, n, n + 1)))  # type: ignore[misc]

        append(block)
        with Peer("bench.bare:sqlite_transactions", f"{folder}/bare.sqlite", _row_bytes(folder)) as bare:
            bare.run(block)
            while len(ours) < in_turn:
                append(block)
                peers += bare.run(block)
            append(total - len(ours) - window)
            while len(ours) < total:
                append(block)
                late += bare.run(block)
    warm = ours[block:in_turn]
    p50, peer = statistics.median(warm), statistics.median(peers)
    first, last = added(warm[:window], peers[:window]), added(ours[-window:], late)
    return [
        Figure("small-append", p50 * 1e3, peer * 1e3, "ms", "bare durable SQLite transaction", at_most=2.5,
               note=f"p50 of {len(warm):,}; p99 {np.percentile(warm, 99) * 1e3:.2f} ms", settings=bare.settings),
        Figure("small-append-flat", last * 1e3, first * 1e3, "ms more", f"the {block}th append on", at_most=1.25,
               note=f"added to the bare one: the {total - window:,}th on, the {block}th on"),
    ]  # fmt: skip


def table_append(quick: bool) -> list[Figure]:
    """The same row by `Table.append`, beside `append_now` of a shard's handle: two shards of one location, in turns.

    So it says what the one front door costs over the shard level, for a table that one shard carries.
    """
    total, block = (300, 50) if quick else (5_000, 100)
    schema = persist.Schema(SMALL.key, SMALL.value, times="ms")
    ours: list[float] = []
    peers: list[float] = []
    with (
        TemporaryDirectory(prefix="persist-bench-") as folder,
        persist.open(f"file:{folder}/data") as client,
        client.open_writer("shard", schema) as write,
    ):
        table = client.table("table", schema)
        turns = [(ours, table.append), (peers, write.append_now)]
        for start in range(0, total, block):
            turns.reverse()
            for found, append in turns:
                for number in range(start, start + block):
                    row = [{"id": number, "text": "x" * 1000}]
                    found.append(timed(lambda append=append, row=row: append(row)))  # type: ignore[misc]
    warm, others = ours[block:], peers[block:]
    return [
        Figure("table-append", statistics.median(warm) * 1e3, statistics.median(others) * 1e3, "ms",
               "append_now of the shard's handle", at_most=1.05, note=f"p50 of {len(warm):,}, in turns"),
    ]  # fmt: skip


def _row_bytes(folder: str) -> int:
    """The average size of our rows at this moment, in bytes."""
    connection = apsw.Connection(f"{folder}/data/consensus.sqlite", flags=apsw.SQLITE_OPEN_READONLY)
    with closing(connection):
        return int(next(connection.execute("SELECT avg(length(data)) FROM consensus"))[0])


def added(ours: Sequence[float], bare: Sequence[float]) -> float:
    """The median seconds of ours minus the median seconds of the bare ones."""
    return statistics.median(ours) - statistics.median(bare)


def bulk_append(quick: bool) -> list[Figure]:
    """One append of a million updates in key order and one in random order, beside `write_table` of the same table."""
    rows, rounds = (100_000, 1) if quick else (1_000_000, 7)
    found = []
    for name, is_shuffled, least in (("bulk-append", False, 0.8), ("bulk-append-shuffled", True, 0.65)):
        table = bulk_table(rows, is_shuffled)
        with (
            TemporaryDirectory(prefix="persist-bench-") as folder,
            persist.open(f"file:{folder}/data") as client,
            client.open_writer("bulk", BULK) as write,
        ):
            with pa.OSFile(f"{folder}/bare.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as arrow:
                arrow.write_table(table)
            with Peer("bench.bare:write_table", f"{folder}/bare.arrow") as bare:
                ours, peer = beside(
                    lambda table=table, write=write: timed(lambda: _append(write, table)),  # type: ignore[misc]
                    lambda bare=bare: bare.run()[0],  # type: ignore[misc]
                    rounds,
                )
        # Speed, not seconds: more is better.
        found.append(
            Figure(name, rows / ours / 1e6, rows / peer / 1e6, "M/s", "pyarrow.parquet.write_table", at_least=least,
                   note="sorted, hashed, digested and synced", settings=bare.settings)
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
