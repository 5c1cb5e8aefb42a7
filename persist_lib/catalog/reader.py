"""Reading a collection: the rendition that is it at each time, across handovers.

A reader first registers on the rendition shard, and then on data shards when it needs them. Every data shard has a
hold that trails the rendition shard's since, so whoever holds that at a time can read all data from that time on,
whenever it asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import pyarrow as pa

from persist_lib.arguments import parse_flag, parse_seconds
from persist_lib.catalog.answers import CollectionListen, CollectionSnapshot, CollectionUpdates, view_of
from persist_lib.catalog.difference_cache import retracted
from persist_lib.catalog.metadata_shard import at_once, unheld
from persist_lib.catalog.records import LAYER, CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import (
    Renditions,
    Span,
    Timeline,
    check_additive,
    is_additive,
    schema_for,
    upper_by,
    upper_of,
)
from persist_lib.catalog.writer import CollectionWriter, append_on
from persist_lib.client import Client, for_layers
from persist_lib.errors import LeaseExpired, NotAllowed, NotFound, ShardFinished, TimedOut, UpperMismatch
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.held import Named, kept_of
from persist_lib.relation.reader import Reader, ReadHandle
from persist_lib.relation.reader_lease import Kept, too_early
from persist_lib.relation.registration import format_token
from persist_lib.relation.restore import time_passed
from persist_lib.relation.row_selection import Asked, parse_columns
from persist_lib.relation.snapshot import PlaceContents
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import known_among, place_of
from persist_lib.schema.schema import Schema
from persist_lib.times import TimeLike, Unit

LONGEST_WAIT_S = 1.0
"""The longest wait for data before looking whether another rendition follows."""
PROMISE_S = 5.0
"""The least time for the request of a promise, also for a caller who waits for no data."""
T = TypeVar("T")


class CollectionLease(Kept):
    """What a reader of a collection holds: the rendition shard first, and the shards of what it has read."""

    def __init__(self, named: Named, holder: ReadHandle) -> None:
        self._named, self._holder = named, holder
        self.shards: dict[int, list[ReadHandle]] = {}
        self.is_closed = False

    def handles(self) -> list[ReadHandle]:
        """All that it has open, the one of the rendition shard first."""
        return [self._holder, *(handle for handles in list(self.shards.values()) for handle in handles)]

    @property
    def since(self) -> Antichain:
        return self._holder.since

    def check_since(self, time: int) -> None:
        if self.is_closed:
            raise LeaseExpired(f"this reader of collection {self._named.name!r} was closed; open a new one")
        if at(time) < self.since:
            raise too_early(self._named, self._holder.schema, time, self.since)

    def let_go(self, since: Antichain) -> None:
        for handle in self.handles():
            kept_of(handle).let_go(since)

    def downgrade(self, since: Antichain) -> None:
        for handle in self.handles():
            handle.downgrade_since(since)


class RenditionReader(Reader[CollectionSnapshot, CollectionLease]):
    """Reads one collection, and shows by which renditions: for the library itself. Callers have a `CollectionReader`.

    Without `is_leased` it holds nothing, for those who hold what they read in another way.
    """

    def __init__(
        self, client: Client, collection: CollectionRecord, unit: Unit | None, schema: Schema | None, owner: str,
        *, is_leased: bool = True,
    ) -> None:  # fmt: skip
        self.client, self.collection = for_layers(client).in_epoch(collection.epoch), collection
        self._owner = owner
        self.named, self.read_only = Named(collection.kind, collection.name), client.read_only
        self._is_leased = is_leased
        self._columns_from = 0
        """From when on the collection has the columns of this reader, if it was opened without any."""
        self._holder = self._open(collection.shard, schema_for(unit))
        self.around = self._holder.machine
        self._renditions = Renditions(client, collection.shard, unit, collection.name, self._holder)
        self._kept = CollectionLease(self.named, self._holder)
        self._promiser: WriteHandle | None = None
        try:
            known = self._renditions.fetch(is_known=True)  # opening its reader has just read it
            newest = self.shards_of(known.last.rendition)[0].schema
            self._columns_from = known.last.start if schema is None else 0
            if schema is not None:
                schema = self._in_columns(schema, newest, known)
        except BaseException:
            self.close()
            raise
        self.schema = newest if schema is None else schema

    def _in_columns(self, schema: Schema, newest: Schema, known: Timeline) -> Schema:
        """The columns of a reader, in the ids that its shards know. Raises SchemaChanged.

        Where columns were only added since, rows are read in the newest ones, and what was added is left out.
        """
        last = known.last.rendition
        mine = known_among(schema, self.client.machine(last.names[0]).state.schemas)
        if mine is not None and not is_additive(mine, newest):
            self.schema = mine
            self.leave(last)  # its shards are opened again, in these columns
        elif mine is None and not any(is_additive(schema, span.rendition.columns) for span in known.spans):
            check_additive(self.name, schema, newest, known.last.start)
        return mine or schema

    @property
    def name(self) -> str:
        return self.collection.name

    def fetch_upper(self) -> Antichain:
        return self._guarded(lambda: upper_of(self.client, self._renditions.fetch()))

    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        while not target <= (upper := self.fetch_upper()):
            last = (target.time or MAX_TIME) - 1
            self.pause(self.timeline().at(max(last, 0)), last, deadline)
        return upper

    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> CollectionSnapshot:
        diff, what = parse_flag(asked.diff, "diff"), str(self.named)
        with Spending() as spent:
            time = self._reach(as_of, -1, deadline)
            rendition = self.timeline(is_known=True).at(max(time, self.since.time or 0)).rendition
            found = self.shards_of(rendition)
        schema = self._columns_then(found[0].schema, time)
        names, had = parse_columns(schema, what, asked.columns), found[0].schema.names
        asked = asked._replace(columns=None if names is None else [name for name in names if name in had], diff=True)
        if names is None and len(had) > len(schema.names):
            asked = asked._replace(columns=schema.names)
        rows = {found_in: asked.of(found_in, what) for found_in in {handle.schema for handle in found}}
        read = found if time >= 0 else []
        parts = self._guarded(lambda: [PlaceContents(handle, time, rows[handle.schema]) for handle in read])
        view = view_of(schema, rendition, names, self.client.config.merge_bytes, diff=diff)
        return CollectionSnapshot(self.name, time, rendition.number, view, parts, self.client.runtime, spent)

    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        is_newest = time is None
        time = max(least, self.newest()) if time is None else time
        self._kept.check_since(time if time >= 0 else self.since.time or 0)
        self.known(time, deadline, is_read=is_newest)
        return time

    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> list[CollectionUpdates]:
        return [CollectionUpdates(self, from_, to, deadline)]

    def listen(
        self, as_of: TimeLike | None, *, until: object = TOP, timeout: float | None = None, replace: bool = False
    ) -> CollectionListen:
        times = self._times()
        start, end = times.start(as_of), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)
        replace, first = parse_flag(replace, "replace"), max(start, 0)
        self._kept.check_since(first)
        self.timeline()  # raises LeaseExpired
        reader = RenditionReader(self.client, self.collection, self.schema.times, None, self._owner or "listen")
        reader.schema = self.schema  # the newest rendition may have other columns, and the one at `start` not
        try:
            kept_of(reader).check_since(first)  # this handle's lease may have ended before the other one began
            if not self.read_only:
                reader.downgrade_since(first)
        except BaseException:
            reader.close()
            raise
        return CollectionListen(reader, start, end, timeout, replace=replace)

    def leave(self, rendition: RenditionRecord) -> None:
        for handle in self._kept.shards.pop(rendition.number, []):
            handle.close()

    def timeline(self, *, is_known: bool = False) -> Timeline:
        """Which rendition is the collection at which times; with `is_known`, as far as this process has read it."""
        return self._guarded(lambda: self._renditions.fetch(is_known=is_known))

    def shards_of(self, rendition: RenditionRecord) -> list[ReadHandle]:
        """Readers of a rendition's shards, opened when first needed, in this reader's schema if they have it."""
        if rendition.number not in self._kept.shards:
            self._kept.shards[rendition.number] = self._guarded(lambda: self._open_all(rendition.names))
        return self._kept.shards[rendition.number]

    def _open_all(self, names: Sequence[str]) -> list[ReadHandle]:
        found: dict[str, ReadHandle] = {}

        def open_(name: str, schema: Schema | None) -> None:
            schemas = self.client.machine(name).fetch().state.schemas
            is_there = schema is not None and place_of(schema, schemas) is not None
            found[name] = self._open(name, schema if schema is not None and is_there else schemas[-1])

        try:
            open_(names[0], getattr(self, "schema", None))
            # While columns are being added, the first shard gets them last. All are read in its columns.
            at_once(self.client.runtime, lambda name: open_(name, found[names[0]].schema), names[1:])
        except BaseException:
            for handle in found.values():
                handle.close()
            raise
        return [found[name] for name in names]

    def known(self, time: int, deadline: Deadline, *, is_read: bool = False) -> Span:
        """The span that covers a time, once that is complete and promised. Raises TimedOut.

        Both are for ever. So with `is_read`, what this process has just read is enough, where it says so.
        """
        while True:
            timeline = self.timeline(is_known=is_read)
            span = timeline.at(time if time >= 0 else timeline.since)
            if time < 0:
                return span  # nothing is complete yet, so there is nothing to wait for
            upper = min(handle.upper for handle in self.shards_of(span.rendition)) if is_read else self.upper_of(span)
            if not upper.has_passed(time):
                if not (is_read or self._completes(span, upper, time, deadline)):
                    self.pause(span, time, deadline)
            elif timeline.upper.has_passed(time):
                return span
            else:
                self.promise(at(time + 1) if upper.is_top() else upper, deadline)
            is_read = False

    def _completes(self, span: Span, upper: Antichain, time: int, deadline: Deadline) -> bool:
        """Complete a time that the store's clock has passed, by an append of nothing to all shards.

        Never where writers append definite data: what comes later would count as there already, and be left out.
        """
        is_last = span.end is None and span.rendition.mode == "compare_and_append"
        if self.read_only or not is_last or self.collection.kind != "collection":
            return False
        machines = [handle.machine for handle in self.shards_of(span.rendition)]
        if None in (lasts := [time_passed(machine, machine.state, time) for machine in machines]):
            return False
        end, runtime = min(last for last in lasts if last is not None) + 1, self.client.runtime
        with CollectionWriter(self.client, self.collection, self.schema.times, None, owner=self._owner) as write:
            try:
                append_on(
                    write, span.command, empty_table(write.schema.updates), upper.time or 0, end,
                    timeout=max(PROMISE_S, deadline.remaining_s()), token=format_token(runtime, upper, at(end)),
                )  # fmt: skip
            except (UpperMismatch, NotAllowed):  # another writer was first; or only reading is allowed
                return False
        return True

    def upper_of(self, span: Span) -> Antichain:
        """The least upper of the shards of the span's rendition, read from the location."""
        return min(at_once(self.client.runtime, ReadHandle.fetch_upper, self.shards_of(span.rendition)))

    def promise(self, upper: Antichain, deadline: Deadline) -> None:
        """See to it that no handover can be before `upper`, up to which the data is there."""
        if self.read_only:
            # Others promise: a writer, another reader, or the duty.
            try:
                self._holder.wait_for_upper(upper, min(deadline.remaining_s(), LONGEST_WAIT_S))
            except TimedOut:
                self._check_time(deadline, (upper.time or MAX_TIME) - 1)
            return
        if self._promiser is None:
            self._promiser = self.client.open_writer(self.collection.shard, self._holder.schema, layer=LAYER)
        while True:
            try:
                self._promiser.advance_upper(upper, timeout=max(PROMISE_S, deadline.remaining_s()))
            except LeaseExpired:  # of the writer, which registers again
                if deadline.has_passed():
                    raise
            else:
                return

    def everything(self, span: Span, as_of: int, time: int, *, is_out: bool) -> Iterator[pa.Table]:
        """All rows of a span's rendition as of a time, in its own columns, as updates at `time`: added or taken out."""
        for handle in self.shards_of(span.rendition):
            with handle.snapshot(as_of, diff=True) as snapshot:
                rows = snapshot.batches()
                for table in retracted(rows) if is_out else rows:
                    yield at_time(table, time)

    def adopt(self, span: Span) -> None:
        self.schema = self.shards_of(span.rendition)[0].schema

    def adopt_at(self, as_of: TimeLike) -> None:
        """Read in the columns that the collection had at a time, if its rows cannot be given in the newest columns."""
        if (span := self.of_other_columns(as_of)) is not None:
            self.adopt(span)

    def of_other_columns(self, as_of: TimeLike) -> Span | None:
        """The span of a time at which the collection's rows cannot be given in this reader's columns; else None."""
        time = self._times().as_of(as_of)
        self._kept.check_since(time)
        span = self.timeline().at(time)
        return None if is_additive(self.schema, self.shards_of(span.rendition)[0].schema) else span

    def _columns_then(self, had: Schema, time: int) -> Schema:
        """The columns of a snapshot, from a rendition that has the columns `had`. Raises SchemaChanged."""
        if time < self._columns_from and not is_additive(self.schema, had):
            return had
        check_additive(self.name, self.schema, had, time)
        return self.schema

    def close(self) -> None:
        self._kept.is_closed = True
        holder, *handles = self._kept.handles()
        at_once(self.client.runtime, ReadHandle.close, handles)
        if self._promiser is not None:
            self._promiser.close()
        holder.close()

    def last_time(self, span: Span) -> int:
        """The last time at which a span's rendition has data, as far as this process knows; 0 for none."""
        states = [handle.machine.state for handle in self.shards_of(span.rendition)]
        return max((part.time_upper for state in states for batch in state.trace for part in batch.parts), default=0)

    def newest(self) -> int:
        """The newest complete time. -1: no time is complete yet."""
        timeline = self.timeline()
        upper = self._guarded(lambda: upper_of(self.client, timeline))
        if self.read_only:  # it cannot promise what is not promised yet
            upper = upper.meet(timeline.upper)
        if upper.time is not None:
            return upper.time - 1
        return max(self.last_time(timeline.last), self.since.time or 0)  # closed: the last time with data

    def pause(self, span: Span, time: int, deadline: Deadline) -> None:
        """Wait a little for a time of a span to become complete. Raises TimedOut when the deadline has passed."""
        handles = self.shards_of(span.rendition)
        if not self.read_only and all(handle.upper.is_top() for handle in handles):
            deadline.pause(LONGEST_WAIT_S)  # they are closed for writing, so only a handover brings more
        for handle in handles:
            if not handle.upper.has_passed(time):
                self._check_time(deadline, time)
                try:
                    self._guarded(
                        lambda handle=handle: handle.wait_for_upper(  # type: ignore[misc]
                            at(time + 1) if time < MAX_TIME else TOP, min(deadline.remaining_s(), LONGEST_WAIT_S)
                        )
                    )
                except TimedOut:
                    return
        if self.read_only and not self._holder.upper.has_passed(time):
            self._check_time(deadline, time)
            with suppress(TimedOut):
                self._holder.wait_for_upper(at(time + 1), min(deadline.remaining_s(), LONGEST_WAIT_S))

    def _check_time(self, deadline: Deadline, time: int) -> None:
        if deadline.has_passed():
            timeline = self.timeline(is_known=True)
            upper = upper_by(timeline, lambda record: min(handle.upper for handle in self.shards_of(record)))
            raise self._not_there(upper.meet(timeline.upper) if self.read_only else upper, time, deadline)

    def _open(self, shard: str, schema: Schema) -> ReadHandle:
        if not self._is_leased:
            return unheld(self.client, shard, schema)
        return self.client.open_reader(shard, schema, purpose=self._owner or "collection")

    def _guarded(self, call: Callable[[], T]) -> T:
        """Do something with shards. Where they are gone, it is because this reader's lease is."""
        try:
            return call()
        except (NotFound, ShardFinished) as error:
            if not self.read_only and (lost := kept_of(self._holder).expired()) is not None:
                raise lost from error
            raise


