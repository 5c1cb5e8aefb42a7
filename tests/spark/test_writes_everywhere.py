"""One suite of writes over local Spark, a standalone cluster and Spark Connect: the same program everywhere.

The data is on S3 and PostgreSQL. What is in the shards is judged by the library's own reads.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.testing import contents_of
from tests.spark.places import CONF, Cluster, answers, started
from tests.spark.test_reads_everywhere import client, place  # noqa: F401 - fixtures

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def contents(client: persist.Client, shard: str) -> Counter[tuple[Any, ...]]:
    with client.open_reader(shard) as read:
        found = read.snapshot(diff=True).to_arrow().to_pylist()
    return Counter({tuple(value for name, value in row.items() if name != "_diff"): row["_diff"] for row in found})


def test_writes_do_the_same_everywhere(
    place: dict[str, str],
    client: persist.Client,
    tmp_path: Path,
) -> None:
    to = {"location": client.url, "consensus": client.consensus_url, "table": "w"}
    to_all = {**{name: to[name] for name in ("location", "consensus")}, "table": "all"}
    rows = "SELECT id, concat('w', id % 7) AS word FROM range(3000)"
    changed = "SELECT id, 'new' AS word, id % 2 = 0 AS gone FROM range(2990, 3010)"
    writes: list[dict[str, Any]] = [
        {"sql": rows, "options": to},
        {"sql": rows, "options": {**to, "key": "id", "unique": "true"}},
        {"sql": rows, "options": to},
        {"sql": changed, "options": {**to, "upsert": "true", "deletes": "gone"}},
        {"sql": "SELECT id, word FROM VALUES (1L, 'a'), (1L, 'b') AS t(id, word)", "options": {**to, "upsert": "true"}},
        {"sql": rows, "options": {**to, "table": "o", "key": "id"}, "mode": "overwrite"},
        {"sql": rows + " WHERE id < 5", "options": {**to, "table": "o"}, "mode": "overwrite", "tasks": 1},
        {"sql": rows, "options": to, "mode": "ignore"},
        {
            "stream": {**to, "changes": "true", "hold": "copy"}, "checkpoint": str(tmp_path / "checkpoint"),
            "options": {**to, "table": "copy", "key": "id", "query": "copy"},
        },
        {
            "stream": {**to, "changes": "true", "hold": "copy"}, "checkpoint": str(tmp_path / "other"),
            "options": {**to, "table": "copy", "key": "id", "query": "copy"},
        },
        {"sql": rows, "options": {**to_all, "key": "id", "shards": "3"}},
        {"sql": changed, "options": {**to_all, "upsert": "true", "deletes": "gone"}},
    ]  # fmt: skip
    found, _ = answers(started("writing_program.py", place, writes))
    said = [next((word for word in EXPECTED if word in answer), answer[:300]) for answer in found]
    assert said == [
        "there is no table", "", "the schema says unique", "", "different rows", "", "", "UNSUPPORTED", "",
        "checkpoint was deleted", "", "",
    ]  # fmt: skip
    base = {(id_, f"w{id_ % 7}") for id_ in range(2990)} | {(id_, "new") for id_ in range(2991, 3010, 2)}
    assert contents(client, "w") == Counter(dict.fromkeys(base, 1))
    with client.controller() as controller, controller.open_reader("all") as read:
        assert contents_of(read.snapshot(diff=True).to_arrow()) == Counter(dict.fromkeys(base, 1))
    assert contents(client, "o") == Counter({(id_, f"w{id_ % 7}"): 1 for id_ in range(5)})
    assert contents(client, "copy") == contents(client, "w")
    for shard in ("w", "o"):
        assert not client.machine(shard).fetch().state.writers
    client.release_hold("w", "copy", expected=client.inspect("w").state.holds["copy"].opaque)
    for shard in ("w", "o", "copy"):
        client.scrub(shard)


EXPECTED = ("UNSUPPORTED", "different rows", "checkpoint was deleted", "the schema says unique", "there is no table")


def test_a_write_goes_on_when_an_executor_is_killed(client: persist.Client, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.wait()
        conf = tmp_path / "conf"
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text(
            f"{CONF}spark.speculation true\nspark.speculation.multiplier 1.1\nspark.speculation.quantile 0.3\n"
        )
        slow = (
            "SELECT id, concat('w', coalesce(reflect('java.lang.Thread', 'sleep', 2L), '')) AS word "
            "FROM range(0, 6000, 1, 6)"
        )
        to = {"location": client.url, "consensus": client.consensus_url, "table": "w", "key": "id"}
        place = {"PERSIST_SPARK_MASTER": cluster.url, "SPARK_CONF_DIR": str(conf)}
        process = started("writing_program.py", place, [{"sql": slow, "options": to, "tasks": 6}])
        killed: list[int] = []

        def kill() -> None:
            while process.poll() is None and not killed:
                staged = list(client.blob.list("w/"))
                if staged and (running := cluster.executors()):
                    os.kill(running[0], signal.SIGKILL)
                    killed.append(running[0])
                time.sleep(0.05)

        threading.Thread(target=kill, daemon=True).start()
        assert answers(process)[0] == [""]
    finally:
        cluster.stop()
    assert killed
    with client.open_reader("w") as read:
        table = read.snapshot(diff=True).to_arrow()
    assert (table.num_rows, set(table.column("_diff").to_pylist())) == (6000, {1})
    assert len(client.machine("w").fetch().state.trace) == 1
    client.scrub("w")
    client.audit_orphans("w")
    objects = {entry.key for entry in client.blob.list("w/")}
    assert len([key for key in objects if "rollup" not in key]) == len(client.machine("w").state.trace[0].keys)
