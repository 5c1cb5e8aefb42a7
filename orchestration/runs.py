"""What Dagster knows of the runs of a job that are not finished."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.storage.tags import BACKFILL_ID_TAG, PARTITION_NAME_TAG

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


class Job(NamedTuple):
    """A job whose runs are about some names, and where its configuration names them. Without any, it is about all."""

    name: str
    op: str
    field: str

    def config_of(self, run: dg.DagsterRun) -> dict[str, Any]:
        """The configuration of a run of it."""
        ops: Any = run.run_config.get("ops") or {}
        found: dict[str, Any] = (ops.get(self.op) or {}).get("config", {})
        return found


def in_flight(instance: dg.DagsterInstance, job: Job) -> tuple[set[str], bool]:
    """What unfinished runs of the job were told that they are about; and whether one is about all that is due."""
    runs = instance.get_runs(dg.RunsFilter(job_name=job.name, statuses=UNFINISHED))
    told = [job.config_of(run).get(job.field, ()) for run in runs]
    return {name for names in told for name in names}, not all(told)


MOST_CANCELLED = 100
"""The most cancelled runs of a job, the newest, that are looked at. What older ones were about is not held back."""


def held_back(instance: dg.DagsterInstance, jobs: Sequence[Job], asset: dg.AssetKey | None = None) -> HeldBack:
    """What no sensor may ask for, as the newest run about it was cancelled. Any later run about it ends that.

    A cancel is a person's word, and a sensor is neither a person nor a schedule. With `asset`, runs and backfills of
    that asset count like those of the jobs.
    """
    kinds = [*(job.name for job in jobs), *([IMPLICIT_ASSET_JOB_NAME] if asset is not None else [])]
    stopped = [
        record
        for kind in kinds
        for record in instance.get_run_records(
            dg.RunsFilter(job_name=kind, statuses=[dg.DagsterRunStatus.CANCELED]), limit=MOST_CANCELLED
        )
    ]
    if not stopped:
        return HeldBack()
    since = min(record.create_timestamp for record in stopped) - dt.timedelta(seconds=1)
    records = [
        record
        for kind in kinds
        for record in instance.get_run_records(dg.RunsFilter(job_name=kind, created_after=since))
    ]
    held: set[str] = set()
    seen: set[str] = set()
    for record in sorted(records, key=lambda one: -one.storage_id):
        run = record.dagster_run
        is_stopped = run.status == dg.DagsterRunStatus.CANCELED
        names = _names(instance, run, {job.name: job for job in jobs}, asset)
        if names is None:
            return HeldBack(frozenset(held), frozenset(seen), is_stopped)
        held |= names - seen if is_stopped else set()
        seen |= names
    return HeldBack(frozenset(held), frozenset(seen))


class HeldBack(NamedTuple):
    """The names of which the newest run was cancelled. `others`: also all that are not in `seen`."""

    names: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    others: bool = False

    def has(self, name: str) -> bool:
        """Whether a name is one of them."""
        return name in self.names or (self.others and name not in self.seen)


def _names(
    instance: dg.DagsterInstance, run: dg.DagsterRun, jobs: Mapping[str, Job], asset: dg.AssetKey | None
) -> set[str] | None:  # fmt: skip
    """What a run is about; None for everything that is due."""
    if (job := jobs.get(run.job_name)) is not None:
        config = job.config_of(run)
        return set() if config.get("dry_run") else set(config.get(job.field, ())) or None
    if asset is None or asset not in (run.asset_selection or ()):
        return set()
    return asked_partitions(instance, run, asset)


def asked_partitions(instance: dg.DagsterInstance, run: dg.DagsterRun, asset: dg.AssetKey) -> set[str]:
    """The partitions of an asset that a run was asked for, or the backfill to which it belongs."""
    backfill_id = run.tags.get(BACKFILL_ID_TAG)
    backfill = instance.get_backfill(backfill_id) if backfill_id else None
    if backfill is not None and backfill.asset_backfill_data is not None:
        there = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key
        return set(there[asset].get_partition_keys()) if asset in there else set()
    return {run.tags[PARTITION_NAME_TAG]} if PARTITION_NAME_TAG in run.tags else set()
