"""An ingest on Spark: the same rows and bad lines as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.engine import SparkEngine
from jobs.ingesting.engines import OnSpark
from jobs.ingesting.running import Ingest, Outcome, ingest
from jobs.ingesting.settings import Settings
from jobs.stop import Stop
from persist_lib.errors import InvalidUsage
from tests.unit.jobs.ingests import SCHEMA, check, contents, write_files
from tests.unit.jobs.test_ingest_formats import changes_of, write_changes

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def on_spark(client: persist.Client, spark: SparkSession, job: Ingest, run: Any = None) -> Outcome:
    stop = Stop()
    return ingest(client, job, OnSpark(SparkEngine(client, lambda: spark, stop=stop)), stop)


def test_spark_takes_what_one_process_takes(tmp_path: Path, client: persist.Client, spark: SparkSession) -> None:
    rows, bad = write_files(tmp_path / "in", files=5, lines=400)
    before = client.metrics().cost.puts
    outcome = on_spark(
        client,
        spark,
        Ingest("orders", [str(tmp_path / "in")], Settings("jsonl", chunk_bytes=4000, group_bytes=8_000), SCHEMA),
    )
    check(client, "orders", rows, bad)
    assert outcome.groups > 2
    assert outcome.tally.written == sum(rows.values())
    assert client.metrics().cost.puts > before, "what tasks asked of the location is charged"
    assert client.census("orders").writers == 0


def test_changes_by_key_are_in_order_on_spark(tmp_path: Path, client: persist.Client, spark: SparkSession) -> None:
    lines, table = changes_of(1, 600, "key")
    write_changes(tmp_path / "in", lines, 6)
    on_spark(
        client,
        spark,
        Ingest("s", [str(tmp_path / "in")], Settings("debezium", chunk_bytes=2000, group_bytes=20_000), SCHEMA),
    )
    assert {row["id"]: row["name"] for row in contents(client, "s")} == table


def test_an_error_of_a_task_is_that_of_the_ingest(tmp_path: Path, client: persist.Client, spark: SparkSession) -> None:
    (tmp_path / "a.json").write_text('{"op": "t"}\n')
    with pytest.raises(Exception, match="op t") as caught:
        on_spark(client, spark, Ingest("s", [str(tmp_path / "a.json")], Settings("debezium"), SCHEMA))
    assert isinstance(caught.value, InvalidUsage)
