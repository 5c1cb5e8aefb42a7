"""Which tests `make test` runs, and which only `make nightly` does.

A rule is held once, at the lowest level that can say it, and `make test` holds all of them. What it leaves to the
night is the same rule over more of a product (each store, each fault, each kind), at full counts, or at full size:

- `NIGHTLY`: files and tests that run at night only, each with what holds their rule by day.
- `SAMPLED`: products of which `make test` runs a sample: what is named as whole is run whole, of the rest a share, each
  test function at least once. The sample is drawn by PERSIST_SEED, so that it is another one in each run by hand and at
  night, and the same one in CI.
- Of each other function of `MANY` cases or more, a third of them by the same draw: unless a recorded bug names it, or
  its folder is one whose cases cost next to nothing (`WHOLE`).
- Of the functions of a file that take a second of CPU or more (tests/dear.txt) and that no recorded bug names, a
  third by the same draw, at least one of each file: unless they show the whole of something (`SHOWN`).
- Laws and models (hypothesis) draw `EXAMPLES` of their examples, and take `STEPS` of their steps.

PERSIST_CIRCLE=night runs everything.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import is_hypothesis_test, settings

T = TypeVar("T")
VARIABLE, DRAWN = "PERSIST_CIRCLE", "PERSIST_DRAWN"
"""With the second one, also what is named by its file is a sample: what `make test` would run of it."""
EXAMPLES, STEPS = 0.35, 0.8
"""The shares by day of the examples of a law, and of the steps of a model: what needs many calls needs most of them."""
LEAST = 3
"""A law with so few examples draws them by day too."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a product: what is kept whole (parts of the end of a test's id, from its bracket on), and the others' share.

    At least one of each test function, or with `is_one` one of all that begin so.
    """

    share: float
    whole: tuple[str, ...] = ()
    is_one: bool = False


NIGHTLY: Mapping[str, str] = {
    "tests/docs/test_site.py": "test_reference_pages.py; `make docs`, in the same night",
    "tests/integration/test_compaction_at_size.py": "rounds are bounded, in tests/unit/maintain",
    "tests/integration/test_demo.py::test_the_demo_shows_everything_and_ends_well[demo-s3": "on files, beside it",
    "tests/integration/test_fleet.py": "test_repair.py; newer formats, in tests/unit/format and unit/server",
    "tests/integration/test_git_history.py::test_a_long_history_is_ingested_in_minutes": "shorter ones beside it",
    "tests/integration/test_kafka_brokers.py": "test_kafka_broker.py: one that is killed, and one that lost its log; "
    "unit/sources/test_kafka.py: leaders of several epochs",
    "tests/integration/test_kafka_registry.py": "unit/sources/test_schema_registry.py: a server of the protocol",
    "tests/integration/test_left_alone.py": "test_compaction_at_size.py: rounds; test_maintenance_run.py: one run",
    "tests/integration/test_published_on_spark.py": "test_published_tables.py: other engines",
    "tests/spark/test_dbt.py": "test_sql_catalog.py: the statements that it makes",
    "tests/wheels/test_shop.py::test_its_tests_on_spark": "its other tests, beside it; tests/spark",
    "tests/wheels/test_shop.py::test_the_processes": "its tests, and what its files say; test_dev_loading.py",
    "tests/wheels/test_types.py": "py.typed is in the wheels, in test_distributions.py; `make lint`",
    "tests/unit/location/test_s3.py::test_more_than_a_thousand": "the tests of pages beside it",
    "tests/unit/location/test_s3_cas.py::test_more_than_a_thousand": "tests of pages in test_s3.py, of truncation here",
    "tests/unit/sources/test_bindings.py::test_processes_that_ask": "two minters by turns, beside it",
    "tests/unit/catalog/test_promoting.py::test_whoever_dies_while_a_table_joins_loses_nothing[S3": "in memory",
    "tests/unit/sources/test_running.py::test_a_source_on_s3_alone": "deaths between two appends, beside it",
    "tests/unit/sources/test_kafka.py::test_a_million": "a million records of Avro and of files",
    "tests/orchestration/test_dev_pages.py": "test_passes.py, test_definitions.py; `make ui`, where a browser is",
    "tests/orchestration/test_dev_steering.py": "test_spreading.py: which runs are in the pool",
    "tests/orchestration/test_dev_sensors.py": "test_sensors_and_schedules.py, without a daemon; `make dev` ticks",
    "tests/properties/test_library_model.py::TestOnServers": "in memory and on files, beside it; kills on servers",
    "tests/spark/test_ingest_everywhere.py": "test_ingest_on_spark.py; reads and writes everywhere; a killed sink",
    "tests/spark/test_reads_everywhere.py::test_reads_are_the_librarys_wherever_spark_runs[connect": "on a cluster",
    "tests/spark/test_reads_everywhere.py::test_reads_are_the_librarys_wherever_spark_runs[local": "on a cluster",
    "tests/spark/test_rounds_killed.py::test_two_drivers_killed_at_random": "drivers killed at a place, beside it",
    "tests/spark/test_sinks_killed.py": "unit/spark/test_streams_exactly_once.py; test_rounds_killed.py kills",
    "tests/spark/test_sql_catalog.py::test_jdbc": "the same statements in a session, beside it",
    "tests/spark/test_sql_catalog.py::test_sql_without_a_program": "sessions; what Spark looks for, in unit/spark",
    "tests/spark/test_standalone_cluster.py": "test_reads_everywhere.py, on a cluster; test_compaction_on_spark.py",
    "tests/spark/test_what_spark_shows.py::test_an_operation_on_connect": "what a job says, beside it",
    "tests/spark/test_writes_everywhere.py": "test_writes.py and test_collections_on_spark.py; reads everywhere",
    "tests/bench/test_bench.py::test_a_life_on_spark": "test_a_life_on_s3, beside it",
    "tests/bench/test_bench.py::test_spark_s_own_plan": "the other phases, a sample",
    "tests/docs/test_pages.py::test_the_snippets_of_a_page_run_and_answer_what_it_says[docs/collections": "other pages",
    "tests/docs/test_pages.py::test_the_snippets_of_a_page_run_and_answer_what_it_says[docs/recipes": "other pages",
    "tests/hosts/test_partitions.py::test_nor_where_clocks": "right clocks; clocks of processes on files",
    "tests/torture/test_kafka_instances.py::test_two_instances_make_what_a_plain_fold_makes[apa": "librdkafka's; "
    "integration/test_kafka_broker.py, whose broker is killed",
    "tests/torture/test_minters.py::test_nor_whatever": "on files, beside it; unit/catalog/test_wrong_clocks.py",
    "tests/torture/test_transfers.py::test_nor_is_it_on_postgresql": "on files; kills on PostgreSQL",
    "tests/spark/test_loads.py::test_the_program_is_killed": "dead instances in unit/sources/test_loading.py",
    "tests/wheels/test_extras.py::test_it_works_with_nothing_else_installed[persist-lib[spark": "other extras",
    "tests/orchestration/test_sources.py::test_what_is_much_is_loaded_on_spark": "tests/spark/test_loads.py",
}
"""The beginning of a test's id, and what holds its rule by day."""

