"""Dagster over a thousand shards: a pass over idle ones, and from the first tick to rest with 5 % of them in debt.

Each run is a real run with Dagster's own storage on disk, in this process: the seconds are those of the pass, without
the start of a process, which costs Dagster some seconds more each time. The pass goes over all shards, and does every
duty of its job where that is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import dagster as dg

import persist_lib as persist
from bench.figures import Figure
from orchestration.definitions import build_definitions
from orchestration.resources import Persist
from orchestration.settings import Settings
from persist_lib.core.duties import NAMES
from persist_lib.core.plan.look import BY_MARK
from persist_lib.testing.servers import PostgresServer

SCHEMA = persist.Schema(key={"k": "int64"}, value={"v": "string"})
IN_DEBT = 20
"""One shard in so many is in debt."""
EVENTS = 20
SECONDS = {1_000: 1.0, 10_000: 10.0}
TICKS = 40


class Passed(NamedTuple):
    """What a run took, and how many events it left in Dagster's storage."""

    seconds: float
    events: int


class World:
    """A location with many shards, and a Dagster instance on disk."""

    def __init__(self, url: str, consensus: str | None, instance: dg.DagsterInstance) -> None:
        self.client = persist.open(url, consensus)
        self.settings = Settings(location=url, consensus=consensus, may_delete=True)
        self.instance = instance
        self.repository = build_definitions(self.settings).get_repository_def()

    def fill(self, shards: int) -> None:
        """Make the shards, each with one append."""
        for n in range(shards):
            with self.client.open_writer(f"s{n:05}", SCHEMA) as write:
                write.compare_and_append([{"k": n, "v": "x", "_time": 0}], 0, 1)

    def indebt(self, shards: int) -> int:
        """Bring one shard in `IN_DEBT` into debt; returns how many."""
        chosen = range(0, shards, IN_DEBT)
        for n in chosen:
            with self.client.open_writer(f"s{n:05}", SCHEMA) as write:
                for time_ in range(1, 9):
                    write.compare_and_append([{"k": n, "v": "x", "_time": time_}], time_, time_ + 1)
        return len(chosen)

    def run(self, job: str, **config: Any) -> Passed:
        """Run a job, as the daemon has it run."""
        options = {"ops": {f"{job}_of_shards": {"config": config}}}
        console = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
        started = time.perf_counter()
        result = self.repository.get_job(job).execute_in_process(
            instance=self.instance, run_config={**options, **console}
        )
        seconds = time.perf_counter() - started
        return Passed(seconds, len(self.instance.all_logs(result.run_id)))

    def tick(self, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """A tick of the debt sensor: the configuration of the runs it asks for, and its cursor."""
        given = Persist(location=self.settings.location or "", consensus=self.settings.consensus or "")
        with dg.build_sensor_context(
            instance=self.instance, cursor=cursor, repository_def=self.repository, resources={"persist": given}
        ) as context:
            data = self.repository.get_sensor_def("compaction_debt").evaluate_tick(context)
        asked = [request.run_config["ops"]["compaction_of_shards"]["config"] for request in data.run_requests or ()]
        return asked, data.cursor


def idle_passes(quick: bool) -> list[Figure]:
    """Seconds and events of a pass over idle shards, for every job; the slowest and the one with most events."""
    figures = []
    for shards in (100,) if quick else (1_000, 10_000):
        for name, world in worlds():
            with world() as given:
                given.fill(shards)
                at_rest(given)
                passed = {job: _median(given, job) for job in NAMES}
            slowest = max(passed, key=lambda job: passed[job].seconds)
            most = max(passed, key=lambda job: passed[job].events)
            bound = SECONDS.get(shards, 1.0)
            figures += [
                Figure(
                    f"idle pass over {shards:,} shards, {name}", passed[slowest].seconds, bound, "s", "the limit",
                    at_most=1.0, note=", ".join(f"{job} {one.seconds:.2f}" for job, one in passed.items()),
                ),
                Figure(
                    f"events of it, {name}", passed[most].events, EVENTS, "events", "the limit", at_most=1.0, note=most
                ),
            ]  # fmt: skip
    return figures


def debt_to_rest(quick: bool) -> list[Figure]:
    """From the first tick to rest: 5 % of the shards in debt. Seconds, runs and events, with no bound asked for."""
    shards = 100 if quick else 1_000
    figures = []
    for name, world in worlds():
        with world() as given:
            given.fill(shards)
            at_rest(given)
            indebted = given.indebt(shards)
            started, ticks, runs, events, cursor = time.perf_counter(), 0, 0, 0, None
            while ticks < TICKS:
                asked, cursor = given.tick(cursor)
                ticks += 1
                for config in asked:
                    runs, events = runs + 1, events + given.run("compaction", **config).events
                if not asked:
                    break
            seconds = time.perf_counter() - started
            assert all(given.client.census(f"s{n:05}").debt == 0 for n in range(0, shards, IN_DEBT))
        note = f"{indebted} in debt; {ticks} ticks, {runs} runs, {events} events"
        limit = "a second a shard in debt"
        figures.append(Figure(f"debt to rest, {shards:,} shards, {name}", seconds, indebted, "s", limit, note=note))
    return figures


def at_rest(world: World) -> None:
    """Say that each shard was counted, scrubbed and audited. For 10,000 shards that takes Dagster many minutes."""
    there = world.client.shards()
    world.client.survey(done=dict.fromkeys(BY_MARK, there))
    assert not [duty for duty in NAMES if world.client.survey().due(duty)]


def _median(world: World, job: str) -> Passed:
    runs = [world.run(job) for _ in range(3)]
    return Passed(median(one.seconds for one in runs), max(one.events for one in runs))


def worlds() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A location on SQLite, and one on PostgreSQL; blobs are files in both."""

    @contextmanager
    def on_sqlite() -> Iterator[World]:
        with TemporaryDirectory(prefix="persist-bench-") as folder, _instance(folder) as instance:
            world = World(f"file:{folder}/data", None, instance)
            yield world
            world.client.close()

    @contextmanager
    def on_postgres() -> Iterator[World]:
        with (
            TemporaryDirectory(prefix="persist-bench-") as folder,
            PostgresServer() as server,
            _instance(folder) as instance,
        ):
            world = World(f"file:{folder}/data", server.url, instance)
            yield world
            world.client.close()

    yield "SQLite", on_sqlite
    yield "PostgreSQL", on_postgres


@contextmanager
def _instance(folder: str) -> Iterator[dg.DagsterInstance]:
    home = Path(folder) / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance
