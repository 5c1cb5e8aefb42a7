"""Copying a rendition into the one that is to follow it, stretch by stretch, while the old one is still written.

First the contents as of some time, and from there on the changes, until the new rendition has all that is before the
handover. Each stretch is one definite append to each new shard: every copier would append the very same. So a copier
that dies between two shards, or two copiers at once, do no harm: the next one continues where the shards are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from persist_lib.catalog.changes import integer_times
from persist_lib.catalog.names import LAYER
from persist_lib.catalog.parallel import states_of
from persist_lib.catalog.partition_rows import routed
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.renditions import handed_over_at, meet
from persist_lib.errors import HoldConflict, InvalidUsage, SinceViolation
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema

Transform = Callable[[pa.Table], pa.Table]
"""Makes of rows in the old columns rows in the new ones. It must be a pure function of each row, and pass on `_time`
and `_diff` of the row that each one comes from."""


Progress = Callable[[int, int], object]
"""Called with how many rows were read so far, and how many are to be read in all, as far as is known."""


class Copied(NamedTuple):
    """How far a rendition is copied: `upper` is its own, `goal` where the old one is, or the handover."""

    upper: Antichain
    goal: Antichain
    is_complete: bool


class Reading:
    """How many rows a copy has read, of how many as far as is known: each new shard's share is read by itself."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = self._total = 0

    def begin(self, rows: int) -> None:
        """A stretch of so many rows begins."""
        self._total += rows

    def add(self, rows: int) -> None:
        """So many rows more were read."""
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._total))


HOLDS = "copy-r"
"""How the names of holds begin that keep what is still to be copied."""


def hold_name(rendition: RenditionRecord) -> str:
    """The hold on the rendition shard that keeps what is still to be copied."""
    return f"{HOLDS}{rendition.number}"


def copy_step(
    reader: RenditionReader,
    old: RenditionRecord,
    new: RenditionRecord,
    transform: Transform | None,
    deadline: Deadline,
    reading: Reading,
) -> Copied:
    """Copy the next stretch, if there is one. What another copier has copied already is not copied again.

    SUBTLE: the hold keeps the time from which a stretch is read until all new shards have the stretch, so that a copier
    that comes after one that died reads the very same. The first stretch is as of the time of the hold: so it is the
    same for all copiers, too. A shard that has it says that time as well, also where the hold is gone.
    """
    client, shard, hold = reader.client, reader.collection.shard, hold_name(new)
    goal = min(handle.fetch_upper() for handle in reader.shards_of(old))
    if not goal.is_top() and reader.timeline().upper < goal:
        reader.promise(goal, deadline)  # what is copied is before any handover, for ever
    start = handed_over_at(reader.timeline(), new)
    uppers = [state.upper for state in states_of(client, new.names)]
    upper = min(uppers)
    if start is not None:
        goal = goal.meet(at(start))
    if start is not None and at(start) <= upper:
        with suppress(HoldConflict):
            client.release_hold(shard, hold)
        return Copied(upper, at(start), is_complete=True)
    if goal.is_top() or goal <= upper:
        return Copied(upper, goal, is_complete=False)
    first, last = upper.time or 0, (goal.time or 1) - 1
    if first == 0 and (begun_to := max(uppers).time):
        last = begun_to - 1
    try:
        if first == 0:
            client.set_hold(shard, hold, last, expected=None)
        else:
            client.downgrade_hold(shard, hold, first - 1)
    except HoldConflict:  # another copier began
        if (begun := client.inspect(shard).state.holds.get(hold)) is None:
            return Copied(upper, goal, is_complete=False)
        last = begun.since.time or 0
    except SinceViolation:  # the old rendition has come further since, or another copier has
        return Copied(upper, goal, is_complete=False)
    reading.begin(len(new.names) * _rows_in(reader, old, first, last))
    for index, name in enumerate(new.names):
        share = _Share(reader, old, new, index, first, last, transform, deadline, reading)
        with client.open_writer(name, new.columns, layer=LAYER) as write:
            write.append(share, first, last + 1, timeout=deadline.left_s())
    return Copied(meet(client, new.names), goal, is_complete=False)


def _rows_in(reader: RenditionReader, old: RenditionRecord, first: int, last: int) -> int:
    """About how many rows a stretch has: batches are counted whole."""
    states = [handle.machine.state for handle in reader.shards_of(old)]
    batches = [batch for state in states for batch in state.trace]
    return sum(one.count for one in batches if at(first) < one.upper and one.lower <= at(last))


class _Share:
    """The updates of one new shard in one stretch, read from all old shards: again each time it is iterated."""

    def __init__(
        self, reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, index: int, first: int, last: int,
        transform: Transform | None, deadline: Deadline, reading: Reading,
    ) -> None:  # fmt: skip
        self._reading = reading
        self._reader, self._old, self._new, self._index = reader, old, new, index
        self._first, self._last, self._transform, self._deadline = first, last, transform, deadline

    def __iter__(self) -> Iterator[pa.Table]:
        for handle in self._reader.shards_of(self._old):
            seconds = self._deadline.remaining_s()
            if self._first == 0:
                with handle.snapshot(self._last, timeout=seconds, diff=True) as snapshot:
                    yield from self._mine(at_time(table, self._last) for table in snapshot.batches())
            else:
                with handle.changes(self._first - 1, self._last, timeout=seconds) as changes:
                    yield from self._mine(map(integer_times, changes.batches()))

    def _mine(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            self._reading.add(table.num_rows)
            made = transformed(table, self._transform, self._new.columns)
            share = routed(self._new, made)[self._index]
            if share.num_rows:
                yield share


def transformed(table: pa.Table, transform: Transform | None, schema: Schema) -> pa.Table:
    """Rows in the columns of `schema`, with `_time` and `_diff`. Raises InvalidUsage for anything else."""
    made = table if transform is None else transform(table)
    wanted = [*schema.names, TIME, DIFF]
    if not isinstance(made, pa.Table) or set(made.column_names) != set(wanted):
        found = made.column_names if isinstance(made, pa.Table) else type(made).__name__
        raise InvalidUsage(
            f"a transformation takes and returns a pyarrow.Table, and this rendition's has the columns {wanted}: got "
            f"{found}. Nothing of this stretch was copied",
        )
    return made.select(wanted)
