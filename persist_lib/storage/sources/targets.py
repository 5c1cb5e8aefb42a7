"""A collection that a source writes by definite appends: compared with what is committed, then appended to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import Diverged, NotFound
from persist_lib.format.parts import within
from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.consolidate import consolidate
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.storage.partition_rows import routed
from persist_lib.storage.reader import CollectionReader
from persist_lib.storage.snapshot import CollectionSnapshot
from persist_lib.storage.writer import CollectionWriter

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

SHOWN = 5
"""Rows that an error names."""


class Target:
    """One collection of a source, known by its id, whatever its name is."""

    def __init__(self, controller: Controller, id_: str, owner: str, rendition: int | None = None) -> None:
        self._controller, self.id, self._owner = controller, id_, owner
        found = controller.catalog.fetch().collections.get(id_)
        if found is None or found.state == "dropping":
            raise NotFound(f"the collection {id_} of this source was dropped", collection=id_)
        self.collection = found
        self.name = self.collection.name
        self.writer: CollectionWriter = controller.open_writer(self.name, rendition=rendition)
        self._reader: CollectionReader | None = None
        self._checked: dict[str, int] = {}
        self._said = ""

    @property
    def schema(self) -> Schema:
        """Its columns."""
        return self.writer.schema

    def fetch_upper(self) -> int:
        """Its upper, read from the location."""
        return self.writer.fetch_upper().time or 0

    def check(self, updates: pa.Table, start: int, end: int) -> None:
        """Raise Diverged if what is committed in `[start, end)` is anything else than these consolidated updates."""
        self._checked, self._said = self._seqnos(), "Nothing of these times was written"
        self._check(updates, start, end)

    def promise(self, end: int, deadline: Deadline) -> list[str]:
        """See to it that no handover can be before `end`; answers which commands made its renditions, newest last."""
        timeline = self.writer.promise(end, timeout=max(0.001, deadline.remaining_s()))
        return [span.rendition.command for span in timeline.spans]

    def _check(self, updates: pa.Table, start: int, end: int) -> None:
        reader, upper = self._opened(), self.fetch_upper()
        if min(upper, end) > start:
            with reader.changes(_before(start), min(upper, end) - 1) as changes:
                self._compare(within(updates, start, min(upper, end)), changes.to_arrow())
        # SUBTLE: who died between two shards left rows beyond the collection's upper.
        span = reader.timeline(is_known=True).last
        low = max(start, span.start, upper)
        for handle, rows in zip(reader.shards_of(span.rendition), routed(span.rendition, updates), strict=True):
            reached = min(handle.fetch_upper().time or 0, end)
            if reached > low:
                with handle.changes(_before(low), reached - 1) as changes:
                    self._compare(within(rows, low, reached), changes.to_arrow(), handle.shard)

    def _compare(self, mine: pa.Table, committed: pa.Table, shard: str = "") -> None:
        times = array_of(integers(committed.column(TIME).cast(pa.int64())).astype("u8"))
        diffs = array_of(-integers(committed.column(DIFF)))
        columns = {**{name: committed.column(name) for name in self.schema.names}, TIME: times, DIFF: diffs}
        turned = pa.table([columns[name] for name in mine.schema.names], names=mine.schema.names).cast(mine.schema)
        differing = consolidate(self.schema, pa.concat_tables([mine, turned]))
        if differing.num_rows:
            raise self._diverged(differing, shard)

    def append(self, updates: pa.Table, start: int, end: int, deadline: Deadline) -> None:
        """Append what is not there yet. If another process wrote since `check`, it is compared again."""
        self.writer.append(updates, start, end, timeout=max(0.001, deadline.remaining_s()))
        for name, checked in self._checked.items():
            version = self._controller.client.machine(name).version
            others = set(version.state.writers) - {self.writer.shard(name).id}
            # SUBTLE: an append needs a writer's registration, whose end is a transition too. So one that appended
            # since the check is registered still, or has left more than one transition.
            if others or version.seqno > checked + 1:
                self._said = "Another instance was first at these times, and this one may have written others"
                self._check(updates, start, end)
                return

    def lookup(self, keys: pa.Table | None, as_of: int) -> pa.Table:
        """The rows of these keys, or all rows, as of a time."""
        with self._opened().snapshot(as_of, keys=keys) as snapshot:
            return snapshot.to_arrow()

    def snapshot(self, as_of: int) -> CollectionSnapshot:
        """The rows as of a time, to be read in pieces. Close it."""
        return self._opened().snapshot(as_of)

    def contents(self, as_of: int) -> pa.Table:
        """All rows as of a time."""
        with self._opened().snapshot(as_of, diff=True) as snapshot:
            return snapshot.to_arrow()

    def count(self, as_of: int) -> int:
        """How many rows there are as of a time."""
        with self._opened().snapshot(as_of, columns=[], diff=True) as snapshot:
            return sum(int(integers(table.column(DIFF)).sum()) for table in snapshot.batches())

    def let_go(self, time: int) -> None:
        """Give up history before a time, where this handle kept it."""
        if self._reader is not None and self._reader.since.time is not None and self._reader.since.time < time:
            self._reader.downgrade_since(time)

    def close(self) -> None:
        """Close what it has open. Idempotent."""
        self.writer.close()
        if self._reader is not None:
            self._reader.close()

    def _opened(self) -> CollectionReader:
        if self._reader is None:
            self._reader = self._controller.open_reader(self.name, self.schema, owner=self._owner)
        return self._reader

    def _seqnos(self) -> dict[str, int]:
        """The newest seqnos of the shards that are written now, read from the location. They are registered at."""
        names = self._shards()
        found: dict[str, int] = {}
        for name in names:
            found[name] = self.writer.shard(name).machine.fetch().seqno
        return found

    def _shards(self) -> list[str]:
        """The shards that are written now."""
        return self._opened().timeline(is_known=True).last.rendition.names

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


class RenditionTarget(Target):
    """A rendition that is to follow: it is read and written whatever the collection is."""

    def __init__(self, controller: Controller, id_: str, owner: str, rendition: int) -> None:
        super().__init__(controller, id_, owner, rendition)
        self._rendition = controller.catalog.fetch().renditions[(id_, rendition)]

    def lookup(self, keys: pa.Table, as_of: int) -> pa.Table:
        """The rows of these keys as of a time."""
        found = [self.schema.data.empty_table()]
        for handle in self._opened().shards_of(self._rendition):
            with handle.snapshot(as_of, keys=keys) as snapshot:
                found.append(snapshot.to_arrow())
        return pa.concat_tables(found)

    def count(self, as_of: int) -> int:
        """How many rows there are as of a time."""
        total = 0
        for handle in self._opened().shards_of(self._rendition):
            with handle.snapshot(as_of, columns=[], diff=True) as snapshot:
                total += sum(int(integers(table.column(DIFF)).sum()) for table in snapshot.batches())
        return total

    def _check(self, updates: pa.Table, start: int, end: int) -> None:
        handles = self._opened().shards_of(self._rendition)
        for handle, rows in zip(handles, routed(self._rendition, updates), strict=True):
            reached = min(handle.fetch_upper().time or 0, end)
            if reached > start:
                with handle.changes(_before(start), reached - 1) as changes:
                    self._compare(within(rows, start, reached), changes.to_arrow(), handle.shard)

    def _shards(self) -> list[str]:
        return self._rendition.names

    def _opened(self) -> CollectionReader:
        if self._reader is None:
            client, unit = self._controller.client, self.schema.times
            self._reader = CollectionReader(client, self.collection, unit, None, self._owner)
        return self._reader


def _before(time: int) -> int | None:
    """From when on changes are those from `time` on: None for all, as there may be updates at 0."""
    return time - 1 if time else None
