"""Compaction on Spark beside Spark's own DataFrame plan of the same work, each in a session of its own, on both cores.

The same near-distinct updates with string keys as in `bench.kernel`, in a dozen appends to a real shard; the peer reads
them from plain Parquet (with a signed time, which Spark likes better), groups, sums, sorts and writes. Both are warm,
and take turns. Ours runs in the session that the programs make, the peer in `bench.spark_peer`'s.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import persist_lib as persist
from bench.figures import Figure, beside, timed
from bench.kernel import RUNS, SCHEMA, updates_of
from bench.peer import Peer
from jobs.engine import SparkEngine
from jobs.session import SparkSettings, build_session
from persist_lib.core.plan.compaction import TaskResult, plan_compaction
from persist_lib.maintain.compaction import commit, merge_tasks

FULL, QUICK = 16_000_000, 400_000
ROUNDS = 3
MEMORY = "2g"
RATE = 4.0  # M updates/s on two cores
SHARD = "near_distinct"


def spark(quick: bool) -> list[Figure]:
    """Updates per second of the whole request: read, merge, write. Ours is then committed, and has to be accepted."""
    updates = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-spark-") as folder:
        config = persist.Config(task_bytes=max(64 * 1024, updates * 4))
        with persist.open(f"file:{folder}/data", config=config) as client:
            since = _fill(client, updates, Path(folder) / "plain")
            session = build_session(SparkSettings(driver_memory=MEMORY))
            machine, engine = client.machine(SHARD), SparkEngine(client, lambda: session)
            [request] = plan_compaction(machine.fetch().state).requests
            with client.worker(SHARD) as worker, Peer("bench.spark_peer:dataframe_plan", folder, since) as peer:
                tasks = merge_tasks(machine, worker.id, request)
                results: list[TaskResult] = []

                def theirs() -> float:
                    if peer.answer is not None:
                        peer.run(call="clean")
                    [seconds] = peer.run()
                    peer.run(call="count")
                    return seconds

                ours, plan = beside(
                    lambda: timed(lambda: results.extend(engine(tasks))), theirs, 1 if quick else ROUNDS
                )
                seqno, _ = commit(machine, worker.id, request, results[-len(tasks) :])
            if seqno is None or machine.state.count != peer.answer:
                raise SystemExit(f"the shard has {machine.state.count} updates, Spark's own plan {peer.answer}")
            session.stop()
    return [
        Figure("spark", updates / ours / 1e6, updates / plan / 1e6, "M/s", "Spark's DataFrame plan, warm",
               at_least=10.0, settings=peer.settings,
               note=f"{updates:,} updates, {len(tasks)} tasks; ours: local[*], a JVM of {MEMORY}, serial GC, C1 only"),
        Figure("spark rate", updates / ours / 1e6, RATE, "M/s", "what is aimed at", at_least=1.0),
    ]  # fmt: skip


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
