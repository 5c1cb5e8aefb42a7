"""Sources in Dagster: an asset with a partition for each, a job that ingests what is there, a sensor, and checks.

Instances that run all the time (`persist ingest`) need none of this. Where nobody is at work and something is new, the
sensor requests a run. Any number of instances make the same collections, so that two at once are waste and no damage.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import datetime as dt
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg
from pydantic import Field

from jobs.load import loads_for
from jobs.stop import Stop, stopping
from orchestration.factories import op_of
from orchestration.mount import Mount
from orchestration.partitions import SOURCES as PARTITIONS
from orchestration.partitions import add_missing
from orchestration.reports import Event
from orchestration.resources import Persist
from orchestration.runs import Job, held_back, in_flight
from orchestration.sensors import FIRST_WAIT_MS, LONGEST_WAIT_MS, dumps, loads
from orchestration.source_reports import SOURCES, Run, described, evaluations, overview, remind_of, severity
from persist_lib.client import Client
from persist_lib.errors import PersistError
from persist_lib.runtime.each import Each
from persist_lib.sources import Alert, Limits, News, SourceDescription, Sources, check, look
from persist_lib.sources.alerts import CHECKS, Memory

INGEST, OP = "ingest", "ingest_of_sources"
IDLE = "something new is there, and no instance and no run ingests it: start one, or turn source_news on"
WATCH_S = 300
"""The seconds between two ticks of the sensor that judges sources."""
CHUNK = 50
"""The most sources of one run: they are ingested one after the other."""
MEMORIES: dict[str, Memory] = {}
"""What earlier ticks found, by location. A code server that begins again reads it again."""
DOES = "Ingest sources until nothing new is there."


class LimitsConfig(dg.Config):
    """From when on something is wrong with a source. Empty: never."""

    instances: int | None = Field(default=0, ge=0, description="how many have to be at work; Dagster needs none")
    behind_s: int | None = Field(default=900, ge=0, description="seconds behind, where something is left")
    lag_messages: int | None = Field(default=None, ge=0, description="messages left")
    lag_bytes: int | None = Field(default=None, ge=0, description="bytes left")
    errors: int | None = Field(default=None, ge=0, description="bad messages in all")
    errors_share: float | None = Field(default=0.01, ge=0, le=1, description="bad ones of those that were read")
    held_back_bytes: int | None = Field(default=10 << 30, ge=0, description="what the upstream has to keep")

    def limits(self) -> Limits:
        """The same for the library."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


class IngestConfig(LimitsConfig):
    """Which sources are ingested, and for how long; and from when on a check is red."""

    sources: list[str] = Field(default=[], description="empty: those that have something new, and nobody at work")
    seconds: float = Field(default=600.0, gt=0, description="each source at most; the rest is for the next run")
    engine: str = Field(default="auto", description="auto: Spark for much in files, else local; spark; local")


