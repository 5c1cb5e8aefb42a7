"""What a collection answers: its contents as of a time, in pieces too, all that happened between two times, listening.

The rendition that is the collection then answers, and what continues does so across handovers. A listener gets each
update once, at its exact time, before the progress that covers it. It goes in rounds. A round sees how far the
rendition that is the collection now has come, has that promised, and delivers the updates of all its shards up to
there. At a handover the round delivers the difference of both renditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from persist_lib.catalog.difference_cache import difference, kept_difference
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.renditions import check_additive
from persist_lib.errors import PersistError, SchemaChanged, TimedOut, redacted
from persist_lib.format.predicate import Where
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.multiplicity import built, repeated
from persist_lib.location.api import Blob
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.changes import UpdatesPart
from persist_lib.relation.held import Named, kept_of
from persist_lib.relation.listen import Listener
from persist_lib.relation.projection import is_projection
from persist_lib.relation.row_selection import KeyRange, View, conformed
from persist_lib.relation.snapshot import PlaceContents, SnapshotOf, Split, parse_splits
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME, Schema

if TYPE_CHECKING:
    from persist_lib.catalog.reader import RenditionReader
    from persist_lib.catalog.renditions import Span

FINER = 4
"""How many pieces make up a group, where groups do not fall on shards."""


class CollectionSplit(msgspec.Struct, frozen=True):
    """One of the disjoint splits of a collection's snapshot. It pickles.

    It has `splits` of one or several shards, each a range of keys, one after the other.
    """

    collection: str
    rendition: int
    splits: tuple[Split, ...]
    view: View

    def __repr__(self) -> str:
        first = self.splits[0]
        where, time = redacted(first.urls[0]), self.view.schema.show_as_of(first.as_of)
        return f"CollectionSplit({where!r}, {self.collection!r}, as_of={time}, size={self.size})"

    @property
    def as_of(self) -> int:
        """The time of the snapshot."""
        return self.splits[0].as_of

    @property
    def schema(self) -> Schema:
        """The schema of the reader whose snapshot it is of."""
        return self.view.schema

    @property
    def size(self) -> int:
        """Bytes of the parts that it reads from. Of some parts it reads only some chunks."""
        return sum(split.size for split in self.splits)

    def batches(self, blob: Blob | None = None) -> Iterator[pa.Table]:
        """The split's contents as tables of bounded size: shard by shard, each in key order.

        `blob` is an open Blob of the location, such as `client.blob`; without one, this process opens the location.
        """
        tables = self._consolidated(blob)
        return tables if self.view.diff else repeated(tables, repr(self))

    def to_arrow(self, blob: Blob | None = None) -> pa.Table:
        """The split's contents as one table. `blob` is as in `batches`."""
        table = pa.concat_tables([empty_table(self.view.shown), *self._consolidated(blob)]).combine_chunks()
        return table if self.view.diff else built(table, repr(self))

    def _consolidated(self, blob: Blob | None) -> Iterator[pa.Table]:
        return self.view.of((split.batches(blob), split.schema) for split in self.splits)


def packed(parts: Sequence[PlaceContents], n: int) -> list[tuple[Split, ...]]:
    """Cut snapshots of shards into at most `n` groups of splits, of about equal size."""
    total = sum(part.size for part in parts)
    # Pieces that are finer than a group let groups be even where there are few groups for the shards.
    fine = max(n, min(FINER * n, FINER * len(parts)))
    cut = [part.splits(max(1, round(fine * part.size / max(1, total)))) for part in parts]
    # Of pieces of one shard each counts the same, as `size` has whole parts, of which several pieces read.
    pieces = [(index, split, parts[index].size / len(splits)) for index, splits in enumerate(cut) for split in splits]
    groups: dict[int, list[tuple[int, Split]]] = {}
    before = 0.0
    for place, (index, split, size) in enumerate(pieces):
        middle = (before + size / 2) / total if total else place / len(pieces)
        groups.setdefault(min(n - 1, int(middle * n)), []).append((index, split))
        before += size
    return [tuple(_joined(parts, group)) for group in groups.values()]


