"""Collections on Spark: what tasks read of a rendition's shards, and of a handover, planned from one timeline.

A section of a collection's history (`slices.Section`) is read from the renditions that are the collection at its times.
Within a rendition each task has slices of its shards. A handover is the difference of two renditions: each task merges
one range of keys of all shards of both. Planners hold nothing but the rendition shard, at the earliest time that they
need: while that is held, no history from then on is given up in any data shard, and no rendition is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.catalog.comparing import in_columns
from persist_lib.catalog.controller import Controller
from persist_lib.catalog.difference_cache import difference
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord
from persist_lib.catalog.renditions import Span, Timeline, check_additive
from persist_lib.client import Client, timelines_of
from persist_lib.core.plan.requests import TaskInput
from persist_lib.errors import LeaseExpired, NotComplete, NotFound, ShardFinished
from persist_lib.format.predicate import Where
from persist_lib.frontier import Antichain
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import KeyRange, widened
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.spark.slices import (
    LEAST_BYTES,
    MERGE_BYTES,
    Section,
    Slice,
    cut_at,
    cuts,
    plan_slices,
    read_slice,
    whole_slice,
)
from persist_lib.timeline.tables import Tables
from persist_lib.timeline.view import pause

PURPOSE = "Spark"


class Shown(NamedTuple):
    """What a read shows of rows: these columns of the schema, of the rows that `where` keeps."""

    schema: Schema
    names: tuple[str, ...]
    where: Where | None = None

    def read_of(self, found: Schema) -> tuple[tuple[str, ...], Where | None]:
        """What to read of a shard that has other columns: all that is needed, and the filter where it can be used."""
        where = self.where
        needed = self.names if where is None else dict.fromkeys((*self.names, *where.names))
        usable = where if where is not None and set(where.names) <= set(found.names) else None
        return tuple(name for name in needed if name in found.names), usable

    def all_of(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        return (table for table in map(self.of, tables) if table.num_rows)

    def of(self, table: pa.Table) -> pa.Table:
        whole = self.schema.updates if TIME in table.schema.names else self.schema.contents
        own = [name for name in (TIME, DIFF) if name in whole.names]
        needed = self.names if self.where is None else dict.fromkeys((*self.names, *self.where.names))
        found = widened(table, pa.schema([whole.field(name) for name in (*needed, *own)]))
        kept = found if self.where is None else self.where.kept(found)
        return kept.select([*self.names, *own])


class Pieces(msgspec.Struct, frozen=True):
    """Slices of one section in the shards of one rendition. A task reads them one after the other."""

    collection: str
    slices: tuple[Slice, ...]
    shown: Shown

    @property
    def section(self) -> Section:
        return self.slices[0].section

    @property
    def inputs(self) -> tuple[TaskInput, ...]:
        return tuple(run for piece in self.slices for run in piece.inputs)

    def read(self, client: Client, pool: Executor) -> Iterator[pa.Table]:
        with _guarded(self.collection):
            for piece in self.slices:
                yield from self.shown.all_of(read_slice(client, piece, pool))


class Handover(msgspec.Struct, frozen=True):
    """What a handover at `time` changes in one range of keys: all that is new there, minus all that was."""

    collection: str
    time: int
    old: tuple[Slice, ...]
    new: tuple[Slice, ...]
    shown: Shown

    @property
    def section(self) -> Section:
        return Section(None, self.time, self.time + 1)

    @property
    def inputs(self) -> tuple[TaskInput, ...]:
        return tuple(run for piece in (*self.old, *self.new) for run in piece.inputs)

    def read(self, client: Client, pool: Executor) -> Iterator[pa.Table]:
        share = MERGE_BYTES // max(1, len(self.old) + len(self.new))
        schema = self.shown.schema
        with _guarded(self.collection):
            was, is_ = (
                [in_columns(read_slice(client, one, pool, share), one.schema, schema) for one in side]
                for side in (self.old, self.new)
            )
            yield from self.shown.all_of(difference(schema, was, is_, self.time, MERGE_BYTES))


Piece = Pieces | Handover


@contextmanager
def _guarded(collection: str) -> Iterator[None]:
    """Says what it means where a shard of a collection is gone."""
    try:
        yield
    except ShardFinished as error:
        raise LeaseExpired(
            f"collection {collection}: a rendition that this query reads was taken away, as the lease of the query "
            "ended. Run it again, at a later time if need be; nothing wrong was read",
            collection=collection,
        ) from error


class TimelineReader(RenditionReader):
    """Reads the shards of a table of a timeline, once they have all that was committed to it.

    They may be complete before the time that is asked for: then nothing happened to the table in between, and what is
    read is their newest contents.
    """

    def fetch_upper(self) -> Antichain:
        """How far the shards have come, after what transactions wrote was brought to them, where this client may."""
        if not self.client.read_only:
            self._tables.apply(self._timeline)
        return super().fetch_upper()

    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:  # noqa: ARG002 - never beyond the shards
        waits = deadline.timeout_s or None
        with self._tables.read(self.name, time, timeout=waits, keys=[]) as found:  # completes the time, or raises
            reached = found.as_of
        while self._lacks(reached):
            if deadline.has_passed():
                raise NotComplete(
                    f"table {self.name!r}: its shards do not have yet what transactions wrote up to "
                    f"{self.schema.show(reached)}, and Spark reads those. Nothing was read. Let a client that may "
                    "write bring it there: leave out read_only, or run `persist maintain --all`",
                    as_of=reached, timeout_s=deadline.timeout_s, table=self.name,
                )  # fmt: skip
            pause(deadline)
        return super()._reach(min(reached, super().newest()), -1, deadline)

    def _lacks(self, time: int) -> bool:
        """Whether the WAL alone has something of this table, up to a time."""
        if time < 0 or self.fetch_upper().has_passed(time):
            return False
        lag = self._tables.lag(self._timeline)
        return any(one.id == self.collection.id and one.first <= time for one in lag.tables)

    @property
    def _tables(self) -> Tables:
        return timelines_of(self.client)

    @cached_property
    def _timeline(self) -> str:
        return self._tables.timeline_of(self.name)[0]


def unleased(client: Client, collection: CollectionRecord, schema: Schema | None = None) -> RenditionReader:
    """A reader of the collection for those who plan. It holds nothing."""
    with Controller(client) as controller:
        renditions = controller.catalog.fetch().renditions_of(collection.id)
    if not renditions:
        raise NotFound(f"collection {collection.name!r} was dropped", collection=collection.name)
    kind = TimelineReader if collection.kind == "table" else RenditionReader
    return kind(client, collection, renditions[0].columns.times, schema, PURPOSE, is_leased=False)


class Steps:
    """Plans sections of one collection."""

    def __init__(self, reader: RenditionReader, shown: Shown, slice_bytes: int | None, slots: int) -> None:
        self._reader, self._shown, self._slice_bytes, self._slots = reader, shown, slice_bytes, slots
        self._timeline: Timeline = reader.timeline()

    def pieces(self, section: Section, keys: KeyRange = KeyRange()) -> Iterator[Piece]:  # noqa: B008 - a tuple
        """What tasks read of a section, each a part of it. All its times must be promised and complete."""
        if section.as_of is not None:
            yield from self._within(self._timeline.at(section.as_of), section, keys)
            return
        for start, end, span in self._timeline.over(section.lower, section.upper):
            first = start
            if (old := before(self._timeline, span)) is not None and start == span.start:
                yield from self._handover(old, span, keys)
                first += 1
            if end is None or first < end:
                yield from self._within(span, Section(None, first, end), keys)

    def handles(self, as_of: int) -> Sequence[ReadHandle]:
        """What reads the shards that are the collection at a time."""
        return self._handles(self._timeline.at(as_of))

    def _within(self, span: Span, section: Section, keys: KeyRange) -> Iterator[Pieces]:
        found: list[Slice] = []
        handles = self._handles(span)
        for handle in handles:
            names, where = self._shown.read_of(handle.schema)
            found += plan_slices(
                handle, section, names=names, where=where, keys=keys, slice_bytes=self._slice_bytes,
                slots=-(-self._slots // len(handles)),
            )  # fmt: skip
        for group in _packed(found, self._slice_bytes or LEAST_BYTES):
            yield Pieces(self._reader.name, tuple(group), self._shown)

    def _handover(self, old: Span, new: Span, keys: KeyRange) -> Iterator[Handover]:
        sides = [
            [
                whole_slice(
                    handle, section, names=handle.schema.names, where=self._shown.read_of(handle.schema)[1], keys=keys
                )
                for handle in self._handles(span)
            ]
            for span, section in handover_sections(old, new)
        ]
        wholes = [whole for side in sides for whole in side if whole.inputs]
        if not wholes:
            return
        edges = cuts(self._reader.client.reads, wholes, self._slice_bytes, self._slots)
        was, is_ = ([cut_at(whole, edges) for whole in side if whole.inputs] for side in sides)
        for place in range(len(edges) + 1):
            ours, theirs = (tuple(one for cut in side if (one := cut[place]) is not None) for side in (was, is_))
            if ours or theirs:
                yield Handover(self._reader.name, new.start, ours, theirs, self._shown)

    def _handles(self, span: Span) -> Sequence[ReadHandle]:
        found = self._reader.shards_of(span.rendition)
        for handle in found:
            check_additive(self._reader.name, self._shown.schema, handle.schema, span.start)
        return found


def before(timeline: Timeline, span: Span) -> Span | None:
    """The span before another; None for the first that is known."""
    return next((one for one, other in pairwise(timeline.spans) if other == span), None)


def handover_sections(old: Span, new: Span) -> list[tuple[Span, Section]]:
    """What a handover is the difference of: the contents on both sides of it."""
    return [(old, Section(new.start - 1)), (new, Section(new.start))]


def _packed(slices: Sequence[Slice], least: int) -> Iterator[list[Slice]]:
    """Small slices put together, in their order, so that each group has about so many bytes."""
    group: list[Slice] = []
    size = 0
    for piece in slices:
        group.append(piece)
        size += sum(part.size for run in piece.inputs for part in run.parts)
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group
