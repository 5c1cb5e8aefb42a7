"""Compaction of one shard or of many, in one Spark application.

    python jobs/compact.py --location file:./data                        every shard that has debt
    spark-submit jobs/compact.py --location s3://bucket/prefix --consensus postgresql://… --shard orders --engine spark
    python jobs/compact.py --location file:./data --dry-run              what it would do, and at what price

Small debts are merged in this process; larger ones are cut into key ranges, one Spark task each. This process commits
each request as one transition as soon as its tasks are done. If it is killed at any point, every shard is correct. If a
shard cannot be compacted, the program continues with the others; at its end it fails and names that shard. A shard that
another process compacts is such a shard (Busy).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

from jobs import program
from jobs.engine import EngineName, SparkEngine, engine_for
from jobs.parallel import IN_FLIGHT, Outcome, on_shards
from jobs.session import Sessions
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop
from jobs.watch import Moves, Watch
from persist_lib.client import Client
from persist_lib.core.duties import MAINTENANCE_LEASE_MS
from persist_lib.core.plan.compaction import Policy
from persist_lib.maintain import Compacted


def compact_shards(
    client: Client,
    shards: Sequence[str],
    sessions: Sessions | None = None,
    *,
    engine: EngineName = "auto",
    policy: Policy | None = None,
    dry_run: bool = False,
    in_flight: int = IN_FLIGHT,
    spark: SparkEngine | None = None,
    stop: Stop | None = None,
    says: Callable[[str], object] | None = None,
    moves: Moves | None = None,
) -> Iterator[Outcome[Compacted]]:
    """Compact each shard as `on_shards` does it. `sessions` is called only if Spark is needed.

    `says` gets a line when a shard begins, and each half minute for each that continues. `moves` is called each time
    that a task of a shard is done.
    """
    if spark is None and sessions is not None and engine != "local":
        spark = SparkEngine(client, sessions, stop=stop)
    stop = stop or Stop()
    if spark is not None and spark.stop is not stop:
        stop.on_set(spark.cancel)

    watch = Watch(says or (lambda _: None), moves=moves or (lambda _s, _w, _d, _t: None))

    def one(shard: str) -> Compacted:
        with watch.doing(shard) as tells:
            chosen = engine_for(client, shard, engine, spark, tells)
            return client.compact(shard, engine=chosen, policy=policy, dry_run=dry_run, alone=True)

    with watch:
        yield from on_shards(one, shards, in_flight, stop)


def numbers(compacted: Compacted) -> dict[str, float]:
    """What a compaction did, in figures that can be added up and drawn over time."""
    applied = compacted.applied
    return {
        "batches_before": compacted.batches_before,
        "batches_after": compacted.batches_after,
        "requests": len(compacted.plan.requests),
        "overtaken": sum(1 for one in applied if one.seqno is None),
        "tasks": sum(one.tasks for one in applied),
        "updates_in": sum(one.updates_in for one in applied),
        "updates_out": sum(one.updates_out for one in applied),
        "bytes_in": compacted.bytes_in,
        "bytes_out": compacted.bytes_out,
        "parts_out": sum(one.parts_out for one in applied),
        "cas_attempts": sum(one.attempts for one in applied),
        "debt": compacted.plan.debt,
        "dollars_planned": compacted.plan.cost.dollars,
        "seconds": sum(one.seconds for one in applied),
        **program.spent(compacted.cost),
    }


def overtaken(compacted: Compacted) -> list[str]:
    """A line for each request whose inputs another compactor replaced first. What this one wrote for it are orphans."""
    return [
        f"another compactor replaced {len(one.ids)} batches ({one.reason}) first, so this one committed nothing for "
        f"them; {one.parts_out} parts that it wrote, {one.bytes_out} bytes, are left to the audit of orphans"
        for one in compacted.applied
        if one.seqno is None
    ]


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = program.arguments(__doc__)
    parser.add_argument("--engine", choices=get_args(EngineName), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parsed = parser.parse_args(argv)

    def compact(client: Client, shards: list[str], tells: program.Tells) -> Iterator[Outcome[Compacted]]:
        return compact_shards(
            client, shards, program.sessions(parsed), engine=parsed.engine, dry_run=parsed.dry_run,
            in_flight=parsed.in_flight, says=tells.says, moves=tells.moves,
        )  # fmt: skip

    def told(tells: program.Tells, shard: str, compacted: Compacted) -> None:
        for line in overtaken(compacted):
            tells.says(f"{shard}: {line}")
        tells.done(shard, numbers(compacted))

    doing = "planning compaction" if parsed.dry_run else "compacting"
    return program.over_shards(parsed, unfinished, doing, compact, told, MAINTENANCE_LEASE_MS)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
