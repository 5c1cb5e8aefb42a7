"""A stream from a shard into a shard on a standalone cluster, of which everything is killed at random.

Executors (JVMs), their Python workers, the Python workers of the driver, and the driver, which is started again from
the checkpoint. The data is on S3 and PostgreSQL; the source keeps three times of history, so the stream needs its hold.

    PERSIST_CLUSTER_KILLS=50 pytest tests/spark/test_streams_killed_on_a_cluster.py      # as `make cluster-kills` does
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.relation.stage import LEASE_S
from persist_lib.testing import check_swept, check_world
from tests import servers
from tests.spark.killing import CONFIG, SCHEMA, Driver, fed, kill_one
from tests.spark.places import CONF, Cluster
from tests.torture.roles import open_ahead
from tests.unit.maintain.test_maintain import settle

KINDS = ("executor", "python worker", "driver")
KILLS = int(os.environ.get("PERSIST_CLUSTER_KILLS", len(KINDS)))
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300 + 60 * KILLS),
    pytest.mark.skipif("PERSIST_CLUSTER_KILLS" not in os.environ, reason="takes many minutes: make cluster-kills"),
]
SPECULATION = """
spark.speculation true
spark.speculation.interval 10ms
spark.speculation.quantile 0.1
spark.speculation.multiplier 1.01
spark.speculation.minTaskRuntime 1ms
"""
servers.use_test_credentials()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as closing:
        (tmp_path / "cluster").mkdir()
        started = Cluster(tmp_path / "cluster")
        closing.callback(started.stop)
        started.wait()
        yield started


@pytest.mark.parametrize("variant", ["speculation", "plain"] if len(KINDS) < KILLS else ["speculation"])
def test_a_stream_on_a_cluster_delivers_each_update_once(
    cluster: Cluster, tmp_path: Path, variant: str, rng: random.Random
) -> None:
    seed = rng.getrandbits(32)
    name = f"t{os.urandom(8).hex()}"
    urls = servers.s3_server().location(name), servers.postgres_at(persist_schema=name)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(CONF + (SPECULATION if variant == "speculation" else ""))
    place = {"PERSIST_SPARK_MASTER": cluster.url, "SPARK_CONF_DIR": str(tmp_path / "conf")}
    where = {"location": urls[0], "consensus": urls[1]}
    asked: dict[str, Any] = {
        "read": {**where, "table": "source", "changes": "true", "hold": "killed", "max_updates": "3000"},
        "write": {**where, "table": "sink", "key": "id", "query": "killed"},
        "checkpoint": str(tmp_path / "checkpoint"), "drains": False, "tasks": 4,
    }  # fmt: skip
    log, killed = tmp_path / "log", Counter[str]()
    with persist.open(*urls, config=persist.Config(**CONFIG), create=True) as client:
        client.open_writer("source", SCHEMA).close()
        client.set_retention("source", 3)
        with fed(urls, None, seed, every_s=0.5) as feeding:
            driver = Driver(asked, log, place)
            try:
                for number in range(KILLS):
                    driver.wait_for_epochs(driver.epochs + 1)
                    time.sleep(rng.uniform(0, 1.5))
                    kind = KINDS[number] if number < len(KINDS) else rng.choice([*KINDS, "planner", "executors"])
                    killed[kind] += kill(kind, driver, cluster, rng)
                    if not driver.is_alive:  # it was killed, or a task was lost as often as Spark tries
                        killed["all drivers"] += 1
                        driver.kill()
                        driver = Driver(asked, log, place)
                    for shard in client.shards():
                        client.maintain(shard)
                driver.wait_for_epochs(driver.epochs + 1)
            finally:
                driver.kill()
        assert "killed" in client.inspect("source").state.holds
        last = Driver({**asked, "read": {**asked["read"], "max_updates": "100000"}, "drains": True}, log, place)
        try:
            assert last.wait(300) == 0, log.read_text()[-4000:]
        finally:
            last.kill()
        print(f"seed {seed}: killed {dict(killed)}, {len(check_world(client, 'sink').orphans)} orphans")
        assert all(killed[kind] for kind in KINDS), f"no kill struck: {killed}"
        expected = Counter({row: diff for row, diff in feeding.expected.items() if diff})
        assert expected
        assert contents(client) == expected
    while cluster.executors():
        time.sleep(0.1)  # until the master has ended them, they may still write
    with open_ahead(" ".join(urls), rng, 3 * LEASE_S) as later:
        later.roll_up("sink", force=True)  # a rollup of somebody who died before he linked it waits for a newer one
        settle(later, "sink")
        check_swept(later, "sink")
        assert contents(later) == expected


def kill(kind: str, driver: Driver, cluster: Cluster, rng: random.Random) -> bool:
    """End something of this kind; whether there was one."""
    match kind:
        case "executor":
            return kill_one(cluster.executors(), rng)
        case "executors":
            return sum(kill_one([pid], rng) for pid in cluster.executors()) > 0
        case "python worker":
            return kill_one(cluster.python_workers(), rng)
        case "planner":
            return driver.kill_a_worker(rng)
        case _:
            driver.kill(workers=rng.random() < 0.5)
            return True


def contents(client: persist.Client) -> Counter[tuple[int, str]]:
    with client.open_reader("sink") as read:
        return Counter(
            {(row["id"], row["word"]): row["_diff"] for row in read.snapshot(diff=True).to_arrow().to_pylist()}
        )
