"""An event log that is a shard, read on a real Spark: as of an event, and as a stream of new events."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
import persist_lib.spark
from tests.eventlogs import store_of, write
from tests.spark.ending import ended

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
EVENTS = [b'{"cents": %d}' % n for n in range(1, 41)]


def test_a_log_is_read_as_of_an_event_and_its_new_events_are_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    persist_lib.spark.register(spark)
    store = store_of("persist", tmp_path)
    write(store, EVENTS[:30])
    location, shard = store.specifier.options[0], "events"
    log = {"location": location, "table": shard}
    with persist.open(location) as client:
        client.maintain(shard)

    for as_of in (1, 17, 30):
        frame = spark.read.format("persist").options(**log, as_of=str(as_of)).load()
        found = sorted((row.id, bytes(row.payload)) for row in frame.select("id", "payload").collect())
        assert found == list(enumerate(EVENTS[:as_of], 1))
        total = frame.selectExpr("sum(get_json_object(decode(payload, 'utf-8'), '$.cents')) AS cents").first()
        assert total is not None
        assert total.cents == sum(range(1, as_of + 1))

    def collect() -> list[tuple[int, bytes]]:
        """What a stream of changes brings until it is at the end, from where the run before it stopped."""
        changes = spark.readStream.format("persist").options(**log, changes="true", **{"from": "0"}).load()
        ended(
            changes.writeStream.format("parquet").option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        )  # fmt: skip
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        return sorted((row.id, bytes(row.payload)) for row in rows)

    assert collect() == list(enumerate(EVENTS[:30], 1))
    write(store, EVENTS[30:])
    assert collect() == list(enumerate(EVENTS, 1))
