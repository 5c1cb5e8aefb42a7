"""The writer of a collection: what the writer of a shard can, across shards and handovers.

Appends that `append_async` accepts wait in an outbox, and are written as if they were made one by one. Any other call
comes after those that were accepted before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self, cast

import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag
from persist_lib.client import Client
from persist_lib.errors import (
    ConstraintViolated,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    PersistError,
    UpperMismatch,
)
from persist_lib.frontier import at
from persist_lib.ids import parse_token
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.append_queue import Answer, Outbox, not_sent
from persist_lib.relation.appends import Batching, Pending, coalesced, copied, is_shared, size_of, take_over
from persist_lib.relation.registration import parse_bounds
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.empty import empty_table
from persist_lib.storage.committing import HandedOver
from persist_lib.storage.records import CollectionRecord, RenditionRecord
from persist_lib.storage.renditions import Timeline
from persist_lib.storage.staging import CollectionStaging
from persist_lib.storage.writing import Written
from persist_lib.times import Unit

__all__ = ["CollectionWriter", "Written"]

DOUBTS = 4
"""How many commits of several appends, whose outcome is unknown, a writer remembers."""


class _Doubt(NamedTuple):
    """Appends that were sent together, with this token, and whose outcome is unknown."""

    token: bytes
    batch: Sequence[Pending]


class CollectionWriter(CollectionStaging):
    """Writes one collection. Its methods are those of a shard's writer, as far as the collection's mode has them.

    Safe to use from several threads. Close it before its client: that writes what `append_async` accepted.
    """

    def __init__(
        self,
        client: Client,
        collection: CollectionRecord,
        unit: Unit | None,
        only: RenditionRecord | None,
        batching: Batching | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(client, collection, unit, only, owner)
        self._batching, self._beginning = batching, threading.Lock()
        self._outbox: Outbox | None = None
        self._doubts: deque[_Doubt] = deque(maxlen=DOUBTS)
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        """What is on its way is the parent's, and so is the thread that may hold a lock."""
        self._turn, self._beginning = threading.RLock(), threading.Lock()
        if self._outbox is not None:
            self._outbox.after_fork_in_child()

    def __repr__(self) -> str:
        return f"CollectionWriter({self.collection.name!r})"

    def compare_and_append(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Written:
        """Append updates with times in `[expected_upper, new_upper)`, if upper is exactly `expected_upper`.

        All shards are appended to in one transaction. The arguments and errors are those of a shard's
        `compare_and_append`; the updates are held in memory. Raises InvalidUsage for a collection that is written by
        definite appends.
        """
        self._check_mode("compare_and_append")
        pending = self._accepted(updates, expected_upper, new_upper, timeout, token, producer, copies=False)
        self._settle(pending.deadline)
        with self._turn:
            return self._append(pending)

    def append_async(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
        block: bool = True,
    ) -> Future[Written]:
        """Accept a `compare_and_append` and return its future. Accepted appends are carried out in the order of calls.

        One commit is under way at a time. Appends that are accepted meanwhile and continue one another are committed
        together, except those with a `token` or a `producer`, and those on both sides of a handover. Everything else is
        as in a shard's `append_async`: when it waits for room (`block`), how futures fail, and that a failure that
        nobody has looked at is raised by the next call, by `flush` and by `close`.
        """
        self._check_mode("append_async")
        block = parse_flag(block, "block")
        copies = is_shared(updates)
        pending = self._accepted(updates, expected_upper, new_upper, timeout, token, producer, copies=copies)
        with self._beginning:
            outbox = self._outbox = self._outbox or Outbox(
                self.collection.shard, self.client.runtime, self.client.config.buffer_bytes, self._batching
            )
        return cast("Future[Written]", outbox.accept(pending, self._send_accepted, block=block))

    def flush(self, *, timeout: float | None = None) -> None:
        """Write all appends that were accepted before this call, now, and return when they are finished.

        Raises as a shard's `flush` does.
        """
        deadline = self._deadline(timeout)
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure(copied)

    def append_on(
        self, basis: str, updates: pa.Table, lower: int, upper: int, *, timeout: float, token: bytes
    ) -> bytes:
        """Append as `compare_and_append` does, if the collection is still the rendition of the handover `basis`.

        Raises UpperMismatch otherwise, as what was made of the contents of one rendition may not fit another.
        """
        self._check_mode("compare_and_append")
        deadline = self._deadline(timeout)
        self._settle(deadline)
        try:
            with self._turn:
                return self._commit(updates, at(lower), at(upper), deadline, token, None, basis)
        except HandedOver as error:
            moved = UpperMismatch("it was handed over", expected=at(lower), actual=self._timeline().upper)
            raise self._mismatch(at(lower), moved) from error

    def append(self, updates: object, lower: object, new_upper: object, *, timeout: float | None = None) -> Written:
        """Append those updates with times in `[lower, new_upper)` that the collection does not have yet.

        For writers that write identical data: whoever is first at a time wins, and the others add what lies beyond.
        Each shard is appended to by itself; a call that was killed in between is finished by the next one, of any
        writer. Raises UpperMismatch when there is a gap before `lower`.
        """
        self._check_mode("append")
        times = self._times()
        low, upper = parse_bounds(lower, new_upper, times)
        deadline = self._deadline(timeout)
        table = self._parsed(updates, low, upper, times)
        with self._turn, Spending() as spent:
            self._append_definite(table, low, upper, deadline)
            return Written(upper, table.num_rows, b"", spent.cost)

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Written:
        """Advance upper to `new_upper` without writing updates, from wherever upper is now."""
        upper, deadline = self._times().frontier(new_upper, "new_upper"), self._deadline(timeout)
        self._settle(deadline)
        with self._turn, Spending() as spent:
            while (reached := self.fetch_upper()) < upper:
                if self.mode == "append" or self._only is not None:
                    self._advance_each(reached, upper, deadline)
                    self._check_time(deadline, "others are at it")
                    continue
                try:
                    self._commit(empty_table(self.schema.updates), reached, upper, deadline, None, None)
                except (UpperMismatch, LeaseExpired):  # whose writer is registered again
                    self._check_time(deadline, "others were first")
            return Written(self.fetch_upper(), 0, b"", spent.cost)

    def promise(self, upper: int, *, timeout: float | None = None) -> Timeline:
        """See to it that no handover can be before `upper`, and answer what is so then.

        For definite writers whose rows depend on which rendition is the collection. They are about to append up to
        there: a promise is for ever, and readers wait for what is promised.
        """
        self._check_mode("append")
        with self._turn:
            self._promise(at(upper), self._deadline(timeout))
            return self._timeline()

    def close(self) -> None:
        """Write the appends that were accepted, and retire this writer. Idempotent. The data that it wrote stays.

        If an accepted append failed and the caller has not looked at that yet, its error is raised.
        """
        if self._outbox is not None:
            self._outbox.close(self._deadline(None))
        with self._turn:
            self._close_handles()
        if self._outbox is not None:
            self._outbox.raise_failure(copied)

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._outbox is not None:
            self._outbox.mute()
        self.close()

    def _accepted(
        self, updates: object, expected_upper: object, new_upper: object, timeout: float | None, token: bytes | None,
        producer: tuple[str, int] | None, *, copies: bool,
    ) -> Pending:  # fmt: skip
        """An append whose arguments are checked. With `copies` the caller cannot change its updates any more."""
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        token, producer = None if token is None else parse_token(token), self._parse_producer(producer)
        deadline = self._deadline(timeout)
        table = take_over(self.schema, iter([self._parsed(updates, lower, upper, times)]), copies=copies)
        accepted_s = self.client.runtime.monotonic()
        return Pending(table, lower, upper, token, deadline, accepted_s, size_of(table), producer)

    def _settle(self, deadline: Deadline) -> None:
        if self._outbox is not None:
            self._outbox.settle(deadline)
            self._outbox.raise_failure()

    def _append(self, pending: Pending) -> Written:
        table = empty_table(self.schema.updates) if pending.table is None else pending.table
        lower, upper, deadline = pending.lower, pending.upper, pending.deadline
        with Spending() as spent:
            if (doubt := self._doubt_of(pending)) is not None:
                table, _ = coalesced(self.schema, doubt.batch)
                self._commit(table, doubt.batch[0].lower, doubt.batch[-1].upper, deadline, doubt.token, None)
                return Written(upper, 0 if pending.table is None else pending.table.num_rows, doubt.token, spent.cost)
            sent = self._commit(table, lower, upper, deadline, pending.token, pending.producer)
            return Written(upper, table.num_rows, sent, spent.cost)

    def _send_accepted(self, batch: Sequence[Pending]) -> Sequence[Answer]:
        """Carry out accepted appends: all of them together, or none."""
        first, last = batch[0], batch[-1]
        with self._turn, Spending() as spent:
            self._check_time(first.deadline, "appends accepted before it took that long")
            if len(batch) == 1:
                return [cast("Answer", self._append(first))]
            table, counts = coalesced(self.schema, batch)
            token = self.client.runtime.token()
            try:
                self._commit(table, first.lower, last.upper, first.deadline, token, None)
            except (ConstraintViolated, InvalidUsage):  # of one of them; or a handover is in between
                return self._one_by_one(batch)
            except Indeterminate as error:
                self._doubts.append(_Doubt(token, batch))
                return [_in_doubt(pending, len(batch), token, error) for pending in batch]
            return [cast("Answer", Written(last.upper, count, token, spent.cost)) for count in counts]

    def _one_by_one(self, batch: Sequence[Pending]) -> list[Answer]:
        """Carry out accepted appends of which one fails: those before it, and none after it."""
        answers: list[Answer] = []
        for pending in batch:
            try:
                answers += self._send_accepted([pending])
            except PersistError as error:
                rest = batch[len(answers) + 1 :]
                return [*answers, error, *(copied(not_sent(self.collection.shard, error)) for _ in rest)]
        return answers

    def _doubt_of(self, pending: Pending) -> _Doubt | None:
        """The commit that this append was sent in before. SUBTLE: to repeat it decides all of them, together."""
        named = (pending.token, pending.lower, pending.upper)
        for doubt in self._doubts:
            if any((doubt.token, one.lower, one.upper) == named for one in doubt.batch):
                return doubt
        return None


def _in_doubt(pending: Pending, count: int, token: bytes, cause: Indeterminate) -> Indeterminate:
    return Indeterminate(
        f"this append was sent together with {count - 1} others, and it is not known whether they were committed: "
        f"{cause.message}. The same is true of the others",
        **{**cause.fields, "token": token, "lower": pending.lower, "upper": pending.upper},
    )
