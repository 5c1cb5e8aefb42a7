"""A timeline as one process sees it: what its tables share, and what differs between its two modes.

A statement or a transaction goes the same way in both: it takes a time to read at, looks at rows as of it, and is
committed if no other writer was first; otherwise it takes a newer time, and reads again only what changed in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.catalog.answers import view_of
from persist_lib.catalog.catalog import Catalog
from persist_lib.catalog.effects import settle
from persist_lib.catalog.records import CollectionRecord, TimelineRecord
from persist_lib.catalog.renditions import Span
from persist_lib.client import Client
from persist_lib.core.state import Outcome
from persist_lib.errors import (
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    NotComplete,
    NotFound,
    SchemaMismatch,
    TimedOut,
)
from persist_lib.frontier import at
from persist_lib.ids import SeqNo
from persist_lib.relation.deleted_keys import Keeping
from persist_lib.relation.registration import Named, bounds_of, store_time
from persist_lib.relation.row_selection import RowSelection
from persist_lib.relation.snapshot import PlaceContents
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, comes_before
from persist_lib.shard.committer import until_decided
from persist_lib.shard.outcomes import find_placed
from persist_lib.timeline.view import Heads, TableSnapshot, View, pause
from persist_lib.times import show_time

T = TypeVar("T")
Want = Callable[[Schema, Callable[[Schema], Schema]], RowSelection]
"""Makes of a table's columns, and of what it knows of others that it had, what is wanted of it."""
Sender = Callable[[Indeterminate | None], bool]
"""Sends an append; it gets the first unknown outcome of those before. Whether it is there."""


class AsOf(NamedTuple):
    """The time that a read asks for (None: the newest), and what it wants where that is not complete yet.

    `newest`: the newest complete contents instead. `waits`: to wait for it until the deadline.
    """

    time: int | None = None
    newest: bool = False
    waits: bool = False

    @property
    def is_newest(self) -> bool:
        """Whether older contents than those of its time are an answer."""
        return self.newest or self.time is None


