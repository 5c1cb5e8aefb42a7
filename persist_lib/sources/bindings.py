"""Bindings: which messages of a source belong to which time, kept in a shard, so that all processes agree.

And reclocking, which is pure: messages get the times that bindings say, by windows of whole times.

A binding (partition, first address not covered) holds from its time on, and retracts the former one of the partition. A
message belongs to the first time whose binding covers it. Times below the shard's upper are settled: no message will
ever be added to them.

A minter proposes, and the shard decides. So nothing here answers what was proposed: callers read it back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.catalog.metadata_shard import append_once, unheld
from persist_lib.catalog.records import OF_SOURCES
from persist_lib.client import Client
from persist_lib.errors import Corrupt, InvalidUsage, SinceViolation, UpperMismatch
from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.order import take
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.registration import store_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, TIME_FIELD, Schema
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.pipeline import NO_SCHEMAS
from persist_lib.sources.protocol import HOLD, MOST_ADDRESS, START, Mark, SourceReader
from persist_lib.sources.schema_registry import Schemas, Written

SCHEMA = Schema(
    key={"partition": "string not null"}, value={"address": "uint64 not null", "check": "string not null"},
    times="ms", unique=True,
)  # fmt: skip

MOST_AHEAD_MS = 60_000
"""How far bindings may be ahead of the store's clock. One that was wrong must not put off all times that follow."""

Marks = Mapping[str, Mark]
Propose = Callable[[Marks], Marks]
"""Makes of what is bound what is to be bound. Called again after a lost race."""


class Step(NamedTuple):
    """What became bound at one time: the new marks."""

    time: int
    marks: Marks


class Bound(NamedTuple):
    """Bindings from one time on: the marks as of just before it, what came at which time, and upper."""

    start: Marks
    steps: tuple[Step, ...]
    upper: int

    @property
    def marks(self) -> dict[str, Mark]:
        found = dict(self.start)
        for step in self.steps:
            found |= step.marks
        return found


class Clock(Protocol):
    """What says at which times a source's messages are: its bindings, or the collection that it reads."""

    shard: str
    hold: str

    def since(self, time: int) -> Bound: ...
    def mint(self, propose: Propose, deadline: Deadline, tick_ms: int = 0) -> None: ...
    def has_news(self, bound: Bound, time: int) -> bool: ...
    def fetch_told(self) -> int: ...
    def behind_ms(self, time: int) -> int: ...
    def let_go(self, time: int) -> None: ...
    def close(self) -> None: ...


def bound_from(clock: Clock, durable: Callable[[], int]) -> tuple[int, Bound]:
    """Up to where a source is `durable`, and what is bound from there on, while instances may take steps between both.

    Raises SinceViolation where history is given up there, and nothing moved.
    """
    seen = None
    while True:
        time = durable()
        try:
            return time, clock.since(time)
        except SinceViolation:
            if time == seen:
                raise
            seen = time


