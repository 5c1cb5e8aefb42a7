"""jobs/compact.py started by Dagster Pipes from assets and ops; as spark-submit runs it, the way onto a cluster."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from jobs.java import find_java_home
from jobs.program import Pipes
from tests.orchestration.dagster_dev import ROOT
from tests.spark.collections import SMALL, check, damage_a_part, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]


@pytest.mark.spark
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


def program(folder: Path) -> dict[str, Any]:
    """How to start `jobs/compact.py` in a process of its own, without Spark."""
    command = [sys.executable, str(ROOT / "jobs" / "compact.py"), "--location", f"file:{folder}", "--engine", "local"]
    return {"command": command, "env": {"PERSIST_CONFIG": json.dumps(SMALL), "PYTHONPATH": str(ROOT)}}


def test_a_program_that_an_op_starts_reports_its_figures_by_log_and_message(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    model = write(client, "a", batches=4, rows=1500, seed=1)
    figures: list[Any] = []

    @dg.op
    def compact_elsewhere(context: dg.OpExecutionContext, pipes: dg.PipesSubprocessClient) -> None:
        figures.extend(pipes.run(context=context, **program(folder)).get_custom_messages())

    @dg.job(resource_defs={"pipes": dg.PipesSubprocessClient()})
    def elsewhere() -> None:
        compact_elsewhere()

    result = elsewhere.execute_in_process(instance=instance)
    assert result.success
    assert figures[0]["shards"] == 1
    assert figures[0]["failed"] == 0
    assert figures[0]["batches_before"] == 4
    assert any(entry.user_message.startswith("all done: ") for entry in instance.all_logs(result.run_id))
    assert client.census("a").batches == 1
    check(client, "a", model)


def test_a_program_that_an_op_starts_and_that_fails_on_a_shard_fails_the_op_and_names_the_shard(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for i, name in enumerate(("a", "bad")):
        write(client, name, batches=4, rows=1500, seed=i)
    damage_a_part(folder, "bad")

    @dg.op
    def compact_elsewhere(context: dg.OpExecutionContext, pipes: dg.PipesSubprocessClient) -> None:
        pipes.run(context=context, **program(folder))

    @dg.job(resource_defs={"pipes": dg.PipesSubprocessClient()})
    def elsewhere() -> None:
        compact_elsewhere()

    result = elsewhere.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any(message.startswith("bad: Corrupt") for message in messages)
    assert "failed: bad; 1 shards are done" in messages
    assert client.census("a").batches == 1


class Sent:
    """What a program reports, as `dagster_pipes` would send it."""

    def __init__(self, asset_keys: list[str] | None) -> None:
        self.log, self.is_asset_step, self.asset_keys = logging.getLogger("sent"), asset_keys is not None, asset_keys
        self.materialized: list[Any] = []
        self.messages: list[Any] = []

    def report_custom_message(self, payload: Any) -> None:
        self.messages.append(payload)

    def report_asset_materialization(self, metadata: Any) -> None:
        self.materialized.append(metadata)


@pytest.mark.parametrize("asset_keys", [None, ["one"], ["one", "two"]])
@pytest.mark.parametrize("fails", [False, True])
def test_a_materialization_is_reported_only_for_a_single_asset_of_which_no_shard_failed(
    asset_keys: list[str] | None, fails: bool
) -> None:
    sent = Sent(asset_keys)
    pipes = Pipes(sent)
    pipes.begin(2, "compacting")
    pipes.done("a", {"dollars": 1.5})
    if fails:
        pipes.failed("b", ValueError("no"))
    pipes.end()
    assert sent.messages == [{"shards": 1, "failed": int(fails), "dollars": 1.5}]
    assert len(sent.materialized) == (asset_keys == ["one"] and not fails)


def test_an_asset_that_a_program_compacts_has_its_figures(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "a", batches=4, rows=1500, seed=1)

    @dg.asset
    def compacted_elsewhere(context: dg.AssetExecutionContext, pipes: dg.PipesSubprocessClient):
        return pipes.run(context=context, **program(folder)).get_materialize_result()

    resources = {"pipes": dg.PipesSubprocessClient()}
    result = dg.materialize([compacted_elsewhere], instance=instance, resources=resources)
    (event,) = result.asset_materializations_for_node("compacted_elsewhere")
    assert event.metadata["batches_before"].value == 4
    assert event.metadata["failed"].value == 0