class Line(ABC):
    """A timeline. Safe to use from several threads."""

    def __init__(self, catalog: Catalog, record: TimelineRecord, owner: str) -> None:
        self.catalog, self.record, self.owner, self.name = catalog, record, owner, record.name
        self.client: Client = catalog.client
        self.heads = Heads(self.client)
        self.lock = RLock()
        self._views: dict[str, View] = {}
        self._pins: Counter[int] = Counter()

    @abstractmethod
    def read_time(self, deadline: Deadline) -> int:
        """The time at which a read that begins now sees all that was acknowledged, in whatever table. -1: nothing."""

    @abstractmethod
    def newest(self, view: View, deadline: Deadline) -> int:
        """The newest time at which a statement on this table can look."""

    @abstractmethod
    def contents(self, view: View, as_of: int, wanted: RowSelection, deadline: Deadline) -> pa.Table:
        """The wanted rows as of a time that `newest` answered, with all their columns."""

    @abstractmethod
    def changed(self, view: View, from_: int, to: int, wanted: RowSelection) -> pa.Table | None:
        """What was added to the wanted rows in `(from_, to]`. None: they have to be read again."""

    def try_commit(
        self, changes: Sequence[tuple[View, pa.Table]], as_of: int, deadline: Deadline,
        sending: Callable[[bytes], object] | None = None,
    ) -> Named | None:  # fmt: skip
        """Commit changes that were made of the contents as of a time, by one append. None if something was since.

        `sending` gets the token first. Raises Indeterminate, with the token, if it is not known at the deadline
        whether this was committed.
        """
        name = Named.fresh(self.client.runtime, at(as_of + 1), self.next_time(self.least(as_of + 1)))
        send = self.sender(changes, name, deadline)
        if sending is not None:
            sending(name.token)
        return name if until_decided(send, deadline) else None

    def least(self, lower: int) -> int:
        """The least time of a commit that begins at `lower`."""
        return lower

    @abstractmethod
    def sender(self, changes: Sequence[tuple[View, pa.Table]], name: Named, deadline: Deadline) -> Sender:
        """What appends these changes under that token and at that upper; it answers False if others were first."""

    @abstractmethod
    def outcome(self, name: Named, table: str | None, deadline: Deadline) -> bool:
        """Whether a commit with this token and these times is there; one that is open is decided, by moving upper."""

    def placed(self, table: str, token: bytes, since: SeqNo) -> int | None:
        """The time of an append that a server placed in a table before it joined; None if it never will be there."""
        self.look()
        rendition = self.view(table).timeline().spans[0].rendition
        if not rendition.places:
            bounds_of(token)  # raises: it was never a shard by itself, or that is given up
        found = find_placed(self.client.machine(rendition.names[0]), token, since)
        return (found.upper.time or 1) - 1 if isinstance(found, Outcome) else None

    def decided(self, shard: str, name: Named, advance: Callable[[int], object]) -> bool:
        """Whether an append to this shard is there, if need be by moving upper so that it cannot come any more."""
        while (verdict := self.client.judge_append(shard, *name)).answer == "open":
            advance(name.upper.time or 0)
        return verdict.seqno is not None

    @abstractmethod
    def complete(self, name: str, upper: int, deadline: Deadline) -> None:
        """Say by one empty append that nothing comes before `upper` any more, for a read of this table."""

    def snapshot(self, name: str, asked: AsOf, want: Want, deadline: Deadline) -> TableSnapshot:
        """The contents of a table, for a caller of `read`."""
        time = self.time_of(name, asked, deadline)
        with self.pinned(time):
            return self.again(lambda: self._snapshot(name, time, asked, want, deadline), deadline)

    @abstractmethod
    def _snapshot(self, name: str, time: int, asked: AsOf, want: Want, deadline: Deadline) -> TableSnapshot:
        """The contents as of a time that the timeline has passed."""

    def time_of(self, name: str, asked: AsOf, deadline: Deadline) -> int:
        """The time that a read is of, once the timeline has passed it. Raises NotComplete.

        Where this client may write, and the time is not beyond the store's clock, an empty append completes all times
        up to that clock, so that the next such reads find them complete. Never the older contents instead, as a
        write at the time that was asked for may follow, and the answer would be another one.
        """
        reached, time = self.read_time(deadline), asked.time
        if time is None or (asked.newest and reached < time):
            return reached
        while reached < time:
            if not self.client.read_only and time <= self.client.consensus.now():
                self.complete(name, self.next_time(reached + 1) + 1, deadline)
            else:
                self.wait_for(name, time, reached + 1, asked, deadline)
            reached = self.read_time(deadline)
        return time

    def next_time(self, least: int) -> int:
        """The next time by the store's clock, and never before `least`. Raises ClockAhead."""
        client = self.client
        return store_time(f"timeline {self.name!r}", least, client.consensus.now(), client.runtime.clock_ms())

    def wait_for(self, name: str, time: int, upper: int, asked: AsOf, deadline: Deadline) -> None:
        """Wait a little for a time to be complete. Raises NotComplete at the deadline; at once if none was given."""
        if asked.waits and not deadline.has_passed():
            pause(deadline)
            return
        reached, only = show_time(upper, "ms"), ", and this client may only read" if self.client.read_only else ""
        raise NotComplete(
            f"table {name!r}: as_of {show_time(time, 'ms')} is not complete yet: it is complete before {reached}, a "
            f"write there or later may still come{only}. Ask for an earlier time, wait for it (timeout=, at a shell "
            "--wait), or take the newest complete contents (newest=True, --newest)",
            as_of=time, upper=at(upper), timeout_s=deadline.timeout_s if asked.waits else 0.0, table=name,
        )  # fmt: skip

    def look(self) -> None:
        """Ask for the newest seqnos of the timeline's shards: one request."""
        self.heads.look()

    def view(self, name: str, schema: Schema | None = None) -> View:
        """The table of this name, as of the last look. Raises NotFound, and InvalidUsage if it is not on this line.

        With a `schema`, which it has or had, a view that is opened now stays in these columns.
        """
        record = self._find(name)
        with self.lock:
            view = self._views.get(record.id)
            if view is not None:
                view.record = record
                self._freshen(view)
                if view.is_current():
                    return view
                if view.is_handed_over():  # else what reads by it continues, in its columns
                    view.close()
            self._views[record.id] = view = View(self.client, record, self.owner, schema)
            self._freshen(view)
            return view

    def current(self, view: View, schema: Schema) -> View:
        """The same table, after others committed. Raises SchemaMismatch if it has not these columns, or more, now."""
        found = self.view_of(view.record)
        if not comes_before(schema, found.whole):
            raise SchemaMismatch(
                f"table {view.name!r} was handed over to a rendition with other columns since: {found.schema}. "
                "Nothing was written; begin again",
                table=view.name, expected=schema, actual=found.schema,
            )  # fmt: skip
        return found

    def view_of(self, record: CollectionRecord) -> View:
        """The same by its record: a table that was renamed since is still that table."""
        current = self.catalog.fetch(self.heads.get(self.catalog.shard)).collections.get(record.id)
        if current is None or current.state == "dropping":
            raise self.dropped(record.name)
        return self.view(current.name)

    def keeping(self, view: View, schema: Schema) -> tuple[Keeping, View] | None:
        """How the table of a view keeps deleted keys, and the table of these, as of the last look; None: not at all.

        Raises InvalidUsage for such a table itself, which no caller changes.
        """
        record = view.record
        if record.marks_of:
            raise InvalidUsage(
                f"table {record.name!r} has the deleted keys of another table, and changes with that alone. Nothing "
                "was written",
                table=record.name,
            )
        if (kept := record.keep_deletes) is None:
            return None
        contents = self.catalog.fetch(self.heads.get(self.catalog.shard))
        if (marks := contents.collections.get(kept.marks)) is None or marks.state == "making":
            for command in contents.pending(record.id):  # its process may be at it, or gone
                settle(self.catalog, command, self.client.runtime.deadline(self.client.config.timeout_s))
            if (marks := self.catalog.fetch().collections.get(kept.marks)) is None:
                raise self.dropped(record.name)
        found = self.view_of(marks)
        return Keeping(view.name, schema, kept.column, found.schema), found

    def dropped(self, name: str) -> NotFound:
        return NotFound(f"table {name!r} was dropped. Nothing was written", table=name)

    def tables(self) -> list[CollectionRecord]:
        """The tables on this line, as of the last look."""
        contents = self.catalog.fetch(self.heads.get(self.catalog.shard))
        return [c for c in contents.collections.values() if c.timeline == self.record.id and c.state == "live"]

    @contextmanager
    def at_newest(self, view: View, deadline: Deadline) -> Iterator[int]:
        """The newest time for a statement, kept."""
        with ExitStack() as pins:
            with self.lock:
                as_of = self.newest(view, deadline)
                pins.enter_context(self.pinned(as_of))
            yield as_of

    @contextmanager
    def pinned(self, as_of: int) -> Iterator[None]:
        """Keep what is needed to read at a time, and to see what was committed after it."""
        with self.lock:
            self._pins[as_of] += 1
        try:
            yield
        finally:
            with self.lock:
                self._pins[as_of] -= 1
                if not self._pins[as_of]:
                    del self._pins[as_of]

    def oldest(self, time: int) -> int:
        """The oldest time that is still needed, at most `time`."""
        return min([time, *self._pins])

    def again(self, call: Callable[[], T], deadline: Deadline) -> T:
        """Do something; once more with fresh readers, if their leases had ended."""
        try:
            return call()
        except LeaseExpired:
            if deadline.has_passed():
                raise
            self.reset()
            return call()

    def reset(self) -> None:
        """Give up what this process holds; it is registered again when it is needed."""
        with self.lock:
            for view in self._views.values():
                view.close()
            self._views.clear()

    def close(self) -> None:
        self.reset()

    def out_of_time(self, deadline: Deadline, why: str) -> TimedOut:
        return deadline.gave_up(f"timeline {self.name!r}", f"as {why}", timeline=self.name)

    def base(self, view: View, span: Span, as_of: int, want: Want) -> TableSnapshot:
        """The contents of a table as of a time at which the shards of its rendition are complete, read lazily."""
        handles, client = view.handles(span), self.client
        wanted = want(handles[0].schema, view.known)
        parts = [PlaceContents(handle, as_of, wanted) for handle in handles]
        schema, merge_bytes = wanted.shown or wanted.schema, client.config.merge_bytes
        shown = view_of(schema, span.rendition, wanted.columns, merge_bytes, diff=wanted.diff)
        return TableSnapshot(view.name, as_of, shown, parts, client.runtime)

    @contextmanager
    def older(self, name: str) -> Iterator[View]:
        """The table, by a reader that holds what is kept of history. For reads of old times."""
        view = View(self.client, self._find(name), self.owner)
        try:
            yield view
        finally:
            view.close()

    def _find(self, name: str) -> CollectionRecord:
        contents = self.catalog.fetch(self.heads.get(self.catalog.shard))
        record = contents.find(name)
        if record.timeline != self.record.id:
            what = "a collection, and no table" if record.timeline is None else "a table of another timeline"
            raise InvalidUsage(f"{name!r} is {what}: this is timeline {self.name!r}", table=name, timeline=self.name)
        if record.state == "making":  # its process may be at it, or gone
            for command in contents.pending(record.id):
                settle(self.catalog, command, self.client.runtime.deadline(self.client.config.timeout_s))
            record = self.catalog.fetch().find(name)
        return record

    def _freshen(self, view: View) -> None:
        view.freshen(self.heads)
