"""A stream read by Spark: what `persisted_source` gives, with nothing that is not sealed, and each update once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
import persist_lib.spark
from persist_lib import streams
from tests.streaming import SCHEMA, update

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]


def test_spark_gets_the_sealed_updates_of_a_stream_as_its_source_does(
    spark: SparkSession, client: persist.Client, tmp_path: Path
) -> None:
    persist_lib.spark.register(spark)
    runtime = streams.open(client)
    write, read = runtime.create_or_load("readings", SCHEMA)

    def run() -> Counter[tuple[int, int]]:
        frame = spark.readStream.format("persist").options(
            location=client.url, shard="readings", changes="true", hold="etl"
        )  # fmt: skip
        query = (
            frame.load().writeStream.format("parquet").option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(200)
        assert query.exception() is None
        found: Counter[tuple[int, int]] = Counter()
        for row in spark.read.parquet(str(tmp_path / "out")).collect():
            found[row["id"], row["_time"]] += row["_diff"]
        return found

    write.write([update(1, 5), update(2, 9), update(3, 30)]).result()
    write.seal(6).result()
    assert run() == {(1, 5): 1}
    write.write([update(4, 8), update(1, 12, diff=-1)]).result()
    write.seal(20).result()
    found = run()
    expected: Counter[tuple[int, int]] = Counter()
    for event in streams.persisted_source(read, 5, until=20, timeout=20):
        if isinstance(event, persist.Updates):
            for row in event.table.to_pylist():
                expected[row["id"], row["_time"]] += row["_diff"]
    assert found == expected == {(1, 5): 1, (2, 9): 1, (4, 8): 1, (1, 12): -1}
    runtime.stop()
