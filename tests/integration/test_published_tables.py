"""Published tables by engines that know nothing of Persist: DuckDB's extensions in their own process, and all on S3.

Each is compared, by value, with what the shard reads at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.table import StaticTable

import persist_lib as persist
from bench.published_peers import READERS, installed
from tests.servers import s3_url, use_test_credentials
from tests.unit.maintain.test_publish import evolved

CONFIG = persist.Config(inline_bytes=0, part_bytes=64 * 1024)
SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string", "price": "decimal128(18, 2)"}, unique=True)
DUCKDB = """
import glob, json, sys
sys.path.insert(0, {readers!r})
import duckdb
connection = duckdb.connect(config={{"allow_unsigned_extensions": "true"}})
connection.execute("set autoinstall_known_extensions = false; set autoload_known_extensions = false")
for name in ("httpfs", "avro", "iceberg", "delta"):
    (path,) = glob.glob({readers!r} + f"/duckdb_extension_{{name}}/extensions/*/{{name}}.duckdb_extension")
    connection.execute(f"load '{{path}}'")
for sql in json.loads(sys.stdin.read()):
    found = connection.execute(sql)
print(json.dumps([[str(value) for value in row] for row in found.fetchall()]))
"""
Rows = list[list[str]]
BOTH = pytest.mark.parametrize("as_", ["iceberg", "delta"])


@pytest.fixture(scope="module")
def duckdb() -> Any:
    """What runs SQL in a DuckDB with the extensions, and answers the last rows as texts. Installed when first used."""
    if not installed():
        pytest.skip("DuckDB's extensions are not installed, and cannot be")

    def run(*statements: str) -> Rows:
        done = subprocess.run(
            [sys.executable, "-c", DUCKDB.format(readers=str(READERS))], input=json.dumps(statements), text=True,
            capture_output=True, check=False, timeout=120,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: Rows = json.loads(done.stdout)
        return found

    return run


def life(client: persist.Client, as_: str) -> tuple[dict[int, Rows], Any]:
    """Three publications, a column added between the last two, and upkeep in between."""
    table, seen = client.table("orders", SCHEMA), dict[int, Rows]()
    table.append([{"id": id_, "word": f"w{id_}", "price": Decimal(id_) / 4} for id_ in range(300)])
    for step in range(3):
        table.upsert([{"id": id_, "word": f"{step}"} for id_ in range(step, 400, 3)])
        table.delete([{"id": 250 + step}])
        if step == 2:
            table.evolve(
                persist.Schema(
                    {"id": "int64 not null"}, {**{c.name: c.type for c in SCHEMA.value}, "more": "string"}, unique=True
                )
            )
        published = client.publish("orders", as_)
        seen[published.as_of] = rows(table.read().to_arrow())
        table.maintain()
    return seen, published


def rows(table: pa.Table) -> Rows:
    names = ["id", "word", "price"]
    return sorted([[str(one[name]) for name in names] for one in table.select(names).to_pylist()])


def versions(published: Any, **options: Any) -> dict[int, int]:
    if published.format == "delta":
        return {int(one["persist.as_of"]): one["version"] for one in DeltaTable(published.place, **options).history()}
    found = StaticTable.from_metadata(published.version, **options).metadata.snapshots
    return {int(str(one.summary["persist.as_of"])): one.snapshot_id for one in found if one.summary}


def check_each_time(duckdb: Any, published: Any, seen: dict[int, Rows]) -> None:
    """DuckDB has the rows of each time at the version that was published of it."""
    of = versions(published)
    assert seen.keys() <= of.keys()
    for time, expected in seen.items():
        scan = (
            f"iceberg_scan('{published.place}', snapshot_from_id = {of[time]}::ubigint)"
            if published.format == "iceberg" else f"delta_scan('{published.place}', version = {of[time]})"
        )  # fmt: skip
        assert sorted(duckdb(f"select id, word, price from {scan}")) == expected, time


@BOTH
def test_duckdb_reads_each_published_time(tmp_path: Path, duckdb: Any, as_: str) -> None:
    with persist.open(f"file:{tmp_path}", config=CONFIG) as client:
        seen, published = life(client, as_)
        check_each_time(duckdb, published, seen)
        newest = f"{as_}_scan('{published.place}')"
        assert sorted(duckdb(f"select id, word, price from {newest}")) == seen[published.as_of]
        assert duckdb(f"select count(*), count(more) from {newest}") == [[str(published.rows), "0"]]
        ((found,),) = duckdb(f"select coalesce(sum(price), 0) from {newest} where id < 10 and word like 'w%'")
        assert Decimal(found) == total(seen[published.as_of])
        for entry in list(client.blob.list("")):
            if entry.key.endswith(".parquet"):
                client.blob.delete(entry.key)
        with pytest.raises(RuntimeError, match=r"(?i)no such file|not found|no files"):
            duckdb(f"select sum(id) from {newest}")


@BOTH
@pytest.mark.parametrize("shards", [1, 3])
def test_duckdb_reads_a_collection_through_a_handover(tmp_path: Path, duckdb: Any, as_: str, shards: int) -> None:
    with persist.open(f"file:{tmp_path}", config=CONFIG) as client:
        client.controller().create("orders", SCHEMA, shards=shards, mode="compare_and_append")
        seen, published = life(client, as_)
        client.controller().reshard("orders", 2)
        client.table("orders").upsert([{"id": 1, "word": "after"}])
        published = client.publish("orders", as_)
        seen[published.as_of] = rows(client.table("orders").read().to_arrow())
        client.table("orders").maintain()
        check_each_time(duckdb, published, seen)


def total(found: Rows) -> Decimal:
    prices = [one[2] for one in found if int(one[0]) < 10 and one[1].startswith("w") and one[2] != "None"]
    return sum(map(Decimal, prices), Decimal(0))


@pytest.fixture
def on_s3() -> Iterator[persist.Client]:
    use_test_credentials()
    with persist.open(s3_url("s3+cas"), config=CONFIG) as client:
        yield client


@BOTH
def test_on_s3_all_engines_read_what_the_shard_reads(on_s3: persist.Client, duckdb: Any, as_: str) -> None:
    seen, published = life(on_s3, as_)
    expected = seen[published.as_of]
    endpoint = unquote(on_s3.url.partition("endpoint=")[2].partition("&")[0])
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    options = {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }  # fmt: skip
    properties = {
        "s3.endpoint": endpoint,
        "s3.access-key-id": key,
        "s3.secret-access-key": secret,
        "s3.region": "us-east-1",
    }
    assert published.place.startswith("s3://")
    if as_ == "iceberg":
        table = StaticTable.from_metadata(published.version, properties=properties)
        assert rows(table.scan().to_arrow()) == expected
        assert rows(pl.scan_iceberg(table, reader_override="pyiceberg").collect().to_arrow()) == expected
    else:
        assert rows(DeltaTable(published.place, storage_options=options).to_pyarrow_table()) == expected
        assert rows(pl.read_delta(published.place, storage_options=options).to_arrow()) == expected
    named = (
        f"create secret (type s3, key_id '{key}', secret '{secret}', region 'us-east-1', "
        f"endpoint '{endpoint.partition('//')[2]}', url_style 'path', use_ssl false)"
    )
    assert sorted(duckdb(named, f"select id, word, price from {as_}_scan('{published.place}')")) == expected
    on_s3.withdraw("orders", as_)
    left = [one.key for one in on_s3.blob.list("-published/")]
    assert all("/_parts/" in key for key in left)


def test_duckdb_reads_an_evolved_table_by_the_mapping_of_names(tmp_path: Path, duckdb: Any) -> None:
    with persist.open(f"file:{tmp_path}", config=CONFIG) as client:
        seen: dict[int, Rows] = {}
        for _, published in evolved(client):
            expected = client.table("s").read().to_arrow()
            snapshot = StaticTable.from_metadata(published.version).metadata.current_snapshot_id
            assert snapshot is not None
            columns = (column.to_pylist(maps_as_pydicts="strict") for column in expected.columns)
            seen[snapshot] = sorted(map(list, zip(*(map(str, column) for column in columns), strict=True)))
        for snapshot, rows in seen.items():
            scan = f"iceberg_scan('{published.place}', snapshot_from_id = {snapshot}::ubigint)"
            assert sorted(duckdb(f"select * from {scan}")) == rows
