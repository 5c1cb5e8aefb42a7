"""Compaction at size on a real Spark: skewed keys, many small requests, and tasks that are lost for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.engine import SparkEngine
from jobs.lost import TaskLost
from persist_lib.config import MIB
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.location.api import Blob
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.testing import check_world
from tests.spark.collections import SMALL, check, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def test_many_small_requests_are_one_spark_job_and_each_is_committed(folder: object, spark: SparkSession) -> None:
    config = persist.Config(**{**SMALL, "merge_bytes": MIB, "task_bytes": 4 * MIB})
    with persist.open(f"file:{folder}", config=config) as client:
        model = write(client, "s", batches=100, rows=300)
        engine = SparkEngine(client, lambda: spark)
        jobs: list[int] = []

        def noting(tasks: Sequence[MergeTask]) -> list[TaskResult]:
            jobs.append(len(tasks))
            return list(engine(tasks))

        compacted = client.compact("s", engine=noting)
        folds = [one for one in compacted.applied if one.reason == "fold"]
        assert len(folds) >= 3
        assert jobs[0] > 2
        seqnos = [one.seqno for one in compacted.applied]
        assert len(set(seqnos)) == len(seqnos), seqnos
        model.upper = 1  # what the other times hold is tested without Spark
        check(client, "s", model)
        check_world(client, "s")


def test_a_task_that_is_killed_each_time_says_which_range_and_what_to_set(
    client: persist.Client, spark: SparkSession
) -> None:
    model = write(client, "s", rows=8000)

    def killed(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        import os  # noqa: PLC0415 - runs in another process
        import signal  # noqa: PLC0415

        if task.key_lower is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_task(task, blob, entropy)

    with pytest.raises(TaskLost) as raised:
        client.compact("s", engine=SparkEngine(client, lambda: spark, killed))
    said = raised.value.message
    assert said.startswith("shard s: the task of [first, "), said
    assert "was lost with its worker, 4 times" in said
    assert "Lower merge_bytes" in said
    assert "spark.executor.memoryOverhead" in said
    assert raised.value.fields["key_lower"] is None
    assert client.census("s").writers == 0
    client.compact("s", engine=SparkEngine(client, lambda: spark))
    check(client, "s", model)


def test_a_task_without_memory_says_so(client: persist.Client, spark: SparkSession) -> None:
    write(client, "s", rows=8000)

    def greedy(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        raise MemoryError("no room for the window")

    with pytest.raises(TaskLost, match=r"shard s: the task of \[.* ran out of memory"):
        client.compact("s", engine=SparkEngine(client, lambda: spark, greedy))
