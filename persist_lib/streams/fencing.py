"""What keeps a predecessor out: its ids are retired, and it gets no others.

SUBTLE: to retire ids is not enough, as a predecessor that is refused would register again. So every registration of a
stream's writer is one commit with the lock's row. The hold's fencing value matters because moving since needs no id.
"""

from __future__ import annotations

from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.errors import Corrupt
from persist_lib.frontier import Antichain
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.admin import retire_writers
from persist_lib.shard.commit import Build, Committed, Machine, Wanted
from persist_lib.shard.leases import Leases
from persist_lib.streams.catalog import LAYER, Record
from persist_lib.streams.lock import Lock, WriterLock, commit_together
from persist_lib.write.registration import Registration

HOLD = "stream"
"""The hold of a sealed shard that keeps the stream's history. Its fencing value is an epoch."""


class FencedRegistration(Registration):
    """A writer id that is registered together with the lock's row."""

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
    # SUBTLE: the hold first, as nothing else registers an id from then on. A new stream has none before.
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
        raise Corrupt(f"the hold {HOLD!r} has the fencing value {opaque!r}, which is no epoch", key=HOLD)
    return int(opaque)
