"""The writer's lock of a location: who may write its streams, by an epoch that only grows.

It is a shard, and in it a hold whose fencing value is the lock. A takeover replaces that value by one transition.
Whatever must not be done by a predecessor is committed together with a transition of this shard, which is refused
unless the epoch is the caller's. Leases only decide who may take the lock without a reentrance id.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial

import msgspec

from persist_lib.arguments import UNREADABLE, parse_integer
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import State
from persist_lib.errors import Corrupt, Fenced, Locked, NewerFormat, NotFound, PersistError
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.relation.registration import Registration
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import claim, create_if_missing, retire_writers
from persist_lib.shard.commit import Build, Committed, Done, Machine, Undone, Wanted, try_commit_all
from persist_lib.shard.leases import Leases
from persist_lib.streams.stream_list import LAYER, Record

log = logging.getLogger("persist.streams")
SHARD = "streams.lock"
WRITER = "writer"
SCHEMA = Schema(key={"name": "string not null"})
ENCODING = 1
"""What this release stores of streams. Older data is wiped if `open` says so, newer data is never touched."""
RENEW_BELOW = 0.6
"""The lease is renewed when less than this share of it is left."""


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lock. `instance` is the runtime that holds it, empty for none. `lease_until` is ms of the store's clock."""

    epoch: int = 0
    instance: str = ""
    reentrance: str = ""
    owner: str = ""
    lease_until: int = 0
    encoding: int = ENCODING

    def is_held(self, now: int) -> bool:
        """Whether a runtime has it, and has not let its lease end."""
        return bool(self.instance) and now < self.lease_until


class _Encoding(msgspec.Struct):
    """All that a lock of any release says in the same place."""

    encoding: int


def lock_of(state: State) -> Lock:
    """The lock in a state of its shard. Raises NewerFormat for one that a newer release wrote."""
    hold = state.holds.get(WRITER)
    if hold is None:
        return Lock()
    try:
        encoding = msgspec.json.decode(hold.opaque, type=_Encoding).encoding
        if encoding > ENCODING:
            raise NewerFormat(
                f"the streams of this location were written by a newer release (encoding {encoding}; this one knows "
                f"{ENCODING}). Nothing was touched: upgrade this program",
                found=encoding, known=ENCODING,
            )  # fmt: skip
        return msgspec.json.decode(hold.opaque, type=Lock)
    except UNREADABLE as error:
        raise Corrupt(
            f"shard {SHARD}: the hold {WRITER!r} has the fencing value {hold.opaque!r}, which is not a lock: {error}. "
            "Something else has set it. Nothing was changed",
            key=SHARD,
        ) from error


def fetch_lock(client: Client) -> Lock | None:
    """The lock of a client's location, read from it; None where there were never any streams."""
    version = client.machine(SHARD).try_fetch()
    return None if version is None or WRITER not in version.state.holds else lock_of(version.state)


def break_lock(client: Client, *, epoch: int | None = None) -> Lock:
    """Free the lock, so that the next runtime can take it without a reentrance id. Returns it as it is then.

    The runtime that held it registers no writer and creates no stream from then on; the next takeover ends its writes.
    With `epoch`, the lock is only freed if that is still its epoch; otherwise this raises Locked. Does nothing when
    no runtime holds it. Raises NotFound where there were never any streams.
    """
    epoch = None if epoch is None else parse_integer(epoch, "epoch")
    if fetch_lock(client) is None:
        raise NotFound(f"there are no streams in {client.url}, so there is no lock of their writer", url=client.url)

    def build(state: State, _now: int) -> c.SetHold:
        found = lock_of(state)
        if epoch is not None and found.epoch != epoch:
            raise Locked(
                f"the lock of {client.url} is at epoch {found.epoch} by now, not at {epoch}: another runtime "
                f"({found.owner or found.instance}) has taken it since. It was not broken; look at it again",
                epoch=found.epoch, owner=found.owner, lease_until=found.lease_until,
            )  # fmt: skip
        free = Lock(found.epoch + 1, encoding=found.encoding) if found.instance else found
        return _set(state, free)

    return lock_of(client.machine(SHARD).commit(build).after)


