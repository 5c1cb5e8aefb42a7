"""Orders and lineitems of `bench.tpch` written, refreshed and read back by Spark as of every time, beside plain Spark.

    python -m bench.tpch_spark --scale 1        make tpch SCALE=1

Three kinds of writes go through the data source: appends, appends of changes with `_diff`, and upserts by key. The
plain side is Parquet that Spark wrote by itself, where each row says from which turn to which it is there; a query over
it knows nothing of shards. Both are compared as of every time by the same queries: all columns of all rows, hashed and
added up, and the pricing summary of TPC-H (its query 1). It is done twice, before and after a compaction.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import persist_lib as persist
import persist_lib.spark
from bench import tpch
from jobs.session import SparkSettings, build_session
from persist_lib.schema.schema import Schema
from persist_lib.spark.types import spark_schema

TURNS = 3
SCHEMAS = {"orders": tpch.ORDERS, "lineitem": tpch.LINEITEM}
MAKE: dict[str, Callable[[Any], pa.Table]] = {"orders": tpch.orders, "lineitem": tpch.lineitems}
SUMMARY = """
    SELECT l_returnflag, l_linestatus, sum(l_quantity) AS quantity, sum(l_extendedprice) AS price,
           sum(l_extendedprice * (1 - l_discount)) AS discounted, count(*) AS rows
    FROM lineitem WHERE l_shipdate <= DATE '1998-09-02' GROUP BY 1, 2 ORDER BY 1, 2
"""
Say = Callable[[str], None]


class Run:
    """One run: the shards, the plain files, and at which time of a shard each turn ended."""

    def __init__(self, spark: SparkSession, folder: Path, scale: float, turns: int, say: Say) -> None:
        self.spark, self.folder, self.scale, self.turns, self.say = spark, folder, scale, turns, say
        self.location = f"file:{folder}/shards"
        self.ended: dict[str, list[int]] = {name: [] for name in SCHEMAS}
        persist_lib.spark.register(spark)

    def all(self) -> int:
        """Do all of it. Returns how many comparisons were made; AssertionError if one of them differs."""
        with persist.open(self.location) as client:
            for name, schema in SCHEMAS.items():
                client.open_writer(name, schema).close()
            self.timed("initial load", self.load)
            for turn in range(1, self.turns + 1):
                self.timed(f"refresh {turn}", partial(self.refresh, turn))
                self.end_turn(client)
            self.timed("plain Parquet", self.write_plain)
            compared = sum(self.compare(turn) for turn in range(self.turns + 1))
            for name in SCHEMAS:
                self.timed(f"compact {name}", partial(client.compact, name))
            return compared + sum(self.compare(turn) for turn in range(self.turns + 1))

    def timed(self, what: str, step: Callable[[], object]) -> None:
        """Do a step and say how long it took."""
        started = time.perf_counter()
        step()
        self.say(f"{what}: {time.perf_counter() - started:.1f} s")

    def load(self) -> None:
        """The initial rows, appended."""
        for name in SCHEMAS:
            self.write(name, rows_of(name, self.initial()))
        with persist.open(self.location) as client:
            self.end_turn(client)

    def refresh(self, turn: int) -> None:
        """New orders come and old ones go (RF1, RF2); some open ones change their priority, by key."""
        for name in SCHEMAS:
            came = rows_of(name, self.new(turn)).withColumn("_diff", f.lit(1).cast("long"))
            went = rows_of(name, self.gone(turn)).withColumn("_diff", f.lit(-1).cast("long"))
            self.write(name, came.unionByName(went))
        self.write("orders", self.urgent(turn), upsert="true")

    def end_turn(self, client: persist.Client) -> None:
        """Remember the newest complete time of each shard."""
        for name, ended in self.ended.items():
            ended.append((client.inspect(name).state.upper.time or 1) - 1)

    def write(self, name: str, rows: DataFrame, **options: str) -> None:
        """Append or upsert rows to a shard."""
        self.source(rows.write.mode("append"), name).options(**options).save()

    def source(self, one: Any, name: str) -> Any:
        """A reader or a writer of a shard."""
        return one.format("persist").option("location", self.location).option("table", name)

    def initial(self) -> DataFrame:
        """The numbers of the first orders."""
        return self.spark.range(0, len(tpch.initial(self.scale)), 1, 8)

    def new(self, turn: int) -> DataFrame:
        """The numbers of the orders that come in a turn."""
        numbers = tpch.refresh(self.scale, turn).new
        return self.spark.range(int(numbers[0]), int(numbers[-1]) + 1, 1, 2)

    def gone(self, turn: int) -> DataFrame:
        """The numbers of those that go."""
        numbers = tpch.refresh(self.scale, turn).gone
        return self.spark.range(0, len(numbers), 1, 2).selectExpr(f"id * {_step(numbers)} + {int(numbers[0])} AS id")

    def urgent(self, turn: int) -> DataFrame:
        """Rows of orders that came in this turn, with another priority."""
        urgent = f.concat(f.lit("0-TURN "), f.lit(str(turn)))
        return rows_of("orders", self.new(turn).where("id % 3 = 0")).withColumn("o_orderpriority", urgent)

    def write_plain(self) -> None:
        """Every row that there ever was, as Spark's own Parquet: `came` and `went` are turns, null for never."""
        for name in SCHEMAS:
            base = rows_of(name, self.initial(), keep="number")
            gone = self.spark.createDataFrame([(-1, 0)], "number long, went int").where("false")
            for turn in range(1, self.turns + 1):
                numbers = self.gone(turn).selectExpr("id AS number", f"{turn} AS went")
                gone = gone.union(numbers)
            plain = base.join(f.broadcast(gone), "number", "left").selectExpr("*", "0 AS came").drop("number")
            for turn in range(1, self.turns + 1):
                came = rows_of(name, self.new(turn))
                if name == "orders":
                    came = rows_of(name, self.new(turn).where("id % 3 <> 0")).union(self.urgent(turn))
                plain = plain.unionByName(came.selectExpr("*", "CAST(NULL AS int) AS went", f"{turn} AS came"))
            plain.write.parquet(f"{self.folder}/plain/{name}")

    def compare(self, turn: int) -> int:
        """Compare both sides as of the end of a turn. Returns how many comparisons were made."""
        seconds, found = [], []
        for side in (self.plain, self.shard):
            started = time.perf_counter()
            tables = {name: side(name, turn) for name in SCHEMAS}
            sums = {name: _sums(frame) for name, frame in tables.items()}
            tables["lineitem"].createOrReplaceTempView("lineitem")
            found.append((sums, [row.asDict() for row in self.spark.sql(SUMMARY).collect()]))
            seconds.append(time.perf_counter() - started)
        plain, ours = found
        assert ours[0] == plain[0], f"turn {turn}: sums over all rows are {ours[0]}, of plain Spark {plain[0]}"
        assert ours[1] == plain[1], f"turn {turn}: the summary is {ours[1]}, of plain Spark {plain[1]}"
        counts = ", ".join(f"{sums[0]:,} of {name}" for name, sums in plain[0].items())
        self.say(f"as of turn {turn}: same rows, {counts}; {seconds[1]:.1f} s, plain Spark {seconds[0]:.1f} s")
        return 3

    def plain(self, name: str, turn: int) -> DataFrame:
        """A table as of the end of a turn, from Spark's own Parquet."""
        rows = self.spark.read.parquet(f"{self.folder}/plain/{name}")
        return rows.where(f"came <= {turn} AND (went IS NULL OR went > {turn})").drop("came", "went")

    def shard(self, name: str, turn: int) -> DataFrame:
        """The same from the shard."""
        return self.source(self.spark.read, name).option("as_of", self.ended[name][turn]).load()


