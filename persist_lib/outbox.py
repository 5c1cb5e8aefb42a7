"""What a writer has accepted and not sent yet: one append outstanding, and a bounded next one that grows meanwhile.

Appends are sent in the order in which they were accepted, those that follow one another together: with one
compare-and-set. When one fails, so do all that were accepted behind it, for they may build on it; and so does the next
call on the handle, unless somebody has looked at the failure by then. So nothing is written across a gap that its
author does not know of.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass
from itertools import takewhile

from persist_lib.config import Deadline, Runtime
from persist_lib.errors import BufferFull, Indeterminate, LeaseExpired, NotSent, TimedOut
from persist_lib.pending import ROOM_BYTES, Appended, AppendFuture, Batching, Pending, copied

SLICE_S = 0.1
"""How long at a time a thread waits for what is held back to be due."""

Answer = Appended | BaseException
Send = Callable[[Sequence[Pending]], Sequence[Answer]]
"""Commits all of them together. Answers for each: all have results or all have failures."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An append that failed, and the futures from which somebody may have learnt it."""

    error: BaseException
    futures: tuple[AppendFuture, ...]


class Outbox:
    """The appends of one handle on their way. Safe to use from several threads, and from what futures call back.

    `send` is an argument, no field: a handle with something on its way is kept alive by that, and by nothing else.
    """

    def __init__(self, shard: str, runtime: Runtime, most_bytes: int, batching: Batching | None) -> None:
        self._shard, self._runtime = shard, runtime
        self._most_bytes, self._batching = most_bytes, batching
        self._is_closed = self._is_muted = False
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())  # guards everything but the two below
        self._sending = threading.RLock()  # held while a batch is sent
        self._sender: int | None = None
        self._queue: deque[Pending] = deque()
        self._outstanding: Sequence[Pending] = ()
        self._queued_bytes = self._accepted = self._finished = 0
        self._hurried = 0  # of the accepted ones, the first so many are not held back
        self._line: deque[object] = deque()
        self._failure: Failure | None = None
        self._pool: Executor | None = None
        self._is_draining = self._is_ending = False

    def accept(self, pending: Pending, send: Send, *, block: bool) -> AppendFuture:
        """Take it over once there is room. Raises NotSent, BufferFull or TimedOut when it was not taken."""
        if self._is_here():
            self._drain(send)
            if block and not self._has_room(pending):
                self._hurry(send)
        with self._changed:
            self._check()
            if not self._has_room(pending) and not (block and self._is_here()):
                self._stand_in_line(pending, block=block)
            self._queue.append(pending)
            self._queued_bytes += pending.size
            self._accepted += 1
            if self._held_s() <= 0:
                self._changed.notify_all()
            is_idle = self._runtime.background and not self._is_draining
            self._is_draining |= is_idle
        if is_idle:
            self._begin_draining(send)
        elif not self._runtime.background:
            self._drain(send)
        return pending.future

    def settle(self, send: Send, deadline: Deadline) -> None:
        """Send all that was accepted before this call, and wait until it is finished. After TimedOut it goes on."""
        if self._is_here():
            self._hurry(send)
            return
        with self._changed:
            until = self._hurried = self._accepted
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._finished >= until, deadline.remaining_s()):
                raise TimedOut(
                    f"shard {self._shard}: after {deadline.timeout_s:g} s {until - self._finished} appends that were "
                    "accepted before are not finished. They go on, and their futures say how they end. "
                    "This call did nothing else",
                    shard=self._shard, timeout_s=deadline.timeout_s,
                )  # fmt: skip

    def mute(self) -> None:
        """Tell of no failure any more."""
        self._is_muted = True

    def take_failure(self) -> BaseException | None:
        """Why an append failed, unless somebody knows already; from now on somebody does."""
        failure, self._failure = self._failure, None
        if failure is None or self._is_muted or any(future.is_told for future in failure.futures):
            return None
        return failure.error

    def raise_failure(self) -> None:
        """Raise NotSent when an append failed and nobody has looked at that yet; once."""
        if (error := self.take_failure()) is not None:
            raise self._not_sent(error) from error

    def close(self, send: Send, deadline: Deadline) -> None:
        """Accept nothing more and send what was accepted; fail what does not make it in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        try:
            self.settle(send, deadline)
        except TimedOut:
            with self._changed:
                left = self._take_all()
                self._finished += len(left)
                error = self._given_up(len(left), deadline)
                if left:
                    self._failure = Failure(error, tuple(pending.future for pending in left))
            for pending in left:
                pending.future.fail(self._never_sent(error))
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def after_fork_in_child(self) -> None:
        """Begin with nothing: threads, and what is on its way, are the parent's."""
        inherited = [*self._outstanding, *self._queue]
        self._begin()
        for pending in inherited:
            pending.future.disown(
                Indeterminate(
                    f"shard {self._shard}: this append was accepted before the process was forked. The parent sends "
                    "it, and there its future says how it ends",
                    shard=self._shard,
                )
            )

    def _is_here(self) -> bool:
        """Whether this thread must do itself what others would wait for: there is no other, or it is that one."""
        return not self._runtime.background or self._sender == threading.get_ident()

    def _has_room(self, pending: Pending) -> bool:
        return not self._line and self._fits(pending)

    def _fits(self, pending: Pending) -> bool:
        return not self._queue or self._queued_bytes + pending.size <= self._most_bytes

    def _check(self) -> None:
        if self._is_closed:
            raise LeaseExpired(
                f"shard {self._shard}: this writer was closed. This call changed nothing; open a new one",
                id="", shard=self._shard,
            )  # fmt: skip
        self.raise_failure()

    def _stand_in_line(self, pending: Pending, *, block: bool) -> None:
        """Wait for room, first come first served."""
        if not block:
            raise BufferFull(
                f"shard {self._shard}: {self._queued_bytes} bytes wait to be appended, at most {self._most_bytes} may, "
                f"and this is {pending.size} more. Nothing was accepted; try again when some are done",
                shard=self._shard, size=pending.size, waiting=self._queued_bytes, most=self._most_bytes,
            )  # fmt: skip
        place = object()
        self._line.append(place)
        self._changed.notify_all()  # nothing is held back while somebody waits
        try:
            is_its_turn = self._changed.wait_for(
                lambda: self._is_closed or (self._line[0] is place and self._fits(pending)),
                pending.deadline.remaining_s(),
            )
        finally:
            self._line.remove(place)
            self._changed.notify_all()
        self._check()
        if not is_its_turn:
            timeout_s = pending.deadline.timeout_s
            raise TimedOut(
                f"shard {self._shard}: no room for {pending.size} bytes more in {timeout_s:g} s, as what was accepted "
                "before is not written that fast. Nothing was accepted; try again, or with a longer timeout",
                shard=self._shard, timeout_s=timeout_s,
            )  # fmt: skip

    def _held_s(self) -> float:
        """For how long what comes first is still held back."""
        batching = self._batching
        if batching is None or not self._queue or self._line or self._is_ending:
            return 0.0
        is_hurried = self._accepted - len(self._queue) < self._hurried
        data_bytes = self._queued_bytes - len(self._queue) * ROOM_BYTES
        if is_hurried or data_bytes >= batching.bytes or self._queued_bytes >= self._most_bytes:
            return 0.0
        first = self._queue[0]
        held_s = min(batching.age_s, first.deadline.timeout_s / 2)
        return first.accepted_s + held_s - self._runtime.monotonic()

    def _begin_draining(self, send: Send) -> None:
        if self._pool is None:
            self._pool = self._runtime.pool(1, "persist-append")
        if not self._submit(send):
            self._work(send)

    def _work(self, send: Send) -> None:
        """What the thread does, until nothing is left.

        SUBTLE: at the end of the interpreter its threads are waited for, and no new work is taken. So the wait for what
        is held back is cut into slices, each new work: once refused, nothing is held back any more.
        """
        while True:
            self._drain(send)
            with self._changed:
                if not self._queue:
                    self._is_draining = False
                    return
                if (held_s := self._held_s()) > 0:
                    self._changed.wait(min(held_s, SLICE_S))
            if self._submit(send):
                return

    def _submit(self, send: Send) -> bool:
        """Whether a thread does the work. In no context: what is counted there is not for the first caller alone."""
        try:
            if self._pool is not None and not self._is_ending:
                Context().run(self._pool.submit, self._work, send)
                return True
        except RuntimeError:  # the interpreter is ending, or the handle is closed: no work is taken any more
            self._is_ending = True
        return False

    def _hurry(self, send: Send) -> None:
        with self._changed:
            self._hurried = self._accepted
        self._drain(send)

    def _drain(self, send: Send) -> None:
        """Send what is due, here and now."""
        with self._sending:
            outer, self._sender = self._sender, threading.get_ident()
            try:
                while batch := self._take():
                    self._send(batch, send)
            finally:
                self._sender = outer

    def _take(self) -> list[Pending]:
        """The next batch: what comes first, and what may go with it. Nothing when nothing is due."""
        with self._changed:
            if not self._queue or self._held_s() > 0:
                return []
            batch = [self._queue.popleft()]
            while batch[0].token is None and self._queue and batch[-1].is_followed_by(self._queue[0]):
                batch.append(self._queue.popleft())
            self._queued_bytes -= sum(pending.size for pending in batch)
            self._outstanding = batch
            self._changed.notify_all()
            return batch

    def _send(self, batch: Sequence[Pending], send: Send) -> None:
        live = list(takewhile(lambda pending: pending.future.set_running_or_notify_cancel(), batch))
        answers: Sequence[Answer] = ()
        try:
            answers = send(live) if live else ()
        except BaseException as error:
            answers = [error] * len(live)
            if not isinstance(error, Exception):
                raise
        finally:
            self._finish(batch, live, answers)

    def _finish(self, batch: Sequence[Pending], live: Sequence[Pending], answers: Sequence[Answer]) -> None:
        """Tell the futures. What comes behind a failure, or behind one that was cancelled, fails."""
        error = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        failed = list(live) if error is not None else []
        behind = list(batch[len(live) + 1 :])
        queued: list[Pending] = []
        with self._changed:
            if failed or len(live) < len(batch):
                queued = self._take_all()
                behind += queued
                if failed or behind:
                    why = error or self._not_sent("it was cancelled")
                    self._failure = Failure(why, tuple(pending.future for pending in (*failed, *behind)))
        for pending, answer in zip(live, answers, strict=True):
            if isinstance(answer, BaseException):
                pending.future.fail(answer)
            else:
                pending.future.set_result(answer)
        self._give_up(behind, error or "it was cancelled")
        with self._changed:
            self._outstanding = ()
            self._finished += len(batch) + len(queued)
            self._changed.notify_all()

    def _take_all(self) -> list[Pending]:
        """Everything that waits, no longer waiting."""
        left = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        self._changed.notify_all()
        return left

    def _give_up(self, left: Sequence[Pending], why: object) -> None:
        for pending in left:
            error = self._not_sent(why)
            error.__cause__ = why if isinstance(why, BaseException) else None
            pending.future.fail(error)

    def _given_up(self, count: int, deadline: Deadline) -> TimedOut:
        return TimedOut(
            f"shard {self._shard}: this writer was closed, and {count} appends that it had accepted were not sent in "
            f"{deadline.timeout_s:g} s. Nothing of those was written, and nothing will be: append them anew. "
            "What was under way was waited for, and its future says how it ended",
            shard=self._shard, timeout_s=deadline.timeout_s,
        )  # fmt: skip

    def _never_sent(self, why: TimedOut) -> NotSent:
        error = NotSent(
            f"shard {self._shard}: nothing of this was written, as its writer was closed before its turn came. "
            "Append it anew, once those before it are decided",
            shard=self._shard, earlier=copied(why),
        )  # fmt: skip
        error.__cause__ = why
        return error

    def _not_sent(self, why: object) -> NotSent:
        return NotSent(
            f"shard {self._shard}: nothing of this was written, as an append that this handle accepted earlier failed: "
            f"{why}. Decide what to do about that one first",
            shard=self._shard, earlier=copied(why) if isinstance(why, BaseException) else None,
        )  # fmt: skip
