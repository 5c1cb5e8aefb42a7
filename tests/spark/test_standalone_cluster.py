"""Compaction on a standalone cluster: a master and workers with JVMs of their own, on S3 and PostgreSQL.

What local mode hides would show here: code and URLs that reach another process only by what is sent to it, and a task
that is lost with its executor.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import jobs.reach
import persist_lib as persist
from persist_lib.testing import check_swept, check_world
from tests import servers
from tests.spark.collections import SMALL, Model, check, referred, stored, write
from tests.spark.places import CONF, START_S, Cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parent.parent.parent / "jobs" / "compact.py"
servers.use_test_credentials()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as closing:
        started = Cluster(tmp_path_factory.mktemp("cluster"))
        closing.callback(started.stop)
        started.wait()
        yield started


@pytest.fixture
def urls() -> tuple[str, str]:
    name = os.urandom(8).hex()
    blobs = servers.s3_url()
    log = servers.postgres_url()
    return blobs, f"{log}{'&' if '?' in log else '?'}persist_schema=t{name}"


def start(
    cluster: Cluster,
    urls: tuple[str, str],
    log: Path,
    config: dict[str, object] = SMALL,
    memory: str = "512m",
    more: str = "",
) -> subprocess.Popen[bytes]:
    """The program with its driver here and its tasks on the cluster, to which our code is sent."""
    env = {
        **os.environ,
        "PERSIST_CONFIG": json.dumps(config),
        "PERSIST_SPARK_MASTER": cluster.url,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    blobs, consensus = urls
    command = [sys.executable, str(PROGRAM), "--location", blobs, "--consensus", consensus, "--engine", "spark"]
    conf = log.parent / "spark-defaults"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text(CONF.replace("512m", memory) + more)
    with log.open("wb") as out:
        return subprocess.Popen(command, env={**env, "SPARK_CONF_DIR": str(conf)}, stdout=out, stderr=out)


def test_a_master_without_room_for_an_executor_is_told_in_words(
    cluster: Cluster, urls: tuple[str, str], tmp_path: Path
) -> None:
    assert jobs.reach._exchange(cluster.url.removeprefix("spark://"), b"")[0], "it says nothing by itself"
    assert jobs.reach._ask_master(cluster.url.removeprefix("spark://")) == "", "but answers a question"
    with persist.open(*urls, config=persist.Config(**SMALL), create=True) as client:
        model = write(client, "a")
        started = time.monotonic()
        driver = start(cluster, urls, tmp_path / "log", memory="5g")
        assert driver.wait(150) == 1
        said = (tmp_path / "log").read_text()
        assert f"Spark at {cluster.url} gave this application no executor within" in said, said[-3000:]
        assert time.monotonic() - started < 120
        check(client, "a", model)
        assert client.census("a").writers == 0


def test_a_killed_executor_costs_its_tasks_another_attempt_and_nothing_else(
    cluster: Cluster, urls: tuple[str, str], tmp_path: Path
) -> None:
    with persist.open(*urls, config=persist.Config(**SMALL), create=True) as client:
        models = {"a": write(client, "a", batches=8)}
        before = stored(client, "a")
        driver = start(cluster, urls, tmp_path / "log")
        deadline = time.monotonic() + 300
        while not stored(client, "a") - before:  # until the first task has written its first part
            is_running = driver.poll() is None and time.monotonic() < deadline
            assert is_running, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)  # each look is a listing
        victims = cluster.executors()
        assert victims
        os.kill(victims[0], signal.SIGKILL)
        assert driver.wait(150) == 0, (tmp_path / "log").read_text()[-3000:]
        compacted(client, models)


KILLS = int(os.environ.get("PERSIST_SPARK_KILLS", "1"))
LEASE_MS = 5000


@pytest.mark.timeout(300 + 150 * KILLS)
def test_executors_and_drivers_killed_at_random_leave_one_result_and_orphans(
    cluster: Cluster, urls: tuple[str, str], tmp_path: Path, rng: random.Random
) -> None:
    """Each round appends, starts a compaction, and at a random moment of it kills an executor, then the driver or not.

    What is read is right after each; when all is over, a quiet run compacts, and nothing is left that nobody refers to.
    """
    config = {**SMALL, "lease_ms": LEASE_MS}
    executors = drivers = 0
    with persist.open(*urls, config=persist.Config(**config), create=True) as client:
        model = Model()
        for number in range(KILLS):
            more = write(client, "a", batches=4, seed=number)
            model = Model(model.updates + more.updates, more.upper)
            before, log = stored(client, "a"), tmp_path / f"log{number}"
            driver = start(cluster, urls, log, config)
            try:
                wait_for_parts(client, driver, before, rng.randrange(1, 6))
                executors += kill_an_executor(cluster, rng)
                if number % 2 == 0:
                    time.sleep(rng.uniform(0, 2))
                    drivers += driver.poll() is None
                    driver.kill()
                driver.wait(200)
            except subprocess.TimeoutExpired:
                pytest.fail(log.read_text()[-3000:])
            finally:
                driver.kill()
                driver.wait()
            check_world(client, "a")
            check(client, "a", model)
            if number % 2 == 0:
                time.sleep(LEASE_MS / 1000)  # until then, a killed driver keeps the next one out
        print(
            f"{executors} executors and {drivers} drivers were killed, {len(check_world(client, 'a').orphans)} orphans"
        )
        assert executors + drivers, "no kill struck"
        deadline = time.monotonic() + START_S
        while cluster.executors():  # the master ends them when their driver is gone; until then they may still write
            assert time.monotonic() < deadline, "the executors of a dead driver continue"
            time.sleep(0.2)
        time.sleep(LEASE_MS / 1000 + 0.5)
        client.expire("a")
        assert client.census("a").writers == 0
        assert start(cluster, urls, tmp_path / "last", config).wait(200) == 0, (tmp_path / "last").read_text()[-3000:]
        for _ in range(3):
            client.maintain("a")
        check_swept(client, "a")
        check(client, "a", model)


def wait_for_parts(client: persist.Client, driver: subprocess.Popen[bytes], before: set[str], parts: int) -> None:
    """Until tasks have written so many, or the program is done."""
    deadline = time.monotonic() + 150
    while len(stored(client, "a") - before) < parts and driver.poll() is None:
        assert time.monotonic() < deadline, "no task wrote anything"
        time.sleep(0.05)  # each look is a listing


def kill_an_executor(cluster: Cluster, rng: random.Random) -> int:
    """How many: 0 if none runs (any more)."""
    if not (found := cluster.executors()):
        return 0
    try:
        os.kill(rng.choice(found), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def compacted(client: persist.Client, models: dict[str, Model]) -> None:
    """One batch is left of each, it reads as the model says, and what was garbage or an orphan goes."""
    for name, model in models.items():
        assert client.census(name).batches == 1
        check(client, name, model)
        client.maintain(name)
        client.maintain(name)
        check(client, name, model)
        assert referred(client, name) <= stored(client, name)
