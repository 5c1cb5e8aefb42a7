"""A timeline in YOLO mode: each statement is one append to its table.

Its read time is the greatest upper of its tables, minus 1, and a table that lags is advanced before it is read. So a
read sees what was acknowledged before it began, and nothing can be written at a time that was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.records import CollectionRecord, TimelineRecord
from persist_lib.catalog.renditions import Renditions, Span
from persist_lib.catalog.writer import CollectionWriter, append_on
from persist_lib.errors import Indeterminate, InvalidUsage, SinceViolation, UpperMismatch
from persist_lib.frontier import at
from persist_lib.kernel.columns import at_time
from persist_lib.relation.registration import Named
from persist_lib.relation.row_selection import RowSelection, recast
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import comes_before
from persist_lib.timeline.timeline import AsOf, Line, Sender, Want
from persist_lib.timeline.view import TableSnapshot, View, in_memory, needs_settling, pause


class YoloLine(Line):
    """A timeline without a WAL."""

    def __init__(self, catalog: Catalog, record: TimelineRecord, owner: str) -> None:
        super().__init__(catalog, record, owner)
        self._renditions: dict[str, Renditions] = {}
        self._writers: dict[str, tuple[str, CollectionWriter]] = {}

    def read_time(self, deadline: Deadline) -> int:  # noqa: ARG002 - the other mode waits
        """The greatest upper of all tables, minus 1."""
        self.look()
        return max((self._upper(record) for record in self.tables()), default=0) - 1

    def newest(self, view: View, deadline: Deadline) -> int:
        """The newest time of this table: its own upper decides whether a statement was first."""
        while True:
            self.look()
            view.freshen(self.heads)
            span = view.timeline().last
            upper = view.upper(span)
            if not needs_settling(span, upper):
                self._let_go(view, upper)
                return upper - 1
            if deadline.has_passed():
                raise self.out_of_time(deadline, f"table {view.name!r} is being copied to its new rendition")
            self._advance(view, upper + 1, deadline)

    def contents(self, view: View, as_of: int, wanted: RowSelection, deadline: Deadline) -> pa.Table:  # noqa: ARG002
        return view.contents(view.timeline().last, as_of, wanted)

    def changed(self, view: View, from_: int, to: int, wanted: RowSelection) -> pa.Table | None:
        """What was appended to the newest rendition; None if that was another one before."""
        span = view.timeline().last
        if from_ < span.start:
            return None
        try:
            return view.changed(span, from_, to, wanted)
        except SinceViolation:
            return None

    def least(self, lower: int) -> int:
        """At or beyond the greatest upper of all tables, too."""
        self.look()
        return max([lower, *(self._upper(record) for record in self.tables())])

    def sender(self, changes: Sequence[tuple[View, pa.Table]], name: Named, deadline: Deadline) -> Sender:
        """Appends to the table, if its upper is right after that time and no other rendition followed."""
        ((view, table),) = changes
        lower, time = name.lower.time or 0, name.time
        write, span = self._writer(view), view.timeline().last
        rows = recast(at_time(table, time), view.whole, write.schema)

        def send(doubt: Indeterminate | None) -> bool:
            left_s = deadline.left_s()
            try:
                append_on(write, span.command, rows, lower, time + 1, timeout=left_s, token=name.token)
            except UpperMismatch:
                return doubt is not None and self._is_there(span, name, view, deadline)
            return True

        return send

    def outcome(self, name: Named, table: str | None, deadline: Deadline) -> bool:
        """The commit is one append to a table, which has to be named."""
        if table is None:
            raise InvalidUsage(f"timeline {self.name!r} is in YOLO mode: say which table= the statement was on")
        self.look()
        view = self.view(table)
        return self._is_there(view.timeline().at(name.lower.time or 0), name, view, deadline)

    def _is_there(self, span: Span, name: Named, view: View, deadline: Deadline) -> bool:
        return self.decided(span.rendition.names[0], name, lambda upper: self._advance(view, upper, deadline))

    def complete(self, name: str, upper: int, deadline: Deadline) -> None:
        self.again(lambda: self._advance(self.view(name), upper, deadline), deadline)

    def reset(self) -> None:
        with self.lock:
            super().reset()
            for _, write in self._writers.values():
                write.close()
            self._writers.clear()

    def _snapshot(self, name: str, time: int, asked: AsOf, want: Want, deadline: Deadline) -> TableSnapshot:
        """Advances the table to the read time, if it lags. A client that may only read waits for others to do so."""
        view = self.view(name)
        while True:
            view.freshen(self.heads)
            timeline = view.timeline()
            span = timeline.at(max(time, timeline.since))
            if time < 0:
                wanted = want(view.schema, view.known)
                return in_memory(name, -1, wanted, view.contents(span, -1, wanted), self.client.runtime)
            if time < view.upper(span) and timeline.upper.has_passed(time):
                break
            if self.client.read_only:
                upper = view.complete(timeline)
                if asked.is_newest:
                    time = upper - 1
                    continue
                self.wait_for(name, time, upper, asked, deadline)
            elif deadline.has_passed():
                raise self.out_of_time(deadline, f"table {name!r} does not come up to {time}")
            else:
                self._advance(view, time + 1, deadline)
            self.look()
        if view.reader.since <= at(time):
            with suppress(SinceViolation):  # the reader of a shard may have let go of more than the table's
                found = self.base(view, span, time, want)
                self._let_go(view, view.upper(span))
                return found
        with self.older(name) as old:
            return self.base(old, old.timeline().at(time), time, want)._read_now()

    def _advance(self, view: View, upper: int, deadline: Deadline) -> None:
        self._writer(view).advance_upper(upper, timeout=deadline.left_s())
        pause(deadline) if view.upper(view.timeline().last) < upper else None

    def _let_go(self, view: View, upper: int) -> None:
        view.let_go(self.oldest(upper - 1))

    def _writer(self, view: View) -> CollectionWriter:
        command = view.timeline().last.command
        known = self._writers.get(view.id)
        if known is None or known[0] != command or not comes_before(view.whole, known[1].schema):
            if known is not None:
                known[1].close()
            self._writers[view.id] = known = command, CollectionWriter(self.client, view.record, "ms", None)
        return known[1]

    def _upper(self, record: CollectionRecord) -> int:
        """How far a table has come, as of the last look."""
        renditions = self._renditions.get(record.id)
        if renditions is None:
            renditions = self._renditions[record.id] = Renditions(self.client, record.shard, "ms", record.name)
        self.heads.freshen(record.shard)
        upper = 0
        for span in renditions.fetch(is_known=True).spans[-2:]:
            upper = max(upper, self._reached(span))
        return upper

    def _reached(self, span: Span) -> int:
        uppers = []
        for name in span.rendition.names:
            self.heads.freshen(name)
            uppers.append(self.client.machine(name).state.upper.time)
        if None in uppers or not uppers:
            return span.end or 0  # closed: it is being dropped
        found = min(uppers)  # type: ignore[type-var]
        return found if span.end is None else min(found, span.end)  # type: ignore[return-value,type-var]
