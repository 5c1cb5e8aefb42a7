"""One suite of reads over local Spark, a standalone cluster and Spark Connect: one program, told by its environment.

The data is on S3 and PostgreSQL, whose credentials come from the environment of the driver and the executors.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from tests import servers
from tests.spark.places import CONF, Cluster, ConnectServer, answers, started
from tests.unit.spark.worlds import SCHEMA, TINY, World

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
servers.use_test_credentials()


@pytest.fixture(params=["local", "standalone", "connect"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program that uses Spark there."""
    with ExitStack() as closing:
        if request.param == "local":
            yield {"PERSIST_SPARK_MASTER": "local[2,4]", "PERSIST_SPARK_DRIVER_MEMORY": "512m"}
        elif request.param == "standalone":
            cluster = Cluster(tmp_path)
            closing.callback(cluster.stop)
            cluster.wait()
            yield on_cluster(cluster, tmp_path)
        else:
            server = ConnectServer(tmp_path, PERSIST_CONFIG=json.dumps(TINY))
            closing.callback(server.stop)
            server.wait()
            yield {"PERSIST_SPARK_REMOTE": server.url}


def on_cluster(cluster: Cluster, folder: Path) -> dict[str, str]:
    """The environment of a program that uses this cluster, with an executor of one core on each of its workers."""
    conf = folder / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(CONF)
    return {"PERSIST_SPARK_MASTER": cluster.url, "SPARK_CONF_DIR": str(conf)}


@pytest.fixture
def client() -> Iterator[persist.Client]:
    name = os.urandom(8).hex()
    blobs = servers.s3_url()
    log = servers.postgres_url()
    urls = blobs, f"{log}{'&' if '?' in log else '?'}persist_schema=t{name}"
    with persist.open(*urls, config=persist.Config(**TINY)) as opened:
        yield opened


def multiset(rows: list[list[str]]) -> Counter[tuple[str, ...]]:
    return Counter(map(tuple, rows))


def texts(*values: object) -> tuple[str, ...]:
    return tuple(map(str, values))


def test_reads_are_the_librarys_wherever_spark_runs(
    place: dict[str, str], client: persist.Client, tmp_path: Path
) -> None:
    world, rng = World(client), random.Random(11)
    for _ in range(6):
        world.append(rng, 400, times=2)
    client.compact("orders")
    world.append(rng, 400, times=2)
    with client.open_writer("rows", SCHEMA) as writer:
        writer.compare_and_append([{"a": i, "b": "x", "v": i, "_diff": 1 + i % 2} for i in range(10)], 0, 1)
    where = {"location": client.url, "consensus": client.consensus_url}
    shard = {**where, "table": "orders", "partition_bytes": "65536"}
    place_of = ", ".join(f"{name} '{value}'" for name, value in where.items())
    scan: dict[str, Any] = {"scan": "orders", "options": {**where, "partition_bytes": 65536, "diff": True}}
    stream = {"options": {**shard, "changes": "true", "max_times": "3"}, "to": str(tmp_path / "out")}
    questions: list[dict[str, Any]] = [
        {"options": {**shard, "diff": "true"}},
        {
            "options": {**shard, "diff": "true", "as_of": "4", "pushdown": "true"},
            "where": "a > 10 AND a <= 30 AND b IN ('x', 'yy') AND v <> 2",
        },
        {"options": {**shard, "diff": "true", "as_of": "7", "columns": "v, a"}},
        {"options": {**shard, "from": "3", "to": "9"}},
        {"options": {**shard, "from": "3"}, "where": "_time = 8 OR b IS NULL"},
        {"options": {**where, "table": "rows"}},
        {"sql": f"CREATE TEMPORARY VIEW some USING persist OPTIONS (table 'rows', as_of 0, {place_of})"},
        {"sql": "SELECT sum(a) FROM some WHERE a < 5"},
        {"options": {**shard, "as_off": "4"}},
        {"options": {**where, "table": "rows"}, "twice": ["a < 3", "a > 7"]},
        {"options": {**shard, "diff": "true", "filter": "a > 10 AND b = 'x'"}},
        {**stream, "checkpoint": str(tmp_path / "checkpoint")},
        scan,
        {**scan, "options": {**scan["options"], "as_of": 7, "columns": ["v", "a"], "filter": "a > 10"}},
    ]
    found, _ = answers(started("reading_program.py", place, questions))
    whole = world.contents(13)
    assert multiset(found[0]) == Counter({texts(*data, n): 1 for data, n in whole.items()})
    kept = {
        (a, b, v): n
        for (a, b, v), n in world.contents(4).items()
        if 10 < a <= 30 and b in {"x", "yy"} and v is not None and v != 2
    }
    assert multiset(found[1]) == Counter({texts(*data, n): 1 for data, n in kept.items()})
    assert multiset(found[2]) == Counter(texts(v, a, n) for (a, _, v), n in world.contents(7).items())
    assert multiset(found[3]) == Counter(texts(*data, at, n) for (data, at), n in world.changes(3, 9).items())
    some = {(data, at): n for (data, at), n in world.changes(3, 13).items() if at == 8 or data[1] is None}
    assert multiset(found[4]) == Counter(texts(*data, at, n) for (data, at), n in some.items())
    assert multiset(found[5]) == Counter({texts(i, "x", i): 1 + i % 2 for i in range(10)})
    assert found[6] == []
    assert found[7] == [["14"]], "0 + 1 + 1 + 2 + 3 + 3 + 4"
    assert "Did you mean as_of" in found[8]
    assert found[9] == [4, 15, 4 + 3, 3], "a frame is not of the filters of its first query"
    few = {data: n for data, n in whole.items() if data[0] > 10 and data[1] == "x"}
    assert multiset(found[10]) == Counter({texts(*data, n): 1 for data, n in few.items()})
    assert found[11] is None, found[11]
    assert multiset(found[12]) == multiset(found[0])
    assert multiset(found[13]) == Counter(texts(v, a, n) for (a, _, v), n in world.contents(7).items() if a > 10)
    out = pq.read_table(tmp_path / "out").to_pylist()
    contents: Counter[Any] = Counter()
    for row in out:
        contents[row["a"], row["b"], row["v"]] += row["_diff"]
    assert {data: n for data, n in contents.items() if n} == whole
    (hold,) = client.inspect("orders").state.holds.values()
    assert hold.opaque.startswith(b"Spark stream")
