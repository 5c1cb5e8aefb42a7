"""Streaming reads: the contents first and then what changes, or the changes after a time, each exactly once.

    spark.readStream.format("persist").option("changes", "true").load("orders")

Without `changes` a stream has the rows that are added, as one of Delta's has, and stops with an error at an update that
takes rows away. With it, the stream has all updates, with `_time` and `_diff`; the contents that it starts with are
updates at their `as_of`. Where a batch ends is decided once and is in the query's checkpoint; what is in it is the same
whenever it is read. A stream of a collection continues across handovers: the difference of the two renditions is among
the updates, at the time of the handover.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord
from persist_lib.catalog.renditions import Span, upper_of
from persist_lib.errors import InvalidUsage, SinceViolation
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.kernel.columns import array_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import KeyRange
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import TIME_FIELD
from persist_lib.spark import offsets
from persist_lib.spark.admission import DEFAULT_BYTES, Admission, Limits, Source
from persist_lib.spark.batch_reader import LATEST, LEAST_BYTES, Part, Table, as_batches, look, multiplied, newest
from persist_lib.spark.collections import Piece, Shown, Steps, TimelineReader, before, handover_sections, unleased
from persist_lib.spark.history_holds import Holding
from persist_lib.spark.offsets import Contents, Offset, Position, Updates
from persist_lib.spark.options import STREAM, Options
from persist_lib.spark.slices import Section, Slice, handle_of, plan_slices
from persist_lib.spark.types import arrow_schema, check_asked


class Following(ABC):
    """What planning keeps from batch to batch, in one process: where batches end, and what tasks read of them.

    A collection is followed as far as it is complete and promised. At a handover a batch ends, and the next one has the
    difference; a large one is cut by key into several batches.
    """

    handle: ReadHandle | RenditionReader

    def __init__(self, table: Table, limits: Limits, hold: str | None, slice_bytes: int | None) -> None:
        self.table, self.slice_bytes = table, slice_bytes
        self.holding = Holding(table.client, table.shard, hold, table.name, is_listed=table.collection is not None)
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
            # By the same look as where the batch ends. What is appended since then belongs to the next batch.
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
        self._state = self.handle.machine.fetch().state
        return self._state.upper

    def next(self, position: Position, target: Antichain, admission: Admission) -> Position:
        return admission.next(position, [Source(self.handle, self._state)], target)

    def pieces(self, section: Section, keys: KeyRange, shown: Shown) -> Iterator[Slice | Piece]:
        yield from plan_slices(
            self.handle, section, names=shown.names, where=shown.where, keys=keys, slice_bytes=self.slice_bytes
        )


class FollowingCollection(Following):
    """A collection."""

    handle: RenditionReader

    def __init__(
        self, table: Table, collection: CollectionRecord, limits: Limits, hold: str | None, slice_bytes: int | None
    ) -> None:
        super().__init__(table, limits, hold, slice_bytes)
        self.handle = unleased(table.client, collection, table.schema)
        self._timeline = self.handle.timeline()

    def fetch(self) -> Antichain:
        """Look how far it is complete and promised now: below that, no handover can ever come.

        A handover may come before the promise, and then what follows it may not be complete yet. So the answer
        is what one and the same timeline says.
        """
        reader = self.handle
        if isinstance(reader, TimelineReader):
            reader.fetch_upper()  # brings to its shards what was committed to the table
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
        yield from Steps(self.handle, shown, self.slice_bytes, 1).pieces(section, keys)

    def _sources(self, span: Span) -> Sequence[Source]:
        return [Source(handle, handle.machine.fetch().state) for handle in self.handle.shards_of(span.rendition)]


def following(table: Table, limits: Limits, hold: str | None, slice_bytes: int | None) -> Following:
    """What a stream of this table follows."""
    if table.collection is None:
        return FollowingShard(table, limits, hold, slice_bytes)
    return FollowingCollection(table, table.collection, limits, hold, slice_bytes)


WHAT = "a streaming read"


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the batches of a stream in one process of the driver, and reads them in tasks, where it is a copy."""

    def __init__(self, given: Mapping[str, str], schema: StructType, table: Table | None) -> None:
        options = Options.of(given, STREAM, WHAT)
        self._table = look(given, batch=False) if table is None else table
        check_asked(schema, self._table.frame, self._table.what)
        if self._table.read_only:
            raise InvalidUsage(
                f"{WHAT} keeps its history by a hold, so it cannot be read_only. Leave out that option",
                option="read_only",
            )
        if self._table.kind == "contents":
            raise InvalidUsage(
                f"{WHAT} has rows, or with the option changes updates with _diff. Leave out diff",
                option="diff",
            )
        self._target = arrow_schema(schema)
        self._limits = Limits(options.size("max_bytes"), options.integer("max_updates"), options.integer("max_times"))
        self._from = options.time("from")
        self._hold = options.text("hold")
        self._partition_bytes = options.size("partition_bytes", LEAST_BYTES)
        self._target_upper: Antichain | None = None
        self._planning: Following | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planning": None}

    # --- planning, in the driver's process ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before everything. Nothing is decided here, as Spark asks again after a restart."""
        return dict(offsets.START)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """That the options limit batches. Spark passes another one where it wants all there is."""
        return ReadMaxBytes(self._limits.bytes or DEFAULT_BYTES)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where the batch after `start` ends; `start` where nothing is new."""
        planning, table = self._plan(), self._table
        upper = planning.fetch()
        target = upper if self._target_upper is None else self._target_upper.meet(upper)
        before = offsets.decode(start, table.shard, table.what)
        began = None
        if before is None:
            if (began := planning.first(self._from, target)) is None:
                return start
            try:
                before = Offset(table.shard, planning.holding.begin(began), began)
            except SinceViolation:  # history went since the look: the next one finds what is there now
                target = planning.fetch()
                if planning.first(self._from, target) == began:
                    raise
                self._target_upper = None if self._target_upper is None else target
                return self.latestOffset(start, limit)
        else:
            planning.holding.check(before)
        admission = planning.unlimited if isinstance(limit, ReadAllAvailable) else planning.limited
        end = planning.next(before.position, target, admission)
        if began is None and end == before.position:
            return start
        return offsets.encode(Offset(before.shard, before.hold, end, began))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target_upper = self._plan().fetch()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The partitions of the batch between two offsets."""
        planning, table = self._plan(), self._table
        first, last = (offsets.decode(one, table.shard, table.what) for one in (start, end))
        if last is None:
            return []
        position = last.began if first is None else first.position
        if position is None:
            raise InvalidUsage(f"{table.what}: the stream's first offset does not say where it began", offset=end)
        planning.fetch()
        planning.holding.check(Offset(table.shard, last.hold, position))
        pushed = table.pushed
        shown = table.shown(self._target, pushed.where)
        wanted = [
            (section if section.as_of is not None else section.between(pushed.lower, pushed.upper), keys)
            for section, keys in offsets.steps(position, last.position)
            if section.as_of is None or pushed.has(section.as_of)
        ]
        return [
            Part(piece, None)
            for section, keys in wanted
            if not section.is_empty()
            for piece in planning.pieces(section, keys.meet(pushed.keys), shown)
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Everything up to an offset is done: let go of its history. May be called again."""
        if (offset := offsets.decode(end, self._table.shard, self._table.what)) is not None:
            self._plan().holding.move(offset)

    def _plan(self) -> Following:
        if self._planning is None:
            self._planning = following(self._table, self._limits, self._hold, self._partition_bytes)
        return self._planning

    # --- reading, in tasks ---

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):
            return iter(())
        return self._read(partition)

    def _read(self, part: Part) -> Iterator[pa.RecordBatch]:
        table, section = self._table, part.piece.section
        with Runtime(background=False).pool(2, "persist-spark") as pool:
            for rows in part.piece.read(table.client, pool):
                found = rows
                if section.as_of is not None and table.kind == "updates":
                    times = array_of(np.full(rows.num_rows, section.as_of, np.uint64))
                    found = rows.add_column(rows.num_columns - 1, TIME_FIELD, times)
                for piece in multiplied(found, table) if table.kind == "rows" else (found,):
                    yield from as_batches(piece, self._target, table)
