"""A stream read by Spark: what `persisted_source` gives, with nothing that is not sealed, and each update once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import persist_lib as persist
import persist_lib.spark
from persist_lib import streams
from persist_lib.spark.source import PersistSource
from persist_lib.spark.stream_reader import StreamReader
from tests.spark.ending import ended
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
            location=client.url, table="readings", changes="true", hold="etl"
        )  # fmt: skip
        ended(
            frame.load().writeStream.format("parquet").option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        )  # fmt: skip
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


def test_a_stream_that_runs_once_beside_an_appender_has_each_update_once(
    spark: SparkSession, client: persist.Client, tmp_path: Path
) -> None:
    """The first run finds an empty shard; in each of the others an append lands whenever the reader has looked."""

    def run(*, is_raced: bool) -> Counter[int]:
        class Raced(PersistSource):  # local, so that Spark's workers need not import it
            @classmethod
            def name(cls) -> str:
                return "raced"

            def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
                reader = super().streamReader(schema)
                planning: Any = reader._plan()
                fetch, left = planning.fetch, [url] * is_raced

                def raced() -> Any:
                    upper = fetch()
                    if left:
                        with persist.open(left.pop()) as rival, rival.open_writer("orders", SCHEMA) as write:
                            write.compare_and_append([update(upper.time, upper.time)], upper, upper.time + 1)
                    return upper

                planning.fetch = raced
                return reader

        spark.dataSource.register(Raced)
        frame = spark.readStream.format("raced").options(location=url, table="orders", changes="true").load()
        ended(
            frame.writeStream.format("parquet").option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(once=True)
        )  # fmt: skip
        return Counter(row["id"] for row in spark.read.schema("id bigint").parquet(str(tmp_path / "out")).collect())

    url = client.url
    with client.open_writer("orders", SCHEMA) as write:
        assert run(is_raced=False) == Counter()
        write.compare_and_append([update(0, 0)], 0, 1)
    assert run(is_raced=True) == Counter([0])
    assert run(is_raced=True) == Counter([0, 1])
    assert run(is_raced=False) == Counter([0, 1, 2])
