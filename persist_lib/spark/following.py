"""What a stream follows: a shard, or a collection across handovers. Where batches end, and what tasks read of them.

A collection is followed as far as it is complete and promised. At a handover a batch ends, and the next one has the
difference; a large one is cut by key into several batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from persist_lib.frontier import TOP, Antichain, at
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import KeyRange
from persist_lib.spark.admission import DEFAULT_BYTES, Admission, Limits, Source
from persist_lib.spark.collections import Piece, Shown, Steps, before, handover_sections, unleased
from persist_lib.spark.holding import Holding
from persist_lib.spark.offsets import Contents, Position, Updates
from persist_lib.spark.reading import LATEST, Table, newest
from persist_lib.spark.slices import Section, Slice, handle_of, plan_slices
from persist_lib.storage.reader import CollectionReader
from persist_lib.storage.records import CollectionRecord
from persist_lib.storage.renditions import Span, upper_of


class Following(ABC):
    """What planning keeps from batch to batch, in one process."""

    handle: ReadHandle | CollectionReader

    def __init__(self, table: Table, limits: Limits, hold: str | None, slice_bytes: int | None) -> None:
        collection = None if table.collection is None else table.collection.name
        self.table, self.slice_bytes = table, slice_bytes
        self.holding = Holding(table.client, table.shard, hold, collection)
        wanted = Limits(DEFAULT_BYTES) if limits.is_none() else limits
        self.limited, self.unlimited = Admission(wanted), Admission(Limits())

    @abstractmethod
    def fetch(self) -> Antichain:
        """Look how far it is complete now. What follows is about that."""

    @abstractmethod
    def next(self, position: Position, target: Antichain, admission: Admission) -> Position:
        """Where the batch after `position` ends; `position` itself where there is nothing new before `target`."""

    @abstractmethod
    def pieces(self, section: Section, keys: KeyRange, shown: Shown) -> Iterator[Slice | Piece]:
        """What tasks read of some keys of a section."""

    def first(self, from_: int | str | None, target: Antichain) -> Position | None:
        """Where a new stream starts that reads what is complete before `target`; None while there is no such time."""
        if from_ is None or from_ == LATEST:
            if target.time == 0:
                return None
            # SUBTLE: by the same look as where the batch ends. What is appended since then belongs to the next batch.
            as_of = newest(self.handle) if target.time is None else target.time - 1
            return Contents(as_of) if from_ is None else Updates(as_of + 1)
        with self.handle.changes(from_, timeout=0) as changes:
            return Updates(0 if changes.from_ is None else changes.from_ + 1)


class FollowingShard(Following):
    """A shard."""

    handle: ReadHandle

    def __init__(self, table: Table, limits: Limits, hold: str | None, slice_bytes: int | None) -> None:
        super().__init__(table, limits, hold, slice_bytes)
        self.handle = handle_of(table.client, table.shard, table.schema)
        self._state = self.handle.machine.state

    def fetch(self) -> Antichain:
        """Look how far it is complete now."""
        self._state = self.handle.machine.fetch().state
        return self._state.upper

    def next(self, position: Position, target: Antichain, admission: Admission) -> Position:
        """Where the batch after `position` ends."""
        return admission.next(position, [Source(self.handle, self._state)], target)

    def pieces(self, section: Section, keys: KeyRange, shown: Shown) -> Iterator[Slice | Piece]:
        """What tasks read of some keys of a section."""
        yield from plan_slices(
            self.handle, section, names=shown.names, where=shown.where, keys=keys, slice_bytes=self.slice_bytes
        )


class FollowingCollection(Following):
    """A collection."""

    handle: CollectionReader

    def __init__(
        self, table: Table, collection: CollectionRecord, limits: Limits, hold: str | None, slice_bytes: int | None
    ) -> None:
        super().__init__(table, limits, hold, slice_bytes)
        self.handle = unleased(table.client, collection, table.schema)
        self._timeline = self.handle.timeline()

    def fetch(self) -> Antichain:
        """Look how far it is complete and promised now: below that, no handover can ever come.

        SUBTLE: a handover may come before the promise, and then what follows it may not be complete yet. So the answer
        is what one and the same timeline says.
        """
        reader = self.handle
        while True:
            self._timeline = timeline = reader.timeline()
            upper = upper_of(reader.client, timeline)
            if upper.is_top():  # closed for writing; while the collection is not dropped, a handover may follow
                last = reader.last_time(timeline.last) + 1
                upper = TOP if timeline.is_closed() else at(max(last, timeline.last.start + 1))
            if upper <= timeline.upper:
                return upper
            reader.promise(upper, reader.client.runtime.deadline(reader.client.config.timeout_s))

    def next(self, position: Position, target: Antichain, admission: Admission) -> Position:
        """Where the batch after `position` ends. A batch with limits goes up to a handover, or is of one."""
        if isinstance(position, Contents):
            return admission.next(position, self._sources(self._timeline.at(position.as_of)), target)
        if position.at is None or at(position.at) >= target:
            return position
        if admission is self.unlimited:
            return Updates(target.time)
        span = self._timeline.at(position.at)
        old = before(self._timeline, span)
        if old is not None and position.at == span.start:
            sections = handover_sections(old, span)
            return admission.cut_time(
                position, [(source, section) for side, section in sections for source in self._sources(side)]
            )
        end = target if span.end is None else target.meet(at(span.end))
        return admission.next(position, self._sources(span), end)

    def pieces(self, section: Section, keys: KeyRange, shown: Shown) -> Iterator[Slice | Piece]:
        """What tasks read of some keys of a section."""
        yield from Steps(self.handle, shown, self.slice_bytes, 1).pieces(section, keys)

    def _sources(self, span: Span) -> Sequence[Source]:
        return [Source(handle, handle.machine.fetch().state) for handle in self.handle.shards_of(span.rendition)]


def following(table: Table, limits: Limits, hold: str | None, slice_bytes: int | None) -> Following:
    """What a stream of this table follows."""
    if table.collection is None:
        return FollowingShard(table, limits, hold, slice_bytes)
    return FollowingCollection(table, table.collection, limits, hold, slice_bytes)
