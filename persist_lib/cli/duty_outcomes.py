"""What a duty did to a shard, or would do, as a sentence, as details, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import RenderableType

from persist_lib.cli import render
from persist_lib.cli.json_values import Json, clock, jsonable, plan_value
from persist_lib.cli.table_layout import Fitted
from persist_lib.core import units
from persist_lib.core.duties import figures_of
from persist_lib.core.units import number, of, size
from persist_lib.errors import PersistError
from persist_lib.times import Times, Unit, show_frontier

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.cli.session import Advance
    from persist_lib.client import Client
    from persist_lib.core.plan.written import ShardPlan, Step
    from persist_lib.core.state import Version
    from persist_lib.maintain import (
        Audited,
        Collected,
        Compacted,
        Expired,
        Maintained,
        Retained,
        RolledUp,
        Scrubbed,
        Upgraded,
    )

NAMED = 20
"""How many objects are named one by one; --json names all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to print, what to print for machines, and the exit code."""

    summary: str
    value: Json
    details: list[RenderableType] = field(default_factory=list)
    exit_code: int = 0


def compacted(done: Compacted, dry_run: bool, times: Unit | None = None) -> Outcome:
    """Batches before and after, bytes read and written, and each request; with `dry_run` the plan."""
    plan = done.plan
    value = {
        "batches_before": done.batches_before, "batches_after": done.batches_after, "bytes_in": done.bytes_in,
        "bytes_out": done.bytes_out, "plan": plan_value(plan), "applied": jsonable(done.applied),
        "cost": jsonable(done.cost), **clock(times),
    }  # fmt: skip
    if not plan.requests:
        return Outcome(f"nothing to compact: {of(done.batches_before, 'batch')}, none in debt", value)
    if dry_run:
        price = units.dollars(plan.cost.dollars)
        return Outcome(f"would rewrite {of(plan.debt, 'update')} for {price}", value, [render.plan_table(plan, times)])
    overtaken = sum(1 for applied in done.applied if applied.seqno is None)
    text = f"{number(done.batches_before)} → {of(done.batches_after, 'batch')}"
    text += f", read {size(done.bytes_in)}, wrote {size(done.bytes_out)}"
    if overtaken:
        text += f"; {of(overtaken, 'request')} came too late: another compactor was first"
    return Outcome(text, value, [_applied_table(done)])


def _applied_table(done: Compacted) -> Fitted:
    numbers = ("updates", "after", "read", "wrote", "took")
    table = render.plain_table("why", "batches", "version", "updates", "after", "read", "wrote", "took", right=numbers)
    for applied in done.applied:
        table.add_row(
            applied.reason, render.batch_ids(applied.ids), "too late" if applied.seqno is None else f"v{applied.seqno}",
            number(applied.updates_in), number(applied.updates_out), size(applied.bytes_in), size(applied.bytes_out),
            units.seconds(applied.seconds),
        )  # fmt: skip
    return table


def rolled_up(before: Version, done: RolledUp, every: int, force: bool, dry_run: bool) -> Outcome:
    """The rollup that was written, or why none was."""
    from persist_lib.core.plan.upkeep import rollup_is_due

    due = force or rollup_is_due(before.state, before.seqno, every)
    value = {**jsonable(done), "due": due}
    if done.key is not None:
        return Outcome(
            f"rolled up v{done.seqno}, {size(done.size)}; the newest lagged {number(done.behind)} behind", value
        )
    if not due:
        return Outcome(f"no rollup is due: the newest lags {number(done.behind)} behind, due at {number(every)}", value)
    if dry_run:
        return Outcome(f"would roll up v{done.seqno}; the newest lags {number(done.behind)} behind", value)
    return Outcome("another process rolled up at the same time", value)


def upgraded(done: Upgraded, dry_run: bool) -> Outcome:
    """From which format to which."""
    if done.before == done.after:
        return Outcome(f"stays in format {done.after}", jsonable(done))
    verb = "would move from" if dry_run else "moved from"
    return Outcome(f"{verb} format {done.before} to {done.after}", jsonable(done))


def expired(done: Expired, dry_run: bool, times: Unit | None = None) -> Outcome:
    """Which ids were retired, and what they held back."""
    if not done.overdue:
        return Outcome(f"no lease is overdue, {number(done.live)} live", jsonable(done))
    lines = []
    for overdue in done.overdue:
        held = (
            ""
            if overdue.since is None
            else f", held since {show_frontier(overdue.since, times)} and states from v{overdue.seqno}"
        )
        lines.append(f"  {overdue.id} {_why_over(overdue.overdue_ms)}{held}")
    verb = "would retire" if dry_run else "retired"
    return Outcome(f"{verb} {number(len(done.overdue))} of {number(done.live)}", jsonable(done), [*lines])


def _why_over(overdue_ms: int) -> str:
    if overdue_ms >= 0:
        return f"overdue by {units.duration(overdue_ms)}"
    return f"leased for another {units.duration(-overdue_ms)} by a clock that was wrong"


def retained(done: Retained, after: Version, dry_run: bool) -> Outcome:
    """How since moved, and what keeps it from moving further."""
    state = after.state
    from persist_lib.core.leases import keepers

    kept_by = keepers(state)
    value = {**jsonable(done), "kept_by": kept_by, **clock(state.times)}
    if done.distance is None:
        says = "no retention policy: history is kept as readers and holds say"
        return Outcome(f"policy: {done.says}" if done.says else says, value)
    times = Times(state.times, lambda: 0)
    before, after_ = times.show(done.before), times.show(done.after)
    policy = f"policy: {done.says} behind upper {times.show(state.upper)}"
    if done.before == done.after:
        return Outcome(
            f"since stays at {before}; {policy}", value, [f"  kept by {', '.join(kept_by)}"] if kept_by else []
        )
    verb = "the retention hold would move to" if dry_run else "since"
    return Outcome(f"{verb} {'' if dry_run else f'{before} → '}{after_}; {policy}", value)


def collected(before: Version, done: Collected, dry_run: bool) -> Outcome:
    """What was deleted, and what has to wait and why."""
    from persist_lib.core.plan.garbage import plan_garbage

    below = plan_garbage(before.state, before.seqno).truncate_below
    value = {**jsonable(done), "truncate_below": below}
    text = f"deleted {of(len(done.keys), 'object')}, {size(done.size)}, and {of(done.rows, 'log row')}"
    if dry_run:
        text = f"would delete {of(len(done.keys), 'object')}, {size(done.size)}"
        text += f", and truncate the log below v{below}" if below > 1 else ""
    waits = (f"  {of(each.keys, 'object')}, {size(each.size)} must wait: {each.why}" for each in done.held)
    details = [*_keys(done.keys if dry_run else ()), *waits, *_failures(done.failed)]
    return Outcome(text, value, details, bool(done.failed))


def audited(done: Audited, dry_run: bool) -> Outcome:
    """Which orphans there were."""
    verb = "would delete" if dry_run else "deleted"
    text = f"{verb} {of(len(done.orphans), 'orphan')}, {size(done.size)}"
    text += f"; {number(done.live)} in use, {number(done.pending)} pending"
    if done.uploads:
        weight = f", {size(done.uploads_size)}," if done.uploads_size else ""
        text += f"; {of(done.uploads, 'unfinished upload')}{weight} {'would be ' if dry_run else ''}given up"
    if done.swept:
        text += f"; {of(len(done.swept), 'retired id')} {'could be forgotten' if dry_run else 'forgotten'}"
    return Outcome(text, jsonable(done), [*_keys(done.orphans), *_failures(done.failed)], bool(done.failed))


def scrubbed(done: Scrubbed) -> Outcome:
    """What was read, and every damage."""
    text = f"{of(len(done.damaged), 'batch')} DAMAGED: {done.says}" if done.damaged else done.says
    read = f"  read {of(done.batches, 'batch')}, {of(done.updates, 'update')}, {size(done.size)}, up to v{done.newest}"
    return Outcome(text, {**jsonable(done), "says": done.says}, [read], exit_code=3 if done.damaged else 0)


def of_duty(client: Client, duty: str, shard: str, dry_run: bool, advance: Advance, *, force: bool = False) -> Outcome:
    """Carry out a duty of the table, and describe what it did; by its figures, if it has no function here."""
    match duty:
        case "leases":
            return expired(client.expire(shard, dry_run=dry_run), dry_run, client.machine(shard).state.times)
        case "retention":
            return retained(client.retain(shard, dry_run=dry_run), client.inspect(shard), dry_run)
        case "compaction":
            done = client.compact(shard, dry_run=dry_run, alone=True, progress=advance)
            times = client.machine(shard).state.times
            outcome = compacted(done, dry_run, times)
            return replace(outcome, details=[render.plan_table(done.plan, times)]) if dry_run else outcome
        case "rollups":
            before, every = client.inspect(shard), client.config.rollup_every
            rolled = client.roll_up(shard, force=force, dry_run=dry_run, alone=True)
            return rolled_up(before, rolled, every, force, dry_run)
        case "garbage":
            before = client.inspect(shard)
            return collected(before, client.collect(shard, dry_run=dry_run, progress=advance), dry_run)
        case "orphans":
            return audited(client.audit_orphans(shard, dry_run=dry_run, progress=advance), dry_run)
        case _:
            from persist_lib.maintain.duties import carry_out

            machine, policy = client.machine(shard), client.policy(name=shard)
            return plain(carry_out(duty, machine, client.leases, policy=policy, dry_run=dry_run, alone=True))


def plain(done: object) -> Outcome:
    """An answer as its figures."""
    value = jsonable(done)
    figures = figures_of(done)
    return Outcome(", ".join(f"{name} {amount:,}" for name, amount in figures.items()) or "done", value)


def maintained(done: Maintained, after: Version, rollup_every: int, dry_run: bool) -> Outcome:
    """Every duty, and the shard before and after."""
    words: dict[str, Callable[[], Outcome]] = {
        "leases": lambda: expired(done.expired, dry_run, after.state.times),
        "retention": lambda: retained(done.retained, after, dry_run),
        "compaction": lambda: compacted(done.compacted, dry_run, after.state.times),
        "rollups": lambda: rolled_up(after, done.rolled_up, rollup_every, False, dry_run),
        "garbage": lambda: collected(after, done.collected, dry_run),
        "orphans": lambda: audited(done.audited, dry_run),
    }
    parts = {name: words[name]() if name in words else plain(answer) for name, answer in done.done.items()}
    parts |= {duty: Outcome(why, {"paused": why}) for duty, why in done.paused.items()}
    summary = f"{number(done.before.batches)} → {of(done.after.batches, 'batch')}"
    summary += f", {size(done.before.size)} → {size(done.after.size)}"
    all_ = together("what is due now" if dry_run else summary, parts)
    figures = {"before": jsonable(done.before), "after": jsonable(done.after), "cost": jsonable(done.cost)}
    compared = [] if dry_run else [render.compare_table([done.before], [done.after])]
    return replace(all_, value=all_.value | figures, details=[*all_.details, *compared])


def planned(plan: ShardPlan) -> Outcome:
    """The steps of a plan, and what they free and cost together."""
    value = {"seqno": plan.seqno, "steps": jsonable(plan.steps), "cost": jsonable(plan.cost), "freed": plan.freed}
    if not plan.steps:
        return Outcome(f"nothing to do at v{plan.seqno}", value)
    table = render.plain_table(
        "duty", "what", "frees", "bytes", "requests", "price", "why", right=("frees", "bytes", "requests", "price")
    )
    for step in plan.steps:
        cost = step.cost
        table.add_row(
            step.duty, step.what, size(step.freed), size(cost.bytes_read + cost.bytes_written), number(cost.requests),
            units.dollars(cost.dollars), step.why,
        )  # fmt: skip
    price = units.dollars(plan.cost.dollars)
    return Outcome(
        f"{of(len(plan.steps), 'step')} from v{plan.seqno}, frees {size(plan.freed)}, {price}", value, [table]
    )


def of_collections(steps: Sequence[Step]) -> list[RenderableType]:
    """The steps of a plan about collections."""
    if not steps:
        return []
    table = render.plain_table("collection", "what", "why")
    for step in steps:
        table.add_row(step.exactly[0], step.what, step.why)
    return [table]


def together(summary: str, parts: Mapping[str, Outcome]) -> Outcome:
    """What several duties did to a shard, by their names."""
    details: list[RenderableType] = []
    for name, part in parts.items():
        details += [f"  {name:<10} {part.summary}", *part.details]
    value = {name: part.value for name, part in parts.items()}
    return Outcome(summary, value, details, max(part.exit_code for part in parts.values()))


def done_in_part(name: str, error: PersistError) -> list[RenderableType]:
    """Lines for a maintenance in which some duties failed, one for each duty. No lines for any other error."""
    done, failed = error.fields.get("done"), error.fields.get("failed")
    if not isinstance(done, dict) or not isinstance(failed, dict):
        return []
    lines = [f"  {duty:<10} done" for duty in done] + [f"  {duty:<10} FAILED: {why}" for duty, why in failed.items()]
    return [f"{name}: {number(len(failed))} of {number(len(failed) + len(done))} duties failed", *lines]


def _keys(keys: tuple[str, ...]) -> list[RenderableType]:
    rest = [f"  and {number(len(keys) - NAMED)} more"] if len(keys) > NAMED else []
    return [*(f"  {key}" for key in keys[:NAMED]), *rest]


def _failures(failed: dict[str, str]) -> list[RenderableType]:
    return [f"  could not delete {key}: {why}" for key, why in failed.items()]
