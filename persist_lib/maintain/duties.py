"""The duties of one shard: what carries out each of the table in `core.duties`, all of them, or exactly a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from persist_lib.core.cost import Cost
from persist_lib.core.duties import DUTIES
from persist_lib.core.plan.compaction import Policy, policy_of
from persist_lib.core.plan.look import settings_of
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.plan.written import PLANNED, Intended, Seen, ShardPlan, intend, plan_shard
from persist_lib.core.state import Version
from persist_lib.errors import Paused, PersistError, PlanMoved
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.census import Census, census_of, take_census
from persist_lib.maintain.compaction import Compacted, compact
from persist_lib.maintain.garbage import (
    Audited,
    Collected,
    Expired,
    Retained,
    audit_orphans,
    collect,
    expire,
    retain,
    see,
    together,
)
from persist_lib.maintain.merge_tasks import Engine
from persist_lib.maintain.publish.steps import follow
from persist_lib.maintain.verify import verify
from persist_lib.maintain.worker import RolledUp, Worker, roll_up
from persist_lib.runtime.each import Each
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.telemetry import span

DAY_MS = 86_400_000
SKEW_MS, OLDEST_MS = 300_000, 30 * DAY_MS
"""How far a plan may be ahead of the store's clock, and how old it may be."""


class Maintained(msgspec.Struct, frozen=True):
    """What one pass over a shard did: the answer of each duty, by its name."""

    done: Mapping[str, Any]
    before: Census
    after: Census
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""
    paused: Mapping[str, str] = {}
    """The duties that are paused, and why. They were not done, and a dry run says what they would do."""
    plan: ShardPlan | None = None
    """What a dry run would do, to be carried out by `client.apply`; or what was carried out."""

    def _of(self, duty: str) -> Any:
        if duty in self.paused and duty not in self.done:
            raise Paused(f"{duty} is {self.paused[duty]}", duty=duty, says=self.paused[duty])
        return self.done[duty]

    @property
    def expired(self) -> Expired:
        """What `leases` did."""
        return self._of("leases")

    @property
    def retained(self) -> Retained:
        """What `retention` did."""
        return self._of("retention")

    @property
    def compacted(self) -> Compacted:
        """What `compaction` did."""
        return self._of("compaction")

    @property
    def rolled_up(self) -> RolledUp:
        """What `rollups` did."""
        return self._of("rollups")

    @property
    def collected(self) -> Collected:
        """What `garbage` did."""
        return self._of("garbage")

    @property
    def audited(self) -> Audited:
        """What `orphans` did."""
        return self._of("orphans")


@dataclass(frozen=True, slots=True)
class Call:
    """One shard, and how to do a duty there. A duty ignores the fields that it does not need.

    `worker` registers when a duty first asks for its id. With `dry_run` the duty changes nothing and returns what it
    would do. With `seen` and what was planned of it (`intended`), it does that and nothing else.
    """

    worker: Worker
    leases: Leases
    policy: Policy | None = None
    engine: Engine | None = None
    dry_run: bool = False
    seen: Seen | None = None
    intended: Intended | None = None

    @property
    def machine(self) -> Machine:
        return self.worker.machine

    def do(self, duty: str) -> Any:
        return FUNCTIONS[duty](self)


def _compaction(call: Call) -> Compacted:
    plan = call.intended.compaction if call.intended else None
    return compact(call.machine, call.worker, policy=call.policy, engine=call.engine, dry_run=call.dry_run, plan=plan)


def _orphans(call: Call) -> Audited:
    """Delete the objects that were never linked.

    A loose rollup may still be linked by its writer. A newer rollup prevents that; then a second audit can delete it.
    """
    audited = audit_orphans(call.machine, dry_run=call.dry_run, seen=call.seen)
    if audited.loose_rollups and not call.dry_run and call.seen is None:
        with suppress(Paused), Worker(call.machine, call.leases, alone=call.worker.alone) as worker:
            roll_up(call.machine, worker, force=True)
        audited = together(audited, audit_orphans(call.machine))
    return audited


