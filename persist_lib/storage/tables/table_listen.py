"""Listening to a table: each update once, at its exact time, before the progress that covers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.errors import LeaseExpired, SinceViolation, TimedOut
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.listen import Event, Progress, Updates
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.storage.changes import updates_between
from persist_lib.storage.tables.timeline import Line
from persist_lib.storage.tables.view import pause
from persist_lib.storage.tables.wal_timeline import WalLine


class TableListen:
    """An iterator of what happens to a table after `as_of`: `Updates` at their exact times, and `Progress`.

    On a timeline in WAL mode it goes as far as the WAL, whether the table has its rows yet or not, and its progress is
    the timeline's. In YOLO mode it goes as far as the table was written, advanced or read.
    """

    def __init__(self, line: Line, name: str, as_of: int, timeout_s: float | None) -> None:
        self._line, self._timeout_s = line, timeout_s
        line.look()
        self._view = line.view(name)
        if at(as_of) < self._view.reader.since:
            since = self._view.schema.show(self._view.reader.since)
            raise SinceViolation(
                f"table {name!r}: as_of {self._view.schema.show(as_of)} is before {since}, from when on history is "
                "kept. Listen from that time or later",
                as_of=as_of, since=self._view.reader.since, table=name,
            )  # fmt: skip
        self._frontier = as_of + 1
        self._pins = line.pinned(as_of)
        self._pins.__enter__()
        self._due: list[Event] = []
        self._is_closed = False

    @property
    def frontier(self) -> Antichain:
        """All updates before this were delivered."""
        return at(self._frontier)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        deadline = self._line.client.runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)
        while not self._due:
            self._due = self.poll()
            if self._due:
                break
            if self._is_closed:
                raise StopIteration
            if deadline.has_passed():
                raise TimedOut(
                    f"table {self._view.name!r}: nothing came for {deadline.timeout_s:g} s. Nothing is lost",
                    timeout_s=deadline.timeout_s, table=self._view.name,
                )  # fmt: skip
            pause(deadline)
        return self._due.pop(0)

    def poll(self) -> list[Event]:
        """What has come since the last call: tables of updates, and then the progress. Empty if nothing has."""
        if self._is_closed:
            return []
        line, view = self._line, self._view
        deadline = line.client.runtime.deadline(line.client.config.timeout_s)
        line.look()
        view.freshen(line.heads)
        first, upper = self._frontier, self._upper()
        if upper <= first:
            return []
        if isinstance(line, WalLine):
            updates = self._wal_updates(line, first, upper, deadline)
        else:
            updates = list(updates_between(view.reader, first - 1, upper - 1, deadline))
        found: list[Event] = [
            Updates(shown_times(view.schema, table.combine_chunks())) for table in updates if table.num_rows
        ]
        newer = line.pinned(upper - 1)
        newer.__enter__()
        self._pins.__exit__(None, None, None)
        self._pins, self._frontier = newer, upper
        view.let_go(min(line.oldest(upper - 1), view.upper(view.timeline().last) - 1))  # it may be behind the WAL
        return [*found, Progress(at(upper))]

    def close(self) -> None:
        """Give up what it holds. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._pins.__exit__(None, None, None)
            with suppress(LeaseExpired):
                self._line.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _upper(self) -> int:
        if isinstance(self._line, WalLine):
            return self._line.upper
        return self._view.reader.fetch_upper().time or 0

    def _wal_updates(self, line: WalLine, first: int, upper: int, deadline: Deadline) -> list[pa.Table]:
        """The table's own updates as far as it has any, with the difference of a handover, and the WAL's beyond."""
        view = self._view
        _, own, _ = line.settled(view, upper - 1, deadline)
        own = min(own, upper)
        found = list(updates_between(view.reader, first - 1, own - 1, deadline)) if own > first else []
        # What is up to `floor` is in the table, as `settled` knows it, and may be gone from the WAL.
        entries = line.entries(view.id, max(first - 1, own - 1, line.floor), upper - 1)
        if rows := [at_time(entry.rows(view.schema), entry.time) for entry in entries]:
            found.append(consolidate(view.schema, pa.concat_tables([empty_table(view.schema.updates), *rows])))
        return found
