"""Collections with a pending area: making, reading, absorbing and deleting them, by a client.

A collection is a shard. Whatever reads shards reads what was absorbed; a reader of the pending area reads beyond that.

A plan names each batch that would enter the shard or become garbage with it. To carry it out is to look again, to
compare, and to absorb with all other batches left out, as if they were put later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np

from persist_lib.arguments import check_type, parse_flag
from persist_lib.client import Client
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.formats import PENDING_AREA
from persist_lib.core.leases import needed_by
from persist_lib.core.plan.written import PENDING as DUTY
from persist_lib.core.plan.written import ShardPlan, Step, marks_of
from persist_lib.core.units import of, size
from persist_lib.errors import InvalidUsage, NotFound, Paused, ShardFinished, StillRead
from persist_lib.frontier import MAX_TIME, MINIMUM, Antichain
from persist_lib.ids import NAME, PENDING, PartKey
from persist_lib.location.wrap.around import next_page
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.duties import moved
from persist_lib.pending_area.absorption import LAYER, Choice, absorb_shard, own
from persist_lib.pending_area.area_reader import PendingReader
from persist_lib.pending_area.late_batches import PAGE, discard_keys, known_of
from persist_lib.pending_area.listing import Absorbed, Others, chain_of, fetch_listing
from persist_lib.pending_area.objects import check_no_constraints, parse_writer
from persist_lib.runtime.each import Each
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.times import show_frontier


def _checked(client: Client) -> Client:
    return check_type(client, Client, "client", 'persist.open("file:./data")')


def create(client: Client, name: str, schema: Schema) -> PendingReader:
    """Make a collection with a pending area, unless it exists, and return a reader of it.

    From then on any program may put batches there, and nothing else appends to its shard (OfLayer). Nothing else has to
    be done for a writer. Raises SchemaMismatch when there is a shard of that name with another schema, and InvalidUsage
    for a schema with constraints and for a shard of a format before 3.
    """
    check_no_constraints(check_schema(schema))
    _checked(client).open_writer(name, schema).close()
    own(client.machine(name))
    return acquire_read_handle(client, name)


def acquire_read_handle(client: Client, name: str) -> PendingReader:
    """Return a reader of a collection: at its current since, of the newest version of what was absorbed.

    Raises NotFound when there is no such shard.
    """
    return PendingReader(_checked(client).open_reader(name, purpose="pending area"))


def absorb(client: Client, name: str, *, dry_run: bool = False) -> Absorbed:
    """Absorb what was put into a collection's pending area, and make garbage of what nothing needs.

    Any number of processes may do this at once, and each may die anywhere; doing it again continues. Where writers
    disagree about a time, nothing from then on is absorbed: the answer says so, and `choose` decides. With `dry_run`
    nothing is changed, and the answer says what would be done. Garbage is deleted by `client.maintain`.

    Raises NotFound when there is no such shard, and Indeterminate when it is not known whether the last piece was
    absorbed: repeat the call.
    """
    if not parse_flag(dry_run, "dry_run"):
        _checked(client).machine(name).may_begin(name, "pending")
    return _absorb(client, name, None, dry_run=parse_flag(dry_run, "dry_run"))


def choose(client: Client, name: str, writer: str, through: object = None, *, dry_run: bool = False) -> Absorbed:
    """Absorb what `writer` says where writers disagree, and what all agree on elsewhere.

    This is for an operator who knows which writer is right. The choice is for batches that begin before the time
    `through`; by default for those around the first time in dispute. What others say about these times becomes
    garbage. What is in the shard already is not changed. Raises InvalidUsage when nothing is in dispute.
    """
    dry_run, writer = parse_flag(dry_run, "dry_run"), parse_writer(writer)
    end = None
    if through is not None:
        found = _checked(client).machine(name).times().frontier(through, "through")
        end = MAX_TIME if found.time is None else found.time
    looked = _absorb(client, name, None, dry_run=True)
    disputed = [one for one in looked.disagreements if not one.is_late]
    if not disputed:
        raise InvalidUsage(f"collection {name}: no writers disagree about a time that is to be absorbed", shard=name)
    if all(writer not in names for names in disputed[0].writers):
        sides = " or ".join(", ".join(names) for names in disputed[0].writers)
        raise InvalidUsage(f"collection {name}: {writer} says nothing about it; choose one of {sides}", writer=writer)
    return _absorb(client, name, Choice(writer, disputed[0].time + 1 if end is None else end), dry_run=dry_run)


def delete(client: Client, name: str) -> None:
    """Delete a collection: close its shard for good, and delete everything that is pending. Idempotent.

    Raises StillRead while a reader or a hold needs it. Batches that are put later are deleted by `absorb`, which
    `persist maintain --only pending` and the asset in Dagster do from time to time.
    """
    state = _checked(client).machine(name).fetch().state
    if not state.is_finished():
        if by := needed_by(state):
            raise StillRead(
                f"collection {name} is still read by {', '.join(by)}; close the readers and release the holds first. "
                "Nothing was deleted",
                shard=name, by=by,
            )  # fmt: skip
        with client.open_writer(name, state.schemas[-1], layer=LAYER) as write:
            write.finish()
        with suppress(ShardFinished):
            client.finish(name)
    absorb_shard(client.machine(name), client.leases)


def _absorb(client: Client, name: str, choice: Choice | None, *, dry_run: bool) -> Absorbed:
    machine = _checked(client).machine(name)
    if client.read_only and not dry_run:
        raise InvalidUsage("absorb needs a client that may write; this one was opened with read_only=True")
    state = machine.fetch().state
    check_no_constraints(state.schemas[-1])
    if state.format < PENDING_AREA and not dry_run:
        raise machine.refused(r.NeedsFormat("a pending area", PENDING_AREA, state.format))
    return absorb_shard(machine, client.leases, choice=choice, dry_run=dry_run)


def discard(client: Client, name: str, writer: str, *, dry_run: bool = False) -> int:
    """Make garbage of the late batches of one writer, and return of how many.

    This is for late batches that say something else than the shard, once they were looked at: `absorb` leaves them
    where they are. Batches whose times the shard does not have yet are never touched. Raises NotFound.
    """
    dry_run, writer = parse_flag(dry_run, "dry_run"), parse_writer(writer)
    machine = _checked(client).machine(name)
    state = machine.fetch().state
    listing = fetch_listing(machine, known_of(state), writer)
    keyed = listing.keyed(listing.late(state.upper))
    if dry_run:
        return len(keyed)
    return sum(discard_keys(machine, keyed[start : start + PAGE]) for start in range(0, len(keyed), PAGE))


class WriterCensus(msgspec.Struct, frozen=True):
    """The batches of one writer: how many, their updates and bytes, and the times `[lower, upper)` that they span.

    `late` are those whose times the shard has already; they wait to be discarded or deleted.
    """

    writer: str
    batches: int
    late: int
    updates: int
    size: int
    lower: int
    upper: int


class PendingCensus(msgspec.Struct, frozen=True):
    """What lies in a pending area. `upper` is the merged one, `reaches` how far batches continue it without a gap."""

    shard: str
    upper: Antichain = MINIMUM
    reaches: Antichain = MINIMUM
    batches: int = 0
    size: int = 0
    writers: tuple[WriterCensus, ...] = ()
    endless: Others = Others()
    foreign: Others = Others()
    cost: Cost = Cost()


@charged
def census(client: Client, name: str) -> PendingCensus:
    """Count what lies in a collection's pending area, a thousand batches a request. Raises NotFound."""
    machine = _checked(client).machine(name)
    state = machine.fetch().state
    listing = fetch_listing(machine)
    rows, upper = listing.rows, state.upper
    found = []
    is_late = np.ones(len(rows), bool) if upper.time is None else rows["upper"] <= np.uint64(upper.time)
    for number, writer in enumerate(listing.writers):
        own = rows["writer"] == number
        some = rows[own]
        if not len(some):
            continue
        totals = int(some["count"].sum()), int(some["size"].sum())
        spans = int(some["lower"].min()), int(some["upper"].max())
        found.append(WriterCensus(writer, len(some), int(is_late[own].sum()), *totals, *spans))
    reaches = upper
    if upper.time is not None:
        chain = chain_of(listing.contents(np.flatnonzero(~is_late)), upper.time)
        reaches = Antichain(chain[-1].upper) if chain else upper
    found.sort(key=lambda one: one.writer)
    return PendingCensus(
        machine.shard, upper, reaches, len(rows), int(rows["size"].sum()), tuple(found), listing.endless,
        listing.foreign,
    )  # fmt: skip


