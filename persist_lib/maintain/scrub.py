"""The scrub: read parts again, verify their digests, and recompute what the state says of them.

An engine reads and adds up, and knows nothing else: `local_adder` does it in this process, Spark does it on its
executors (see `jobs.engine`). This module judges the answers of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from persist_lib.config import MIB
from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums, total
from persist_lib.errors import Damage
from persist_lib.ids import ShardId
from persist_lib.location.api import Blob
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.call import Call
from persist_lib.maintain.findings import Findings
from persist_lib.maintain.marks import recall
from persist_lib.maintain.scrubbed import Scrubbed
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


@charged
def scrub(
    machine: Machine,
    *,
    after: int = 0,
    new_only: bool = False,
    engine: Adder | None = None,
    progress: Progress | None = None,
    is_kept: bool = True,
) -> Scrubbed:
    """Re-read the batches that were appended or compacted after seqno `after`, and those known to be damaged.

    Changes no data. What was found is remembered in the location, unless `is_kept` is false; if it cannot be, the
    answer says so. With `new_only`, batches that an earlier scrub found sound are left out. When what earlier scrubs
    remember cannot be read, everything is read again.

    Damage is returned in `damaged`, not raised, and every batch is read even if an earlier one is damaged. A batch that
    was replaced while it was read counts neither as sound nor as damaged. `progress` gets the batches read and their
    total. A scrub that fails, or is killed, has remembered most of what it found.
    """
    # SUBTLE: first what is remembered, then the state. Otherwise a memory could be newer than the state without any
    # restore, and everything would be read again.
    known = recall(machine.blob, machine.shard)
    version = machine.fetch()
    findings = Findings(machine, version, known, after=after, new_only=new_only, is_kept=is_kept)
    tasks = [tasks_of(machine.shard, batch, version.state.schemas) for batch in findings.to_read]
    try:
        answers = iter((engine or local_adder(machine.blob))([task for some in tasks for task in some]))
        for done, (batch, some) in enumerate(zip(findings.to_read, tasks, strict=True), 1):
            findings.add(batch, judge(machine, batch, [next(answers) for _ in some]))
            if progress is not None:
                progress(done, len(findings.to_read))
    except Exception:
        findings.save()
        raise
    return findings.answer()


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


def judge(machine: Machine, batch: Batch, answers: Sequence[Sums | Damage]) -> str | None:
    """Return what is wrong with a batch, given the answers of its tasks; an empty string if it is sound.

    None if it was replaced while it was read, and its objects are gone.

    SUBTLE: a batch that was rewritten alone kept its id, but has other parts. So it is compared as a whole.
    """
    damage = [answer for answer in answers if isinstance(answer, Damage)]
    if not damage:
        return total(answer for answer in answers if isinstance(answer, Sums)).differences(batch.sums)
    is_there = any(other == batch for other in machine.fetch().state.trace)
    return damage[0].message if is_there else None


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
    return scrub(
        call.machine, after=call.after, new_only=call.new_only, engine=call.adder, progress=call.progress,
        is_kept=not call.dry_run,
    )  # fmt: skip
