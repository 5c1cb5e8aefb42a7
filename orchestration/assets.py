"""The duties as assets: one partition a shard, one materialization a shard and duty.

All of them are one op. So a run over many shards, such as a backfill, is one process and one Spark application with
every executor, and one shard is collected while another is still compacted. One asset can be selected alone.

A backfill over scattered shards is one run, too. Dagster cuts a backfill into runs of adjacent partitions: twenty
scattered shards are twenty runs, twenty processes and twenty JVMs. So the first run of a backfill takes all of its
partitions, and removes the other runs while they are in the queue. A run that came later finds its partitions taken,
and ends. A backfill judges itself by the materializations of its partitions, not by its runs, so it ends as it should.

SUBTLE: nothing is yielded as an output. Dagster would record an output for every partition of the run, also for a shard
that failed. So each materialization is recorded by itself, when it is done.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator

import dagster as dg

from orchestration.checks import CHECKS, check_specs
from orchestration.config import DutyConfig, options_of
from orchestration.duties import DUTIES
from orchestration.factories import OWNERS
from orchestration.jobs import told
from orchestration.mount import Mount
from orchestration.reports import Event, Recording
from orchestration.resources import Persist, traced
from orchestration.stopping import resume_cancelled
from orchestration.sweep import look, spark_engine, sweep
from persist_lib.core import duties as core
from persist_lib.sources.kinds import owners_of

BACKFILL = "dagster/backfill"
BEGUN = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]


def specs(mount: Mount) -> list[dg.AssetSpec]:
    """The assets, drawn in the order in which their duties are done."""
    return [
        dg.AssetSpec(
            mount.key(duty.name), deps=[mount.key(one) for one in duty.after], description=duty.does,
            partitions_def=mount.partitions, skippable=True, group_name=mount.group, kinds={"python", *duty.kinds},
            owners=OWNERS, code_version="1",
        )
        for duty in core.DUTIES
    ]  # fmt: skip


def duties_asset(mount: Mount) -> dg.AssetsDefinition:
    """All duties as one asset with several keys."""

    @dg.multi_asset(
        name=mount.named("shard_duties"),
        specs=specs(mount),
        check_specs=check_specs(mount),
        can_subset=True,
        # SUBTLE: runs of such a backfill are tagged with the range of their partitions, not with `dagster/partition`.
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys={mount.persist, mount.spark},
        pool=mount.pool_for(DUTIES),
    )
    @traced
    def shard_duties(context: dg.AssetExecutionContext, config: DutyConfig) -> Iterator[Event]:
        """Do the selected duties for the run's partitions. A run of checks without any asset changes nothing."""
        persist: Persist = getattr(context.resources, mount.persist)
        wanted = {mount.duty_of(key) for key in context.selected_asset_keys}
        checks = {key.name for key in context.selected_asset_check_keys}
        duties = [duty for duty in DUTIES if duty in wanted or any(CHECKS[name][0] == duty for name in checks)]
        is_dry = config.dry_run or not wanted
        options, client = options_of(config, persist, is_dry=is_dry), persist.client
        choice = told(look(context.log, client), partitions_of(context))
        if choice.shards and not is_dry:
            resume_cancelled(context.op_execution_context, client, choice.shards)
        if not choice.shards:
            context.log.info("an earlier run of this backfill takes these partitions")
            return
        recording = Recording(
            context.instance, mount, wanted, checks, everything=True, is_dry=config.dry_run, owner=owners_of(client).of
        )
        options = spark_engine(client, getattr(context.resources, mount.spark), options)
        try:
            yield from sweep(context.op_execution_context, client, choice.shards, duties, options, recording)
        finally:
            remove_waiting(context)

    return shard_duties


def partitions_of(context: dg.AssetExecutionContext) -> list[str]:
    """The partitions of this run: those of its whole backfill; none if an earlier run of the backfill took them."""
    own = list(context.partition_keys)
    asked = _asked(context)
    if asked is None or not set(own) <= asked:
        return own
    first = min(
        (record for record in context.instance.get_run_records(_siblings(context, BEGUN))
         if record.dagster_run.asset_selection == context.run.asset_selection),
        key=lambda record: record.storage_id,
        default=None,
    )  # fmt: skip
    if first is not None and first.dagster_run.run_id != context.run_id and not _is_retried(context, first.dagster_run):
        return []
    remove_waiting(context)
    return sorted(asked)


def remove_waiting(context: dg.AssetExecutionContext) -> int:
    """Remove the runs of this backfill that wait in the queue for partitions that this run took. Returns how many."""
    if BACKFILL not in context.run.tags:
        return 0
    waiting = [
        run
        for run in context.instance.get_runs(_siblings(context, [dg.DagsterRunStatus.QUEUED]))
        if run.asset_selection == context.run.asset_selection
    ]
    for run in waiting:
        context.instance.delete_run(run.run_id)
    return len(waiting)


def _asked(context: dg.AssetExecutionContext) -> set[str] | None:
    """The partitions that the backfill of this run asked for; None if this run belongs to none."""
    backfill_id = context.run.tags.get(BACKFILL)
    backfill = context.instance.get_backfill(backfill_id) if backfill_id else None
    if backfill is None or backfill.asset_backfill_data is None:
        return None
    target = backfill.asset_backfill_data.target_subset
    there = target.partitions_subsets_by_asset_key
    return {key for asset in context.selected_asset_keys if asset in there for key in there[asset].get_partition_keys()}


def _siblings(context: dg.AssetExecutionContext, statuses: list[dg.DagsterRunStatus]) -> dg.RunsFilter:
    return dg.RunsFilter(tags={BACKFILL: context.run.tags[BACKFILL]}, statuses=statuses)


def _is_retried(context: dg.AssetExecutionContext, first: dg.DagsterRun) -> bool:
    """Whether this run is another attempt of the run that took the partitions."""
    root = first.root_run_id or first.run_id
    return context.run.root_run_id == root
