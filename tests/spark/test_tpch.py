"""TPC-H-like orders and lineitems, written, refreshed and read back by Spark as of every time, beside plain Spark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from bench import tpch_spark
from persist_lib.testing import check_world

SCALE = float(os.environ.get("PERSIST_TPCH_SCALE", "0.001"))
"""`make tpch SCALE=1` runs the same at scale 1."""
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_every_time_reads_as_plain_spark_computes_it(spark: SparkSession, tmp_path: Path):
    said: list[str] = []
    assert tpch_spark.run(spark, tmp_path, SCALE, turns=2, say=said.append) == 18
    assert sum("same rows" in line for line in said) == 6
    with persist.open(f"file:{tmp_path}/shards") as client:
        for name in tpch_spark.SCHEMAS:
            check_world(client, name)


def test_a_row_too_many_is_seen(spark: SparkSession, tmp_path: Path):
    """The comparison itself can fail: one retraction that did not come, out of all rows."""
    run = tpch_spark.Run(spark, tmp_path, SCALE, 1, lambda _: None)
    with persist.open(run.location) as client:
        for name, schema in tpch_spark.SCHEMAS.items():
            client.open_writer(name, schema).close()
        run.load()
        run.gone = lambda turn: type(run).gone(run, turn).where("id <> 0")  # type: ignore[method-assign]
        run.refresh(1)
        run.end_turn(client)
    del run.__dict__["gone"]
    run.write_plain()
    assert run.compare(0) == 3
    with pytest.raises(AssertionError, match="turn 1: sums over all rows"):
        run.compare(1)
