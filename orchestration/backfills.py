"""A backfill over scattered shards is one run.

Dagster cuts a backfill into runs of adjacent partitions: twenty scattered shards are twenty runs, twenty processes and
twenty JVMs. So the first run of a backfill takes all of its partitions, and removes the other runs while they are in
the queue. A run that came later finds its partitions taken, and ends.

A backfill judges itself by the materializations of its partitions, not by its runs, so it ends as it should.
"""

from __future__ import annotations

import dagster as dg

BACKFILL = "dagster/backfill"
BEGUN = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]


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