def ingest_op(mount: Mount) -> dg.OpDefinition:
    """Ingest sources one after the other. One that fails is told at the end; the others are ingested all the same."""

    def of_sources(context: dg.OpExecutionContext, config: IngestConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        failed: dict[str, str] = {}
        runs: list[Run] = []
        with persist.client.controller() as controller, stopping() as stop:
            sources = controller.sources()
            for name in config.sources or _due(persist.client, sources):
                run = _ingest(context, mount, sources, name, config, stop)
                runs.append(run)
                if run.failed:
                    failed[name] = run.failed
                if run.found is not None:
                    add_missing(context.instance, mount, PARTITIONS, [name])
                    yield described(mount, run)
            ran = {run.name: run for run in runs if run.found is not None}
            verdicts = check(sources, config.limits(), sorted(ran)) if ran else {}
            for name, alerts in verdicts.items():
                yield from evaluations(context.instance, mount, ran[name], alerts)
            remind_of(context.instance, mount, sources.list())
            sources.close()
        yield overview(mount, runs)
        if failed:
            lines = "; ".join(f"{name} ({why})" for name, why in sorted(failed.items()))
            raise dg.Failure(f"Failed, {len(failed)} of {len(runs)} sources: {lines}")

    return op_of(mount, OP, DOES, of_sources, spark=True)


def sources_check(mount: Mount) -> dg.AssetChecksDefinition:
    """The checks on all sources. They look, and change nothing; what is new is asked of the upstream."""
    specs = [dg.AssetCheckSpec(name, asset=mount.key(SOURCES), description=says) for name, says in SAYS.items()]

    @dg.multi_asset_check(
        name=mount.named("source_checks"), specs=specs, required_resource_keys={mount.persist}
    )  # fmt: skip
    def source_checks(context: dg.AssetCheckExecutionContext, config: LimitsConfig) -> Iterator[dg.AssetCheckResult]:
        persist: Persist = getattr(context.resources, mount.persist)
        verdicts, _ = judged(context.instance, mount, persist.client, config.limits(), {})
        for one in evaluated(mount, verdicts):
            yield dg.AssetCheckResult(
                asset_key=one.asset_key, check_name=one.check_name, passed=one.passed, severity=one.severity,
                description=one.description, metadata=one.metadata,
            )  # fmt: skip

    return source_checks


def evaluated(mount: Mount, verdicts: Mapping[str, list[Alert]]) -> Iterator[dg.AssetCheckEvaluation]:
    """Each check, on all sources."""
    for number, kind in enumerate(CHECKS):
        wrong = {name: alerts[number] for name, alerts in verdicts.items() if not alerts[number].passed}
        says = "; ".join(f"{name}: {one.says}" for name, one in sorted(wrong.items()))
        yield dg.AssetCheckEvaluation(
            asset_key=mount.key(SOURCES), check_name=kind, passed=not wrong, severity=severity(kind),
            description=says or f"nothing is wrong with {len(verdicts)} sources",
            metadata={"sources": len(verdicts), "wrong": len(wrong)},
        )  # fmt: skip


def source_watch(mount: Mount, status: dg.DefaultSensorStatus) -> dg.SensorDefinition:
    """A sensor that judges all sources, without a run. It records verdicts when they change."""

    @dg.sensor(
        name=mount.named("source_watch"), minimum_interval_seconds=WATCH_S, default_status=status,
        required_resource_keys={mount.persist},
        description="Judges all sources: a source with something new and nothing at work is red.",
    )  # fmt: skip
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        persist: Persist = getattr(context.resources, mount.persist)
        said = _loaded(context.cursor)
        verdicts, waiting = judged(
            context.instance, mount, persist.client, LimitsConfig().limits(), said.get("new", {})
        )  # fmt: skip
        told = [f"{name} {one.check}" for name, alerts in verdicts.items() for one in alerts if not one.passed]
        cursor = json.dumps({"new": waiting, "told": told, "sources": sorted(verdicts)})
        is_known = (said.get("told"), said.get("sources")) == (told, sorted(verdicts))
        events = [] if is_known or not verdicts else list(evaluated(mount, verdicts))
        return dg.SensorResult(
            asset_events=events, cursor=cursor, skip_reason=f"{len(verdicts)} sources, {len(told)} verdicts are bad"
        )

    return watch


def judged(
    instance: dg.DagsterInstance, mount: Mount, client: Client, limits: Limits, before: Mapping[str, int]
) -> tuple[dict[str, list[Alert]], dict[str, int]]:
    """The verdicts on all sources; and the times of those that have something new, with nothing at work.

    Such a source is red: at once where no run ended a moment ago, else if it was at the same time `before`. Between two
    runs nothing is at work either.
    """
    job = mount.named(INGEST)
    busy, is_any = in_flight(instance, job_about(mount))
    since = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=WATCH_S)
    is_between = bool(instance.get_runs(dg.RunsFilter(job_name=job, updated_after=since), limit=1))
    with client.controller() as controller:
        sources = controller.sources()
        found = look(sources, {})
        verdicts = check(sources, limits, news=found)
        sources.close()
    waiting = {one.source: one.time for one in found if one.state == "new" and one.source not in busy and not is_any}
    idle = {name for name, time in waiting.items() if not is_between or time <= 0 or before.get(name) == time}
    return {name: _idle(alerts) if name in idle else alerts for name, alerts in verdicts.items()}, waiting


