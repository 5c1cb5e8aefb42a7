"""Listening: the updates after a time. Each comes once, at its exact time, and before the progress that covers it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.core.state import Batch, Version
from persist_lib.errors import Determinate, Missing, PersistError, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.pushed_rows import follow, told
from persist_lib.shard.runs import read_updates

if TYPE_CHECKING:
    from persist_lib.relation.reader import ReadHandle


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
        self._is_following, self._tells_all = follows, tells_all
        self._is_read = False

    def look(self) -> Version:
        """The newest version: read from the log at first and at the end; in between what the store told, if it does."""
        version = told(self._machine) if self._is_following and not self._deadline.has_passed() else None
        self._is_following, self._is_read = True, version is None
        return self._machine.fetch() if version is None else version

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed, and the last look was at the log: then what was waited for is not there."""
        return self._is_read and self._deadline.has_passed()

    def pause(self, seqno: SeqNo) -> None:
        """Wait until there may be a version beyond `seqno`, the one that the caller has seen.

        SUBTLE: after a notification that brought nothing new, one pause is an ordinary one. So no caller reads more
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


Event = Updates | Progress


class Listen:
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    def __init__(self, handle: ReadHandle, as_of: int, until: Antichain, timeout_s: float | None) -> None:
        self._handle = handle
        self._until = until
        self._timeout_s = timeout_s
        self.frontier = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._events: Generator[None, None, None] = self._listen()
        self._due: tuple[Event, bool] | None = None  # the event, and whether more of its batch follows
        self._is_midway = False  # whether more of the last event's batch follows
        self._polled: list[Event] = []  # events that a `poll` took before it was interrupted
        self._polled_from = self.frontier
        self._failure: PersistError | None = None

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._polled:
            event = self._polled[0]
            del self._polled[0]
            return event
        while not self._has_due():
            self._wait()
        (event, is_midway), self._due = self._due, None  # type: ignore[misc] # SUBTLE: no call from here on, see `_has_due`
        self._is_midway = is_midway
        return event

    def poll(self) -> list[Event]:
        """Return the events that have come by now, without waiting. If it raises, none of them counts as delivered."""
        self._handle.machine.fetch()
        if not self._polled:
            self._polled_from = self.frontier
        try:
            while self._has_due(stop=True):
                self._polled += (self._due[0],)  # type: ignore[index]
                self._is_midway, self._due = self._due[1], None  # type: ignore[index]
        except PersistError:
            self.frontier, self._polled = self._polled_from, []
            raise
        events, self._polled = self._polled, []
        return events

    def _has_due(self, *, stop: bool = False) -> bool:
        """Whether there is an event to deliver now. At the end of the events: StopIteration, or False with `stop`.

        SUBTLE: an interrupt may come after any call, and each event must be delivered once. So an event is kept in
        `_due` until instructions that call nothing take it from there. A failure is raised again at every later call.
        After an interrupt a new generator continues, as a generator that has raised would report the end.
        """
        if self._failure is not None:
            raise self._failure
        if self._due is None:
            try:
                next(self._events)
            except StopIteration:
                if stop:
                    return False
                raise
            except PersistError as failure:
                self._failure = failure
                raise
            except BaseException:
                self._resume()
                raise
        return self._due is not None

    def _resume(self) -> None:
        """After an interrupt, continue from the frontier; fail if only a part of a batch was delivered."""
        if self._due is not None:
            return
        if self._is_midway:
            self._failure = Determinate(
                f"shard {self._handle.machine.shard}: listening was interrupted after a part of a batch was delivered. "
                f"Drop its updates at or after {self._handle.schema.show(self.frontier)}, and listen again from "
                "there",
                frontier=self.frontier, shard=self._handle.machine.shard,
            )  # fmt: skip
        self._events = self._listen()

    def close(self) -> None:
        """End the listener's lease. Idempotent."""
        self._events.close()
        if not self._handle.read_only:
            self._handle.close()

    __reduce__ = not_pickled("A listener", "Listen in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> Generator[None, None, None]:
        """Yields whenever an event is due, and when there is none yet."""
        while not self._is_done():
            before = self.frontier
            yield from self._news()
            if self.frontier == before:
                yield
            elif not self._is_done():
                follow(self._handle.machine)
        if not self._handle.read_only:
            self._handle.close()

    def _wait(self) -> None:
        machine = self._handle.machine
        deadline = machine.runtime.deadline(self._timeout_s if self._timeout_s is not None else float("inf"))
        patience = Patience(machine, deadline, machine.config.poll_s, BACK_OFF * machine.config.poll_s, follows=True)
        while (version := patience.look()).state.upper <= self.frontier:
            if error := self._handle.expired(version.state):
                raise error
            if patience.is_over:
                raise TimedOut(
                    f"shard {machine.shard}: nothing came after {self._handle.schema.show(self.frontier)} for "
                    f"{deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen again from there",
                    timeout_s=deadline.timeout_s, frontier=self.frontier,
                )  # fmt: skip
            patience.pause(version.seqno)

    def _news(self) -> Generator[None, None, None]:
        """Make due what the newest known state has beyond the frontier, batch by batch."""
        first = self.frontier.time
        if first is None:
            return
        reading = self._handle.acquire(first - 1)
        try:
            for batch in reading.version.state.trace:
                if self._is_done():
                    return
                if self.frontier < batch.upper:
                    yield from self._batch(batch, reading.version.state.schemas)
        except Missing as missing:
            self._look_again(reading.version, missing)
        finally:
            reading.release()
        self._give_up()

    def _batch(self, batch: Batch, schemas: tuple[Schema, ...]) -> Generator[None, None, None]:
        upper, machine = batch.upper.meet(self._until), self._handle.machine
        # SUBTLE: compaction may have merged delivered updates with new ones. Only times from the frontier on are new,
        # and those are exact, as this reader's since is behind the frontier.
        lower = self.frontier.time or 0
        tables: Iterable[pa.Table] = read_updates(
            machine.reads, machine.shard, (batch,), lower, upper.time, schemas, self._handle.schema
        )
        if self._handle.read_only:
            tables = list(tables)  # a blob may vanish half way, and delivered updates must not be delivered again
        for table in tables:
            if table.num_rows:
                self._due = Updates(shown_times(self._handle.schema, table)), True
                yield
        progress = Progress(upper), False
        self._due, self.frontier = progress, upper  # SUBTLE: an interrupt leaves both set, or neither
        yield

    def _look_again(self, version: Version, missing: Missing) -> None:
        """After a blob has vanished: a read-only client continues from the newest state; others raise `missing`."""
        if error := self._handle.expired():
            raise error from missing
        if not self._handle.read_only or self._handle.machine.fetch().seqno == version.seqno:
            raise missing

    def _give_up(self) -> None:
        """Give up the history that was delivered, at the next tick."""
        if not self._handle.read_only and self.frontier.time is not None:
            self._handle.let_go(at(max(0, self.frontier.time - 1)))

    def _is_done(self) -> bool:
        return self.frontier.is_top() or self._until <= self.frontier
