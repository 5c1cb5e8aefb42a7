"""What is reported to Dagster about a shard: figures for timelines, the trace by level, a report, and verdicts.

Only what happened is recorded. An event costs Dagster some milliseconds and some kilobytes, and most shards are idle in
most passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.event_api import PartitionKeyFilter
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from orchestration.checks import CHECKS, checks_of
from orchestration.duties import Done, Duty, Finding, ShardReport, not_evaluated
from orchestration.mount import Mount
from persist_lib.core.trace import Level
from persist_lib.runtime.each import why

DRAWN: Mapping[Duty, Collection[str]] = {
    "census": (
        "batches", "batch_bound", "updates", "size", "debt", "garbage_size", "collectable_size", "overdue",
        "rollup_lag", "dollars_month", "write_amplification", "upper", "since", "upper_time", "since_time", "seqno",
        "location_requests", "bytes_read", "bytes_written", "dollars", "seconds",
    ),
}  # fmt: skip
"""The figures of a duty that are timelines. Its others are in the report alone: an entry of metadata has 150 bytes, and
a thousand shards are counted all day. What is 0 is left out there. Duties that are not here draw all."""
RECORDED_EACH_S = 3600.0
"""How often a pass that only counts records a shard, unless its verdict changes."""
DATA_VERSION = "dagster/data_version"
DRY_RUN = "persist/dry_run"
LONGEST_LIST = 20
"""How many shards a message names. All of them are in the metadata of the failure."""

Event = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


@dataclass(frozen=True)
class Recording:
    """What a run records: for which duties, which verdicts, and whether also duties that found nothing to do.

    A dry run records observations only, and no verdicts: it did nothing, and judged nothing that was done.
    """

    instance: dg.DagsterInstance
    mount: Mount
    duties: Collection[Duty]
    checks: Collection[str] = tuple(CHECKS)
    everything: bool = False
    is_dry: bool = False
    owner: Callable[[str], str] = field(default=lambda _: "")
    """Whose a shard is whose name is minted; empty for the others."""
    last: dict[str, bool] = field(default_factory=dict)
    """Whether the last verdict of each check was good."""
    unrecorded: list[str] = field(default_factory=list)
    """Shards that were counted, and are as they were recorded within the hour."""

    def named(self, shard: str) -> str:
        """A shard for people: its name, and whose it is."""
        owner = self.owner(shard)
        return f"{shard} ({owner})" if owner else shard

    def worth(self, report: ShardReport) -> ShardReport:
        """The report without a census that says little: nothing else was done, and the last one is not an hour old.

        The verdict has to be the same. What is left out is not settled either, so a later pass counts the shard again,
        and it is recorded within an hour also if it moves no more.
        """
        if self.everything or self.is_dry or [done.duty for done in report.done] != ["census"] or report.errors:
            return report
        wanted = dg.AssetRecordsFilter(self.mount.key("census"), asset_partitions=[report.shard])
        for last in self.instance.fetch_materializations(wanted, limit=1).records:
            found = last.asset_materialization
            batches, bound = (found.metadata.get(name) if found else None for name in ("batches", "batch_bound"))
            if batches is None or bound is None or time.time() - last.timestamp > RECORDED_EACH_S:
                continue
            if report.done[0].findings[0].passed == (batches.value <= bound.value):  # type: ignore[operator]
                self.unrecorded.append(report.shard)
                return report._replace(done=())
        return report

    def events(self, report: ShardReport) -> Iterator[Event]:
        """Yield a materialization for each duty that did something, else an observation, and its verdicts."""
        for done in report.done:
            if done.has_acted or self.everything:
                yield self._recorded(report.shard, done)
                yield from self._verdicts(report.shard, done.findings)
        yield from self._verdicts(report.shard, failed_checks(report))

    def _recorded(self, shard: str, done: Done) -> Event:
        is_done = done.duty in self.duties and not self.is_dry and not done.withheld
        kind = dg.AssetMaterialization if is_done else dg.AssetObservation
        tags = {DATA_VERSION: str(done.seqno), **({DRY_RUN: "true"} if self.is_dry else {})}
        found = metadata(self.named(shard), done)
        if owner := self.owner(shard):
            found = {"owner": figure(owner), **found}
        return kind(self.mount.key(done.duty), partition=shard, metadata=found, tags=tags, description=owner or None)

    def _verdicts(self, shard: str, findings: Collection[Finding]) -> Iterator[Event]:
        chosen = [finding for finding in findings if finding.check in self.checks and not self.is_dry]
        duties = {finding.duty for finding in chosen}
        targets = {duty: judged(self.instance, self.mount.key(duty), shard) for duty in duties}
        for finding in chosen:
            self.last[finding.check] = finding.passed
            yield self._evaluation(shard, finding, targets[finding.duty])

    def remind(self) -> None:
        """Record bad verdicts on other shards that still hold, of checks whose last verdict of this run was good."""
        partitions = self.instance.get_dynamic_partitions(self.mount.partitions.name or "")
        for check in (check for check, is_good in self.last.items() if is_good):
            remind(self.instance, dg.AssetCheckKey(self.mount.key(CHECKS[check][0]), check), partitions)

    def _evaluation(
        self, shard: str, finding: Finding, target: AssetCheckEvaluationTargetMaterializationData | None
    ) -> dg.AssetCheckEvaluation:
        """A verdict on one shard. Dagster knows no check without a verdict, so it becomes a warning that says so."""
        is_error = finding.fatal and finding.is_evaluated
        return dg.AssetCheckEvaluation(
            asset_key=self.mount.key(finding.duty), check_name=finding.check, passed=finding.passed, partition=shard,
            metadata={name: figure(value) for name, value in finding.numbers.items()},
            description=f"{owner}: {finding.says}" if (owner := self.owner(shard)) else finding.says,
            severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
            target_materialization_data=target,
        )  # fmt: skip

    def summary(self, duty: Duty, figures: Mapping[str, float]) -> dg.AssetObservation:
        """One observation for all shards of a pass, idle ones included."""
        return dg.AssetObservation(
            self.mount.key(duty), metadata={name: figure(value) for name, value in figures.items()},
            description=f"a pass over {figures['shards']} shards, of which {figures['idle']} were idle",
        )  # fmt: skip


def remind(instance: dg.DagsterInstance, key: dg.AssetCheckKey, partitions: Collection[str | None]) -> None:
    """Record the newest bad verdict of a check among the newest ones of these partitions again; none if all are good.

    SUBTLE: an asset's page and its place in the graph show the verdict that was recorded last, of whichever
    partition. So after good ones a bad one that still holds is recorded once more, by itself and without a
    partition, of which Dagster keeps any number: nothing is green beside known damage. It names the newest
    materialization: of one that names none, Dagster compares times, of which one is in whole seconds, and shows grey.
    """
    storage = instance.event_log_storage
    bad = [
        (one.latest_check_event_storage_id, one.partition_key)
        for one in storage.get_asset_check_partition_info([key])
        if one.latest_execution_status == AssetCheckExecutionRecordStatus.FAILED and one.partition_key in partitions
    ]
    if not bad:
        return
    _, partition = max(bad, key=itemgetter(0))
    (record,) = storage.get_asset_check_execution_history(
        key, limit=1, partition_filter=PartitionKeyFilter(key=partition)
    )
    if (found := record.evaluation) is not None:
        says = (found.description or "").removeprefix(f"{partition}: ")
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=key.asset_key, check_name=key.name, passed=False, severity=found.severity,
                description=says if partition is None else f"{partition}: {says}", metadata=found.metadata,
                target_materialization_data=judged(instance, key.asset_key),
            )
        )  # fmt: skip


def mark_failed(context: dg.OpExecutionContext, mount: Mount, shard: str, duty: str) -> None:
    """Make the partition of a shard red once this run has failed. The next materialization makes it green again.

    Dagster calls a partition failed if a materialization of it was planned in a run that failed, and none came after
    that. It plans only the partitions that it was asked for itself, so a run plans those on which it failed.
    """
    event = dg.DagsterEvent.build_asset_materialization_planned_event(
        context.job_name, str(context.op_handle), AssetMaterializationPlannedData(mount.key(duty), shard)
    )
    context.instance.report_dagster_event(event, context.run_id, logging.INFO)


def judged(
    instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None = None
) -> AssetCheckEvaluationTargetMaterializationData | None:
    """The newest materialization of a partition (None: of any), which a verdict is on.

    SUBTLE: of a verdict on no materialization, Dagster forgets to which partition it belongs. Its list of checks then
    shows the verdict on the partition that was judged last: a green one hides a red one.
    """
    wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=partition and [partition])
    for one in instance.fetch_materializations(wanted, limit=1).records:
        return AssetCheckEvaluationTargetMaterializationData(
            storage_id=one.storage_id, run_id=one.event_log_entry.run_id, timestamp=one.timestamp
        )
    return None


def failed_checks(report: ShardReport) -> list[Finding]:
    """The checks of the duties that failed, which have no verdict."""
    return [
        not_evaluated(check, duty, why(error)) for duty, error in report.errors.items() for check in checks_of(duty)
    ]


def metadata(shard: str, done: Done) -> dict[str, dg.MetadataValue]:
    """The metadata of one duty: first the figures, then the tables and the report."""
    figures: dict[str, float | str] = {**done.numbers, **done.texts}
    drawn = DRAWN.get(done.duty, figures)
    found: dict[str, dg.MetadataValue] = {name: figure(value) for name, value in figures.items() if name in drawn}
    if done.census is not None and done.duty not in DRAWN:
        schema = dg.TableSchema(columns=[dg.TableColumn(name, "int") for name in Level._fields])
        found["trace"] = dg.MetadataValue.table([dg.TableRecord(one._asdict()) for one in done.census.levels], schema)
        found["fingerprint"] = dg.MetadataValue.text(f"{done.census.fingerprint:016x}")
    found["report"] = dg.MetadataValue.md(markdown(shard, done))
    return found


def figure(value: float | str) -> dg.MetadataValue:
    """A number that draws a timeline, or text."""
    if isinstance(value, str):
        return dg.MetadataValue.text(value)
    return dg.MetadataValue.float(value) if isinstance(value, float) else dg.MetadataValue.int(int(value))


def markdown(shard: str, done: Done) -> str:
    """The duty on one page."""
    hidden = DRAWN.get(done.duty, ())
    shown = ((name, value) for name, value in done.numbers.items() if name not in hidden and (value or not hidden))
    rows = "".join(f"| {name} | {value:,} |\n" for name, value in shown)
    rows += "".join(f"| {name} | {text} |\n" for name, text in done.texts.items() if name not in hidden)
    if hidden and done.census is not None:
        rows += "".join(
            f"| level {one.level} | {one.batches:,} batches, {one.updates:,} updates, {one.size:,} bytes |\n"
            for one in done.census.levels
        )
        rows += f"| fingerprint | {done.census.fingerprint:016x} |\n"
    lines = "".join(f"- {line}\n" for line in done.lines)
    verdicts = "".join(
        f"- {'?' if not one.is_evaluated else '✓' if one.passed else '✗'} {one.check}: {one.says}\n"
        for one in done.findings
    )
    return f"### {done.duty} of `{shard}`\n\n| | |\n|---|---:|\n{rows}\n{lines}{verdicts}"


def failure(problems: Mapping[str, list[str]], unfinished: Collection[str], done: int) -> dg.Failure:
    """The run's failure: first what failed and why, then what was not finished, then how many shards are done."""
    lines = "".join(f"- `{shard}`: {'; '.join(reasons)}\n" for shard, reasons in sorted(problems.items()))
    return dg.Failure(
        told(problems, unfinished, done),
        metadata={"failed_shards": len(problems), "problems": dg.MetadataValue.md(lines)},
    )


def told(problems: Mapping[str, list[str]], unfinished: Collection[str], done: int) -> str:
    """What failed and why, what was not finished, and how many shards are done, in one text."""
    failed = [f"{shard} ({'; '.join(reasons)})" for shard, reasons in sorted(problems.items())]
    sentences = []
    if failed:
        sentences.append(f"Failed, {len(failed)} of {len(failed) + len(unfinished) + done} shards: {listed(failed)}.")
    if unfinished:
        sentences.append(f"Unfinished, {len(unfinished)}: {listed(sorted(unfinished))}.")
    return " ".join([*sentences, f"Done: {done}."])


def listed(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown = list(names)[:LONGEST_LIST]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
