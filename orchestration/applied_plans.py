"""The job `apply`: a plan that a person has looked at is carried out, shard by shard, exactly or not at all."""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from jobs.engine import EngineName, engine_for
from orchestration.collection_reports import steps_of, table
from orchestration.collections import COLLECTIONS
from orchestration.duties import MAY_NOT, Options
from orchestration.mount import Mount
from orchestration.pending import PENDING, figures
from orchestration.plans import PLANS
from orchestration.reports import Event, figure, listed
from orchestration.resources import Persist
from orchestration.sweep import spark_engine
from persist_lib.catalog.describe import Tended
from persist_lib.core.duties import figures_of
from persist_lib.core.plan.written import PLANNED, Plan, ShardPlan, parse_plan
from persist_lib.errors import NotAllowed, PersistError
from persist_lib.maintain.duties import Maintained
from persist_lib.pending_area import Absorbed
from persist_lib.pending_area import apply as absorb_planned
from persist_lib.runtime.each import Each, why

DELETING = frozenset({"garbage", "orphans"})
"""The duties that delete objects."""


class ApplyConfig(dg.Config):
    """Which plan is carried out."""

    run_id: str = Field(default="", description="the run that made the plan; its asset `plans` shows what it is")
    plan: str = Field(default="", description="or the plan itself, as JSON")
    shards: list[str] = Field(default=[], description="only these, or these collections; empty: all that it has")
    engine: str = Field(default="auto", description="as in the other jobs: auto, spark or local")


def apply_op(mount: Mount) -> dg.OpDefinition:
    """Carry out a plan, shard by shard. It fails where a shard has moved since, and does the others."""

    @dg.op(
        name=mount.named("applying_of_plan"), out={}, required_resource_keys={mount.persist, mount.spark},
        pool=mount.pool_for(PLANNED),
        description="Do exactly what a plan says: no more, and nothing on shards that have moved since.",
    )  # fmt: skip
    def of_plan(context: dg.OpExecutionContext, config: ApplyConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        engine: EngineName = config.engine if config.engine in ("spark", "local") else "auto"  # type: ignore[assignment]
        options = spark_engine(persist.client, getattr(context.resources, mount.spark), Options(engine))
        try:
            plan = parse_plan(config.plan or _planned_by(context.instance, mount, config.run_id))
            plan = plan.only(config.shards)
            chosen = {one.shard: one for one in plan.shards}
        except PersistError as error:
            raise dg.Failure(why(error), allow_retries=False) from error
        tried, of_collections = Each[Maintained](), Each[Tended]()
        if plan.collections:
            of_collections.add([COLLECTIONS], lambda _: _given_up(persist, plan), PersistError)
        for tended in of_collections.done.values():
            for name in dict.fromkeys(step.exactly[0] for step in plan.collections):
                yield dg.AssetMaterialization(mount.key(COLLECTIONS), partition=name, metadata=steps_of(tended, name))
        absorbed = Each[Absorbed]()
        for pending in plan.pending:
            absorbed.add([pending.shard], lambda _, one=pending: absorb_planned(persist.client, one), PersistError)  # type: ignore[misc]
        for name, area in absorbed.done.items():
            yield dg.AssetMaterialization(mount.key(PENDING), partition=name, metadata=figures([area]))
        for name, one in chosen.items():
            tried.add([name], lambda _, one=one: _applied(persist, one, options), PersistError)  # type: ignore[misc]
            if name in tried.done:
                yield from _done(mount, name, tried.done[name])
        rows = [{"shard": name, "became": tried.why.get(name, "done")} for name in chosen]
        rows += [{"shard": one.shard, "became": absorbed.why.get(one.shard, "done")} for one in plan.pending]
        failed = {**of_collections.why, **absorbed.why, **tried.why}
        rows += [{"shard": COLLECTIONS, "became": failed.get(COLLECTIONS, "done")}] if plan.collections else []
        metadata = {"done": figure(len(rows) - len(failed)), "refused": figure(len(failed)), "shards": table(rows)}
        if failed:
            says = listed([f"{name} ({reason})" for name, reason in failed.items()])
            raise dg.Failure(f"{len(failed)} of {len(rows)} shards: {says}", metadata, allow_retries=False)
        yield dg.AssetObservation(mount.key(PLANS), metadata=metadata)

    return of_plan


def _given_up(persist: Persist, plan: Plan) -> Tended:
    with persist.client.controller() as controller:
        return controller.apply(plan.collections)


def _applied(persist: Persist, one: ShardPlan, options: Options) -> Maintained:
    deletes = sorted({step.duty for step in one.steps} & DELETING)
    if deletes and not persist.settings.may_delete:
        raise NotAllowed(
            f"shard {one.shard}: {' and '.join(deletes)} would free {one.freed} bytes, and {MAY_NOT}. Nothing was done"
        )
    engine = engine_for(persist.client, one.shard, options.engine, options.spark, options.tells)
    return persist.client.apply(Plan((one,)), engine=engine)[one.shard]


def _done(mount: Mount, shard: str, done: Maintained) -> Iterator[Event]:
    """A materialization for each duty that was planned for a shard."""
    for duty, answer in done.done.items():
        figures = {**figures_of(answer), "seqno": done.after.seqno}
        yield dg.AssetMaterialization(
            mount.key(duty), partition=shard, metadata={name: figure(value) for name, value in figures.items()}
        )


def _planned_by(instance: dg.DagsterInstance, mount: Mount, run_id: str) -> str:
    """The plan that a run made. Raises Failure for a run that made no plan."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION) if run_id else ():
        found = entry.asset_materialization
        if found is not None and found.asset_key == mount.key(PLANS):
            return str(found.metadata["plan"].value)
    which = f"the run {run_id!r} made no plan" if run_id else "no plan is given"
    raise dg.Failure(
        f"{which}. Nothing was done; give the run_id that the asset {PLANS} shows, or a plan", allow_retries=False
    )
