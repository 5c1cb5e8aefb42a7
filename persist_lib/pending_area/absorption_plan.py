"""What would be absorbed, as a plan: shown, written down, and done exactly, or not.

A plan names each batch that would enter the shard or become garbage with it. To carry it out is to look again, to
compare, and to absorb with all other batches left out, as if they were put later.
"""

from __future__ import annotations

from persist_lib.arguments import check_type
from persist_lib.client import Client
from persist_lib.core.cost import Cost
from persist_lib.core.plan.written import PENDING, ShardPlan, Step, marks_of
from persist_lib.core.units import of, size
from persist_lib.errors import InvalidUsage
from persist_lib.ids import PartKey
from persist_lib.maintain.duties import moved
from persist_lib.pending_area.absorption import absorb_shard
from persist_lib.pending_area.listing import Absorbed
from persist_lib.times import show_frontier

MARKS = ("data", "columns")
"""What must be as it was: appends, upkeep of what was absorbed, and the schema. Garbage and history may move."""


def plan(client: Client, name: str) -> ShardPlan:
    """Return what `absorb` would do with a collection now, for `apply`. Changes nothing.

    Its step says what, why, and what it costs, and is `exactly` the times and all batches that would not be pending any
    more. Without anything to do it has no step. Raises NotFound when there is no such shard.
    """
    machine = check_type(client, Client, "client", 'persist.open("file:./data")').machine(name)
    version, touched = machine.fetch(), list[PartKey]()
    found = absorb_shard(machine, client.leases, dry_run=True, touched=touched)
    marks = {mark: digest for mark, digest in marks_of(version.state).items() if mark in MARKS}
    made = ShardPlan(machine.shard, version.seqno, machine.consensus.now(), (PENDING,), "", marks)
    if not touched:
        return made
    unit = version.state.times
    rewritten = found.size * (found.batches - found.adopted) // max(1, found.batches)
    cost = Cost(
        bytes_read=found.size, bytes_written=rewritten, gets=found.batches, puts=found.transitions * bool(rewritten),
        lists=1, commits=found.transitions + 1, deletes=found.deleted,
    )  # fmt: skip
    others = found.discarded + found.deleted
    does = [f"absorb {of(found.batches, 'batch')}, {size(found.size)}, up to {show_frontier(found.upper, unit)}"]
    does = does * bool(found.batches) + [f"discard {of(others, 'batch')} that nothing needs"] * bool(others)
    step = Step(
        PENDING, " and ".join(does), why(found), (f"{found.lower.time}..{found.upper.time}", *sorted(touched)),
        cost=cost.priced(client.prices),
    )  # fmt: skip
    return ShardPlan(made.shard, made.seqno, made.made_ms, made.duties, "", marks, (step,))


def why(found: Absorbed) -> str:
    """Why so much is absorbed, and no more."""
    if found.deleted:
        return "the collection is deleted"
    says = ["they continue from what is there, and who put them agree"] if found.batches else ["their times are there"]
    if found.is_blocked:
        says.append("from there on writers disagree, and a person chooses")
    elif found.gap is not None:
        says.append(f"{found.left:,} others wait for a gap to be filled")
    return "; ".join(says)


def apply(client: Client, planned: ShardPlan) -> Absorbed:
    """Absorb exactly what was planned, or raise PlanMoved and change nothing.

    What was put since for other times waits for the next time. What was put since for the same times refuses the plan,
    and so does a shard that moved. As with `absorb`, a batch that comes while this looks is late. Raises InvalidUsage
    for what is no plan of `plan`, and Paused.
    """
    check_type(planned, ShardPlan, "planned", "pending_area.plan(client, name)")
    if planned.duties != (PENDING,):
        raise InvalidUsage(f"shard {planned.shard}: this is no plan of a pending area, but of {planned.duties}")
    machine = check_type(client, Client, "client", 'persist.open("file:./data")').machine(planned.shard)
    machine.may_begin(machine.shard, PENDING)
    now = plan(client, planned.shard)
    if now.marks != planned.marks:
        raise moved(planned, now.seqno, "its data or columns moved")
    if [step.exactly for step in now.steps] != [step.exactly for step in planned.steps]:
        raise moved(planned, now.seqno, "other batches are pending than were then")
    keys = frozenset(PartKey(key) for step in planned.steps for key in step.exactly[1:])
    return absorb_shard(machine, client.leases, planned=keys)
