"""Plans in Dagster: a run writes down what it would do, and the job `apply` does exactly that when a person says so.

With `apply="by a person"` in the settings, the jobs of upkeep plan. What they plan is on the asset `plans`, and nothing
is changed until a person has looked at it.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator, Sequence

import dagster as dg

from orchestration.collection_reports import table
from orchestration.config import PendingConfig, SweepConfig, TendConfig
from orchestration.duties import Duty
from orchestration.mount import Mount
from orchestration.reports import Event, figure, listed
from orchestration.resources import Persist
from orchestration.settings import APPLY as CHOICES
from persist_lib.client import Client
from persist_lib.core.plan.written import PLANNED, Plan, ShardPlan
from persist_lib.errors import PersistError
from persist_lib.runtime.each import Each

PLANS, APPLY = "plans", "apply"
MOST_ROWS = 1000


def is_asked(config: SweepConfig | TendConfig | PendingConfig) -> bool:
    """Whether a run's own configuration has it plan. Raises Failure for a value that cannot be."""
    if config.apply not in ("", *CHOICES):
        raise dg.Failure(f"apply must be {' or '.join(map(repr, CHOICES))}: got {config.apply!r}. Nothing was done")
    return config.apply == CHOICES[1] and not config.dry_run


def is_planned(persist: Persist, config: SweepConfig | TendConfig) -> bool:
    """Whether a run plans what another one, by a person, is to do. Raises Failure for a value that cannot be."""
    return is_asked(config) or (not config.apply and persist.settings.apply == CHOICES[1] and not config.dry_run)


def planning(
    context: dg.OpExecutionContext, mount: Mount, client: Client, shards: Sequence[str], duties: Sequence[Duty]
) -> Iterator[Event]:
    """Make the plan of these duties for shards, and yield it. Raises Failure at the end where one cannot be read."""
    only = [duty for duty in PLANNED if duty in duties]
    found = Each[ShardPlan]().add(
        shards if only else (), lambda name: client.plan(name, only=only).of(name), PersistError
    )
    plan = Plan(tuple(one for one in found.done.values() if one.steps))
    yield from written_down(context, mount, plan)
    context.log.info("%d of %d shards have something to do; the plan is on %s", len(plan.shards), len(shards), PLANS)
    if found.failed:
        raise dg.Failure(f"not planned: {listed([f'{name} ({says})' for name, says in found.why.items()])}")


def written_down(context: dg.OpExecutionContext, mount: Mount, plan: Plan) -> Iterator[Event]:
    """A plan as a materialization, if it has anything."""
    shards = (*plan.shards, *plan.pending)
    steps = [*(step for one in shards for step in one.steps), *plan.collections]
    if steps:
        collections = {step.exactly[0] for step in plan.collections}
        yield dg.AssetMaterialization(
            mount.key(PLANS),
            description=f"launch the job {mount.named(APPLY)} with run_id {context.run_id} to do exactly this",
            metadata={
                "shards": figure(len(shards)), "collections": figure(len(collections)),
                "steps": figure(len(steps)), "frees_bytes": figure(sum(one.freed for one in shards)),
                "bytes": figure(plan.cost.bytes_read + plan.cost.bytes_written),
                "requests": figure(plan.cost.requests), "dollars": figure(plan.cost.dollars),
                "what": table(_rows(plan)), "plan": dg.MetadataValue.text(plan.to_json()),
            },
        )  # fmt: skip


def _rows(plan: Plan) -> list[dict[str, object]]:
    """Each step of a plan."""
    steps = [(one, step) for one in (*plan.shards, *plan.pending) for step in one.steps]
    rows: list[dict[str, object]] = [
        {
            "shard": one.shard, "version": one.seqno, "duty": step.duty, "what": step.what, "why": step.why,
            "frees": step.freed, "bytes": step.cost.bytes_read + step.cost.bytes_written,
            "requests": step.cost.requests, "dollars": f"{step.cost.dollars:.6f}",
        }
        for one, step in steps[:MOST_ROWS]
    ]  # fmt: skip
    rows += [
        {
            "shard": step.exactly[0], "version": 0, "duty": step.duty, "what": step.what, "why": step.why, "frees": 0,
            "bytes": 0, "requests": 0, "dollars": "",
        }
        for step in plan.collections[: MOST_ROWS - len(rows)]
    ]  # fmt: skip
    return rows
