"""A shard written and read through Spark Connect: `remote("local[1]")` starts a server and connects to it."""

import os
import sys

from pyspark.sql import SparkSession

import persist_lib.spark

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.remote("local[1]").getOrCreate()
persist_lib.spark.register(spark)
orders = {"location": f"file:{sys.argv[1]}/data", "table": "orders"}
rows = spark.range(10_000).selectExpr("id", "concat('w', id) AS word")
rows.write.format("persist").options(**orders, key="id").mode("append").save()
assert (
    spark.read.format("persist").options(**orders).load().selectExpr("count(distinct word)").collect()[0][0] == 10_000
)
spark.stop()
