"""Reading: one handle, one reader id, snapshots as of a time, and listening to updates after a time.

A handle keeps history from its `since` on. As long as it does, every snapshot at or beyond that time has the same
contents, whichever client reads it and whenever. A read-only handle keeps nothing: other clients may give up the
history that it reads, and then it raises an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from persist_lib.arguments import parse_seconds, parse_text
from persist_lib.core import commands as c
from persist_lib.core.holds import let_go_unasked
from persist_lib.core.state import State, Version
from persist_lib.errors import (
    LeaseExpired,
    Missing,
    Refused,
    ShardFinished,
)
from persist_lib.frontier import MAX_TIME, TOP, Antichain, at
from persist_lib.ids import ReaderId, SeqNo, format_reader_id
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.base_reader import Reader
from persist_lib.relation.changes import PlaceUpdates
from persist_lib.relation.held import Named
from persist_lib.relation.listen import Listen, Patience
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.snapshot import Snapshot, snapshot_known
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering, was_closed
from persist_lib.shard.pushed_rows import follow
from persist_lib.times import TimeLike

if TYPE_CHECKING:
    pass

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


class ReadHandle(Reader[Snapshot]):
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
        self.named, self.schema = Named("shard", machine.shard), schema
        self.around = self.machine = machine
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
        return self.machine.state.since if self.read_only else self._since

    @property
    def upper(self) -> Antichain:
        """The newest upper of the shard that this process has seen. `fetch_upper` reads it from the location."""
        return self.machine.state.upper

    def fetch_upper(self) -> Antichain:
        """Read the shard's current upper from the location."""
        state = self.machine.fetch().state
        self.machine.check_same(state)
        return state.upper

    def listen(self, as_of: TimeLike, *, until: object = TOP, timeout: float | None = None) -> Listen:
        """Return an iterator of what happens after `as_of`: updates at their exact times, and progress.

        The iterator waits for updates, and ends at the frontier `until` or when the shard is closed for writing. It
        raises TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). The listener has a lease of
        its own, and keeps back no history that others give up. Where the shard's times are a clock, `as_of` and `until`
        may be given as in `snapshot`, and `_time` is a timestamp in UTC.
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
            handle.let_go(at(start))
            handle.move_hold()
        return Listen(handle, start, end, timeout)

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

    def let_go(self, since: Antichain) -> None:
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
        self.machine.check_same(state)
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

    def check_since(self, time: int) -> None:
        self._check_open()
        self._check(self.machine.state, time)

    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> Snapshot:
        rows = asked.of(self.schema, str(self.named))
        with Spending() as spent:
            chosen = self._reach(as_of, -1, deadline)
        held = self.acquire(chosen if chosen >= 0 else self.machine.state.since.time or 0)
        return snapshot_known(self, chosen, rows, held, spent)

    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        target = time if time is not None or least < 0 else least
        state = self._wait(deadline, target)
        return max(least, _newest(state)) if time is None else time

    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        return self._wait(deadline, target).upper

    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> list[PlaceUpdates]:  # noqa: ARG002 - it is there
        return [PlaceUpdates(self, from_, to)]

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
        wanted = let_go_unasked(state, self._wanted)
        if is_in_the_way or entry.since < wanted:
            with suppress(Refused):  # expired: the next read raises LeaseExpired
                self._downgrade(wanted, let_go_unasked)

    def _downgrade(self, since: Antichain, unkept: Callable[[State, Antichain], Antichain] | None = None) -> None:
        since = self._since.join(since)
        reader, lease_ms = self.id, self.machine.config.lease_ms
        if reader is None:
            raise self._lost()
        oldest = self._oldest_active()
        self._since = since  # first, so that no read before it begins while that history is being given up

        def build(state: State, now: int) -> c.DowngradeSince:
            return c.DowngradeSince(reader, unkept(state, since) if unkept else since, oldest, now + lease_ms)

        self.machine.commit(build)

    def _oldest_active(self) -> SeqNo:
        with self._lock:
            # SUBTLE: a read that begins after this takes `machine.version` or newer, under this same lock.
            return min([*(reading.version.seqno for reading in self._readings), self.machine.version.seqno])

    def release(self, reading: Reading) -> None:
        """Stop keeping the state of a read that is over."""
        with self._lock:
            self._readings.discard(reading)

    def _wait(self, deadline: Deadline, target: int | Antichain | None) -> State:
        """The state in which upper has passed a time, or is at or beyond a frontier; None: the newest one."""
        self._check_open()
        poll_s = self.machine.config.poll_s
        patience = Patience(self.machine, deadline, poll_s, poll_s)
        while True:
            version = patience.look()
            state = version.state
            self.machine.check_same(state)
            if isinstance(target, int):
                self._check(state, target)
            elif state.is_finished() and target is None:
                self._check(state, MAX_TIME)
            if target is None or (state.upper.has_passed(target) if isinstance(target, int) else target <= state.upper):
                return state
            if isinstance(target, int) and self._completes is not None and self._completes(state, target, deadline):
                continue
            if patience.is_over:
                raise self._not_there(state.upper, target, deadline)
            patience.pause(version.seqno)

    def _check(self, state: State, as_of: int) -> None:
        """Raise unless this handle may still read as of that time."""
        if state.is_finished():
            raise ShardFinished(f"shard {self.shard} is finished for good: its contents are gone", shard=self.shard)
        self.machine.check_same(state)
        if not self.read_only and self.id not in state.readers:
            raise self._lost()
        since = state.since if self.read_only else self._since
        if at(as_of) < since:
            raise self.too_early(as_of, since)

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