class Bindings:
    """One process's view of the binding shard of a source."""

    hold = HOLD

    def __init__(self, client: Client, shard: str) -> None:
        self._client, self.shard = client, shard
        self._reader: ReadHandle | None = None
        self._writer: WriteHandle | None = None

    def since(self, time: int) -> Bound:
        """The bindings from `time` on, read back from the shard. Raises SinceViolation if history is given up there."""
        reader = self._read()
        upper = reader.fetch_upper().time
        if upper is None:
            raise InvalidUsage(f"the bindings {self.shard} are closed: the source was dropped")
        start: dict[str, Mark] = {}
        if time > 0:
            if upper < time:
                raise Corrupt(
                    f"the bindings {self.shard} are settled up to {upper} only, but data was made of them up to "
                    f"{time}: is this an older copy of the location?",
                    key=self.shard,
                )  # fmt: skip
            with reader.snapshot(time - 1) as snapshot:
                rows = snapshot.to_pylist()
            start = {row["partition"]: Mark(row["address"], row["check"]) for row in rows}
        if upper <= time:
            return Bound(start, (), upper)
        with reader.changes(time - 1 if time else None, upper - 1) as changes:
            table = changes.to_arrow()
        times = table.column(TIME).cast("int64").to_pylist()
        found: dict[int, dict[str, Mark]] = {}
        for at, row in sorted(zip(times, table.to_pylist(), strict=True), key=itemgetter(0)):
            if row[DIFF] > 0:
                found.setdefault(at, {})[row["partition"]] = Mark(row["address"], row["check"])
        return Bound(start, tuple(Step(at, marks) for at, marks in sorted(found.items())), upper)

    def newest(self) -> Bound:
        """The marks as of just before upper. Others may have bound more between two looks: those are in it, too."""
        reader = self._read()
        while True:
            upper = reader.fetch_upper().time or 0
            try:
                found = Bound({}, (), 0) if upper == 0 else self.since(upper)
                return Bound(found.marks, (), found.upper)
            except SinceViolation:  # others went on, and history moved
                if reader.fetch_upper().time == upper:
                    raise

    def mint(self, propose: Propose, deadline: Deadline, tick_ms: int = 0) -> None:
        """Bind what `propose` makes of the newest marks, at the store's time now, but for marks that go no further.

        Without any it is a tick: upper moves to now, so that readers know that nothing came; not before upper is
        `tick_ms` behind. Raises ClockAhead when the bindings are far ahead of the store's clock, and TimedOut.
        """
        write = self._open()
        races = 0
        while True:
            bound = self.newest()
            new = _forward(bound.start, propose(bound.start))
            if not races and deadline.has_passed():  # a first copy takes as long as the table is large
                deadline = self._client.runtime.deadline(deadline.timeout_s)
            time = self._time(bound.upper)
            if not new and self._client.consensus.now() < bound.upper + tick_ms:
                return
            rows: list[dict[str, object]] = []
            for partition, mark in new.items():
                if (old := bound.start.get(partition)) is not None:
                    rows.append({**_row(partition, old), TIME: time, DIFF: -1})
                rows.append({**_row(partition, mark), TIME: time, DIFF: 1})
            try:
                append_once(write, rows, bound.upper, time + 1, deadline)
            except UpperMismatch:
                races += 1
            else:
                return
            if deadline.has_passed():
                raise deadline.gave_up(f"bindings {self.shard}", f"as other minters were first {races} times")

    def get_binding(self, partition: str, address: int, mark: Mark, deadline: Deadline) -> tuple[Mark, int]:
        """Answer the binding that a message belongs to, and its time; mint one up to `mark` if none covers it.

        For readers that meet messages before a mint has bound them. `mark` is the first address after the
        message. The answer is what the shard says, which may be another instance's binding that goes further. Raises
        SinceViolation where the binding is so old that it is given up.
        """
        if mark.address <= address:
            raise InvalidUsage(f"the mark {mark.address} does not cover the message at {address}")
        while True:
            if (found := self._covering(partition, address)) is not None:
                return found
            self.mint(lambda _: {partition: mark}, deadline)

    def fetch_told(self) -> int:
        """The shard's since: what the source's messages at earlier times were is not known any more."""
        return self._client.machine(self.shard).fetch().state.since.time or 0

    def has_news(self, bound: Bound, _time: int) -> bool:
        return bool(bound.steps)

    def behind_ms(self, time: int) -> int:
        return max(0, self._client.consensus.now() - time)

    def let_go(self, _time: int) -> None:
        """Nothing: it holds nothing."""

    def close(self) -> None:
        for handle in (self._writer, self._reader):
            if handle is not None:
                handle.close()
        self._writer = self._reader = None

    def _covering(self, partition: str, address: int) -> tuple[Mark, int] | None:
        newest = self.newest()
        if newest.start.get(partition, Mark(0)).address <= address:
            return None
        since = self._client.machine(self.shard).fetch().state.since.time or 0
        bound = self.since(since + 1)
        if bound.start.get(partition, Mark(0)).address > address:
            if since == 0:
                return bound.start[partition], 0
            raise SinceViolation(
                f"{partition}: which binding covered {address} first is given up; history begins at {since}",
                as_of=None, since=since,
            )  # fmt: skip
        for step in bound.steps:
            if partition in step.marks and step.marks[partition].address > address:
                return step.marks[partition], step.time
        return None

    def _time(self, upper: int) -> int:
        """The time of the next binding. A clock that goes back gives upper."""
        client = self._client
        now, own = client.consensus.now(), client.runtime.clock_ms()
        return store_time(f"the bindings {self.shard}", upper, now, own, MOST_AHEAD_MS)

    def _read(self) -> ReadHandle:
        if self._reader is None:
            self._reader = unheld(self._client, self.shard, SCHEMA)
        return self._reader

    def _open(self) -> WriteHandle:
        if self._writer is None:
            self._writer = self._client.open_writer(self.shard, SCHEMA, layer=OF_SOURCES)
        return self._writer


def _forward(bound: Marks, proposed: Marks) -> dict[str, Mark]:
    """Those marks that go beyond what is bound."""
    found = {}
    for partition, mark in proposed.items():
        if not 0 <= mark.address <= MOST_ADDRESS:
            raise InvalidUsage(f"{partition}: an address is an integer from 0 to 2**63 - 1: got {mark.address}")
        if mark.address > bound.get(partition, Mark(0)).address:
            found[partition] = mark
    return found


def _row(partition: str, mark: Mark) -> dict[str, object]:
    return {"partition": partition, "address": mark.address, "check": mark.check}


