"""Changes: all that happened to a shard, collection or table after one time, up to and with another, as one table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.core.plan.fan_in import SHARE
from persist_lib.core.plan.requests import TaskInput
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME
from persist_lib.kernel.merge import WINDOW_BYTES, merge_runs
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.contents import may_be_split
from persist_lib.relation.conversions import Doors
from persist_lib.relation.held import Named, Part, Place, resuming
from persist_lib.relation.projection import by_key
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.runs import Stored, inputs_of, may_keep, newest_schema, overlapping
from persist_lib.shard.small_runs import gather, pieces

if TYPE_CHECKING:
    from persist_lib.relation.reader import ReadHandle


class UpdatesPart(Part):
    """What updates are read from."""

    @abstractmethod
    def updates(self, where: Where | None = None) -> Iterator[pa.Table]:
        """Tables of `schema.updates`. What `where` does not keep may be among them."""


class Changes(Doors[UpdatesPart]):
    """The updates with times in `(from_, to]`. Its tables have the columns, `_time` and `_diff`.

    Of a shard, each data and time is there once, in the order of data and time. Of a collection they come rendition by
    rendition and shard by shard, each shard's in that order; at a handover, the difference of both renditions comes at
    its time. `_time` is a timestamp where times are a clock. `from_` is None where it is all history. The contents as
    of `from_` and these changes add up to the contents as of `to`. Like a snapshot, it holds what it reads from until
    it is released.
    """

    def __init__(
        self, of: Named, schema: Schema, from_: int | None, to: int, parts: Sequence[UpdatesPart], spent: Spending
    ) -> None:
        super().__init__(of, schema, parts, spent)
        self.from_, self.to = from_, to

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        return self._schema.changes

    def batches(self) -> Iterator[pa.Table]:
        """The updates in order, as tables of bounded size."""
        return self._spent.over(self._shown(None))

    def to_arrow(self) -> pa.Table:
        """The updates as one table."""
        return pa.concat_tables([empty_table(self.schema), *self.batches()]).combine_chunks()

    def _selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the updates that `where` keeps. Query engines read through this."""
        kept = self._spent.over(self._shown(where))
        return ((table if where is None else where.kept(table)).select(list(names)) for table in kept)

    __reduce__ = not_pickled("A table of changes", "Pass its rows, as in changes.to_arrow()")

    def _named(self) -> str:
        return f"this table of changes of {self._of} up to {self._schema.show(self.to)}"

    def _shown(self, where: Where | None) -> Iterator[pa.Table]:
        return (shown_times(self._schema, table) for part in self._parts for table in part.updates(where))


class MemoryUpdates(UpdatesPart):
    """Updates that are in memory: tables of `schema.updates`."""

    def __init__(self, schema: Schema, tables: Sequence[pa.Table]) -> None:
        self.schema, self._tables = schema, tables

    def updates(self, where: Where | None = None) -> Iterator[pa.Table]:  # noqa: ARG002 - all of them
        return iter(self._tables)


class PlaceUpdates(Place, UpdatesPart):
    """The updates of one shard with times in `(from_, to]`, consolidated: each data and time once."""

    def __init__(self, handle: ReadHandle, from_: int | None, to: int, earliest: int | None = None) -> None:
        super().__init__(handle, (from_ or 0) if earliest is None else earliest)
        self._from, self._to = from_, to

    def updates(self, where: Where | None = None) -> Iterator[pa.Table]:
        return resuming(partial(self._stream, where), self.look_again)

    def _stream(self, where: Where | None) -> Iterator[pa.Table]:
        machine, schema, state = self.handle.machine, self.schema, self.state
        lower = 0 if self._from is None else self._from + 1
        batches = (b for b in state.trace if b.count and self._to >= 0 and b.lower.is_before(self._to))
        inputs = overlapping(inputs_of(batches, lower, None if self._to == MAX_TIME else self._to + 1), None, None)
        written = newest_schema(schema, state.schemas, inputs)
        inputs = may_keep(where, inputs, state.schemas, schema)
        stored = Stored(machine.reads, machine.shard, state.schemas, written, where=where)
        merged = self._merged(stored, inputs)
        if written == schema:
            return merged
        # Rows that differ in columns that this reader does not have become equal, in any order of their times.
        return by_key(merged, schema, schema.updates, schema.key)

    def _merged(self, stored: Stored, inputs: Sequence[TaskInput]) -> Iterator[pa.Table]:
        """The runs as one, in tables of bounded size. Small ones are gathered first; often all of them are small."""
        machine, merge_bytes = self.handle.machine, self.handle.machine.config.merge_bytes
        with machine.runtime.pool(machine.config.read_threads, "persist-changes") as pool:
            found = gather(stored, inputs, None, merge_bytes // SHARE, pool)
        if found.table is None or may_be_split(found.table):  # whether a sum fits is for the merge of all to say
            return merge_runs(stored.streams(inputs), stored.schema, merge_bytes=merge_bytes)
        if not found.rest:
            return pieces(found.table, WINDOW_BYTES)
        return merge_runs(found.streams(stored), stored.schema, merge_bytes=merge_bytes)


def changes_known(
    handle: ReadHandle, from_: int | None, to: int, spent: Spending | None = None, *, earliest: int | None = None
) -> Changes:
    """What happened to a shard in `(from_, to]`, of which this process knows that it is complete.

    `earliest` is the time that since must not have passed, by default `from_`: times before since are not exact.
    """
    of, parts = Named("shard", handle.shard), [PlaceUpdates(handle, from_, to, earliest)]
    return Changes(of, handle.schema, from_, to, parts, spent or Spending())
