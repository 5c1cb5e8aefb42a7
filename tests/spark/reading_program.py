"""A program that reads shards with Spark, wherever its environment says that Spark is, and prints what it read as JSON.

Its input is a list of questions: options of a read, or a text of SQL. It is the same for every place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import persist_lib.spark
from jobs.session import build_session


def ask(spark: SparkSession, question: dict[str, Any]) -> DataFrame:
    """The frame that answers a question."""
    if "sql" in question:
        return spark.sql(question["sql"])
    if "scan" in question:
        return persist_lib.spark.scan(spark, question["scan"], **question["options"])
    frame = spark.read.format("persist").options(**question["options"]).load()
    return frame.where(question["where"]) if "where" in question else frame


def drain(spark: SparkSession, question: dict[str, Any]) -> None:
    """A stream into Parquet files, of all that there is now."""
    found = spark.readStream.format("persist").options(**question["options"]).load().writeStream.format("parquet")
    query = (
        found.option("path", question["to"]).option("checkpointLocation", question["checkpoint"])
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()


def main() -> None:
    """Answer the questions on standard input."""
    questions = json.load(sys.stdin)
    spark = build_session()
    persist_lib.spark.register(spark)
    answers: list[Any] = []
    for question in questions:
        try:
            if "twice" in question:
                frame = spark.read.format("persist").options(**question["options"]).load()
                some, others = (frame.where(text) for text in question["twice"])
                answers.append([some.count(), frame.count(), some.union(others).count(), others.count()])
            elif "checkpoint" in question:
                drain(spark, question)
                answers.append(None)
            else:
                answers.append([[str(value) for value in row] for row in ask(spark, question).collect()])
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers.append(f"{type(error).__name__}: {error}")
    print("ANSWERS " + json.dumps(answers), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
