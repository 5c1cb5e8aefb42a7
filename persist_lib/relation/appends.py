"""An append that was accepted and not sent yet: its data, when it may share a commit, and how its future ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import force_setattr

from persist_lib.arguments import LONGEST_S, parse_integer, parse_number, shown
from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.kernel.columns import integers
from persist_lib.kernel.consolidate import I64_MAX, consolidate
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Future
from persist_lib.schema.schema import DIFF, TIME, Schema

T = TypeVar("T")
ROOM_BYTES = 1024
"""What an append counts for beside its data, so that the number of empty appends in the buffer is limited too."""


class Appended(msgspec.Struct, frozen=True):
    """An acknowledged append: its seqno, the upper that it left, how many updates it wrote (`count`), and its token.

    `attempts` is how often the commit was tried; 0 if nothing had to be committed. Appends that were committed together
    have the same seqno, upper, token and `cost`; that cost is for all of them together. `count` is each one's own.
    """

    seqno: SeqNo
    upper: Antichain
    count: int
    token: bytes
    attempts: int
    cost: Cost = Cost()


class Changed(Appended, frozen=True):
    """What an upsert or a delete did: an `Appended`, and what became of each key.

    `inserted` keys had no row before, `updated` ones had another (or several), `unchanged` ones were already as they
    were to be, and `deleted` ones had rows and have none. If nothing was to be changed, nothing was written: `count`
    and `attempts` are 0, `token` is empty, and upper has not moved. `time` is the time of the change, None for none.
    The counts are 0 if an earlier call with the same token made the change.
    """

    time: int | None = None
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    late: int = 0


class Batching(msgspec.Struct, frozen=True):
    """How long `append_async` holds appends back: until they have `bytes`, or until the oldest is `age_s` old.

    `bytes` counts memory, `age_s` seconds since the call. An append is held back for at most half of its timeout.
    """

    bytes: int
    age_s: float

    def __post_init__(self) -> None:
        try:
            size, age_s = parse_integer(self.bytes, "bytes", 1), parse_number(self.age_s, "age_s", 0.0, LONGEST_S)
        except InvalidUsage:
            raise InvalidUsage(
                "batching takes a positive whole number of bytes and a finite age in seconds, got "
                f"{shown(self.bytes)} and {shown(self.age_s)}",
                bytes=self.bytes, age_s=self.age_s,
            ) from None  # fmt: skip
        force_setattr(self, "bytes", size)
        force_setattr(self, "age_s", age_s)


class AppendFuture(Future[Appended]):
    """The future of an accepted append. `is_told`: the caller has looked at how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told = False

    def result(self, timeout: float | None = None) -> Appended:
        return self._telling(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._telling(super().exception, timeout)

    def _telling(self, look: Callable[[float | None], T], timeout: float | None) -> T:
        try:
            found = look(timeout)
        except Exception:
            self.is_told = self.done()
            raise
        self.is_told = True
        return found

    def fail(self, error: BaseException) -> None:
        """Fail it with a copy of `error`, unless it was cancelled before it was sent."""
        if self.running() or self.set_running_or_notify_cancel():
            self.set_exception(copied(error))

    def disown(self, error: BaseException) -> None:
        """In a forked child: fail it, whatever its state. A thread that exists only in the parent may hold its lock."""
        self.__init__()  # type: ignore[misc]
        self.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One accepted append; `table` is None for no updates. With a token or a producer, it shares no commit."""

    table: pa.Table | None
    lower: Antichain
    upper: Antichain
    token: bytes | None
    deadline: Deadline
    accepted_s: float
    size: int
    producer: tuple[str, int] | None = None
    future: AppendFuture = field(default_factory=AppendFuture)

    @property
    def is_alone(self) -> bool:
        """Whether it shares no commit."""
        return self.token is not None or self.producer is not None

    def is_followed_by(self, other: Pending) -> bool:
        """Whether one commit may do both. It has the deadline of the first, so that of `other` must not be earlier."""
        return self.upper == other.lower and not other.is_alone and self.deadline.ends <= other.deadline.ends


def size_of(table: pa.Table | None) -> int:
    """Bytes that an append takes until it is sent."""
    return ROOM_BYTES + (0 if table is None else table.nbytes)


def is_shared(updates: object) -> bool:
    """Whether columns made of `updates` may alias memory that the caller owns and may change. Arrow data does not."""
    is_rows = type(updates) is list and set(map(type, updates)) <= {dict}
    return not (is_rows or isinstance(updates, (pa.Table, pa.RecordBatch)))


def take_over(schema: Schema, tables: Iterator[pa.Table], *, copies: bool) -> pa.Table | None:
    """The tables as one that the caller cannot change; None for no updates.

    Raises DiffOverflow now, as later it would fail all appends of the same commit. A column made of a numpy
    array or a pandas frame shares its memory. `copies` is for those: once the append is accepted, the caller may write
    into that memory before the append is sent.
    """
    held = list(tables)
    if not held:
        return None
    table = pa.concat_tables(held) if len(held) > 1 else held[0]
    if copies:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        table = pa.ipc.open_stream(sink.getvalue()).read_all()
    if table.num_rows > 1:
        diffs = integers(table.column(DIFF))
        if len(diffs) * max(abs(int(diffs.min())), abs(int(diffs.max()))) > I64_MAX:
            consolidate(schema, table)
    return table


def coalesced(schema: Schema, batch: Sequence[Pending]) -> tuple[pa.Table | None, list[int]]:
    """The updates of contiguous appends in one consolidated table, and how many of them belong to each append.

    Their times are disjoint, so updates of different appends are never added up.
    """
    tables = [pending.table for pending in batch if pending.table is not None]
    if not tables:
        return None, [0] * len(batch)
    # In one piece, as each further step costs something for every chunk.
    table = consolidate(schema, pa.concat_tables(tables).combine_chunks())
    times = np.sort(integers(table.column(TIME)))
    starts = np.searchsorted(times, np.array([pending.lower.time for pending in batch], np.uint64))
    return table, [int(count) for count in np.diff(starts, append=len(times))]


def copied(error: BaseException) -> BaseException:
    """A copy of the error. Each raise adds to an exception's traceback, and several callers will raise this one."""
    if not isinstance(error, PersistError):
        return error
    again = copy(error)
    again.__cause__ = error.__cause__
    return again
