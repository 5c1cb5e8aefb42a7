"""Pending areas in Dagster: an asset, a job that absorbs what writers put, and a schedule that asks if that is due.

What is due is found by listing what was put. Garbage that absorption makes is deleted by the duty `garbage`.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator, Sequence

import dagster as dg

from orchestration.collection_reports import table
from orchestration.config import PendingConfig
from orchestration.factories import Tick, op_of, schedule_of
from orchestration.jobs import LOOK_S
from orchestration.mount import Mount
from orchestration.partitions import PENDING as PARTITIONS
from orchestration.partitions import add_missing, keep, shown
from orchestration.plans import is_asked, written_down
from orchestration.reports import DRY_RUN, Event, figure
from orchestration.resources import Persist
from persist_lib.core.duties import BY_NAME
from persist_lib.core.plan.written import Plan, ShardPlan
from persist_lib.errors import PersistError
from persist_lib.pending_area import Absorbed, absorb, due_collections, pending_collections, plan
from persist_lib.runtime.each import Each, why
from persist_lib.sources.kinds import owners_of

PENDING = "pending"
DUTY = BY_NAME[PENDING]
MOST_NAMED = 20


def pending_schedule(mount: Mount, job: dg.JobDefinition, status: dg.DefaultScheduleStatus) -> dg.ScheduleDefinition:
    """Absorb where something is due. Looking costs a listing of what is pending, a thousand batches a request."""

    def keep_partitions(instance: dg.DagsterInstance, persist: Persist) -> None:
        known = instance.get_dynamic_partitions(mount.named(PARTITIONS))
        alive = set(shown(persist.client.survey(seconds=LOOK_S), owners_of(persist.client)))
        there = dict.fromkeys(name for name in (*known, *pending_collections(persist.client)) if name in alive)
        keep(instance, mount, PARTITIONS, list(there))

    def when_due(persist: Persist) -> Tick:
        due = due_collections(persist.client)
        if not due.failed and not any(due.done.values()):
            paused = [one.shown for one in persist.client.pauses() if one.holds_for(PENDING)]
            but = f"; paused: {'; '.join(paused)}" if paused else ""
            return dg.SkipReason(f"nothing that could be absorbed is pending{but}")
        return dg.RunRequest()

    says = f"{DUTY.does} Runs only where that is due."
    return schedule_of(mount, job, DUTY.schedule, status, says, when_due, keep_partitions)


def absorb_op(mount: Mount) -> dg.OpDefinition:
    """Absorb collections one after the other. What fails or is in dispute is told at the end; the others are done."""

    def of_pending(context: dg.OpExecutionContext, config: PendingConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        done: list[Absorbed] = []
        due = Each[bool]() if config.collections else due_collections(persist.client)
        wrong = dict(due.why)
        names = config.collections or [name for name, is_due in due.done.items() if is_due]
        if is_asked(config):
            plans = Each[ShardPlan]().add(names, lambda name: plan(persist.client, name), PersistError)
            wrong |= plans.why
            found = [one for one in plans.done.values() if one.steps]
            yield from written_down(context, mount, Plan(()).with_pending(found))
            context.log.info("%d of %d collections have something to absorb", len(found), len(names))
            names = []
        for name in names:
            try:
                one = absorb(persist.client, name, dry_run=config.dry_run)
            except PersistError as error:
                wrong[name] = why(error)
                continue
            done.append(one)
            context.log.info("%s: %s batches absorbed, up to %s", name, f"{one.batches:,}", one.upper)
            if one.is_blocked:
                sides = " and ".join(", ".join(side) or "the collection" for side in one.disagreements[0].writers)
                wrong[name] = f"{sides} disagree at {one.disagreements[0].time}; run `persist pending choose {name}`"
        kind = dg.AssetObservation if config.dry_run else dg.AssetMaterialization
        tags = {DRY_RUN: "true"} if config.dry_run else {}
        add_missing(context.instance, mount, PARTITIONS, [one.shard for one in done])
        for one in done:
            yield kind(mount.key(PENDING), partition=one.shard, metadata=figures([one]), tags=tags)
        rows = {"collections": table([row_of(one) for one in done[:MOST_NAMED]])}
        yield dg.AssetObservation(mount.key(PENDING), metadata={**figures(done), **rows}, tags=tags)
        if wrong:
            lines = "; ".join(f"{name} ({says})" for name, says in sorted(wrong.items()))
            raise dg.Failure(
                f"Not all could be absorbed, {len(wrong)} of {len(done) + len(wrong)} collections: {lines}"
            )

    return op_of(mount, "absorption_of_pending", DUTY.does, of_pending)


def figures(done: Sequence[Absorbed]) -> dict[str, dg.MetadataValue]:
    """What was absorbed, in figures that draw timelines."""
    names = ("batches", "adopted", "updates", "size", "discarded", "left", "transitions")
    sums = {name: figure(sum(getattr(one, name) for one in done)) for name in names}
    sums["in_dispute"] = figure(sum(one.is_blocked for one in done))
    sums["damaged"] = figure(sum(len(one.damaged) for one in done))
    sums["dollars"] = figure(float(sum(one.cost.dollars for one in done)))
    return sums


def row_of(one: Absorbed) -> dict[str, object]:
    """A collection as a row of the table of a run."""
    state = "in dispute" if one.is_blocked else one.waits or "absorbed"
    return {
        "collection": one.shard, "upper": str(one.upper), "batches": one.batches, "updates": one.updates,
        "left": one.left, "state": state,
    }  # fmt: skip
