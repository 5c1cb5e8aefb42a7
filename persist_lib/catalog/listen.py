"""Listening to a collection, across handovers: each update once, at its exact time, before the progress that covers it.

It goes in rounds. A round sees how far the rendition that is the collection now has come, has that promised, and
delivers the updates of all its shards up to there. At a handover the round delivers the difference of both renditions.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from persist_lib.catalog.changes import handed_over, updates_between
from persist_lib.convert.times import shown_times
from persist_lib.errors import Determinate, SchemaChanged
from persist_lib.frontier import Antichain, at
from persist_lib.relation.listen import Event, EventIterator, Progress, Updates

if TYPE_CHECKING:
    from persist_lib.catalog.reader import CollectionReader
    from persist_lib.catalog.renditions import Span


class CollectionListen(EventIterator):
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    def __init__(
        self, reader: CollectionReader, as_of: int, until: Antichain, timeout_s: float | None, *, replace: bool
    ) -> None:
        super().__init__(as_of, until, timeout_s)
        self._reader, self._replace = reader, replace

    @property
    def schema(self) -> object:
        """The schema of the updates that come; after a handover with `replace` it is the new one."""
        return self._reader.schema

    def close(self) -> None:
        """End the listener's lease. Idempotent."""
        self._reader.close()

    def _let_go(self) -> None:
        if self.frontier.time is not None:
            self._reader.let_go(max(0, self.frontier.time - 1))

    def _cut_short(self) -> Determinate:
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

    def _look(self) -> None:
        """Each round reads how far it has come."""

    def _next_round(self) -> Generator[None, None, None] | None:
        return None if (upper := self._reached()) is None else self._updates_to(upper)

    def _wait(self) -> Generator[None, None, None]:
        deadline = self._deadline(self._reader.client.runtime)
        while (upper := self._reached()) is None:
            if deadline.has_passed():
                shown = self._reader.schema.show(self.frontier)
                raise self._nothing_came(f"collection {self._reader.name!r}", shown, deadline)
            self._reader.pause(self._span(), self.frontier.time or 0, deadline)
        return self._updates_to(upper)

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
