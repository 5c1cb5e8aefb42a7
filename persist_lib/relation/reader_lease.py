"""What a reader keeps: the lease of its id, the history from its since on, and the states that are being read from.

The library's own modules reach it by `held.kept_of(reader)`. Callers have the reader, which does not show it.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from persist_lib.core import commands as c
from persist_lib.core.holds import let_go_unasked
from persist_lib.core.state import State, Version
from persist_lib.errors import LeaseExpired, Missing, Refused, ShardFinished, SinceViolation
from persist_lib.frontier import Antichain, at
from persist_lib.ids import ReaderId, SeqNo, format_reader_id
from persist_lib.relation.held import Named
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases, Registering, was_closed


class Kept(ABC):
    """The history that a reader keeps."""

    @property
    @abstractmethod
    def since(self) -> Antichain:
        """The earliest frontier at which it can read."""

    @abstractmethod
    def check_since(self, time: int) -> None:
        """Raise unless it may still read as of that time."""

    @abstractmethod
    def let_go(self, since: Antichain) -> None:
        """Give up history before `since` at the next tick, not now. Listeners use this."""

    @abstractmethod
    def downgrade(self, since: Antichain) -> None:
        """Give up history before `since` now."""


K = TypeVar("K", bound=Kept)


class Reading:
    """A state that is being read from. All that it refers to is kept until `release`, or until this is dropped."""

    def __init__(self, lease: ReaderLease, version: Version) -> None:
        self.version = version
        self._lease = lease

    def release(self) -> None:
        self._lease.release(self)


class ReaderLease(Kept):
    """One reader id of a shard, registered when this is made; none for one that is read-only, which keeps nothing."""

    def __init__(
        self, machine: Machine, leases: Leases, schema: Schema, *, read_only: bool, purpose: str,
        original: ReaderId | None,
    ) -> None:  # fmt: skip
        self.machine, self.read_only, self.leases = machine, read_only, leases
        self._schema = schema
        self._lock = threading.RLock()
        self._readings: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._since = self._wanted = machine.state.since
        self.id: ReaderId | None = None
        self._closed = False
        enrol(self, Stage.HANDLES)
        if not read_only:
            self._register(purpose, original)

    def after_fork_in_child(self) -> None:
        """Make a new lock, as a thread that exists only in the parent may hold the old one."""
        self._lock = threading.RLock()

    @property
    def since(self) -> Antichain:
        return self.machine.state.since if self.read_only else self._since

    def let_go(self, since: Antichain) -> None:
        self._wanted = self._wanted.join(since)

    def acquire(self, as_of: int) -> Reading:
        """Hold the newest known state. Raises unless the contents as of `as_of` can be read from it."""
        self.check_not_closed()
        with self._lock:
            version = self.machine.version
            self.check(version.state, as_of)
            reading = Reading(self, version)
            self._readings.add(reading)
            return reading

    def release(self, reading: Reading) -> None:
        with self._lock:
            self._readings.discard(reading)

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
        """The error to raise if this id is retired in `state` (None: the newest state); None while it is live."""
        state = state or self.machine.fetch().state
        self.machine.check_same(state)
        return None if self.read_only or self.id in state.readers else self._lost()

    def close(self) -> None:
        """Retire the id. Idempotent. since stays until another reader or a hold moves it."""
        self._closed = True
        with self._lock:
            if self.id is None:
                return
            self.leases.every_tick(self, None)
            self.leases.retire(self.machine, self.id)
            self._dropped.detach()
            self.id = None  # last: after an interrupt, the next `close` does the rest

    def check_since(self, time: int) -> None:
        self.check_not_closed()
        self.check(self.machine.state, time)

    def check(self, state: State, as_of: int) -> None:
        """Raise unless what a state has may still be read as of that time."""
        shard = self.machine.shard
        if state.is_finished():
            raise ShardFinished(f"shard {shard} is finished for good: its contents are gone", shard=shard)
        self.machine.check_same(state)
        if not self.read_only and self.id not in state.readers:
            raise self._lost()
        since = state.since if self.read_only else self._since
        if at(as_of) < since:
            raise too_early(Named("shard", shard), self._schema, as_of, since)

    def check_open(self) -> None:
        """Raise LeaseExpired if this was closed, and InvalidUsage if its client was."""
        self.check_not_closed()
        self.machine.check_open()

    def check_not_closed(self) -> None:
        if self._closed:
            raise self._lost()

    def downgrade(self, since: Antichain) -> None:
        self._downgrade(since, lambda _state, since: since)

    def _downgrade(self, since: Antichain, allowed: Callable[[State, Antichain], Antichain]) -> None:
        since = self._since.join(since)
        reader, lease_ms = self.id, self.machine.config.lease_ms
        if reader is None:
            raise self._lost()
        oldest = self._oldest_active()
        self._since = since  # first, so that no read before it begins while that history is being given up

        def build(state: State, now: int) -> c.DowngradeSince:
            return c.DowngradeSince(reader, allowed(state, since), oldest, now + lease_ms)

        self.machine.commit(build)

    def move_hold(self) -> None:
        """Let go of states that are no longer read from. Called in the background; a no-op where it frees nothing."""
        state = self.machine.follow().state
        entry = state.readers.get(self.id) if self.id is not None else None
        if entry is None:
            return
        # Do not move the hold just because there are newer states. Moving it makes a new state, so that would
        # never end.
        oldest = self._oldest_active()
        is_in_the_way = any(entry.seqno <= g.seqno < oldest for g in state.garbage.values()) or any(
            entry.seqno < rollup <= oldest for rollup in state.rollups
        )
        wanted = let_go_unasked(state, self._wanted)
        if is_in_the_way or entry.since < wanted:
            with suppress(Refused):  # expired: the next read raises LeaseExpired
                self._downgrade(wanted, let_go_unasked)

    def _register(self, purpose: str, original: ReaderId | None) -> None:
        fresh, lease_ms = format_reader_id(self.machine.runtime.entropy()), self.machine.config.lease_ms

        def build(_state: State, now: int) -> c.RegisterReader | c.CloneReader:
            until = now + lease_ms
            if original is None:
                return c.RegisterReader(fresh, until, purpose)
            return c.CloneReader(fresh, original, until, purpose)

        self.leases.prepare()
        with Registering(self.leases, self.machine, fresh):
            done = self.machine.commit(build)
            self._since = self._wanted = done.after.readers[fresh].since
            self.leases.keep(self.machine, fresh)
            self._dropped = weakref.finalize(self, self.leases.abandon, self.machine, fresh)
            self._dropped.atexit = False
            self.id = fresh
        self_ = weakref.ref(self)

        def tick() -> None:
            if (lease := self_()) is not None:
                lease.move_hold()

        self.leases.every_tick(self, tick)

    def _oldest_active(self) -> SeqNo:
        with self._lock:
            # SUBTLE: a read that begins after this takes `machine.version` or newer, under this same lock.
            return min([*(reading.version.seqno for reading in self._readings), self.machine.version.seqno])

    def _lost(self) -> LeaseExpired:
        if self._closed:
            return was_closed(self.machine, "reader")
        return LeaseExpired(
            f"shard {self.machine.shard}: reader {self.id} is not live: its lease ended without a heartbeat, "
            "so history that it held may be gone; open a new reader",
            id=self.id, shard=self.machine.shard,
        )  # fmt: skip


def too_early(named: Named, schema: Schema, time: int, since: Antichain) -> SinceViolation:
    """The error for a read of something as of a time before `since`."""
    show = schema.show
    later = "Nothing can be read any more" if since.is_top() else f"Read at {show(since)} or later"
    return SinceViolation(
        f"{named}: as_of {show(time)} is before since {show(since)}, from when on history is kept. "
        f"{later}; a hold would have kept it",
        as_of=time, since=since, **named.fields,
    )  # fmt: skip
