"""A backfill of compaction over chosen shards, launched as the UI does, through a real daemon and a real Spark."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from dagster_shared.yaml_utils import load_yaml_from_path

import persist_lib as persist
from tests.orchestration.dagster_dev import ROOT, dagster_dev, workspace_of
from tests.spark.collections import SMALL, check, damage_a_part, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]

CONFIG = {**SMALL, "spark_above_bytes": 20_000}
"""A shard of some thousand updates goes to Spark, and a small one does not."""


@pytest.mark.spark
def test_a_backfill_over_scattered_shards_is_one_run_that_compacts_them_and_no_other(
    client: persist.Client, folder: Path, tmp_path: Path
) -> None:
    names = [f"s{number:02}" for number in range(60)]
    chosen, large = names[1::3], names[1:8:3]
    models = {name: write(client, name, batches=4, rows=1500 if name in large else 3) for name in names}
    env = {
        "PERSIST_LOCATION": f"file:{folder}",
        "PERSIST_CONFIG": json.dumps(CONFIG),
        "PERSIST_SPARK_MASTER": "local[2,4]",
    }
    with dagster_dev(tmp_path / "home", workspace_of(tmp_path), env) as dev:
        dev.wait_loaded()
        dev.add_partitions("persist_shards", names)
        damaged, fine = names[20], names[23]
        damage_a_part(folder, damaged)
        backfill, failing = dev.backfill(["compaction"], chosen), dev.backfill(["compaction"], [damaged, fine])
        assert dev.wait_backfill(backfill) == "COMPLETED_SUCCESS", [dev.why(one.id) for one in dev.runs()]
        (run,) = dev.runs(tags={"dagster/backfill": backfill})
        assert run.status == "SUCCESS", dev.why(run.id)
        assert dev.wait_backfill(failing) == "COMPLETED_FAILED"
        (failed,) = dev.runs(tags={"dagster/backfill": failing})
        assert failed.status == "FAILURE"
        colours = dev.partitions("compaction")
        assert colours["materialized"] == {*chosen, fine}
        assert colours["failed"] == {damaged}
        assert dev.partitions("census")["materialized"] == set()
        compacted = {*chosen, fine}
        assert {name: client.census(name).batches for name in names} == {
            name: 1 if name in compacted else 4 for name in names
        }
        for name in [*large, names[4], names[5]]:
            check(client, name, models[name])


def test_dagster_finds_the_same_location_by_workspace_and_by_project() -> None:
    (entry,) = load_yaml_from_path(str(ROOT / "workspace.yaml"))["load_from"]  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    assert (
        entry["python_module"]["module_name"] == project["code_location_target_module"] == "orchestration.definitions"
    )
    assert entry["python_module"]["location_name"] == project["code_location_name"]
