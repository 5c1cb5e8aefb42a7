"""Reading: one handle, one reader id, snapshots as of a time, and listening to updates after a time.

A handle keeps history from its `since` on. As long as it does, every snapshot at or beyond that time has the same
contents, whichever client reads it and whenever. A read-only handle keeps nothing: other clients may give up the
history that it reads, and then it raises an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from persist_lib.arguments import not_pickled, parse_seconds, parse_text
from persist_lib.core import commands as c
from persist_lib.core.state import State, Version
from persist_lib.errors import (
    InvalidUsage,
    LeaseExpired,
    Missing,
    NotComplete,
    Refused,
    ShardFinished,
    SinceViolation,
    TimedOut,
)
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import ReaderId, SeqNo, format_reader_id
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.changes import Changes, changes_known
from persist_lib.relation.listen import Listen, Patience
from persist_lib.relation.row_selection import RowSelection
from persist_lib.relation.snapshot import Snapshot, snapshot_known
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leased, Leases, Registering, was_closed
from persist_lib.shard.pushed_rows import follow
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    import pyarrow.compute as pc

PURPOSE_LETTERS = 200
"""The longest purpose of a reader, and owner of a writer. It is limited, as each copy of the state carries it."""


class Reading:
    """A state that is being read from. All that it refers to is kept until `release`, or until this is dropped."""

    def __init__(self, handle: ReadHandle, version: Version) -> None:
        self.version = version
        self._handle = handle

    def release(self) -> None:
        """Stop keeping the state. Idempotent."""
        self._handle.release(self)


class ReadHandle(Leased):
    """Reads one shard. Safe to use from several threads."""

    def __init__(
        self,
        machine: Machine,
        leases: Leases,
        schema: Schema,
        urls: tuple[str, str],
        *,
        read_only: bool = False,
        purpose: str = "",
        original: ReaderId | None = None,
        completes: Callable[[State, int, Deadline], bool] | None = None,
    ) -> None:
        self.machine = machine
        self.schema = schema
        self.urls = urls
        self.read_only = read_only
        self._leases, self._completes = leases, completes
        self._lock = threading.RLock()
        self._readings: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._since = self._wanted = machine.state.since
        self.id: ReaderId | None = None
        self._closed = False
        self._listeners: weakref.WeakValueDictionary[str, ReadHandle] = weakref.WeakValueDictionary()
        enrol(self, Stage.HANDLES)
        if not read_only:
            self._register(purpose, original)

    def after_fork_in_child(self) -> None:
        """Make a new lock, as a thread that exists only in the parent may hold the old one."""
        self._lock = threading.RLock()

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.machine.shard

    @property
    def since(self) -> Antichain:
        """The earliest frontier at which this handle can read. Snapshots before it raise SinceViolation."""
        return self.machine.state.since if self.read_only else self._since

    @property
    def upper(self) -> Antichain:
        """The newest upper of the shard that this process has seen. `fetch_upper` reads it from the location."""
        return self.machine.state.upper

    def fetch_upper(self) -> Antichain:
        """Read the shard's current upper from the location."""
        return self.machine.fetch().state.upper

    def snapshot(
        self,
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        key: Sequence[object] | None = None,
        key_from: Sequence[object] | None = None,
        key_to: Sequence[object] | None = None,
        keys: object = None,
        filter: pc.Expression | None = None,  # noqa: A002 - what every reader of Arrow calls it
        diff: bool = False,
        timeout: float | None = None,
    ) -> Snapshot:
        """Return the contents as of a time (default: the newest complete time). Waits until upper has passed that time.

        Where no time is complete yet, the newest contents are empty, and the snapshot's `as_of` is -1. Where times are
        a clock, and the library has chosen them all (`append_now`, `upsert`, `delete`, `restore`), a client that may
        write completes a time that the store's clock has passed, by an append of nothing.

        `as_of` is an integer. Where the shard's times are a clock, it may also be a datetime, a pandas or numpy
        timestamp, or a text like "2026-11-22T12:00Z" or "1 hour ago"; the contents include updates at that very time.

        Each row is there as often as it was added. With `diff` each distinct row is there once, with a column `_diff`,
        its multiplicity. Rows cannot be read where a multiplicity is negative: InvalidUsage names one.

        `columns` are the columns to read (default: all). With `diff`, rows that are equal in them are one row, with the
        sum of their multiplicities, and none where that is 0. `filter` is a pyarrow expression on any columns of the
        data, such as `pyarrow.compute.field("cents") > 100`: only rows for which it is true count. `key` reads one key,
        or all keys that start with these values of the leading key columns; `key_from` and `key_to` read the keys in
        `[from, to)`. `keys` reads many keys: a table or frame of the key columns, or a list of dicts, of values (of a
        key of one column) or of tuples. A key that is given twice is read once, and what is read of keys is held in
        memory. Only parts and row groups that can hold such keys and rows are fetched.

        Raises SinceViolation for a time before since, NotComplete when upper has not passed the time after `timeout`
        seconds, and LeaseExpired when this handle was retired.
        """
        rows = RowSelection.of(
            self.schema, f"shard {self.shard}", columns=columns, key=key, key_from=key_from, key_to=key_to, keys=keys,
            filter=filter, diff=diff,
        )  # fmt: skip
        at_time = None if as_of is None else self._times().as_of(as_of)
        deadline = self._deadline(timeout)
        with Spending() as spent:
            state = self._wait(deadline, at_time, lambda state: at_time is None or state.upper.has_passed(at_time))
        chosen = _newest(state) if at_time is None else at_time
        held = self.acquire(chosen if chosen >= 0 else state.since.time or 0)
        return snapshot_known(self, chosen, rows, held, spent)

    def changes(self, from_: TimeLike | None, to: TimeLike | None = None, *, timeout: float | None = None) -> Changes:
        """Return all changes after the time `from_`, up to and with the time `to`: the updates in `(from_, to]`.

        `to` is by default the newest complete time. Waits until upper has passed `to`. None for `from_` means from the
        beginning on. The contents as of `from_` and the changes add up to the contents as of `to`; there are none where
        both are one time. Raises InvalidUsage when `to` is before `from_`, SinceViolation when `from_` is before since
        (None: when any history was given up), as exact times before it are gone, and NotComplete when upper has not
        passed the time after `timeout` seconds. Times are given as in `snapshot`.
        """
        times, show = self._times(), self.schema.show
        first = None if from_ is None else times.as_of(from_, "from_")
        last = None if to is None else times.as_of(to, "to")
        deadline, target = self._deadline(timeout), first if last is None else last
        if first is not None and last is not None and last < first:
            raise InvalidUsage(
                f"changes go forward: to must be {show(first)} or later, got {show(last)}", from_=from_, to=to
            )
        with Spending() as spent:
            state = self._wait(deadline, target, lambda state: target is None or state.upper.has_passed(target))
        end = max(-1 if first is None else first, _newest(state) if last is None else last)
        return changes_known(self, first, end, spent)

    def listen(self, as_of: TimeLike, *, until: object = TOP, timeout: float | None = None) -> Listen:
        """Return an iterator of what happens after `as_of`: updates at their exact times, and progress.

        The iterator waits for updates, and ends at the frontier `until` or when the shard is closed for writing. It
        raises TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). The listener has a lease of
        its own, and gives up history as it goes. Where the shard's times are a clock, `as_of` and `until` may be given
        as in `snapshot`, and `_time` is a timestamp in UTC.
        """
        times = self._times()
        start, end = times.as_of(as_of), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)
        self._check_open()
        self._check(self.machine.fetch().state, start)
        handle = self
        if not self.read_only:
            handle = ReadHandle(self.machine, self._leases, self.schema, self.urls, purpose="listen")
            self._listeners[handle.id or ""] = handle
            handle.downgrade_since(start)
        return Listen(handle, start, end, timeout)

    def wait_for_upper(self, frontier: object, timeout: float | None = None) -> Antichain:
        """Wait until upper is at or beyond `frontier`, and return upper. Raises TimedOut after `timeout` seconds."""
        target = self._times().frontier(frontier, "frontier")
        return self._wait(self._deadline(timeout), target, lambda state: target <= state.upper).upper

    def clone(self, *, purpose: str = "") -> ReadHandle:
        """Return another reader of the shard, with a lease of its own, that can read all that this one can now.

        It has the since and the seqno hold of this handle, not the newest ones, and moves on by itself. `purpose` is a
        short text that lists of readers show. Raises LeaseExpired when this handle was retired, and InvalidUsage where
        the shard has a format before 3. A read-only handle has no lease, and neither has its clone.
        """
        self._check_open()
        purpose = parse_text(purpose, "purpose", PURPOSE_LETTERS)
        return ReadHandle(
            self.machine, self._leases, self.schema, self.urls,
            read_only=self.read_only, purpose=purpose, original=self.id, completes=self._completes,
        )  # fmt: skip

    def downgrade_since(self, since: object) -> None:
        """Give up history before `since`. Reads of this handle that are under way can still be finished.

        Never moves back: a `since` before the handle's own changes nothing. Raises InvalidUsage for a read-only handle,
        and LeaseExpired when this handle was retired.
        """
        given = self._times().frontier(since, "since")
        if self.read_only:
            raise InvalidUsage("a read-only handle holds no history, so there is nothing to give up")
        self._downgrade(self._since.join(given))

    def let_go(self, since: Antichain) -> None:
        """Give up history before `since` at the next tick, not now. Listeners use this."""
        self._wanted = self._wanted.join(since)

    def acquire(self, as_of: int) -> Reading:
        """Hold the newest known state. Raises unless the contents as of `as_of` can be read from it."""
        self._check_open()
        with self._lock:
            version = self.machine.version
            self._check(version.state, as_of)
            reading = Reading(self, version)
            self._readings.add(reading)
            return reading

    def look_again(self, reading: Reading, as_of: int, missing: Missing) -> Reading:
        """Hold the newest state instead, where a blob may vanish under a reader; else raise what a missing blob means.

        Blobs may vanish only under a read-only handle, which holds nothing.
        """
        self.check_missing(reading, missing)
        reading.release()
        return self.acquire(as_of)

    def check_missing(self, reading: Reading, missing: Missing) -> None:
        """Raise what a missing blob means, unless there is a newer state than that which was read from to look at."""
        if error := self.expired():
            raise error from missing
        if not self.read_only or self.machine.fetch().seqno == reading.version.seqno:
            raise missing

    def expired(self, state: State | None = None) -> LeaseExpired | None:
        """The error to raise if this handle is retired in `state` (None: the newest state); None while it is live."""
        state = state or self.machine.fetch().state
        return None if self.read_only or self.id in state.readers else self._lost()

    def close(self) -> None:
        """Retire this reader and its listeners. Idempotent. since stays until another reader or a hold moves it."""
        self._closed = True
        for listener in list(self._listeners.values()):
            listener.close()
        with self._lock:
            if self.id is None:
                return
            self._leases.every_tick(self, None)
            self._leases.retire(self.machine, self.id)
            self._dropped.detach()
            self.id = None  # last: after an interrupt, the next `close` does the rest

    __reduce__ = not_pickled("A reader", "Open one in the other process, or pass the splits of a snapshot")

    def _times(self) -> Times:
        return Times(self.schema.times, self.machine.consensus.now)

    def _deadline(self, timeout: float | None) -> Deadline:
        timeout_s = self.machine.config.timeout_s if timeout is None else parse_seconds(timeout)
        return self.machine.runtime.deadline(timeout_s)

    def _register(self, purpose: str, original: ReaderId | None) -> None:
        fresh, lease_ms = format_reader_id(self.machine.runtime.entropy()), self.machine.config.lease_ms

        def build(_state: State, now: int) -> c.RegisterReader | c.CloneReader:
            until = now + lease_ms
            if original is None:
                return c.RegisterReader(fresh, until, purpose)
            return c.CloneReader(fresh, original, until, purpose)

        self._leases.prepare()
        with Registering(self._leases, self.machine, fresh):
            done = self.machine.commit(build)
            self._since = self._wanted = done.after.readers[fresh].since
            self._leases.keep(self.machine, fresh)
            self._dropped = weakref.finalize(self, self._leases.abandon, self.machine, fresh)
            self._dropped.atexit = False
            self.id = fresh
        self_ = weakref.ref(self)

        def tick() -> None:
            if (handle := self_()) is not None:
                handle.move_hold()

        self._leases.every_tick(self, tick)

    def move_hold(self) -> None:
        """Let go of states that are no longer read from. Called in the background; a no-op where it frees nothing."""
        state = follow(self.machine).state
        entry = state.readers.get(self.id) if self.id is not None else None
        if entry is None:
            return
        # SUBTLE: do not move the hold just because there are newer states. Moving it makes a new state, so that would
        # never end.
        oldest = self._oldest_active()
        is_in_the_way = any(entry.seqno <= g.seqno < oldest for g in state.garbage.values()) or any(
            entry.seqno < rollup <= oldest for rollup in state.rollups
        )
        if is_in_the_way or self._since < self._wanted:
            with suppress(Refused):  # expired: the next read raises LeaseExpired
                self._downgrade(self._since.join(self._wanted))

    def _downgrade(self, since: Antichain) -> None:
        reader, lease_ms = self.id, self.machine.config.lease_ms
        if reader is None:
            raise self._lost()
        oldest = self._oldest_active()
        self._since = since  # first, so that no read before it begins while that history is being given up
        self.machine.commit(lambda _state, now: c.DowngradeSince(reader, since, oldest, now + lease_ms))

    def _oldest_active(self) -> SeqNo:
        with self._lock:
            # SUBTLE: a read that begins after this takes `machine.version` or newer, under this same lock.
            return min([*(reading.version.seqno for reading in self._readings), self.machine.version.seqno])

    def release(self, reading: Reading) -> None:
        """Stop keeping the state of a read that is over."""
        with self._lock:
            self._readings.discard(reading)

    def _wait(self, deadline: Deadline, target: int | Antichain | None, is_there: Callable[[State], bool]) -> State:
        self._check_open()
        poll_s = self.machine.config.poll_s
        patience = Patience(self.machine, deadline, poll_s, poll_s)
        while True:
            version = patience.look()
            state = version.state
            if isinstance(target, int):
                self._check(state, target)
            elif state.is_finished() and target is None:
                self._check(state, MAX_TIME)
            if is_there(state):
                return state
            if isinstance(target, int) and self._completes is not None and self._completes(state, target, deadline):
                continue
            if patience.is_over:
                raise self._not_there(state, target, deadline)
            patience.pause(version.seqno)

    def _not_there(self, state: State, target: int | Antichain | None, deadline: Deadline) -> TimedOut:
        is_clock = self.schema.times is not None
        hint = '. If nothing came since then, write.advance_upper("now") says so' if is_clock else ""
        waited = f"waited {deadline.timeout_s:g} s for upper to pass" if deadline.timeout_s else "upper has to pass"
        message = (
            f"shard {self.shard}: {waited} {self._times().show(target)}, and upper is {self.schema.show(state.upper)}. "
            f"Nothing is lost; wait longer, or ask for an earlier time{hint}"
        )
        fields = {"timeout_s": deadline.timeout_s, "upper": state.upper, "shard": self.shard}
        return NotComplete(message, as_of=target, **fields) if isinstance(target, int) else TimedOut(message, **fields)

    def _check(self, state: State, as_of: int) -> None:
        """Raise unless this handle may still read as of that time."""
        if state.is_finished():
            raise ShardFinished(f"shard {self.shard} is finished for good: its contents are gone", shard=self.shard)
        if not self.read_only and self.id not in state.readers:
            raise self._lost()
        since = state.since if self.read_only else self._since
        if at(as_of) < since:
            show = self.schema.show
            later = "Nothing can be read any more" if since.is_top() else f"Read at {show(since)} or later"
            raise SinceViolation(
                f"shard {self.shard}: as_of {show(as_of)} is before since {show(since)}, from when on history is kept. "
                f"{later}; a hold would have kept it",
                as_of=as_of, since=since, shard=self.shard,
            )  # fmt: skip

    def _lost(self) -> LeaseExpired:
        if self._closed:
            return was_closed(self.machine, "reader")
        return LeaseExpired(
            f"shard {self.shard}: reader {self.id} is not live: its lease ended without a heartbeat, "
            "so history that it held may be gone; open a new reader",
            id=self.id, shard=self.shard,
        )  # fmt: skip

    def check_open(self) -> None:
        """Raise LeaseExpired if this handle was closed, and InvalidUsage if its client was."""
        self._check_open()
        self.machine.check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise self._lost()


def _newest(state: State) -> int:
    """The newest complete time: the last one before upper, or the last with data where upper is empty. -1: none yet."""
    if state.upper.time is not None:
        return state.upper.time - 1
    times = [part.time_upper for batch in state.trace for part in batch.parts]
    newest = max(times, default=0)
    return max(newest, state.since.time or 0)
