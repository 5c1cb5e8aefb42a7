"""Absorption: pending batches from the shard's upper on enter the shard, one piece after the other.

Any number of processes may absorb at once, and each may die anywhere. A piece is one transition from exactly one upper
to the next, so nothing enters twice; a process that was late looks again. Before a time is absorbed, all batches that
are listed for it are compared. Where two of them disagree, none is absorbed until an operator chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import as_stored_in
from persist_lib.core.holds import layer_of
from persist_lib.core.state import Batch as TraceBatch
from persist_lib.core.state import Part, State
from persist_lib.core.sums import Sums, total
from persist_lib.errors import Indeterminate, Paused, PersistError, ShardFinished
from persist_lib.format.descriptions import describe
from persist_lib.format.parts import within
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import PartKey
from persist_lib.location.wrap.deadline import check_not_stopped
from persist_lib.location.wrap.deadline import within as within_deadline
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain import Worker, collect, roll_up
from persist_lib.pending_area.late_batches import delete_all, discard_late, known_of
from persist_lib.pending_area.listing import (
    AHEAD,
    SHOWN,
    THREADS,
    Absorbed,
    Content,
    Disagreement,
    Fetcher,
    Id,
    Known,
    Listing,
    Sweep,
    chain_of,
    fetch_listing,
)
from persist_lib.pending_area.objects import Batch
from persist_lib.relation.registration import Registration, inline_room, undoubted
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import claim, retire_writers
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.leases import Leases
from persist_lib.times import PER_SECOND

PIECE_BYTES = 32 << 20
"""The most bytes of pending objects in one piece, unless a single one has more."""
PIECE_BATCHES = 1000
ADOPTED_MOST = 8
"""The most adopted objects in one batch: each is a run of its own for every reader, until it is compacted."""

Keys = tuple[tuple[PartKey, int], ...]


class Pick(NamedTuple):
    """A pending batch that continues from `lower`: `table` has its updates from there on."""

    content: Content
    batch: Batch
    lower: int
    table: pa.Table

    @property
    def is_adopted(self) -> bool:
        """Whether its object enters the trace as it is."""
        return self.batch.part is not None and self.table.num_rows > 0


def pick_of(content: Content, batch: Batch, frontier: int) -> Pick:
    """The part of a pending batch that lies at or beyond the frontier."""
    table = batch.table if frontier <= content.lower else within(batch.table, frontier, None)
    return Pick(content, batch, frontier, table)


def fits(piece: list[Pick], size: int, pick: Pick) -> bool:
    """Whether a batch can enter the shard in the same transition as those before it, which have `size` bytes."""
    if not piece:
        return True
    is_full = size + pick.batch.size > PIECE_BYTES or len(piece) >= PIECE_BATCHES
    if is_full or pick.is_adopted != piece[0].is_adopted:
        return False
    # What is adopted counts from the batch's lower on, so only the first of several can be cut.
    return not pick.is_adopted or (len(piece) < ADOPTED_MOST and pick.lower == pick.content.lower)


class Committer:
    """Commits pieces for one absorber. `schemas` are those that the pieces' tables were read with."""

    def __init__(self, machine: Machine, registration: Registration, schemas: Sequence[Schema]) -> None:
        self._machine, self._registration, self._schemas = machine, registration, schemas

    def commit(self, piece: list[Pick], gone: Keys) -> Committed | r.Refusal:
        """Have a piece enter the shard. `gone` are the pending batches that become garbage with it.

        Raises Indeterminate when it is not known whether it did. The next pass looks at the shard, and continues from
        there: its upper decides, so nothing is absorbed twice.
        """
        machine, registration = self._machine, self._registration
        deadline = machine.runtime.deadline(machine.config.timeout_s)
        upload, schema_id = partial(registration.register, deadline), len(self._schemas) - 1
        builder = Builder(machine, upload, self._schemas[-1], schema_id, deadline)
        built = self._adopted(piece) if piece[0].is_adopted else self._rewritten(builder, piece, deadline)
        token = machine.runtime.token()
        while True:
            command = c.Absorb(registration.register(deadline), token, built.batch, gone, 0)
            answer = machine.try_commit(partial(self._lasting, command), deadline.left_s(), token)
            if isinstance(answer, r.InlineFull):
                built = builder.externalised(built)
                continue
            if isinstance(answer, r.NotLive):
                registration.forget()
            return answer

    def _lasting(self, command: c.Absorb, state: State, now: int) -> c.Absorb:
        """The command, with a lease from now on, as the state's format has it."""
        batch = as_stored_in(state.format, command.batch)
        return msgspec.structs.replace(command, batch=batch, lease_until=now + self._machine.config.lease_ms)

    def _rewritten(self, builder: Builder, piece: list[Pick], deadline: Deadline) -> Built:
        lower, upper = at(piece[0].lower), at(piece[-1].content.upper)
        room = inline_room(self._machine, self._machine.state)
        tables = (pick.table for pick in piece if pick.table.num_rows)
        try:
            return within_deadline(deadline, lambda: builder.build(tables, lower, upper, inline_bytes=room))
        except Indeterminate as error:
            raise undoubted(self._machine.shard, error) from error

    def _adopted(self, piece: list[Pick]) -> Built:
        schema, parts, sums = self._schemas[-1], list[Part](), list[Sums]()
        for pick in piece:
            if pick.batch.part is not None:
                parts.append(pick.batch.part)
                sums.append(describe(schema, pick.table).sums)
        all_, is_cut = total(sums), piece[0].lower > piece[0].content.lower
        return Built(
            TraceBatch(
                0, 0, at(piece[0].lower), at(piece[-1].content.upper), MINIMUM, all_.count, all_.diff_sum,
                all_.fingerprint, tuple(parts), tuple(range(len(parts))), exact=not is_cut,
            )
        )  # fmt: skip