def pending_collections(client: Client) -> Iterator[str]:
    """The names under which something is pending, also of shards that are not there (any more).

    Costs one request for each where the store lists in pages, else one for all.
    """
    blob, prefix, after = _checked(client).blob, f"{PENDING}/", ""
    told: set[str] = set()
    while True:
        page = next_page(blob, prefix, after)
        names = [entry.key.removeprefix(prefix).partition("/")[0] for entry in page.entries]
        fresh = sorted({name for name in names if NAME.fullmatch(name)} - told)
        yield from fresh
        told.update(fresh)
        if page.is_last or not page.entries:
            return
        # Behind all keys of the last one. Names are not in the order of keys, as `-` and `.` precede `/`.
        after = max(page.entries[-1].key, f"{prefix}{names[-1]}/\U0010ffff")


def due_collections(client: Client) -> Each[bool]:
    """Of each collection with something pending: whether an absorption would find something to do, by listings alone.

    Batches that are garbage already, or adopted, count for nothing. A name without a shard has nothing to do, nor has
    what is paused. One that cannot be looked at stops none of the others.
    """
    return Each[bool]().add(pending_collections(client), partial(_is_due, client))


def _is_due(client: Client, name: str) -> bool:
    try:
        machine = client.machine(name)
        state = machine.fetch().state
        machine.may_begin(name, "pending")
    except (NotFound, Paused):
        return False
    listing = fetch_listing(machine, known_of(state))
    late = len(listing.late(state.upper))
    beyond = listing.contents(np.flatnonzero(listing.rows["upper"] > np.uint64(state.upper.time or 0)))
    goes_on = state.upper.time is not None and bool(chain_of(beyond, state.upper.time))
    return bool(late or goes_on or (state.is_finished() and len(listing)))


