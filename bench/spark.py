"""Compaction on Spark beside Spark's own DataFrame plan of the same work, in one session, on both cores.

The same near-distinct updates with string keys as in `bench.kernel`, in a dozen appends to a real shard; the peer reads
them from plain Parquet (with a signed time, which Spark likes better), groups, sums, sorts and writes. Both are warm.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f

import persist_lib as persist
from bench.figures import Figure, timed
from bench.kernel import RUNS, SCHEMA, updates_of
from jobs.engine import SparkEngine
from jobs.session import SparkSettings, build_session
from persist_lib.core.compaction import plan_compaction
from persist_lib.maintain.compaction import commit, merge_tasks

FULL, QUICK = 16_000_000, 400_000
ROUNDS = 3
SHARD = "near_distinct"


def spark(quick: bool) -> list[Figure]:
    """Updates per second of the whole request: read, merge, write. Ours is then committed, and has to be accepted."""
    updates = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-spark-") as folder:
        config = persist.Config(task_bytes=max(64 * 1024, updates * 4))
        with persist.open(f"file:{folder}/data", config=config) as client:
            since = _fill(client, updates, Path(folder) / "plain")
            session = build_session(SparkSettings(driver_memory="2g"))
            machine, engine = client.machine(SHARD), SparkEngine(client, lambda: session)
            [request] = plan_compaction(machine.fetch().state).requests
            with client.worker(SHARD) as worker:
                tasks = merge_tasks(machine, worker.id, request)
                results = list(engine(tasks))  # warms up the workers, as the first of the peer's does
                _dataframe_plan(session, f"{folder}/plain", f"{folder}/warm", since)
                pairs = [
                    (
                        timed(lambda: results.extend(engine(tasks))),
                        timed(lambda n=n: _dataframe_plan(session, f"{folder}/plain", f"{folder}/out{n}", since)),  # type: ignore[misc]
                    )
                    for n in range(1 if quick else ROUNDS)
                ]
                rows = session.read.parquet(f"{folder}/out0").count()
                seqno, _ = commit(machine, worker.id, request, results[-len(tasks) :])
            if seqno is None or machine.state.count != rows:
                raise SystemExit(f"the shard has {machine.state.count} updates, Spark's own plan {rows}")
            session.stop()
    ours, peer = (updates / statistics.median(side) / 1e6 for side in zip(*pairs, strict=True))
    return [Figure("spark", ours, peer, "M/s", "Spark's DataFrame plan, warm", at_least=6.0,
                   note=f"{updates:,} updates, {len(tasks)} tasks")]  # fmt: skip


def _fill(client: persist.Client, updates: int, plain: Path) -> int:
    """A shard in debt, and the same updates as plain Parquet; answers its since."""
    plain.mkdir()
    random = np.random.default_rng(1)
    write, read = client.open_shard(SHARD, SCHEMA)
    with write, read:
        for number in range(RUNS):
            table = updates_of(random, updates // RUNS, updates, number)
            write.compare_and_append(table, write.upper, 100 * number + 100)
            times = pa.array(table.column("_time").to_numpy().astype(np.int64))
            pq.write_table(table.set_column(3, "_time", times), plain / f"{number}.parquet")
        since = 100 * RUNS // 2
        read.downgrade_since(since)
    return since


def _dataframe_plan(session: SparkSession, source: str, target: str, since: int) -> None:
    data = session.read.parquet(source)
    columns: list[Column | str] = [*SCHEMA.names, f.greatest("_time", f.lit(since)).alias("_time"), "_diff"]
    summed = data.select(*columns).groupBy(*SCHEMA.names, "_time").agg(f.sum("_diff").alias("_diff"))
    summed.where("_diff <> 0").orderBy(*SCHEMA.names, "_time").write.parquet(target)