log = logging.getLogger("persist.pending")
OWNER, LAYER = "pending area", "pending"
"""Who an absorber is, for lists of writers, and as which layer (`core.holds`) it appends."""
AHEAD_S = 86_400
"""How far ahead of the store's clock a batch may end, in seconds, where times are a clock. One wrong clock at a writer
would otherwise put the upper there, and all that others write until then would be too late."""
MOST_GARBAGE = 5_000
"""How many keys of garbage a state may carry before a pass collects in between."""
MOST_HELD = 50_000
"""How many it may carry at most, where readers hold them. A pass stops there; the next one continues."""
PASSES = 20


class Choice(msgspec.Struct, frozen=True):
    """An operator's: where writers disagree at times before `through`, what this writer says is absorbed."""

    writer: str
    through: int


@charged
def absorb_shard(
    machine: Machine, leases: Leases, *, choice: Choice | None = None, dry_run: bool = False,
    planned: Container[str] | None = None, touched: list[PartKey] | None = None,
) -> Absorbed:  # fmt: skip
    """Absorb what can be absorbed, and make garbage of what nothing needs, as `area.absorb` says.

    Batches that are not `planned` are as if they were put later. A dry run names in `touched` the batches that would
    not be pending any more.
    """
    registration = Registration(machine, leases, "ingest", OWNER, LAYER)
    done = Absorbed(machine.shard, machine.fetch().state.upper)
    try:
        for _ in range(PASSES):
            one = _Pass(machine, leases, registration, choice, planned, dry_run=dry_run)
            found = one.run()
            if touched is not None:
                touched += one.touched
            done = _together(done, found)
            if dry_run or found.waits or not (one.was_late or one.is_partial):
                break
    finally:
        try:
            registration.close()
        except PersistError as error:  # what was absorbed is absorbed, and the lease ends by itself
            log.warning("collection %s: could not retire the absorber's id: %s", machine.shard, error)
    return done


def own(machine: Machine) -> None:
    """See to it that nothing else appends to the shard, as what is pending for these times would then be late for ever.

    Areas of earlier releases get the mark when they are absorbed next.
    """
    if layer_of(machine.state) != LAYER:
        with suppress(ShardFinished):
            claim(machine, LAYER)
            retire_writers(machine, but=OWNER)


def _together(first: Absorbed, second: Absorbed) -> Absorbed:
    """What two passes did, one after the other: the second one says how it is now."""
    counts = ("batches", "adopted", "updates", "size", "discarded", "deleted", "transitions")
    sums = {name: getattr(first, name) + getattr(second, name) for name in counts}
    return msgspec.structs.replace(second, lower=first.lower, damaged={**first.damaged, **second.damaged}, **sums)


