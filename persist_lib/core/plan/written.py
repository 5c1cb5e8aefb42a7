"""What upkeep would do, as one value: shown before anything happens, kept as a file, and carried out exactly, or not.

A plan is a pure function of one version of a shard (`Seen`). To carry it out is to make it again, of the version from
which the first commit is made, and to compare: so a plan can never do what upkeep would not do by itself, whatever was
written into it. A shard has moved when anything but leases is another thing than it was (`marks_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec

from persist_lib.arguments import UNREADABLE, shown
from persist_lib.core.cost import S3_LIST, Cost
from persist_lib.core.duties import DUTIES
from persist_lib.core.holds import newest_time
from persist_lib.core.pins import behind
from persist_lib.core.plan import compaction
from persist_lib.core.plan.compaction import Policy, plan_compaction
from persist_lib.core.plan.explain import explain
from persist_lib.core.plan.garbage import GarbagePlan, Orphans, plan_garbage, plan_orphans
from persist_lib.core.plan.look import settings_of
from persist_lib.core.plan.requests import REASONS
from persist_lib.core.plan.retention import plan_retention
from persist_lib.core.plan.upkeep import Overdue, plan_expiry, rollup_is_due
from persist_lib.core.state import State, Version
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, SeqNo, parse_shard_id
from persist_lib.times import show_frontier

T = TypeVar("T")
Asked = Callable[[str], str]
"""Why a duty does what it does, when it is asked."""
KIND = "persist.plan"
FORMAT, WITH_COLLECTIONS, WITH_PENDING = 1, 2, 3
COLLECTIONS, PENDING = "collections", "pending"
OF_COLLECTION = ("a collection", "an action", "a subject")
"""What a step of a collection is exactly."""
PLANNED = tuple(duty.name for duty in DUTIES if duty.is_upkeep)
"""The duties that a plan can have, in their order."""


class Seen(NamedTuple):
    """What a plan is made of: a version, the store's clock (ms), and what was listed completely before it was read.

    `log_begins` is the seqno of the oldest row of the log, `listed` are all objects and their sizes, `uploads` the
    unfinished uploads by key, and `failed` says what could not be listed.
    """

    version: Version
    now: int
    log_begins: SeqNo = SeqNo(1)
    listed: Sequence[tuple[PartKey, int]] = ()
    uploads: Mapping[PartKey, Sequence[Any]] = {}
    failed: Mapping[str, str] = {}


class Intended(NamedTuple):
    """What each duty would do with what was seen."""

    overdue: tuple[Overdue, ...]
    since: Antichain | None
    compaction: compaction.Plan
    is_rollup_due: bool
    garbage: GarbagePlan
    orphans: Orphans
    uploads: tuple[str, ...]
    """The ids of the uploads that are given up."""


def given_up(orphans: Orphans, uploads: Mapping[PartKey, Sequence[T]]) -> list[T]:
    """Of unfinished uploads, those that can be given up (each has an `id`, and says whether it `is_dead`)."""
    found = ((key, one) for key in sorted(uploads) for one in uploads[key])
    return [one for key, one in found if key in orphans.uploads or one.is_dead]  # type: ignore[attr-defined]


def intend(seen: Seen, policy: Policy, rollup_every: int) -> Intended:
    """What each duty would do now. All of it is decided from the one version."""
    state, seqno = seen.version.state, seen.version.seqno
    orphans = plan_orphans(state, seen.listed, seen.uploads)
    uploads = tuple(one.id for one in given_up(orphans, seen.uploads))
    return Intended(
        tuple(plan_expiry(state, seen.now)), plan_retention(state, policy.retention), plan_compaction(state, policy),
        rollup_is_due(state, seqno, rollup_every), plan_garbage(state, seqno), orphans, uploads,
    )  # fmt: skip


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a duty would do: what, why, for how many bytes freed, and at what cost.

    `exactly` names each batch, key and id that it concerns: two steps with the same are the same.
    """

    duty: str
    what: str
    why: str
    exactly: tuple[str, ...] = ()
    freed: int = 0
    cost: Cost = Cost()


class ShardPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `duties` would do with one shard at the version `seqno`. `marks` is what must still be so."""

    shard: str
    seqno: SeqNo
    made_ms: int
    duties: tuple[str, ...]
    settings: str
    marks: Mapping[str, str]
    steps: tuple[Step, ...] = ()

    @property
    def cost(self) -> Cost:
        """The requests, bytes and dollars of all steps."""
        return sum((step.cost for step in self.steps), Cost())

    @property
    def freed(self) -> int:
        """The bytes that all steps free."""
        return sum(step.freed for step in self.steps)

    def why_not(self, seen: Seen, steps: Sequence[Step], settings: str) -> str:
        """Why the plan is not what would be done with `seen`, whose steps these are; empty if it is."""
        marks = marks_of(seen.version.state)
        if moved := sorted(
            name for name in self.marks.keys() | marks.keys() if self.marks.get(name) != marks.get(name)
        ):
            return f"its {', '.join(moved)} moved"
        if settings != self.settings:
            return "the settings by which it was planned are other ones"
        before, now = ({(step.duty, step.exactly) for step in some} for some in (self.steps, steps))
        if before == now:
            return ""
        other = [duty for duty in PLANNED if any(duty == found for found, _ in before ^ now)]
        return f"{' and '.join(other) or 'it'} would do another thing now, as leases came or ended"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What upkeep would do with some shards and collections. `client.plan` makes it, and `client.apply` carries it out.

    `collections` are the steps that give something up. Each is `exactly` its collection, its action and its subject.
    `pending` is what would be absorbed, by `pending_area.plan`; `pending_area.apply` carries it out.
    """

    shards: tuple[ShardPlan, ...]
    kind: str = KIND
    format: int = FORMAT
    collections: tuple[Step, ...] = ()
    pending: tuple[ShardPlan, ...] = ()

    @property
    def cost(self) -> Cost:
        """The requests, bytes and dollars of all steps."""
        return sum((one.cost for one in (*self.shards, *self.pending)), Cost())

    def of(self, shard: str) -> ShardPlan:
        """The plan of one shard. Raises InvalidUsage for one that it does not have."""
        if (found := next((one for one in self.shards if one.shard == shard), None)) is None:
            raise InvalidUsage(f"the plan has no shard {shard!r}", shard=shard)
        return found

    def only(self, names: Sequence[str]) -> Plan:
        """The same of these shards and collections alone; of all without names. Raises InvalidUsage for another one."""
        if not names:
            return self
        steps = tuple(step for step in self.collections if step.exactly[0] in names)
        pending = tuple(one for one in self.pending if one.shard in names)
        known = {step.exactly[0] for step in steps} | {one.shard for one in pending}
        named = [name for name in names if name not in known or any(one.shard == name for one in self.shards)]
        return Plan(tuple(map(self.of, named))).with_collections(steps).with_pending(pending)

    def with_collections(self, steps: Sequence[Step]) -> Plan:
        """The same with steps of collections."""
        format_ = WITH_COLLECTIONS if steps else FORMAT
        return msgspec.structs.replace(self, collections=tuple(steps), format=format_)

    def with_pending(self, pending: Sequence[ShardPlan]) -> Plan:
        """The same with plans of pending areas."""
        format_ = WITH_PENDING if pending else self.format
        return msgspec.structs.replace(self, pending=tuple(pending), format=format_)

    def to_json(self) -> str:
        """The plan as text, which `parse_plan` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


class _Head(msgspec.Struct, frozen=True):
    kind: str
    format: int


def parse_plan(text: object) -> Plan:
    """The plan that was written as text. Raises InvalidUsage for another text, and for another format."""
    if isinstance(text, Plan):
        return text
    if not isinstance(text, (str, bytes)):
        raise InvalidUsage(f"a plan is what client.plan answers, or its text: got {shown(text)}", argument="plan")
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.kind != KIND or head.format not in (FORMAT, WITH_COLLECTIONS, WITH_PENDING):
            raise InvalidUsage(
                f"this is {shown(head.kind)} of format {head.format}, and this release carries out {KIND!r} of formats "
                f"up to {WITH_PENDING}. Nothing was done; plan again with this release",
                found=head.format, known=WITH_PENDING,
            )  # fmt: skip
        plan = msgspec.json.decode(text, type=Plan)
    except (*UNREADABLE, UnicodeEncodeError) as error:
        raise InvalidUsage(f"this is no plan of `persist maintain --plan`: {error}. Nothing was done") from error
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    names = [parse_shard_id(one.shard) for one in plan.shards]
    duties = {duty for one in plan.shards for duty in (*one.duties, *(step.duty for step in one.steps))}
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise InvalidUsage(f"the plan has {', '.join(twice)} more than once. Nothing was done; plan again")
    if any(step.duty != PENDING for one in plan.pending for step in one.steps):
        raise InvalidUsage(f"a step of a pending area is of the duty {PENDING}. Nothing was done; plan again")
    if any(step.duty != COLLECTIONS or len(step.exactly) != len(OF_COLLECTION) for step in plan.collections):
        raise InvalidUsage(f"a step of a collection has {', '.join(OF_COLLECTION)}. Nothing was done; plan again")
    if unknown := sorted(duties.difference(PLANNED)):
        raise InvalidUsage(f"the plan has {', '.join(map(shown, unknown))}, and duties are {', '.join(PLANNED)}")


def plan_shard(
    shard: str, seen: Seen, intended: Intended, duties: Sequence[str], policy: Policy, rollup_every: int
) -> ShardPlan:
    """The plan of some duties for one shard."""
    version = seen.version
    named = tuple(duty for duty in PLANNED if duty in duties)

    def why(duty: str) -> str:
        """Asked where there is a step, as it plans the duty once more."""
        found = explain(version, seen.now, policy, rollup_every, duty)
        return next((one.says for one in found if one.about == duty), "")

    steps = [step for duty in named for step in STEPS[duty](seen, intended, why)]
    priced = tuple(msgspec.structs.replace(step, cost=step.cost.priced(policy.prices or S3_LIST)) for step in steps)
    settings = settings_of(policy, rollup_every)
    return ShardPlan(shard, version.seqno, seen.now, named, settings, marks_of(version.state), priced)


def marks_of(state: State) -> dict[str, str]:
    """Marks of everything in a state but leases: as long as they are the same, nothing else has moved."""
    parts: dict[str, object] = {
        "data": [(one.lo, one.hi, one.born, one.upper.time) for one in state.stored],
        "history": (
            state.since.time,
            state.retention,
            sorted((name, one.since.time) for name, one in state.holds.items()),
        ),
        "garbage": sorted(state.garbage),
        "rollups": sorted(state.rollups),
        **({"pins": sorted((name, one.keys) for name, one in state.pins.items())} if state.pins else {}),
        "columns": (len(state.schemas), state.format, state.member),
    }
    return {name: blake2b(msgspec.json.encode(value), digest_size=8).hexdigest() for name, value in parts.items()}


def _leases(_seen: Seen, intended: Intended, why: Asked) -> Iterable[Step]:
    if intended.overdue:
        ids = tuple(one.id for one in intended.overdue)
        says = f"retire {len(ids)} ids whose lease has ended"
        yield Step("leases", says, why("leases"), ids, cost=Cost(commits=1))


def _retention(seen: Seen, intended: Intended, why: Asked) -> Iterable[Step]:
    if intended.since is not None:
        to = show_frontier(intended.since, seen.version.state.times)
        exactly = (str(intended.since.time),)
        yield Step("retention", f"give up history before {to}", why("retention"), exactly, cost=Cost(commits=1))


def _compaction(_seen: Seen, intended: Intended, _why: Asked) -> Iterable[Step]:
    for one in intended.compaction.requests:
        ids = tuple(f"{lo}..{hi}" for lo, hi in one.ids)
        what = f"rewrite {one.count:,} updates in {len(ids)} batches, {ids[0].partition('.')[0]}..{one.ids[-1][1]}"
        exactly = (one.reason, f"since {one.since.time}", *ids)
        yield Step("compaction", what, REASONS[one.reason], exactly, cost=one.cost + Cost(commits=1))


def _publication(seen: Seen, _intended: Intended, _why: Asked) -> Iterable[Step]:
    state = seen.version.state
    for name in behind(state):
        to = show_frontier(newest_time(state), state.times)
        exactly = (name, str(newest_time(state).time))
        why = "it follows the table; what else is written for it is found out when it is done"
        yield Step("publication", f"publish as {name} as of {to}", why, exactly, cost=Cost(puts=4, commits=3))


def _rollups(seen: Seen, intended: Intended, why: Asked) -> Iterable[Step]:
    if intended.is_rollup_due:
        newest = seen.version.state.rollups.get(seen.version.state.newest_rollup)
        cost = Cost(bytes_written=newest.size if newest else 0, puts=1, commits=1)
        yield Step("rollups", "copy the newest state to Blob", why("rollups"), cost=cost)


def _garbage(seen: Seen, intended: Intended, why: Asked) -> Iterable[Step]:
    plan, below = intended.garbage, intended.garbage.truncate_below
    is_cut = below > seen.log_begins
    if plan.keys or is_cut:
        rows = f"the log below v{below}" if is_cut else ""
        what = f"delete {len(plan.keys):,} objects" if plan.keys else ""
        exactly = (*sorted(plan.keys), *([rows] if rows else []))
        cost = Cost(deletes=len(plan.keys), commits=int(bool(plan.keys)) + int(is_cut))
        says = why("garbage") if plan.keys else "no reader needs these rows"
        done = " and ".join(filter(None, (what, rows and f"cut {rows}")))
        yield Step("garbage", done, says, exactly, plan.size, cost)


def _orphans(_seen: Seen, intended: Intended, _why: Asked) -> Iterable[Step]:
    plan, uploads = intended.orphans, intended.uploads
    if plan.keys or uploads or plan.swept:
        counted = {
            "orphans": len(plan.keys),
            "unfinished uploads": len(uploads),
            "entries of retired ids": len(plan.swept),
        }
        what = ", ".join(f"{number:,} {name}" for name, number in counted.items() if number)
        why = "nothing refers to them, and their writers are gone for good"
        cost = Cost(deletes=len(plan.keys) + len(uploads), lists=1, commits=int(bool(plan.swept)))
        yield Step(
            "orphans", f"delete {what}", why, (*sorted(plan.keys), *uploads, *plan.swept), sum(plan.keys.values()), cost
        )


STEPS: Mapping[str, Callable[[Seen, Intended, Asked], Iterable[Step]]] = {
    "leases": _leases, "retention": _retention, "compaction": _compaction, "publication": _publication,
    "rollups": _rollups, "garbage": _garbage, "orphans": _orphans,
}  # fmt: skip
