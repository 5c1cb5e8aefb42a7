"""One pass over many shards in one process: one Spark application, a few shards at a time, events as they come.

The assets use it for chosen partitions, as in a backfill, and the jobs for all shards that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import dagster as dg

from jobs.engine import SparkEngine
from jobs.parallel import in_parallel
from orchestration.duties import Duty, Options, ShardReport, look_after
from orchestration.reports import Event, events, failure
from orchestration.resources import Spark
from persist_lib.client import Client
from persist_lib.errors import CompactionRefused, Damage, DiffOverflow, InvalidUsage

PERMANENT = (CompactionRefused, Damage, DiffOverflow, InvalidUsage)
"""Errors that a second attempt would raise again."""


def sweep(
    log: dg.DagsterLogManager,
    client: Client,
    shards: Sequence[str],
    duties: Sequence[Duty],
    options: Options,
    *,
    materialize: Collection[str],
    checks: Collection[str],
    in_flight: int,
) -> Iterator[Event]:
    """Do the duties of each shard, and yield its events when done. Raises Failure at the end if a shard failed."""
    problems: dict[str, list[str]] = {}
    errors: list[Exception] = []

    def one(shard: str) -> ShardReport:
        return look_after(client, shard, duties, options)

    cancel = options.spark.cancel if options.spark else None
    for number, report in enumerate(in_parallel(one, shards, in_flight, cancel), 1):
        yield from events(report, materialize, checks)
        if report.problems:
            problems[report.shard] = report.problems
            errors += report.errors.values()
            log.error("%s failed (%d of %d): %s", report.shard, number, len(shards), "; ".join(report.problems))
        else:
            log.info("%s is done (%d of %d)", report.shard, number, len(shards))
    if problems:
        is_permanent = not errors or all(isinstance(error, PERMANENT) for error in errors)
        raise failure(problems, is_permanent=is_permanent)


def spark_engine(client: Client, spark: Spark, engine: str) -> SparkEngine | None:
    """The Spark engine of this run; None if Spark is not wanted or cannot reach the location."""
    if engine == "local" or client.url.startswith("memory:"):
        return None
    return SparkEngine(client, lambda: spark.spark_session)