class _Pass:
    """One listing, and what is done with it."""

    def __init__(
        self, machine: Machine, leases: Leases, registration: Registration, choice: Choice | None,
        planned: Container[str] | None, *, dry_run: bool,
    ) -> None:  # fmt: skip
        self._planned = planned
        self.touched: list[PartKey] = []
        """In a dry run, the keys of the batches that would not be pending any more."""
        self._machine, self._leases, self._registration = machine, leases, registration
        self._choice, self._dry_run = choice, dry_run
        self._done = Absorbed(machine.shard)
        self._disagreements: list[Disagreement] = []
        self._over: dict[Id, Content] = {}  # contents that agree, or were overruled, and whose end was not reached yet
        self._agreed: set[Id] = set()  # the contents whose end was reached
        self._start = 0
        self.was_late = False
        """Whether another process changed the shard first, so that it is worth another pass."""
        self.is_partial = False
        """Whether the listing had more than is kept of one."""

    def run(self) -> Absorbed:
        machine, runtime = self._machine, self._machine.runtime
        state = machine.fetch().state
        if state.is_finished():
            found, self.touched = delete_all(machine, self._done, Known((), self._planned), dry_run=self._dry_run)
            return found
        listing = fetch_listing(machine, Known(known_of(state), self._planned))
        self._tell(lower=state.upper, upper=state.upper, endless=listing.endless, foreign=listing.foreign)
        self.is_partial = listing.horizon is not None
        with runtime.pool(THREADS, "persist-pending") as pool:
            fetcher = Fetcher(machine.blob, machine.shard, listing, state.schemas, pool)
            if state.upper.time is not None:
                self._absorb(listing, fetcher, state, state.upper.time)
            late = discard_late(machine, listing, fetcher, self._agreed, self._make_room, dry_run=self._dry_run)
        self.touched += late.keys
        self._make_room(0)
        absorbed = self._done.discarded + self._done.batches
        self._tell(
            discarded=self._done.discarded + late.discarded, damaged=fetcher.damaged,
            disagreements=(*self._disagreements, *late.disagreements)[:SHOWN],
            left=len(listing) - len(listing.late(self._done.upper if self._dry_run else machine.state.upper)),
        )  # fmt: skip
        self.is_partial = self.is_partial and bool(absorbed or late.discarded)
        return self._done

    def _tell(self, **changes: object) -> None:
        self._done = msgspec.structs.replace(self._done, **changes)

    def _absorb(self, listing: Listing, fetcher: Fetcher, state: State, frontier: int) -> None:
        """Absorb piece by piece, until nothing continues or writers disagree."""
        self._start = frontier
        beyond = listing.contents((listing.rows["upper"] > frontier).nonzero()[0])
        contents = [content for content in beyond if content.upper <= _latest(self._machine, state.schemas[-1])]
        self._tell(ahead=sum(len(c.members) for c in beyond) - sum(len(c.members) for c in contents))
        sweep, chain = Sweep(contents, frontier), chain_of(contents, frontier)
        committer = Committer(self._machine, self._registration, state.schemas)
        piece: list[Pick] = []
        size = 0
        for place in range(len(beyond) + 1):
            check_not_stopped()
            fetcher.ahead(chain[place : place + AHEAD])
            if listing.horizon is not None and sweep.frontier >= listing.horizon:
                break
            pick = self._pick(sweep, fetcher)
            if pick is not None and fits(piece, size, pick):
                piece.append(pick)
                size += pick.batch.size
            else:
                if piece and not self._commit(committer, piece, listing):
                    return
                piece, size = ([pick], pick.batch.size) if pick is not None else ([], 0)
            if pick is None:
                break
            sweep.advance(pick.content.upper)
        if piece and not self._commit(committer, piece, listing):
            return
        if not self._disagreements and any(content.upper > sweep.frontier for content in contents):
            self._tell(gap=sweep.frontier)

    def _pick(self, sweep: Sweep, fetcher: Fetcher) -> Pick | None:
        """What continues from the frontier; None if nothing does, or if writers disagree and there is no choice."""
        frontier, against = sweep.frontier, None
        for content in sweep.candidates():
            if (batch := fetcher.read(content)) is None:
                continue
            others = [other for other in sweep.overlapping(content.upper) if other.id != content.id]
            disagreement = self._against(fetcher, content, batch, others, frontier)
            if disagreement is None:
                # What begins before the shard's upper has times that were not compared here. It is late afterwards.
                self._over |= {one.id: one for one in (content, *others) if one is content or one.lower >= self._start}
                return pick_of(content, batch, frontier)
            against = against or disagreement
        if against is None:
            return None
        if (chosen := self._chosen(sweep, fetcher, frontier)) is None:
            self._disagreements.append(against)
            return None
        self._over |= {other.id: other for other in sweep.overlapping(chosen.content.upper)}
        return chosen

    def _against(
        self, fetcher: Fetcher, content: Content, batch: Batch, others: Sequence[Content], frontier: int
    ) -> Disagreement | None:  # fmt: skip
        """The earliest disagreement with another content about a time that this one would bring into the shard."""
        found: list[tuple[int, Content]] = []
        for other in others:
            lower, upper = max(frontier, other.lower), min(content.upper, other.upper)
            mine, theirs = fetcher.sums(content, batch), fetcher.sums(other)
            if mine is None or theirs is None:
                continue  # damaged, or gone: no word against anything
            time = mine.between(lower, upper).first_difference(theirs.between(lower, upper))
            if time is not None:
                found.append((time, other))
        if not found:
            return None
        time, other = min(found, key=lambda one: (one[0], one[1].id))
        return fetcher.disagreement(time, [content, other])

    def _chosen(self, sweep: Sweep, fetcher: Fetcher, frontier: int) -> Pick | None:
        """What the chosen writer says from the frontier on, if there is a choice for that time."""
        choice = self._choice
        if choice is None or frontier >= choice.through:
            return None
        for content in sweep.candidates():
            if choice.writer in fetcher.writers(content) and (batch := fetcher.read(content)) is not None:
                return pick_of(content, batch, frontier)
        return None

    def _commit(self, committer: Committer, piece: list[Pick], listing: Listing) -> bool:
        """Have a piece enter the shard. Returns whether to continue."""
        upper = piece[-1].content.upper
        gone = self._gone(piece, listing, upper)
        if not self._dry_run:
            if not self._make_room(len(gone)):
                return False
            own(self._machine)
            answer = committer.commit(piece, gone)
            if isinstance(answer, (r.WrongUpper, r.Exists, r.NotLive, r.Finished)):
                self.was_late = True
                return False
            if not isinstance(answer, (Committed, r.AlreadyDone)):
                raise self._machine.refused(answer)
        else:
            self.touched += [*(pick.batch.name.key for pick in piece if pick.is_adopted), *(key for key, _ in gone)]
        done = self._done
        adopted = sum(pick.is_adopted for pick in piece)
        self._tell(
            upper=at(upper), batches=done.batches + len(piece), adopted=done.adopted + adopted,
            updates=done.updates + sum(pick.table.num_rows for pick in piece),
            size=done.size + sum(pick.batch.size for pick in piece), transitions=done.transitions + 1,
            discarded=done.discarded + len(gone) - (len(piece) - adopted),
        )  # fmt: skip
        return True

    def _gone(self, piece: list[Pick], listing: Listing, upper: int) -> tuple[tuple[PartKey, int], ...]:
        """What becomes garbage with a piece: what it rewrites, and what others put for the same times.

        Of these, as many as one transition should name; the others are late from then on.
        """
        adopted = {pick.batch.name.key for pick in piece if pick.is_adopted}
        reached = [content for content in self._over.values() if content.upper <= upper]
        self._agreed |= {content.id for content in reached}
        self._over = {content.id: content for content in self._over.values() if content.upper > upper}
        members = {int(index) for content in reached for index in content.members}
        rewritten = [(pick.batch.name.key, pick.batch.size) for pick in piece if not pick.is_adopted]
        named = adopted | {key for key, _ in rewritten}
        others = [(key, size) for key, size in listing.keyed(sorted(members)[: PIECE_BATCHES * 2]) if key not in named]
        return (*rewritten, *others[:PIECE_BATCHES])

    def _make_room(self, more: int) -> bool:
        """Collect, where the state has much garbage. Returns whether it can take that much more."""
        machine = self._machine
        if self._dry_run or len(machine.state.garbage) + more <= MOST_GARBAGE:
            return True
        try:
            with Worker(machine, self._leases) as worker:
                roll_up(machine, worker, force=True)
            why = "; ".join(held.why for held in collect(machine).held)
        except Paused as paused:
            why = paused.message
        if len(machine.state.garbage) + more <= MOST_HELD:
            return True
        self._tell(waits=f"{len(machine.state.garbage)} objects of garbage cannot be deleted yet: {why}")
        return False


def _latest(machine: Machine, schema: Schema) -> float:
    """The latest upper that a batch may have to be absorbed; infinite where times are plain integers."""
    if schema.times is None:
        return float("inf")
    per_second = PER_SECOND[schema.times]
    return machine.consensus.now() * per_second // 1000 + AHEAD_S * per_second