Estimate = Callable[[str, int, int], int]


class Window(NamedTuple):
    """Whole times `[start, end)`, and what was bound in them. `before` are the marks as of just before `start`."""

    start: int
    end: int
    before: Mapping[str, Mark]
    steps: tuple[Step, ...]

    def ranges(self) -> dict[str, tuple[Mark, Mark]]:
        """From where to where to read each partition, in the order of their names."""
        last: dict[str, Mark] = {}
        for step in self.steps:
            last |= step.marks
        return {partition: (self.before.get(partition, START), last[partition]) for partition in sorted(last)}

    def halves(self) -> tuple[Window, Window]:
        """Two windows of the same times, one after the other. It has to have two steps at least."""
        middle = len(self.steps) // 2
        first, second = self.steps[:middle], self.steps[middle:]
        between = dict(self.before)
        for step in first:
            between |= step.marks
        at = second[0].time
        return Window(self.start, at, self.before, first), Window(at, self.end, between, second)

    def times_of(self, partition: str, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The time of each message: the first at which its address is covered."""
        steps = [(step.marks[partition].address, step.time) for step in self.steps if partition in step.marks]
        bounds = np.array([address for address, _ in steps], np.uint64)
        times = np.array([time for _, time in steps], np.uint64)
        return times[np.searchsorted(bounds, addresses, side="right")]


def windows(
    bound: Bound, start: int, most_bytes: int, estimate: Estimate, alone: Container[str] = ()
) -> Iterator[Window]:  # fmt: skip
    """Cut `[start, bound.upper)` into windows of about `most_bytes` of messages, at least one time each.

    A time at which one of the partitions `alone` was bound has a window of its own, which starts with it.
    """
    before = dict(bound.start)
    some: list[Step] = []
    marks, size = dict(before), 0
    for step in bound.steps:
        weight = sum(
            estimate(partition, marks.get(partition, START).address, mark.address)
            for partition, mark in step.marks.items()
        )
        is_alone = any(partition in alone for partition in step.marks)
        if (some and size + weight > most_bytes) or (is_alone and start < step.time):
            yield Window(start, step.time, before, tuple(some))
            start, before, some, size = step.time, dict(marks), [], 0
        some.append(step)
        marks |= step.marks
        size += most_bytes + 1 if is_alone else weight
    if start < bound.upper:
        yield Window(start, bound.upper, before, tuple(some))


def in_order(times: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """The order of the messages of all partitions, given one after the other: by time, then as they were given."""
    return np.argsort(np.concatenate(times), kind="stable") if times else np.array([], np.int64)


def tables_of(reader: SourceReader, window: Window) -> Iterator[pa.Table]:
    """The messages of a window with their times, partition by partition, in tables of bounded size."""
    for partition, (start, end) in window.ranges().items():
        for table in reader.read(partition, start, end):
            some = table
            if "partition" not in table.column_names:
                indices = pa.array(np.zeros(table.num_rows, np.int32))
                some = table.append_column("partition", pa.DictionaryArray.from_arrays(indices, pa.array([partition])))
            if TIME not in table.column_names:
                mine = window.times_of(partition, integers(table.column("address")))
                some = some.append_column(TIME_FIELD, array_of(mine))
            yield some


def read(reader: SourceReader, window: Window, most_bytes: int, *, may_cut: bool = False) -> pa.Table | None:
    """The messages of a window with their times, in the order of times, partitions and addresses.

    None if they are more than `most_bytes`, and the window could be a shorter one, or its caller `may_cut` it.
    """
    tables, times, size = [], [], 0
    for some in tables_of(reader, window):
        times.append(integers(some.column(TIME)))
        tables.append(some)
        size += some.nbytes
        if size > most_bytes and (may_cut or len(window.steps) > 1):
            return None
    if not tables:
        return pa.table({"partition": pa.array([], pa.string())})
    whole = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    order = in_order(times)
    return whole if (order[1:] > order[:-1]).all() else take(whole, order)


def read_parts(reader: SourceReader, window: Window, most_bytes: int) -> Iterable[tuple[Window, pa.Table]]:
    """The window with its messages; in parts, if these turn out to be much more than was estimated."""
    some = read(reader, window, most_bytes)
    if some is not None:
        yield window, some
        return
    for half in window.halves():
        yield from read_parts(reader, half, most_bytes)


def schemas_of(
    schemas: Schemas | None, decoding: Decoding, messages: pa.Table, deadline: Deadline
) -> Mapping[int, Written]:
    """The schemas that messages name, as they are committed."""
    if schemas is None:
        return NO_SCHEMAS
    from persist_lib.sources.avro import ids_of  # noqa: PLC0415 - fastavro is an extra

    return schemas.learn(ids_of(decoding, messages), deadline)
