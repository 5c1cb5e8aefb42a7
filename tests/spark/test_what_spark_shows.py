"""What Spark's own pages say of a compaction: the shard, the key ranges and which task has which keys."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.engine import SparkEngine, engine_for
from persist_lib.testing.servers import free_port
from tests.spark.collections import write
from tests.spark.places import ROOT, ConnectServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def test_a_job_says_its_shard_and_ranges_and_its_stage_the_keys_of_each_task(
    client: persist.Client, spark: SparkSession
) -> None:
    write(client, "shown", rows=8000)
    engine = SparkEngine(client, lambda: spark)
    done = client.compact("shown", engine=engine_for(client, "shown", "spark", engine))
    [request] = done.applied
    assert request.tasks >= 4
    store = spark.sparkContext._jsc.sc().statusStore()  # what its REST API answers from
    jobs = [job for job in listed(store.jobsList(None)) if job.description().isDefined()]
    [job] = [job for job in jobs if job.description().get().startswith("shown: ")]
    said = job.description().get()
    assert f"compacting {request.updates_in:,} updates" in said
    assert said.endswith(f"{request.tasks} key ranges")
    [stage] = [store.lastStageAttempt(stage) for stage in listed(job.stageIds())]
    assert stage.numTasks() == request.tasks
    lines = stage.details().split("\n")
    assert [line.partition(":")[0] for line in lines] == [f"task {n}" for n in range(request.tasks)]
    assert lines[0].startswith("task 0: [first, (")
    assert lines[-1].endswith(", last)")
    uppers = [line.rpartition(", ")[2] for line in lines]
    assert len(set(uppers)) == len(lines), "each task ends elsewhere"


def listed(sequence: Any) -> list[Any]:
    """A Scala Seq as a list."""
    return [sequence.apply(index) for index in range(sequence.size())]


COMPACT = """
import sys
import persist_lib as persist
from jobs.engine import SparkEngine, engine_for
from jobs.session import SparkSettings, build_session

url, remote = sys.argv[1:]
with persist.open(url) as client:
    engine = SparkEngine(client, lambda: build_session(SparkSettings(remote=remote, ship=False)))
    done = client.compact("orders", engine=engine_for(client, "orders", "spark", engine))
    print(done.applied[0].tasks, done.applied[0].updates_in)
"""


def test_an_operation_on_connect_is_tagged_with_its_shard_and_ranges(
    client: persist.Client, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs grpcio-status")
    write(client, "orders", rows=8000)
    pages = free_port()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": str(pages)}
    server = ConnectServer(tmp_path, conf, PYTHONPATH=str(ROOT))
    try:
        server.wait()
        ran = subprocess.run(
            [sys.executable, "-c", COMPACT, f"file:{folder}", server.url], stdout=subprocess.PIPE, text=True,
            check=True, cwd=ROOT,
        )  # fmt: skip
        api = f"http://127.0.0.1:{pages}/api/v1/applications"
        [application] = fetched(api)
        tags = [tag for job in fetched(f"{api}/{application['id']}/jobs") for tag in job["jobTags"]]
    finally:
        server.stop()
    tasks, updates = map(int, ran.stdout.split())
    [tag] = {tag for tag in tags if "orders: " in tag}
    ranges = f"{tasks} key range" + "s" * (tasks > 1)
    assert f"orders: compacting {updates:,} updates".replace(",", "") in tag
    assert tag.endswith(ranges)


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)
