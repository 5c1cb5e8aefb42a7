"""Listening: the updates after a time. Each comes once, at its exact time, and before the progress that covers it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.times import shown_times
from persist_lib.core.state import Batch, Version
from persist_lib.errors import Determinate, Missing, PersistError, TimedOut
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.location.api import WakesWaiters
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.resource import Resource
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


class EventIterator(Resource):
    """Delivers `Updates` at their exact times, and then the `Progress` that covers them: each once.

    Events are made in rounds. A round is a generator that makes one event due at each step, and ends with progress.
    SUBTLE: an interrupt may come after any call. So an event is kept in `_due` until instructions that call nothing
    take it from there; and a round that broke off after a part of its updates was delivered is a failure, which is
    raised again at every later call.
    """

    _fails_for_good = False
    """Whether any failure of a round is raised again at every later call, also where nothing of it was delivered."""

    def __init__(self, as_of: int, until: Antichain, timeout_s: float | None) -> None:
        self._until, self._timeout_s = until, timeout_s
        self.frontier = at(as_of + 1) if as_of < MAX_TIME else TOP
        self._round: Generator[None, None, None] | None = None
        self._due: Event | None = None
        self._is_midway = False  # whether updates were delivered, and not yet the progress that covers them
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
            if self._is_done():
                self.close()
                raise StopIteration
            self._let_go()
            self._round = self._wait()
        self._is_midway = isinstance(self._due, Updates)
        event, self._due = self._due, None  # type: ignore[assignment] # SUBTLE: no call from here on
        return event

    def poll(self) -> list[Event]:
        """Return the events that have come by now, without waiting. If it raises, none of them counts as delivered."""
        self._look()
        if not self._polled:
            self._polled_from = self.frontier
        try:
            while self._has_due() or self._begins():
                if self._due is not None:
                    self._is_midway = isinstance(self._due, Updates)
                    self._polled += (self._due,)
                    self._due = None
        except PersistError:
            self.frontier, self._polled = self._polled_from, []
            if not self._fails_for_good:
                self._round = self._due = self._failure = None
                self._is_midway = False
            raise
        self._let_go()
        events, self._polled = self._polled, []
        return events

    def _begins(self) -> bool:
        """Whether there is a round that can go now, which is begun then. Ends the lease where none can follow."""
        if self._is_done():
            self.close()
            return False
        self._round = self._next_round()
        return self._round is not None

    def _has_due(self) -> bool:
        """Whether the round that is under way has an event to deliver."""
        if self._failure is not None:
            raise self._failure
        if self._due is None and self._round is not None:
            try:
                next(self._round)
            except StopIteration:
                self._round = None
            except BaseException as error:
                self._round = None
                if isinstance(error, PersistError) and self._due is None:
                    if self._fails_for_good:
                        self._failure = error
                    elif self._is_midway:
                        self._failure = self._cut_short()
                        raise self._failure from error
                raise
        if self._due is None and self._round is None and self._is_midway:  # an interrupt
            self._failure = self._cut_short()
            raise self._failure
        return self._due is not None

    def _is_done(self) -> bool:
        return self.frontier.is_top() or self._until <= self.frontier

    def _deadline(self, runtime: Runtime) -> Deadline:
        return runtime.deadline(float("inf") if self._timeout_s is None else self._timeout_s)

    def _nothing_came(self, what: str, shown: object, deadline: Deadline, **fields: object) -> TimedOut:
        return TimedOut(
            f"{what}: nothing came after {shown} for {deadline.timeout_s:g} s. Nothing is lost: iterate on, or listen "
            "again from there",
            timeout_s=deadline.timeout_s, frontier=self.frontier, **fields,
        )  # fmt: skip

    @abstractmethod
    def _look(self) -> None:
        """Read how far it has come, before a `poll`."""

    @abstractmethod
    def _next_round(self) -> Generator[None, None, None] | None:
        """The round that can go now; None if nothing has come."""

    @abstractmethod
    def _wait(self) -> Generator[None, None, None]:
        """Wait for a round. Raises TimedOut."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give up the history that was delivered, at the next tick."""

    @abstractmethod
    def _cut_short(self) -> Determinate:
        """The error after a part of the updates from the frontier on was delivered, and the others cannot be."""

    @abstractmethod
    def close(self) -> None:
        """End the listener's lease. Idempotent."""

    __reduce__ = not_pickled("A listener", "Listen in the other process")


class Listen(EventIterator):
    """An iterator of `Updates` and `Progress` after `as_of`. To end its lease early, close it or use a `with` block."""

    _fails_for_good = True

    def __init__(self, handle: ReadHandle, as_of: int, until: Antichain, timeout_s: float | None) -> None:
        super().__init__(as_of, until, timeout_s)
        self._handle = handle
        self._is_closed = False
        self._tried: Antichain | None = None  # where the last round of a `poll` began

    def close(self) -> None:
        """End the listener's lease. Idempotent. Then nothing more comes."""
        self._is_closed, self._is_midway, self._round = True, False, None
        if not self._handle.read_only:
            self._handle.close()

    def _is_done(self) -> bool:
        return self._is_closed or super()._is_done()

    def _look(self) -> None:
        self._handle.machine.fetch()
        self._tried = None

    def _next_round(self) -> Generator[None, None, None] | None:
        if self._tried == self.frontier:
            return None
        if self._tried is not None:
            follow(self._handle.machine)
        self._tried = self.frontier
        return self._news()  # also where nothing came: it raises LeaseExpired

    def _wait(self) -> Generator[None, None, None]:
        machine = self._handle.machine
        if self.frontier < machine.state.upper:
            return self._news()
        deadline = self._deadline(machine.runtime)
        patience = Patience(machine, deadline, machine.config.poll_s, BACK_OFF * machine.config.poll_s, follows=True)
        while (version := patience.look()).state.upper <= self.frontier:
            if error := self._handle.expired(version.state):
                raise error
            if patience.is_over:
                shown = self._handle.schema.show(self.frontier)
                raise self._nothing_came(f"shard {machine.shard}", shown, deadline)
            patience.pause(version.seqno)
        return self._news()

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
                self._due = Updates(shown_times(self._handle.schema, table))
                yield
        progress = Progress(upper)
        self._due, self.frontier = progress, upper  # SUBTLE: an interrupt leaves both set, or neither
        yield

    def _look_again(self, version: Version, missing: Missing) -> None:
        """After a blob has vanished: a read-only client continues from the newest state; others raise `missing`."""
        if error := self._handle.expired():
            raise error from missing
        if not self._handle.read_only or self._handle.machine.fetch().seqno == version.seqno:
            raise missing

    def _let_go(self) -> None:
        if not self._handle.read_only and self.frontier.time is not None:
            self._handle.let_go(at(max(0, self.frontier.time - 1)))

    def _cut_short(self) -> Determinate:
        shard = self._handle.machine.shard
        return Determinate(
            f"shard {shard}: listening was interrupted after a part of a batch was delivered. Drop its updates at or "
            f"after {self._handle.schema.show(self.frontier)}, and listen again from there",
            frontier=self.frontier, shard=shard,
        )  # fmt: skip
