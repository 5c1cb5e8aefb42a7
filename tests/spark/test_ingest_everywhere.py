"""One suite of ingests over local Spark, a standalone cluster and Spark Connect: the same program everywhere.

The shards are on S3 and PostgreSQL. What is in them is judged by what was written into the files.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from persist_lib.location import open_location
from tests import servers
from tests.spark.places import answers, started
from tests.spark.test_reads_everywhere import client, place  # noqa: F401 - fixtures
from tests.unit.jobs.ingests import check, contents, write_files
from tests.unit.jobs.test_ingest_formats import changes_of, write_changes

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
COLUMNS = ["--key", "id:int64 not null", "--value", "name:string"]


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
    cut = ["--chunk-mib", "0.01", "--group-mib", "0.03"]
    lines = [*to, "--shard", "orders", "--format", "jsonl", *cut, str(tmp_path / "lines")]
    asked = [
        lines,
        [*lines, "--max-bad", "1000"],
        [*to, "--shard", "cdc", "--format", "debezium", *cut, str(tmp_path / "changes")],
        [*to, "--shard", "csv", "--format", "csv", "--chunk-mib", "0.003", "--group-mib", "0.01", landing],
        [*to, "--shard", "parquet", "--format", "parquet", str(tmp_path / "a.parquet")],
        [*to, "--shard", "none", "--format", "debezium", str(tmp_path / "truncated.json")],
    ]
    statuses, said = answers(started("ingesting_program.py", place, asked))
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
