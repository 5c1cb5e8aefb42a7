"""What Spark's own pages say of a compaction: the shard, the key ranges and which task has which keys."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.engine import SparkEngine, engine_for
from jobs.java import find_java_home
from tests.spark.collections import SMALL, write

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


@pytest.fixture
def server() -> Iterator[tuple[str, str]]:
    """A Connect server with its pages: where clients connect, and the address of its REST API."""
    pytest.importorskip("grpc_status", reason="Spark Connect needs grpcio-status")
    port, pages = free_ports()
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ, "JAVA_HOME": find_java_home(), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port),
        "spark.ui.port": str(pages), "spark.driver.memory": "512m", "spark.driver.host": "127.0.0.1",
    }  # fmt: skip
    words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    process = subprocess.Popen(
        [
            str(home / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
            "--master", "local[2,4]", *words, "spark-internal",
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"sc://127.0.0.1:{port}", f"http://127.0.0.1:{pages}/api/v1"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


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


def test_an_operation_on_connect_is_tagged_with_its_shard_and_ranges(server: tuple[str, str], folder: Path) -> None:
    remote, api = server
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as client:
        write(client, "orders", rows=8000)
    wait_for(remote)
    ran = subprocess.run(
        [sys.executable, "-c", COMPACT, f"file:{folder}", remote],
        stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    tasks, updates = map(int, ran.stdout.split())
    [application] = fetched(f"{api}/applications")
    tags = [tag for job in fetched(f"{api}/applications/{application['id']}/jobs") for tag in job["jobTags"]]
    [tag] = {tag for tag in tags if "orders: " in tag}
    ranges = f"{tasks} key range" + "s" * (tasks > 1)
    assert f"orders: compacting {updates:,} updates".replace(",", "") in tag
    assert tag.endswith(ranges)


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def wait_for(remote: str) -> None:
    host, _, port = remote.removeprefix("sc://").partition(":")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.2)
    pytest.fail(f"no server at {remote}")
