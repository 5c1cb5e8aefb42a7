"""Physical deletion: garbage that no live reader can reach, log rows that no reader needs, and orphans.

Blobs go first, rows after; whoever dies in between leaves work that the next pass finds again. An object that cannot be
deleted stays on the list; a listing that fails shrinks what is deleted, never grows it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.plan.garbage import Collection, Held, Orphans, plan_collection, plan_orphans
from persist_lib.core.state import State
from persist_lib.errors import PersistError
from persist_lib.format.paths import blob_key, prefix
from persist_lib.ids import PartKey, SeqNo, parse_rollup_key
from persist_lib.location.api import StaysInPlace, Upload
from persist_lib.location.wrap.around import sends_in_pieces
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.call import Call
from persist_lib.shard.commit import Machine

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
    cost: Cost = Cost()
    """What it asked of the location. A dry run only looks."""


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
    uploads: int = 0
    """Unfinished uploads of writers that are gone, given up. Their pieces are stored, and paid for, and not listed."""
    uploads_size: int = 0
    """Their bytes, where the store tells (not S3)."""
    cost: Cost = Cost()


@charged
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


@charged
def audit_orphans(machine: Machine, *, dry_run: bool = False, progress: Progress | None = None) -> Audited:
    """List the shard's objects, then read its state, then delete what can never be linked by anyone."""
    listed = [
        (PartKey(entry.key.removeprefix(prefix(machine.shard))), entry.size)
        for entry in machine.blob.list(prefix(machine.shard))
    ]
    uploads, failed = _unfinished(machine)
    plan = plan_orphans(machine.fetch().state, listed, uploads)
    abandoned = [upload for key in sorted(uploads) for upload in uploads[key] if key in plan.uploads or upload.is_dead]
    if not dry_run:
        failed |= _delete(machine, tuple(plan.keys), progress) | _abort(machine, abandoned)
        _forget_retired(machine, plan)
    gone = tuple(key for key in plan.keys if key not in failed)
    size = sum(plan.keys[key] for key in gone)
    newest = machine.state.newest_rollup
    loose = sum(1 for key, _ in listed if (parse_rollup_key(key) or 0) > newest)
    aborted = [upload.size for upload in abandoned if upload.id not in failed]
    return Audited(gone, size, plan.live, plan.pending, plan.swept, failed, loose, len(aborted), sum(aborted))


def _unfinished(machine: Machine) -> tuple[dict[PartKey, list[Upload]], dict[str, str]]:
    """Unfinished uploads by key, and what hindered listing them: then orphans are still looked after."""
    found: dict[PartKey, list[Upload]] = {}
    if (blob := sends_in_pieces(machine.blob)) is not None:
        try:
            for upload in blob.uploads(prefix(machine.shard)):
                found.setdefault(PartKey(upload.key.removeprefix(prefix(machine.shard))), []).append(upload)
        except PersistError as error:
            return {}, {"unfinished uploads": str(error)}
    return found, {}


def _abort(machine: Machine, uploads: list[Upload]) -> dict[str, str]:
    """SUBTLE: what could not be given up is named by its upload, not its key, which may be an orphan's that is gone."""
    if uploads and isinstance(machine.consensus, StaysInPlace):
        machine.consensus.check_in_place()
    if not uploads or (blob := sends_in_pieces(machine.blob)) is None:
        return {}
    return {upload.id: f"{upload.key}: {error}" for upload, error in blob.abort_uploads(uploads).items()}


def _forget_retired(machine: Machine, plan: Orphans) -> None:
    if plan.swept:

        def forget(state: State, _now: int) -> c.ForgetRetired:
            return c.ForgetRetired(tuple(id_ for id_ in plan.swept if id_ in state.retired))

        machine.try_commit(forget)


def _delete(machine: Machine, keys: tuple[PartKey, ...], progress: Progress | None) -> dict[str, str]:
    failed: dict[str, str] = {}
    for start in range(0, len(keys), PAGE):
        page = [blob_key(machine.shard, key) for key in keys[start : start + PAGE]]
        # What is deleted was decided by a log that has to be the one that others still commit to.
        if isinstance(machine.consensus, StaysInPlace):
            machine.consensus.check_in_place()
        errors = machine.blob.delete_many(page)
        failed |= {key.removeprefix(prefix(machine.shard)): str(error) for key, error in errors.items()}
        if progress is not None:
            progress(min(start + PAGE, len(keys)), len(keys))
    return failed


def _truncate(machine: Machine, plan: Collection) -> int:
    below = SeqNo(plan.truncate_below)
    return machine.consensus.truncate(machine.shard, below) if below > 1 else 0


def do_garbage(call: Call) -> Collected:
    """The duty `garbage`."""
    return collect(call.machine, dry_run=call.dry_run, progress=call.progress)
