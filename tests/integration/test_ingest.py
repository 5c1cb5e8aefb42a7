"""The program `jobs/ingest.py` as its users run it: by command, on S3, killed at any moment, two at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from tests import servers
from tests.circles import is_day
from tests.unit.jobs.ingests import check, contents, write_files

PROGRAM = Path(__file__).parent.parent.parent / "jobs" / "ingest.py"
SCHEMA = ["--key", "id:int64 not null", "--value", "name:string"]
SMALL = ["--chunk-mib", "0.01", "--group-mib", "0.02", "--engine", "local", "--threads", "2", "--max-bad", "1000000"]
servers.use_test_credentials()


def start(location: str, *arguments: str, shard: str = "orders") -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "--location", location, "--shard", shard, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )


def run(location: str, *arguments: str, status: int = 0, shard: str = "orders") -> str:
    process = start(location, *arguments, shard=shard)
    out, err = process.communicate(timeout=100)
    assert process.returncode == status, out + err
    return out + err


def test_a_dry_run_changes_nothing_and_says_what_would_be_read(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    location = f"file:{tmp_path / 'data'}"
    said = run(location, "--format", "jsonl", "--infer", "--key", "id", str(tmp_path / "in"), "--dry-run")
    assert "orders would be created: (id: int64 not null) -> (name: string)" in said
    assert "3 files in the inputs, of which 3 are new" in said
    assert "'name': '0-0'" in said
    assert not (tmp_path / "data").exists()
    run(location, "--format", "jsonl", *SCHEMA, *SMALL, str(tmp_path / "in"))
    assert "of which 0 are new" in run(location, "--format", "jsonl", str(tmp_path / "in"), "--dry-run")


def test_its_exit_status_says_whether_too_many_lines_were_bad(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    location = f"file:{tmp_path / 'data'}"
    said = run(location, "--format", "jsonl", *SCHEMA, str(tmp_path / "in"), "--max-bad", str(len(bad) - 1), status=1)
    assert f"{len(bad)} lines were bad" in said
    with persist.open(location) as client:
        check(client, "orders", rows, bad)
    assert "files=0" in run(location, "--format", "jsonl", str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "jsonl", "IN"], "declare it with --key"),
        (["--format", "jsonl", *SCHEMA, "IN/none"], "no such file"),
        (["--format", "jsonl", *SCHEMA, "--names", "a", "IN"], "--names is for --format csv"),
        (["--format", "jsonl", *SCHEMA, "--column", "nam=x", "IN"], "no such column"),
        (["--format", "jsonl", *SCHEMA, "--epoch", "id=weeks", "IN"], "--epoch takes"),
        (["--format", "csv", *SCHEMA, "--encoding", "utf-16", "IN/0.jsonl"], "iconv"),
        (["--format", "csv", *SCHEMA, "--names", "id,name", "IN/0.jsonl"], "the options are probably wrong"),
        (["--format", "jsonl", *SCHEMA, "--until", "5", "IN"], "belong together"),
        (["--format", "jsonl", *SCHEMA, "--max-bad", "-1", "IN"], "--max-bad: must be 0 or more, got -1"),
        (["--format", "jsonl", *SCHEMA, "--threads", "0", "IN"], "--threads: must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, arguments: list[str], says: str) -> None:
    write_files(tmp_path / "in")
    location = f"file:{tmp_path / 'data'}"
    given = [argument.replace("IN", str(tmp_path / "in")) for argument in arguments]
    process = start(location, *given)
    out, err = process.communicate(timeout=100)
    assert process.returncode in (1, 2), out
    assert says in err
    assert "Traceback" not in err
    with persist.open(location) as client:
        assert client.shards() == []


def version_of(client: persist.Client) -> int:
    """How many transitions the data shard has had; 0 where it is not there yet."""
    found = client.machine("orders").try_fetch()
    return 0 if found is None else found.seqno


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_any_moment_and_run_again_it_takes_each_line_once(tmp_path: Path) -> None:
    rng = random.Random(7)
    rows, bad = write_files(tmp_path / "in", files=4 if is_day() else 6, lines=2000)
    location = f"file:{tmp_path / 'data'}"
    arguments = ["--format", "jsonl", *SCHEMA, *SMALL, str(tmp_path / "in")]
    kills = 0
    is_done = False
    with persist.open(location) as client:
        while not is_done:
            # By what it has done, not by a clock: so it is killed as often on a fast machine as on a slow one.
            last = version_of(client) + rng.randrange(4)
            processes = [start(location, *arguments) for _ in range(rng.choice((1, 1, 2)))]
            while version_of(client) <= last and any(process.poll() is None for process in processes):
                time.sleep(rng.uniform(0.001, 0.02))
            still = [process for process in processes if process.poll() is None]
            for process in still:
                process.kill()
            kills += len(still)
            for process in processes:
                out, err = process.communicate(timeout=60)
                assert process in still or process.returncode == 0, out + err
            is_done = not still
        print(kills, "kills")
        assert kills > (1 if is_day() else 3)
        run(location, *arguments)
        check(client, "orders", rows, bad)


def test_inputs_and_shards_may_both_be_on_s3_alone(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    server = servers.s3_server()
    s3 = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    for path in sorted((tmp_path / "in").iterdir()):
        s3.upload_file(str(path), servers.BUCKET, f"landing/2026/{path.name}")
    s3.put_object(Bucket=servers.BUCKET, Key="landing/2026/_SUCCESS", Body=b"")
    location = server.location("ingest", "s3+cas")
    source = f"s3://{servers.BUCKET}/landing/?endpoint={server.url}&path_style=true"
    run(location, "--format", "jsonl", *SCHEMA, *SMALL, source)
    there = {(f"s3://{servers.BUCKET}/landing/2026/{Path(path).name}", line) for path, line in bad}
    with persist.open(location) as client:
        check(client, "orders", rows, there)
    s3.put_object(Bucket=servers.BUCKET, Key="landing/2026/0.jsonl", Body=b'{"id": 1, "name": "new"}')
    assert "changed" in run(location, "--format", "jsonl", *SMALL, source, status=1).lower()
    pattern = f"s3://{servers.BUCKET}/landing/*/0.jsonl?endpoint={server.url}&path_style=true"
    run(location, "--format", "jsonl", *SMALL, "--changed", "take", pattern)
    with persist.open(location) as client:
        assert Counter((row["id"], row["name"]) for row in contents(client, "orders"))[1, "new"] == 1


def test_parquet_on_s3_is_read_by_ranges(tmp_path: Path) -> None:
    server = servers.s3_server()
    table = pa.table({"id": list(range(5000)), "name": [f"n{number}" for number in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    s3 = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    s3.upload_file(str(tmp_path / "a.parquet"), servers.BUCKET, "parquet/a.parquet")
    source = f"s3://{servers.BUCKET}/parquet/?endpoint={server.url}&path_style=true"
    run(f"file:{tmp_path / 'data'}", "--format", "parquet", *SCHEMA, *SMALL, source)
    with persist.open(f"file:{tmp_path / 'data'}") as client:
        found: list[dict[str, Any]] = contents(client, "orders")
        assert [row["id"] for row in found] == list(range(5000))
        info = [json.loads(row["info"]) for row in contents(client, "orders_files") if row["kind"] == "run"]
        assert len(info) == 1
