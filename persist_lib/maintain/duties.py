"""Does all duties of one shard, in the order of the table in `core.duties`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.duties import BY_NAME, DUTIES
from persist_lib.core.plan.compaction import Policy
from persist_lib.errors import PersistError
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.call import Call
from persist_lib.maintain.census import Census, take_census
from persist_lib.maintain.compaction import Compacted, Engine
from persist_lib.maintain.garbage import Audited, Collected
from persist_lib.maintain.liveness import Expired, Retained
from persist_lib.maintain.rollups import RolledUp
from persist_lib.maintain.worker import Worker
from persist_lib.runtime.each import Each
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases


class Maintained(msgspec.Struct, frozen=True):
    """What one pass over a shard did: the answer of each duty, by its name."""

    done: Mapping[str, Any]
    before: Census
    after: Census
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""

    @property
    def expired(self) -> Expired:
        """What `leases` did."""
        return self.done["leases"]

    @property
    def retained(self) -> Retained:
        """What `retention` did."""
        return self.done["retention"]

    @property
    def compacted(self) -> Compacted:
        """What `compaction` did."""
        return self.done["compaction"]

    @property
    def rolled_up(self) -> RolledUp:
        """What `rollups` did."""
        return self.done["rollups"]

    @property
    def collected(self) -> Collected:
        """What `garbage` did."""
        return self.done["garbage"]

    @property
    def audited(self) -> Audited:
        """What `orphans` did."""
        return self.done["orphans"]


def entry_of(duty: str) -> Callable[[Call], Any]:
    """The function that carries out a duty of the table, as its `entry` names it."""
    module, _, name = BY_NAME[duty].entry.partition(":")
    entry: Callable[[Call], Any] = getattr(import_module(f"persist_lib.maintain.{module}"), name)
    return entry


def carry_out(
    duty: str,
    machine: Machine,
    leases: Leases,
    *,
    policy: Policy | None = None,
    dry_run: bool = False,
    alone: bool = False,
) -> Any:
    """Do the duty of the table that is called `duty`, and return what it did.

    For callers that loop over the table of duties. Doing a duty again finds nothing to do. With `alone` it raises Busy
    while another worker is at the shard.
    """
    with Worker(machine, leases, alone=alone) as worker:
        return entry_of(duty)(Call(worker, leases, policy=policy, dry_run=dry_run))


@charged
def maintain(
    machine: Machine,
    leases: Leases,
    *,
    policy: Policy | None = None,
    engine: Engine | None = None,
    dry_run: bool = False,
    alone: bool = False,
) -> Maintained:
    """Do all upkeep that is due, in this process. Doing it again finds nothing to do.

    If a duty fails, the others are still done. At the end an error of the gravest failure's kind is raised (`Corrupt`
    for a damaged batch). It names every failure: its field `failed` has the message, and its field `done` has the
    answer, by duty. With `dry_run` nothing changes, and the answers say what would be done. With `alone`, the duties
    that rewrite fail with Busy while another worker is at the shard; the others are done.
    """
    before, tried = take_census(machine, policy), Each[Any]()
    for is_last in (False, True):
        names = [duty.name for duty in DUTIES if duty.is_upkeep and duty.is_last is is_last]
        try:
            with Worker(machine, leases, alone=alone) as worker:
                call = Call(worker, leases, policy=policy, engine=engine, dry_run=dry_run)
                tried.add(names, partial(_upkeep, call), PersistError)
        except PersistError as error:
            tried.failed["retire the worker"] = error
    tried.check(f"shard {machine.shard}: {{}} duties")
    return Maintained(tried.done, before, take_census(machine, policy))


def _upkeep(call: Call, duty: str) -> Any:
    return entry_of(duty)(call)
