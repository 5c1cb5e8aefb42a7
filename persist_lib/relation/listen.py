"""Listening: the updates after a time. Each comes once, at its exact time, and before the progress that covers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from persist_lib.convert.times import shown_times
from persist_lib.core.state import Batch, Version
from persist_lib.errors import Missing
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.relation.held import kept_of
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.follow import Follow
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import read_updates

if TYPE_CHECKING:
    from persist_lib.relation.reader import Reader, ReadHandle


LONGEST_WAIT_S = 5.0
"""The longest wait for one notification. Notifications can be lost, so a waiter also looks once in this time."""
GROWTH = 1.2


class Patience:
    """The looks and pauses of one waiting call: `first_s` at first, growing to `longest_s` when nothing comes.

    `follows`: also the first look may be at what the store told, so that nothing is read if nothing came. `tells_all`:
    all that the call waits for is in the shard. Otherwise it looks as often as without notifications, at the latest.
    """

    def __init__(
        self, machine: Machine, deadline: Deadline, first_s: float, longest_s: float,
        *, follows: bool = False, tells_all: bool = True,
    ) -> None:  # fmt: skip
        self._machine = machine
        self._deadline = deadline
        self._pause_s = first_s
        self._longest_s = longest_s
        self._told_at: SeqNo | None = None
        self._fetch = machine.newest  # at first
        self._is_following, self._tells_all = follows, tells_all
        self._is_read = False

    def look(self) -> Version:
        """The newest version: as the log has it at first and at the end; in between what the store told, if it does."""
        version = self._machine.told() if self._is_following and not self._deadline.has_passed() else None
        self._is_following, self._is_read = True, version is None
        if version is None:
            version, self._fetch = self._fetch(), self._machine.fetch
        return version

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed, and the last look was at the log: then what was waited for is not there."""
        return self._is_read and self._deadline.has_passed()

    def pause(self, seqno: SeqNo) -> None:
        """Wait until there may be a version beyond `seqno`, the one that the caller has seen.

        After a notification that brought nothing new, one pause is an ordinary one. So no caller reads more
        often with notifications than without them, whatever the store sends.
        """
        told_at, self._told_at = self._told_at, None
        if told_at != seqno and self._was_told(seqno):
            self._told_at = seqno
            return
        self._deadline.pause(self._pause_s)
        self._grow()

    def _grow(self) -> None:
        self._pause_s = min(self._longest_s, self._pause_s * GROWTH)

    def _was_told(self, seqno: SeqNo) -> bool:
        consensus, longest_s = self._machine.consensus, min(LONGEST_WAIT_S, self._deadline.remaining_s())
        if not self._tells_all:
            longest_s = min(self._pause_s, longest_s)
            self._grow()
        return isinstance(consensus, WakesWaiters) and consensus.wait(self._machine.shard, seqno, longest_s)


BACK_OFF = 2
"""The pauses grow to this many times `poll_s` when nothing comes. Few, as updates should be delivered soon."""


class Updates(NamedTuple):
    """Updates as an Arrow table: `schema.changes`, the schema's columns, then `_time` and `_diff`."""

    table: pa.Table


class Progress(NamedTuple):
    """All updates before `frontier` have been delivered."""

    frontier: Antichain

    @property
    def as_of(self) -> int | None:
        """The time after which another listener continues: just before `frontier`. None: nothing can follow."""
        return None if self.frontier.time is None else self.frontier.time - 1


Event = Updates | Progress


class Listener(Follow[Event]):
    """Delivers the updates after `as_of` at their exact times, and then the `Progress` that covers them: each once."""

    def __init__(self, reader: Reader[Any, Any], as_of: int, until: Antichain, timeout_s: float | None) -> None:
        start, named = at(as_of + 1) if as_of < MAX_TIME else TOP, reader.named
        super().__init__(reader.around.runtime, start, until, timeout_s, str(named), **named.fields)
        self._reader = reader

    @property
    def schema(self) -> Schema:
        """The schema of the updates that come next: after a handover with `replace`, the new one."""
        return self._reader.schema

    def close(self) -> None:
        super().close()
        self._reader.close()

    def _let_go(self) -> None:
        """Give up the history before the frontier, which was delivered, at the next tick."""
        if self.frontier.time is not None:
            kept_of(self._reader).let_go(at(max(0, self.frontier.time - 1)))

    def _show(self, frontier: Antichain) -> str:
        return str(self.schema.show(frontier))

    def _begin(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def _step(self, tables: Iterable[pa.Table], upper: Antichain) -> Iterator[None]:
        """Make due the updates from the frontier to `upper`, which have integers as times, and the progress there."""
        for table in tables:
            if table.num_rows:
                self._due = Updates(shown_times(self.schema, table)), True
                yield
        progress = Progress(upper), False
        self._due, self.frontier = progress, upper  # an interrupt leaves both set, or neither
        yield
        self._let_go()


class Listen(Listener):
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    def __init__(self, handle: ReadHandle, as_of: int, until: Antichain, timeout_s: float | None) -> None:
        super().__init__(handle, as_of, until, timeout_s)
        self._handle, self._lease = handle, kept_of(handle)
        self._seen = handle.machine.version
        self._steps = self._fetch()  # what is known already takes no request

    def close(self) -> None:
        if self._handle.read_only:  # it is the caller's
            Follow.close(self)
        else:
            super().close()

    def _begin(self, deadline: Deadline) -> None:
        super()._begin(deadline)
        machine, poll_s = self._handle.machine, self._handle.machine.config.poll_s
        self._patience = Patience(machine, deadline, poll_s, BACK_OFF * poll_s, follows=True)

    def _look(self) -> bool:
        """Whether there is an event to deliver. No request where this process knows of one, but at the deadline."""
        self._seen = self._handle.machine.version
        if self._deadline.has_passed() or self._seen.state.upper <= self.frontier:
            self._seen = self._patience.look()
        if self.frontier < self._seen.state.upper:
            return super()._look()
        if error := self._lease.expired(self._seen.state):
            raise error
        return False

    def _pause(self) -> None:
        self._patience.pause(self._seen.seqno)

    def _fetch(self) -> Iterator[None]:
        """Make due what the newest known state has beyond the frontier, batch by batch."""
        if self.frontier.time is None:
            return
        reading = self._lease.acquire(max(0, self.frontier.time - 1))
        try:
            for batch in reading.version.state.trace:
                if self._is_done():
                    return
                if self.frontier < batch.upper:
                    yield from self._batch(batch, reading.version.state.schemas)
        except Missing as missing:
            self._lease.check_missing(reading, missing)
        finally:
            reading.release()

    def _batch(self, batch: Batch, schemas: tuple[Schema, ...]) -> Iterator[None]:
        upper, machine = batch.upper.meet(self.until), self._handle.machine
        # SUBTLE: compaction may have merged delivered updates with new ones. Only times from the frontier on are new,
        # and those are exact, as this reader's since is behind the frontier.
        lower = self.frontier.time or 0
        tables: Iterable[pa.Table] = read_updates(
            machine.reads, machine.shard, (batch,), lower, upper.time, schemas, self._handle.schema
        )
        if self._handle.read_only:
            tables = list(tables)  # a blob may vanish half way, and delivered updates must not be delivered again
        return self._step(tables, upper)
