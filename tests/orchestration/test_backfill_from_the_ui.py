"""A backfill of compaction over chosen shards, launched as the UI does, through a real daemon and a real Spark."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_shared.yaml_utils import load_yaml_from_path

import persist_lib as persist
from tests.orchestration.dagster_dev import ROOT, DagsterDev, dagster_dev, wait_until
from tests.spark.collections import SMALL, check, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]

LOCATIONS = """query { workspaceOrError { ... on Workspace { locationEntries { name loadStatus
  locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
RUNS = """query { runsOrError { ... on Runs { results { runId status tags { key value } } } } }"""


@pytest.mark.spark
def test_a_backfill_over_chosen_shards_is_one_run_that_compacts_them_and_no_other(
    client: persist.Client, folder: Path, tmp_path: Path
) -> None:
    names = ["a", "b", "c", "left_alone"]
    models = {name: write(client, name, batches=4, rows=1500, seed=i) for i, name in enumerate(names)}
    home = tmp_path / "home"
    env = {
        "PERSIST_LOCATION": f"file:{folder}",
        "PERSIST_CONFIG": json.dumps(SMALL),
        "PERSIST_SPARK_MASTER": "local[2,4]",
    }
    with dagster_dev(home, stopped_workspace(tmp_path), env) as dev:
        wait_until(lambda: is_loaded(dev), 120, "the code location is loaded")
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.add_dynamic_partitions("persist_shards", names)
            backfill = launch(dev, names[:3])
            (run,) = wait_until(lambda: finished(dev), 240, "the backfill's run is done")
            assert run["status"] == "SUCCESS", log_of(instance, run["runId"])
            assert run["tags"]["dagster/backfill"] == backfill
            assert run["tags"]["dagster/asset_partition_range_start"] == "a"
            assert run["tags"]["dagster/asset_partition_range_end"] == "c"
            assert instance.get_materialized_partitions(dg.AssetKey("compaction")) == {"a", "b", "c"}
            assert instance.get_materialized_partitions(dg.AssetKey("census")) == set()
    assert [client.census(name).batches for name in names] == [1, 1, 1, 4]
    for name, model in models.items():
        check(client, name, model)


def test_dagster_finds_the_same_location_by_workspace_and_by_project() -> None:
    (entry,) = load_yaml_from_path(str(ROOT / "workspace.yaml"))["load_from"]  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    assert (
        entry["python_module"]["module_name"] == project["code_location_target_module"] == "orchestration.definitions"
    )
    assert entry["python_module"]["location_name"] == project["code_location_name"]


def stopped_workspace(folder: Path) -> Path:
    """The pipeline without its schedules: they would compact what the test wants to see left alone."""
    (folder / "stopped.py").write_text(
        "from orchestration.definitions import build_definitions\n"
        "from orchestration.settings import Settings\n"
        "defs = build_definitions(Settings(is_running=False))\n"
    )
    workspace = folder / "workspace.yaml"
    file = {"relative_path": "stopped.py", "working_directory": str(ROOT), "location_name": "persist"}
    workspace.write_text(json.dumps({"load_from": [{"python_file": file}]}))
    return workspace


def is_loaded(dev: DagsterDev) -> bool:
    """Whether the code location is there; a failure to load is raised."""
    entries = dev.ask(LOCATIONS)["workspaceOrError"]["locationEntries"]
    for entry in entries:
        error = entry["locationOrLoadError"]
        assert error is None or error["__typename"] != "PythonError", error
    return bool(entries) and all(entry["loadStatus"] == "LOADED" for entry in entries)


def launch(dev: DagsterDev, partitions: list[str]) -> str:
    """What the UI sends for "materialize selected partitions"."""
    config = {"ops": {"shard_duties": {"config": {"engine": "spark"}}}}
    params = {
        "partitionNames": partitions, "assetSelection": [{"path": ["compaction"]}], "runConfigData": config,
        "tags": [{"key": "team", "value": "storage"}], "title": "pay the debts",
    }  # fmt: skip
    answer = dev.ask(BACKFILL, params=params)["launchPartitionBackfill"]
    assert answer["__typename"] == "LaunchBackfillSuccess", answer
    return str(answer["backfillId"])


def finished(dev: DagsterDev) -> list[dict[str, Any]]:
    """All runs, once there are any and all are done."""
    runs = dev.ask(RUNS)["runsOrError"]["results"]
    if not all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in runs):
        return []
    return [{**run, "tags": {tag["key"]: tag["value"] for tag in run["tags"]}} for run in runs]


def log_of(instance: dg.DagsterInstance, run_id: str) -> str:
    """Why a run failed."""
    return "\n".join(entry.user_message or str(entry) for entry in instance.all_logs(run_id))[-4000:]
