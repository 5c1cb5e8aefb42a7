"""Listening to a table: each update once, at its exact time, before the progress that covers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

from persist_lib.catalog.answers import updates_between
from persist_lib.errors import LeaseExpired, PersistError
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.relation.held import kept_of
from persist_lib.relation.listen import Listener
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.timeline.timeline import Line
from persist_lib.timeline.view import pause
from persist_lib.timeline.wal_timeline import WalLine


class TableListen(Listener):
    """An iterator of what happens to a table after `as_of`: `Updates` at their exact times, and `Progress`.

    On a timeline in WAL mode it goes as far as the WAL, whether the table has its rows yet or not, and its progress is
    the timeline's. In YOLO mode it goes as far as the table was written, advanced or read.
    """

    def __init__(
        self, line: Line, name: str, as_of: int, until: Antichain, timeout_s: float | None, schema: Schema | None
    ) -> None:  # fmt: skip
        self._line, self._pins = line, line.pinned(max(as_of, 0))
        self._pins.__enter__()  # first, as a view lets go of what is not pinned
        line.look()
        self._view = line.view(name, schema)
        super().__init__(self._view.reader, as_of, until, timeout_s)
        kept_of(self._reader).check_since(max(as_of, 0))

    def close(self) -> None:
        if not self._is_closed:
            Follow.close(self)  # the line closes its reader
            self._pins.__exit__(None, None, None)
            with suppress(LeaseExpired):
                self._line.close()

    def _keeps(self, _failure: PersistError) -> bool:
        """A step of which nothing was given begins again after any failure."""
        return False

    def _pause(self) -> None:
        pause(self._deadline)

    def _let_go(self) -> None:
        reached = (self.frontier.time or 1) - 1
        newer = self._line.pinned(reached)
        newer.__enter__()
        self._pins.__exit__(None, None, None)
        self._pins = newer
        own = self._view.upper(self._view.timeline().last)  # it may be behind the WAL
        self._view.let_go(min(self._line.oldest(reached), own - 1))

    def _fetch(self) -> Iterator[None]:
        """Make due what was committed since the last step."""
        self._line.look()
        self._view.freshen(self._line.heads)
        upper = self._upper() if self.until.time is None else min(self._upper(), self.until.time)
        if upper > (self.frontier.time or 0):
            yield from self._step(self._updates(upper), at(upper))

    def _updates(self, upper: int) -> Iterator[pa.Table]:
        line, view, first = self._line, self._view, self.frontier.time or 0
        deadline = line.client.runtime.deadline(line.client.config.timeout_s)
        if isinstance(line, WalLine):
            return (table.combine_chunks() for table in self._wal_updates(line, first, upper, deadline))
        return updates_between(view.reader, first - 1, upper - 1, deadline)

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
