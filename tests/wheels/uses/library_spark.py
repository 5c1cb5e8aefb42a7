"""DataFrames of shards, and a Spark job of one's own in which each task reads a split of a snapshot."""

import os
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

import persist_lib as persist
import persist_lib.spark

os.environ["PYSPARK_PYTHON"] = sys.executable
location = f"file:{sys.argv[1]}/data"
with persist.open(location, config=persist.Config(inline_bytes=0)) as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append(pa.table({"id": range(10_000), "word": [f"w{n}" for n in range(10_000)]}), 0, 1)
    snapshot = read.snapshot(as_of=0)
    splits = snapshot.splits(2)

    def read_split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from splits[number].to_arrow().select(["id", "word"]).to_batches()

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    frame = spark.range(0, len(splits), 1, len(splits)).mapInArrow(read_split, "id bigint, word string")
    assert frame.selectExpr("count(distinct id)").collect()[0][0] == 10_000

    persist_lib.spark.register(spark)
    orders = {"location": location, "table": "orders"}
    frame.where("id < 10").selectExpr("id", "upper(word) AS word").write.format("persist").options(
        **orders, upsert="true"
    ).mode("append").save()
    words = spark.read.format("persist").options(**orders, filter="id < 11").load().orderBy("id").collect()
    assert [row.word for row in words][8:] == ["W8", "W9", "w10"]
    spark.stop()
