"""A comparison of two renditions by many processes: each compares one range of keys, and the answers add up.

    with controller.begin_comparison(name, rendition) as judged:
        found = judged.total(run(work) for work in judged.works(n))          # in any processes; each answer is small

With `keep` the tasks also write the difference itself, and `total` keeps it, for listeners that pass the handover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import pairwise
from operator import add

import msgspec

from persist_lib.catalog.comparing import Comparison, common, compare, in_columns, time_to_compare
from persist_lib.catalog.difference_cache import Keeping, check_can_be_kept, chunks, difference
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import RenditionRecord
from persist_lib.core.plan.cutting import Stretch, cut_evenly
from persist_lib.location.api import Blob
from persist_lib.relation.snapshot import Snapshot, Split
from persist_lib.relation.stage import Staged, Ticket
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Resource
from persist_lib.schema.schema import Schema
from persist_lib.times import TimeLike


class Pair(msgspec.Struct, frozen=True):
    """What is compared: the rendition `old` as of `was`, and the rendition `new` as of `is_`."""

    old: RenditionRecord
    new: RenditionRecord
    was: int
    is_: int


class Work(msgspec.Struct, frozen=True):
    """A task: one range of keys of both sides. It pickles."""

    number: int
    pair: Pair
    old: tuple[Split, ...]
    new: tuple[Split, ...]
    schemas: tuple[Schema, Schema]
    merge_bytes: int
    ticket: Ticket | None = None


class Judged(msgspec.Struct, frozen=True):
    """What a task found, and what it wrote of the difference."""

    number: int
    found: Comparison
    staged: Staged | None = None


def begin(
    reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, as_of: TimeLike | None, deadline: Deadline,
    *, keep: bool,
) -> Judging:  # fmt: skip
    """Begin to compare two renditions. A rendition that was handed over to is compared at that handover.

    Then `old` is that before it, as of the time before, if no `as_of` is given.
    """
    common(*(reader.shards_of(record)[0].schema for record in (old, new)))
    timeline = reader.timeline()
    span = next((span for span in timeline.spans if span.rendition.number == new.number), None)
    before = None if span is None else next((one for one in timeline.spans if one.end == span.start), None)
    if (
        as_of is None
        and span is not None
        and before is not None
        and old.number in {new.number, before.rendition.number}
    ):
        reader.known(span.start, deadline)
        return Judging(reader, Pair(before.rendition, new, span.start - 1, span.start), deadline, keep=keep)
    time = time_to_compare(reader, old, new, as_of)
    return Judging(reader, Pair(old, new, time, time), deadline, keep=keep)


class Judging(Resource):
    """A comparison that is under way. Use it in a `with` block, in which all tasks are run."""

    def __init__(self, reader: RenditionReader, pair: Pair, deadline: Deadline, *, keep: bool) -> None:
        self.pair, self._reader = pair, reader
        self._keeping: Keeping | None = None
        sides = [reader.shards_of(record) for record in (pair.old, pair.new)]
        self._schemas = (sides[0][0].schema, sides[1][0].schema)
        with ExitStack() as held:
            self._sides = [
                [
                    held.enter_context(handle.snapshot(time, timeout=deadline.remaining_s(), diff=True))
                    for handle in side
                ]
                for side, time in zip(sides, (pair.was, pair.is_), strict=True)
            ]
            if keep:
                check_can_be_kept(reader, *self._schemas)
                self._keeping = Keeping(reader.client, pair.old, pair.new, pair.was, pair.is_, self._schemas[1])
                held.callback(self._keeping.close)
            self._held = held.pop_all()

    @property
    def size(self) -> int:
        """Bytes of the parts that are read, of both sides."""
        return sum(snapshot.size for side in self._sides for snapshot in side)

    def works(self, n: int, *, here: bool = False) -> list[Work]:
        """At most `n` tasks, in the order of their keys. `here`: they are run in this process (`run_here`)."""
        ticket = None if here or self._keeping is None else self._keeping.stage.ticket
        merge_bytes = self._reader.client.config.merge_bytes
        edges = _edges([*self._sides[0], *self._sides[1]], n)
        found = []
        for number, range_ in enumerate(pairwise([None, *edges, None])):
            old, new = (tuple(one.of_keys(*range_) for one in side) for side in self._sides)
            found.append(Work(number, self.pair, old, new, self._schemas, merge_bytes, ticket))
        return found

    def run_here(self, work: Work) -> Judged:
        """Run a task in this process, which is all that shards in memory can have."""
        write = None if self._keeping is None else self._keeping.stage.write
        return _run(work, write, self._reader.client.blob)

    def total(self, answers: Iterable[Judged]) -> Comparison:
        """What all tasks found, together; and if it is to be kept, keep the difference."""
        found = sorted(answers, key=lambda answer: answer.number)
        if self._keeping is not None:
            self._keeping.commit([answer.staged for answer in found if answer.staged is not None])
        total = reduce(add, (answer.found for answer in found), Comparison())
        pair = self.pair
        return msgspec.structs.replace(total, as_of=pair.is_, old=pair.old.number, new=pair.new.number)

    def close(self) -> None:
        """Let go of what is compared. Idempotent."""
        self._held.close()


def run(work: Work) -> Judged:
    """Carry out a task, in any process that reaches the location."""
    return _run(work, None if work.ticket is None else work.ticket.write, None)


def _run(work: Work, write: Callable[[object], Staged] | None, blob: Blob | None) -> Judged:
    old, new = work.schemas
    olds, news = ([split.batches(blob) for split in side] for side in (work.old, work.new))
    found = compare(old, new, olds, news, work.merge_bytes)
    if write is None:
        return Judged(work.number, found)
    was = [in_columns(split.batches(blob), old, new) for split in work.old]
    is_ = [split.batches(blob) for split in work.new]
    moved = difference(new, was, is_, 0, work.merge_bytes)
    pair = work.pair
    return Judged(work.number, found, write(chunks(moved, pair.new.number, pair.was, pair.is_, work.number)))


def _edges(snapshots: Sequence[Snapshot], n: int) -> list[bytes]:
    """The keys at which to cut, so that each range has about the same bytes of all snapshots together."""
    found: list[Stretch] = []
    for snapshot in snapshots:
        lowers = [split.key_lower or b"" for split in snapshot.splits(n)]
        found += [Stretch(lower, lower, snapshot.size // len(lowers)) for lower in lowers]
    return cut_evenly(found, n)