class WriterLock:
    """The lock as one runtime sees it. `epoch` is its own, 0 before it has taken it."""

    def __init__(self, client: Client, reentrance: str, owner: str) -> None:
        self._client, self._reentrance, self._owner = client, reentrance, owner
        self._machine = client.machine(SHARD)
        self.epoch = 0
        self.after_fork_in_child()
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        """The parent's instance has the lock: this one is another, so it neither renews nor releases it."""
        self._instance = f"{self._client.runtime.entropy():016x}"

    def take(self, *, wipes: bool) -> Lock:
        """Move the epoch to one of this runtime's own. Returns the lock as it was before.

        Raises Locked when another runtime holds it, unless that has the same reentrance id; and NewerFormat for what a
        newer release wrote. What an older encoding wrote is refused too, unless the caller `wipes` it.
        """
        create_if_missing(self._machine, SCHEMA, self._client.config.format)
        before = lock_of(self._machine.fetch().state)

        def build(state: State, now: int) -> c.SetHold:
            nonlocal before
            found = lock_of(state)
            if found.instance == self._instance:  # an earlier attempt took it after all
                return _set(state, found)
            self._check_free(found, now)
            if found.epoch and found.encoding < ENCODING and not wipes:
                raise NewerFormat(
                    f"the streams of {self._client.url} were written in encoding {found.encoding}, and this release "
                    f"writes {ENCODING} and reads no older one. Nothing was touched. Read them with the release that "
                    "wrote them; or, if they can be made again, drop them: open with wipe_older=True, or run "
                    "`persist streams wipe`",
                    found=found.encoding, known=ENCODING,
                )  # fmt: skip
            before = found
            # While older data is being wiped, the lock still says that it is there.
            return _set(state, self._ours(found.epoch + 1, now, found.encoding if found.epoch else ENCODING))

        self.epoch = lock_of(self._machine.commit(build).after).epoch
        claim(self._machine, LAYER)
        self._client.leases.prepare()
        self_ = weakref.ref(self)

        def tick() -> None:
            if (lock := self_()) is not None:  # a runtime that was dropped without `close` renews no lock
                lock.renew()

        self._client.leases.every_tick(self, tick)
        return before

    def row(self, *, wiped: bool = False) -> Wanted:
        """The transition of the lock that goes with what a predecessor must not do. Raises Fenced if it is lost.

        `wiped`: with it, nothing of an older encoding is left.
        """
        return Wanted(self._machine, partial(self._renewing, wiped=wiped))

    def check(self) -> None:
        """Raise Fenced if another runtime has taken the lock. Read from the location."""
        self._still_ours(self._machine.fetch().state)

    def renew(self) -> None:
        """Extend the lease if that is due. A lock that was lost is left alone: the next call that matters finds out."""
        lease_ms, now = self._client.config.lease_ms, self._machine.consensus.now()
        if lock_of(self._machine.state).lease_until - now > RENEW_BELOW * lease_ms:
            return
        try:
            self._machine.commit(self._renewing)
        except Fenced:
            self._client.leases.every_tick(self, None)

    def release(self) -> None:
        """Let the next runtime take it at once. Failures are logged, as the lease ends by itself."""
        self._client.leases.every_tick(self, None)
        try:
            self._machine.commit(lambda state, _now: _set(state, self._still_ours(state, released=True)))
        except Fenced:
            pass
        except PersistError as error:
            log.warning("could not release the lock of the streams' writer, whose lease ends by itself: %s", error)

    def fenced(self, found: Lock) -> Fenced:
        who = found.owner or found.instance or "an operator who broke the lock"
        return Fenced(
            f"this runtime wrote the streams of {self._client.url} in epoch {self.epoch}, and {who} has moved the lock "
            f"to epoch {found.epoch} since. It commits nothing more; what it acknowledged is there. Open a new runtime",
            epoch=self.epoch, found=found.epoch, owner=found.owner,
        )  # fmt: skip

    def _renewing(self, state: State, now: int, *, wiped: bool = False) -> c.SetHold:
        found = self._still_ours(state)
        # Always a later end, so that there is always a transition: its row is what fences the others.
        later = max(now, found.lease_until + 1 - self._client.config.lease_ms)
        return _set(state, self._ours(found.epoch, later, ENCODING if wiped else found.encoding))

    def _still_ours(self, state: State, *, released: bool = False) -> Lock:
        found = lock_of(state)
        if (found.epoch, found.instance) != (self.epoch, self._instance):
            raise self.fenced(found)
        return msgspec.structs.replace(found, instance="", lease_until=0) if released else found

    def _ours(self, epoch: int, now: int, encoding: int) -> Lock:
        until = now + self._client.config.lease_ms
        return Lock(epoch, self._instance, self._reentrance, self._owner, until, encoding)

    def _check_free(self, found: Lock, now: int) -> None:
        if not found.is_held(now) or (self._reentrance and self._reentrance == found.reentrance):
            return
        with_id = "with another reentrance id" if found.reentrance else "without a reentrance id"
        raise Locked(
            f"the streams of {self._client.url} have a writer already, {with_id}: {found.owner or found.instance}, in "
            f"epoch {found.epoch}, until {max(0, found.lease_until - now) / 1000:.0f} s from now unless it renews its "
            "lease. Stop it; if it is gone, wait, or break its lock: `persist streams unlock`",
            epoch=found.epoch, owner=found.owner, lease_until=found.lease_until,
        )  # fmt: skip


