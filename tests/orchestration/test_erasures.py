"""Erasing keys by Dagster: a dry run unless it is said, a receipt as metadata, and red while something is left."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from tests.orchestration.runs import execute, why

pytestmark = pytest.mark.dagster
SECRET = b"7f3c9d2e8b1a4056planted"
SCHEMA = persist.Schema({"id": "int64 not null"}, {"mail": "string"}, times="ms")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with persist.open(tmp_path / "data") as client:
        client.table("people", SCHEMA).append([{"id": 1, "mail": SECRET.decode()}, {"id": 2, "mail": "b"}])
    (tmp_path / "keys.jsonl").write_text(json.dumps({"id": 1}))
    return tmp_path


def run(folder: Path, instance: dg.DagsterInstance, table: str = "people", **more: object) -> dg.ExecuteInProcessResult:
    config = {"table": table, "keys": str(folder / "keys.jsonl"), **more}
    return execute(folder / "data", instance, "erase", "erasing_of_keys", config, config={})


def has_it(folder: Path) -> bool:
    return any(SECRET in path.read_bytes() for path in (folder / "data").rglob("*") if path.is_file())


def test_it_is_a_dry_run_unless_it_is_said(folder: Path, instance: dg.DagsterInstance) -> None:
    done = run(folder, instance)
    assert done.success
    (seen,) = done.get_asset_observation_events()
    assert seen.asset_observation_data.asset_observation.metadata["left"].value != 0
    assert not done.get_asset_materialization_events()
    assert has_it(folder)


def test_what_is_held_fails_and_what_is_erased_is_green(folder: Path, instance: dg.DagsterInstance) -> None:
    with persist.open(folder / "data") as client:
        client.table("people").set_hold("audit", 0)
    held = run(folder, instance, dry_run=False)
    assert "hold audit" in why(held)
    with persist.open(folder / "data") as client:
        client.table("people").release_hold("audit")
    done = run(folder, instance, dry_run=False)
    (made,) = done.get_asset_materialization_events()
    assert made.materialization.metadata["left"].value == 0
    assert not has_it(folder)
    assert SECRET not in json.dumps([str(one) for one in instance.all_logs(done.run_id)]).encode()


def test_a_table_that_is_not_there_fails_with_words(folder: Path, instance: dg.DagsterInstance) -> None:
    failed = run(folder, instance, "poeple")
    assert "poeple" in why(failed)
