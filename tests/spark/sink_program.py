"""A program that streams into a shard until it is killed, or until there is no more: from a shard, or from JSON files.

It prints the number of each epoch that Spark has finished.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import persist_lib.spark
from jobs.session import build_session


def source(spark: SparkSession, asked: dict[str, Any]) -> DataFrame:
    """The stream that is asked for."""
    if "files" in asked:
        most = 1000 if asked["drains"] else 3  # there may be much that is left
        reader = spark.readStream.schema("id long, word string").option("maxFilesPerTrigger", most)
        return reader.json(asked["files"])
    reader = spark.readStream.format("persist").options(**asked["read"])
    return reader.load().drop("_time")


def dawdling(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows; one attempt in four takes a second longer, so that speculation starts another beside it."""
    if random.random() < 0.25:
        time.sleep(1)
    yield from batches


def main() -> None:
    """Stream as the JSON on standard input says."""
    asked = json.loads(sys.stdin.readline())
    spark = build_session()
    persist_lib.spark.register(spark)
    rows = source(spark, asked)
    if "tasks" in asked:
        rows = rows.repartition(asked["tasks"]).mapInArrow(dawdling, rows.schema)
    write = rows.writeStream.format("persist").options(**asked["write"])
    write = write.option("checkpointLocation", asked["checkpoint"])
    query = write.trigger(availableNow=True).start() if asked["drains"] else write.start()
    last = -1
    while query.isActive:
        time.sleep(0.2)
        progress = query.lastProgress
        if progress is not None and progress["batchId"] != last:
            last = progress["batchId"]
            print(f"EPOCH {last}", flush=True)
    if (error := query.exception()) is not None:
        print(f"FAILED {error}", flush=True)
        sys.exit(1)
    spark.stop()


if __name__ == "__main__":
    main()
