"""Writes from threads other than the one that made the session, where Spark finds no source of Python by itself."""

from __future__ import annotations

import threading

import pytest
from pyspark.sql import DataFrame, SparkSession

import persist_lib as persist
import persist_lib.spark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_thread_that_registers_the_source_writes(spark: SparkSession, client: persist.Client) -> None:
    persist_lib.spark.register(spark)
    frame: DataFrame = spark.range(3)
    failed: dict[str, Exception] = {}

    def write(shard: str) -> None:
        try:
            persist_lib.spark.register(spark)
            to = {"location": client.url, "table": shard, "key": "id"}
            frame.write.format("persist").options(**to).mode("append").save()
        except Exception as error:  # noqa: BLE001 - it is judged below
            failed[shard] = error

    threads = [threading.Thread(target=write, args=(shard,)) for shard in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == {}
    for shard in ("first", "second"):
        with client.open_reader(shard) as read:
            assert sorted(row["id"] for row in read.snapshot().to_pylist()) == [0, 1, 2]
