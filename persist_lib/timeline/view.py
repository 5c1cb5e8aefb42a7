"""One table as one process sees it: the rendition that it is at a time, what its shards have of it, its contents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa

from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import Span, Timeline, upper_by
from persist_lib.catalog.writer import CollectionWriter
from persist_lib.client import Client
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.changes import changes_known
from persist_lib.relation.held import Named, kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import RowSelection, summed
from persist_lib.relation.row_selection import View as Shown
from persist_lib.relation.snapshot import MemoryContents, PlaceContents, SnapshotOf
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import place_of
from persist_lib.schema.schema import TIME, Schema, comes_before, with_models


class Heads:
    """The newest seqnos, as of the last look, of the shards that a process uses of a timeline.

    A shard that was not asked about is read when it is needed, and asked about from the next look on. So a look costs
    the same however many other shards the location has.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asked: dict[str, None] = {}
        self._newest: dict[str, SeqNo] = {}

    def look(self) -> None:
        if asked := list(self._asked):
            self._newest = dict.fromkeys(asked, SeqNo(0)) | self._client.consensus.heads(asked)

    def get(self, shard: str) -> SeqNo | None:
        """The shard's newest seqno; None where it was not asked about."""
        self._asked[shard] = None
        return self._newest.get(shard)

    def freshen(self, shard: str) -> None:
        """See to it that this process knows a shard as it was at the last look. No request if it does."""
        newest, machine = self.get(shard), self._client.machine(shard)
        known = machine.known
        if known is None or newest is None or known.seqno < newest:
            machine.fetch()


class View:
    """A reader of a table's collection, which asks the location only for what is known to have changed."""

    def __init__(self, client: Client, record: CollectionRecord, owner: str, schema: Schema | None = None) -> None:
        self.client, self.record, self._stays = client, record, schema is not None
        self.reader = RenditionReader(client, record, "ms", schema, owner or "table")
        self.whole = self.reader.schema.whole
        """The table's columns with those that were dropped: what changes of it are made in."""
        self.command = self.timeline().last.command
        self.checked = -1
        """Up to which time the WAL was known to be applied when all shards were read last."""
        self._writers: dict[int, CollectionWriter] = {}

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def schema(self) -> Schema:
        return self.reader.schema

    def timeline(self) -> Timeline:
        """Which rendition is the table at which times, as far as this process has read it."""
        return self.reader.timeline(is_known=True)

    def freshen(self, heads: Heads) -> None:
        heads.freshen(self.record.shard)
        for span in self.timeline().spans[-2:]:
            for name in span.rendition.names:
                heads.freshen(name)

    def fetch(self) -> None:
        for span in self.timeline().spans[-2:]:
            for name in span.rendition.names:
                self.client.machine(name).fetch()

    def is_handed_over(self) -> bool:
        """Whether another rendition followed since it was opened."""
        return self.timeline().last.command != self.command

    def is_current(self) -> bool:
        """Whether it is still that rendition, in the newest columns unless it stays in others."""
        if self.is_handed_over():
            return False
        return self._stays or self.whole == self._newest_schema(self.timeline().last.rendition)

    def known(self, schema: Schema) -> Schema:
        """What the table knows of columns that it has or had: their ids, and dropped ones. Others as they are."""
        schemas = self.client.machine(self.timeline().last.rendition.names[0]).state.schemas
        place = place_of(schema, schemas)
        return schema if place is None else with_models(schemas[place], schema)

    def _newest_schema(self, rendition: RenditionRecord) -> Schema:
        return self.client.machine(rendition.names[0]).state.schemas[-1]

    def upper(self, span: Span) -> int:
        """Up to where the shards of a span's rendition are complete, as far as this process has read."""
        uppers = [self.client.machine(name).state.upper for name in span.rendition.names]
        return _time(min(uppers, default=TOP))

    def complete(self, timeline: Timeline) -> int:
        """Up to where the table is complete and promised, across its renditions, as far as this process has read."""
        machine = self.client.machine
        found = upper_by(
            timeline, lambda record: min((machine(name).state.upper for name in record.names), default=TOP)
        )
        return _time(found.meet(timeline.upper))

    def since(self, time: int) -> Antichain:
        """From when on all of its readers still have what they need for reads around a time."""
        sinces = (handle.since for handle in self.handles(self.timeline().at(time)))
        return reduce(Antichain.join, sinces, self.reader.since)

    def handles(self, span: Span) -> list[ReadHandle]:
        return self.reader.shards_of(span.rendition)

    def contents(self, span: Span, time: int, wanted: RowSelection) -> pa.Table:
        """The wanted rows as of a time at which the span's shards are complete, with all columns."""
        if time < 0:  # nothing was written yet
            return empty_table(wanted.schema.contents)
        parts = [PlaceContents(handle, time, wanted.whole()).to_arrow() for handle in self.handles(span)]
        return summed(wanted.schema, *parts)

    def changed(self, span: Span, from_: int, to: int, wanted: RowSelection) -> pa.Table:
        """What was added to the wanted rows in `(from_, to]`: contents, to be added up with those as of `from_`."""
        tables = []
        for handle in self.handles(span):
            with changes_known(handle, None if from_ < 0 else from_, to) as changes:
                tables.append(changes.to_arrow().drop_columns([TIME]))
        return wanted.kept(summed(wanted.schema, *tables))

    def let_go(self, time: int) -> None:
        if time > 0:
            kept_of(self.reader).let_go(at(time))

    def promise(self, upper: int, deadline: Deadline) -> Timeline:
        """See to it that no handover can be before `upper`, and return the timeline then."""
        if _time(self.timeline().upper) < upper:
            self.reader.promise(at(upper), deadline)
        return self.timeline()

    def writer(self, rendition: RenditionRecord) -> CollectionWriter:
        """Writes one rendition, whichever is the table at the times that are written, in the newest columns known."""
        known = self._writers.get(rendition.number)
        if known is not None and not comes_before(self._newest_schema(rendition), known.schema):
            self._writers.pop(rendition.number).close()
        if rendition.number not in self._writers:
            self._writers[rendition.number] = CollectionWriter(self.client, self.record, "ms", rendition)
        return self._writers[rendition.number]

    def close(self) -> None:
        for write in self._writers.values():
            write.close()
        self._writers.clear()
        self.reader.close()