def _joined(parts: Sequence[PlaceContents], group: list[tuple[int, Split]]) -> Iterator[Split]:
    """The splits of a group, those of one shard as one range of keys."""
    for index, found in groupby(group, itemgetter(0)):
        first, *others = (split for _, split in found)
        yield parts[index].of_keys(KeyRange(first.key_lower, others[-1].key_upper)) if others else first


class CollectionSnapshot(SnapshotOf[PlaceContents]):
    """A collection's contents as of the time `as_of`: shard by shard, each in key order; rows as in a shard's snapshot.

    `rendition` is the number of the one that it is read from. Use it in a `with` block, or drop it after use.
    """

    def __init__(
        self, name: str, as_of: int, rendition: int, view: View, parts: Sequence[PlaceContents], runtime: Runtime,
        spent: Spending,
    ) -> None:  # fmt: skip
        super().__init__(Named("collection", name), as_of, view, parts, runtime, spent)
        self.rendition = rendition

    def by_shard(self) -> list[Iterator[pa.Table]]:
        """The distinct rows of each shard, with `_diff`, in key order. No key is in two shards."""
        return [self._spent.over(self._view.one(part.stream(), part.schema)) for part in self._parts]

    def splits(self, n: int) -> list[CollectionSplit]:
        """Cut the snapshot into at most `n` disjoint splits of about equal size, whose union is the snapshot.

        They pickle, and any process that reaches the location can read them. With `diff` each adds up its own rows:
        where `columns=` leaves out a key column, equal rows may be in several splits. Keep this snapshot and its reader
        until the splits have been read.
        """
        n = parse_splits(n)
        with self._spent.again():
            found = packed(self._parts, n)
        return [CollectionSplit(self.name, self.rendition, splits, self._view) for splits in found]


def view_of(
    schema: Schema, rendition: RenditionRecord, columns: tuple[str, ...] | None, merge_bytes: int, *, diff: bool
) -> View:
    """How a rendition's rows are shown: added up where rows that look alike may be in two shards.

    They can only be there where columns that decide the shard were left out.
    """
    is_spread = rendition.shards > 1 and not set(rendition.hash_columns) <= set(columns or ())
    return View(schema, columns, merge_bytes, is_spread and is_projection(schema, columns), diff)


class CollectionUpdates(UpdatesPart):
    """The updates of a collection with times in `(from_, to]`, which are complete. Its reader holds what is read."""

    def __init__(self, reader: RenditionReader, from_: int | None, to: int, deadline: Deadline) -> None:
        self.schema = reader.schema
        self._reader, self._from, self._to, self._deadline = reader, from_, to, deadline

    def updates(self, where: Where | None = None) -> Iterator[pa.Table]:  # noqa: ARG002 - all of them
        return updates_between(self._reader, self._from, self._to, self._deadline)

    def check_open(self) -> None:
        kept_of(self._reader).check_since(self._from or 0)


def updates_between(reader: RenditionReader, from_: int | None, to: int, deadline: Deadline) -> Iterator[pa.Table]:
    """The updates with times in `(from_, to]`, which are promised: tables of `schema.updates`.

    None, and -1 (before all times), mean from the beginning on.
    """
    from_ = None if from_ == -1 else from_
    before: Span | None = None
    timeline = reader.timeline()
    for start, end, span in timeline.over(from_ or 0, to + 1):
        last = to if end is None else end - 1
        if before is not None:
            yield from handed_over(reader, before, span, start, deadline)
        yield from _within(reader, span, from_ if before is None else start, last, deadline)
        before = span


def handed_over(reader: RenditionReader, old: Span, new: Span, time: int, deadline: Deadline) -> Iterator[pa.Table]:
    """What a handover at `time` changes: the new rendition as of then minus the old one as of the time before."""
    reader.known(time, deadline)  # waits until the new rendition is complete at that time
    for span in (old, new):
        check_additive(reader.name, reader.schema, reader.shards_of(span.rendition)[0].schema, span.start)
    if (kept := kept_difference(reader, old.rendition, new.rendition, time)) is not None:
        yield from kept
        return
    with ExitStack() as held:
        sides = [
            held.enter_context(reader.snapshot(at_, diff=True, timeout=deadline.remaining_s()))
            for at_ in (time - 1, time)
        ]
        if (sides[0].rendition, sides[1].rendition) != (old.rendition.number, new.rendition.number):
            raise AssertionError(f"renditions {sides} at {time} are not {old} and {new}")
        was, is_ = (side.by_shard() for side in sides)
        yield from difference(reader.schema, was, is_, time, reader.client.config.merge_bytes)


