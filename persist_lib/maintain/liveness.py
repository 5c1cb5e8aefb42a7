"""Leases and retention: which readers and writers are still alive, and how much history is kept."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.plan.upkeep import Overdue, plan_expiry, plan_retention
from persist_lib.core.state import RETENTION, State
from persist_lib.frontier import Antichain
from persist_lib.location.wrap.spending import charged
from persist_lib.shard.commit import Committed, Machine


class Expired(msgspec.Struct, frozen=True):
    """The ids that were retired, or would be."""

    overdue: tuple[Overdue, ...]
    live: int
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


class Retained(msgspec.Struct, frozen=True):
    """How the shard's since moved. `distance` is its retention policy, in times behind upper; None without a policy."""

    distance: int | None
    before: Antichain
    after: Antichain
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


@charged
def expire(machine: Machine, *, dry_run: bool = False) -> Expired:
    """Retire the ids whose lease has ended by the store's clock. Their next commit is refused with LeaseExpired."""
    state, now = machine.fetch().state, machine.consensus.now()
    overdue = tuple(plan_expiry(state, now))
    if overdue and not dry_run and not state.is_finished():
        answer = machine.try_commit(lambda _state, now: c.Expire(now))
        if not isinstance(answer, Committed):
            overdue = ()  # another process renewed or retired them first
    return Expired(overdue, len(state.writers) + len(state.readers))


@charged
def retain(machine: Machine, *, dry_run: bool = False) -> Retained:
    """Advance the shard's `retention` hold to as far behind upper as its policy says."""
    state = machine.fetch().state
    target = plan_retention(state)
    if target is None or dry_run:
        return Retained(state.retention, state.since, state.since if target is None else target)

    def move(state: State, _now: int) -> c.DowngradeHold:
        hold, target = state.holds.get(RETENTION), plan_retention(state)
        since = target if target is not None else hold.since if hold else state.since
        return c.DowngradeHold(RETENTION, since, hold.opaque if hold else None, hold.opaque if hold else b"")

    answer = machine.commit(move)
    return Retained(state.retention, state.since, answer.after.since)
