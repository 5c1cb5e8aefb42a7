"""Reads published tables in a Spark of another release, in a process of its own: `program.py FOLDER JARS ASKS`."""

import json
import sys
from typing import Any

folder, jars, asks = sys.argv[1:]
sys.path.insert(0, folder)

from pyspark.sql import SparkSession  # noqa: E402 - the one in that folder

settings: dict[str, Any] = {
    "spark.jars": jars, "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}  # fmt: skip
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
found = []
for format_, place, options in json.loads(asks):
    frame = spark.read.format(format_).options(**options).load(place)
    rows = [[str(value) for value in row] for row in frame.select("id", "word", "price").collect()]
    found.append([sorted(rows), frame.filter("id < 10 and word like 'w%'").count(), frame.count()])
print("FOUND", json.dumps(found))
