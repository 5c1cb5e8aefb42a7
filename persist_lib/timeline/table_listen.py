"""Listening to a table: each update once, at its exact time, before the progress that covers it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import suppress

import pyarrow as pa

from persist_lib.catalog.changes import updates_between
from persist_lib.convert.times import shown_times
from persist_lib.errors import Determinate, LeaseExpired, SinceViolation
from persist_lib.frontier import TOP, at
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.listen import EventIterator, Progress, Updates
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.timeline.timeline import Line
from persist_lib.timeline.view import pause
from persist_lib.timeline.wal_timeline import WalLine


class TableListen(EventIterator):
    """An iterator of what happens to a table after `as_of`: `Updates` at their exact times, and `Progress`.

    On a timeline in WAL mode it goes as far as the WAL, whether the table has its rows yet or not, and its progress is
    the timeline's. In YOLO mode it goes as far as the table was written, advanced or read.
    """

    def __init__(self, line: Line, name: str, as_of: int, timeout_s: float | None) -> None:
        super().__init__(as_of, TOP, timeout_s)
        self._line = line
        line.look()
        self._view = line.view(name)
        if at(as_of) < self._view.reader.since:
            since = self._view.schema.show(self._view.reader.since)
            raise SinceViolation(
                f"table {name!r}: as_of {self._view.schema.show(as_of)} is before {since}, from when on history is "
                "kept. Listen from that time or later",
                as_of=as_of, since=self._view.reader.since, table=name,
            )  # fmt: skip
        self._pins = line.pinned(as_of)
        self._pins.__enter__()
        self._is_closed = self._has_looked = False

    def close(self) -> None:
        """Give up what it holds. Idempotent. Then nothing more comes."""
        if not self._is_closed:
            self._is_closed, self._is_midway, self._round = True, False, None
            self._pins.__exit__(None, None, None)
            with suppress(LeaseExpired):
                self._line.close()

    def _is_done(self) -> bool:
        return self._is_closed or super()._is_done()

    def _look(self) -> None:
        if not self._is_closed:
            self._line.look()
            self._view.freshen(self._line.heads)
            self._has_looked = True

    def _next_round(self) -> Generator[None, None, None] | None:
        if not self._has_looked:
            return None
        self._has_looked, upper = False, self._upper()
        return None if upper <= (self.frontier.time or 0) else self._updates_to(upper)

    def _wait(self) -> Generator[None, None, None]:
        deadline = self._deadline(self._line.client.runtime)
        while True:
            self._look()
            if (found := self._next_round()) is not None:
                return found
            if deadline.has_passed():
                shown = self._view.schema.show(self.frontier)
                raise self._nothing_came(f"table {self._view.name!r}", shown, deadline, table=self._view.name)
            pause(deadline)

    def _updates_to(self, upper: int) -> Generator[None, None, None]:
        line, view, first = self._line, self._view, self.frontier.time or 0
        deadline = line.client.runtime.deadline(line.client.config.timeout_s)
        if isinstance(line, WalLine):
            updates: Iterable[pa.Table] = self._wal_updates(line, first, upper, deadline)
        else:
            updates = updates_between(view.reader, first - 1, upper - 1, deadline)
        for table in updates:
            if table.num_rows:
                self._due = Updates(shown_times(view.schema, table.combine_chunks()))
                yield
        newer = line.pinned(upper - 1)
        newer.__enter__()
        self._pins.__exit__(None, None, None)
        self._pins, progress = newer, Progress(at(upper))
        self._due, self.frontier = progress, progress.frontier  # SUBTLE: an interrupt leaves both set, or neither
        yield

    def _let_go(self) -> None:
        if not self._is_closed and (reached := self.frontier.time):
            # It may be behind the WAL.
            own = self._view.upper(self._view.timeline().last)
            self._view.let_go(min(self._line.oldest(reached - 1), own - 1))

    def _cut_short(self) -> Determinate:
        shown = self._view.schema.show(self.frontier)
        return Determinate(
            f"table {self._view.name!r}: listening ended after a part of the updates from {shown} on was delivered. "
            "Drop the updates at or after that, and listen again from there",
            frontier=self.frontier, table=self._view.name,
        )  # fmt: skip

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
