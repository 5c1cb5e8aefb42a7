"""What Dagster is told of sources: figures that draw timelines, tables of partitions and instances, and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dagster as dg

from orchestration.collection_reports import table
from orchestration.mount import Mount
from orchestration.reports import Event, figure, judged, remind
from persist_lib.sources import Alert, Progress, SourceDescription
from persist_lib.sources.alerts import CHECKS

SOURCES = "sources"
MOST_ROWS = 50
"""Partitions and instances that an event names: those that have most left."""


@dataclass
class Run:
    """What a run did for one source."""

    name: str
    began: float = 0.0
    seconds: float = 0.0
    messages: int = 0
    errors: int = 0
    failed: str = ""
    found: SourceDescription | None = None
    last: Progress | None = None

    def told(self, what: object) -> None:
        """A step is done, or something failed that may pass."""
        if isinstance(what, Progress):
            self.messages, self.errors, self.last = self.messages + what.messages, self.errors + what.errors, what

    @property
    def state(self) -> str:
        """Whether it failed, is paused, or has something left."""
        if self.failed:
            return "failed"
        if self.found is not None and self.found.state != "running":
            return self.found.state
        return "idle" if self.last is not None and self.last.is_idle else "more is left"

    @property
    def says(self) -> str:
        """It in a sentence."""
        return f"{self.messages:,} messages, {self.errors:,} bad, in {self.seconds:.1f} s: {self.state}"


def described(mount: Mount, run: Run) -> Event:
    """One source: materialized where messages came, else observed."""
    found = run.found
    if found is None:
        raise AssertionError(f"nothing is known of {run.name}")
    lag = {} if run.last is None else run.last.lag
    figures: dict[str, float | str] = {
        "state": run.state, "up_to": found.schema.show(found.time), "messages": run.messages, "errors": run.errors,
        "errors_in_all": found.errors, "messages_per_s": round(run.messages / max(run.seconds, 1e-3), 1),
        "seconds": round(run.seconds, 3), "lag": sum(lag.values()), "behind_ms": found.behind_ms,
        "instances_at_work": len(found.alive), "why": run.failed or found.why or "nothing is wrong",
    }  # fmt: skip
    if found.time < 2**63:
        figures["time"] = found.time
    if run.last is not None and run.last.held_back is not None:
        figures["held_back_bytes"] = run.last.held_back
    worst = sorted(found.bound, key=lambda partition: (-lag.get(partition, 0), partition))[:MOST_ROWS]
    rows = [
        {
            "partition": one, "durable to": str(found.durable[one].address if one in found.durable else 0),
            "left": lag.get(one, 0),
        } for one in worst
    ]  # fmt: skip
    instances = [
        {name: str(one[name]) for name in ("instance", "state", "why")} for one in found.instances[:MOST_ROWS]
    ]  # fmt: skip
    metadata = {name: figure(value) for name, value in figures.items()}
    metadata |= {"partitions": table(rows), "instances": table(instances)}
    kind = dg.AssetMaterialization if run.messages and not run.failed else dg.AssetObservation
    return kind(mount.key(SOURCES), partition=run.name, metadata=metadata, description=run.failed or run.says)


def evaluations(
    instance: dg.DagsterInstance, mount: Mount, run: Run, alerts: Sequence[Alert]
) -> Iterator[dg.AssetCheckEvaluation]:  # fmt: skip
    """The verdicts on one source, at the end of a run. That no instance is at work is so while Dagster runs them."""
    target = judged(instance, mount.key(SOURCES), run.name)
    for one in alerts:
        if one.check == "instances":
            continue
        yield dg.AssetCheckEvaluation(
            asset_key=mount.key(SOURCES), check_name=one.check, passed=one.passed, partition=run.name,
            severity=severity(one.check), description=f"{run.name}: {one.says}",
            metadata={} if one.value is None else {"value": figure(float(one.value))},
            target_materialization_data=target,
        )  # fmt: skip


def severity(check: str) -> dg.AssetCheckSeverity:
    """Red where data stays out: what is not read, and what nothing is at work on. A warning for the rest."""
    return dg.AssetCheckSeverity.ERROR if check in {"instances", "unread"} else dg.AssetCheckSeverity.WARN


def remind_of(instance: dg.DagsterInstance, mount: Mount, names: Sequence[str]) -> None:
    """Record bad verdicts on these sources that still hold again, after those of a run."""
    for check in CHECKS:
        if check != "instances":
            remind(instance, dg.AssetCheckKey(mount.key(SOURCES), check), names)


def overview(mount: Mount, runs: Sequence[Run]) -> dg.AssetObservation:
    """All sources of a run in one table."""
    rows = [
        {
            "source": run.name, "state": run.state, "messages": run.messages, "bad": run.errors,
            "seconds": f"{run.seconds:.1f}", "why": run.failed,
        } for run in runs
    ]  # fmt: skip
    figures = {
        "sources": len(runs), "messages": sum(run.messages for run in runs), "errors": sum(run.errors for run in runs),
        "failed": sum(bool(run.failed) for run in runs),
    }  # fmt: skip
    metadata = {**{name: figure(value) for name, value in figures.items()}, "table": table(rows)}
    says = f"{len(runs)} sources, {figures['messages']:,} messages" if runs else "no source has anything new"
    return dg.AssetObservation(mount.key(SOURCES), metadata=metadata, description=says)