def _set(state: State, lock: Lock) -> c.SetHold:
    """The command that makes this the lock, if the lock is still as in `state`."""
    hold = state.holds.get(WRITER)
    return c.SetHold(WRITER, MINIMUM, None if hold is None else hold.opaque, msgspec.json.encode(lock))


def commit_together(wanted: Sequence[Wanted], deadline: Deadline, token: bytes | None = None) -> Sequence[Done]:
    """Commit transitions of several shards, all or none. Raises the refusal of one of them."""
    answer = try_commit_all(wanted, deadline, token or deadline.runtime.token())
    if isinstance(answer, Undone):
        refused = [at for at, refusal in answer.refusals.items() if not isinstance(refusal, r.AlreadyDone)]
        at = (refused or list(answer.refusals))[0]
        raise wanted[at].machine.refused(answer.refusals[at])
    return answer


HOLD = "stream"
"""The hold of a sealed shard that keeps the stream's history. Its fencing value is an epoch."""


class FencedRegistration(Registration):
    """A writer id that is registered together with the lock's row.

    SUBTLE: to retire a predecessor's ids is not enough, as one that is refused would register again. And the hold's
    fencing value matters because moving since needs no id.
    """

    def __init__(self, machine: Machine, leases: Leases, lock: WriterLock, owner: str) -> None:
        super().__init__(machine, leases, "ingest", owner, LAYER)
        self._lock = lock

    def _commit(self, build: Build, deadline: Deadline) -> Committed:
        done = commit_together((Wanted(self._machine, build), self._lock.row()), deadline)[0]
        return done if isinstance(done, Committed) else self._machine.commit(build, deadline.remaining_s())


def fence(client: Client, record: Record, lock: WriterLock) -> None:
    """End what predecessors may still do to a stream. Call this once the lock is taken, and load the stream after it.

    Raises Fenced when a newer epoch was here.
    """
    # The hold first, as nothing else registers an id from then on. A new stream has none before.
    client.machine(record.sealed).commit(lambda state, _now: hold_command(state, lock))
    for name in (record.sealed, record.unsealed):
        retire_writers(client.machine(name))


def hold_command(state: State, lock: WriterLock, since: Antichain | None = None) -> c.SetHold | c.DowngradeHold:
    """The command that makes the hold this epoch's, or moves it there (`since`: a frontier). It never moves back."""
    hold, mine = state.holds.get(HOLD), b"%d" % lock.epoch
    if hold is not None and (found := epoch_of(hold.opaque)) > lock.epoch:
        raise lock.fenced(Lock(found))
    least, expected = (state.since, None) if hold is None else (hold.since, hold.opaque)
    if since is None:
        return c.SetHold(HOLD, least, expected, mine)
    return c.DowngradeHold(HOLD, least.join(since), expected, mine)


def epoch_of(opaque: bytes) -> int:
    """The epoch that a stream's hold has as its fencing value."""
    if not opaque.isdigit():
        raise Corrupt(f"the hold {HOLD!r} has the fencing value {opaque!r}, which is not an epoch", key=HOLD)
    return int(opaque)
