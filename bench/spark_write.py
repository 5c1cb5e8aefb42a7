"""Writing a DataFrame with `format("persist")` beside `df.write.parquet` of the same rows, in one session, by turns.

The rows are made by Spark's own columns, as cheaply as it can, so that what is measured is the writing. Ours are sorted
and consolidated by the tasks, have fingerprints and digests, and end in one compare-and-append.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession

import persist_lib as persist
import persist_lib.spark
from bench.figures import Figure, beside, timed
from jobs.session import SparkSettings, build_session

FULL, QUICK = 4_000_000, 400_000
ROUNDS = 3


def spark_write(quick: bool) -> list[Figure]:
    """Rows per second from a DataFrame to committed files."""
    rows = QUICK if quick else FULL
    session = build_session(SparkSettings(driver_memory="1g"))
    persist_lib.spark.register(session)
    try:
        with TemporaryDirectory(prefix="persist-spark-write-") as folder:
            frame = rows_of(session, rows)
            turns = [0, 0]

            def ours() -> None:
                turns[0] += 1
                write = frame.write.format("persist").mode("append").option("location", f"{folder}/data")
                write.option("table", f"orders-{turns[0]}").option("key", "id").save()

            def theirs() -> None:
                turns[1] += 1
                frame.write.parquet(str(Path(folder) / f"plain-{turns[1]}"))

            seconds, plain = beside(lambda: timed(ours), lambda: timed(theirs), 1 if quick else ROUNDS)
            with persist.open(f"{folder}/data") as client:
                found = client.machine(f"orders-{turns[0]}").fetch().state.count
                if found != rows:
                    raise SystemExit(f"the shard has {found} updates, not {rows}")
    finally:
        session.stop()
    return [
        Figure("spark-write", rows / seconds / 1e6, rows / plain / 1e6, "M/s", "df.write.parquet", at_least=0.5,
               note=f"{rows:,} rows of an integer key, a number and a text; 2 tasks"),
    ]  # fmt: skip


def rows_of(session: SparkSession, rows: int) -> DataFrame:
    """Keys in no order, a number, and texts of a few thousand words."""
    return session.range(0, rows, 1, 2).selectExpr(
        f"(id * 2654435761) % {rows * 4} AS id", "id * 7 % 1000003 AS amount",
        "concat('customer-', cast(id * 31 % 5000 AS string)) AS customer",
    )  # fmt: skip