SAMPLED: Mapping[str, Sample] = {
    "tests/bench/test_bench.py": Sample(0.0, ("small_append",)),
    "tests/conformance/": Sample(0.15, ("[memory", "-memory", "[sqlite]", "-sqlite]")),
    "tests/docs/test_pages.py": Sample(0.1, ("tutorial",)),
    "tests/faults/test_descriptors.py": Sample(0.0, ("postgresql",)),
    "tests/faults/test_source_deaths.py": Sample(0.0, is_one=True),
    "tests/faults/": Sample(0.1),
    "tests/integration/test_ingest.py::test_what_cannot_be": Sample(0.1),
    "tests/integration/test_published_tables.py::test_on_s3": Sample(0.0),
    "tests/integration/test_duties_within_memory.py": Sample(0.0, ("everything", "scrub")),
    "tests/integration/test_more_than_a_page.py": Sample(0.0),
    "tests/integration/test_operations.py::test_the_policies": Sample(0.0),
    "tests/interrupts/": Sample(0.05),
    "tests/models/test_models.py::test_a_mistake": Sample(0.2),
    "tests/orchestration/test_growth.py": Sample(0.3),
    "tests/orchestration/test_io_carriers.py": Sample(0.5),
    "tests/orchestration/test_io_kinds.py": Sample(0.5),
    "tests/orchestration/test_io_runs.py": Sample(0.5),
    "tests/powercut/": Sample(0.25),
    "tests/properties/test_evolution_model.py": Sample(0.0, is_one=True),
    "tests/properties/test_models_through_servers.py": Sample(0.5, is_one=True),
    "tests/races/test_append_many_processes.py": Sample(0.3),
    "tests/races/test_races.py": Sample(0.25),
    "tests/races/test_late_attempts.py": Sample(0.2),
    "tests/races/test_names_at_once.py": Sample(0.4),
    "tests/races/test_outcomes.py": Sample(0.15),
    "tests/races/test_verbs_processes.py": Sample(0.3),
    "tests/simulation/": Sample(0.5),
    "tests/spark/test_rounds_killed.py": Sample(0.0, is_one=True),
    "tests/spark/test_sql_catalog.py::test_each_carrier": Sample(0.0),
    "tests/spark/test_signals.py": Sample(0.2),
    "tests/torture/test_event_kills.py": Sample(0.3),
    "tests/torture/test_kafka_instances.py": Sample(0.0, ("librdkafka",)),
    "tests/torture/test_kills.py": Sample(0.0),
    "tests/torture/test_minters.py": Sample(0.0),
    "tests/wheels/test_extras.py": Sample(0.0),
    "tests/unit/location/test_clouds.py::test_whatever_breaks": Sample(0.2),
    "tests/unit/location/test_clouds.py": Sample(0.1, ("[s3]", "-s3]", "[pages")),
    "tests/unit/client/test_erase.py::test_who_dies": Sample(0.3),
    "tests/unit/client/test_table.py::test_a_change_in_doubt": Sample(0.4),
    "tests/unit/events/test_damage.py::test_an_event_that_is_gone": Sample(0.4),
    "tests/unit/maintain/test_repair.py::test_a_rollup_and_a_row": Sample(0.3),
    "tests/unit/maintain/test_repair.py::test_clients_go_on": Sample(0.3),
    "tests/unit/maintain/test_repair.py::test_rollups_that": Sample(0.3),
    "tests/unit/maintain/test_repair.py::test_without_an_upgrade": Sample(0.3),
    "tests/unit/maintain/test_unchanged_parts.py::test_wherever": Sample(0.4),
    "tests/unit/relation/test_following.py::test_a_listener_that_is": Sample(0.4),
    "tests/unit/relation/test_following.py::test_at_each_progress": Sample(0.4),
    "tests/unit/relation/test_doors.py::test_duckdb_filters": Sample(0.4),
    "tests/unit/relation/test_statements.py::test_a_": Sample(0.5),
    "tests/unit/relation/test_statements.py::test_what_another": Sample(0.4),
    "tests/unit/sources/test_files.py::test_objects_of_a_cloud": Sample(0.0),
    "tests/unit/sources/test_reprocess.py::test_what_an_instance": Sample(0.0),
    "tests/unit/spark/test_any_table.py::test_what_is_committed": Sample(0.3),
    "tests/unit/spark/test_collections.py::test_what_is_asked": Sample(0.3),
    "tests/unit/spark/test_streams_exactly_once.py::test_": Sample(0.4),
    "tests/unit/testing/test_servers.py::test_servers_and": Sample(0.0),
    "tests/unit/timeline/test_statements.py::test_wrong_input": Sample(0.5),
    "tests/unit/catalog/test_staging.py::test_any_calls": Sample(0.3),
    "tests/unit/catalog/test_without_transactions.py": Sample(0.0, is_one=True),
    "tests/unit/client/test_times_at_every_door.py": Sample(0.4),
    "tests/unit/events/test_damage.py::test_damage_is_found": Sample(0.4),
    "tests/unit/events/test_damage.py::test_no_damage": Sample(0.4),
    "tests/unit/maintain/test_budgets.py::test_many_processes": Sample(0.0),
    "tests/unit/maintain/test_compaction_at_size.py::test_one_key": Sample(0.0),
    "tests/unit/maintain/test_maintain.py::test_every_single_failure": Sample(0.4),
    "tests/unit/maintain/test_repair.py::test_the_rows_from": Sample(0.3),
    "tests/unit/maintain/test_unchanged_parts.py::test_any_history": Sample(0.0),
    "tests/unit/maintain/test_maintain.py::test_one_rollup": Sample(0.0),
    "tests/unit/relation/test_append_async.py::test_ten_thousand": Sample(0.0),
    "tests/unit/relation/test_append_async_processes.py::test_a_program_that_just": Sample(0.3),
    "tests/unit/relation/test_doors.py::test_a_lazy_scan": Sample(0.3),
    "tests/unit/relation/test_read.py::test_splits": Sample(0.3),
    "tests/unit/sources/test_loading.py::test_an_instance_that_is_first": Sample(0.0),
    "tests/unit/sources/test_loading.py::test_tasks_make": Sample(0.0),
    "tests/unit/sources/test_postgres_changes.py::test_changes_make": Sample(0.4),
    "tests/unit/sources/test_reprocess.py::test_what_a_mender_left": Sample(0.0),
    "tests/unit/spark/test_batch_reads.py::test_pushed": Sample(0.3),
    "tests/unit/spark/test_collections.py::test_a_stream": Sample(0.3),
    "tests/unit/spark/test_collections.py::test_any_history": Sample(0.0),
    "tests/unit/spark/test_streaming_reads.py::test_killed": Sample(0.4),
    "tests/unit/timeline/test_isolation_checker.py::test_a_planted": Sample(0.3),
    "tests/unit/timeline/test_tail.py": Sample(0.5),
}
"""The beginning of a test's id, and what is drawn."""


