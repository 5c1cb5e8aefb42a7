"""Which tests `make test` runs, and which only `make nightly` does.

A rule is held once, at the lowest level that can say it, and `make test` holds all of them. What it leaves to the
night is the same rule over more of a product (each store, each fault, each kind), at full counts, or at full size:

- `NIGHTLY`: files and tests that run at night only, each with what holds their rule by day.
- `SAMPLED`: products of which `make test` runs a sample: what is named as whole is run whole, of the rest a share, each
  test function at least once. The sample is drawn by PERSIST_SEED, so that it is another one in each run by hand and at
  night, and the same one in CI.

PERSIST_CIRCLE=night runs everything.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest

T = TypeVar("T")
VARIABLE = "PERSIST_CIRCLE"


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a product: what is kept whole (parts of a test's id in brackets), and the share of the others that runs."""

    share: float
    whole: tuple[str, ...] = ()


NIGHTLY: Mapping[str, str] = {
    "tests/docs/test_site.py": "test_reference_pages.py; `make docs`, in the same night",
    "tests/integration/test_git_history.py::test_a_long_history_is_ingested_in_minutes": "shorter ones beside it",
    "tests/integration/test_left_alone.py::test_one_run_brings_it_to_rest_on_s3": "files and SQLite, in the same file",
    "tests/wheels/test_types.py::test_the_pipeline_s_types_are_there_too": "the library's types, in the same file",
    "tests/unit/location/test_s3.py::test_more_than_a_thousand": "the tests of pages beside it",
    "tests/unit/location/test_s3_cas.py::test_more_than_a_thousand": "tests of pages in test_s3.py, of truncation here",
    "tests/unit/sources/test_bindings.py::test_two_minters_in_threads": "two minters by turns, beside it",
    "tests/unit/sources/test_bindings.py::test_processes_that_ask": "two minters by turns, beside it",
    "tests/unit/sources/test_kafka.py::test_a_million": "a million records of Avro and of files",
    "tests/orchestration/test_dev_runs.py::test_a_run_killed_while_it_merges": "a killed run, in the same file",
    "tests/orchestration/test_dev_runs.py::test_a_run_that_is_cancelled_while_it_verifies": "while it merges",
    "tests/spark/test_ingest_on_spark.py::test_a_killed_driver_is": "test_ingest_everywhere.py kills drivers, too",
    "tests/spark/test_rounds_killed.py::test_two_drivers_killed_at_random": "drivers killed at a place, beside it",
    "tests/spark/test_standalone_cluster.py::test_a_master_without_room": "tests/unit/jobs/test_reach.py asks a master",
    "tests/spark/test_standalone_cluster.py::test_executors_and_drivers_killed": "a killed executor, beside it",
    "tests/spark/test_standalone_cluster.py::test_speculative": "two applications that race, on local Spark",
    "tests/spark/test_stream_restarts.py": "streams of collections from checkpoints; a killed sink",
    "tests/spark/test_tpch.py": "test_scans.py compares random histories",
    "tests/spark/test_what_spark_shows.py::test_an_operation_on_connect": "what a job says, beside it",
    "tests/spark/test_writes_everywhere.py::test_a_write_goes_on": "a compaction whose executor is killed",
    "tests/bench/test_bench.py::test_spark_s_own_plan": "the other phases, a sample",
    "tests/torture/test_transfers.py::test_nor_is_it_on_postgresql": "on files; kills on PostgreSQL",
}
"""The beginning of a test's id, and what holds its rule by day."""

SAMPLED: Mapping[str, Sample] = {
    "tests/bench/test_bench.py": Sample(0.1, ("small_append",)),
    "tests/conformance/": Sample(0.25, ("[memory", "-memory", "[sqlite]", "-sqlite]")),
    "tests/docs/test_pages.py": Sample(0.5),
    "tests/faults/": Sample(0.2),
    "tests/integration/test_compaction_at_size.py": Sample(0.0),
    "tests/integration/test_fleet.py": Sample(0.0),
    "tests/interrupts/": Sample(0.1),
    "tests/powercut/": Sample(0.25),
    "tests/races/test_append_many_processes.py": Sample(0.3),
    "tests/races/test_late_attempts.py": Sample(0.4),
    "tests/races/test_outcomes.py": Sample(0.25, ("[memory",)),
    "tests/races/test_verbs_processes.py": Sample(0.3),
    "tests/spark/test_ingest_everywhere.py": Sample(0.0),
    "tests/spark/test_killed_driver.py": Sample(0.0),
    "tests/spark/test_reads_everywhere.py": Sample(0.0),
    "tests/spark/test_signals.py": Sample(0.3),
    "tests/spark/test_sinks_killed.py": Sample(0.0),
    "tests/spark/test_writes_everywhere.py": Sample(0.0),
    "tests/torture/test_event_kills.py": Sample(0.3),
    "tests/torture/test_kills.py": Sample(0.0),
    "tests/wheels/test_extras.py": Sample(0.3),
    "tests/unit/client/test_times_at_every_door.py": Sample(0.4),
    "tests/unit/sources/test_loading.py::test_tasks_make": Sample(0.4),
    "tests/unit/sources/test_reprocess.py::test_what_a_mender_left": Sample(0.3),
    "tests/unit/timeline/test_tail.py": Sample(0.5),
}
"""The beginning of a test's id, and what is drawn."""


def _draw(nodeid: str, seed: str) -> float:
    """A number from 0 up to 1 that a seed and a test decide, in every process alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {nodeid}".encode()).digest()[:6]) / 2**48


def _at_night(nodeid: str) -> bool:
    return any(nodeid.startswith(beginning) for beginning in NIGHTLY)


def _sample(nodeid: str) -> Sample | None:
    return next((sample for beginning, sample in SAMPLED.items() if nodeid.startswith(beginning)), None)


def by_day(places: Sequence[T], every: int) -> Sequence[T]:
    """Where one test strikes: everywhere at night, and by day at each `every`-th place, from one that the seed says."""
    if os.environ.get(VARIABLE) != "day":
        return places
    return places[int(_draw("", os.environ.get("PERSIST_SEED", "fixed")) * every) :: every] or places[:1]


def kept(nodeids: Iterable[str], seed: str) -> set[str]:
    """Those of these tests that run by day."""
    chosen: set[str] = set()
    groups: dict[str, list[tuple[float, str, float]]] = defaultdict(list)
    for nodeid in nodeids:
        sample = _sample(nodeid)
        function, _, case = nodeid.partition("[")
        if _at_night(nodeid):
            continue
        if sample is None or any(name in case for name in sample.whole):
            chosen.add(nodeid)
        else:
            groups[function].append((_draw(nodeid, seed), nodeid, sample.share))
    for group in groups.values():
        least = min(group)
        chosen.update(nodeid for draw, nodeid, share in group if draw < share or (draw, nodeid, share) == least)
    return chosen


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the night what is not of this circle, counted as deselected. A test that is named by its file runs."""
    named = [argument for argument in config.args if ".py" in argument]
    if os.environ.get(VARIABLE) != "day" or named:
        return
    chosen = kept([item.nodeid for item in items], os.environ.get("PERSIST_SEED", "fixed"))
    left = [item for item in items if item.nodeid not in chosen]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid in chosen]
