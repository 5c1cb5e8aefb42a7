"""Maintenance from Python, in this process: what `dagster job execute -j maintenance` does, with its figures as values.

    report = run_maintenance("file:./data", spark=SparkSettings(driver_memory="2g"))
    report.figures["orders"]["compaction"]["bytes_out"]

$ python -m orchestration.run file:./data
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import dagster as dg

from jobs.session import SparkSettings
from orchestration.definitions import build_definitions
from orchestration.jobs import run_config
from orchestration.mount import Mount
from orchestration.settings import Settings


@dataclass(frozen=True)
class Verdict:
    """One check on one shard."""

    shard: str
    check: str
    passed: bool
    says: str


@dataclass(frozen=True)
class RunReport:
    """What a run did: figures by shard and duty, verdicts, and why the run failed, if it did."""

    success: bool
    run_id: str
    figures: Mapping[str, Mapping[str, Mapping[str, Any]]]
    verdicts: tuple[Verdict, ...]
    failure: str

    @property
    def failed_checks(self) -> list[Verdict]:
        """The verdicts of checks that failed."""
        return [verdict for verdict in self.verdicts if not verdict.passed]


def run_maintenance(
    location: str,
    consensus: str | None = None,
    *,
    job: str = "maintenance",
    spark: SparkSettings | None = None,
    config: Mapping[str, Any] | None = None,
    instance: dg.DagsterInstance | None = None,
    log_level: str = "INFO",
    may_delete: bool = True,
    **options: Any,
) -> RunReport:
    """Run a job of `orchestration.jobs` here and now. `options`: fields of `SweepConfig`, as in `shards=["orders"]`.

    It visits all shards, also those on which nothing is due, unless `everything=False`. Without an `instance`, Dagster
    keeps no record of the run. `log_level` is the level from which Dagster prints. Errors of a shard are in the report;
    they are not raised. Running it again finds nothing to do.
    """
    settings = Settings(
        location=location, consensus=consensus, config=config or {}, spark=spark, is_running=False, apply="at once",
        may_delete=may_delete,
    )  # fmt: skip
    definition = build_definitions(settings).resolve_job_def(job)
    chosen = run_config(Mount(), job, **{"everything": True, **options})
    chosen = dg.RunConfig(ops=chosen.ops, loggers={"console": {"config": {"log_level": log_level}}})
    with dg.DagsterInstance.ephemeral() if instance is None else nullcontext(instance) as kept:
        return _report(definition.execute_in_process(instance=kept, run_config=chosen, raise_on_error=False))


def _report(result: dg.ExecuteInProcessResult) -> RunReport:
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    verdicts = []
    for event in result.all_events:
        data = event.event_specific_data
        if isinstance(data, dg.AssetCheckEvaluation):
            verdicts.append(Verdict(data.partition or "", data.check_name, data.passed, data.description or ""))
        elif (found := _recorded(event)) is not None and found.partition is not None:
            values = {name: value.value for name, value in found.metadata.items()}
            figures.setdefault(found.partition or "", {})[found.asset_key.to_user_string()] = values
    return RunReport(result.success, result.run_id, figures, tuple(verdicts), _why(result))


def _recorded(event: dg.DagsterEvent) -> dg.AssetMaterialization | dg.AssetObservation | None:
    if event.is_step_materialization:
        return event.step_materialization_data.materialization
    return event.asset_observation_data.asset_observation if event.is_asset_observation else None


def _why(result: dg.ExecuteInProcessResult) -> str:
    failed = [event for event in result.all_events if event.is_step_failure]
    if not failed:
        return ""
    data = failed[-1].step_failure_data.user_failure_data
    return (data.description if data else None) or failed[-1].message or "failed"


def main() -> int:
    """Maintain every shard of a location; returns 1 if one failed, else 0."""
    report = run_maintenance(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    for shard, duties in sorted(report.figures.items()):
        compacted = duties.get("compaction", {})
        dollars = sum(figures.get("dollars", 0) for figures in duties.values())
        requests = sum(figures.get("location_requests", 0) for figures in duties.values())
        print(
            f"{shard}: {compacted.get('batches_before')} batches before, {compacted.get('batches_after')} after; "
            f"{requests} requests, ${dollars:.6g}"
        )
    if not report.success:
        print(report.failure, file=sys.stderr)
    return 0 if report.success else 1


if __name__ == "__main__":
    sys.exit(main())