MARKS = ("data", "columns")
"""What must be as it was: appends, upkeep of what was absorbed, and the schema. Garbage and history may move."""


def plan(client: Client, name: str) -> ShardPlan:
    """Return what `absorb` would do with a collection now, for `apply`. Changes nothing.

    Its step says what, why, and what it costs, and is `exactly` the times and all batches that would not be pending any
    more. Without anything to do it has no step. Raises NotFound when there is no such shard.
    """
    machine = _checked(client).machine(name)
    version, touched = machine.fetch(), list[PartKey]()
    found = absorb_shard(machine, client.leases, dry_run=True, touched=touched)
    marks = {mark: digest for mark, digest in marks_of(version.state).items() if mark in MARKS}
    made = ShardPlan(machine.shard, version.seqno, machine.consensus.now(), (DUTY,), "", marks)
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
        DUTY, " and ".join(does), why(found), (f"{found.lower.time}..{found.upper.time}", *sorted(touched)),
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
    if planned.duties != (DUTY,):
        raise InvalidUsage(f"shard {planned.shard}: this is no plan of a pending area, but of {planned.duties}")
    machine = _checked(client).machine(planned.shard)
    machine.may_begin(machine.shard, DUTY)
    now = plan(client, planned.shard)
    if now.marks != planned.marks:
        raise moved(planned, now.seqno, "its data or columns moved")
    if [step.exactly for step in now.steps] != [step.exactly for step in planned.steps]:
        raise moved(planned, now.seqno, "other batches are pending than were then")
    keys = frozenset(PartKey(key) for step in planned.steps for key in step.exactly[1:])
    return absorb_shard(machine, client.leases, planned=keys)
