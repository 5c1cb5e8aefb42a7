"""Schedules of several locations are spread over minutes, and runs that may compact are in one pool of Dagster's."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from itertools import islice

import dagster as dg
import pytest
from dagster._core.definitions.op_definition import OpDefinition
from dagster._utils.schedules import cron_string_iterator

from orchestration.definitions import build_definitions
from orchestration.fleet import CRON as FLEET
from orchestration.mount import Mount, placed
from orchestration.pruning import CRON as PRUNING
from orchestration.settings import Settings, resolved
from orchestration.stopping import next_ticks
from persist_lib.core.duties import BY_NAME
from persist_lib.errors import InvalidUsage

CRONS = sorted({FLEET, PRUNING, *(duty.schedule for duty in BY_NAME.values() if duty.schedule)})
SUNDAY = dt.datetime(2026, 11, 29, tzinfo=dt.UTC).timestamp()


def ticks(cron: str, since: float) -> list[float]:
    return [one.timestamp() for one in islice(cron_string_iterator(since, cron, "UTC"), 50)]


@pytest.mark.parametrize("later", [1, 6, 7, 59, 60, 300, 1439])
@pytest.mark.parametrize("cron", CRONS)
def test_a_schedule_ticks_as_often_and_so_many_minutes_later(cron: str, later: int) -> None:
    as_said = ticks(cron, SUNDAY - later * 60)
    assert ticks(Mount(later=later).cron(cron), SUNDAY) == [one + later * 60 for one in as_said]


def test_schedules_are_as_they_are_unless_they_are_to_be_spread() -> None:
    assert [Mount().cron(cron) for cron in CRONS] == CRONS
    assert crons(Settings(location="file:./data")) == crons(Settings(location="file:./other"))


def test_schedules_of_several_locations_do_not_begin_at_once() -> None:
    names = [f"file:./data{number}" for number in range(40)]
    later = [placed(Mount(), resolved(Settings(location=name, stagger=30), {})).later for name in names]
    assert set(later) <= set(range(30))
    assert len(set(later)) > 15
    one, again, other = (crons(Settings(location=name, stagger=1440)) for name in ("file:./a", "file:./a", "file:./b"))
    assert one == again, "of one location they are the same each time"
    assert one["compaction_schedule"] != other["compaction_schedule"]
    assert crons(Settings(location="file:./a")) == crons(Settings()), "and by default as the manual says"


def test_a_cancelled_run_waits_for_the_schedule_as_it_is_spread() -> None:
    ((plain, _),) = next_ticks(SUNDAY, ["compaction"], Mount()).items()
    ((later, _),) = next_ticks(SUNDAY, ["compaction"], Mount(later=45)).items()
    assert later - plain == 45 * 60_000


def crons(settings: Settings) -> Mapping[str, object]:
    return {one.name: one.cron_schedule for one in build_definitions(settings).get_repository_def().schedule_defs}


def test_runs_that_may_compact_are_in_one_pool_and_no_others() -> None:
    found = pools(build_definitions(Settings(location="file:./data", pool="rewriting")))
    counted = {"compaction_of_shards", "maintenance_of_shards", "applying_of_plan", "shard_duties"}
    assert {name for name, pool in found.items() if pool == "rewriting"} == counted
    assert {pool for name, pool in found.items() if name not in counted} == {None}
    assert set(pools(build_definitions(Settings(location="file:./data"))).values()) == {None}


def pools(definitions: dg.Definitions) -> dict[str, str | None]:
    nodes = [node for job in definitions.get_repository_def().get_all_jobs() for node in job.nodes]
    return {node.definition.name: node.definition.pool for node in nodes if isinstance(node.definition, OpDefinition)}


@pytest.mark.parametrize("environ", [{"PERSIST_POOL": "a pool"}, {"PERSIST_STAGGER": "0"}, {"PERSIST_STAGGER": "x"}])
def test_a_wrong_one_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match=next(iter(environ))):
        resolved(Settings(location="memory:"), environ)
    found = resolved(Settings(location="memory:"), {"PERSIST_POOL": "p", "PERSIST_STAGGER": "9"})
    assert (found.pool, found.stagger) == ("p", 9)
