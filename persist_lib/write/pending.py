"""An append that was accepted and is not sent yet: what it holds, when it may share a commit, what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

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

ROOM_BYTES = 1024
"""What an append takes beside its data, so that empty ones do not pile up for ever either."""


class Appended(msgspec.Struct, frozen=True):
    """An acknowledged append: committed at which seqno, upper from then on, how many updates, under which token.

    Appends that were committed together have seqno, upper and token in common, and `cost`, which is what all of them
    together asked of the location; `count` is each one's own.
    """

    seqno: SeqNo
    upper: Antichain
    count: int
    token: bytes
    attempts: int
    cost: Cost = Cost()


class Batching(msgspec.Struct, frozen=True):
    """Until when `append_async` holds appends back: there are `bytes` of them, or the oldest is `age_s` old.

    Bytes are those in memory, seconds those since the call. An append is held for at most half of its timeout.
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
    """What becomes of an accepted append. `is_told`: somebody has looked at how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told = False

    def result(self, timeout: float | None = None) -> Appended:
        try:
            answer = super().result(timeout)
        except Exception:
            self.is_told = self.done()
            raise
        self.is_told = True
        return answer

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            error = super().exception(timeout)
        except Exception:
            self.is_told = self.done()
            raise
        self.is_told = True
        return error

    def fail(self, error: BaseException) -> None:
        """Fail it with an error of its own, unless it was cancelled before it was sent."""
        if self.running() or self.set_running_or_notify_cancel():
            self.set_exception(copied(error))

    def disown(self, error: BaseException) -> None:
        """In a forked child: fail it, whatever state it is in. Its lock may be held by a thread that is not here."""
        self.__init__()  # type: ignore[misc]
        self.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One accepted append; `table` is None for no updates. With a token of its caller it shares no commit."""

    table: pa.Table | None
    lower: Antichain
    upper: Antichain
    token: bytes | None
    deadline: Deadline
    accepted_s: float
    size: int
    future: AppendFuture = field(default_factory=AppendFuture)

    def is_followed_by(self, other: Pending) -> bool:
        """Whether one commit may do both. It has the deadline of the first, so the others must not have an earlier."""
        return self.upper == other.lower and other.token is None and self.deadline.ends <= other.deadline.ends


def size_of(table: pa.Table | None) -> int:
    """Bytes that an append takes until it is sent."""
    return ROOM_BYTES + (0 if table is None else table.nbytes)


def is_shared(updates: object) -> bool:
    """Whether columns made of these may be memory of somebody's who writes to it. Arrow's never are, values neither."""
    is_rows = type(updates) is list and set(map(type, updates)) <= {dict}
    return not (is_rows or isinstance(updates, (pa.Table, pa.RecordBatch)))


def take_over(schema: Schema, tables: Iterator[pa.Table], *, copies: bool) -> pa.Table | None:
    """The tables as one that nobody else changes; None for no updates. Raises DiffOverflow: later all would fail.

    SUBTLE: a column made of a numpy array or a pandas frame is that array. `copies` is for those: who is
    told "accepted" may write into it before it is sent.
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
    """The updates of contiguous appends in one consolidated table, and how many of them are whose.

    Their times are disjoint, so nothing of one is added up with anything of another.
    """
    tables = [pending.table for pending in batch if pending.table is not None]
    if not tables:
        return None, [0] * len(batch)
    # In one piece: whatever comes next costs so much for each.
    table = consolidate(schema, pa.concat_tables(tables).combine_chunks())
    times = np.sort(integers(table.column(TIME)))
    starts = np.searchsorted(times, np.array([pending.lower.time for pending in batch], np.uint64))
    return table, [int(count) for count in np.diff(starts, append=len(times))]


def copied(error: BaseException) -> BaseException:
    """The same error once more: every raise adds to an exception's traceback, and several will raise it."""
    if not isinstance(error, PersistError):
        return error
    again = copy(error)
    again.__cause__ = error.__cause__
    return again
