"""The data source `persist` of Spark: tables, read and written, in batches and in streams, whatever carries them.

    import persist_lib.spark
    persist_lib.spark.register(spark)
    spark.read.format("persist").option("location", "s3://…").load("orders")

Importing this needs pyspark alone. What reads and writes is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS = {
    "spark.sql.python.filterPushdown.enabled": "true",  # for the option `pushdown`
    "spark.sql.timeType.enabled": "true",  # columns of times of day
}
"""What the source needs that Spark leaves off."""


def register(spark: SparkSession) -> None:
    """Make `format("persist")` and the table function `persist_as_of` known to a session, also of Spark Connect.

    May be called again, and has to be in each thread that writes: Spark looks for sources of Python in the session that
    is active in the caller's thread. After Ctrl-C in a write the main thread is such a thread. Turns on the session's
    `SETTINGS`. The executors and the driver's Python workers must be able to import `persist_lib`.
    """
    from pyspark.sql.types import LongType, StructType  # noqa: PLC0415

    from persist_lib.spark.functions import register_functions  # noqa: PLC0415 - Arrow takes a second
    from persist_lib.spark.source import PersistSource  # noqa: PLC0415

    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    spark.dataSource.register(PersistSource)
    register_functions(spark)
    # Of Spark's public calls only this one makes the session active in a thread that is not its first.
    spark.createDataFrame([], StructType().add("none", LongType()))


def catalog_conf(location: str | None = None, name: str = "lake", **options: object) -> dict[str, str]:
    """Spark's settings for a catalog, so that `SELECT … FROM lake.orders TIMESTAMP AS OF …` works in SQL.

        spark = SparkSession.builder.config(map=catalog_conf("s3://…", name="lake")).getOrCreate()
        persist_lib.spark.register(spark)

    They have to be set before the session is made. `options` are `consensus`, `read_only` and `partition_bytes`.
    Without `location` it is that of PERSIST_LOCATION. Raises InvalidUsage for a name that Spark uses otherwise.
    """
    from persist_lib.spark.options import as_texts  # noqa: PLC0415
    from persist_lib.spark.source import conf  # noqa: PLC0415

    return conf(location, name, as_texts(options))


def catalog_jar() -> str:
    """The path of the catalog's jar, for `spark-submit --jars` and `ADD JAR`."""
    from persist_lib.spark.source import JAR  # noqa: PLC0415

    return str(JAR)


def create_view(spark: SparkSession, name: str, table: str, **options: object) -> DataFrame:
    """Make a temporary view of a table as of one time, and return its DataFrame.

    See `functions.create_view`.
    """
    from persist_lib.spark import functions  # noqa: PLC0415

    return functions.create_view(spark, name, table, **options)


def scan(spark: SparkSession, table: str, **options: object) -> DataFrame:
    """The DataFrame that `format("persist")` with these options gives, read faster. See `functions.scan`."""
    from persist_lib.spark import functions  # noqa: PLC0415

    return functions.scan(spark, table, **options)
