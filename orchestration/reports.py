"""What is reported to Dagster about a shard: figures for timelines, the trace by level, a report, and verdicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import dagster as dg

from orchestration.duties import Done, Finding, ShardReport
from persist_lib.core.trace import Level

DATA_VERSION = "dagster/data_version"
Event = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


def events(report: ShardReport, materialize: Collection[str], checks: Collection[str]) -> Iterator[Event]:
    """Yield a materialization for each duty in `materialize`, else an observation, and the verdicts in `checks`."""
    for done in report.done:
        kind = dg.AssetMaterialization if done.duty in materialize else dg.AssetObservation
        yield kind(
            done.duty,
            partition=report.shard,
            metadata=metadata(report.shard, done),
            tags={DATA_VERSION: str(done.seqno)},
        )
        for finding in done.findings:
            if finding.check in checks:
                yield evaluation(report.shard, finding)


def metadata(shard: str, done: Done) -> dict[str, dg.MetadataValue]:
    """The metadata of one duty: first the figures, then the tables and the report."""
    found: dict[str, dg.MetadataValue] = {name: figure(value) for name, value in done.numbers.items()}
    if done.census is not None:
        found["trace"] = trace_table(done.census.levels)
        found["fingerprint"] = dg.MetadataValue.text(f"{done.census.fingerprint:016x}")
    found["report"] = dg.MetadataValue.md(markdown(shard, done))
    return found


def figure(value: float | str) -> dg.MetadataValue:
    """A number that draws a timeline, or text."""
    if isinstance(value, str):
        return dg.MetadataValue.text(value)
    return dg.MetadataValue.float(value) if isinstance(value, float) else dg.MetadataValue.int(int(value))


def trace_table(levels: tuple[Level, ...]) -> dg.MetadataValue:
    """The trace by size class, largest first; level -1 is the empty batches."""
    schema = dg.TableSchema(columns=[dg.TableColumn(name, "int") for name in Level._fields])
    return dg.MetadataValue.table([dg.TableRecord(level._asdict()) for level in levels], schema=schema)


def markdown(shard: str, done: Done) -> str:
    """The duty on one page."""
    rows = "".join(f"| {name} | {value:,} |\n" for name, value in done.numbers.items())
    lines = "".join(f"- {line}\n" for line in done.lines)
    verdicts = "".join(f"- {'✓' if one.passed else '✗'} {one.check}: {one.says}\n" for one in done.findings)
    return f"### {done.duty} of `{shard}`\n\n| | |\n|---|---:|\n{rows}\n{lines}{verdicts}"


def evaluation(shard: str, finding: Finding) -> dg.AssetCheckEvaluation:
    """A verdict on one shard."""
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey(finding.duty), check_name=finding.check, passed=finding.passed, partition=shard,
        metadata={name: figure(value) for name, value in finding.numbers.items()}, description=finding.says,
        severity=dg.AssetCheckSeverity.ERROR if finding.fatal else dg.AssetCheckSeverity.WARN,
    )  # fmt: skip


def failure(problems: Mapping[str, list[str]], *, is_permanent: bool) -> dg.Failure:
    """The run's failure, which names every shard that failed. All other shards are done."""
    lines = "".join(f"- `{shard}`: {'; '.join(why)}\n" for shard, why in sorted(problems.items()))
    return dg.Failure(
        f"{len(problems)} shards failed, all others are done: {', '.join(sorted(problems))}",
        metadata={"failed_shards": len(problems), "problems": dg.MetadataValue.md(lines)},
        allow_retries=not is_permanent,
    )
