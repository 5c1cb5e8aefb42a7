"""Sensors for work that is due by the state of shards: what is there becomes partitions, and debt is compacted.

Debt is what the state says, not what a sensor remembers. A shard that is still in debt when the run that was asked for
it has ended is asked for again: after a minute, then after two, four, and so on up to six hours. The cursor holds only
how often shards in debt were asked for. If it is lost, they are asked for once more. A shard whose run was cancelled is
not asked for: that is for a person, or the compaction's nightly schedule.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import dagster as dg

from orchestration.jobs import LOOK_S, op_name, run_config
from orchestration.mount import Mount
from orchestration.partitions import COLLECTIONS, SHARDS, SOURCES, begin, keep, shown
from orchestration.resources import Persist
from orchestration.runs import Job, held_back, in_flight
from persist_lib.maintain.survey import Survey
from persist_lib.sources.kinds import fetch_owners

T = TypeVar("T")
CHUNK = 250
"""The most shards of one run, so that a run that fails or is cancelled does not take all others with it."""
MOST_IN_FLIGHT = 2000
"""The most shards in unfinished runs. The others wait for these."""
REMEMBERED = 5000
"""The most shards or sources that a cursor remembers. Other shards are asked for each hour."""
HOUR_MS = 3600 * 1000
NEW_AT_ONCE = 5000
"""The most new shards that one tick makes partitions. The others wait for the next tick."""
FIRST_WAIT_MS = 60_000
LONGEST_WAIT_MS = 6 * HOUR_MS


def sensors(mount: Mount, status: dg.DefaultSensorStatus, more: Collection[str] = ()) -> list[dg.SensorDefinition]:
    """All sensors. `more` are further partitions, of which each asset has one that says so where it has none.

    SUBTLE: they name their jobs. Dagster rebuilds a sensor that holds its job, and warns of itself.
    """
    return [discovery_sensor(mount, status, more), debt_sensor(mount, status)]


def discovery_sensor(
    mount: Mount, status: dg.DefaultSensorStatus, more: Collection[str] = ()
) -> dg.SensorDefinition:  # fmt: skip
    """A sensor that keeps partitions what is there, and has new shards counted."""

    @dg.sensor(
        name=mount.named("shard_discovery"), job_name=mount.named("census"), minimum_interval_seconds=30,
        default_status=status, required_resource_keys={mount.persist},
        description="Makes what is there partitions, takes away what was dropped, and has new shards counted.",
    )  # fmt: skip
    def shard_discovery(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        """Ask for all shards in one request, and then whose they are."""
        begin(context.instance, mount, more)  # first, as the location may not open
        persist: Persist = getattr(context.resources, mount.persist)
        survey = persist.client.survey(seconds=LOOK_S)
        with persist.client.controller() as controller:
            owners = fetch_owners(controller)
            keep(context.instance, mount, COLLECTIONS, controller.list())
        keep(context.instance, mount, SOURCES, sorted(owners.sources.values()))
        there, known = shown(survey, owners), context.instance.get_dynamic_partitions(mount.named(SHARDS))
        later = set(sorted(set(there).difference(known))[NEW_AT_ONCE:])
        now = [shard for shard in there if shard not in later]
        keep(context.instance, mount, SHARDS, now)
        if not (new := sorted(set(now).difference(known))):
            return dg.SkipReason(f"{len(there)} shards, none of them new")
        heads = survey.heads
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=run_key(f"{shard}@{heads[shard]}" for shard in new))]
        )

    return shard_discovery


def debt_sensor(mount: Mount, status: dg.DefaultSensorStatus) -> dg.SensorDefinition:
    """A sensor that requests compaction of the shards whose trace calls for it."""
    compaction = mount.named("compaction")

    @dg.sensor(
        name=mount.named("compaction_debt"), job_name=compaction, minimum_interval_seconds=30, default_status=status,
        required_resource_keys={mount.persist}, description="Has shards in debt compacted, until they are not.",
    )  # fmt: skip
    def compaction_debt(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        """Request runs for the shards in debt that no unfinished run visits."""
        persist: Persist = getattr(context.resources, mount.persist)
        survey = persist.client.survey(seconds=LOOK_S)
        jobs = [Job(mount.named(name), op_name(mount, name), "shards") for name in ("compaction", "maintenance")]
        visited, _ = in_flight(context.instance, jobs[0])
        held = held_back(context.instance, jobs, mount.key("compaction"))
        asked = ask(survey, visited, loads(context.cursor, Try), [shard for shard in survey.heads if held.has(shard)])
        chunks = [asked.now[start : start + CHUNK] for start in range(0, len(asked.now), CHUNK)]
        requests = [
            dg.RunRequest(
                run_key=run_key(mark_of(survey, shard, asked.tries[shard]) for shard in chunk),
                run_config=run_config(mount, "compaction", shards=list(chunk)),
            )
            for chunk in chunks
        ]
        reason = f"{len(survey.heads)} shards: {asked.in_flight} in debt are being compacted, {asked.waiting} wait"
        if paused := survey.paused("compaction"):
            reason += f", {len(paused)} are not compacted, as that is paused"
        if asked.held:
            reason += (
                f", {asked.held} are held back, as their run was cancelled: until a person compacts them, or until "
                f"{compaction}_schedule does"
            )
        return dg.SensorResult(
            run_requests=requests, cursor=dumps(asked.tries), skip_reason=None if requests else reason
        )

    return compaction_debt


class Try(NamedTuple):
    """How often a shard in debt was asked for, and when that was last known to be under way (ms)."""

    attempt: int
    at_ms: int

    @property
    def due_ms(self) -> int:
        """When it is asked for again."""
        if not self.attempt:
            return 0
        return self.at_ms + min(LONGEST_WAIT_MS, FIRST_WAIT_MS << min(self.attempt - 1, 20))


class Asked(NamedTuple):
    """What a tick asks for: shards to request now, those in unfinished runs, those that wait, and all tries so far."""

    now: tuple[str, ...]
    in_flight: int
    waiting: int
    tries: Mapping[str, Try]
    held: int = 0
    """Those whose run was cancelled."""


def ask(
    survey: Survey, in_flight: Iterable[str], tries: Mapping[str, Try], held_back: Collection[str] = ()
) -> Asked:  # fmt: skip
    """Decide which shards in debt are asked for now. Tries of shards that are out of debt are forgotten."""
    visited = set(in_flight)
    held = set(held_back) - visited
    indebted = [shard for shard in survey.due("compaction") if shard in survey.looks]
    known = {shard: tries.get(shard, Try(0, 0)) for shard in indebted}
    free = [shard for shard in indebted if shard not in visited and shard not in held]
    is_due = [shard for shard in free if known[shard].due_ms <= survey.now]
    fresh_first = sorted(is_due, key=lambda shard: known[shard].attempt)
    now = tuple(fresh_first[: max(0, MOST_IN_FLIGHT - len(visited))])
    kept = {shard: one for shard, one in known.items() if one.attempt}
    kept |= {shard: Try(max(1, known[shard].attempt), survey.now) for shard in indebted if shard in visited}
    kept |= {shard: Try(known[shard].attempt + 1, survey.now) for shard in now}
    under_way = len(visited.intersection(indebted))
    stopped = len(held.intersection(indebted))
    return Asked(now, under_way, len(indebted) - under_way - stopped - len(now), kept, stopped)


def mark_of(survey: Survey, shard: str, one: Try) -> str:
    """What a run is requested for: the debt of a shard, and the attempt. Dagster starts one run for it.

    The hour is in it so that a shard that the cursor does not remember is asked for again.
    """
    return f"{shard}@{survey.looks[shard].mark}#{one.attempt}.{survey.now // HOUR_MS}"


def run_key(marks: Iterable[str]) -> str:
    """The mark itself if there is only one, as in `shard@seqno`; a digest of the marks if there are several."""
    sorted_marks = sorted(marks)
    if len(sorted_marks) == 1:
        return sorted_marks[0]
    digest = hashlib.blake2b(json.dumps(sorted_marks).encode(), digest_size=12).hexdigest()
    return f"{len(sorted_marks)} shards {digest}"


def loads(cursor: str | None, kind: Callable[..., T]) -> dict[str, T]:
    """The tries in a cursor, of this kind. One that cannot be read is taken for none."""
    try:
        return {str(name): kind(*map(int, one)) for name, one in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def dumps(tries: Mapping[str, Any]) -> str:
    """The cursor: at most `REMEMBERED` tries, of what was asked for last."""
    kept = sorted(tries.items(), key=lambda item: -item[1].at_ms)[:REMEMBERED]
    return json.dumps(dict(kept), separators=(",", ":"))