def _within(reader: RenditionReader, span: Span, from_: int | None, to: int, deadline: Deadline) -> Iterator[pa.Table]:
    if from_ is not None and to <= from_:
        return
    for handle in reader.shards_of(span.rendition):
        check_additive(reader.name, reader.schema, handle.schema, span.start)
        with handle.changes(from_, to, timeout=deadline.remaining_s()) as changes:
            raw = (integer_times(table) for table in changes.batches())
            yield from conformed(raw, handle.schema, reader.schema)


def integer_times(table: pa.Table) -> pa.Table:
    """The table with its times as integers, as stored."""
    index = table.schema.get_field_index(TIME)
    field = pa.field(TIME, pa.uint64(), nullable=False)
    times = table.column(TIME)
    if times.type == pa.uint64():
        return table
    return table.set_column(index, field, times.cast(pa.int64()).cast(pa.uint64()))


class CollectionListen(Listener):
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    _reader: RenditionReader

    def __init__(
        self, reader: RenditionReader, as_of: int, until: Antichain, timeout_s: float | None, *, replace: bool
    ) -> None:
        super().__init__(reader, as_of, until, timeout_s)
        self._replace = replace

    def _keeps(self, _failure: PersistError) -> bool:
        """A round of which nothing was given begins again after any failure."""
        return False

    def _pause(self) -> None:
        span = self._reader.timeline().at(self.frontier.time or 0)
        with suppress(TimedOut):  # then it looks once more
            self._reader.pause(span, self.frontier.time or 0, self._deadline)

    def _fetch(self) -> Iterator[None]:
        """Round by round; one that ends at a handover is followed by another."""
        while (upper := self._reached()) is not None:
            first = self.frontier.time or 0
            timeline = self._reader.timeline(is_known=True)
            before, span = timeline.at(max(first - 1, 0)), timeline.at(first)
            yield from self._step(self._updates(before, span, first, upper), upper)
            if before.command != span.command:
                self._reader.leave(before.rendition)
            if span.end is None or upper < at(span.end):
                return

    def _reached(self) -> Antichain | None:
        """Up to where a round can go now: promised, complete, and under one rendition. None: nowhere yet."""
        while not self._is_done():
            timeline = self._reader.timeline()
            span = timeline.at(self.frontier.time or 0)
            upper = self._reader.upper_of(span).meet(self.until)
            if span.end is not None:
                upper = upper.meet(at(span.end))
            if upper.is_top() and not timeline.is_closed():
                # Closed for writing, but never promised to the end: a handover may follow. Deliver what was written.
                upper = at(self._reader.last_time(span) + 1)
            if self._reader.client.read_only:  # others promise
                upper = upper.meet(timeline.upper)
            if upper <= self.frontier:
                return None
            if upper <= timeline.upper:
                return upper
            self._reader.promise(upper, self._reader.client.runtime.deadline(self._reader.client.config.timeout_s))
        return None

    def _updates(self, before: Span, span: Span, first: int, upper: Antichain) -> Iterator[pa.Table]:
        """The updates from the frontier to `upper`, which are all of one rendition, and a handover's at `first`."""
        reader, start = self._reader, first - 1
        deadline = reader.client.runtime.deadline(reader.client.config.timeout_s)
        if before.command != span.command:
            start = first
            try:
                yield from handed_over(reader, before, span, first, deadline)
            except SchemaChanged:
                if not self._replace:
                    raise
                # All rows of the old rendition out, in its columns, and all rows of the new one in, in its columns.
                yield from reader.everything(before, first - 1, first, is_out=True)
                reader.adopt(span)
                yield from reader.everything(span, first, first, is_out=False)
        # Of one that is closed, up to the last time at which anything was written.
        last = max(reader.last_time(span), first - 1) if upper.time is None else upper.time - 1
        if last > start:
            yield from updates_between(reader, start, last, deadline)
