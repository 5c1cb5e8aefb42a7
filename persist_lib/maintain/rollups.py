"""Rollups: whole copies of the state in Blob, so that opening a shard replays little."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.state import State
from persist_lib.format.paths import blob_key, rollup_key
from persist_lib.history import encode_rollup
from persist_lib.ids import SeqNo, WriterId, parse_rollup_key
from persist_lib.location.spending import charged
from persist_lib.machine import Committed, Machine, refused
from persist_lib.maintain.worker import Worker


class RolledUp(msgspec.Struct, frozen=True):
    """A rollup that was written, or None in `key` when none was due. `behind` is how far the newest one lagged."""

    key: str | None
    seqno: SeqNo
    size: int
    behind: int
    cost: Cost = Cost()
    """What it asked of the location. A dry run only looks."""


def is_due(state: State, seqno: SeqNo, every: int) -> bool:
    """Whether the newest rollup lags `every` transitions behind, or garbage waits for a newer one."""
    newest = state.newest_rollup
    # SUBTLE: old rollups are garbage that waits for no newer one; or each rollup would make the next one due.
    waits = any(g.seqno > newest for key, g in state.garbage.items() if parse_rollup_key(key) is None)
    return seqno - newest >= every or waits or (state.is_finished() and newest == 0)


def is_duty(committed: Committed, every: int) -> bool:
    """Whether the writer of this append is the one to roll up: its is the first append from a multiple of `every` on.

    What it does not achieve is left to the first from the next multiple on. A rollup of maintenance counts for a
    multiple that comes within half of `every` after it.
    """
    due = committed.seqno - committed.seqno % every
    if 2 * (due - committed.after.newest_rollup) < max(2, every):
        return False
    writers = committed.before.writers.values()
    return all(not writer.outcomes or writer.outcomes[-1].seqno < due for writer in writers)


@charged
def roll_up(machine: Machine, worker: Worker, *, force: bool = False, dry_run: bool = False) -> RolledUp:
    """Write and link a rollup if one is due. One object, one transition."""
    version = machine.fetch()
    behind = version.seqno - version.state.newest_rollup
    if dry_run or not (force or is_due(version.state, version.seqno, machine.config.rollup_every)):
        return RolledUp(None, version.seqno, 0, behind)
    return write_rollup(machine, WriterId("") if version.state.is_finished() else worker.id)


def write_rollup(machine: Machine, worker: WriterId) -> RolledUp:
    """Copy the newest state to Blob and link the copy. Whoever loses a race leaves an orphan for the audit."""
    version = machine.fetch()
    behind = version.seqno - version.state.newest_rollup
    key = rollup_key(version.seqno, machine.runtime.entropy())
    data, rollup = encode_rollup(version, key)
    machine.blob.set(blob_key(machine.shard, key), data)
    answer = machine.try_commit(lambda _state, _now: c.AddRollup(worker, version.seqno, rollup))
    if isinstance(answer, Committed):
        return RolledUp(key, version.seqno, len(data), behind)
    if isinstance(answer, c.TooOld):
        return RolledUp(None, version.seqno, 0, behind)
    raise refused(machine.shard, answer)
