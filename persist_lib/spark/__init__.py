"""The data source `persist` of Spark: shards as tables, read and written, in batches and in streams.

    import persist_lib.spark
    persist_lib.spark.register(spark)
    spark.read.format("persist").option("location", "s3://…").option("shard", "orders").load()

Importing this needs pyspark alone. What reads and writes is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.python.filterPushdown.enabled": "true",  # filters of a query prune what is read
    "spark.sql.timeType.enabled": "true",  # columns of times of day
}
"""What the source needs that Spark leaves off."""


def register(spark: SparkSession) -> None:
    """Make `format("persist")` known to a session, local or of Spark Connect. May be called again.

    Turns on the session's `SETTINGS`: without filter pushdown Spark refuses to read, unless the option `pushdown` is
    false. The executors and the driver's Python workers must be able to import `persist_lib`.
    """
    from persist_lib.spark.source import PersistSource  # noqa: PLC0415 - Arrow takes a second

    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    spark.dataSource.register(PersistSource)
