"""Spark's own DataFrame plans as a peer: in a JVM of its own, configured as its users would.

The JVM's default JIT and collector, 8 GB, as many shuffle partitions as suit a small machine. It imports nothing of
ours, and is started in a process of its own by `bench.peer`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from bench.peer import Ready
from bench.workers import used

SETTINGS = {"spark.driver.memory": "8g", "spark.sql.shuffle.partitions": "8"}
QUIET = {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}  # fmt: skip
"""Settings that make no query faster or slower."""
DATA = ["key", "state", "amount"]
RANGES = (2, 8, 32)
PLANS = ("sort", *(f"ranges {n}" for n in RANGES))
"""`sort` groups, adds up and sorts globally. `ranges n` shuffles once, into n ranges of keys, and does both in each."""


def users_session(name: str) -> SparkSession:
    """Spark on all cores, as its users would start it."""
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    builder = SparkSession.builder.master("local[*]").appName(name)
    for setting, value in {**SETTINGS, **QUIET}.items():
        builder = builder.config(setting, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def dataframe_plan(folder: str, since: str) -> Iterator[Ready]:
    """Each of `PLANS` on what is in `plain`; count what was written; clean it away for the next time."""
    source, target = Path(folder) / "plain", Path(folder) / "spark-out"
    session = users_session("peer")

    def summed(data: DataFrame) -> DataFrame:
        return data.groupBy(*DATA, "_time").agg(f.sum("_diff").alias("_diff")).where("_diff <> 0")

    def run(ranges: int | None) -> None:
        columns: list[Column | str] = [*DATA, f.greatest("_time", f.lit(int(since))).alias("_time"), "_diff"]
        data = session.read.parquet(str(source)).select(*columns)
        if ranges is None:
            ordered = summed(data).orderBy(*DATA, "_time")
        else:
            ordered = summed(data.repartitionByRange(ranges, "key")).sortWithinPartitions(*DATA, "_time")
        ordered.write.parquet(str(target))

    said = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    try:
        yield Ready(
            f"Spark {session.version}, local[*] ({os.cpu_count()} cores), the JVM's default JIT and collector, {said}, "
            "warm",
            {
                **{plan: partial(run, ranges) for plan, ranges in zip(PLANS, (None, *RANGES), strict=True)},
                "count": lambda: session.read.parquet(str(target)).count(),
                "clean": lambda: shutil.rmtree(target),
                "cpu": lambda: used().jvm_s,
            },
        )
    finally:
        session.stop()
