"""The voice of the pipeline: an asset whose check says what is wrong in the location, and a sensor that tells people.

The sensor looks each five minutes, without a run. It records a verdict when what is wrong changes, and tells what is
new and what is over (`alerts`), also of jobs that failed and of checks that only a run can judge.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import time
from collections.abc import Callable, Iterator, Sequence

import dagster as dg
import msgspec
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from orchestration.alerts import Cursor, Open, Trouble, Webhook, compared, dumps, loads
from orchestration.checks import CHECKS
from orchestration.collection_reports import table
from orchestration.mount import Mount
from orchestration.resources import Persist
from orchestration.settings import Settings, resolved
from orchestration.sources import LimitsConfig
from persist_lib import health
from persist_lib.errors import PersistError
from persist_lib.runtime.each import why

HEALTH = "health"
CHECK = "nothing_is_wrong"
TICK_S = 60
LOOK_MS = 300_000
"""How often the location is looked at. Jobs and checks are asked each tick: that costs no request to a store."""
LOOK_S = 20.0
ONLY_RUNS_JUDGE = ("reads_identical", "fingerprint_conserved")
"""Checks whose bad verdicts a look at the location cannot find."""
MOST_ROWS = 100
clock: Callable[[], float] = time.time
ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


def health_check(mount: Mount) -> dg.AssetChecksDefinition:
    """The check that is red where something is wrong. It looks, and changes nothing."""

    @dg.asset_check(
        asset=mount.key(HEALTH), name=CHECK, required_resource_keys={mount.persist},
        description="Nothing is wrong: damage, upkeep, lag, sources, streams, pending areas, stores.",
    )  # fmt: skip
    def nothing_is_wrong(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        persist: Persist = getattr(context.resources, mount.persist)
        found = verdict(mount, troubles(health.check(persist.client, limits())))
        return dg.AssetCheckResult(
            passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
        )

    return nothing_is_wrong


def alert_sensor(
    mount: Mount, settings: Settings, jobs: Sequence[str], status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:  # fmt: skip
    """A sensor that looks, records what changed, and tells people. Each of its ticks ends, whatever is wrong."""

    @dg.sensor(
        name=mount.named("alerts"), minimum_interval_seconds=TICK_S, default_status=status,
        required_resource_keys={mount.persist},
        description="Looks at the location, and tells what is wrong, once, and when it is over.",
    )  # fmt: skip
    def alerts(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        persist: Persist = getattr(context.resources, mount.persist)
        before, given = loads(context.cursor), resolved(settings)
        now = round(clock() * 1000)
        found, looked_ms = before.found, before.looked_ms
        if not 0 <= now - looked_ms < LOOK_MS:
            found, looked_ms = looked(persist), now
        there = [*found, *failed_jobs(context.instance, jobs), *bad_checks(context.instance, mount)]
        is_whole = not any(one.check == "unread" and one.about == "location" for one in found)
        is_open = compared(before.open, there, now, is_whole=is_whole)
        webhook = Webhook(given.alert_url or "", given.heartbeat_url or "", given.location or "")
        left = webhook.tell(before.open, is_open, now)
        if not webhook.failed:
            webhook.beat()
        for says in webhook.failed:
            context.log.error("could not be sent, and is sent again: %s", says)
        is_news = _keys(before.open) != _keys(is_open) or not before.looked_ms
        events = list(recorded(mount, there)) if is_news else []
        unsent = f"; {len(webhook.failed)} messages could not be sent: {webhook.failed[0]}" if webhook.failed else ""
        return dg.SensorResult(
            asset_events=events, cursor=dumps(Cursor(left, tuple(found), looked_ms)),
            skip_reason=f"{len(there)} thing{' is' if len(there) == 1 else 's are'} wrong{unsent}",
        )  # fmt: skip

    return alerts


def looked(persist: Persist) -> tuple[Trouble, ...]:
    """What is wrong in the location. That it cannot be opened, or does not answer, is wrong as well."""
    try:
        return tuple(troubles(health.check(persist.client, limits())))
    except PersistError as error:
        return (Trouble("unread", "location", "all", why(error), "persist health"),)


def limits() -> health.Limits:
    """From when on something is wrong where Dagster ingests: a source needs no instance between two runs."""
    return health.Limits(sources=LimitsConfig().limits(), seconds=LOOK_S)


def troubles(found: health.Health) -> Iterator[Trouble]:
    """The problems that health found."""
    return (Trouble(**msgspec.structs.asdict(one)) for one in found.problems)


def failed_jobs(instance: dg.DagsterInstance, jobs: Sequence[str]) -> Iterator[Trouble]:
    """The jobs whose newest run that ended has failed. Runs that were cancelled say nothing."""
    for job in jobs:
        for record in instance.get_run_records(dg.RunsFilter(job_name=job, statuses=ENDED), limit=1):
            run = record.dagster_run
            if run.status == dg.DagsterRunStatus.FAILURE:
                says = f"its newest run failed: {_failure(instance, run.run_id)}"
                yield Trouble(
                    "failed", "job", job, says, f"dagster job launch -j {job}",
                    "docs/operations.md#what-to-do-at-each-red-in-dagster", link=f"/runs/{run.run_id}",
                )  # fmt: skip


def _failure(instance: dg.DagsterInstance, run_id: str) -> str:
    """Why a run failed, in one line."""
    kinds = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}
    found = [one.event_log_entry for one in instance.get_records_for_run(run_id, of_type=kinds).records]
    for entry in found:
        event = entry.dagster_event
        if event is not None and event.event_type == dg.DagsterEventType.STEP_FAILURE:
            data = event.step_failure_data
            says = data.user_failure_data.description if data.user_failure_data else None
            return says or (data.error.message if data.error else entry.message)
    return found[-1].message if found else "it says nothing of why"


def bad_checks(instance: dg.DagsterInstance, mount: Mount) -> Iterator[Trouble]:
    """The checks that only runs judge, and whose newest verdict is bad."""
    for name in ONLY_RUNS_JUDGE:
        key = dg.AssetCheckKey(mount.key(CHECKS[name][0]), name)
        found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
        if found is None or found.status != AssetCheckExecutionRecordStatus.FAILED or found.evaluation is None:
            continue
        if found.evaluation.severity == dg.AssetCheckSeverity.ERROR:  # else it was not evaluated
            asset, says = key.asset_key.to_user_string(), found.evaluation.description or "it failed"
            page = "docs/operations.md#what-to-watch"
            yield Trouble(
                name, "asset check", asset, says, "persist shard scrub --all", page,
                is_damage=True,
            )  # fmt: skip


def recorded(mount: Mount, found: Sequence[Trouble]) -> Iterator[dg.AssetObservation | dg.AssetCheckEvaluation]:
    """What is wrong, as a table and a verdict."""
    said = verdict(mount, found)
    yield dg.AssetObservation(mount.key(HEALTH), metadata=said.metadata, description=said.description)
    yield said


def verdict(mount: Mount, found: Iterator[Trouble] | Sequence[Trouble]) -> dg.AssetCheckEvaluation:
    """The verdict: an error where data is damaged, else a warning."""
    wrong = list(found)
    is_damaged = any(one.is_damage for one in wrong)
    rows = [
        {"check": one.check, "of": f"{one.about} {one.name}", "says": one.says, "do": one.do, "see": one.page}
        for one in wrong[:MOST_ROWS]
    ]
    says = "; ".join(f"{one.about} {one.name}: {one.says}" for one in wrong[:MOST_ROWS]) or "nothing is wrong"
    return dg.AssetCheckEvaluation(
        asset_key=mount.key(HEALTH), check_name=CHECK, passed=not wrong, description=says,
        severity=dg.AssetCheckSeverity.ERROR if is_damaged else dg.AssetCheckSeverity.WARN,
        metadata={"problems": dg.MetadataValue.int(len(wrong)), "table": table(rows)},
    )  # fmt: skip


def _keys(found: dict[str, Open]) -> set[str]:
    """The keys of what is not over."""
    return {key for key, one in found.items() if not one.is_over}
