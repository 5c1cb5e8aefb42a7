"""Runs of the pipeline's jobs in this process and ticks of its schedules, as the daemon makes them; what they say."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import dagster as dg

from orchestration.definitions import build_definitions
from orchestration.resources import Persist
from orchestration.settings import Settings
from tests.spark.collections import SMALL


def defined(folder: Path, **settings: Any) -> dg.Definitions:
    """The pipeline of a location in a folder."""
    return build_definitions(Settings(**{"location": f"file:{folder}", "config": SMALL, **settings}))


def execute(
    folder: Path, instance: dg.DagsterInstance, job: str, op: str, config: dict[str, Any], /, **settings: Any
) -> dg.ExecuteInProcessResult:
    """One run of a job, as a schedule or an operator starts it, with this configuration of its op."""
    return defined(folder, **settings).resolve_job_def(job).execute_in_process(
        instance=instance, raise_on_error=False, run_config={"ops": {op: {"config": config}}}
    )  # fmt: skip


def why(result: dg.ExecuteInProcessResult) -> str:
    """What the one step that failed says."""
    (event,) = [one for one in result.all_events if one.is_step_failure]
    told = event.step_failure_data.user_failure_data
    return str(told.description if told else event.step_failure_data.error)


def materialized(result: dg.ExecuteInProcessResult) -> list[Any]:
    return [one.step_materialization_data.materialization for one in result.all_events if one.is_step_materialization]


def observed(result: dg.ExecuteInProcessResult) -> list[Any]:
    return [one.asset_observation_data.asset_observation for one in result.all_events if one.is_asset_observation]


def metadata(result: dg.ExecuteInProcessResult, asset: str, partition: str | None) -> dict[str, Any]:
    """What a run recorded once for a partition of an asset, or for all of it."""
    key = dg.AssetKey(asset)
    (one,) = [
        each for each in observed(result) + materialized(result) if (each.partition, each.asset_key) == (partition, key)
    ]
    return {name: value.value for name, value in one.metadata.items()}


def ticked(folder: Path, instance: dg.DagsterInstance, schedule: str, **settings: Any) -> Any:
    """One evaluation of a schedule."""
    repository = defined(folder, **settings).get_repository_def()
    given = Persist(location=f"file:{folder}", config=SMALL)
    with dg.build_schedule_context(
        instance=instance, scheduled_execution_time=dt.datetime(2026, 11, 22, 12, 0, tzinfo=dt.UTC),
        repository_def=repository, resources={"persist": given},
    ) as context:  # fmt: skip
        found = repository.get_schedule_def(schedule).evaluate_tick(context)
    given.teardown_after_execution(dg.build_init_resource_context())
    return found
