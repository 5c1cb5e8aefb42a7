"""What Dagster knows of the runs of a job that are not finished."""

from __future__ import annotations

from typing import Any

import dagster as dg

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def is_unfinished(instance: dg.DagsterInstance, job: str) -> bool:
    """Whether a run of this job is queued or running."""
    return bool(instance.get_runs(dg.RunsFilter(job_name=job, statuses=UNFINISHED), limit=1))


def shards_in_flight(instance: dg.DagsterInstance, job: str, op: str) -> set[str]:
    """The shards that unfinished runs of this job were told to visit. Runs that visit what is due name none."""
    found: set[str] = set()
    for run in instance.get_runs(dg.RunsFilter(job_name=job, statuses=UNFINISHED)):
        ops: Any = run.run_config.get("ops") or {}
        found.update((ops.get(op) or {}).get("config", {}).get("shards", ()))
    return found