MANY = 4
THIRD = Sample(0.34)
WHOLE = (
    "tests/defects/", "tests/scripts/", "tests/unit/convert/", "tests/unit/core/", "tests/unit/format/",
    "tests/unit/kernel/", "tests/unit/schema/", "tests/unit/testing/",
)  # fmt: skip

DEAR = Path(__file__).with_name("dear.txt")
"""What `python -m tests.durations build/durations --dear` wrote: a line a function, CPU seconds first."""
SHOWN = (
    "tests/conformance/", "tests/defects/", "tests/faults/test_shard_servers.py", "tests/integration/test_demo.py",
    "tests/integration/test_git_history.py", "tests/models/", "tests/orchestration/test_dev_loading.py",
    "tests/orchestration/test_maintenance_run.py", "tests/properties/", "tests/simulation/",
    "tests/spark/test_reads_everywhere.py", "tests/torture/", "tests/unit/client/test_arguments.py", "tests/wheels/",
)  # fmt: skip

LONGEST = (
    "tests/spark/test_sql_catalog.py",
    "tests/spark/test_collections_on_spark.py",
    "tests/orchestration/test_dev_runs.py",
    "tests/spark/test_reads_everywhere.py",
    "tests/spark/test_compaction_on_spark.py",
    "tests/spark/test_one_table_on_spark.py",
    "tests/spark/test_rounds_killed.py",
    "tests/spark/test_streams_on_spark.py",
    "tests/wheels/test_extras.py",
    "tests/torture/test_postgres_source.py",
    "tests/orchestration/test_dev_loading.py",
    "tests/docs/test_pages.py",
)
"""Files that take a minute or more: they begin first, so that no worker is left alone with one."""