def _loaded(cursor: str | None) -> dict[str, Any]:
    """What a cursor of the watch says. One that cannot be read says nothing."""
    try:
        found = json.loads(cursor or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _idle(alerts: list[Alert]) -> list[Alert]:
    """The verdicts on a source that has something new, and nothing at work. Why its last instance failed says more."""
    return [Alert("instances", False, IDLE) if one.check == "instances" and one.passed else one for one in alerts]


SAYS: Mapping[str, str] = {
    "instances": "As many instances are at work as there should be.",
    "lag": "What is there is durable soon.",
    "errors": "Messages can be decoded.",
    "held_back": "The upstream does not have to keep much of its log.",
    "unread": "All that is there is read.",
}


class Try(NamedTuple):
    """How often a source was asked for without getting further than `time`, and when last (ms)."""

    attempt: int
    at_ms: int
    time: int

    @property
    def due_ms(self) -> int:
        """When it is asked for again."""
        return self.at_ms + min(LONGEST_WAIT_MS, FIRST_WAIT_MS << min(self.attempt - 2, 20)) if self.attempt > 1 else 0


class Asked(NamedTuple):
    """What a tick asks for, why it does not, and what it remembers."""

    now: tuple[str, ...]
    reason: str
    cursor: str


def asked_now(found: Sequence[News], busy: Collection[str], tries: Mapping[str, Try], now: int) -> Asked:
    """Decide. A source that got further since it was asked for is asked for at once; else after a growing pause."""
    due, waiting, kept = [], 0, {}
    for one in found:
        if one.state not in {"new", "unread"}:
            continue
        old = tries.get(one.source, Try(0, 0, -1))
        if one.time > old.time:
            old = Try(0, 0, one.time)
        if one.state == "unread" or old.due_ms > now:  # a run could not read it either
            waiting += one.state == "new"
            kept[one.source] = old
            continue
        due.append(one.source)
        kept[one.source] = Try(old.attempt + 1, now, one.time)
    kept |= {name: tries[name] for name in busy if name in tries}
    return Asked(tuple(due), _reason(found, busy, waiting), dumps(kept))


def _reason(found: Sequence[News], busy: Collection[str], waiting: int) -> str:
    counts = Counter(one.state for one in found)
    said = [
        f"{count} {what}" for count, what in (
            (counts["none"], "with nothing new"), (counts["at work"], "with an instance at work"),
            (counts["paused"], "paused"), (len(busy), "in runs that are not finished"),
            (waiting, "that got no further in the last run, and wait"), (counts["unread"], "that could not be asked"),
        ) if count
    ]  # fmt: skip
    unread = [f"{one.source} ({one.says})" for one in found if one.state == "unread"][:3]
    total = len(found) + len(busy)
    return f"{total} sources{': ' if said else ''}{', '.join(said)}{': ' if unread else ''}{'; '.join(unread)}"


def source_sensor(mount: Mount) -> dg.SensorDefinition:
    """A sensor that requests a run for sources with something new, where nobody is at work.

    It is off until somebody turns it on: only they know that Dagster's machines see what sources read. A folder of the
    same name may be another one there.
    """
    job = mount.named(INGEST)

    @dg.sensor(
        name=mount.named("source_news"), job_name=job, minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED, required_resource_keys={mount.persist},
        description="Has sources ingested that have something new.",
    )  # fmt: skip
    def source_news(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        persist: Persist = getattr(context.resources, mount.persist)
        client = persist.client
        busy, is_any = in_flight(context.instance, job_about(mount))
        held = held_back(context.instance, [job_about(mount)])
        if is_any:
            return dg.SkipReason(f"a run of {job} for all that is new is not finished")
        with client.controller() as controller:
            sources = controller.sources()
            held_names = [name for name in sources.list() if held.has(name) and name not in busy]
            found = look(sources, MEMORIES.setdefault(client.url, {}), leave_out={*busy, *held_names})
            now = client.consensus.now()
            sources.close()
        asked = asked_now(found, busy, loads(context.cursor, Try), now)
        chunks = [asked.now[start : start + CHUNK] for start in range(0, len(asked.now), CHUNK)]
        requests = [
            dg.RunRequest(run_config=dg.RunConfig(ops={mount.named(OP): IngestConfig(sources=list(chunk))}))
            for chunk in chunks
        ]
        reason = asked.reason
        if held_names:
            reason += f"; {len(held_names)} whose run was cancelled wait until a person ingests them"
        return dg.SensorResult(run_requests=requests, cursor=asked.cursor, skip_reason=None if requests else reason)

    return source_news


def job_about(mount: Mount) -> Job:
    """The job, and where its configuration names sources."""
    return Job(mount.named(INGEST), mount.named(OP), "sources")


def _due(client: Client, sources: Sources) -> list[str]:
    return [one.source for one in look(sources, MEMORIES.setdefault(client.url, {})) if one.state == "new"]


def _ingest(
    context: dg.OpExecutionContext, mount: Mount, sources: Sources, name: str, config: IngestConfig, stop: Stop
) -> Run:  # fmt: skip
    """Ingest one source until nothing new is there, or its time is over."""
    runtime = sources.client.runtime
    run = Run(name, began=runtime.monotonic())
    end = run.began + config.seconds

    def told(what: object) -> None:
        run.told(what)
        if isinstance(what, PersistError):
            context.log.warning("%s: %s; trying again", name, what)

    def session() -> Any:
        return getattr(context.resources, mount.spark).spark_session

    def tells(what: str, done: int, of: int) -> None:
        if done == of:
            context.log.info("%s: %d of %d tasks", what, done, of)

    def ingest(name: str) -> None:
        loads, _ = loads_for(sources.client, sources.find(name), config.engine, session, stop, tells)
        sources.run(
            name, until_idle=True, told=told, stop=lambda: stop.is_set or runtime.monotonic() >= end, loads=loads
        )

    ingested = Each[None]().add([name], ingest)
    run.seconds = runtime.monotonic() - run.began
    shown = Each[SourceDescription]().add([name], sources.show)
    run.found, run.failed = shown.done.get(name), ingested.why.get(name) or shown.why.get(name, "")
    for error in ingested.failed.values():
        if not isinstance(error, (PersistError, OSError)):
            context.log.error("%s failed as no source should", name, exc_info=error)
    context.log.info("%s: %s", name, run.failed or run.says)
    return run
