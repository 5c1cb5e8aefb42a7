"""dbt over our catalog: a source, a table, and a table into which each run merges what is new."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from bench.peer import install
from jobs.java import find_java_home

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
DBT = ROOT / "build/dbt"
SCHEMA = persist.Schema({"id": "int64 not null"}, {"state": "string", "cents": "int64"}, times="ms", unique=True)


def installed() -> bool:
    """Whether dbt is in its folder; installs it, if that can be."""
    if (DBT / "dbt").is_dir():
        return True
    try:
        install(DBT, ROOT / "requirements/dbt.txt")
    except subprocess.CalledProcessError:
        return False
    return True


def run(project: Path, url: str) -> None:
    """One run of dbt, in a process of its own."""
    environment = os.environ | {
        "JAVA_HOME": find_java_home(), "PYSPARK_PYTHON": sys.executable, "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "dbt_program.py"), str(project), url, str(DBT)], cwd=project,
        capture_output=True, text=True, check=False, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def rows(client: persist.Client, name: str) -> list[dict[str, Any]]:
    return sorted(client.table(name).read().to_pylist(), key=repr)


def test_dbt_makes_a_table_and_merges_into_another_one(client: persist.Client, tmp_path: Path) -> None:
    if not installed():
        pytest.skip("not run: dbt is not installed, and cannot be")
    project = tmp_path / "shop"
    shutil.copytree(HERE / "dbt", project)
    client.controller().create("raw/orders", SCHEMA, mode="compare_and_append")
    orders = client.table("raw/orders")
    orders.append([
        {"id": 1, "state": "new", "cents": 10}, {"id": 2, "state": "paid", "cents": 20},
        {"id": 3, "state": "new", "cents": 5},
    ])  # fmt: skip
    run(project, client.url)
    assert rows(client, "mart/by_state") == [{"state": "new", "cents": 15}, {"state": "paid", "cents": 20}]
    assert rows(client, "mart/recent") == rows(client, "raw/orders")
    first = client.table("mart/recent").describe().upper
    orders.upsert([{"id": 2, "state": "sent", "cents": 21}, {"id": 4, "state": "new", "cents": 1}])
    run(project, client.url)
    assert rows(client, "mart/by_state") == [{"state": "new", "cents": 16}, {"state": "sent", "cents": 21}]
    assert rows(client, "mart/recent") == rows(client, "raw/orders")
    before = client.table("mart/recent").read((first.time or 1) - 1).to_pylist()
    assert {"id": 2, "state": "paid", "cents": 20} in before, "its history has what was merged over"