def is_day() -> bool:
    """Whether this is the circle of `make test`."""
    return os.environ.get(VARIABLE) == "day"


def _draw(nodeid: str, seed: str) -> float:
    """A number from 0 up to 1 that a seed and a test decide, in every process alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {nodeid}".encode()).digest()[:6]) / 2**48


def _at_night(nodeid: str) -> bool:
    return any(nodeid.startswith(beginning) for beginning in NIGHTLY)


def _sample(nodeid: str) -> tuple[str, Sample] | None:
    return next((found for found in SAMPLED.items() if nodeid.startswith(found[0])), None)


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def _with_recorded_bugs() -> frozenset[str]:
    """The functions that recorded bugs name, of which each case may be the one that finds its bug."""
    from tests.defects.plant import defects  # noqa: PLC0415 - it names what is here

    return frozenset(_function(test) for one in defects() for test in one.tests)


@functools.cache
def _dear() -> frozenset[str]:
    """The functions of which two thirds are left to the night."""
    dear = {line.split(" ", 1)[1] for line in DEAR.read_text().splitlines()}
    named = _with_recorded_bugs()
    return frozenset(one for one in dear if not one.startswith(SHOWN) and named.isdisjoint({one, _file(one)}))


def by_day(places: Sequence[T], every: int) -> Sequence[T]:
    """Where one test strikes: everywhere at night, and by day at each `every`-th place, from one that the seed says."""
    if not is_day():
        return places
    return places[int(_draw("", os.environ.get("PERSIST_SEED", "fixed")) * every) :: every] or places[:1]


def has_met(found: Iterable[object], outcomes: Iterable[object]) -> bool:
    """Whether all outcomes were met, and no other one; by day, where `by_day` leaves places out, at least one was."""
    met, there = set(found), set(outcomes)
    return met == there or (is_day() and bool(met) and met < there)


def _left_of_the_dear(nodeids: Iterable[str], seed: str) -> set[str]:
    """Of these tests' dear functions, those that do not run by day."""
    by_file: dict[str, set[tuple[float, str]]] = defaultdict(set)
    for function in {_function(nodeid) for nodeid in nodeids if not _at_night(nodeid)} & _dear():
        by_file[_file(function)].add((_draw(function, seed), function))
    return {function for drawn in by_file.values() for share, function in drawn - {min(drawn)} if share >= THIRD.share}


