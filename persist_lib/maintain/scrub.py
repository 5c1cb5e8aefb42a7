"""The scrub: read parts again, verify their digests, and recompute what the state says of them.

An engine reads and adds up, and knows nothing else: `local_adder` does it in this process, Spark does it on its
executors (see `jobs.engine`). This module judges the answers of both.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.core.cost import Cost
from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import Batch, Part, Version
from persist_lib.core.sums import Sums, total
from persist_lib.errors import Corrupt, Damage, PersistError
from persist_lib.format.descriptions import add_up
from persist_lib.format.paths import blob_key
from persist_lib.format.scrub_marks import Mark, Marks, identity_of
from persist_lib.format.value_bounds import is_within
from persist_lib.ids import ShardId
from persist_lib.location.api import Blob
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.scrub_memory import Remembered, recall, remember
from persist_lib.maintain.worker import Progress
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import Stored, inputs_of
from persist_lib.telemetry import duty

BatchId = tuple[int, int]


class Scrubbed(msgspec.Struct, frozen=True):
    """What a scrub read, and every damage it found: batch id and what is wrong.

    `batches`, `updates` and `size` are those that were read; `newest` is the seqno of the state that named them.
    """

    batches: int
    updates: int
    size: int
    damaged: tuple[tuple[BatchId, str], ...]
    newest: int
    cost: Cost = Cost()
    """The requests that it made to the location."""
    left: int = 0
    """The batches that were not read, as an earlier scrub found them sound."""
    skipped: int = 0
    """The batches that were not read, as they were written no later than `after`."""
    known: tuple[BatchId, ...] = ()
    """Those of `damaged` that an earlier scrub had marked already."""
    since: tuple[int, ...] = ()
    """For each of `damaged`: when a scrub first found it, in ms of the store's clock."""
    mended: tuple[BatchId, ...] = ()
    """The batches that an earlier scrub found damaged, and that this one read and found sound."""
    gone: tuple[BatchId, ...] = ()
    """The batches that an earlier scrub found damaged, and that are not in the shard any more."""
    remembered: bool = True
    """Whether the location holds what was found."""
    why_not: str = ""
    """Why it does not."""

    @property
    def says(self) -> str:
        """All of it in one sentence, which claims only what was read."""
        parts = [self._damage() if self.damaged else self._soundness()]
        parts += [f"batch {id_} was damaged and is mended" for id_ in self.mended]
        parts += [f"batch {id_} was damaged and is not in the shard any more" for id_ in self.gone]
        if not self.remembered:
            parts.append(f"this is not remembered: {self.why_not}")
        return "; ".join(parts)

    def _damage(self) -> str:
        told = []
        for (id_, what), since in zip(self.damaged, self.since, strict=True):
            known = f" (known since {dt.datetime.fromtimestamp(since / 1000, dt.UTC):%Y-%m-%d %H:%M} UTC)"
            told.append(f"batch {id_}: {what}{known if id_ in self.known else ''}")
        return "; ".join(told)

    def _soundness(self) -> str:
        earlier = f"{self.left} were found right by earlier scrubs"
        if self.batches:
            text = f"{_batches(self.batches)} read: every digest and every sum is right"
        elif self.left:
            text = "nothing new: no batch was read"
        elif self.skipped:
            return f"nothing was read: {_batches(self.skipped)} of earlier versions were not asked for"
        else:
            return "nothing was read: the shard is empty"
        text += f"; {earlier}" if self.left else ""
        return text + (f"; {_batches(self.skipped)} of earlier versions were not read" if self.skipped else "")


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


log = logging.getLogger("persist.scrub")
SAVE_S = 30.0
"""How much of a long scrub is lost when its process is killed."""
REMEMBER_S = 5.0
"""How long to try. A store that takes no writes must not hold up the scrubs of a thousand shards."""
SAVE_DAMAGE_S = 1.0
"""The same, once there is damage that is not remembered yet."""


