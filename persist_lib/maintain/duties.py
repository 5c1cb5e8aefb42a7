"""All duties of one shard, in the order that frees the most."""

from __future__ import annotations

import msgspec

from persist_lib.core.compaction import Policy
from persist_lib.core.cost import Cost
from persist_lib.leases import Leases
from persist_lib.location.spending import charged
from persist_lib.machine import Machine
from persist_lib.maintain.census import Census, take_census
from persist_lib.maintain.compaction import Compacted, Engine, compact
from persist_lib.maintain.garbage import Audited, Collected, audit_orphans, collect
from persist_lib.maintain.liveness import Expired, Retained, expire, retain
from persist_lib.maintain.rollups import RolledUp, roll_up
from persist_lib.maintain.worker import Worker


class Maintained(msgspec.Struct, frozen=True):
    """What one pass over a shard did, duty by duty."""

    expired: Expired
    retained: Retained
    compacted: Compacted
    rolled_up: RolledUp
    collected: Collected
    audited: Audited
    before: Census
    after: Census
    cost: Cost = Cost()
    """What it asked of the location. A dry run only looks."""


@charged
def maintain(
    machine: Machine,
    leases: Leases,
    *,
    policy: Policy | None = None,
    engine: Engine | None = None,
    dry_run: bool = False,
) -> Maintained:
    """Do whatever is due, here and now. Doing it again finds nothing to do."""
    before = take_census(machine, policy)
    with Worker(machine, leases) as worker:
        expired = expire(machine, dry_run=dry_run)
        retained = retain(machine, dry_run=dry_run)
        compacted = compact(machine, worker, policy=policy, engine=engine, dry_run=dry_run)
        rolled_up = roll_up(machine, worker, dry_run=dry_run)
        collected = collect(machine, dry_run=dry_run)
    audited = audit_orphans(machine, dry_run=dry_run)
    if audited.loose_rollups and not dry_run:
        with Worker(machine, leases) as worker:
            roll_up(machine, worker, force=True)
        audited = _together(audited, audit_orphans(machine))
    after = take_census(machine, policy)
    return Maintained(expired, retained, compacted, rolled_up, collected, audited, before, after)


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
