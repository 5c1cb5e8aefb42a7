"""Leases of batch reads: they keep history and parts while a query runs, without a process that stays alive.

The process that plans a query registers a reader, and tasks extend its lease while they read. It is not retired: its
lease ends when no task extends it. A worker of Spark that plans many queries uses one reader for those of half a lease,
so that a shard has few of them. When a lease is lost, nothing is wrong yet: tasks look for their parts in the newest
state (`slices`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.frontier import Antichain, at, meet_all
from persist_lib.ids import ReaderId, format_reader_id
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import RENEW_BELOW, renew

PURPOSE = "Spark batch read"
LOOK_AFTER = 0.25
"""The share of a lease after which a task looks whether it has to be extended."""


class Lease(NamedTuple):
    """The reader that keeps what a planned query reads, and when it was last known to be live (ms, this machine)."""

    id: ReaderId
    known_ms: int


_taken: dict[tuple[int, str, str], Lease] = {}


def take(client: Client, shard: str, as_of: int) -> Lease:
    """A live reader that keeps the contents as of a time, with half of its lease left or more."""
    machine, where = client.machine(shard), (os.getpid(), client.consensus_url, shard)
    lease_ms, now = machine.config.lease_ms, machine.runtime.clock_ms()
    known = _taken.get(where)
    if known is not None and now - known.known_ms < lease_ms // 2:
        entry = machine.fetch().state.readers.get(known.id)
        if entry is not None and entry.since <= at(as_of):
            return known
    found = _taken[where] = Lease(_register(machine, as_of), now)
    return found


def _register(machine: Machine, as_of: int) -> ReaderId:
    fresh, lease_ms = format_reader_id(machine.runtime.entropy()), machine.config.lease_ms
    done = machine.commit(lambda _state, now: c.RegisterReader(fresh, now + lease_ms, PURPOSE))
    wanted = let_go(done.after, at(as_of))
    if done.after.readers[fresh].since < wanted:
        machine.commit(lambda _state, now: c.DowngradeSince(fresh, wanted, done.seqno, now + lease_ms))
    return fresh


def let_go(state: State, since: Antichain, but: str | None = None) -> Antichain:
    """How far a reader or hold that needs history from `since` on may let go without ending the history of others.

    SUBTLE: since follows the least of all readers and holds. On a shard without another hold, a reader that moves would
    end the history before it for all others, though it only wanted to read. So it moves no further than the least hold,
    the one named `but` left out; without any, it keeps all that there is.
    """
    holds = [hold.since for name, hold in state.holds.items() if name != but]
    return state.since if not holds else since.meet(meet_all(holds)).join(state.since)


class Keeping:
    """Extends the lease of a query from a task that runs: `look` is called between the tables that it reads."""

    def __init__(self, client: Client, shard: str, lease: Lease | None) -> None:
        self._machine, self._lease = client.machine(shard), lease
        self._step_ms = int(self._machine.config.lease_ms * LOOK_AFTER)
        self._due_ms = (0 if lease is None else lease.known_ms) + self._step_ms

    def look(self) -> None:
        """Extend the lease if it is time to. Raises nothing: without it, the task looks for its parts again."""
        if self._lease is None:
            return
        now = self._machine.runtime.clock_ms()
        if now < self._due_ms:
            return
        self._due_ms = now + self._step_ms
        if not renew(self._machine, (self._lease.id,), self._machine.config.lease_ms, RENEW_BELOW):
            self._lease = None