class Findings:
    """The verdicts of one scrub, batch by batch. `to_read` are the batches that it has to read.

    `known` is what earlier scrubs remember. Batches that they found damaged are always read, and everything is read if
    some of it could not be. `is_kept` is whether anything may be remembered.
    """

    def __init__(
        self, machine: Machine, version: Version, known: Remembered, *, after: int, new_only: bool, is_kept: bool
    ) -> None:
        self._machine = machine
        self._version = version
        self._before = self._stored = known
        if known.seqno > version.seqno:
            # The memory is that of a log before a restore. Objects that this log deleted since may be missing.
            self._before = known = msgspec.structs.replace(known, sound=frozenset())
        self._why_not = "" if is_kept else "it was not asked for"
        self._saved_s = machine.runtime.monotonic()
        self._is_urgent = False
        self._batches = {identity_of(batch): batch for batch in version.state.stored if batch.count}
        wanted = [
            identity
            for identity, batch in self._batches.items()
            if identity in known.damaged
            or known.unreadable
            or (batch.born > after and not (new_only and identity in known.sound))
        ]
        self.to_read = [self._batches[identity] for identity in wanted]
        unread = self._batches.keys() - set(wanted)
        self._left, self._skipped = len(unread & known.sound), len(unread - known.sound)
        self._sound = set(known.sound & self._batches.keys())
        self._damaged = {identity: mark for identity, mark in known.damaged.items() if identity in self._batches}
        self._read: dict[bytes, str | None] = {}

    def add(self, batch: Batch, problem: str | None) -> None:
        """Note what is wrong with a batch: an empty text for nothing, None if it was replaced while it was read.

        Now and then, what was found is remembered, so that a scrub that is killed has not read for nothing.
        """
        identity = identity_of(batch)
        self._read[identity] = problem
        before = self._damaged.pop(identity, None)
        self._sound.discard(identity)
        if problem == "":
            self._sound.add(identity)
        elif problem is not None:
            since = self._machine.consensus.now() if before is None else before.since
            self._damaged[identity] = Mark(identity, batch.lo, batch.hi, problem, since)
            self._is_urgent |= before is None
        waited_s = self._machine.runtime.monotonic() - self._saved_s
        if waited_s >= (SAVE_DAMAGE_S if self._is_urgent else SAVE_S):
            self.save()

    def save(self) -> None:
        """Remember what was found so far, unless that is remembered already. `answer` says if that failed."""
        damaged = sorted(self._damaged.values(), key=lambda mark: (mark.id, mark.identity))
        marks = Marks(self._version.seqno, tuple(sorted(self._sound)), tuple(damaged))
        self._saved_s, self._is_urgent = self._machine.runtime.monotonic(), False
        if self._why_not or self._stored.is_exactly(marks):
            return
        try:
            deadline = self._machine.runtime.deadline(REMEMBER_S)
            keys = within(deadline, lambda: remember(self._machine, marks, self._stored.keys))
        except PersistError as error:
            self._why_not = error.message
            shard = self._machine.shard
            log.warning("shard %s: the scrub continues, but what it finds cannot be remembered: %s", shard, error)
            return
        self._stored = Remembered(frozenset(marks.sound), dict(self._damaged), marks.seqno, keys)

    def answer(self) -> Scrubbed:
        """Remember all of it, and return what the scrub found."""
        self.save()
        verified = [self._batches[identity] for identity, problem in self._read.items() if problem is not None]
        marks = [self._damaged[identity] for identity, problem in self._read.items() if problem]
        before = self._before.damaged
        return Scrubbed(
            batches=len(verified),
            updates=sum(batch.count for batch in verified),
            size=sum(batch.size for batch in verified),
            damaged=tuple((mark.id, mark.says) for mark in marks),
            newest=self._version.seqno,
            left=self._left,
            skipped=self._skipped,
            known=tuple(mark.id for mark in marks if mark.identity in before),
            since=tuple(mark.since for mark in marks),
            mended=self._ids_of({identity for identity, problem in self._read.items() if problem == ""}),
            gone=self._ids_of(
                before.keys() - self._batches.keys()
                | {identity for identity, problem in self._read.items() if problem is None}
            ),
            remembered=not self._why_not,
            why_not=self._why_not,
        )

    def _ids_of(self, identities: set[bytes]) -> tuple[BatchId, ...]:
        return tuple(sorted(mark.id for identity, mark in self._before.damaged.items() if identity in identities))


