"""Engines: they run the tasks of compactions and scrubs on Spark, or in this process, depending on what the tasks read.

One Spark task carries out one of these tasks, without a shuffle, because the inputs are already sorted.
`spark.range(0, n, 1, n)` makes n tasks in local, standalone and Connect sessions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from jobs import tasks as t
from jobs.session import Sessions
from persist_lib.client import Client
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import MergeTask, TaskResult
from persist_lib.core.sums import Sums
from persist_lib.errors import Damage, Determinate, InvalidUsage, PersistError
from persist_lib.maintain import Engine, local_engine
from persist_lib.maintain.scrub import Adder, SumTask, local_adder
from persist_lib.maintain.task import run_task

EngineName = Literal["auto", "spark", "local"]


TASKS_AT_ONCE = 1024
"""The most tasks in one Spark job of a scrub; the driver sends them all at once."""

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class SparkEngine:
    """Runs the tasks of one request as one Spark job. All shards of an application share it, in several threads."""

    def __init__(self, client: Client, sessions: Sessions, merge: t.Merge = run_task) -> None:
        if client.url.startswith("memory:") or client.consensus_url.startswith("memory:"):
            raise InvalidUsage(f"{client.url} lives in this process only, so Spark cannot reach it; use engine='local'")
        self._client, self._url, self._consensus_url = client, client.url, client.consensus_url
        self._sessions = sessions
        self._merge = merge
        self._tag = f"persist-{client.runtime.entropy():016x}"
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._is_cancelled = False
        self.tasks_run = 0

    def __call__(self, tasks: Sequence[MergeTask]) -> Iterable[TaskResult]:
        """Return the tasks' results, in the order of the tasks. Raises the first permanent error of a task."""
        if not tasks:
            return ()
        encoded, merge = t.encode_work(self._url, self._consensus_url, tasks), self._merge

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from t.run_all(batches, encoded, merge)

        answers = self._answers(len(tasks), work)
        for row in answers:
            if row["error"] is not None:
                raise t.raised(row["error"])
        return [msgspec.msgpack.decode(row["result"], type=TaskResult) for row in answers]

    def add_up(self, tasks: Sequence[SumTask]) -> Iterator[Sums | Damage]:
        """Yield the sums or the damage that each task of a scrub found, in the order of the tasks."""
        url, consensus_url = self._url, self._consensus_url
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            some = tasks[start : start + TASKS_AT_ONCE]
            encoded = msgspec.msgpack.encode(some)

            def work(batches: Iterator[pa.RecordBatch], encoded: bytes = encoded) -> Iterator[pa.RecordBatch]:
                yield from t.add_up_all(batches, encoded, url, consensus_url)

            for row in self._answers(len(some), work):
                if row["error"] is None:
                    yield msgspec.msgpack.decode(row["result"], type=Sums)
                else:
                    yield _damage(t.raised(row["error"]))

    def _answers(self, count: int, work: Any) -> list[dict[str, Any]]:
        """Return what `count` tasks answered, in their order. The client is charged for their requests."""
        spark = self._session()
        _tag(spark, self._tag)
        if self._is_cancelled:
            raise Determinate("this work was cancelled; nothing was committed")
        answers = sorted(fan_out(spark, count, work, t.ANSWER_DDL), key=lambda row: row["task"])
        charge(self._client, answers)
        with self._lock:
            self.tasks_run += count
        return answers

    def cancel(self) -> None:
        """Stop the tasks of this engine. Parts that they wrote and that were not committed are orphans."""
        self._is_cancelled = True
        if self._spark is not None:
            _interrupt(self._spark, self._tag)

    def _session(self) -> SparkSession:
        with self._lock:
            if self._spark is None:
                self._spark = self._sessions()
            return self._spark


def _damage(error: PersistError) -> Damage:
    if not isinstance(error, Damage):
        raise error
    return error


def _tag(spark: Any, tag: str) -> None:
    """Tag the Spark jobs that this thread starts from now on."""
    if isinstance(spark, SparkSession):
        spark.sparkContext.addJobTag(tag)
        spark.sparkContext.setInterruptOnCancel(True)
    else:
        spark.addTag(tag)


def _interrupt(spark: Any, tag: str) -> None:
    """Stop the jobs with this tag, including those that other threads started.

    SUBTLE: a session's own interruptTag knows only the tags of the calling thread, except on Spark Connect.
    """
    if isinstance(spark, SparkSession):
        spark.sparkContext.cancelJobsWithTag(tag)
    else:
        spark.interruptTag(tag)


def fan_out(spark: SparkSession, count: int, work: Any, ddl: str) -> list[dict[str, Any]]:
    """Run `work` once for each of the indices 0 to count - 1, each in a task of its own, and collect its rows."""
    rows: list[dict[str, Any]] = spark.range(0, count, 1, count).mapInArrow(work, ddl).toArrow().to_pylist()
    return rows


def charge(client: Client, answers: Iterable[dict[str, Any]]) -> None:
    """Charge the tasks' requests to this client and to its current call, at the client's prices."""
    for row in answers:
        client.charge(msgspec.msgpack.decode(row["cost"], type=Cost).priced(client.prices))


def engine_for(client: Client, shard: str, name: EngineName, spark: SparkEngine | None) -> Engine:
    """Return the engine for one shard. `auto`: Spark if a request reads more than `spark_above_bytes`, else local."""
    return _fitting(local_engine(client.machine(shard)), spark, name, bytes_read, client.config.spark_above_bytes)


def adder_for(client: Client, shard: str, name: EngineName, spark: SparkEngine | None) -> Adder:
    """Return the adder for one shard. `auto`: Spark if a scrub reads more than `spark_above_bytes`, else local."""
    above = client.config.spark_above_bytes
    return _fitting(
        local_adder(client.machine(shard).blob), spark.add_up if spark else None, name, bytes_scrubbed, above
    )


def _fitting(
    here: Callable[[Sequence[Task]], Iterable[Answer]],
    spark: Callable[[Sequence[Task]], Iterable[Answer]] | None,
    name: EngineName,
    weigh: Callable[[Sequence[Task]], int],
    above: int,
) -> Callable[[Sequence[Task]], Iterable[Answer]]:
    """Return `here`, `spark`, or for `auto` a function that chooses one by the bytes that the tasks read."""
    if name == "local" or (name == "auto" and spark is None):
        return here
    if spark is None:
        raise InvalidUsage("engine='spark' needs a Spark session")
    there = spark
    return there if name == "spark" else lambda tasks: (there if weigh(tasks) > above else here)(tasks)


def bytes_scrubbed(tasks: Sequence[SumTask]) -> int:
    """The bytes that the tasks of one scrub read. Each task refers to its own parts."""
    return sum(part.size for task in tasks for part in task.parts.parts)


def bytes_read(tasks: Sequence[MergeTask]) -> int:
    """The bytes that the tasks of one request read. Each task refers to all inputs of the request."""
    return sum(part.size for input_ in tasks[0].inputs for part in input_.parts) if tasks else 0
