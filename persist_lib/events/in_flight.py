"""The events that were accepted and whose effects are not released yet: in order, and bounded in number and bytes.

An interrupt may come anywhere in `accept` and `refuse`, which the main thread calls. So one call of C accepts
an event, and what is counted is read off the events. All the rest is called by threads that get no interrupts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from copy import copy
from dataclasses import dataclass, field

import msgspec

from persist_lib.arguments import shown
from persist_lib.errors import BufferFull, Indeterminate, InvalidUsage, NotReleased, NotSent, PersistError, TimedOut
from persist_lib.events.api import Effect
from persist_lib.events.record import caused
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import SLICE_S, Bell, Future, is_ending


class Done(msgspec.Struct, frozen=True):
    """An event that is durable and computed, and whose effects are released: its id, and those effects."""

    event_id: int
    effects: tuple[Effect, ...]


class EventFuture(Future[Done]):
    """The future of a submitted event. It cannot be cancelled. `event_id` is known at once, and is not durable yet."""

    def __init__(self, event_id: int) -> None:
        super().__init__()
        self.event_id = event_id
        self.set_running_or_notify_cancel()


@dataclass(slots=True, eq=False)
class Submitted:
    """One accepted event.

    Computing and persisting have nothing to do with one another: each is submitted, and done at some later moment. Only
    when both are done are the effects released. `failure` is why one of the two never will be.
    """

    id: int
    payload: bytes
    through_bytes: int
    """How many bytes were accepted up to and with this event, since the loop was opened."""
    future: EventFuture
    computing_done: bool = False
    persisting_submitted: bool = False
    persisting_done: bool = False
    effects: list[Effect] = field(default_factory=list)
    failure: BaseException | None = None
    persisting: futures.Future[None] | None = None
    """What the store answered."""


def inherited(name: str, event_id: int | None = None) -> PersistError:
    """The error in a forked child."""
    if event_id is None:
        return NotSent(f"{name}: this loop belongs to the parent of this process, which continues with it", earlier="")
    return Indeterminate(
        f"{name}: event {event_id} was accepted before the process was forked. The parent continues with it, and there "
        "its future says how it ends",
        event_id=event_id,
    )  # fmt: skip


def release_failed(name: str, effect: Effect, error: BaseException) -> PersistError:
    """The error of the event of which an effect could not be released."""
    return caused(
        NotReleased(
            f"{name}: event {effect.event_id} is in the log, and its effect number {effect.number} could not be "
            f"released: {said(error)}. Nothing after it was released. It may have arrived; the next start releases it "
            "again. If it never can be, say so: `persist events mark`",
            event_id=effect.event_id, number=effect.number,
        ),
        error,
    )  # fmt: skip


def fail_all(
    name: str, left: Sequence[Submitted], failing: BaseException | None, failed: Callable[[], PersistError] | None,
    seconds: float,
) -> PersistError | None:  # fmt: skip
    """Fail the futures of all events that were under way, with what is certain.

    Returns the first one's error; without any, why the loop has failed, and None if it has not. Waits for what
    the store has been given, at most so many seconds: only the store knows what is in the log.
    """
    futures.wait([submitted.persisting for submitted in left if submitted.persisting is not None], seconds)
    if not left:
        return failing if isinstance(failing, PersistError) else None
    why = left[0].failure or failing or RuntimeError("the program has ended")
    first: PersistError | None = None
    for submitted in left:
        error = failed() if failed and first is None else _outcome(name, submitted, why)
        first = first or error
        submitted.future.set_exception(_again(error))
    return first


def _outcome(name: str, submitted: Submitted, why: BaseException) -> PersistError:
    id_, answer = submitted.id, submitted.persisting
    if not submitted.persisting_submitted:
        text = f"{name}: event {id_} was accepted and not written, as the loop has stopped: {said(why)}"
        return caused(NotSent(text, earlier=said(why), event_id=id_), why)
    if (answer is None and submitted.failure is None) or (answer is not None and not answer.done()):
        return Indeterminate(
            f"{name}: the store has not answered whether event {id_} is durable, and the loop has stopped: "
            f"{said(why)}. The next start finds out",
            event_id=id_,
        )
    error = submitted.failure if answer is None else answer.exception()
    if error is None:
        own = submitted.failure
        reason = f"step raised on it: {said(own)}" if own else f"the loop has stopped before: {said(why)}"
        mend = ". Mend the program so that it refuses such an event by an effect" if own else ""
        text = f"{name}: event {id_} is in the log, and its effects are not released, as {reason}{mend}. "
        return caused(NotReleased(f"{text}The next start computes and releases it", event_id=id_), own or why)
    if isinstance(error, PersistError):
        return error
    text = f"{name}: event {id_} may be in the log or not, as writing it failed: {said(error)}. "
    return caused(Indeterminate(f"{text}The next start finds out", event_id=id_), error)


def _again(error: PersistError) -> PersistError:
    """A copy for one more thread that raises it: each raise adds to an exception's traceback."""
    return caused(copy(error), error.__cause__)


