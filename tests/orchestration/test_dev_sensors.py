"""Sensors on a real `dagster dev`: debt is asked for until it is paid, whatever became of the runs for it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.testing.servers import free_port
from tests.orchestration.dagster_answers import Run
from tests.orchestration.dagster_dev import STOPPED, DagsterDev, dagster_dev, wait_until, workspace_of
from tests.spark.collections import SMALL, check, write

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(600)]

HURRIED = f"""
import orchestration.sensors
orchestration.sensors.FIRST_WAIT_MS = 5_000
{STOPPED}
for sensor in defs.sensors:
    sensor._min_interval = 5
"""
"""The pipeline with sensors that tick each five seconds, and ask again after five."""
LOSING = ("", "not JSON at all", '{"seen": 7, "asked": []}')


def test_debt_is_asked_for_until_it_is_paid(client: persist.Client, folder: Path, tmp_path: Path) -> None:
    """New shards are found; the run is killed, then Spark is down, then it is back; then the cursor is lost."""
    models = {"small": write(client, "small", batches=6, rows=5), "tidy": write(client, "tidy", batches=1, rows=5)}
    models["big"] = write(client, "big", batches=4, rows=6000)
    master = f"spark://127.0.0.1:{free_port()}"
    env = {
        "PERSIST_LOCATION": f"file:{folder}",
        "PERSIST_CONFIG": json.dumps({**SMALL, "lease_ms": 8000}),
        "PERSIST_SPARK_MASTER": master,
    }
    with dagster_dev(tmp_path / "home", workspace_of(tmp_path, persist=HURRIED), env) as dev:
        dev.wait_loaded()
        assert not dev.load_error()
        dev.start_sensor("shard_discovery")
        discovered = dev.wait_tick("shard_discovery", 0)
        assert len(discovered["runIds"]) == 1, "one run counts all new shards"
        assert set(dev.partitions("census")["unmaterialized"] | dev.partitions("census")["materialized"]) == set(models)
        dev.stop_sensor("shard_discovery")

        dev.start_sensor("compaction_debt")
        tick = wait_requested(dev, 0)
        runs = [dev.run(run) for run in tick["runIds"]]
        assert all("tidy" not in run.config for run in runs), "only shards in debt are visited"
        assert any("big" in run.config for run in runs)
        killed = next(run for run in runs if "big" in run.config)
        os.kill(dev.worker(killed.id), signal.SIGKILL)
        retried = wait_until(lambda: [one for one in dev.runs() if one.parent == killed.id], 90, "it is retried")[0]
        failed = dev.wait_finished(retried.id)
        assert failed.status == "FAILURE", "no Spark is at that address"
        assert_told_soon(dev, failed, master)
        assert client.census("small").batches == 1, "another shard's failure holds nothing up"
        assert client.census("big").batches == 4
        colours = dev.partitions("compaction")
        assert colours["failed"] == {"big"}
        assert "small" in colours["materialized"]

        again = wait_requested(dev, failed.ended or time.time())
        assert set(again["runKeys"]).isdisjoint(tick["runKeys"]), "a run key carries the attempt"
        second = dev.run(again["runIds"][0])
        assert "big" in second.config, "debt is what the state says"
        assert "small" not in second.config, "what is paid is not asked for"
        assert dev.wait_finished(second.id).status == "FAILURE"

        config = {"shards": ["big"], "engine": "local"}
        back = dev.launch("compaction", {"ops": {"compaction_of_shards": {"config": config}}})
        assert dev.wait_finished(back).status == "SUCCESS", dev.why(back)
        assert dev.partitions("compaction")["failed"] == set()
        for name, model in models.items():
            assert client.census(name).batches == 1
            check(client, name, model)
        wait_until(lambda: all(one.is_finished for one in dev.runs()), 240, "nothing runs")

        for cursor in LOSING:
            dev.set_cursor("compaction_debt", cursor)
            assert dev.wait_tick("compaction_debt", time.time())["runIds"] == [], "all debt is paid"
        count = len(dev.runs(job="compaction"))
        write(client, "tidy", batches=6, rows=5)
        dev.set_cursor("compaction_debt", "")
        paid = wait_requested(dev, time.time() - 5)
        assert dev.wait_finished(paid["runIds"][0]).status == "SUCCESS"
        assert client.census("tidy").batches == 1
        assert len(dev.runs(job="compaction")) == count + 1


def wait_requested(dev: DagsterDev, after: float, seconds: float = 240) -> dict[str, list[str]]:
    """Wait for a tick of the debt sensor after a moment that requested a run."""

    def requested() -> list[dict[str, list[str]]]:
        ticks = dev.sensor("compaction_debt")["ticks"]
        assert not [one for one in ticks if one["status"] == "FAILURE"], ticks
        return [one for one in ticks if one["timestamp"] > after and one["runIds"]]

    return wait_until(requested, seconds, "the debt sensor requests a run")[-1]


def assert_told_soon(dev: DagsterDev, run: Run, master: str) -> None:
    """The failure names the address that does not answer. Two attempts took at most 10 s each, and a pause."""
    assert master in dev.failure_of(run.id)
    began = dev.wait_said(run.id, "Started execution of step").seconds
    assert (run.ended or 0) - began < 60, f"the run took {(run.ended or 0) - began:.0f} s to say that Spark is down"
