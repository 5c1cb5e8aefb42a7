"""Runs that may compact on a real `dagster dev`, limited over two locations, on both of its storages."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import persist_lib as persist
from tests.orchestration.dagster_dev import STORAGES, DagsterDev, dagster_dev, store_in, workspace_of
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]
TWO = """import dagster as dg
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
defs = dg.Definitions.merge(
    build_definitions(Settings(is_running=False)),
    build_definitions(Settings(location={other!r}, is_running=False, data={{"tables": []}}), name="other"),
)
"""
"""Two locations, as two pipelines of one instance."""
POOL = "rewriting"


@pytest.fixture(scope="module", params=STORAGES)
def dev(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterDev]:
    base = tmp_path_factory.mktemp(f"steered_{request.param}")
    places = {name: f"file:{base / name}" for name in ("data", "other")}
    store_in(base / "home", request.param)
    env = {
        "PERSIST_LOCATION": places["data"], "PERSIST_CONFIG": json.dumps(SMALL), "PERSIST_POOL": POOL,
        "PERSIST_SPARK_MASTER": "local[1]",
    }  # fmt: skip
    for url, shard in zip(places.values(), ("events", "far"), strict=True):
        with persist.open(url, config=persist.Config(**SMALL), create=True) as client:
            write(client, shard, batches=6, rows=5)
    with dagster_dev(base / "home", workspace_of(base, persist=TWO.format(other=places["other"])), env) as started:
        started.wait_loaded()
        assert not started.load_error()
        yield started


@pytest.mark.parametrize("limit", [1, 2])
def test_at_most_so_many_runs_compact_at_once_over_all_locations(dev: DagsterDev, limit: int) -> None:
    """By the limit that a person sets in the UI."""
    query = "mutation ($pool: String!, $limit: Int!) { setConcurrencyLimit(concurrencyKey: $pool, limit: $limit) }"
    assert dev.ask(query, pool=POOL, limit=limit)["setConcurrencyLimit"] is True
    assert at_once(dev) == limit


def at_once(dev: DagsterDev) -> int:
    """How many runs that may compact were under way at once, of five that were launched at once."""
    jobs = ["compaction", "maintenance", "other_compaction", "other_maintenance"]
    runs = [
        dev.launch(job, {"ops": {f"{job}_of_shards": {"config": {"everything": True, "engine": "local"}}}})
        for job in jobs
    ]
    dev.add_partitions("persist_shards", ["events"])
    runs.append(dev.launch_partition(["compaction"], "events", {"ops": {"shard_duties": {"config": {}}}}))
    found = [dev.wait_finished(run) for run in runs]
    assert {one.status for one in found} == {"SUCCESS"}, [dev.why(one.id) for one in found]
    spans = [(dequeued(dev, one.id), one.ended or 0) for one in found]
    return max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans)


def dequeued(dev: DagsterDev, run: str) -> float:
    """When a run left the queue, in seconds: from then on it has a process."""
    return min(event.seconds for event in dev.events(run) if "STARTING" in event.kind)
