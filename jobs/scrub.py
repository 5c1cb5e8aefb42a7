"""The scrub of many shards on Spark: every part read again in parallel, its digest verified, its sums recomputed.

    python jobs/scrub.py --location file:./data
    spark-submit jobs/scrub.py --location s3://bucket/prefix --consensus postgresql://… --shard orders

Changes nothing. Exit status 1 names every shard with damage, after all of them were read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from jobs import program
from jobs import tasks as t
from jobs.engine import charge, fan_out
from jobs.session import Sessions, build_session
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.state import Batch
from persist_lib.errors import Corrupt
from persist_lib.location.wrap.spending import Spending
from persist_lib.shard.runs import inputs_of

TASK_BYTES = 64 * MIB
"""About what one task reads."""
TASKS_AT_ONCE = 1024
"""Tasks of one Spark job: what the driver sends in one go."""


@dataclass
class Scrub:
    """One shard's scrub: what was read, and every damage found, by batch."""

    shard: str
    batches: int = 0
    updates: int = 0
    bytes: int = 0
    damaged: dict[tuple[int, int], str] = field(default_factory=dict)
    cost: Cost = Cost()  # noqa: RUF009 - a frozen value


def scrub_shards(client: Client, shards: Sequence[str], sessions: Sessions) -> Iterator[Scrub]:
    """Read all parts of the shards, many at once; yields a shard's findings when all of its batches are read."""
    for shard in shards:
        with Spending() as spent:
            found = _scrub(client, shard, sessions)
        yield replace(found, cost=spent.cost)


def _scrub(client: Client, shard: str, sessions: Sessions) -> Scrub:
    state = client.inspect(shard).state
    batches = {batch.id: batch for batch in state.trace if batch.count}
    tasks = [
        t.SumTask(shard, batch.id, pieces, state.schemas)
        for batch in batches.values()
        for run in inputs_of((batch,))
        for pieces in cut(run)
    ]
    found: dict[tuple[int, int], t.Sums] = {}
    damaged: dict[tuple[int, int], str] = {}
    for task, outcome in _answers(client, tasks, sessions):
        if isinstance(outcome, t.Sums):
            found[task.batch] = plus(found.get(task.batch, t.Sums(0, 0, 0)), outcome)
        else:
            damaged[task.batch] = str(outcome)
    damaged |= {
        id_: why for id_, batch in batches.items() if id_ not in damaged and (why := differs(batch, found[id_]))
    }
    # Replaced and collected while it was read is no damage.
    there = {batch.id for batch in client.inspect(shard).state.trace} if damaged else set()
    real = {id_: why for id_, why in damaged.items() if id_ in there}
    return Scrub(shard, len(batches), state.count, state.size, real)


def cut(run: TaskInput) -> Iterator[TaskInput]:
    """A run in pieces of about `TASK_BYTES`."""
    piece: list[Any] = []
    for part in run.parts:
        piece.append(part)
        if sum(one.size for one in piece) >= TASK_BYTES:
            yield TaskInput(tuple(piece), run.lower, run.upper)
            piece = []
    if piece:
        yield TaskInput(tuple(piece), run.lower, run.upper)


def plus(one: t.Sums, other: t.Sums) -> t.Sums:
    """The sums of both."""
    diff_sum = (one.diff_sum + other.diff_sum + 2**63) % 2**64 - 2**63
    return t.Sums(one.count + other.count, diff_sum, (one.fingerprint + other.fingerprint) % 2**64)


def differs(batch: Batch, sums: t.Sums) -> str:
    """In what a batch is not what the state says of it; empty where it is."""
    pairs = [(name, getattr(sums, name), getattr(batch, name)) for name in ("count", "diff_sum", "fingerprint")]
    return "; ".join(f"{name} is {actual}, the state says {said}" for name, actual, said in pairs if actual != said)


def _answers(client: Client, tasks: Sequence[t.SumTask], sessions: Sessions) -> Iterable[tuple[t.SumTask, object]]:
    for start in range(0, len(tasks), TASKS_AT_ONCE):
        some = tasks[start : start + TASKS_AT_ONCE]
        encoded, url, consensus_url = msgspec.msgpack.encode(some), client.url, client.consensus_url

        def work(
            batches: Iterator[pa.RecordBatch], encoded: bytes = encoded, url: str = url, consensus: str = consensus_url
        ) -> Iterator[pa.RecordBatch]:
            yield from t.add_up_all(batches, encoded, url, consensus)

        answers = fan_out(sessions(), len(some), work, t.ANSWER_DDL)
        charge(client, answers)
        for row in answers:
            if row["error"] is not None:
                yield some[row["task"]], t.raised(row["error"])
            else:
                yield some[row["task"]], msgspec.msgpack.decode(row["result"], type=t.Sums)


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parsed = program.arguments(__doc__).parse_args(argv)
    failed = []
    with program.telling() as tells, program.opened(parsed) as (client, shards):
        tells.begin(len(shards), "scrubbing")
        for one in scrub_shards(client, shards, partial(build_session, program.spark_settings(parsed))):
            if one.damaged:
                failed.append(one.shard)
                tells.failed(one.shard, Corrupt("; ".join(f"batch {id_}: {why}" for id_, why in one.damaged.items())))
            else:
                tells.done(
                    one.shard,
                    {"batches": one.batches, "updates": one.updates, "bytes": one.bytes, **program.spent(one.cost)},
                )
    return program.exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())
