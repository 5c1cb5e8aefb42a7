"""A timeline in WAL mode: a transaction over any of its tables is one append to its WAL.

A table's logical upper is the WAL's. What a table has not got yet, its readers take from the WAL.
SUBTLE: a reader first holds the WAL's since, and then reads a table's upper. The WAL keeps all that is not in its
table, so nothing is missed in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.records import HOLD, LAYER, TimelineRecord
from persist_lib.catalog.renditions import Span
from persist_lib.catalog.wal import DROPPED, EVOLVED, SCHEMA, wal_shard
from persist_lib.errors import Indeterminate, LeaseExpired, SinceViolation, UpperMismatch
from persist_lib.format.predicate import Where
from persist_lib.frontier import at
from persist_lib.relation.changes import Changes, changes_known
from persist_lib.relation.conversions import selected
from persist_lib.relation.held import kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.reader_lease import too_early
from persist_lib.relation.registration import Named
from persist_lib.relation.row_selection import RowSelection, summed
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF
from persist_lib.shard.outcomes import Verdict, forgotten
from persist_lib.timeline import wal_apply
from persist_lib.timeline.timeline import AsOf, Line, Sender, Want
from persist_lib.timeline.view import TableSnapshot, View, in_memory, needs_settling, pause
from persist_lib.timeline.wal_cache import Entry, Tail, encoded, entries_of

COLUMNS = [*SCHEMA.names, DIFF]
ROUND_BYTES = 8 << 20
"""How much of the WAL is added up at once for a read."""


class Entries:
    """Rows of the WAL of one table, in order, without its marks: from memory, and before that from the WAL itself."""

    def __init__(self, table: str, older: Changes | None, newer: list[Entry]) -> None:
        self._table, self._older, self._newer = table, older, newer

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self._older is not None or any(not entry.is_mark for entry in self._newer)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self.all() if not entry.is_mark)

    def all(self) -> Iterator[Entry]:
        """The same with marks. What is read from the WAL is not kept."""
        if self._older is not None:
            where = Where.of(SCHEMA.data, pc.field("table") == self._table)
            for table in selected(self._older, COLUMNS, where):
                yield from entries_of(table)
        yield from self._newer

    def has_break(self) -> bool:
        """Whether the table became another one, or was dropped."""
        return any(entry.is_break for entry in self.all())


class WalLine(Line):
    """A timeline with a WAL. `upper` is the WAL's, as of the last look.

    What is in the WAL from `since` on can be read by this process. All rows up to `floor` are in their tables.
    """

    def __init__(self, catalog: Catalog, record: TimelineRecord, owner: str) -> None:
        super().__init__(catalog, record, owner)
        self.shard = wal_shard(record.id)
        self.tail = Tail()
        self.upper = self.since = self.floor = self._loaded = 0
        self._reader: ReadHandle | None = None
        self._writer: WriteHandle | None = None
        self.gone: set[str] = set()

    def look(self) -> None:
        """Ask for the newest seqnos of the timeline's shards, and read what is new in the WAL."""
        with self.lock:
            if self._reader is None:
                self._register()
            super().look()
            self.heads.freshen(self.shard)
            self._load()

    def read_time(self, deadline: Deadline) -> int:
        self.again(self.look, deadline)
        return self.upper - 1

    def newest(self, view: View, deadline: Deadline) -> int:  # noqa: ARG002 - the other mode asks the table
        """The newest time of the WAL, whatever is in the table itself."""
        return self.read_time(deadline)

    def contents(self, view: View, as_of: int, wanted: RowSelection, deadline: Deadline) -> pa.Table:
        """What the table has, and what the WAL has beyond it."""
        return self._read(view, as_of, lambda *_: wanted, deadline)[1]

    def changed(self, view: View, from_: int, to: int, wanted: RowSelection) -> pa.Table | None:
        """What the WAL has of it; None where the table became another one, or the tail begins later."""
        if from_ < self.since or (entries := self.entries(view.id, from_, to)).has_break():
            return None
        return summed(wanted.schema, *_rows(entries, wanted))

    def sender(self, changes: Sequence[tuple[View, pa.Table]], name: Named, deadline: Deadline) -> Sender:
        """Appends to the WAL, if its upper is right after that time: one compare-and-set."""
        lower, time = name.lower.time or 0, name.time
        rows = [
            (time, view.id, chunk, data, time, 1)
            for view, table in changes
            for chunk, data in enumerate(encoded(table, view.whole))
        ]
        columns = list(zip(*rows, strict=True))
        updates = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA.updates, strict=True)], SCHEMA.updates)
        write = self.writer()

        def send(_doubt: Indeterminate | None) -> bool:
            try:
                write.compare_and_append(updates, lower, time + 1, timeout=deadline.left_s(), token=name.token)
            except UpperMismatch:  # for certain, as the token tells
                with self.lock:
                    self._load()
                return False
            return True

        return send

    def outcome(self, name: Named, table: str | None, deadline: Deadline) -> bool:
        """The commit is one append to the WAL; of a table that joined the timeline it may be one to it from before."""
        before = None if table is None else self._before_joining(table, name)
        if before is not None and before.seqno is not None:
            return True
        write = self.writer()
        if self.decided(self.shard, name, lambda upper: write.advance_upper(upper, timeout=deadline.left_s())):
            return True
        if before is not None and before.answer == "unknown":
            raise forgotten(f"table {table!r}", name.token, before)
        return False

    def _before_joining(self, table: str, name: Named) -> Verdict | None:
        """What became of an append by a table's shards; None for one that was on the timeline from the beginning on.

        They take nothing from others any more, so what is open there is open for ever, or one to the WAL.
        """
        self.look()
        view = self.view(table)
        timeline = view.timeline()
        rendition = timeline.at(max(name.lower.time or 0, timeline.since)).rendition
        if not (rendition.places or view.record.epoch):
            return None
        return self.client.judge_append(rendition.names[0], *name)

    def complete(self, name: str, upper: int, deadline: Deadline) -> None:  # noqa: ARG002 - the WAL is that of all
        """Advance the WAL, and never a table: what is definite and comes later would count as covered, and be lost."""
        self.writer().advance_upper(upper, timeout=deadline.left_s())

    def entries(self, table: str, after: int, to: int) -> Entries:
        """The rows of a table with times in `(after, to]`. Raises SinceViolation where the WAL has given up some."""
        with self.lock:
            older, start = None, min(self.tail.start, to)
            if after < start:
                reader = self._reader or self._register()
                older = changes_known(reader, after, start)
            return Entries(table, older, self.tail.of(table, max(after, start), to))

    def lacking(self, view: View, span: Span, to: int) -> tuple[int, Entries]:
        """The upper of a rendition, and the rows up to a time that the WAL has and the rendition does not.

        Rows up to `floor` are in their tables, and may be gone from the WAL. But this process may know a table
        as it was before that: then it is read again.
        """
        with self.lock:
            upper = view.upper(span)
            if upper <= self.floor and view.checked < self.floor:
                view.fetch()
                view.checked, upper = self.floor, view.upper(span)
            return upper, self.entries(view.id, max(upper - 1, self.floor), to)

    def settled(self, view: View, as_of: int, deadline: Deadline) -> tuple[Span, int, Entries]:
        """The span that covers a time, the upper of its rendition, which can be read, and what the WAL has beyond it.

        All of it at once, as entries go from the tail when upper moves.
        """
        while True:
            with self.lock:
                span = view.timeline().at(as_of)
                upper, entries = self.lacking(view, span, as_of)
                if as_of < upper or not needs_settling(span, upper):
                    return span, upper, entries
            self._catch_up(view, as_of, upper, deadline)

    def writer(self) -> WriteHandle:
        if self._writer is None:
            self._writer = self.client.open_writer(self.shard, SCHEMA, layer=LAYER)
        return self._writer

    def reset(self) -> None:
        """Give up what this process holds, and what it knows of the WAL."""
        with self.lock:
            super().reset()
            self.tail.begin(0)
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _register(self) -> ReadHandle:
        self._reader = self.client.open_reader(self.shard, SCHEMA, purpose=self.owner or "tables")
        self.since = self.floor = self._loaded = self._reader.since.time or 0
        self.tail.begin(self._loaded)
        return self._reader

    def _load(self) -> None:
        """Read what is new in the state of the WAL that this process knows."""
        reader = self._reader or self._register()
        if reader.read_only and at(self._loaded) < reader.since:  # it holds nothing, and the WAL was tidied since
            self.reset()
            reader = self._register()
        upper = reader.upper.time or 0
        if self._loaded < upper - 1:
            try:
                self._add(changes_known(reader, self._loaded, upper - 1))
            except BaseException:
                self.tail.begin(self._loaded)  # some may be in it already: it is read again
                raise
            self._loaded = upper - 1
        hold = reader.machine.state.holds.get(HOLD)
        # A pinned time keeps its WAL, so that a commit can see what was changed since.
        self.floor = max(self.floor, min(self._loaded, (hold.since.time or 0) if hold is not None else 0))
        done = self.oldest(self.floor)
        self.tail.forget(done)
        if not reader.read_only:
            kept_of(reader).let_go(at(done))
        if (error := kept_of(reader).expired(reader.machine.state)) is not None:
            raise error
        self.upper = upper

    def _add(self, changes: Changes) -> None:
        marked, evolved = set(), set()
        for table in changes.batches():
            entries = entries_of(table)
            self.tail.add(entries)
            self.gone |= {entry.table for entry in entries if entry.chunk == DROPPED}
            marked |= {entry.table for entry in entries if entry.is_mark}
            evolved |= {entry.table for entry in entries if entry.chunk == EVOLVED}
        changes.release()
        if marked:
            self.catalog.fetch()  # a table may keep deleted keys from its mark on, and the look was before
        for name in marked & self._views.keys():
            self._views[name].reader.timeline()  # read again: a handover that the look may not have seen
        for name in evolved & self._views.keys():
            self._views[name].fetch()  # its shards have the columns that came with the mark, and the look was before

    def _freshen(self, view: View) -> None:
        if view.id in self.gone:
            raise self.dropped(view.name)
        view.freshen(self.heads)
        upper = view.upper(view.timeline().last)
        done = self.oldest(upper - 1)
        self.tail.drop(view.id, done)
        view.let_go(done)

    def _snapshot(self, name: str, time: int, _asked: AsOf, want: Want, deadline: Deadline) -> TableSnapshot:
        view = self.view(name)
        if view.reader.since <= at(time):
            with suppress(SinceViolation):  # the reader of a shard may have let go of more than the table's
                return self._read_by(view, name, time, want, deadline)
        with self.older(name) as old:
            return in_memory(name, time, *self._read(old, time, want, deadline), self.client.runtime)

    def _read_by(self, view: View, name: str, time: int, want: Want, deadline: Deadline) -> TableSnapshot:
        """The contents by what this process has open: read lazily, unless some of them are in the WAL alone."""
        span, upper, entries = self.settled(view, time, deadline)
        if time < upper or (upper > 0 and not entries):
            with suppress(SinceViolation):
                found = self.base(view, span, min(time, upper - 1), want)
                found.as_of = time
                return found
        return in_memory(name, time, *self._read(view, time, want, deadline), self.client.runtime)

    def _read(self, view: View, as_of: int, want: Want, deadline: Deadline) -> tuple[RowSelection, pa.Table]:
        """What is wanted, and those rows with all their columns: of the table, and of the WAL beyond it."""
        while True:
            span, upper, entries = self.settled(view, as_of, deadline)
            wanted = want(view.handles(span)[0].schema, view.known)
            try:
                base = view.contents(span, min(as_of, upper - 1), wanted)
            except SinceViolation:
                self._catch_up(view, as_of, upper, deadline)
            else:
                return wanted, summed(wanted.schema, base, *_rows(entries, wanted))

    def _catch_up(self, view: View, as_of: int, upper: int, deadline: Deadline) -> None:
        """Bring the table's own data up to what a read of it needs, or wait for those who do."""
        if as_of < upper:
            raise too_early(view.reader.named, view.reader.schema, as_of, view.since(as_of))
        if deadline.has_passed():
            raise self.out_of_time(deadline, f"table {view.name!r} is still being copied to its new rendition")
        if not self.client.read_only:
            wal_apply.apply_table(self, view, deadline)
        pause(deadline)
        try:
            self.look()
        except LeaseExpired:
            self.reset()
            raise
        view.freshen(self.heads)


def _rows(entries: Entries, wanted: RowSelection) -> list[pa.Table]:
    """The wanted rows of what the WAL has, some megabytes of it added up at a time."""
    found: list[pa.Table] = []
    pending, size = list[pa.Table](), 0
    for entry in entries:
        pending.append(entry.rows(wanted.schema))
        size += pending[-1].nbytes
        if size > ROUND_BYTES:
            found, pending, size = [*found, wanted.kept(summed(wanted.schema, *pending))], [], 0
    return [*found, wanted.kept(summed(wanted.schema, *pending))] if pending else found
