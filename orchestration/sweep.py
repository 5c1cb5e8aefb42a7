"""One pass over many shards in one process: one Spark application, a few shards at a time, events as they come.

The assets use it for chosen partitions, as in a backfill, and the jobs for the shards on which something is due.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import dagster as dg

from jobs.engine import SparkEngine
from jobs.parallel import in_parallel
from jobs.watch import Watch
from orchestration.duties import Duty, Options, ShardReport, look_after
from orchestration.reports import Event, Recording, failure, listed, mark_failed, told
from orchestration.resources import Spark
from orchestration.stopping import CANCELS, pause_cancelled
from persist_lib.client import Client
from persist_lib.errors import CompactionRefused, Damage, DiffOverflow, InvalidUsage, NotFound, PersistError
from persist_lib.maintain.survey import Survey

PERMANENT = (CompactionRefused, Damage, DiffOverflow, InvalidUsage, NotFound)
"""Errors that a second attempt would raise again."""
AGAIN_AFTER_S = 5.0
"""Seconds until the shards that failed for a passing reason are tried once more."""
TOLD_EACH_S = 30.0
"""Seconds between two lines in the log that say how far a pass is."""


@dataclass
class Pass:
    """How far a pass is: the shards that are done, that failed and why, and that were left (busy, or paused)."""

    shards: Sequence[str]
    settled: dict[Duty, list[str]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    problems: dict[str, list[str]] = field(default_factory=dict)
    duties_failed: dict[str, list[Duty]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def add(self, report: ShardReport) -> None:
        """Enter one shard, which may have been tried before."""
        for done in report.done:
            if done.is_settled:
                self.settled.setdefault(done.duty, []).append(report.shard)
        self.problems.pop(report.shard, None)
        if report.left:
            self.left[report.shard] = next(iter(report.left.values()))
        if report.problems:
            self.problems[report.shard] = report.problems
            fatal = [d.duty for d in report.done for f in d.findings if f.fatal and not f.passed and f.is_evaluated]
            self.duties_failed[report.shard] = [*report.errors, *fatal]
        else:
            self.done.add(report.shard)

    @property
    def unfinished(self) -> list[str]:
        """The shards that are neither done nor failed."""
        return [shard for shard in self.shards if shard not in self.done and shard not in self.problems]

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def says(self) -> str:
        """How far it is, in one line: what failed comes first."""
        return told(self.problems, (), len(self.done)) + f" {len(self.unfinished)} to go, {self.seconds:.0f} s."


def sweep(
    context: dg.OpExecutionContext,
    client: Client,
    shards: Sequence[str],
    duties: Sequence[Duty],
    options: Options,
    recording: Recording,
) -> Generator[Event, None, Pass]:
    """Do the duties of each shard, and yield its events when done. Raises Failure at the end if a shard failed.

    A shard that failed for a passing reason is tried once more. When the run is cancelled, nothing more begins, and the
    log says what is unfinished. What was settled is remembered in the location, also if other shards failed.
    """
    far = Pass(shards)
    try:
        yield from _attempts(context.log, client, far, duties, options, recording)
    except BaseException as stopped:
        options.stop.set()
        if isinstance(stopped, CANCELS) and not options.dry_run:
            pause_cancelled(context, client, far.unfinished, duties, recording.mount)
        context.log.error(  # noqa: TRY400 - the trace of an interrupt says nothing
            "this run was stopped. %s What was committed stays, and a later run does the rest",
            told(_named(far.problems, recording), [recording.named(one) for one in far.unfinished], len(far.done)),
        )
        raise
    recording.remind()
    if not options.dry_run:
        _remember(context.log, client, far)
    for shard in far.problems:
        for duty in far.duties_failed[shard]:
            mark_failed(context, recording.mount, shard, duty)
    if far.problems:
        raise failure(_named(far.problems, recording), far.unfinished, len(far.done))
    return far


def _named(problems: Mapping[str, list[str]], recording: Recording) -> dict[str, list[str]]:
    return {recording.named(shard): why for shard, why in problems.items()}


def _attempts(
    log: dg.DagsterLogManager,
    client: Client,
    far: Pass,
    duties: Sequence[Duty],
    options: Options,
    recording: Recording,
) -> Iterator[Event]:
    again: list[ShardReport] = []

    def one(shard: str) -> ShardReport:
        with watch.doing(shard) as tells:
            return look_after(client, shard, duties, replace(options, tells=tells))

    def attempt(some: Sequence[str], *, is_last: bool) -> Iterator[Event]:
        told_at = time.monotonic()
        for whole in in_parallel(one, some, options.in_flight, options.stop):
            if is_passing(whole) and not is_last:
                again.append(whole)
                continue
            report = recording.worth(whole)
            far.add(report)
            yield from recording.events(report)
            tell(log, report, recording.named(report.shard))
            if time.monotonic() - told_at > TOLD_EACH_S:
                told_at = time.monotonic()
                log.info(far.says())

    with Watch(lambda line: log.info("%s", line)) as watch:
        yield from attempt(far.shards, is_last=False)
        if again:
            failed, why = [report.shard for report in again], "; ".join(again[0].problems)
            log.warning("tried again in %g s: %s. The first failed by %s", AGAIN_AFTER_S, listed(failed), why)
            time.sleep(AGAIN_AFTER_S)
            yield from attempt(failed, is_last=True)


def _remember(log: dg.DagsterLogManager, client: Client, far: Pass) -> None:
    """Remember what was settled, so that the next pass does not visit it. If that fails, it is only done once more."""
    try:
        client.survey(done=far.settled)
    except PersistError as error:
        log.warning("what was done is not remembered, so the next pass looks at it again: %s", error)


def look(log: dg.DagsterLogManager, client: Client) -> Survey:
    """Survey all shards, and say in the log how far that is each half minute."""
    told_at = time.monotonic()

    def tells(done: int, total: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > TOLD_EACH_S:
            told_at = time.monotonic()
            log.info("looked at %d of %d shards that have changed", done, total)

    return client.survey(progress=tells)


def is_passing(report: ShardReport) -> bool:
    """Whether a shard failed, and only for reasons that may be gone at the next attempt."""
    return bool(report.errors) and not any(isinstance(error, PERMANENT) for error in report.errors.values())


def tell(log: dg.DagsterLogManager, report: ShardReport, shard: str) -> None:
    """Say in the log what was done on a shard, if anything was."""
    if report.problems:
        log.error("%s failed: %s", shard, "; ".join(report.problems))
    for said in report.left.values():
        log.warning("%s is left: %s", shard, said)
    acted = [done.duty for done in report.done if done.has_acted and not done.withheld and done.duty != "census"]
    if acted:
        log.info("%s: %s", shard, ", ".join(acted))


def spark_engine(client: Client, spark: Spark, options: Options) -> Options:
    """The options with this run's Spark engine, unless Spark is not wanted or cannot reach the location."""
    if options.engine == "local" or client.url.startswith("memory:"):
        return options
    return replace(options, spark=SparkEngine(client, lambda: spark.spark_session, stop=options.stop))
