"""All that happened to a collection between two times, across handovers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.catalog.difference_cache import difference, kept_difference
from persist_lib.catalog.schema_compat import check_additive
from persist_lib.format.predicate import Where
from persist_lib.relation.changes import UpdatesPart
from persist_lib.relation.held import kept_of
from persist_lib.relation.view import conformed
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import TIME

if TYPE_CHECKING:
    from persist_lib.catalog.reader import RenditionReader
    from persist_lib.catalog.renditions import Span


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