TASK_BYTES = 64 * MIB
"""The bytes that one task reads, approximately."""


class SumTask(msgspec.Struct, frozen=True, array_like=True):
    """Some parts of one run of one batch, to be read again, verified and added up."""

    shard: str
    parts: TaskInput
    schemas: tuple[Schema, ...]


Adder = Callable[[Sequence[SumTask]], Iterable[Sums | Damage]]
"""Carries out tasks, on any machine. Returns the sums or the damage that each found, in the order of the tasks."""


@duty("scrub")
@charged
def scrub(
    machine: Machine,
    *,
    after: int = 0,
    new_only: bool = False,
    engine: Adder | None = None,
    progress: Progress | None = None,
    is_kept: bool = True,
    known: Remembered | None = None,
) -> Scrubbed:
    """Re-read the batches that were appended or compacted after seqno `after`, and those known to be damaged.

    Changes no data. What was found is remembered in the location, unless `is_kept` is false; if it cannot be, the
    answer says so. With `new_only`, batches that an earlier scrub found sound are left out. When what earlier scrubs
    remember cannot be read, everything is read again.

    Damage is returned in `damaged`, not raised, and every batch is read even if an earlier one is damaged. A batch that
    was replaced while it was read counts neither as sound nor as damaged. `progress` gets the batches read and their
    total. A scrub that fails, or is killed, has remembered most of what it found. `known` is what earlier scrubs
    remember, if the caller has read that already, before the state.
    """
    if is_kept:
        machine.may_begin(machine.shard, "scrub")
    # First what is remembered, then the state. Otherwise a memory could be newer than the state without any
    # restore, and everything would be read again.
    known = known or recall(machine.blob, machine.shard)
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

    A batch that was rewritten alone kept its id, but has other parts. So it is compared as a whole.
    """
    damage = [answer for answer in answers if isinstance(answer, Damage)]
    if not damage:
        return total(answer for answer in answers if isinstance(answer, Sums)).differences(batch.sums)
    is_there = any(other == batch for other in machine.fetch().state.stored)
    return damage[0].message if is_there else None


def local_adder(blob: Blob) -> Adder:
    """Return an adder that reads in this process, one task after the other, each when its answer is taken."""
    return lambda tasks: (add_up_task(task, blob) for task in tasks)


def add_up_task(task: SumTask, blob: Blob) -> Sums | Damage:
    """Return what the task's updates add up to, or the damage that was found.

    Damage is also a row that is not within the bounds that the state says of its part: reads would leave it out.
    """
    stored = Stored(blob, ShardId(task.shard), task.schemas, task.schemas[-1])
    try:
        return total(_checked(stored, task.parts, part) for part in task.parts.parts)
    except Damage as damage:
        return damage


def _checked(stored: Stored, run: TaskInput, part: Part) -> Sums:
    """The sums over a part's updates, all of which lie within its bounds. Raises Corrupt if one does not."""

    def within_bounds(table: pa.Table) -> pa.Table:
        if not is_within(part, stored.schemas[part.schema], stored.schema, table):
            name = blob_key(stored.shard, part.key) if part.key else "an inline part"
            raise Corrupt(
                f"{name} holds updates outside of the bounds that the state says of it, so that reads by key or with a "
                "filter would leave them out. Compact the shard, which writes parts with bounds of their own",
                key=name,
            )  # fmt: skip
        return table

    (tables,) = stored.streams([TaskInput((part,), run.lower, run.upper)]) or ((),)
    return add_up(stored.schema, map(within_bounds, tables))
