"""Following a log: one iterator for what comes, whether it is a shard, a collection, a stream or a pending area."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

from persist_lib.arguments import not_pickled
from persist_lib.errors import Determinate, PersistError, TimedOut
from persist_lib.frontier import Antichain
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.threads import Resource

E = TypeVar("E")


class Follow(Resource, Generic[E]):
    """An iterator of the events from `frontier` to `until`, each of which is delivered once, whatever interrupts it.

    A subclass says what there is (`_fetch`), how to look for more (`_begin`, `_look`, `_pause`), and how to write a
    frontier (`_show`). `name` is what is followed, in messages, and `fields` are those of its errors.

    `_fetch` is a generator. For each event it sets `_due` to it and whether more of its step follows, and yields.
    With the last event of a step, the progress, it sets `_due` and `frontier` in one statement.

    SUBTLE: an interrupt may come after any call. So an event stays in `_due` until instructions that call nothing take
    it from there, and a generator calls nothing between that and its `yield`. A step that broke off begins again at
    `frontier` if nothing of it was delivered; otherwise this iterator cannot continue.
    """

    def __init__(
        self, runtime: Runtime, frontier: Antichain, until: Antichain, timeout_s: float | None, name: str,
        **fields: Any,
    ) -> None:  # fmt: skip
        self.frontier, self.until = frontier, until
        """All updates before `frontier` were made due."""
        self._due: tuple[E, bool] | None = None
        self._runtime, self._timeout_s, self._name, self._fields = runtime, timeout_s, name, fields
        self._steps: Iterator[None] | None = None  # what is left of the last `_fetch`
        self._is_midway = False  # whether more of the last event's step follows
        self._polled: list[E] = []  # events that a `poll` took before it was interrupted
        self._polled_from = frontier
        self._failure: PersistError | None = None
        self._is_closed = False

    @abstractmethod
    def _fetch(self) -> Iterator[None]:
        """Make due, one after the other, the events beyond `frontier` that are there now."""

    @abstractmethod
    def _show(self, frontier: Antichain) -> str:
        """A frontier, for people."""

    @abstractmethod
    def _begin(self, deadline: Deadline) -> None:
        """Begin to wait for more, until `deadline`."""

    @abstractmethod
    def _pause(self) -> None:
        """Wait until there may be more."""

    def _look(self) -> bool:
        """Whether there is an event to deliver, or nothing more can come. Calls `_fetch`."""
        self._steps = self._fetch()
        return self._has_due() or self._is_done()

    def _keeps(self, failure: PersistError) -> bool:  # noqa: ARG002 - subclasses look at it
        """Whether every later call raises this failure of `_fetch` again."""
        return True

    def _is_done(self) -> bool:
        """Whether nothing more is wanted, or nothing more can come."""
        return self._is_closed or self.frontier.is_top() or self.until <= self.frontier

    def close(self) -> None:
        """End it, and the leases that it has. Idempotent. Then nothing more comes."""
        self._is_closed, self._is_midway, self._steps = True, False, None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        if self._polled:
            event = self._polled[0]
            del self._polled[0]
            return event
        while not self._has_due():
            if self._is_done():
                self.close()
                raise StopIteration
            self._wait()
        (event, is_midway), self._due = self._due, None  # type: ignore[misc]
        self._is_midway = is_midway
        return event

    def poll(self) -> list[E]:
        """Return the events that have come by now, without waiting. If it raises, none of them counts as delivered."""
        if not self._polled:
            self._polled_from = self.frontier
        try:
            self._take_due()
            if not self._is_done():
                self._begin(self._runtime.deadline(0.0))
                if self._look():
                    self._take_due()
            if self._is_done():
                self.close()
        except PersistError as failure:
            if self._polled:
                self._failure = failure  # what was taken cannot come again
            self.frontier, self._polled = self._polled_from, []
            raise
        events, self._polled = self._polled, []
        return events

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def _take_due(self) -> None:
        while self._has_due():
            self._polled += (self._due[0],)  # type: ignore[index]
            self._is_midway, self._due = self._due[1], None  # type: ignore[index]

    def _has_due(self) -> bool:
        """Whether there is an event to deliver, of the last `_fetch`."""
        if self._failure is not None:
            raise self._failure
        if self._due is None and self._steps is not None:
            try:
                is_over = next(self._steps, True) is True
            except BaseException as error:
                if self._due is None:
                    self._steps = None
                if isinstance(error, PersistError) and self._keeps(error):
                    self._failure = error
                raise
            if is_over:
                self._steps = None
        if self._due is None and self._steps is None and self._is_midway:
            self._failure = self._cut_short()
            raise self._failure
        return self._due is not None

    def _wait(self) -> None:
        """Look again, until something is due or nothing more can come. The last look is made after the deadline."""
        deadline = self._runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)
        self._begin(deadline)
        while True:
            is_last = deadline.has_passed()
            if self._look():
                return
            if is_last:
                raise TimedOut(
                    f"{self._name}: nothing came after {self._show(self.frontier)} for {deadline.timeout_s:g} s. "
                    "Nothing is lost: iterate on, or listen again as of the time just before it",
                    timeout_s=deadline.timeout_s, frontier=self.frontier, **self._fields,
                )  # fmt: skip
            self._pause()

    def _cut_short(self) -> Determinate:
        return Determinate(
            f"{self._name}: listening was interrupted after a part of a step was delivered. Drop what came after the "
            f"progress to {self._show(self.frontier)}, and listen again as of the time just before it",
            frontier=self.frontier, **self._fields,
        )  # fmt: skip
