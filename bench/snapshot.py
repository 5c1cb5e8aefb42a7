"""Snapshots of a compacted shard, beside bare `read_table` of the same rows."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import persist_lib as persist
from bench.append import BULK, bulk_table
from bench.figures import Figure, beside, timed
from bench.peer import Peer


def snapshot(quick: bool) -> list[Figure]:
    """Everything of a compacted shard as one table, digests verified, and the same from a bare Parquet file."""
    rows, rounds = (200_000, 1) if quick else (4_000_000, 7)
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        table = bulk_table(rows, is_shuffled=True)
        pq.write_table(table.drop_columns(["_time"]).sort_by("id"), f"{folder}/bare.parquet")
        with persist.open(f"file:{folder}/data") as client:
            write, read = client.open_shard("bulk", BULK)
            for start in range(0, rows, rows // 4):
                write.compare_and_append(_at(table.slice(start, rows // 4), start), start, start + rows // 4)
            read.downgrade_since(rows - 1)
            client.maintain("bulk")
            with Peer("bench.bare:read_table", f"{folder}/bare.parquet") as bare:
                ours, peer = beside(
                    lambda: timed(lambda: read.snapshot(rows - 1).to_arrow()), lambda: bare.run()[0], rounds
                )
            if read.snapshot(rows - 1).to_arrow().num_rows != rows:
                raise SystemExit("the snapshot lost rows")
    return [
        Figure("snapshot", rows / ours / 1e6, rows / peer / 1e6, "M/s", "pyarrow.parquet.read_table", at_least=1.2,
               note=f"{rows} rows, every digest verified", settings=bare.settings)
    ]  # fmt: skip


def _at(table: pa.Table, time: int) -> pa.Table:
    column = pa.array(np.full(table.num_rows, time, np.uint64))
    return table.set_column(4, table.schema.field(4), column)
