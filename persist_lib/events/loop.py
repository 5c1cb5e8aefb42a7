"""The event loop: no effect is released before the event that caused it is durable.

Three threads push each event forward. None of them relies on more than the flags of the events:

    submit ──▶ accepted ──▶ pushing ──▶ the store, which persists      ──▶ persisting_done ┐
                               └──────▶ computing, one after the other ──▶ computing_done  ┴─▶ releasing, in order
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self

from persist_lib.arguments import LONGEST_S, parse_bytes, parse_flag, parse_integer, parse_number, parse_seconds, shown
from persist_lib.errors import InvalidUsage, PersistError, TimedOut
from persist_lib.events.api import Input, Program, State, Store, Writer, compute, encode_snapshot
from persist_lib.events.in_flight import Done, EventFuture, Flight, Submitted, fail_all, release_failed
from persist_lib.events.log import write_released
from persist_lib.events.migrate import Progress, quiet
from persist_lib.events.recovery import begin, take
from persist_lib.events.store import name_of, open_store
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Bell, Flag, aside


class Checkpoint:
    """The mark and the snapshots of one loop. `tick` is called by one thread, `offer` by another.

    `failed` is called with a failure, which may be in any thread: the writer takes nothing more after it.
    """

    def __init__(
        self, writer: Writer, marked: int, newest: int, every_s: float, failed: Callable[[PersistError], None]
    ) -> None:
        self._writer, self._marked, self.newest = writer, marked, newest
        self._every_s, self._next_s, self._failed = every_s, 0.0, failed
        self._offered: tuple[int, bytes] | None = None  # the event, and the state after it as it is stored

    def is_due(self, event_id: int, every: int) -> bool:
        """Whether the state after this event is to be offered."""
        return self._offered is None and event_id - self.newest >= every

    def offer(self, event_id: int, data: bytes) -> None:
        """Store this snapshot as soon as the mark has come so far."""
        self._offered, self.newest = (event_id, data), event_id

    def tick(self, released: int, now_s: float) -> None:
        """Store that the effects up to and with this event are released, if that is due."""
        if released > self._marked and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self.keep(released)

    def keep(self, released: int) -> None:
        """Store that now, and the snapshot that waits for it."""
        try:
            if released > self._marked:
                write_released(self._writer, released).add_done_callback(self._look)
                self._marked = released
            if (snapshot := self._offered) is not None and snapshot[0] <= self._marked:
                self._writer.write_snapshot(*snapshot).add_done_callback(self._look)
                self._offered = None
        except PersistError as error:
            self._failed(error)

    def _look(self, answer: Future[None]) -> None:
        error = answer.exception()
        if isinstance(error, PersistError):
            self._failed(error)


log = logging.getLogger("persist.events")
MOST_EVENTS = 1_024
MOST_BYTES = 64 << 20
MARK_EVERY_S = 0.2
TIMEOUT_S = 60.0


class Loop(Generic[State]):
    """A program that runs on an event log. Opening it replays the log; `submit` adds an event; `stop` ends it.

    `store` is where the log continues: a store, or its specifier. With a `source`, the log is moved from there first,
    and continues in the store alone; or with `both` in both, and an event is durable when both have it. `progress` is
    called with counts of events while a log is moved.

    At most `most_events` events, and `most_bytes` bytes of them, are under way: accepted, and their effects not
    released. How far effects are released is stored at most every `mark_every_s` seconds; a start after a crash
    releases again what was released since. `timeout_s` is how long calls wait if they do not say how long.

    Safe to use from several threads. Raises at opening: Refused for a log that continues elsewhere, Diverged for two
    stores with different logs, HistoryRegressed for a log that has lost events, NotReleased for an event that
    cannot be computed or an effect that cannot be released, and what the store raises.
    """

    def __init__(
        self,
        store: Store | str,
        program: Program[State],
        *,
        source: Store | str | None = None,
        both: bool = False,
        most_events: int = MOST_EVENTS,
        most_bytes: int = MOST_BYTES,
        mark_every_s: float = MARK_EVERY_S,
        timeout_s: float = TIMEOUT_S,
        progress: Progress = quiet,
        runtime: Runtime | None = None,
    ) -> None:
        bounds = parse_integer(most_events, "most_events", 1), parse_integer(most_bytes, "most_bytes", 1)
        every_s = parse_number(mark_every_s, "mark_every_s", 0.0, LONGEST_S)
        self._timeout_s = parse_seconds(timeout_s, "timeout_s")
        self._runtime = runtime or Runtime()
        if not self._runtime.background:
            raise InvalidUsage("the event loop works in threads, so its runtime must allow background work")
        if not isinstance(program, Program):
            raise InvalidUsage(f"program must be an events.Program: got {shown(program)}")
        self._program, both = program, parse_flag(both, "both")
        with ExitStack() as opened:
            to, origin = _opened(opened, store), None if source is None else _opened(opened, source)
            self.name = name_of(to)
            self._writer, held = take(to, origin, both=both, progress=progress)
            opened.push(held)
            with to.reader() as reader:
                started = begin(program, reader, self._writer, self.name)
            self._opened = opened.pop_all()
        self._state = started.state
        self._flight = Flight(self.name, self._runtime, *bounds, started.last)
        self._checkpoint = Checkpoint(self._writer, started.last, started.snapshot, every_s, self._flight.fail)
        self._computing: SimpleQueue[Submitted | None] = SimpleQueue()
        self._failure: PersistError | None = None
        self._is_raised = False
        self._releaser: int | None = None
        self._pushed, self._is_ended = Flag(), False
        self._end_lock = threading.Lock()
        self._ending = Bell(self._end_lock)
        enrol(self, Stage.HANDLES)
        self._pool = self._runtime.pool(3, "persist-loop")
        try:
            aside(self._start)
        except BaseException:
            self._flight.refuse()  # an interrupt: the threads start nevertheless, find this, and let go of the store
            raise

    def _start(self) -> None:
        try:
            for work in (self._push, self._compute, self._release):
                self._pool.submit(work)
        except BaseException:  # there is no room for one more thread
            self._flight.end()
            self._computing.put(None)
            self._pool.shutdown(wait=False)
            self._opened.close()
            raise

    def after_fork_in_child(self) -> None:
        """The parent's loop continues; this process has none."""
        self._flight.after_fork_in_child()
        self._end_lock = threading.Lock()
        self._ending = Bell(self._end_lock)
        self._is_raised = self._is_ended = True

    @property
    def accepted(self) -> int:
        """The id of the event that was accepted last; 0 before the first."""
        return self._flight.last

    @property
    def released(self) -> int:
        """Up to and with which event all effects are released."""
        return self._flight.released

    @property
    def failure(self) -> PersistError | None:
        """Why the loop has stopped by itself; None while it runs, and after a graceful stop."""
        return self._failure

    def submit(
        self, event: bytes | bytearray | memoryview, *, block: bool = True, timeout: float | None = None
    ) -> EventFuture:
        """Accept an event and return its future, which resolves when it is durable and its effects are released.

        Waits for room, at most `timeout` seconds (None: the loop's `timeout_s`). Raises TimedOut, and without `block`
        BufferFull, when there is none; NotSent when the loop has stopped by itself, and InvalidUsage after `stop`. In
        each of these cases the event was not accepted.

        The future raises NotReleased when the loop stopped after the event was durable: the next start releases its
        effects. It raises NotSent, or the store's own error, when the event is not in the log; and Indeterminate when
        that is not known. Events have no tokens: a program that must not apply one twice finds its own id in them.

        `release` may submit events too, which never wait for room; waiting for their futures there would wait for ever.
        """
        payload = bytes(event) if isinstance(event, (bytearray, memoryview)) else parse_bytes(event, "event")
        seconds = self._timeout_s if timeout is None else parse_seconds(timeout)
        waits = not self._is_releasing()
        return self._flight.accept(payload, seconds, block=parse_flag(block, "block"), waits=waits).future

    def stop(self, timeout: float | None = None) -> None:
        """Finish what was accepted, take no more, store the mark and a snapshot, and let go of the store. Idempotent.

        Raises TimedOut after `timeout` seconds (None: the loop's `timeout_s`): it continues, and can be waited for
        again. Raises, once, why the loop had stopped by itself. Called by `release`, which it cannot wait for, it only
        takes no more events.
        """
        deadline = self._runtime.deadline(self._timeout_s if timeout is None else parse_seconds(timeout))
        self._flight.refuse()
        if self._is_releasing():
            return
        while not self._ending.wait(lambda: self._is_ended, deadline.remaining_s()):
            if deadline.has_passed():
                left = self.accepted - self.released
                raise TimedOut(
                    f"{self.name}: after {deadline.timeout_s:g} s the effects of {left} accepted events are not all "
                    "released. It continues; call stop again to wait for them",
                    timeout_s=deadline.timeout_s,
                )  # fmt: skip
        if self._failure is not None and not self._is_raised:
            self._is_raised = True
            raise self._failure

    def _is_releasing(self) -> bool:
        """Whether this is the thread that calls `release`."""
        return self._releaser == threading.get_ident()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.stop()
        except PersistError:
            if error is None:
                raise

    # --- the three threads, which get no interrupts ---

    def _push(self) -> None:
        """Submit each accepted event for persisting and for computing, until one fails or all is done."""
        try:
            while not self._flight.is_over:
                for submitted in self._flight.take():
                    self._submit(submitted)
        finally:
            self._pushed.set()

    def _submit(self, submitted: Submitted) -> None:
        if not self._flight.try_push(submitted):
            return
        try:
            submitted.persisting = self._writer.write(submitted.id, submitted.payload)
        except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
            self._flight.fail(error, submitted)
            return
        self._computing.put(submitted)
        submitted.persisting.add_done_callback(partial(self._persisted, submitted))

    def _persisted(self, submitted: Submitted, answer: futures.Future[None]) -> None:
        error = answer.exception()
        if error is None:
            self._flight.persisted(submitted)
        else:
            self._flight.fail(error, submitted)

    def _compute(self) -> None:
        """Compute one event after the other. After one that failed, the state is not one to continue with."""
        while (submitted := self._computing.get()) is not None:
            try:
                event = Input(submitted.id, submitted.payload)
                self._state, submitted.effects = compute(self._program, self._state, event)
            except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
                self._flight.fail(error, submitted)
                return
            self._offer_snapshot(submitted.id, self._program.snapshot_every)
            self._flight.computed(submitted)

    def _offer_snapshot(self, event_id: int, every: int) -> None:
        if self._program.encode is None or not self._checkpoint.is_due(event_id, every):
            return
        try:
            # Now, and not when it is stored, as the next step may change this very object.
            self._checkpoint.offer(event_id, encode_snapshot(self._program, self._state))
        except Exception:
            log.exception("%s: no snapshot of the state after event %d, as encode raised", self.name, event_id)

    def _release(self) -> None:
        """Release effects in the order of events, until one fails or all is done."""
        self._releaser = threading.get_ident()
        failed: Callable[[], PersistError] | None = None
        try:
            while True:
                is_decided, submitted = self._flight.try_first()
                if submitted is not None:
                    failed = self._release_one(submitted)
                elif is_decided:
                    break
                self._checkpoint.tick(self.released, self._runtime.monotonic())
            self._end(failed)
        except Exception as error:  # of letting go of the store
            log.exception("%s: could not end as it should", self.name)
            self._failure = self._failure or (error if isinstance(error, PersistError) else None)
        finally:
            self._pool.shutdown(wait=False)
            with self._end_lock:
                self._is_ended = True
            self._ending.ring()

    def _release_one(self, submitted: Submitted) -> Callable[[], PersistError] | None:
        """Release the effects of one event, and tell its submitter. Returns what makes the error, if one failed."""
        for effect in submitted.effects:
            try:
                self._program.release(effect)
            except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
                self._flight.fail(error, submitted)
                return partial(release_failed, self.name, effect, error)
        self._flight.release_first()
        submitted.future.set_result(Done(submitted.id, tuple(submitted.effects)))
        return None

    def _end(self, failed: Callable[[], PersistError] | None) -> None:
        self._flight.end()
        self._pushed.wait(self._timeout_s)
        self._computing.put(None)
        left = self._flight.left()
        self._failure = fail_all(self.name, left, self._flight.failing, failed, self._timeout_s)
        if self._failure is None:
            self._offer_snapshot(self.released, 1)
        self._checkpoint.keep(self.released)
        self._opened.close()


def _opened(held: ExitStack, store: Store | str) -> Store:
    return held.enter_context(open_store(store)) if isinstance(store, str) else store
