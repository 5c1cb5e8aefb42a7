"""A program that writes shards with Spark, wherever its environment says that Spark is, and says how each write ended.

Its input is a list of writes: a text of SQL that makes the rows, and the options of the write. It is the same for every
place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

import persist_lib.spark
from jobs.session import build_session


def carry_out(spark: SparkSession, asked: dict[str, Any]) -> None:
    """One write, of a batch or of a stream of all that there is."""
    if "stream" in asked:
        frame = spark.readStream.format("persist").options(**asked["stream"]).load().drop("_time")
        write = frame.writeStream.format("persist").options(**asked["options"])
        write.option("checkpointLocation", asked["checkpoint"]).trigger(availableNow=True).start().awaitTermination()
        return
    frame = spark.sql(asked["sql"]).repartition(asked.get("tasks", 3))
    frame.write.format("persist").options(**asked["options"]).mode(asked.get("mode", "append")).save()


def main() -> None:
    """Carry out the writes on standard input."""
    writes = json.load(sys.stdin)
    spark = build_session()
    persist_lib.spark.register(spark)
    answers = []
    for asked in writes:
        try:
            carry_out(spark, asked)
            answers.append("")
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers.append(f"{type(error).__name__}: {error}")
    print("ANSWERS " + json.dumps(answers), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
