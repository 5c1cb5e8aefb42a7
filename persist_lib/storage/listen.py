"""Listening to a collection, across handovers: each update once, at its exact time, before the progress that covers it.

It goes in rounds. A round sees how far the rendition that is the collection now has come, has that promised, and
delivers the updates of all its shards up to there. At a handover the round delivers the difference of both renditions.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.errors import Determinate, PersistError, SchemaChanged, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.relation.listen import Event, Progress, Updates
from persist_lib.storage.changes import handed_over, updates_between

if TYPE_CHECKING:
    from persist_lib.storage.reader import CollectionReader
    from persist_lib.storage.renditions import Span


class CollectionListen:
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    def __init__(
        self, reader: CollectionReader, as_of: int, until: Antichain, timeout_s: float | None, *, replace: bool
    ) -> None:
        self._reader, self._until, self._timeout_s, self._replace = reader, until, timeout_s, replace
        self.frontier = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._round: Generator[None, None, None] | None = None
        self._due: Event | None = None
        self._is_midway = False
        self._polled: list[Event] = []
        self._failure: PersistError | None = None

    @property
    def schema(self) -> object:
        """The schema of the updates that come; after a handover with `replace` it is the new one."""
        return self._reader.schema

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._polled:
            return self._polled.pop(0)
        while not self._has_due():
            if self._is_done():
                self.close()
                raise StopIteration
            self._let_go()
            self._begin(self._wait())
        self._is_midway = isinstance(self._due, Updates)
        event, self._due = self._due, None  # SUBTLE: no call from here on, see `_has_due`
        return event  # type: ignore[return-value]

    def poll(self) -> list[Event]:
        """Return the events that have come by now, without waiting. If it raises, none of them counts as delivered."""
        if not self._polled:
            self._polled_from = self.frontier
        try:
            while self._has_due() or (not self._is_done() and self._begin(self._reached())):
                if self._due is not None:
                    self._is_midway = isinstance(self._due, Updates)
                    self._polled += (self._due,)
                    self._due = None
        except PersistError:
            self.frontier, self._polled = self._polled_from, []
            self._round = self._due = self._failure = None
            self._is_midway = False
            raise
        self._let_go()
        events, self._polled = self._polled, []
        return events

    def close(self) -> None:
        """End the listener's lease. Idempotent."""
        self._reader.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, upper: Antichain | None) -> bool:
        """Begin the round up to `upper`, if it is one."""
        if upper is not None:
            self._round = self._updates_to(upper)
        return upper is not None

    def _has_due(self) -> bool:
        """Whether the round that is under way has an event to deliver.

        SUBTLE: an interrupt may come after any call, and each event must be delivered once. So an event is kept in
        `_due` until it is taken. A round that broke off after a part of its updates was delivered is a failure.
        """
        if self._failure is not None:
            raise self._failure
        if self._due is None and self._round is not None:
            try:
                next(self._round)
            except StopIteration:
                self._round = None
            except BaseException as error:
                self._round = None
                if isinstance(error, PersistError) and self._is_midway and self._due is None:
                    self._failure = self._midway()
                    raise self._failure from error
                raise
        if self._due is None and self._round is None and self._is_midway:  # an interrupt
            self._failure = self._midway()
            raise self._failure
        return self._due is not None

    def _let_go(self) -> None:
        """Give up the history that was delivered, at the next tick."""
        if self.frontier.time is not None:
            self._reader.let_go(max(0, self.frontier.time - 1))

    def _is_done(self) -> bool:
        return self.frontier.is_top() or self._until <= self.frontier

    def _midway(self) -> Determinate:
        show = self._reader.schema.show
        return Determinate(
            f"collection {self._reader.name!r}: listening ended after a part of the updates from {show(self.frontier)} "
            "on was delivered. Drop the updates at or after that, and listen again from there",
            frontier=self.frontier, collection=self._reader.name,
        )  # fmt: skip

    def _span(self) -> Span:
        """The span at the frontier; as far as is promised."""
        return self._reader.timeline().at(self.frontier.time or 0)

    def _reached(self) -> Antichain | None:
        """Up to where a round can go now: promised, complete, and under one rendition. None: nowhere yet."""
        while True:
            timeline = self._reader.timeline()
            span = timeline.at(self.frontier.time or 0)
            upper = self._reader.upper_of(span).meet(self._until)
            if span.end is not None:
                upper = upper.meet(at(span.end))
            if upper.is_top() and not timeline.is_closed():
                # Closed for writing, but never promised to the end: a handover may follow. Deliver what was written.
                upper = at(self._reader.last_time(span) + 1)
            if self._reader.client.read_only:  # others promise
                upper = upper.meet(timeline.upper)
            if upper <= self.frontier:
                return None
            if upper <= timeline.upper:
                return upper
            self._reader.promise(upper, self._reader.client.runtime.deadline(self._reader.client.config.timeout_s))

    def _wait(self) -> Antichain:
        seconds = float("inf") if self._timeout_s is None else self._timeout_s
        deadline = self._reader.client.runtime.deadline(seconds)
        while (upper := self._reached()) is None:
            if deadline.has_passed():
                raise TimedOut(
                    f"collection {self._reader.name!r}: nothing came after {self._reader.schema.show(self.frontier)} "
                    f"for {deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen again from there",
                    timeout_s=deadline.timeout_s, frontier=self.frontier,
                )  # fmt: skip
            self._reader.pause(self._span(), self.frontier.time or 0, deadline)
        return upper

    def _updates_to(self, upper: Antichain) -> Generator[None, None, None]:
        """Make due the updates from the frontier to `upper`, which are all of one rendition, and the progress there."""
        reader, first = self._reader, self.frontier.time or 0
        deadline = reader.client.runtime.deadline(reader.client.config.timeout_s)
        timeline = reader.timeline()
        before, span = timeline.at(first - 1), timeline.at(first)
        is_handover = before.command != span.command
        if is_handover:
            try:
                for table in handed_over(reader, before, span, first, deadline):
                    self._due = Updates(shown_times(reader.schema, table))
                    yield
            except SchemaChanged:
                if not self._replace:
                    raise
                for updates in self._replaced(before, span, first):
                    self._due = updates
                    yield
        start, last = first if is_handover else first - 1, self._last(upper)
        if last > start:
            for table in updates_between(reader, start, last, deadline):
                self._due = Updates(shown_times(reader.schema, table))
                yield
        progress = Progress(upper)
        self._due, self.frontier = progress, upper  # SUBTLE: an interrupt leaves both set, or neither
        yield
        if is_handover:
            reader.leave(before.rendition)

    def _last(self, upper: Antichain) -> int:
        """The last time before `upper`; of one that is closed, the last at which anything was written."""
        if upper.time is not None:
            return upper.time - 1
        return max(self._reader.last_time(self._span()), (self.frontier.time or 1) - 1)

    def _replaced(self, before: Span, span: Span, time: int) -> Iterator[Event]:
        """All rows of the old rendition out, in its columns, and all rows of the new one in, in its columns."""
        for out in self._reader.everything(before, time - 1, time, is_out=True):
            yield Updates(out)
        self._reader.adopt(span)
        for in_ in self._reader.everything(span, time, time, is_out=False):
            yield Updates(in_)
