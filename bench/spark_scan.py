"""A scan of a shard on Spark beside `spark.read.parquet` of the same rows, in one session, as users configure it.

Both are in the same JVM, which has its default JIT and collector, and take turns. `noop` takes every column of every
row out of the scan. The sum needs all columns too: Spark does not tell Python which ones a query needs. Ours is read by
`persist_lib.spark.scan`, and by `format("persist")`, whose rows Spark projects once more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

import persist_lib as persist
import persist_lib.spark
from bench.figures import Figure, beside
from bench.kernel import SCHEMA
from bench.peer import Peer, Ready
from bench.spark_peer import SETTINGS, users_session

FULL, QUICK = 16_000_000, 400_000
APPENDS = 8
ROUNDS = 3
SOME = f"amount < {(1 << 40) // 10}"


def spark_scan(quick: bool) -> list[Figure]:
    """Rows per second out of a compacted shard, and out of plain Parquet files."""
    rows = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-scan-") as folder:
        _fill(folder, rows)
        with Peer("bench.spark_scan:session", folder) as both:
            if both.ask("ours counted") != rows or both.ask("parquet counted") != rows:
                raise SystemExit("a scan lost rows")
            both.run(2, "ours"), both.run(2, "parquet"), both.run(1, "source")  # warm
            rounds = 1 if quick else ROUNDS
            ours, theirs = beside(lambda: both.run(1, "ours")[0], lambda: both.run(1, "parquet")[0], rounds)
            source, beside_source = beside(lambda: both.run(1, "source")[0], lambda: both.run(1, "parquet")[0], rounds)
            some = beside(lambda: both.run(1, "ours, some")[0], lambda: both.run(1, "parquet, some")[0], rounds)
            sums = beside(lambda: both.run(1, "ours summed")[0], lambda: both.run(1, "parquet summed")[0], rounds)
    mega = rows / 1e6
    return [
        Figure("spark scan", mega / ours, mega / theirs, "M rows/s", "spark.read.parquet", at_least=0.7,
               note=f"{rows:,} rows of 3 columns, to noop", settings=both.settings),
        Figure("spark scan, the source", mega / source, mega / beside_source, "M rows/s", "spark.read.parquet",
               note='the same by format("persist")'),
        Figure("spark scan, some", mega / some[0], mega / some[1], "M rows/s", "spark.read.parquet", at_least=0.7,
               note="2 of 3 columns of a tenth of the rows, to noop"),
        Figure("spark scan, summed", mega / sums[0], mega / sums[1], "M rows/s", "spark.read.parquet", at_least=0.7,
               note="count, sum and greatest of all 3 columns"),
    ]  # fmt: skip


@contextmanager
def session(folder: str) -> Iterator[Ready]:
    """A session of Spark that reads both."""
    spark = users_session("scan")
    persist_lib.spark.register(spark)

    def ours(**options: object) -> DataFrame:
        return persist_lib.spark.scan(spark, "scan", location=f"file:{folder}/data", **options)

    def source() -> DataFrame:
        return spark.read.format("persist").options(location=f"file:{folder}/data", table="scan").load()

    def parquet() -> DataFrame:
        return spark.read.parquet(f"{folder}/plain")

    def scanned(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def summed(frame: DataFrame) -> None:
        frame.agg(f.max("key"), f.max("state"), f.sum("amount")).collect()

    said = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    try:
        yield Ready(
            f"Spark {spark.version}, local[*] ({os.cpu_count()} cores), default JIT and collector, {said}, warm",
            {
                "ours": lambda: scanned(ours()), "parquet": lambda: scanned(parquet()),
                "source": lambda: scanned(source()),
                "ours, some": lambda: scanned(ours(columns="key, amount", filter=SOME)),
                "parquet, some": lambda: scanned(parquet().where(SOME).select("key", "amount")),
                "ours summed": lambda: summed(ours()), "parquet summed": lambda: summed(parquet()),
                "ours counted": lambda: ours().count(), "parquet counted": lambda: parquet().count(),
            },
        )  # fmt: skip
    finally:
        spark.stop()


def _fill(folder: str, rows: int) -> None:
    """A shard of distinct rows, compacted, and the same rows as Parquet files, as many as Spark would like."""
    plain = Path(folder) / "plain"
    plain.mkdir()
    random = np.random.default_rng(1)
    with persist.open(f"file:{folder}/data") as client:
        with client.open_writer("scan", SCHEMA) as write:
            for number in range(APPENDS):
                table = _rows(random, number, rows // APPENDS)
                write.compare_and_append(table, number, number + 1)
                pq.write_table(table.sort_by("key"), plain / f"{number}.parquet")
        client.set_retention("scan", 0)
        client.maintain("scan")
        client.compact("scan", policy=persist.Policy(weight=1e9, advance=0.01))


def _rows(random: np.random.Generator, number: int, count: int) -> pa.Table:
    ids = random.permutation(count) * APPENDS + number
    keys = pa.array([f"key-{one:012d}" for one in ids.tolist()])
    states = pa.array(np.array(["placed", "paid", "shipped", "returned"])[ids % 4])
    return pa.table({"key": keys, "state": states, "amount": random.integers(0, 1 << 40, count)})