def needs_settling(span: Span, upper: int) -> bool:
    """Whether a rendition that was handed over to has not come beyond the handover yet.

    At the handover's time it may be complete, but is not kept as of the time before, so it cannot be read yet.
    """
    return span.start > 0 and upper <= span.start


def _time(upper: Antichain) -> int:
    return (1 << 64) - 1 if upper.time is None else upper.time


def pause(deadline: Deadline) -> None:
    """Give others time."""
    deadline.pause(0.02)


class TableSnapshot(SnapshotOf[PlaceContents | MemoryContents]):
    """A table's contents as of the time `as_of`: each row as often as it is there, and `diff` as of a shard's snapshot.

    They are read when they are asked for, in bounded memory. Where rows are in the WAL and not in the table yet, they
    are in memory, whole: that is what the filter, the keys and the columns of the call leave of them.
    """

    def __init__(
        self, name: str, as_of: int, view: Shown, parts: Sequence[PlaceContents | MemoryContents], runtime: Runtime
    ) -> None:
        super().__init__(Named("table", name), as_of, view, parts, runtime, Spending())

    def _read_now(self) -> TableSnapshot:
        """The same in memory, as the reader of its shards is closed after this."""
        parts = [MemoryContents(self._view.schema, self._consolidated_table())]
        return TableSnapshot(self.name, self.as_of, self._view, parts, self._runtime)


def in_memory(name: str, as_of: int, wanted: RowSelection, rows: pa.Table, runtime: Runtime) -> TableSnapshot:
    """The wanted rows, which were read already, with all their columns."""
    view = Shown(wanted.shown or wanted.schema, wanted.columns, 0, diff=wanted.diff)
    return TableSnapshot(name, as_of, view, [MemoryContents(wanted.schema, wanted.narrowed(rows))], runtime)