def rows_of(name: str, numbers: DataFrame, keep: str | None = None) -> DataFrame:
    """The rows of a table for order numbers in a column `id`; `keep` is a column to be added with these numbers."""
    make, schema = MAKE[name], SCHEMAS[name]
    fields = spark_schema(pa.schema(list(schema.data)), None)
    if keep is not None:
        fields = fields.add(keep, "long", nullable=False)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _made(make, schema, batch.column(0).to_numpy(), keep).to_batches()

    return numbers.select("id").mapInArrow(rows, fields)


def _made(make: Callable[[Any], pa.Table], schema: Schema, numbers: Any, keep: str | None) -> pa.Table:
    table = make(numbers)
    if keep is None:
        return table
    keys = tpch.order_keys(numbers)
    places = np.searchsorted(keys, table[schema.key_names[0]].to_numpy())  # numbers come in order, and so do keys
    return table.append_column(pa.field(keep, pa.int64(), nullable=False), pa.array(numbers[places]))


def _sums(frame: DataFrame) -> tuple[int, str]:
    """How many rows there are, and the sum of the hashes of all of their columns."""
    hashed = f.xxhash64(*(f.col(name) for name in sorted(frame.columns))).cast("decimal(20, 0)")
    [row] = frame.select(hashed.alias("h")).agg(f.count("*"), f.sum("h")).collect()
    return int(row[0]), str(row[1])


def _step(numbers: Any) -> int:
    return int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1


def run(spark: SparkSession, folder: Path, scale: float, turns: int = TURNS, say: Say = print) -> int:
    """Write, refresh, read back and compare. Returns how many comparisons were made."""
    return Run(spark, folder, scale, turns, say).all()


def main() -> None:
    """`python -m bench.tpch_spark`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--memory", default="1g", help="of the driver's JVM")
    given = parser.parse_args()
    spark = build_session(SparkSettings(driver_memory=given.memory))
    try:
        with TemporaryDirectory(prefix="persist-tpch-") as folder:
            print(f"{run(spark, Path(folder), given.scale, given.turns)} comparisons, all the same")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
