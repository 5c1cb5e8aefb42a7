"""Listening to a collection, across handovers: each update once, at its exact time, before the progress that covers it.

It goes in rounds. A round sees how far the rendition that is the collection now has come, has that promised, and
delivers the updates of all its shards up to there. At a handover the round delivers the difference of both renditions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_lib.catalog.changes import handed_over, updates_between
from persist_lib.errors import PersistError, SchemaChanged, TimedOut
from persist_lib.frontier import Antichain, at
from persist_lib.relation.listen import Listener

if TYPE_CHECKING:
    from persist_lib.catalog.reader import RenditionReader
    from persist_lib.catalog.renditions import Span


class CollectionListen(Listener):
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    _reader: RenditionReader

    def __init__(
        self, reader: RenditionReader, as_of: int, until: Antichain, timeout_s: float | None, *, replace: bool
    ) -> None:
        super().__init__(reader, as_of, until, timeout_s)
        self._replace = replace

    def _keeps(self, _failure: PersistError) -> bool:
        """A round of which nothing was given begins again after any failure."""
        return False

    def _pause(self) -> None:
        span = self._reader.timeline().at(self.frontier.time or 0)
        with suppress(TimedOut):  # then it looks once more
            self._reader.pause(span, self.frontier.time or 0, self._deadline)

    def _fetch(self) -> Iterator[None]:
        """Round by round; one that ends at a handover is followed by another."""
        while (upper := self._reached()) is not None:
            first = self.frontier.time or 0
            timeline = self._reader.timeline(is_known=True)
            before, span = timeline.at(max(first - 1, 0)), timeline.at(first)
            yield from self._step(self._updates(before, span, first, upper), upper)
            if before.command != span.command:
                self._reader.leave(before.rendition)
            if span.end is None or upper < at(span.end):
                return

    def _reached(self) -> Antichain | None:
        """Up to where a round can go now: promised, complete, and under one rendition. None: nowhere yet."""
        while not self._is_done():
            timeline = self._reader.timeline()
            span = timeline.at(self.frontier.time or 0)
            upper = self._reader.upper_of(span).meet(self.until)
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
        return None

    def _updates(self, before: Span, span: Span, first: int, upper: Antichain) -> Iterator[pa.Table]:
        """The updates from the frontier to `upper`, which are all of one rendition, and a handover's at `first`."""
        reader, start = self._reader, first - 1
        deadline = reader.client.runtime.deadline(reader.client.config.timeout_s)
        if before.command != span.command:
            start = first
            try:
                yield from handed_over(reader, before, span, first, deadline)
            except SchemaChanged:
                if not self._replace:
                    raise
                # All rows of the old rendition out, in its columns, and all rows of the new one in, in its columns.
                yield from reader.everything(before, first - 1, first, is_out=True)
                reader.adopt(span)
                yield from reader.everything(span, first, first, is_out=False)
        # Of one that is closed, up to the last time at which anything was written.
        last = max(reader.last_time(span), first - 1) if upper.time is None else upper.time - 1
        if last > start:
            yield from updates_between(reader, start, last, deadline)
