"""All that happened to a collection between two times, across handovers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.catalog.difference_cache import difference, kept_difference
from persist_lib.catalog.schema_compat import check_additive, conformed
from persist_lib.convert.times import shown_times
from persist_lib.errors import InvalidUsage
from persist_lib.format.predicate import Where
from persist_lib.relation.conversions import Doors
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import TIME, Schema

if TYPE_CHECKING:
    from persist_lib.catalog.reader import CollectionReader
    from persist_lib.catalog.renditions import Span


class CollectionChanges(Doors):
    """The updates of a collection with times in `(from_, to]`.

    They come rendition by rendition and shard by shard, each shard's in the order of data and time; at a handover, the
    difference of both renditions comes at its time. `from_` is None where it is all history.
    """

    def __init__(self, reader: CollectionReader, from_: int | None, to: int, deadline: Deadline) -> None:
        show = reader.schema.show
        if from_ is not None and to < from_:
            raise InvalidUsage(
                f"changes go forward: to must be {show(from_)} or later, got {show(to)}", from_=from_, to=to
            )
        self._reader, self.from_, self.to, self._deadline = reader, from_, to, deadline
        reader.known(to, deadline)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        return self._reader.schema.changes

    def batches(self) -> Iterator[pa.Table]:
        """The updates as tables of bounded size."""
        schema = self._reader.schema
        return (
            shown_times(schema, table) for table in updates_between(self._reader, self.from_, self.to, self._deadline)
        )

    def to_arrow(self) -> pa.Table:
        """The updates as one table."""
        return pa.concat_tables([empty_table(self.schema), *self.batches()]).combine_chunks()

    def selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the updates that `where` keeps."""
        kept = (table if where is None else where.kept(table) for table in self.batches())
        return (table.select(list(names)) for table in kept)

    def shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._reader.schema

    def check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        self._reader.check_since(self.from_ or 0)

    def release(self) -> None:
        """Nothing is held but by the reader. Idempotent."""

    __reduce__ = not_pickled("A table of changes", "Pass its rows, as in changes.to_arrow()")


def updates_between(reader: CollectionReader, from_: int | None, to: int, deadline: Deadline) -> Iterator[pa.Table]:
    """The updates with times in `(from_, to]`, which are promised: tables of `schema.updates`."""
    before: Span | None = None
    timeline = reader.timeline()
    for start, end, span in timeline.over(from_ or 0, to + 1):
        last = to if end is None else end - 1
        if before is not None:
            yield from handed_over(reader, before, span, start, deadline)
        yield from _within(reader, span, from_ if before is None else start, last, deadline)
        before = span


def handed_over(reader: CollectionReader, old: Span, new: Span, time: int, deadline: Deadline) -> Iterator[pa.Table]:
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


def _within(reader: CollectionReader, span: Span, from_: int | None, to: int, deadline: Deadline) -> Iterator[pa.Table]:
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
