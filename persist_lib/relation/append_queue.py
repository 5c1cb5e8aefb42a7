"""The appends that a writer has accepted and not sent yet: one batch being sent, and a bounded queue behind it.

Appends are sent in the order in which they were accepted. Those that continue one another are sent together, with one
compare-and-set. When one fails, all that were accepted after it fail too, as they may build on it. The next call on the
handle fails as well, unless the caller has looked at the failure by then. So nothing is written across a gap that the
caller does not know of.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, cast

from persist_lib.errors import BufferFull, Indeterminate, LeaseExpired, NotSent, PersistError, TimedOut
from persist_lib.relation.appends import ROOM_BYTES, Appended, AppendFuture, Batching, Pending, copied
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.threads import SLICE_S, Bell, aside, is_ending

LINGER_S = 1.0
"""How long the sending thread waits for more appends. Starting a thread costs about as much as a small append."""

Answer = Appended | BaseException
Send = Callable[[Sequence[Pending]], Sequence[Answer]]
"""Commits all of them together. Returns one answer for each: either all are results or all are errors."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An append that failed, and the futures from which the caller may have learnt it."""

    error: BaseException
    futures: tuple[AppendFuture, ...]


class _Queued(NamedTuple):
    """An accepted append, the function that sends it, and how many appends and bytes were accepted up to and with it.

    One call puts it into the queue. So an interrupt comes either before it is accepted and counted, or after both.
    """

    pending: Pending
    send: Send
    number: int
    total_bytes: int


