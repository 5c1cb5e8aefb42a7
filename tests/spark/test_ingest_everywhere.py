"""One suite of ingests over local Spark, a standalone cluster and Spark Connect: the same program everywhere.

The shards are on S3 and PostgreSQL. What is in them is judged by what was written into the files.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from persist_lib.location import open_location
from tests import servers
from tests.spark.places import Cluster, ConnectServer, environment
from tests.spark.test_ingest_on_spark import PROGRAM, many
from tests.spark.test_reads_everywhere import client, on_cluster, place  # noqa: F401 - fixtures
from tests.unit.jobs.ingests import check, contents, write_files
from tests.unit.jobs.test_ingest_formats import changes_of, write_changes
from tests.unit.spark.worlds import TINY

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parent.parent
COLUMNS = ["--key", "id:int64 not null", "--value", "name:string"]


def ingests(place: dict[str, str], asked: Sequence[Sequence[str]]) -> tuple[list[int], str]:
    """The exit statuses of these ingests there, and what they printed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "ingesting_program.py")], input=json.dumps(asked), capture_output=True,
        text=True, timeout=400, cwd=ROOT, check=False,
        env=environment(PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(TINY), **place),
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert found, done.stderr[-3000:]
    statuses: list[int] = json.loads(found[0].removeprefix("ANSWERS "))
    return statuses, done.stdout + done.stderr


def test_ingests_do_the_same_everywhere(place: dict[str, str], client: persist.Client, tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "lines", files=5, lines=400)
    changes, table = changes_of(1, 600, "key")
    write_changes(tmp_path / "changes", changes, 6)
    pq.write_table(pa.table({"id": range(3000), "name": [f"p{n}" for n in range(3000)]}), tmp_path / "a.parquet")
    landing = f"s3://{servers.BUCKET}/{os.urandom(8).hex()}/?endpoint={servers.s3_server().url}&path_style=true"
    with open_location(landing, "memory:", create=True) as there:
        for number in range(4):
            there.blob.set(f"{number}.csv", b"id,name\n" + b"".join(b"%d,c%d\n" % (n, number) for n in range(500)))
    (tmp_path / "truncated.json").write_text('{"op": "t"}\n')
    to = ["--location", client.url, "--consensus", client.consensus_url, *COLUMNS]
    lines = [
        *to,
        "--shard",
        "orders",
        "--format",
        "jsonl",
        "--chunk-mib",
        "0.01",
        "--group-mib",
        "0.03",
        str(tmp_path / "lines"),
    ]
    statuses, said = ingests(
        place,
        [
            lines,
            [*lines, "--max-bad", "1000"],
            [
                *to,
                "--shard",
                "cdc",
                "--format",
                "debezium",
                "--chunk-mib",
                "0.01",
                "--group-mib",
                "0.03",
                str(tmp_path / "changes"),
            ],
            [*to, "--shard", "csv", "--format", "csv", "--chunk-mib", "0.003", "--group-mib", "0.01", landing],
            [*to, "--shard", "parquet", "--format", "parquet", str(tmp_path / "a.parquet")],
            [*to, "--shard", "none", "--format", "debezium", str(tmp_path / "truncated.json")],
        ],
    )
    assert statuses == [1, 0, 0, 0, 0, 1], said[-3000:]
    assert "lines were bad, more than --max-bad 0" in said
    assert "op t" in said
    check(client, "orders", rows, bad)
    assert {row["id"]: row["name"] for row in contents(client, "cdc")} == table
    found = Counter({(row["id"], row["name"]): row["_diff"] for row in contents(client, "csv")})
    assert found == Counter((n, f"c{number}") for number in range(4) for n in range(500))
    assert {(row["id"], row["name"], row["_diff"]) for row in contents(client, "parquet")} == {
        (n, f"p{n}", 1) for n in range(3000)
    }
    for shard in client.shards():
        assert client.census(shard).writers == 0, shard
        client.scrub(shard)


def started(place: dict[str, str], client: persist.Client, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """The program on the files of `many`, with its driver here."""
    command = [
        sys.executable, str(PROGRAM), "--location", client.url, "--consensus", client.consensus_url, *COLUMNS,
        "--shard", "orders", "--format", "jsonl", "--engine", "spark", "--max-bad", "1000000",
        "--chunk-mib", "0.05", "--group-mib", "0.1", str(folder),
    ]  # fmt: skip
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(TINY), **place),
        )  # fmt: skip


def wait_until(
    driver: subprocess.Popen[bytes], client: persist.Client, groups: int, log: Path, *, may_be_done: bool
) -> None:
    """Until the shard has so many groups. The program must still be at work then, unless it may find nothing to do."""
    deadline = time.monotonic() + 240
    while groups_in(client) < groups:
        if may_be_done and driver.poll() == 0:
            return
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)


def kill_group(driver: subprocess.Popen[bytes]) -> None:
    """What the driver started continues for a moment, as zombies do; then it ends too."""
    time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def groups_in(client: persist.Client) -> int:
    if (version := client.machine("orders").try_fetch()) is None:
        return 0
    last = version.state.producers.get("ingest/default")
    return 0 if last is None else last.sequence


@pytest.mark.parametrize("where", ["standalone", "connect"])
def test_killed_executors_and_drivers_are_continued_and_each_line_is_there_once(
    where: str, client: persist.Client, tmp_path: Path
) -> None:
    """The first driver is killed, on the cluster with an executor beside it. The second goes on, whatever else dies."""
    rows, bad = many(tmp_path / "in")
    log = tmp_path / "driver.log"
    with ExitStack() as closing:
        cluster: Cluster | None = None
        if where == "standalone":
            cluster = Cluster(tmp_path)
            closing.callback(cluster.stop)
            cluster.wait()
            place = on_cluster(cluster, tmp_path)
        else:
            server = ConnectServer(tmp_path, PERSIST_CONFIG=json.dumps(TINY))
            closing.callback(server.stop)
            server.wait()
            place = {"PERSIST_SPARK_REMOTE": server.url}
        executors = 0
        for is_last in (False, True):
            before = groups_in(client)
            driver = started(place, client, tmp_path / "in", log)
            closing.callback(kill_group, driver)
            # SUBTLE: a driver that is killed a moment late has done all of it, on a quick machine.
            wait_until(driver, client, before + 1, log, may_be_done=is_last)
            if cluster is not None and cluster.executors():
                os.kill(cluster.executors()[0], signal.SIGKILL)
                executors += 1
            if is_last:
                assert driver.wait(240) == 0, log.read_text()[-3000:]
            else:
                driver.send_signal(signal.SIGKILL)
                driver.wait()
        assert executors >= (1 if cluster is not None else 0)
    check(client, "orders", rows, bad)
