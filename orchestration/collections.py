"""Collections in Dagster: an asset with a partition for each, a job that tends them, and jobs for what people decide.

A pass looks at all collections of the location, and most find nothing to do. `rebuild`, `compare` and `handover` are
about one collection.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import dagster as dg
from pydantic import Field

from jobs.compare import compare
from jobs.engine import SparkEngine
from jobs.rebuild import rebuild
from jobs.stop import Stop, stopping
from jobs.works import engine_of
from orchestration.collection_reports import (
    APPLIED,
    behind,
    comparison,
    described,
    overview,
    steps_of,
    timelines,
    verdict,
)
from orchestration.config import TendConfig
from orchestration.factories import Tick, op_of, schedule_of
from orchestration.mount import Mount
from orchestration.partitions import COLLECTIONS as PARTITIONS
from orchestration.partitions import add_missing, keep
from orchestration.plans import is_planned, written_down
from orchestration.reports import DRY_RUN, Event, figure
from orchestration.resources import Persist
from orchestration.sensors import run_key
from persist_lib.catalog import Controller, Description
from persist_lib.catalog.describe import Step, Tended
from persist_lib.core.duties import BY_NAME
from persist_lib.core.plan.written import Plan
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.runtime.each import Each
from persist_lib.timeline import Lag

COLLECTIONS = "collections"
DUTY = BY_NAME[COLLECTIONS]


class OneConfig(dg.Config):
    """What a job about one rendition is told."""

    collection: str = Field(description="the collection's name")
    rendition: int = Field(ge=1, description="the rendition's number, as `persist describe` prints it")


class CompareConfig(OneConfig):
    """What is compared."""

    to: int | None = Field(default=None, ge=1, description="the other rendition; empty: the active one")
    as_of: str | None = Field(default=None, description="9, or 2026-11-22T12:00Z; empty: the newest time of both")
    keep: bool = Field(default=False, description="keep the difference for listeners, if the handover is right after")
    engine: str = Field(default="auto", description="auto: Spark for much data, else local; spark; local")
    timeout: float = Field(default=600.0, gt=0, description="seconds")


class HandoverConfig(OneConfig):
    """Which rendition becomes the collection, and when."""

    at: str | None = Field(default=None, description="9, or 2026-11-22T12:00Z; empty: the earliest time possible")
    force: bool = Field(default=False, description="also if its data does not reach the time: readers wait for it")
    dry_run: bool = Field(default=True, description="only say when it would be; false: hand over")


class RebuildConfig(dg.Config):
    """What is copied into which rendition."""

    collection: str = Field(description="the collection's name")
    rendition: int | None = Field(default=None, ge=1, description="continue with this one; empty: a new one is made")
    shards: int | None = Field(default=None, ge=1, description="of a new one; empty: as many as the active one has")
    transform: str | None = Field(default=None, description="module:function, from old rows to new ones")
    engine: str = Field(default="auto", description="auto: Spark for much data, else local; spark; local")
    timeout: float = Field(default=3600.0, gt=0, description="seconds for each step")


def collection_schedule(mount: Mount, job: dg.JobDefinition, status: dg.DefaultScheduleStatus) -> dg.ScheduleDefinition:
    """Tend collections where there is something to do. Looking costs one request without a catalog."""

    def when_due(persist: Persist) -> Tick:
        with persist.client.controller() as controller:
            (planned, failed), listed = _tended(controller, None, dry_run=True), set(controller.list())
        steps = due(planned, listed)
        if not steps:
            if failed is not None:  # a run would find nothing else: the tick is red, and says why
                raise failed
            waits = f", {len(planned.waiting)} wait for readers or holds" if planned.waiting else ""
            return dg.SkipReason(f"there is nothing to do for collections{waits}")
        if is_planned(persist, TendConfig()) and all(step.gives_up for step in steps):  # once for the same plan
            return dg.RunRequest(run_key=run_key(" ".join(step.exactly) for step in steps))
        return dg.RunRequest()

    return schedule_of(mount, job, DUTY.schedule, status, f"{DUTY.does} Runs only where that is due.", when_due)


def due(planned: Tended, listed: Collection[str]) -> list[Step]:
    """The steps that a run would take now. What is left of a dropped collection waits for its first shard."""
    found, waits = [], set()
    for step in planned.steps:
        if step.action == "wait" and step.collection not in listed:
            waits.add(step.collection)
        if step.action != "wait" and step.collection not in waits:
            found.append(step)
    return found


def tend_op(mount: Mount) -> dg.OpDefinition:
    """Tend collections; record those for which something was done, and all of them in one table."""

    def tended(context: dg.OpExecutionContext, config: TendConfig) -> Iterator[Event]:
        is_plan = is_planned(getattr(context.resources, mount.persist), config)
        planned = () if is_plan else None
        with _controlling(context, mount) as controller:
            names: list[str] | list[None] = config.collections or [None]
            tried = [_tended(controller, name, dry_run=config.dry_run, planned=planned) for name in names]
            plan = [step for name in names if is_plan for step in controller.plan(name)]
            done = Tended(tuple(step for one, _ in tried for step in one.steps))
            wrong = [str(failed) for _, failed in tried if failed is not None]
            listed, of_timelines = controller.list(), _lags(controller)
            told = Each[Description]().add(listed, controller.describe)
            lags, now = list(of_timelines.done.values()), controller.client.consensus.now()
        found = list(told.done.values())
        yield from written_down(context, mount, Plan(()).with_collections(plan))
        for step in done.steps:
            context.log.info("%s: %s %s, as %s", step.collection, step.action, step.subject, step.reason)
        acted = {step.collection for step in done.steps if step.action != "wait"}
        keep(context.instance, mount, PARTITIONS, listed)
        kind = dg.AssetObservation if config.dry_run else dg.AssetMaterialization
        for one in found:
            if one.name in acted or config.everything:
                metadata = {**described(one), **behind(lags, one.name), **steps_of(done, one.name)}
                yield kind(mount.key(COLLECTIONS), partition=one.name, metadata=metadata, tags=_tags(config.dry_run))
        yield dg.AssetObservation(
            mount.key(COLLECTIONS), metadata={**overview(found, done), **timelines(lags, now)},
            tags=_tags(config.dry_run),
            description=f"{len(found)} collections, of which {len(acted & {one.name for one in found})} had something "
            "to do",
        )  # fmt: skip
        if (lags or of_timelines.failed) and not config.dry_run:
            yield verdict(mount, lags, now, of_timelines.why)
        wrong += [f"{name}: {says}" for name, says in {**told.why, **of_timelines.why}.items()]
        if wrong:
            raise dg.Failure(f"Not all could be looked after; the others were. {'; '.join(wrong)}")

    return op_of(mount, f"{COLLECTIONS}_of_collections", DUTY.does, tended)


def collections_check(mount: Mount) -> dg.AssetChecksDefinition:
    """The check that warns where tables are far behind their WALs. It looks, and changes nothing."""

    @dg.asset_check(
        asset=mount.key(COLLECTIONS), name=APPLIED, required_resource_keys={mount.persist},
        description="What transactions wrote is applied to their tables, at most a quarter of an hour later.",
    )  # fmt: skip
    def tables_applied(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        persist: Persist = getattr(context.resources, mount.persist)
        with persist.client.controller() as controller:
            lags = _lags(controller)
            found = verdict(mount, list(lags.done.values()), controller.client.consensus.now(), lags.why)
        return dg.AssetCheckResult(
            passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
        )

    return tables_applied


def compare_op(mount: Mount) -> dg.OpDefinition:
    """Say what a rendition would change."""

    def compared(context: dg.OpExecutionContext, config: CompareConfig) -> Iterator[Event]:
        with _controlling(context, mount) as controller, stopping() as stop:
            found = compare(
                controller, config.collection, config.rendition, to=config.to, as_of=_time(config.as_of),
                keep=config.keep, timeout=config.timeout, stop=stop,
                engine=_engine(context, mount, controller, config, stop),
            )  # fmt: skip
            add_missing(context.instance, mount, PARTITIONS, [config.collection])
            says = f"{found.appeared} keys appear, {found.vanished} vanish, {found.changed} change"
            context.log.info("%s: rendition %d beside %d: %s", config.collection, found.new, found.old, says)
            yield dg.AssetObservation(
                mount.key(COLLECTIONS), partition=config.collection, metadata=comparison(found), description=says
            )

    says = "Say what a rendition would change, by column, with samples."
    return op_of(mount, "compare_of_collections", says, compared, spark=True)


def handover_op(mount: Mount) -> dg.OpDefinition:
    """Hand over; a run that is started again gives the same command again."""

    def handed_over(context: dg.OpExecutionContext, config: HandoverConfig) -> Iterator[Event]:
        name, number = config.collection, config.rendition
        with _controlling(context, mount) as controller:
            at = controller.hand_over(
                name, number, at=_time(config.at), force=config.force, dry_run=config.dry_run, command=_command(context)
            )
            found = controller.describe(name)
        says = "would be" if config.dry_run else "is"
        says = f"rendition {number} {says} the collection from {found.schema.show(at)} on"
        context.log.info("%s: %s", name, says)
        new = next(one for one in found.renditions if one.number == number)
        if new.copies is not None and not config.dry_run:
            context.log.info("%s: writers wait until the copy is complete: run the job rebuild once more", name)
        add_missing(context.instance, mount, PARTITIONS, [name])
        kind = dg.AssetObservation if config.dry_run else dg.AssetMaterialization
        metadata = {"at": figure(found.schema.show(at)), **described(found)}
        yield kind(
            mount.key(COLLECTIONS), partition=name, metadata=metadata, description=says, tags=_tags(config.dry_run)
        )

    says = "Make a rendition the collection from a time on: by default a dry run."
    return op_of(mount, "handover_of_collections", says, handed_over)


def rebuild_op(mount: Mount) -> dg.OpDefinition:
    """Copy the active rendition into a new one, on Spark if there is much."""

    def rebuilt(context: dg.OpExecutionContext, config: RebuildConfig) -> Iterator[Event]:
        name = config.collection
        with _controlling(context, mount) as controller, stopping() as stop:
            engine = _engine(context, mount, controller, config, stop)
            number = config.rendition
            if number is None:
                made = controller.make_rendition(name, shards=config.shards, copy=True, command=_command(context))
                number = made.number
            done = rebuild(
                controller, name, number, transform=config.transform, timeout=config.timeout, stop=stop,
                engine=engine,
            )  # fmt: skip
            found = controller.describe(name)
        says = f"rendition {number} has all that was before {found.schema.show(done.copied.upper)}"
        context.log.info("%s: %s", name, says)
        add_missing(context.instance, mount, PARTITIONS, [name])
        figures = {"rendition": number, "rows": done.rows, "tasks": done.tasks}
        metadata = {**{key: figure(value) for key, value in figures.items()}, **described(found)}
        yield dg.AssetMaterialization(mount.key(COLLECTIONS), partition=name, metadata=metadata, description=says)

    says = "Copy a collection into another rendition, or bring that up to date."
    return op_of(mount, "rebuild_of_collections", says, rebuilt, spark=True)


def _tended(
    controller: Controller, name: str | None, *, dry_run: bool, planned: tuple[()] | None = None
) -> tuple[Tended, PersistError | None]:
    """What tending did, or would do, and the error that names what it could not look after."""
    try:
        return controller.tend(name, dry_run=dry_run, planned=planned), None
    except PersistError as error:
        done = error.fields.get("done")
        return done if isinstance(done, Tended) else Tended(()), error


def _lags(controller: Controller) -> Each[Lag]:
    """How far tables are behind, for each timeline with a WAL."""
    with controller.tables() as tables:
        return Each[Lag]().add([name for name, mode in tables.timelines().items() if mode == "wal"], tables.lag)


@contextmanager
def _controlling(context: dg.OpExecutionContext, mount: Mount) -> Iterator[Controller]:
    """The location's controller. What it refuses is the run's failure, in one sentence."""
    persist: Persist = getattr(context.resources, mount.persist)
    try:
        with persist.client.controller() as controller:
            yield controller
    except PersistError as error:
        raise dg.Failure(f"{type(error).__name__}: {error}") from error


def _engine(
    context: dg.OpExecutionContext, mount: Mount, controller: Controller, config: RebuildConfig | CompareConfig,
    stop: Stop,
) -> SparkEngine | None:  # fmt: skip
    if config.engine not in ("auto", "spark", "local"):
        raise InvalidUsage(f"engine must be auto, spark or local: got {config.engine!r}. Nothing was done")
    shards = controller.describe(config.collection).active.shards
    session = lambda: getattr(context.resources, mount.spark).spark_session  # noqa: E731
    return engine_of(controller.client, shards, config.engine, session, stop)


def _command(context: dg.OpExecutionContext) -> str:
    """The command of a run, also of one that is started again after its process was killed."""
    return f"dagster-{context.run.root_run_id or context.run_id}"


def _time(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdigit() else text


def _tags(is_dry: bool) -> dict[str, str]:
    return {DRY_RUN: "true"} if is_dry else {}