class CollectionReader(Reader[CollectionSnapshot, CollectionLease]):
    """Reads one collection. Safe to use from several threads."""

    def __init__(self, inner: RenditionReader) -> None:
        self._inner, self._kept = inner, kept_of(inner)
        self.named, self.schema, self.around, self.read_only = inner.named, inner.schema, inner.around, inner.read_only

    def __repr__(self) -> str:
        return f"CollectionReader({self.name!r})"

    @property
    def name(self) -> str:
        """The collection's name when it was opened."""
        return self._inner.name

    def fetch_upper(self) -> Antichain:
        """How far the collection has come: read from the location."""
        return self._inner.fetch_upper()

    def listen(
        self, as_of: TimeLike | None, *, until: object = TOP, timeout: float | None = None, replace: bool = False
    ) -> CollectionListen:
        """Return an iterator of what happens after `as_of`: updates at their exact times, and progress.

        At a handover it yields the difference between the old rendition and the new one, at the handover's time. So the
        snapshot as of `as_of` and all updates always add up to the collection. Where the new rendition's columns cannot
        be given in this reader's, it raises SchemaChanged; with `replace` it gives all old rows out, and all new rows
        in the new columns. The other arguments and errors are those of a shard's `listen`.
        """
        return self._inner.listen(as_of, until=until, timeout=timeout, replace=replace)

    def close(self) -> None:
        """Give up what this reader holds. Idempotent."""
        self._inner.close()

    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> CollectionSnapshot:
        return self._inner._contents(as_of, asked, deadline)

    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        return self._inner._reach(time, least, deadline)

    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> list[CollectionUpdates]:
        return self._inner._parts(from_, to, deadline)

    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        return self._inner._reach_upper(target, deadline)


def inner_of(reader: CollectionReader) -> RenditionReader:
    """What reads a collection for a reader that a caller has."""
    return reader._inner