FUNCTIONS: Mapping[str, Callable[[Call], Any]] = {
    "leases": lambda call: expire(call.machine, dry_run=call.dry_run, seen=call.seen),
    "retention": lambda call: retain(
        call.machine, dry_run=call.dry_run, seen=call.seen, by_rule=call.policy.retention if call.policy else None
    ),
    "compaction": _compaction,
    "publication": lambda call: follow(call.machine, call.worker, dry_run=call.dry_run, seen=call.seen),
    "rollups": lambda call: roll_up(call.machine, call.worker, dry_run=call.dry_run),
    "garbage": lambda call: collect(call.machine, dry_run=call.dry_run, seen=call.seen),
    "orphans": _orphans,
    "scrub": lambda call: verify(call.machine, full=True, is_kept=not call.dry_run),
    "census": lambda call: take_census(call.machine, call.policy),
}
"""The function that carries out each duty of the table."""


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
        return Call(worker, leases, policy=policy, dry_run=dry_run).do(duty)


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
    that rewrite fail with Busy while another worker is at the shard; the others are done. Paused ones are left out, and
    `paused` says so.
    """
    if dry_run:
        return planned(machine, leases, PLANNED, policy_of(machine.config, policy))
    before, tried, paused = take_census(machine, policy), Each[Any](), dict[str, str]()
    for is_last in (False, True):
        names = [duty.name for duty in DUTIES if duty.is_upkeep and duty.is_last is is_last]
        try:
            with Worker(machine, leases, alone=alone) as worker:
                call = Call(worker, leases, policy=policy, engine=engine)
                paused |= paused_among(machine, names)
                with span("shard", machine.shard):
                    tried.add((name for name in names if name not in paused), call.do, PersistError)
        except PersistError as error:
            tried.failed["retire the worker"] = error
    tried.check(f"shard {machine.shard}: {{}} duties")
    return Maintained(tried.done, before, take_census(machine, policy), paused=paused)


@charged
def planned(machine: Machine, leases: Leases, duties: Sequence[str], policy: Policy) -> Maintained:
    """What these duties would do, and the plan of that: all of one version of the shard. Changes nothing."""
    every = machine.config.rollup_every
    seen = see(machine, duties)
    intended = intend(seen, policy, every)
    with Worker(machine, leases) as worker:
        call = Call(worker, leases, policy, dry_run=True, seen=seen, intended=intended)
        done = {duty: call.do(duty) for duty in PLANNED if duty in duties}
    plan = plan_shard(machine.shard, seen, intended, duties, policy, every)
    census = census_of(machine.shard, seen.version, seen.now, policy)
    return Maintained(done, census, census, paused=paused_among(machine, duties), plan=plan)


@charged
def apply(
    machine: Machine, leases: Leases, plan: ShardPlan, *, policy: Policy, engine: Engine | None = None
) -> Maintained:
    """Carry out exactly what was planned, or raise PlanMoved, Paused or Busy and change nothing.

    One commit claims the plan: it registers the worker as the transition after a version in which nothing but leases is
    another thing than when the plan was made, and of which the plan is the same. What comes after it is decided by what
    was planned alone: batches, keys and ids, which each commit checks for itself.
    """
    every, duties = machine.config.rollup_every, [step.duty for step in plan.steps]
    for duty in duties:
        machine.may_begin(machine.shard, duty)
    first, now = see(machine, plan.duties, plan.made_ms), machine.consensus.now()
    if not -SKEW_MS <= now - plan.made_ms <= OLDEST_MS:
        raise moved(
            plan, first.version.seqno, f"it is not of the last {OLDEST_MS // DAY_MS} days, by the store's clock"
        )
    settings, found = settings_of(policy, every), list[tuple[Seen, Intended]]()

    def judge(version: Version) -> None:
        seen = first._replace(version=version)
        intended = intend(seen, policy, every)
        steps = plan_shard(machine.shard, seen, intended, plan.duties, policy, every).steps
        over = {one.id for one in plan_expiry(version.state, now)}  # a clock that was wrong, or a wrong file, ends none
        is_live = any(one.id not in over for one in intended.overdue)
        if why := plan.why_not(seen, steps, settings) or ("a lease that it ends has not ended" if is_live else ""):
            raise moved(plan, version.seqno, why)
        found[:] = [(seen, intended)]

    judge(first.version)
    before, tried = census_of(machine.shard, first.version, first.now, policy), Each[Any]()
    if plan.steps:
        with Worker(machine, leases, alone=True, judge=judge) as worker:
            if not first.version.state.is_finished():
                _ = worker.id
            call = Call(worker, leases, policy, engine, False, *found[0])
            tried.add(dict.fromkeys(duties), call.do, PersistError)
        tried.check(f"shard {machine.shard}: {{}} duties")
    return Maintained(tried.done, before, take_census(machine, policy), plan=plan)


def moved(plan: ShardPlan, now: int, why: str) -> PlanMoved:
    """The error for a plan that is not carried out."""
    return PlanMoved(
        f"shard {plan.shard}: this plan was made at v{plan.seqno}, and the shard is at v{now}: {why}. Where the plan "
        "was carried out before, it is done. Nothing was changed; plan again: "
        f"`persist maintain {plan.shard} --plan FILE`",
        shard=plan.shard, made=plan.seqno, now=now, why=why,
    )  # fmt: skip


def paused_among(machine: Machine, duties: Iterable[str]) -> dict[str, str]:
    """Those of these duties that are paused on a shard, and why."""
    found: dict[str, str] = {}
    for duty in duties:
        try:
            machine.may_begin(machine.shard, duty)
        except Paused as paused:
            found[duty] = paused.says
    return found
