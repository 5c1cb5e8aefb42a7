"""An ingest on Spark: the same rows and bad lines as in one process, also when its driver is killed."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
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
from tests.spark.collections import SMALL
from tests.spark.test_killed_driver import kill_group
from tests.unit.jobs.ingests import SCHEMA, check, contents, write_files
from tests.unit.jobs.test_ingest_formats import changes_of, write_changes

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent.parent.parent / "jobs" / "ingest.py"


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


def test_a_killed_driver_is_continued_and_each_line_is_there_once(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows, bad = many(tmp_path / "in")
    location = f"file:{tmp_path / 'data'}"
    command = [
        sys.executable, str(PROGRAM), "--location", location, "--shard", "orders", "--format", "jsonl",
        "--engine", "spark",
        "--max-bad", "1000000", "--key", "id:int64 not null", "--value", "name:string", "--chunk-mib", "0.05",
        "--group-mib", "0.2", str(tmp_path / "in"),
    ]  # fmt: skip
    env = {
        **os.environ,
        "PERSIST_CONFIG": json.dumps(SMALL),
        "PERSIST_SPARK_MASTER": "local[2,4]",
        "PERSIST_SPARK_DRIVER_MEMORY": "512m",
    }
    for attempt in range(4):
        with (tmp_path / "log").open("wb") as log:
            driver = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            if attempt < 3:
                wait_for_groups(driver, location, rng.randint(1, 3) + groups_of(location))
                driver.send_signal(signal.SIGKILL)
            assert driver.wait(200) in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
        finally:
            kill_group(driver)
    with persist.open(location) as client:
        check(client, "orders", rows, bad)


def many(folder: Path) -> tuple[Counter[Any], set[tuple[str, int]]]:
    """More lines, so that there is a moment to kill at."""
    rows, bad = write_files(folder, files=2, lines=100)
    for number in range(10, 14):
        path = folder / f"{number}.jsonl.gz"
        texts = [json.dumps({"id": line, "name": f"{number}-{line}"}) for line in range(8000)]
        path.write_bytes(gzip.compress("\n".join(texts).encode()))
        rows.update({(line, f"{number}-{line}"): 1 for line in range(8000)})
    return rows, bad


def groups_of(location: str) -> int:
    try:
        with persist.open(location, create=False, read_only=True) as client:
            last = client.inspect("orders").state.producers.get("ingest/default")
            return 0 if last is None else last.sequence
    except persist.NotFound:
        return 0


def wait_for_groups(driver: subprocess.Popen[bytes], location: str, groups: int) -> None:
    deadline = time.monotonic() + 120
    while groups_of(location) < groups and driver.poll() is None:
        assert time.monotonic() < deadline, "it does not come on"
        time.sleep(0.02)
