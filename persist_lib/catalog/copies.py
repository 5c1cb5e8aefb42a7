"""Copying a rendition into the one that is to follow it, stretch by stretch, while the old one is still written.

First the contents as of some time, and from there on the changes, until the new rendition has all that is before the
handover. Each stretch is one definite append to each new shard: every copier would append the very same. So a copier
that dies between two shards, or two copiers at once, do no harm: the next one continues where the shards are.

Many processes make the first copy of a large rendition: tasks read the old one and stage parts for the new shards.

    rebuild = begin(reader, old, new)                      # which time, which ranges of keys; durable, so it resumes
    staged = [run(work) for work in rebuild.works(n)]      # in any processes; each answer is small
    rebuild.commit(staged)                                 # one append a new shard, all at the same time

The time of the copy is the hold that keeps what is to be copied, so whoever resumes copies the contents as of the same
time. A shard that has its copy already is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.arguments import check_callable, shown
from persist_lib.catalog.answers import integer_times
from persist_lib.catalog.metadata_shard import states_of
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import LAYER, RenditionRecord
from persist_lib.catalog.renditions import Spreading, Write, handed_over_at, meet, routed
from persist_lib.core.cost import Cost
from persist_lib.errors import HoldConflict, InvalidUsage, SinceViolation, UpperMismatch
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.location.api import Blob
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.snapshot import Split
from persist_lib.relation.stage import Stage, Staged, Ticket
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Resource
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
        self._total += rows

    def add(self, rows: int) -> None:
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
        share = _share(new, index, _stretch(reader, old, first, last, deadline), transform, reading)
        with client.open_writer(name, new.columns, layer=LAYER) as write:
            write.append(share, first, last + 1, timeout=deadline.left_s())
    return Copied(meet(client, new.names), goal, is_complete=False)


def _rows_in(reader: RenditionReader, old: RenditionRecord, first: int, last: int) -> int:
    """About how many rows a stretch has: batches are counted whole."""
    states = [handle.machine.state for handle in reader.shards_of(old)]
    batches = [batch for state in states for batch in state.trace]
    return sum(one.count for one in batches if at(first) < one.upper and one.lower <= at(last))


def _stretch(
    reader: RenditionReader, old: RenditionRecord, first: int, last: int, deadline: Deadline
) -> Iterator[pa.Table]:
    """The updates of all old shards in one stretch."""
    for handle in reader.shards_of(old):
        seconds = deadline.remaining_s()
        if first == 0:
            with handle.snapshot(last, timeout=seconds, diff=True) as snapshot:
                yield from (at_time(table, last) for table in snapshot.batches())
        else:
            with handle.changes(first - 1, last, timeout=seconds) as changes:
                yield from map(integer_times, changes.batches())


def _share(
    new: RenditionRecord, index: int, tables: Iterator[pa.Table], transform: Transform | None, reading: Reading
) -> Iterator[pa.Table]:
    """What one new shard gets of them."""
    for table in tables:
        reading.add(table.num_rows)
        share = routed(new, transformed(table, transform, new.columns))[index]
        if share.num_rows:
            yield share


def transformed(table: pa.Table, transform: Transform | None, schema: Schema) -> pa.Table:
    """Rows in the columns of `schema`, with `_time` and `_diff`. Raises InvalidUsage for anything else."""
    made = table if transform is None else transform(table)
    wanted = [*schema.shown.names, TIME, DIFF]
    if not isinstance(made, pa.Table) or set(made.column_names) != set(wanted):
        found = made.column_names if isinstance(made, pa.Table) else type(made).__name__
        raise InvalidUsage(
            f"a transformation takes and returns a pyarrow.Table, and this rendition's has the columns {wanted}: got "
            f"{found}. Nothing of this stretch was copied"
        )
    return made.select(wanted)


class Work(msgspec.Struct, frozen=True):
    """A task: what to read, and for which shards to write it. It pickles."""

    split: Split
    rendition: RenditionRecord
    tickets: tuple[Ticket | None, ...]
    """One a new shard; None for a shard that has its copy already."""
    transform: str | None = None


class Copy(msgspec.Struct, frozen=True):
    """What a task wrote: for each new shard its parts. `read` and `written` count rows."""

    staged: tuple[tuple[Staged, ...], ...]
    read: int
    written: int
    cost: Cost


class Rebuild(Resource):
    """A first copy that is under way. Use it in a `with` block, in which all tasks are run."""

    def __init__(
        self, reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, transform: str | None, as_of: int
    ) -> None:
        self._reader, self._new, self._transform, self.as_of = reader, new, transform, as_of
        self._writers, self._stages, client = dict[int, WriteHandle](), dict[int, Stage](), reader.client
        with ExitStack() as held:
            self._snapshots = [held.enter_context(one.snapshot(as_of, diff=True)) for one in reader.shards_of(old)]
            for index, name in enumerate(new.names):
                if client.machine(name).fetch().state.upper <= at(as_of):
                    write = self._writers[index] = client.open_writer(name, new.columns, layer=LAYER)
                    held.callback(write.close)
                    stage = self._stages[index] = write.stage()
                    held.callback(stage.close)
            self._held = held.pop_all()

    @property
    def shards(self) -> int:
        """How many new shards still have to get their copy."""
        return len(self._stages)

    @property
    def size(self) -> int:
        """Bytes of the parts that are read."""
        return sum(snapshot.size for snapshot in self._snapshots)

    def works(self, n: int, *, here: bool = False) -> list[Work]:
        """About `n` tasks, at least one an old shard. `here`: they are run in this process (`run_here`)."""
        total = max(1, self.size)
        tickets = tuple(
            None if here or index not in self._stages else self._stages[index].ticket
            for index in range(self._new.shards)
        )
        return [
            Work(split, self._new, tickets, self._transform)
            for snapshot in self._snapshots
            for split in snapshot.splits(max(1, round(n * snapshot.size / total)))
        ]

    def run_here(self, work: Work) -> Copy:
        """Run a task in this process, which is all that shards in memory can have."""
        stages = [self._stages.get(index) for index in range(self._new.shards)]
        writes = [None if stage is None else stage.write for stage in stages]
        return _run(work, writes, self._reader.client.blob)

    def commit(self, copies: Sequence[Copy], timeout: float | None = None) -> int:
        """Append what all tasks wrote: to each shard its own, at the time of the copy. Returns the number of rows."""
        written = 0
        for index, write in self._writers.items():
            staged = [one for copy in copies for one in copy.staged[index]]
            with suppress(UpperMismatch):  # another process was first, with the same copy
                if staged:
                    written += write.append_staged(staged, at=self.as_of, timeout=timeout).count
            write.advance_upper(self.as_of + 1)
        return written

    def close(self) -> None:
        """Give up the stages; what was not appended is garbage. Idempotent."""
        self._held.close()


def begin(
    reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, transform: str | None = None
) -> Rebuild | None:
    """Begin or resume the first copy of `old` into `new`; None if all shards of `new` have theirs.

    `transform` names a function as `module:function` (see `load_transform`), which every process must be able to load.
    """
    client, shard, hold = reader.client, reader.collection.shard, hold_name(new)
    if transform is not None:
        load_transform(transform)
    uppers = [client.machine(name).fetch().state.upper for name in new.names]
    if all(at(0) < upper for upper in uppers):
        return None
    goal = min(handle.fetch_upper() for handle in reader.shards_of(old))
    if goal == at(0):
        raise InvalidUsage(
            f"collection {reader.name!r}: rendition {old.number} is empty and has no complete time yet, so there is "
            "nothing to copy",
            collection=reader.name,
        )
    last = reader.newest() if goal.time is None else goal.time - 1
    with suppress(HoldConflict):  # it was begun before, by this process or another
        client.set_hold(shard, hold, last, expected=None)
    found = client.inspect(shard).state.holds[hold].since.time
    return Rebuild(reader, old, new, transform, last if found is None else found)


def run(work: Work) -> Copy:
    """Carry out a task, in any process that reaches the location."""
    writes = [None if ticket is None else ticket.write for ticket in work.tickets]
    return _run(work, writes, None)


def load_transform(name: object) -> Transform:
    """The function that a text like `module:function` names. Raises InvalidUsage."""
    if not isinstance(name, str) or name.count(":") != 1 or not all(name.split(":")):
        raise InvalidUsage(f"a transformation is named as module:function, as in corrections:cents: got {shown(name)}")
    return _loaded(name)


@lru_cache(maxsize=8)
def _loaded(name: str) -> Transform:
    module, function = name.split(":")
    try:
        found = import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidUsage(
            f"cannot load the transformation {name}: {error}. The module must be importable here and where tasks run "
            "(PYTHONPATH, or --py-files of spark-submit)",
            transform=name,
        ) from error
    return check_callable(found, "transform", "a pyarrow.Table")  # type: ignore[return-value]


def _run(work: Work, writes: Sequence[Write | None], blob: Blob | None) -> Copy:
    transform = None if work.transform is None else load_transform(work.transform)
    read, spreading = 0, Spreading(work.rendition, writes)
    with Spending() as spent:
        for table in work.split.batches(blob):
            read += table.num_rows
            made = transformed(at_time(table, 0), transform, work.rendition.columns)
            spreading.add(made.drop_columns([TIME]))
        staged = spreading.finish()
    return Copy(staged, read, spreading.written, spent.cost)