class Outbox:
    """The appends of one handle on their way. Safe to use from several threads, and from callbacks of futures.

    Each queued append has the `send` of its handle. That reference, and no other, keeps a handle alive while its
    appends are on their way. SUBTLE: an interrupt may come anywhere in `accept`, `settle` and `close`. So they set no
    flag that others rely on: the working thread itself says that it is at work, and an append is unfinished while it is
    queued or outstanding.
    """

    def __init__(
        self, shard: str, runtime: Runtime, most_bytes: int, batching: Batching | None, what: str = ""
    ) -> None:
        self._shard, self._runtime = shard, runtime
        self._what = what or f"shard {shard}"  # whose appends these are, in messages
        self._most_bytes, self._batching = most_bytes, batching
        self._is_closed = self._is_muted = False
        self._begin()

    def _begin(self) -> None:
        self._mutex = threading.Lock()  # guards all but `_sending` and `_sender`; no thread waits while it holds it
        self._bell = Bell(self._mutex)
        self._sending = threading.RLock()  # held while a batch is sent
        self._sender: int | None = None
        self._queue: deque[_Queued] = deque()
        self._outstanding: Sequence[_Queued] = ()
        self._taken = (0, 0)  # appends and bytes that have left the queue
        self._hurried = 0  # this many of the appends, counted from the first accepted, are not held back
        self._line: deque[object] = deque()
        self._failure: Failure | None = None
        self._pool: Executor | None = None
        self._worker: int | None = None  # the working thread; it sets this itself
        self._is_ending = False

    def accept(
        self, make: Callable[[], Pending], size: int, deadline: Deadline, send: Send, *, block: bool
    ) -> AppendFuture:
        """Accept an append of `size` bytes once there is room. It is made then, so that no other comes in between.

        Raises NotSent, BufferFull or TimedOut when it was not accepted, and what `make` raises, which waits for
        nothing, and calls nothing of this.
        """
        if self.is_here():
            self._drain()
            if block and not self._has_room(size):
                self._hurry()
        accepted: Pending | None = None
        with self._mutex:
            self._check()
            if self._has_room(size) or (block and self.is_here()):
                accepted = self._enqueue(make(), send)
        if accepted is None:
            accepted = self._stand_in_line(make, size, deadline, send, block=block)
        self._see_to_it()
        return accepted.future

    def unfinished(self) -> list[Pending]:
        """What was accepted and has not ended, in its order."""
        with self._mutex:
            return [queued.pending for queued in (*self._outstanding, *self._queue)]

    def settle(self, deadline: Deadline) -> None:
        """Send all appends that were accepted before this, and wait until they end. They continue after TimedOut."""
        if self.is_here():
            self._hurry()
            return
        with self._mutex:
            until = self._hurried = self._accepted()[0]
            left = self._unfinished(until)

        def is_finished() -> bool:
            nonlocal left
            left = self._unfinished(until)
            return left == 0

        while left:
            self._see_to_it()
            if not self._bell.wait(is_finished, deadline.remaining_s()) and deadline.has_passed():
                raise TimedOut(
                    f"{self._what}: after {deadline.timeout_s:g} s {left} appends that were accepted before are "
                    "not finished. They continue, and their futures say how they end. This call did nothing else",
                    shard=self._shard, timeout_s=deadline.timeout_s,
                )  # fmt: skip

    def mute(self) -> None:
        self._is_muted = True

    def raise_failure(self, error_of: Callable[[BaseException], BaseException] | None = None) -> None:
        """Raise NotSent (or what `error_of` makes of the failure) if the caller has not looked at it yet; only once."""
        if (failure := self._failure) is None:
            return
        if not (self._is_muted or any(future.is_told for future in failure.futures)):
            error = (error_of or self._not_sent)(failure.error)
            error.__cause__ = failure.error.__cause__ if error_of else failure.error
            self._failure = None  # not earlier. After an interrupt before this, the next call raises it
            raise error
        self._failure = None

    def close(self, deadline: Deadline) -> None:
        """Accept nothing more, and send the accepted appends. Those that are not sent by the deadline fail."""
        self._is_closed = True
        self._bell.ring()
        try:
            self.settle(deadline)
        except TimedOut:
            with self._mutex:
                left = self._take_all()
                error = TimedOut(
                    f"{self._what}: this writer was closed, and {len(left)} appends that it had accepted were not sent "
                    f"in {deadline.timeout_s:g} s. Nothing of those was written, and nothing will be: append them "
                    "again. The appends that were being sent were waited for, and their futures say how they ended",
                    shard=self._shard, timeout_s=deadline.timeout_s,
                )  # fmt: skip
                if left:
                    self._failure = Failure(error, tuple(queued.pending.future for queued in left))
            for queued in left:
                unsent = NotSent(
                    f"{self._what}: nothing of this was written, as its writer was closed before its turn came. "
                    "Append it again, once you know what became of those before it",
                    shard=self._shard, earlier=copied(error),
                )  # fmt: skip
                unsent.__cause__ = error
                queued.pending.future.fail(unsent)
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def after_fork_in_child(self) -> None:
        """Begin empty: the threads, and the appends on their way, belong to the parent."""
        inherited = [*self._outstanding, *self._queue]
        self._begin()
        for queued in inherited:
            queued.pending.future.disown(
                Indeterminate(
                    f"{self._what}: this append was accepted before the process was forked. The parent sends "
                    "it, and there its future says how it ends",
                    shard=self._shard,
                )
            )

    def is_here(self) -> bool:
        """Whether this thread must send by itself, as there is no other thread, or as it is the sending thread."""
        return not self._runtime.background or self._sender == threading.get_ident()

    def _accepted(self) -> tuple[int, int]:
        """How many appends and bytes were accepted so far."""
        return self._queue[-1][2:] if self._queue else self._taken

    def _queued_bytes(self) -> int:
        return self._accepted()[1] - self._taken[1]

    def _unfinished(self, until: int) -> int:
        """How many of the first `until` accepted appends are not finished."""
        first = next(iter(self._outstanding or self._queue), None)
        return 0 if first is None else max(0, until - first.number + 1)

    def _enqueue(self, pending: Pending, send: Send) -> Pending:
        number, total_bytes = self._accepted()
        self._queue.append(_Queued(pending, send, number + 1, total_bytes + pending.size))
        return pending

    def _has_room(self, size: int) -> bool:
        return not self._line and self._fits(size)

    def _fits(self, size: int) -> bool:
        return not self._queue or self._queued_bytes() + size <= self._most_bytes

    def _check(self) -> None:
        if self._is_closed:
            raise LeaseExpired(
                f"{self._what}: this writer was closed. This call changed nothing; open a new one",
                id="", shard=self._shard,
            )  # fmt: skip
        self.raise_failure()

    def _stand_in_line(
        self, make: Callable[[], Pending], size: int, deadline: Deadline, send: Send, *, block: bool
    ) -> Pending:
        """Wait for room, first come first served, and then enqueue the append."""
        if not block:
            with self._mutex:
                waiting = self._queued_bytes()
            raise BufferFull(
                f"{self._what}: {waiting} bytes wait to be appended, at most {self._most_bytes} may, "
                f"and this is {size} more. Nothing was accepted; try again when some are done",
                shard=self._shard, size=size, waiting=waiting, most=self._most_bytes,
            )  # fmt: skip
        place = object()
        accepted: Pending | None = None

        def is_its_turn() -> bool:
            nonlocal accepted
            self._check()
            if self._line[0] is place and self._fits(size):
                accepted = self._enqueue(make(), send)
            return accepted is not None

        try:
            self._line.append(place)
            self._bell.ring()  # nothing is held back while a caller waits for room
            while not self._bell.wait(is_its_turn, deadline.remaining_s()):
                if deadline.has_passed():
                    timeout_s = deadline.timeout_s
                    raise TimedOut(
                        f"{self._what}: no room for {size} bytes more in {timeout_s:g} s, as what was "
                        "accepted before is not written that fast. Nothing was accepted; try again, or with a longer "
                        "timeout",
                        shard=self._shard, timeout_s=timeout_s,
                    )  # fmt: skip
                self._see_to_it()
            return cast("Pending", accepted)
        finally:
            self._line.remove(place)  # first, and by one call, so that an interrupt leaves no place in line
            self._bell.ring()

    def _held_s(self) -> float:
        """For how long the first queued append is still held back."""
        batching = self._batching
        if batching is None or not self._queue or self._line or self._is_ending or self._is_closed:
            return 0.0
        queued_bytes, first = self._queued_bytes(), self._queue[0]
        data_bytes = queued_bytes - len(self._queue) * ROOM_BYTES
        if first.number <= self._hurried or data_bytes >= batching.bytes or queued_bytes >= self._most_bytes:
            return 0.0
        held_s = min(batching.age_s, first.pending.deadline.timeout_s / 2)
        return first.pending.accepted_s + held_s - self._runtime.monotonic()

    def _is_due(self) -> bool:
        return bool(self._queue) and self._held_s() <= 0

    def _see_to_it(self) -> None:
        """Make sure that the queued appends are sent: by the working thread, or else by this one."""
        if not self._runtime.background:
            self._drain()
        elif self._worker is None:
            try:
                aside(self._begin_working)
            except RuntimeError:  # the interpreter is ending, or the handle is closed: the pool takes no more work
                self._hurry()
        else:
            with self._mutex:
                is_news = len(self._queue) == 1 or self._is_due()
            if is_news:
                self._bell.ring()

    def _begin_working(self) -> None:
        with self._mutex:
            pool = self._pool = self._pool or self._runtime.pool(1, "persist-append")
        Context().run(pool.submit, self._work)  # a new context: the first caller is not charged for all that it does

    def _work(self) -> None:
        """The loop of the working thread. It ends when nothing has come for `LINGER_S`.

        The interpreter waits for this thread when it ends. The thread looks for that after each slice of time, and then
        holds nothing back any more.
        """
        with self._mutex:
            if self._worker is not None:
                return
            self._worker = threading.get_ident()
        try:
            until = self._runtime.monotonic() + LINGER_S
            while True:
                self._drain()
                self._is_ending |= is_ending()
                with self._mutex:
                    now, pause_s = self._runtime.monotonic(), SLICE_S
                    if self._queue:
                        until, pause_s = now + LINGER_S, self._held_s()
                    elif self._is_ending or self._is_closed or now >= until:
                        self._worker = None  # under the same lock. The next `accept` then starts another thread
                        return
                if pause_s > 0:
                    self._bell.wait(self._is_due, pause_s)
        finally:
            if self._worker == threading.get_ident():
                self._worker = None

    def _hurry(self) -> None:
        with self._mutex:
            self._hurried = self._accepted()[0]
        self._drain()

    def _drain(self) -> None:
        """Send what is due, in this thread."""
        with self._sending:
            outer, self._sender = self._sender, threading.get_ident()
            try:
                while batch := self._take():
                    self._send(batch)
            finally:
                self._sender = outer

    def _take(self) -> list[_Queued]:
        """Take the next batch: the first queued append, and those that may share its commit. Empty if none is due."""
        with self._mutex:
            if not self._is_due():
                return []
            batch = [self._queue.popleft()]
            while (
                not batch[0].pending.is_alone
                and self._queue
                and batch[-1].pending.is_followed_by(self._queue[0].pending)
            ):
                batch.append(self._queue.popleft())
            self._outstanding, self._taken = batch, batch[-1][2:]
        self._bell.ring()
        return batch

    def _send(self, queued: Sequence[_Queued]) -> None:
        batch = [one.pending for one in queued]
        live = list(takewhile(lambda pending: pending.future.set_running_or_notify_cancel(), batch))
        answers: Sequence[Answer] = ()
        try:
            answers = queued[0].send(live) if live else ()
        except BaseException as error:
            answers = [error] * len(live)
            if not isinstance(error, Exception):
                raise
        finally:
            self._finish(queued, live, answers)

    def _finish(self, batch: Sequence[_Queued], live: Sequence[Pending], answers: Sequence[Answer]) -> None:
        """Set the futures. Appends behind one that failed, or that was cancelled, fail too."""
        error = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        failed = list(live) if error is not None else []
        behind = list(batch[len(live) + 1 :])
        with self._mutex:
            if failed or len(live) < len(batch):
                behind += self._take_all()
                if failed or behind:
                    why = error or self._not_sent("it was cancelled")
                    futures = (*(pending.future for pending in failed), *(one.pending.future for one in behind))
                    self._failure = Failure(why, futures)
        for pending, answer in zip(live, answers, strict=True):
            if isinstance(answer, BaseException):
                pending.future.fail(answer)
            else:
                pending.future.set_result(answer)
        self._give_up(behind, error or "it was cancelled")
        with self._mutex:
            self._outstanding = ()
        self._bell.ring()

    def _take_all(self) -> list[_Queued]:
        left = list(self._queue)
        if left:
            self._taken = left[-1][2:]
        self._queue.clear()
        return left

    def _give_up(self, left: Sequence[_Queued], why: object) -> None:
        for queued in left:
            error = self._not_sent(why)
            error.__cause__ = why if isinstance(why, BaseException) else None
            queued.pending.future.fail(error)

    def _not_sent(self, why: object) -> NotSent:
        return _not_sent(self._shard, why, self._what)


def _not_sent(shard: str, why: object, what: str) -> NotSent:
    """The error for an append behind one that failed."""
    return NotSent(
        f"{what}: nothing of this was written, as an append that this handle accepted earlier failed: {why}. Decide "
        "what to do about that one first",
        shard=shard, earlier=copied(why) if isinstance(why, BaseException) else None,
    )  # fmt: skip


def one_by_one(
    batch: Sequence[Pending], send: Callable[[Pending], Sequence[Answer]], shard: str, what: str
) -> list[Answer]:
    """Carry out accepted appends of which one fails: those before it, and none after it."""
    answers: list[Answer] = []
    for pending in batch:
        try:
            answers += send(pending)
        except PersistError as error:
            behind = _not_sent(shard, error, what)
            return [*answers, error, *(copied(behind) for _ in batch[len(answers) + 1 :])]
    return answers
