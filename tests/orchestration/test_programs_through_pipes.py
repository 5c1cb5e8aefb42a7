"""jobs/compact.py as spark-submit runs it, started by Dagster Pipes: the way onto a cluster."""

import json
import sys
from pathlib import Path

import dagster as dg
import pytest

import persist_lib as persist
from jobs.java import find_java_home
from tests.orchestration.dagster_dev import ROOT
from tests.spark.collections import SMALL, check, damage_a_part, write

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(300)]


def test_spark_submit_under_pipes_reports_figures_and_fails_naming_the_poisoned_shard(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    models = {name: write(client, name, batches=4, rows=1500, seed=i) for i, name in enumerate(("a", "b", "bad"))}
    damage_a_part(folder, "bad")
    submit = Path(sys.executable).with_name("spark-submit")
    env = {"PERSIST_CONFIG": json.dumps(SMALL), "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": find_java_home()}

    @dg.asset
    def compacted_elsewhere(context: dg.AssetExecutionContext, pipes: dg.PipesSubprocessClient):
        command = [str(submit), "--master", "local[2,4]", str(ROOT / "jobs" / "compact.py")]
        arguments = ["--location", f"file:{folder}", "--engine", "spark"]
        return pipes.run(context=context, command=command + arguments, env=env).get_materialize_result()

    result = dg.materialize(
        [compacted_elsewhere], instance=instance, resources={"pipes": dg.PipesSubprocessClient()}, raise_on_error=False
    )
    assert not result.success, "the program's exit status is the run's"
    messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any(message.startswith("bad: Corrupt") for message in messages)
    assert any(message.startswith("a: {'batches_before': 4") for message in messages)
    for name in ("a", "b"):
        assert client.census(name).batches == 1
        check(client, name, models[name])
    assert client.census("bad").batches == 4
