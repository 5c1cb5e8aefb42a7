"""Runs on a real `dagster dev`: cancelled at every stage, killed, over damaged parts, and told what does not exist."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.testing.servers import state_of
from tests.orchestration.dagster_answers import Run
from tests.orchestration.dagster_dev import DagsterDev, dagster_dev, wait_until, workspace_of
from tests.spark.collections import SMALL, check, parts_of, write

pytestmark = [pytest.mark.dagster, pytest.mark.spark, pytest.mark.timeout(400)]

CANCELED_WITHIN = 45.0
"""Seconds until a cancelled run is over, and its processes are gone: some 3 on a quiet machine, 14 at a load of 30."""
QUIET = 4.0
"""Seconds in which nothing may happen after that."""
LEASE_MS = 8000


@dataclass(frozen=True)
class World:
    """A running pipeline without schedules and sensors, and its location."""

    dev: DagsterDev
    folder: Path
    client: persist.Client


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("runs")
    folder, config = base / "data", {**SMALL, "lease_ms": LEASE_MS}
    env = {
        "PERSIST_LOCATION": f"file:{folder}",
        "PERSIST_CONFIG": json.dumps(config),
        "PERSIST_SPARK_MASTER": "local[2,4]",
    }
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as client:
        write(client, "seen", batches=1, rows=5)
        with dagster_dev(base / "home", workspace_of(base), env) as dev:
            dev.wait_loaded()
            assert not dev.load_error()
            yield World(dev, folder, client)


def test_a_run_that_is_cancelled_while_it_merges_commits_nothing_more(world: World) -> None:
    write(world.client, "merging", batches=4, rows=60_000)
    before = set(parts_of(world.folder, "merging"))
    run = compact(world, "merging", engine="local")
    worker = world.dev.worker(run)
    wait_stage(lambda: set(parts_of(world.folder, "merging")) - before, "the first part of the merge is there")
    assert_cancelled(world, run, worker, "merging")
    assert world.client.census("merging").batches == 4


def test_a_killed_run_is_started_again_by_itself(world: World) -> None:
    model = write(world.client, "killed", batches=6, rows=50)
    run = compact(world, "killed")
    os.kill(world.dev.worker(run), signal.SIGKILL)
    retried = wait_retried(world.dev, run)
    assert world.dev.wait_finished(retried.id).status == "SUCCESS", world.dev.why(retried.id)
    assert world.client.census("killed").batches == 1
    check(world.client, "killed", model)


def test_two_runs_over_one_shard_exclude_each_other_whatever_launched_them(world: World) -> None:
    model = write(world.client, "wanted_twice", batches=4, rows=30_000)
    world.dev.add_partitions("persist_shards", ["wanted_twice"])
    before = set(parts_of(world.folder, "wanted_twice"))
    config = {"ops": {"shard_duties": {"config": {"engine": "local"}}}}
    launched = [
        compact(world, "wanted_twice", engine="local"),
        world.dev.launch_partition(["compaction"], "wanted_twice", config),
    ]
    runs = [world.dev.wait_finished(run) for run in launched]
    assert [run.status for run in runs] == ["SUCCESS", "SUCCESS"], [world.dev.why(run.id) for run in runs]
    state = world.client.inspect("wanted_twice").state
    written = {part.name for part in set(parts_of(world.folder, "wanted_twice")) - before}
    assert written == {key.rpartition("/")[2] for batch in state.trace for key in batch.keys}, "nothing is left behind"
    assert world.client.census("wanted_twice").batches == 1
    check(world.client, "wanted_twice", model)


def test_an_op_that_fails_is_not_started_again(world: World) -> None:
    run = world.dev.wait_finished(compact(world, "no_such_shard"))
    assert run.status == "FAILURE"
    wait_until(lambda: "dagster/will_retry" in world.dev.run(run.id).tags, 60, "it is decided whether to retry")
    assert world.dev.run(run.id).tags["dagster/will_retry"] == "false"


def compact(world: World, *shards: str, engine: str = "auto") -> str:
    """Launch the compaction job over some shards."""
    config = {"shards": list(shards), "engine": engine}
    return world.dev.launch("compaction", {"ops": {"compaction_of_shards": {"config": config}}})


def wait_retried(dev: DagsterDev, run: str) -> Run:
    """Wait for the run that was started in place of a killed one."""
    assert dev.wait_finished(run, 60).status == "FAILURE"
    return wait_until(lambda: [one for one in dev.runs() if one.parent == run], 240, "the killed run is retried")[0]


def wait_stage(is_reached: Callable[[], object], what: str) -> None:
    """Look often, as a stage may be short."""
    deadline = time.monotonic() + 120
    while not is_reached():
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.01)


def assert_cancelled(world: World, run: str, worker: int, shard: str) -> None:
    """Cancel a run where it is now. It is over in time, its processes are gone, and nothing happens afterwards."""
    family = [worker, *descendants(worker)]
    with ThreadPoolExecutor(1) as pool:
        with frozen(worker):
            accepted = pool.submit(world.dev.terminate, run)  # SUBTLE: it is answered once the process has noticed
            wait_until(lambda: world.dev.run(run).status != "STARTED", 60, "the run is to be cancelled")
        began = time.monotonic()
        accepted.result()
    wait_until(lambda: world.dev.run(run).is_finished, 120, "the cancelled run is over")
    took = time.monotonic() - began
    assert world.dev.run(run).status == "CANCELED", world.dev.why(run)
    wait_until(lambda: not any(is_alive(pid) for pid in family), 60, "the processes of the cancelled run are gone")
    gone = time.monotonic() - began
    assert took < CANCELED_WITHIN, world.dev.why(run)
    assert gone < CANCELED_WITHIN, f"the processes of the cancelled run lived on for {gone:.1f} s"
    assert [one for one in world.dev.runs() if one.parent == run] == []
    seqno, parts = world.client.machine(shard).fetch().seqno, set(parts_of(world.folder, shard))
    time.sleep(QUIET)
    assert world.client.machine(shard).fetch().seqno == seqno
    assert set(parts_of(world.folder, shard)) == parts


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process where it is, so that what is sent to it meets it there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    return state_of(pid) not in "ZX"
