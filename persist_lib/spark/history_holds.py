"""Leases of batch reads, and the named hold of a stream, which keeps history however long the stream is stopped.

The hold is made before the first batch is read, moved forward when Spark says that a batch is done, and released at
the end of a closed shard. `persist describe` shows it with what it is for; `persist hold release` lets go of it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from persist_lib.catalog.collection_arguments import parse_hold
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.holds import let_go
from persist_lib.core.state import State
from persist_lib.errors import HoldConflict, SinceViolation
from persist_lib.frontier import at
from persist_lib.ids import ReaderId, format_reader_id, parse_hold_name
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import RENEW_BELOW, renew
from persist_lib.spark.offsets import Offset, Position

PURPOSE = "Spark batch read"
LOOK_AFTER = 0.25
"""The share of a lease after which a task looks whether it has to be extended."""


class Lease(NamedTuple):
    """The reader that keeps what a planned query reads, and when it was last known to be live (ms, this machine).

    The process that plans registers it, and tasks extend it while they read, without a process that stays alive. It is
    not retired: its lease ends when no task extends it. A worker of Spark that plans many queries uses one for those of
    half a lease, so that a shard has few of them. When a lease is lost, nothing is wrong yet: tasks look for their
    parts in the newest state (`slices`).
    """

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


def end_leases(machine: Machine) -> None:
    """End the leases of all batch reads: of a table that is to be dropped. What still reads it fails."""
    for id_, reader in machine.fetch().state.readers.items():
        if reader.purpose == PURPOSE:
            retire = c.Retire(id_)
            machine.try_commit(lambda _state, _now, retire=retire: retire)  # type: ignore[misc] # refused: it has ended


def _register(machine: Machine, as_of: int) -> ReaderId:
    fresh, lease_ms = format_reader_id(machine.runtime.entropy()), machine.config.lease_ms
    done = machine.commit(lambda _state, now: c.RegisterReader(fresh, now + lease_ms, PURPOSE))
    wanted = let_go(done.after, at(as_of))
    if done.after.readers[fresh].since < wanted:
        machine.commit(lambda _state, now: c.DowngradeSince(fresh, wanted, done.seqno, now + lease_ms))
    return fresh


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


STARTING = b"Spark stream, starting"
RUNNING = b"Spark stream"


class Holding:
    """The hold of one stream, as one process sees it. That of a table in the catalog is in its rendition shard."""

    def __init__(self, client: Client, shard: str, name: str | None, table: str, *, is_listed: bool) -> None:
        self._client = client
        self._machine: Machine = client.machine(shard)
        parse = parse_hold if is_listed else parse_hold_name
        self._name = None if name is None else parse(name)
        self._what = f"table {table}"
        self._seen: str | None = None
        self._drawn: str | None = None

    def begin(self, position: Position) -> str:
        """Keep what a stream needs that starts at a position, and return the name of its hold.

        A name that is drawn here is not known elsewhere before Spark has noted the first offset. If the query
        died first, its hold would stay for ever. So a lease keeps the history until the first batch is planned: then
        `check` makes the hold. A hold with a given name is made at once, and the next start of a query that died takes
        it over.

        Raises HoldConflict where another stream has the name, and SinceViolation where the history is gone.
        """
        machine, needed = self._machine, position.since or 0
        if self._name is None:
            self._drawn = self._drawn or f"spark-{machine.runtime.entropy():016x}"
            take(self._client, machine.shard, needed)
            if at(needed) < machine.state.since:
                raise self._gone("", needed, machine.state)
            return self._drawn
        name = self._name
        state = machine.fetch().state
        if (found := state.holds.get(name)) is not None and (found.opaque != STARTING or at(needed) < found.since):
            raise HoldConflict(
                f"{self._what} has a hold {name} already ({found.opaque.decode(errors='replace')!r}, from "
                f"{self._show(found.since.time)} on). A new query needs another name in the option "
                f"hold, or `persist hold release {self._what.partition(' ')[2]} {name}` first, if nothing needs it",
                name=name, expected=None, actual=found.opaque, shard=machine.shard,
            )  # fmt: skip
        if found is None:
            self._take(name, needed, STARTING)
        self._seen = name
        return name

    def check(self, offset: Offset) -> None:
        """Make sure that what comes after an offset is kept. A query that was restarted takes its hold again.

        Raises SinceViolation where the hold was released and the history is gone, and HoldConflict where it was
        released under a running query.
        """
        needed = offset.position.since
        if needed is None:
            return
        machine, name = self._machine, offset.hold
        state = machine.fetch().state
        if name in state.holds:
            self._seen = name
        elif at(needed) < state.since:
            raise self._gone(name, needed, state)
        elif self._seen == name:
            raise HoldConflict(
                f"{self._what}: the hold {name} of this stream was released while the query ran, so its "
                "history may be given up. Restart the query from its checkpoint: it takes the hold again, if what it "
                "needs is still there",
                name=name, expected=RUNNING, actual=None, shard=machine.shard,
            )  # fmt: skip
        else:
            self._take(name, needed, RUNNING)
            self._seen = name

    def move(self, offset: Offset) -> None:
        """Let go of what a stream that has come to an offset does not need any more. Never moves back."""
        self.check(offset)
        name, needed = offset.hold, offset.position.since
        hold = self._machine.state.holds.get(name)
        if hold is None:
            return
        if needed is None:
            self._machine.commit(lambda state, _now: c.ReleaseHold(name, state.holds.get(name, hold).opaque))
            return
        wanted = let_go(self._machine.state, at(needed), but=name)
        if hold.since < wanted or hold.opaque != RUNNING:

            def move(state: State, _now: int) -> c.DowngradeHold:
                own = state.holds.get(name, hold)
                return c.DowngradeHold(name, own.since.join(wanted), own.opaque, RUNNING)

            self._machine.commit(move)

    def _take(self, name: str, needed: int, opaque: bytes) -> None:
        machine = self._machine
        if at(needed) >= machine.state.since:
            machine.commit(lambda state, _now: c.DowngradeHold(name, let_go(state, at(needed), but=name), None, opaque))
        if at(needed) < machine.state.since:  # also if it went just before the hold was made
            raise self._gone("" if opaque == STARTING else name, needed, machine.state)

    def _gone(self, name: str, needed: int, state: State) -> SinceViolation:
        """The error where history is gone; without a name, that of a stream which has not begun."""
        shard, since = self._machine.shard, self._show(state.since.time)
        how = f"was to begin at {self._show(needed)}, and history before {since} has been given up. Nothing was read"
        if name:
            how = (
                f"has read up to {self._show(needed)}, and history before {since} was given up, as its hold {name} is "
                "gone. It cannot continue exactly where it was. Start it with another checkpointLocation: it then "
                "reads the contents first"
            )
        return SinceViolation(f"{self._what}: this stream {how}", as_of=needed, since=state.since, shard=shard)

    def _show(self, time: int | None) -> str:
        return self._machine.times().show(None if time is None else at(time))
