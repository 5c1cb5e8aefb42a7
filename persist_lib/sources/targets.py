"""A collection that a source writes by definite appends: compared with what is committed, then appended to."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.catalog.answers import CollectionSnapshot
from persist_lib.catalog.names import HOLD as COLLECTION
from persist_lib.catalog.partition_rows import routed
from persist_lib.catalog.reader import RenditionReader, inner_of
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.writer import CollectionWriter, place_of, promise
from persist_lib.errors import Diverged, NotFound, SinceViolation
from persist_lib.format.parts import within
from persist_lib.frontier import at
from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.consolidate import consolidate
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.evolution import fill
from persist_lib.schema.schema import DIFF, TIME, Schema

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller

SHOWN = 5
"""Rows that an error names."""


class Target:
    """One collection of a source, known by its id, whatever its name is.

    With `rendition` it is that one which is to follow: it is read and written whatever the collection is.
    """

    def __init__(self, controller: Controller, id_: str, owner: str, rendition: int | None = None) -> None:
        self._controller, self.id, self._owner = controller, id_, owner
        found = controller.catalog.fetch().collections.get(id_)
        if found is None or found.state == "dropping":
            raise NotFound(f"the collection {id_} of this source was dropped", collection=id_)
        self.collection = found
        self.name = self.collection.name
        self.writer: CollectionWriter = controller.open_writer(self.name, rendition=rendition)
        self._rendition = None if rendition is None else controller.catalog.fetch().renditions[(id_, rendition)]
        self._reader: RenditionReader | None = None
        self._checked: dict[str, int] = {}
        self._said = ""

    @property
    def schema(self) -> Schema:
        return self.writer.schema

    def fetch_upper(self) -> int:
        return self.writer.fetch_upper().time or 0

    def begin(self, time: int) -> None:
        """See to it that it begins at a time: it can be read from just before on, where it is empty."""
        self.writer.advance_upper(time)
        with suppress(SinceViolation):
            self._controller.client.downgrade_hold(self.collection.shard, COLLECTION, at(time - 1))

    def check(self, updates: pa.Table, start: int, end: int) -> None:
        """Raise Diverged if what is committed in `[start, end)` is anything else than these consolidated updates."""
        self._checked, self._said = self._seqnos(end), "Nothing of these times was written"
        self._check(updates, start, end)

    def promise(self, end: int, deadline: Deadline) -> list[str]:
        """See to it that no handover can be before `end`; answers which commands made its renditions, newest last."""
        timeline = promise(self.writer, end, timeout=max(0.001, deadline.remaining_s()))
        return [span.rendition.command for span in timeline.spans]

    def _check(self, updates: pa.Table, start: int, end: int) -> None:
        reader = self._opened()
        if self._rendition is not None:
            self._check_each(self._rendition, updates, start, end)
            return
        upper = self.fetch_upper()
        if min(upper, end) > start:
            with reader.changes(_before(start), min(upper, end) - 1) as changes:
                self._compare(within(updates, start, min(upper, end)), changes.to_arrow())
        # A process that died between two shards left rows beyond the collection's upper.
        for span in reader.timeline(is_known=True).spans:
            high = end if span.end is None else min(end, span.end)
            self._check_each(span.rendition, updates, max(start, span.start, upper), high)

    def _check_each(self, rendition: RenditionRecord, updates: pa.Table, low: int, high: int) -> None:
        if high <= low:
            return
        for handle, rows in zip(self._opened().shards_of(rendition), routed(rendition, updates), strict=True):
            reached = min(handle.fetch_upper().time or 0, high)
            if reached > low:
                with handle.changes(_before(low), reached - 1) as changes:
                    self._compare(within(rows, low, reached), changes.to_arrow(), handle.shard)

    def _compare(self, mine: pa.Table, committed: pa.Table, shard: str = "") -> None:
        times = array_of(integers(committed.column(TIME).cast(pa.int64())).astype("u8"))
        diffs = array_of(-integers(committed.column(DIFF)))
        columns = {**{name: committed.column(name) for name in self.schema.names}, TIME: times, DIFF: diffs}
        turned = pa.table([columns[name] for name in mine.schema.names], names=mine.schema.names).cast(mine.schema)
        both = pa.concat_tables([mine, turned])
        for column in self.schema.columns:
            if column.name not in both.column_names:  # it came by hand: what is appended has its default
                both = both.append_column(column.name, fill(column, both.num_rows))
        differing = consolidate(self.schema, both)
        if differing.num_rows:
            raise self._diverged(differing, shard)

    def append(self, updates: pa.Table, start: int, end: int, deadline: Deadline) -> None:
        """Append what is not there yet. If another process wrote since `check`, it is compared again."""
        self.writer.append(updates, start, end, timeout=max(0.001, deadline.remaining_s()))
        for name, checked in self._checked.items():
            version = self._controller.client.machine(name).version
            others = set(version.state.writers) - {place_of(self.writer, name).id}
            # SUBTLE: an append needs a writer's registration, whose end is a transition too. So one that appended
            # since the check is registered still, or has left more than one transition.
            if others or version.seqno > checked + 1:
                self._said = "Another instance was first at these times, and this one may have written others"
                self._check(updates, start, end)
                return

    def lookup(self, keys: pa.Table | None, as_of: int) -> pa.Table:
        return pa.concat_tables([self.schema.data.empty_table(), *self._read(as_of, keys=keys)])

    def snapshot(self, as_of: int) -> CollectionSnapshot:
        """The rows as of a time, to be read in pieces. Close it."""
        return self._opened().snapshot(as_of)

    def contents(self, as_of: int) -> pa.Table:
        return pa.concat_tables(self._read(as_of, diff=True))

    def count(self, as_of: int) -> int:
        tables = self._read(as_of, columns=[], diff=True)
        return sum(int(integers(table.column(DIFF)).sum()) for table in tables)

    def _read(self, as_of: int, **how: Any) -> list[pa.Table]:
        """The tables of snapshots: the collection's one, or one of each shard of the rendition."""
        reader = self._opened()
        sources = [reader] if self._rendition is None else reader.shards_of(self._rendition)
        found = []
        for source in sources:
            with source.snapshot(as_of, **how) as snapshot:
                found.append(snapshot.to_arrow())
        return found

    def let_go(self, time: int) -> None:
        """Give up history before a time, where this handle kept it."""
        if self._reader is not None and self._reader.since.time is not None and self._reader.since.time < time:
            self._reader.downgrade_since(time)

    def close(self) -> None:
        self.writer.close()
        if self._reader is not None:
            self._reader.close()

    def _opened(self) -> RenditionReader:
        if self._reader is None:
            if self._rendition is None:
                self._reader = inner_of(self._controller.open_reader(self.name, self.schema, owner=self._owner))
            else:
                client = self._controller.client
                self._reader = RenditionReader(client, self.collection, self.schema.times, None, self._owner)
        return self._reader

    def _seqnos(self, end: int) -> dict[str, int]:
        """The newest seqnos of the shards that are written up to `end`, read from the location: they are registered."""
        rendition = self._rendition
        if rendition is None:
            spans = self._opened().timeline(is_known=True).spans
            rendition = next(one.rendition for one in reversed(spans) if one.start < end)
        return {name: place_of(self.writer, name).machine.fetch().seqno for name in rendition.names}

    def _diverged(self, differing: pa.Table, shard: str) -> Diverged:
        time = int(integers(differing.column(TIME)).min())
        rows = differing.slice(0, SHOWN).to_pylist()
        data = [{name: value for name, value in row.items() if name not in {TIME, DIFF}} for row in rows]
        sides = ["here" if row[DIFF] > 0 else "committed" for row in rows]
        described = "; ".join(f"{side}: {shown(one)}" for side, one in zip(sides, data, strict=True))
        where = f", in shard {shard}" if shard else ""
        return Diverged(
            f"collection {self.name!r}{where}: at {self.schema.show(time)} this source makes other rows than are "
            f"committed ({differing.num_rows} differ): {described}. {self._said}. Its messages or its decoder have "
            "changed: put back what there was; otherwise see what `persist source reset` would lose",
            collection=self.name, shard=shard, time=time, rows=rows, count=differing.num_rows,
        )  # fmt: skip


def _before(time: int) -> int | None:
    """From when on changes are those from `time` on: None for all, as there may be updates at 0."""
    return time - 1 if time else None
