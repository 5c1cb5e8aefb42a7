"""Orphans as part of upkeep: one audit, and a second one after a rollup if there are loose rollups."""

from __future__ import annotations

import msgspec

from persist_lib.maintain.call import Call
from persist_lib.maintain.garbage import Audited, audit_orphans
from persist_lib.maintain.rollups import roll_up
from persist_lib.maintain.worker import Worker


def do_orphans(call: Call) -> Audited:
    """Delete the objects that were never linked.

    A loose rollup may still be linked by its writer. A newer rollup prevents that; then a second audit can delete it.
    """
    audited = audit_orphans(call.machine, dry_run=call.dry_run, progress=call.progress)
    if audited.loose_rollups and not call.dry_run:
        with Worker(call.machine, call.leases, alone=call.worker.alone) as worker:
            roll_up(call.machine, worker, force=True)
        audited = _together(audited, audit_orphans(call.machine))
    return audited


def _together(first: Audited, second: Audited) -> Audited:
    """What two audits in a row found."""
    return msgspec.structs.replace(
        second,
        orphans=first.orphans + second.orphans,
        size=first.size + second.size,
        swept=first.swept + second.swept,
        uploads=first.uploads + second.uploads,
        uploads_size=first.uploads_size + second.uploads_size,
        cost=first.cost + second.cost,
    )
