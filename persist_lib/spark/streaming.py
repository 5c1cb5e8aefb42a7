"""Streaming reads: the contents first and then what changes, or the changes after a time, each exactly once.

    spark.readStream.format("persist").option("shard", "orders").option("changes", "true").load()

Without `changes` a stream has the rows that are added, as one of Delta's has, and stops with an error at an update that
takes rows away. With it, the stream has all updates, with `_time` and `_diff`; the contents that it starts with are
updates at their `as_of`. Where a batch ends is decided once and is in the query's checkpoint; what is in it is the same
whenever it is read.
"""

from __future__ import annotations

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

from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import Antichain
from persist_lib.kernel.columns import array_of
from persist_lib.read.handle import ReadHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import TIME_FIELD
from persist_lib.spark import offsets
from persist_lib.spark.admission import DEFAULT_BYTES, Admission, Limits
from persist_lib.spark.holding import Holding
from persist_lib.spark.offsets import Contents, Offset, Position, Updates
from persist_lib.spark.options import STREAM, Options
from persist_lib.spark.reading import LATEST, LEAST_BYTES, Part, Table, as_batches, look, multiplied, newest
from persist_lib.spark.slices import handle_of, plan_slices, read_slice
from persist_lib.spark.types import arrow_schema, check_asked

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
        self._planning: _Planning | None = None

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
        planning = self._plan()
        state = planning.handle.machine.fetch().state
        target = state.upper if self._target_upper is None else self._target_upper.meet(state.upper)
        before = offsets.decode(start, self._table.shard)
        began = None
        if before is None:
            if (began := self._first(planning.handle, state)) is None:
                return start
            before = Offset(self._table.shard, planning.holding.begin(began), began)
        else:
            planning.holding.check(before)
        admission = planning.unlimited if isinstance(limit, ReadAllAvailable) else planning.admission
        end = admission.next(before.position, state, target)
        if began is None and end == before.position:
            return start
        return offsets.encode(Offset(before.shard, before.hold, end, began))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read no further than what is complete now."""
        self._target_upper = self._plan().handle.fetch_upper()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The partitions of the batch between two offsets."""
        planning, shard = self._plan(), self._table.shard
        first, last = offsets.decode(start, shard), offsets.decode(end, shard)
        if last is None:
            return []
        position = last.began if first is None else first.position
        if position is None:
            raise InvalidUsage(f"shard {shard}: the stream's first offset does not say where it began", offset=end)
        planning.holding.check(Offset(shard, last.hold, position))
        names = tuple(name for name in self._target.names if name in self._table.schema.names)
        pushed = self._table.pushed
        wanted = [
            (section if section.as_of is not None else section.between(pushed.lower, pushed.upper), keys)
            for section, keys in offsets.steps(position, last.position)
            if section.as_of is None or pushed.has(section.as_of)
        ]
        return [
            Part(piece, None)
            for section, keys in wanted
            if not section.is_empty()
            for piece in plan_slices(
                planning.handle,
                section,
                names=names,
                where=pushed.where,
                keys=keys.meet(pushed.keys),
                slice_bytes=self._partition_bytes,
            )
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Everything up to an offset is done: let go of its history. May be called again."""
        if (offset := offsets.decode(end, self._table.shard)) is not None:
            self._plan().holding.move(offset)

    def _plan(self) -> _Planning:
        if self._planning is None:
            self._planning = _Planning(self._table, self._limits, self._hold)
        return self._planning

    def _first(self, handle: ReadHandle, state: State) -> Position | None:
        """Where a new stream starts; None while there is no complete time."""
        if self._from is None or self._from == LATEST:
            if state.upper.time == 0:
                return None
            as_of = newest(handle)
            return Contents(as_of) if self._from is None else Updates(as_of + 1)
        with handle.changes(self._from, timeout=0) as changes:
            return Updates(0 if changes.from_ is None else changes.from_ + 1)

    # --- reading, in tasks ---

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition."""
        if not isinstance(partition, Part):
            return iter(())
        return self._read(partition)

    def _read(self, part: Part) -> Iterator[pa.RecordBatch]:
        table, section = self._table, part.piece.section
        with Runtime(background=False).pool(2, "persist-spark") as pool:
            for rows in read_slice(table.client, part.piece, pool):
                found = rows
                if section.as_of is not None and table.kind == "updates":
                    times = array_of(np.full(rows.num_rows, section.as_of, np.uint64))
                    found = rows.add_column(rows.num_columns - 1, TIME_FIELD, times)
                for piece in multiplied(found, table) if table.kind == "rows" else (found,):
                    yield from as_batches(piece, self._target, table)


class _Planning:
    """What planning keeps from batch to batch, in one process."""

    def __init__(self, table: Table, limits: Limits, hold: str | None) -> None:
        client = table.client
        self.handle = handle_of(client, table.shard, table.schema)
        self.holding = Holding(client, table.shard, hold)
        wanted = Limits(DEFAULT_BYTES) if limits.is_none() else limits
        self.admission, self.unlimited = Admission(self.handle, wanted), Admission(self.handle, Limits())
