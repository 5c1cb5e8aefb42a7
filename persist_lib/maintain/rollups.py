"""Rollups: whole copies of the state in Blob, so that opening a shard replays little."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.plan.upkeep import last_deletion, rollup_is_due
from persist_lib.core.state import State
from persist_lib.format.paths import blob_key, rollup_key
from persist_lib.ids import SeqNo, WriterId
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.worker import Worker
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.log import encode_rollup


class RolledUp(msgspec.Struct, frozen=True):
    """A rollup that was written; `key` is None if none was due. `behind` is how many versions the newest one lagged."""

    key: str | None
    seqno: SeqNo
    size: int
    behind: int
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


@charged
def roll_up(machine: Machine, worker: Worker, *, force: bool = False, dry_run: bool = False) -> RolledUp:
    """Write and link a rollup if one is due, or always with `force`: one object, and one or two transitions.

    With `dry_run` it only says how far the newest rollup lags. Without `force`, calling it again writes nothing until
    the next rollup is due.
    """
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
