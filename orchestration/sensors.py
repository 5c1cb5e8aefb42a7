"""Sensors for work that is due by the state of shards: new shards become partitions, and shards in debt are compacted.

A tick costs one small request a shard. It reads the state only of shards that changed since the last tick. Cursors hold
what was seen; if a cursor is lost, ticks look at all shards again.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from orchestration.duties import census_numbers
from orchestration.jobs import SWEEPS, run_config
from orchestration.partitions import shard_partitions
from orchestration.reports import figure
from orchestration.resources import Persist
from persist_lib.client import Client
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.state import State

LOOKED_AT = 200
"""The most shards whose state one tick reads. The others wait for the next tick."""
UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]


def sensors(status: dg.DefaultSensorStatus) -> list[dg.SensorDefinition]:
    """All sensors."""
    return [discovery_sensor(status), debt_sensor(status)]


def discovery_sensor(status: dg.DefaultSensorStatus) -> dg.SensorDefinition:
    """A sensor that makes new shards partitions, requests their census, and observes changed shards without a run."""

    @dg.sensor(name="shard_discovery", job=SWEEPS["census"], minimum_interval_seconds=30, default_status=status)
    def shard_discovery(context: dg.SensorEvaluationContext, persist: Persist) -> dg.SensorResult:
        """Make new shards partitions, and observe those that changed."""
        heads, seen = seqnos(persist.client), loads(context.cursor)
        known = set(context.instance.get_dynamic_partitions("persist_shards"))
        new = [shard for shard in heads if shard not in known]
        changed = [shard for shard in heads if heads[shard] != seen.get(shard)][:LOOKED_AT]
        requests = []
        if new:
            key = run_key(f"{shard}@{heads[shard]}" for shard in new)
            tags = {"persist/duty": "census", **({"persist/shard": new[0]} if len(new) == 1 else {})}
            requests = [dg.RunRequest(run_key=key, run_config=run_config("census", shards=new), tags=tags)]
        return dg.SensorResult(
            dynamic_partitions_requests=[shard_partitions.build_add_request(new)] if new else [],
            run_requests=requests,
            asset_events=[observation(persist.client, shard) for shard in changed],
            cursor=json.dumps({**seen, **{shard: heads[shard] for shard in changed}}),
            skip_reason=None if requests else f"{len(heads)} shards, {len(changed)} of them changed, none new",
        )  # fmt: skip

    return shard_discovery


def debt_sensor(status: dg.DefaultSensorStatus) -> dg.SensorDefinition:
    """A sensor that requests one compaction run for all shards whose trace calls for it."""

    @dg.sensor(name="compaction_debt", job=SWEEPS["compaction"], minimum_interval_seconds=60, default_status=status)
    def compaction_debt(context: dg.SensorEvaluationContext, persist: Persist) -> dg.SensorResult | dg.SkipReason:
        """Request one run for all shards in debt."""
        if context.instance.get_runs(dg.RunsFilter(job_name="compaction", statuses=UNFINISHED), limit=1):
            return dg.SkipReason("a compaction is queued or running; shards are looked at again after it")
        cursor = loads(context.cursor)
        seen, asked = dict(cursor.get("seen", {})), dict(cursor.get("asked", {}))
        looked_at, indebted = debts(persist.client, seen, asked)
        requests = []
        if indebted:
            key = run_key(f"{shard}@{mark}" for shard, mark in indebted.items())
            requests = [dg.RunRequest(run_key=key, run_config=run_config("compaction", shards=sorted(indebted)))]
        return dg.SensorResult(
            run_requests=requests,
            cursor=json.dumps({"seen": seen | looked_at, "asked": asked | indebted}),
            skip_reason=None if requests else f"{len(looked_at)} shards changed, none is newly in debt",
        )

    return compaction_debt


def debts(client: Client, seen: Mapping[str, int], asked: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the seqnos of shards that changed since they were `seen`, and the marks of those newly in debt.

    A mark identifies what there is to compact. A shard whose mark is in `asked` is left out, so that a run is requested
    only once for the same debt.
    """
    changed = {shard: seqno for shard, seqno in seqnos(client).items() if seen.get(shard) != seqno}
    looked_at = dict(sorted(changed.items())[:LOOKED_AT])
    indebted = {}
    for shard in looked_at:
        state = client.inspect(shard).state
        if asked.get(shard) != mark_of(state) and plan_compaction(state, client.policy()).requests:
            indebted[shard] = mark_of(state)
    return looked_at, indebted


def mark_of(state: State) -> str:
    """A mark that changes with the data and with since, not with leases.

    So a shard that cannot be compacted is not tried for ever.
    """
    return f"{state.next_id}.{state.since.time}"


def seqnos(client: Client) -> dict[str, int]:
    """The newest seqno of every shard."""
    heads = ((shard, client.consensus.head(shard)) for shard in client.shards())
    return {shard: head.seqno for shard, head in heads if head is not None}


def observation(client: Client, shard: str) -> dg.AssetObservation:
    """The census of a shard as an observation."""
    census = client.census(shard)
    figures = {**census_numbers(census), "seqno": census.seqno}
    return dg.AssetObservation(
        "census", partition=shard, metadata={name: figure(value) for name, value in figures.items()}
    )


def run_key(marks: Iterable[str]) -> str:
    """The mark itself if there is only one, as in `shard@seqno`; a digest of the marks if there are several."""
    sorted_marks = sorted(marks)
    if len(sorted_marks) == 1:
        return sorted_marks[0]
    return (
        f"{len(sorted_marks)} shards {hashlib.blake2b(json.dumps(sorted_marks).encode(), digest_size=12).hexdigest()}"
    )


def loads(cursor: str | None) -> dict[str, Any]:
    """A cursor's contents."""
    found = json.loads(cursor) if cursor else {}
    return found if isinstance(found, dict) else {}
