"""The scrub: read parts again, verify their digests, and recompute what the state says of them.

An engine reads and adds up, and knows nothing else: `local_adder` does it in this process, Spark does it on its
executors (see `jobs.engine`). This module judges the answers of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from persist_lib.config import MIB
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.state import Batch, Part, State
from persist_lib.core.sums import Sums, total
from persist_lib.errors import Damage
from persist_lib.ids import ShardId
from persist_lib.location.api import Blob
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.call import Call
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import Stored, inputs_of

TASK_BYTES = 64 * MIB
"""The bytes that one task reads, approximately."""

Progress = Callable[[int, int], None]


class SumTask(msgspec.Struct, frozen=True, array_like=True):
    """Some parts of one run of one batch, to be read again, verified and added up."""

    shard: str
    parts: TaskInput
    schemas: tuple[Schema, ...]


Adder = Callable[[Sequence[SumTask]], Iterable[Sums | Damage]]
"""Carries out tasks, on any machine. Returns the sums or the damage that each found, in the order of the tasks."""


class Scrubbed(msgspec.Struct, frozen=True):
    """What a scrub read, and every damage it found: batch id and what is wrong."""

    batches: int
    updates: int
    size: int
    damaged: tuple[tuple[tuple[int, int], str], ...]
    newest: int
    cost: Cost = Cost()
    """The requests that it made to the location."""


@charged
def scrub(
    machine: Machine, *, after: int = 0, engine: Adder | None = None, progress: Progress | None = None
) -> Scrubbed:
    """Re-read the batches that were appended or compacted after seqno `after`. Changes nothing.

    Damage is returned in `damaged`, not raised, and every batch is read even if an earlier one is damaged. Pass the
    result's `newest` as `after` the next time. A batch that was replaced while it was read is not reported when its
    objects are gone. `progress` gets the batches read and their total.
    """
    version = machine.fetch()
    batches = to_scrub(version.state, after)
    tasks = [tasks_of(machine.shard, batch, version.state.schemas) for batch in batches]
    answers = iter((engine or local_adder(machine.blob))([task for some in tasks for task in some]))
    damaged = []
    for done, (batch, some) in enumerate(zip(batches, tasks, strict=True), 1):
        if problem := judge(machine, batch, [next(answers) for _ in some]):
            damaged.append((batch.id, problem))
        if progress is not None:
            progress(done, len(batches))
    size = sum(batch.size for batch in batches)
    return Scrubbed(len(batches), sum(batch.count for batch in batches), size, tuple(damaged), version.seqno)


def to_scrub(state: State, after: int) -> list[Batch]:
    """The batches that a scrub reads."""
    return [batch for batch in state.trace if batch.born > after and batch.count]


def tasks_of(shard: ShardId, batch: Batch, schemas: tuple[Schema, ...]) -> list[SumTask]:
    """Split a batch into tasks of about `TASK_BYTES`."""
    return [SumTask(shard, piece, schemas) for run in inputs_of((batch,)) for piece in cut(run)]


def cut(run: TaskInput) -> Iterator[TaskInput]:
    """Split a run into pieces of about `TASK_BYTES`."""
    piece: list[Part] = []
    for part in run.parts:
        piece.append(part)
        if sum(one.size for one in piece) >= TASK_BYTES:
            yield TaskInput(tuple(piece), run.lower, run.upper)
            piece = []
    if piece:
        yield TaskInput(tuple(piece), run.lower, run.upper)


def judge(machine: Machine, batch: Batch, answers: Sequence[Sums | Damage]) -> str:
    """Return what is wrong with a batch, given the answers of its tasks; an empty string if it is sound.

    SUBTLE: a batch that was rewritten alone kept its id, but has other parts. So it is compared as a whole.
    """
    damage = [answer for answer in answers if isinstance(answer, Damage)]
    if not damage:
        return total(answer for answer in answers if isinstance(answer, Sums)).differences(batch.sums)
    is_there = any(other == batch for other in machine.fetch().state.trace)
    return damage[0].message if is_there else ""


def local_adder(blob: Blob) -> Adder:
    """Return an adder that reads in this process, one task after the other, each when its answer is taken."""
    return lambda tasks: (add_up_task(task, blob) for task in tasks)


def add_up_task(task: SumTask, blob: Blob) -> Sums | Damage:
    """Return what the task's updates add up to, or the damage that was found."""
    try:
        return Stored(blob, ShardId(task.shard), task.schemas, task.schemas[-1]).sums([task.parts])
    except Damage as damage:
        return damage


def do_scrub(call: Call) -> Scrubbed:
    """The duty `scrub`."""
    return scrub(call.machine, after=call.after, engine=call.adder, progress=call.progress)
