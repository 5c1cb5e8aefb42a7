"""Schedules for duties that are due by the clock. Each tick asks the location first, and starts no run without work.

Duties that are due by the state of shards are in `sensors`.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Mapping

import dagster as dg

from orchestration.choice import due
from orchestration.jobs import JOBS
from orchestration.mount import Mount
from orchestration.resources import Persist
from orchestration.runs import is_unfinished
from persist_lib.core.duties import DUTIES, Duty

LOOK_S = 20.0
"""How long a tick looks at shards that changed, in seconds. The others wait for the next tick, or for the run."""


def schedules(
    mount: Mount, jobs: Mapping[str, dg.JobDefinition], status: dg.DefaultScheduleStatus
) -> list[dg.ScheduleDefinition]:
    """One schedule for each duty that is due by the clock. Each run is one process for all shards."""
    return [schedule(mount, jobs[duty.name], duty, status) for duty in DUTIES if duty.schedule]


def schedule(
    mount: Mount, job: dg.JobDefinition, duty: Duty, status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """The schedule of one duty."""

    @dg.schedule(
        name=f"{job.name}_schedule", job=job, cron_schedule=mount.cron(duty.schedule), execution_timezone="UTC",
        default_status=status, tags={"persist/duty": job.name}, required_resource_keys={mount.persist},
        description=f"{duty.does} Runs only where that is due.",
    )  # fmt: skip
    def when_due(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        persist: Persist = getattr(context.resources, mount.persist)
        if is_unfinished(context.instance, job.name):
            return dg.SkipReason(f"the last run of {job.name} is not finished")
        survey = persist.client.survey(seconds=LOOK_S)
        choice = due(survey, JOBS[duty.name][0])
        if not choice.shards and not survey.waiting:
            return dg.SkipReason(f"nothing is due on any of {choice.there} shards{choice.says}")
        return dg.RunRequest()

    return when_due
