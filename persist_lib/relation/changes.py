"""Changes: all that happened to a shard after one time, up to and with another, as one table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage, Missing
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.merge import merge_runs
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.conversions import Doors
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.runs import Stored, inputs_of, newest_schema, overlapping

if TYPE_CHECKING:
    from persist_lib.relation.reader import ReadHandle, Reading


def resuming(stream: Callable[[], Iterator[pa.Table]], look_again: Callable[[Missing], object]) -> Iterator[pa.Table]:
    """The tables of `stream`. When a blob is gone, it is made again after `look_again`, from the last row on.

    It must have the same rows in the same order each time. `look_again` raises what ends the stream.
    """
    done = 0
    while True:
        try:
            skip = done
            for table in stream():
                dropped = min(skip, table.num_rows)
                skip -= dropped
                fresh = table.slice(dropped)
                done += fresh.num_rows
                if fresh.num_rows:
                    yield fresh
        except Missing as missing:
            look_again(missing)
        else:
            return


class Held(Doors):
    """A table that is read from one state of a shard, for use in a `with` block."""

    def __init__(self, handle: ReadHandle, reading: Reading, spent: Spending) -> None:
        self._handle, self._reading, self._spent = handle, reading, spent
        self._is_released = False

    @abstractmethod
    def _named(self) -> str:
        """What it is, for the error after its release: `this snapshot of orders as of 7`."""

    @abstractmethod
    def _earliest(self) -> int:
        """The earliest time that it is about: since must not pass it."""

    @property
    def cost(self) -> Cost:
        """The cost so far of finding it and of reading it here.

        The cost of reading splits is counted in the processes that read them.
        """
        return self._spent.cost

    def shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._handle.schema

    def check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        self._handle.check_open()
        if self._is_released:
            raise InvalidUsage(
                f"{self._named()} was released, so what it reads from may be gone; take a new one, and keep it until "
                "everything has been read",
                shard=self._handle.shard,
            )

    def release(self) -> None:
        """Stop keeping the state that is read from. Idempotent. Dropping the object does the same."""
        self._is_released = True
        self._reading.release()

    def _resuming(self, stream: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
        """The tables of `stream`. When a blob vanishes under a read-only client, continue from the newest state.

        SUBTLE: the rows are the same in every state that a reader may use, and come in the same order. So it is exact
        to continue after the last row.
        """
        return resuming(stream, self._look_again)

    def _look_again(self, missing: Missing) -> None:
        """For a read-only client, take the newest state; otherwise raise the error that a missing blob means."""
        self._reading = self._handle.look_again(self._reading, self._earliest(), missing)


class Changes(Held):
    """The updates with times in `(from_, to]`, consolidated: each data and time once, in the order of data and time.

    Its tables have the schema's columns, `_time` (a timestamp where times are a clock) and `_diff`. `from_` is None
    where it is all history. The contents as of `from_` and these changes add up to the contents as of `to`. Like a
    snapshot, it holds what it reads from until it is released.
    """

    def __init__(self, handle: ReadHandle, reading: Reading, from_: int | None, to: int, spent: Spending) -> None:
        super().__init__(handle, reading, spent)
        self.from_, self.to = from_, to

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        return self._handle.schema.changes

    def batches(self) -> Iterator[pa.Table]:
        """The updates in order, as tables of bounded size."""
        return self._spent.over(self._shown(None))

    def to_arrow(self) -> pa.Table:
        """The updates as one table."""
        return pa.concat_tables([empty_table(self.schema), *self.batches()]).combine_chunks()

    def selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the updates that `where` keeps. Query engines read through this."""
        kept = self._spent.over(self._shown(where))
        return ((table if where is None else where.kept(table)).select(list(names)) for table in kept)

    __reduce__ = not_pickled("A table of changes", "Pass its rows, as in changes.to_arrow()")

    def _named(self) -> str:
        return f"this table of changes of {self._handle.shard} up to {self._handle.schema.show(self.to)}"

    def _earliest(self) -> int:
        return self.from_ or 0

    def _shown(self, where: Where | None) -> Iterator[pa.Table]:
        return (shown_times(self._handle.schema, table) for table in self._resuming(partial(self._stream, where)))

    def _stream(self, where: Where | None) -> Iterator[pa.Table]:
        handle, state = self._handle, self._reading.version.state
        machine, schema = handle.machine, handle.schema
        lower = 0 if self.from_ is None else self.from_ + 1
        batches = (b for b in state.trace if b.count and self.to >= 0 and b.lower.is_before(self.to))
        inputs = overlapping(inputs_of(batches, lower, None if self.to == MAX_TIME else self.to + 1), None, None)
        written = newest_schema(schema, state.schemas, inputs)
        stored = Stored(machine.reads, machine.shard, state.schemas, written, where=where)
        merged = merge_runs(stored.streams(inputs), written, merge_bytes=machine.config.merge_bytes)
        if written == schema:
            return merged
        # Rows that differ in columns that this reader does not have become equal, in any order of their times.
        narrow = [table.select(schema.updates.names) for table in merged]
        return iter([consolidate(schema, pa.concat_tables([empty_table(schema.updates), *narrow]))])