def kept(nodeids: Iterable[str], seed: str) -> set[str]:
    """Those of these tests that run by day."""
    chosen: set[str] = set()
    groups: dict[str, list[tuple[float, str, float]]] = defaultdict(list)
    left = _left_of_the_dear(nodeids := [*nodeids], seed)
    cases = Counter(_function(nodeid) for nodeid in nodeids)
    many = {function for function, count in cases.items() if count >= MANY and not function.startswith(WHOLE)}
    many -= _with_recorded_bugs() if many else set()
    for nodeid in nodeids:
        function = _function(nodeid)
        case = nodeid.removeprefix(function)
        found = _sample(nodeid) or ((function, THIRD) if function in many else None)
        if function in left or _at_night(nodeid):
            continue
        if found is None or any(name in case for name in found[1].whole):
            chosen.add(nodeid)
        else:
            beginning, sample = found
            groups[beginning if sample.is_one else function].append((_draw(nodeid, seed), nodeid, sample.share))
    for group in groups.values():
        least = min(group)
        chosen.update(nodeid for draw, nodeid, share in group if draw < share or (draw, nodeid, share) == least)
    return chosen


def longest_first(items: list[pytest.Item]) -> None:
    """Put what waits longest at the beginning, and leave the others in their order."""
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(_file(item.nodeid), len(ranks)))


def _fewer(given: settings) -> settings:
    examples = max(min(given.max_examples, LEAST), math.ceil(given.max_examples * EXAMPLES))
    return settings(given, max_examples=examples, stateful_step_count=math.ceil(given.stateful_step_count * STEPS))


def draw_less(items: Iterable[pytest.Item]) -> None:
    """By day laws and models draw a share of what they say. Call it once for each item."""
    if not is_day():
        return
    functions = [item for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)]
    for model in {item.cls for item in functions if hasattr(item.cls, "settings")}:
        model.settings = _fewer(model.settings)
    for law in {getattr(item.obj, "__func__", item.obj) for item in functions if not hasattr(item.cls, "settings")}:
        # As hypothesis's own plugin of pytest does: what a decorator has settled has no public way to be changed.
        law._hypothesis_internal_use_settings = _fewer(law._hypothesis_internal_use_settings)


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the night what is not of this circle, counted as deselected. A test that is named by its file runs."""
    named = [argument for argument in config.args if ".py" in argument]
    if not is_day() or (named and DRAWN not in os.environ):
        return
    chosen = kept([item.nodeid for item in items], os.environ.get("PERSIST_SEED", "fixed"))
    left = [item for item in items if item.nodeid not in chosen]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid in chosen]
