"""Physical deletion: garbage that no live reader can reach, log rows that no reader needs, and orphans.

Blobs go first, rows after; whoever dies in between leaves work that the next pass finds again. An object that cannot be
deleted stays on the list; a listing that fails shrinks what is deleted, never grows it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.garbage import Collection, Held, Orphans, plan_collection, plan_orphans
from persist_lib.core.state import State
from persist_lib.format.paths import blob_key, prefix
from persist_lib.ids import PartKey, SeqNo, parse_rollup_key
from persist_lib.machine import Machine

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""
PAGE = 1000


class Collected(msgspec.Struct, frozen=True):
    """What a collection deleted, or would: objects, bytes, log rows; what is held, and what could not be deleted."""

    keys: tuple[PartKey, ...]
    size: int
    rows: int
    held: tuple[Held, ...]
    failed: dict[str, str]


class Audited(msgspec.Struct, frozen=True):
    """What an audit found and deleted, or would: orphans, bytes, ids whose prefix is swept, what would not go."""

    orphans: tuple[PartKey, ...]
    size: int
    live: int
    pending: int
    swept: tuple[str, ...]
    failed: dict[str, str]
    loose_rollups: int = 0
    """Rollups beyond the newest one that are not linked: their writer is about to, or died. The next one decides."""


def collect(machine: Machine, *, dry_run: bool = False, progress: Progress | None = None) -> Collected:
    """Delete the garbage that nobody can reach, forget it, and truncate the log."""
    version = machine.fetch()
    plan = plan_collection(version.state, version.seqno)
    if dry_run:
        return Collected(tuple(plan.keys), plan.size, 0, plan.held, {})
    failed = _delete(machine, tuple(plan.keys), progress)
    gone = tuple(key for key in plan.keys if key not in failed)
    if gone:
        machine.try_commit(lambda state, _now: c.ForgetGarbage(tuple(key for key in gone if key in state.garbage)))
    rows = _truncate(machine, plan)
    return Collected(gone, sum(plan.keys[key] for key in gone), rows, plan.held, failed)


def audit_orphans(machine: Machine, *, dry_run: bool = False, progress: Progress | None = None) -> Audited:
    """List the shard's objects, then read its state, then delete what can never be linked by anyone."""
    listed = [
        (PartKey(entry.key.removeprefix(prefix(machine.shard))), entry.size)
        for entry in machine.blob.list(prefix(machine.shard))
    ]
    plan = plan_orphans(machine.fetch().state, listed)
    failed = {} if dry_run else _delete(machine, tuple(plan.keys), progress)
    gone = tuple(key for key in plan.keys if key not in failed)
    if not dry_run:
        _forget_retired(machine, plan)
    size = sum(plan.keys[key] for key in gone)
    newest = machine.state.newest_rollup
    loose = sum(1 for key, _ in listed if (parse_rollup_key(key) or 0) > newest)
    return Audited(gone, size, plan.live, plan.pending, plan.swept, failed, loose)


def _forget_retired(machine: Machine, plan: Orphans) -> None:
    if plan.swept:

        def forget(state: State, _now: int) -> c.ForgetRetired:
            return c.ForgetRetired(tuple(id_ for id_ in plan.swept if id_ in state.retired))

        machine.try_commit(forget)


def _delete(machine: Machine, keys: tuple[PartKey, ...], progress: Progress | None) -> dict[str, str]:
    failed: dict[str, str] = {}
    for start in range(0, len(keys), PAGE):
        page = [blob_key(machine.shard, key) for key in keys[start : start + PAGE]]
        errors = machine.blob.delete_many(page)
        failed |= {key.removeprefix(prefix(machine.shard)): str(error) for key, error in errors.items()}
        if progress is not None:
            progress(min(start + PAGE, len(keys)), len(keys))
    return failed


def _truncate(machine: Machine, plan: Collection) -> int:
    below = SeqNo(plan.truncate_below)
    return machine.consensus.truncate(machine.shard, below) if below > 1 else 0