def said(error: BaseException) -> str:
    """An error as a part of a sentence."""
    return str(error) if isinstance(error, PersistError) else shown(error)


ROOM_BYTES = 256
"""What an event counts for beside its payload."""


class Flight:
    """`last` is the last event of the log, after which new ids come."""

    def __init__(self, name: str, runtime: Runtime, most_events: int, most_bytes: int, last: int) -> None:
        self._name, self._runtime = name, runtime
        self._most_events, self._most_bytes = most_events, most_bytes
        self._accepted: deque[Submitted] = deque()
        """Not pushed yet. Events go from here to `_under_way`, and leave that when their effects are released."""
        self._under_way: deque[Submitted] = deque()
        self._tail = self._released = Submitted(last, b"", 0, EventFuture(last))
        self._line: deque[object] = deque()
        self.failing: BaseException | None = None
        """Why the loop is stopping by itself."""
        self._is_refusing = self._is_over = False
        self._begin()

    def _begin(self) -> None:
        self._mutex = threading.Lock()  # no thread waits while it holds it
        self._news, self._progress, self._room = Bell(self._mutex), Bell(self._mutex), Bell(self._mutex)

    def after_fork_in_child(self) -> None:
        """The events belong to the parent."""
        left = [*self._under_way, *self._accepted]
        self._begin()
        self.failing = inherited(self._name)
        self._is_refusing = self._is_over = True
        for submitted in left:
            submitted.future.__init__(submitted.id)  # type: ignore[misc] # a thread of the parent may hold its lock
            submitted.future.set_exception(inherited(self._name, submitted.id))

    @property
    def last(self) -> int:
        with self._mutex:
            return self._last().id

    @property
    def released(self) -> int:
        """Up to and with which event all effects are released."""
        return self._released.id

    # --- by submitters ---

    def accept(self, payload: bytes, seconds: float, *, block: bool, waits: bool) -> Submitted:
        """Accept an event when there is room. Unless the caller `waits`, there is always room."""
        with self._mutex:
            self._check()
            has_room = not waits or (not self._line and self._fits(len(payload)))
            accepted = self._append(payload) if has_room else None
        if accepted is None:
            accepted = self._stand_in_line(payload, seconds, block=block)
        self._news.ring()
        return accepted

    def refuse(self) -> None:
        self._is_refusing = True
        self._ring()

    def _ring(self) -> None:
        for bell in (self._news, self._progress, self._room):
            bell.ring()

    def _last(self) -> Submitted:
        return self._accepted[-1] if self._accepted else self._tail

    def _append(self, payload: bytes) -> Submitted:
        last = self._last()
        size = last.through_bytes + len(payload) + ROOM_BYTES
        submitted = Submitted(last.id + 1, payload, size, EventFuture(last.id + 1))
        self._accepted.append(submitted)
        return submitted

    def _fits(self, size: int) -> bool:
        last, released = self._last(), self._released
        count, in_flight = last.id - released.id, last.through_bytes - released.through_bytes
        return not count or (count < self._most_events and in_flight + size + ROOM_BYTES <= self._most_bytes)

    def _check(self) -> None:
        if self.failing is not None:
            text = f"{self._name}: the loop has stopped, so this event was not accepted: {said(self.failing)}"
            raise caused(NotSent(text, earlier=said(self.failing)), self.failing)
        if self._is_refusing:
            raise InvalidUsage(f"{self._name}: the loop was stopped. The event was not accepted; open a new one")

    def _stand_in_line(self, payload: bytes, seconds: float, *, block: bool) -> Submitted:
        """Wait for room, first come first served."""
        if not block:
            waiting = self.last - self.released
            raise BufferFull(
                f"{self._name}: no room for an event of {len(payload)} bytes, as {waiting} events are under way. It "
                "was not accepted; try again when some are done",
                size=len(payload), waiting=waiting, most=self._most_events,
            )  # fmt: skip
        deadline, place, taken = self._runtime.deadline(seconds), object(), list[Submitted]()

        def is_its_turn() -> bool:
            self._check()
            if self._line[0] is place and self._fits(len(payload)):
                taken.append(self._append(payload))
            return bool(taken)

        try:
            self._line.append(place)
            while not self._room.wait(is_its_turn, deadline.remaining_s()):
                if deadline.has_passed():
                    raise TimedOut(
                        f"{self._name}: no room for an event of {len(payload)} bytes in {seconds:g} s, as effects are "
                        "not released that fast. It was not accepted; try again, or with a longer timeout",
                        timeout_s=seconds,
                    )  # fmt: skip
        finally:
            self._line.remove(place)  # first, and by one call, so that an interrupt leaves no place in line
            self._room.ring()
        return taken[0]

    # --- by the threads of the loop ---

    def take(self) -> Sequence[Submitted]:
        """Wait a slice of time for accepted events, and put them under way."""
        self._news.wait(lambda: bool(self._accepted) or self._is_over, SLICE_S)
        with self._mutex:
            batch, self._accepted = self._accepted, deque()
            if batch:
                self._under_way += batch
                self._tail = batch[-1]
        return batch

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be pushed."""
        return self._is_over or self.failing is not None

    def try_push(self, submitted: Submitted) -> bool:
        """Set the first flag of an event, unless the loop is stopping. Both at once: `first` relies on it."""
        with self._mutex:
            submitted.persisting_submitted = self.failing is None
            return submitted.persisting_submitted

    def persisted(self, submitted: Submitted) -> None:
        with self._mutex:
            submitted.persisting_done = True
        self._progress.ring()

    def computed(self, submitted: Submitted) -> None:
        with self._mutex:
            submitted.computing_done = True
        self._progress.ring()

    def fail(self, error: BaseException, submitted: Submitted | None = None) -> None:
        """The event will never be persisted or computed, or not all its effects released; or a mark was not stored."""
        with self._mutex:
            self.failing = self.failing or error
            if submitted is not None:
                submitted.failure = submitted.failure or error
        self._ring()

    def try_first(self) -> tuple[bool, Submitted | None]:
        """Wait a slice of time until it is decided what comes of the first event, and return whether it is.

        Beside it is the event, if its effects may be released; None if they never may, and if no event is to come.
        """
        found: list[Submitted] = []

        def is_decided() -> bool:
            if not self._under_way:
                return not self._accepted and (self._is_refusing or self.failing is not None or is_ending())
            first = self._under_way[0]
            if first.failure is None and first.computing_done and first.persisting_done:
                found.append(first)
            # A failure counts when its event is the first: those before it are carried through.
            is_left = self.failing is not None and not first.persisting_submitted
            return bool(found) or first.failure is not None or is_left

        return self._progress.wait(is_decided, SLICE_S), found[0] if found else None

    def release_first(self) -> None:
        """All effects of the first event are released."""
        with self._mutex:
            self._released = self._under_way.popleft()
        self._room.ring()

    def end(self) -> None:
        """Accept, push and release nothing more."""
        with self._mutex:
            self._is_refusing = self._is_over = True
        self._ring()

    def left(self) -> list[Submitted]:
        """The events whose effects were not all released."""
        with self._mutex:
            return [*self._under_way, *self._accepted]
