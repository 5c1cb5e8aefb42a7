"""Runs that are old go, with their events: the only thing that Dagster keeps for ever by itself.

Only finished runs of this pipeline go, and none that still says something: the newest materialization of a partition,
and the newest verdict, are kept with their run, however old. So no page turns grey, and nothing is green beside known
damage, for want of a run.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import datetime as dt
from collections.abc import Collection, Iterator, Sequence

import dagster as dg
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.events import DagsterEventType
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from pydantic import Field

from orchestration.checks import CHECKS
from orchestration.mount import Mount
from orchestration.reports import listed
from orchestration.settings import KEEP_RUNS_DAYS, Settings, resolved

PRUNE = "prune"
FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
PAGE = 500
CRON = "17 1 * * *"


class PruneConfig(dg.Config):
    """Which runs go."""

    days: float = Field(default=KEEP_RUNS_DAYS, gt=0, description="finished runs that ended longer ago go")
    dry_run: bool = Field(default=False, description="only say which")


def prune_job(mount: Mount, jobs: Sequence[str], assets: Sequence[dg.AssetKey]) -> dg.JobDefinition:
    """The job that deletes old runs of these jobs and of itself, and of backfills of these assets."""

    @dg.op(name=mount.named("pruning_of_runs"), out={})
    def of_runs(context: dg.OpExecutionContext, config: PruneConfig) -> Iterator[dg.AssetObservation]:
        before = dt.datetime.now(dt.UTC) - dt.timedelta(days=config.days)
        instance, needed = context.instance, needed_runs(context.instance, mount, assets)
        old = list(old_runs(instance, [*jobs, mount.named(PRUNE)], assets, before))
        gone = [run.run_id for run in old if run.run_id not in needed]
        for run_id in () if config.dry_run else gone:
            delete_run(instance, run_id)
        context.log.info(
            "%d of %d runs of more than %g days %s; the others have the newest word on a partition: %s",
            len(gone), len(old), config.days, "would go" if config.dry_run else "are deleted", listed(gone) or "none",
        )  # fmt: skip
        yield from ()

    @dg.job(
        name=mount.named(PRUNE), description="Delete old runs, but those that still say something.",
        executor_def=dg.in_process_executor, tags={"persist/duty": mount.named(PRUNE)},
    )  # fmt: skip
    def prune() -> None:
        of_runs()

    return prune


def prune_schedule(
    mount: Mount, job: dg.JobDefinition, settings: Settings, status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:  # fmt: skip
    """Prune each night, unless all runs are to be kept."""

    @dg.schedule(
        name=f"{job.name}_schedule", job=job, cron_schedule=mount.cron(CRON), execution_timezone="UTC",
        default_status=status,
        description="Deletes old runs, but those that still say something.",
    )  # fmt: skip
    def each_night(_context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        days = resolved(settings).keep_runs_days
        if not days:
            return dg.SkipReason("all runs are kept, as PERSIST_KEEP_RUNS_DAYS is 0")
        return dg.RunRequest(run_config=dg.RunConfig(ops={mount.named("pruning_of_runs"): PruneConfig(days=days)}))

    return each_night


def old_runs(
    instance: dg.DagsterInstance, jobs: Sequence[str], assets: Collection[dg.AssetKey], before: dt.datetime
) -> Iterator[dg.DagsterRun]:  # fmt: skip
    """The finished runs of this pipeline that nothing has changed since then."""
    for job in (*jobs, IMPLICIT_ASSET_JOB_NAME):
        wanted = dg.RunsFilter(job_name=job, statuses=FINISHED, updated_before=before)
        for run in instance.get_runs(wanted):
            if job != IMPLICIT_ASSET_JOB_NAME or (run.asset_selection and run.asset_selection <= set(assets)):
                yield run


def needed_runs(instance: dg.DagsterInstance, mount: Mount, assets: Sequence[dg.AssetKey]) -> set[str]:
    """The runs that have the newest word on a partition: what was made of it, a verdict, or that they failed there."""
    storage, made, found = instance.event_log_storage, DagsterEventType.ASSET_MATERIALIZATION, set[str]()
    for key in assets:
        ids = sorted(storage.get_latest_storage_id_by_partition(key, made).values())
        for start in range(0, len(ids), PAGE):
            wanted = dg.AssetRecordsFilter(asset_key=key, storage_ids=ids[start : start + PAGE])
            found |= {one.run_id for one in instance.fetch_materializations(wanted, limit=PAGE).records}
        failed = storage.get_latest_asset_partition_materialization_attempts_without_materializations(key)
        found |= {run_id for run_id, _ in failed.values()}
        found |= {one.run_id for one in instance.fetch_materializations(key, limit=1).records}
        found |= {one.run_id for one in instance.fetch_observations(key, limit=1).records}
    for check, (duty, _) in CHECKS.items():
        verdict = dg.AssetCheckKey(mount.key(duty), check)
        found |= {one.latest_planned_run_id for one in storage.get_asset_check_partition_info([verdict])}
        found |= {one.run_id for one in storage.get_asset_check_execution_history(verdict, limit=1)}
    return found


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run and its events. SUBTLE: Dagster leaves its verdicts, which would be there for ever."""
    instance.delete_run(run_id)
    storage = instance.event_log_storage
    if isinstance(storage, SqlEventLogStorage):
        with storage.index_connection() as connection:
            connection.execute(AssetCheckExecutionsTable.delete().where(AssetCheckExecutionsTable.c.run_id == run_id))
