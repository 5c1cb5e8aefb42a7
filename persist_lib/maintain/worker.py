"""A maintenance worker: a writer id that compacts and rolls up, registered only once there is work.

Rollups are whole copies of the state in Blob, so that opening a shard replays little.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.plan.upkeep import has_ended, last_deletion, rollup_is_due
from persist_lib.core.state import State, Version
from persist_lib.errors import Busy, PersistError
from persist_lib.format.paths import blob_key, rollup_key
from persist_lib.ids import SeqNo, ShardId, WriterId
from persist_lib.location.wrap.spending import charged
from persist_lib.relation.registration import Registration
from persist_lib.runtime.threads import Resource
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.leases import Leases
from persist_lib.shard.log import encode_rollup
from persist_lib.telemetry import duty

log = logging.getLogger("persist.maintenance")
Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is: updates that are merged, objects, batches or shards."""


class Uploader(Protocol):
    """An object that has the id of a live writer. Parts are uploaded under that id."""

    @property
    def id(self) -> WriterId: ...


class Worker(Resource):
    """One shard's worker for the length of a `with` block. The first use of `id` registers it, the end retires it.

    With `alone`, `id` raises Busy while another maintenance writer of this shard is live. That saves work done twice;
    correctness does not rest on it, as every result is decided by a compare-and-set. A worker that did not ask to be
    alone is not kept out, but keeps out those that do. `judge` is as in `Registration`.
    """

    def __init__(
        self, machine: Machine, leases: Leases, *, alone: bool = False, judge: Callable[[Version], object] | None = None
    ) -> None:
        self.machine = machine
        self.alone = alone
        self._registration = Registration(machine, leases, "maintenance", judge=judge)

    @property
    def id(self) -> WriterId:
        """A live maintenance writer's id. Raises Busy if the worker is to be alone and is not."""
        if self.alone and not self._registration.has_id and self._others(self.machine.state):
            self._refuse(self._others(self.machine.fetch().state))  # without the two transitions that it would cost
        deadline = self.machine.runtime.deadline(self.machine.config.timeout_s)
        return self._registration.register(deadline, self._check_alone)

    def _check_alone(self, registered: Committed) -> None:
        """Retire the fresh id and raise Busy if another worker was live when this one registered.

        The commit tells. Two workers that register at once do so in one order, so exactly the second one sees
        the other. A look before the registration could be made by both at once, and by neither afterwards.
        """
        if self.alone and (others := self._others(registered.before)):
            try:
                self._registration.retire()
            except PersistError as error:
                self._registration.forget()  # its lease ends by itself
                log.warning("shard %s: could not retire the worker's id: %s", self.machine.shard, error)
            self._refuse(others)

    def close(self) -> None:
        self._registration.close()

    def _others(self, state: State) -> dict[WriterId, int]:
        """The maintenance writers whose lease has not ended, and until when it lasts."""
        now = self.machine.consensus.now()
        return {
            id_: writer.lease_until
            for id_, writer in state.writers.items()
            if writer.purpose == "maintenance" and not has_ended(writer.lease_until, now)
        }

    def _refuse(self, others: Mapping[WriterId, int]) -> None:
        if others:
            worker = max(others, key=lambda id_: others[id_])
            raise _busy(self.machine.shard, worker, others[worker], self.machine.consensus.now())


def _busy(shard: ShardId, worker: WriterId, lease_until: int, now: int) -> Busy:
    until = f"{dt.datetime.fromtimestamp(lease_until / 1000, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Busy(
        f"shard {shard}: the worker {worker} is at maintenance work here, and this call is to be alone at it. Nothing "
        f"was changed. Try again when that worker is done. If it is dead, its lease ends at {until}, which is in "
        f"{max(1, round((lease_until - now) / 1000))} s",
        shard=shard, worker=worker, lease_until=lease_until,
    )  # fmt: skip


class RolledUp(msgspec.Struct, frozen=True):
    """A rollup that was written; `key` is None if none was due. `behind` is how many versions the newest one lagged."""

    key: str | None
    seqno: SeqNo
    size: int
    behind: int
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


@duty("rollups")
@charged
def roll_up(machine: Machine, worker: Worker, *, force: bool = False, dry_run: bool = False) -> RolledUp:
    """Write and link a rollup if one is due, or always with `force`: one object, and one or two transitions.

    With `dry_run` it only says how far the newest rollup lags. Without `force`, calling it again writes nothing until
    the next rollup is due.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "rollups")
    version = machine.fetch()
    behind = version.seqno - version.state.newest_rollup
    if dry_run or not (force or rollup_is_due(version.state, version.seqno, machine.config.rollup_every)):
        return RolledUp(None, version.seqno, 0, behind)
    id_ = WriterId("") if version.state.is_finished() else worker.id
    _move_beyond_garbage(machine, id_)
    return msgspec.structs.replace(write_rollup(machine, id_), behind=behind)


def _move_beyond_garbage(machine: Machine, id_: WriterId) -> None:
    """Commit once more if the newest version deleted something: a rollup frees only what was deleted before it.

    A live worker extends its lease. A tombstone has no worker, so an additional rollup is written instead.
    """
    if last_deletion(machine.state) < machine.version.seqno:
        return
    if not id_:
        write_rollup(machine, id_)
        return
    lease_ms = machine.config.lease_ms

    def renew(state: State, now: int) -> c.Heartbeat:
        known = state.writers.get(id_)
        return c.Heartbeat((id_,), max(now + lease_ms, known.lease_until + 1 if known else 0))

    machine.commit(renew)


def write_rollup(machine: Machine, worker: WriterId) -> RolledUp:
    """Copy the newest state to Blob and link the copy. A worker that loses a race leaves an orphan for the audit."""
    version = machine.fetch()
    behind = version.seqno - version.state.newest_rollup
    key = rollup_key(version.seqno, machine.runtime.entropy())
    data, rollup = encode_rollup(version, key)
    machine.blob.set(blob_key(machine.shard, key), data)
    answer = machine.try_commit(lambda _state, _now: c.AddRollup(worker, version.seqno, rollup))
    if isinstance(answer, Committed):
        return RolledUp(key, version.seqno, len(data), behind)
    if isinstance(answer, r.TooOld):
        return RolledUp(None, version.seqno, 0, behind)
    raise machine.refused(answer)
