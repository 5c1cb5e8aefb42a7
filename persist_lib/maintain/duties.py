"""All duties of one shard, in the order that frees the most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import Policy
from persist_lib.errors import Damage, Determinate, Indeterminate, PersistError
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.census import Census, take_census
from persist_lib.maintain.compaction import Compacted, Engine, compact
from persist_lib.maintain.garbage import Audited, Collected, audit_orphans, collect
from persist_lib.maintain.liveness import Expired, Retained, expire, retain
from persist_lib.maintain.rollups import RolledUp, roll_up
from persist_lib.maintain.worker import Worker
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases


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
    """Do whatever is due, here and now. Doing it again finds nothing to do.

    A duty that fails does not keep the others from being done. At the end the gravest failure is raised, as an error of
    its own kind (`Corrupt` for a damaged batch) that names each: `failed` has a message and `done` the answer by duty.
    """
    before, tried = take_census(machine, policy), Tried(machine.shard)
    try:
        with Worker(machine, leases) as worker:
            tried.do("expire", lambda: expire(machine, dry_run=dry_run))
            tried.do("retain", lambda: retain(machine, dry_run=dry_run))
            tried.do("compact", lambda: compact(machine, worker, policy=policy, engine=engine, dry_run=dry_run))
            tried.do("roll_up", lambda: roll_up(machine, worker, dry_run=dry_run))
            tried.do("collect", lambda: collect(machine, dry_run=dry_run))
    except PersistError as error:
        tried.failed["retire the worker"] = error
    tried.do("audit", lambda: _audited(machine, leases, dry_run=dry_run))
    tried.check()
    done = tried.done
    return Maintained(
        done["expire"], done["retain"], done["compact"], done["roll_up"], done["collect"], done["audit"], before,
        take_census(machine, policy),
    )  # fmt: skip


class Tried:
    """The duties of one shard, each done whatever became of the others: what they answered, and what they raised."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.done: dict[str, Any] = {}
        self.failed: dict[str, PersistError] = {}

    def do(self, duty: str, call: Callable[[], object]) -> None:
        """Carry one out."""
        try:
            self.done[duty] = call()
        except PersistError as error:
            self.failed[duty] = error

    def check(self) -> None:
        """Raise the gravest failure, if any: as an error of its own kind, which names all of them."""
        if not self.failed:
            return
        gravest = min(self.failed.values(), key=_gravity)
        reasons = " ".join(f"{duty}: {type(error).__name__}: {error}." for duty, error in self.failed.items())
        others = f"the others were done: {', '.join(self.done)}" if self.done else "none was done"
        raise type(gravest)(
            f"shard {self.shard}: {len(self.failed)} of {len(self.failed) + len(self.done)} duties failed, {others}. "
            f"{reasons}",
            **{**gravest.fields, "failed": {duty: str(e) for duty, e in self.failed.items()}, "done": self.done},
        ) from gravest  # fmt: skip


def _gravity(error: PersistError) -> int:
    """Damage first, then what the world did, then the rest."""
    kinds = (Damage, Indeterminate, Determinate)
    return next((rank for rank, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


def _audited(machine: Machine, leases: Leases, *, dry_run: bool) -> Audited:
    audited = audit_orphans(machine, dry_run=dry_run)
    if audited.loose_rollups and not dry_run:
        with Worker(machine, leases) as worker:
            roll_up(machine, worker, force=True)
        audited = _together(audited, audit_orphans(machine))
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
