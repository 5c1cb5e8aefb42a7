"""What assets, ops, jobs and schedules of the pipeline have in common: each kind is made in one place."""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg

from orchestration.mount import Mount
from orchestration.partitions import defined
from orchestration.reports import Event
from orchestration.resources import Persist, traced
from orchestration.runs import is_unfinished

OWNERS = ["team:storage"]
RETRIES = {"dagster/max_retries": "2", "dagster/retry_on_asset_or_op_failure": "false"}
"""Tags of every run of a job: one whose process was killed starts again. One that failed has tried again what may pass.

Runs of assets cannot have tags of their own: for them, dagster.yaml says the same.
"""

Tick = dg.RunRequest | dg.SkipReason


def asset_of(mount: Mount, name: str, says: str, partitions: str = "") -> dg.AssetSpec:
    """An asset that jobs report to, with partitions of this name if it has any."""
    return dg.AssetSpec(
        mount.key(name), description=says, owners=OWNERS, group_name=mount.group, kinds={"python"},
        partitions_def=defined(mount, partitions) if partitions else None,
    )  # fmt: skip


def op_of(
    mount: Mount, name: str, says: str, run: Callable[..., Iterator[Event]], *, spark: bool = False, **more: Any
) -> dg.OpDefinition:  # fmt: skip
    """The op of a job, which yields what it reports. It opens the location, and Spark if it may need that."""
    keys = {mount.persist, mount.spark} if spark else {mount.persist}
    return dg.op(name=mount.named(name), description=says, out={}, required_resource_keys=keys, **more)(traced(run))


def job_of(mount: Mount, name: str, op: dg.OpDefinition) -> dg.JobDefinition:
    """A job of one op, in one process. At most two runs of each at a time, by its tag in dagster.yaml."""

    @dg.job(
        name=mount.named(name), description=op.description, executor_def=dg.in_process_executor,
        tags={"persist/duty": mount.named(name), **RETRIES},
    )  # fmt: skip
    def job() -> None:
        op()

    return job


def schedule_of(
    mount: Mount, job: dg.JobDefinition, cron: str, status: dg.DefaultScheduleStatus, says: str,
    due: Callable[[Persist], Tick], before: Callable[[dg.DagsterInstance, Persist], object] = lambda *_: None,
) -> dg.ScheduleDefinition:  # fmt: skip
    """The schedule of a job: `due` says whether a tick starts a run, unless the last one is not finished.

    `before` is called at each tick.
    """

    @dg.schedule(
        name=f"{job.name}_schedule", job=job, cron_schedule=mount.cron(cron), execution_timezone="UTC",
        default_status=status, tags={"persist/duty": job.name}, required_resource_keys={mount.persist},
        description=says,
    )  # fmt: skip
    def when_due(context: dg.ScheduleEvaluationContext) -> Tick:
        persist: Persist = getattr(context.resources, mount.persist)
        before(context.instance, persist)
        if is_unfinished(context.instance, job.name):
            return dg.SkipReason(f"the last run of {job.name} is not finished")
        return due(persist)

    return when_due
