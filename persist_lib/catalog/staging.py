"""Staged writes of a collection: processes anywhere write parts for all shards, and one transaction appends them.

    with writer.stage() as stage:                      # one writer id in each shard
        staged = stage.ticket.write(tables)            # in any process; each row goes to its key's shard
        writer.append_staged([staged, ...])            # all shards, and the promise, or nothing

Parts belong to the rendition for which they were written. Where another one was handed over to since, the commit
reads them and writes them once more, for its shards; so a job of hours does not lose to a handover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.catalog.committing import Committing, HandedOver
from persist_lib.catalog.metadata_shard import at_once, states_of
from persist_lib.catalog.records import LAYER, RenditionRecord
from persist_lib.catalog.renditions import Spreading, Write
from persist_lib.catalog.writing import Active, Written
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.outcomes import staged_before
from persist_lib.core.state import Outcome
from persist_lib.errors import InvalidUsage, LeaseExpired, Missing, NotFound, ShardFinished, UpperMismatch
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.relation.stage import LEASE_S, Stage, Staged, Ticket, can_append, parse_staged, token_of
from persist_lib.relation.staged_commit import Prepared, discard
from persist_lib.relation.staging import StagedCall, StagedVerbs, staged_rows
from persist_lib.relation.verbs import UNKNOWN, Turn
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.shard.leases import Leased


class CollectionStaged(msgspec.Struct, frozen=True, array_like=True):
    """What one task wrote for the shards of a rendition. It is small: encode it with `msgspec.msgpack`, or pickle."""

    id: bytes
    collection: str
    rendition: int
    staged: tuple[Staged, ...]
    bounds: tuple[Antichain, Antichain] | None
    rows: int = 0
    cost: Cost = Cost()

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(one.size for one in self.staged)

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return not self.staged


class CollectionTicket(msgspec.Struct, frozen=True):
    """What a process needs to write parts for a collection's stage. It pickles."""

    collection: str
    rendition: RenditionRecord
    tickets: tuple[Ticket, ...]
    """One a shard."""

    @property
    def lease_ms(self) -> int:
        """For how long its ids live without a task that extends them."""
        return self.tickets[0].lease_ms

    def write(self, updates: object) -> CollectionStaged:
        """Write updates as parts, each for the shard of its key, as a shard's ticket does."""
        return _write(self, [ticket.write for ticket in self.tickets], updates)


class CollectionStage(Leased):
    """One writer id in each shard of a rendition. `close` retires them: what is not appended then never can be."""

    def __init__(self, runtime: Runtime, collection: str, rendition: RenditionRecord, stages: Sequence[Stage]) -> None:
        self._runtime, self._collection, self._rendition, self._stages = runtime, collection, rendition, stages

    @property
    def rendition(self) -> RenditionRecord:
        """The rendition whose shards are written."""
        return self._rendition

    @property
    def ticket(self) -> CollectionTicket:
        """What other processes need to write. Raises InvalidUsage for a location that lives in this process only."""
        return CollectionTicket(self._collection, self._rendition, tuple(stage.ticket for stage in self._stages))

    def write(self, updates: object) -> CollectionStaged:
        """Do in this process what `ticket.write` does in another."""
        tickets = tuple(stage.local for stage in self._stages)
        ticket = CollectionTicket(self._collection, self._rendition, tickets)
        return _write(ticket, [stage.write for stage in self._stages], updates)

    def close(self) -> None:
        """Retire the ids. Idempotent."""
        at_once(self._runtime, Stage.close, self._stages)

    __reduce__ = not_pickled("A stage", "Pass its ticket")


def _write(ticket: CollectionTicket, writes: Sequence[Write], updates: object) -> CollectionStaged:
    first, runtime, rows = ticket.tickets[0], Runtime(), 0
    spreading = Spreading(ticket.rendition, writes)
    for table in first.checked(updates, first.machine()):
        rows += table.num_rows
        spreading.add(table)
    staged = tuple(one for share in spreading.finish() for one in share)
    cost = sum((one.cost for one in staged), Cost())
    return CollectionStaged(
        runtime.token(), ticket.collection, ticket.rendition.number, staged, first.bounds, rows, cost
    )


def by_shard(staged: Sequence[CollectionStaged], names: Sequence[str]) -> dict[str, list[Staged]]:
    """The parts for each of these shards."""
    found: dict[str, list[Staged]] = {name: [] for name in names}
    for one in staged:
        for part in one.staged:
            found[part.shard].append(part)
    return found


class CollectionStaging(Committing, StagedVerbs[pa.Table, Active, Written, Written, CollectionStaged]):
    """The calls of a collection's writer that stage writes of many processes, and append them together."""

    def stage(
        self, *, lease_s: float = LEASE_S, lower: object | None = None, new_upper: object | None = None
    ) -> CollectionStage:
        """Register a writer id in each shard, under which any number of processes may write parts. Close it at the end.

        As a shard's `stage`. With bounds the rows have a `_time` of their own in `[lower, new_upper)`, and all of them
        belong to one rendition.
        """
        self._check_verb("stage")
        if new_upper is not None and self._times().frontier(new_upper, "new_upper").is_top():
            raise InvalidUsage(
                f"collection {self.name!r}: a stage ends before the end of all times; close the collection with "
                "compare_and_append"
            )
        rendition = self._staging_rendition(lower)
        with self._lock:
            return self._stage_of(rendition, lease_s, lower, new_upper)

    def _stage_of(
        self, rendition: RenditionRecord, lease_s: float = LEASE_S, lower: object = None, new_upper: object = None
    ) -> CollectionStage:
        """A stage for one rendition, whichever is the collection. Where it fails, none of its ids is left."""
        writes = [self._place(name) for name in rendition.names]
        with ExitStack() as opened:
            open_ = partial(WriteHandle.stage, lease_s=lease_s, lower=lower, new_upper=new_upper)
            stages = at_once(self.client.runtime, lambda write: opened.enter_context(open_(write)), writes)
            opened.pop_all()
        return CollectionStage(self.client.runtime, self.collection.id, rendition, stages)

    def resume_stage(self, ticket: CollectionTicket) -> CollectionStage:
        """The stage of a ticket that another process opened, to write more or to close it."""
        self._check_ticket(ticket)
        with self._lock:
            stages = [self._place(one.shard).resume_stage(one) for one in ticket.tickets]
        return CollectionStage(self.client.runtime, self.collection.id, ticket.rendition, stages)

    def can_append(self, ticket: CollectionTicket) -> bool:
        """Whether parts written with a ticket could be appended now, as they are: read from the location."""
        self._check_ticket(ticket)
        if self._staging_rendition(None).number != ticket.rendition.number:
            return False
        states = states_of(self.client, ticket.rendition.names)
        return all(can_append(state, one) for one, state in zip(ticket.tickets, states, strict=True))

    def _parse_staged(self, staged: object) -> list[CollectionStaged]:
        def other(one: CollectionStaged) -> str | None:
            return None if one.collection == self.collection.id else "another collection"

        return parse_staged(staged, CollectionStaged, *self._told(), other)

    def _check_ticket(self, ticket: object) -> None:
        if not isinstance(ticket, CollectionTicket) or ticket.collection != self.collection.id:
            raise InvalidUsage(f"collection {self.name!r}: a stage is resumed with a ticket of the same collection")

    def _appended_before(self, staged: Sequence[CollectionStaged], turn: Turn[Active]) -> Outcome | None:
        """The outcome of the append of all of these answers, if it was made. Raises InvalidUsage for some of them.

        Asked once it is known which rendition is written. So an append to another one, which was handed over
        since, is there already or never will be. And what some shards have, those that were read before it have too.
        """
        if not staged:
            return None
        names, rendition = {part.shard for one in staged for part in one.staged}, turn.basis.span.rendition
        parts, token = sum(len(one.staged) for one in staged), token_of(one.id for one in staged)
        for is_fresh in (False, True):
            found: list[Outcome] = []
            for name in sorted({*names, *rendition.names}):
                with suppress(ShardFinished, NotFound):  # of a rendition that was dropped
                    machine = self.client.machine(name)
                    state = machine.state if name in rendition.names and not is_fresh else machine.fetch().state
                    if (known := next((one for one in state.outcomes if one.token.endswith(token)), None)) is not None:
                        return known
                    given = [part.name for one in staged for part in one.staged if part.shard == name]
                    found += staged_before(state, given)
            if not found:
                return None
            if len(found) == parts:
                return msgspec.structs.replace(max(found, key=lambda one: one.upper), token=token)
        raise self._place(rendition.names[0]).machine.refused(r.Exists(f"{r.STAGED}{found[0].token.hex()}"))

    def _parts_for(
        self, call: StagedCall[CollectionStaged], turn: Turn[Active], bounds: tuple[Antichain, Antichain]
    ) -> Mapping[str, Sequence[Staged]] | None:  # fmt: skip
        span = turn.basis.span
        if span.end is not None and at(span.end) < bounds[1]:
            # Nothing more comes before the handover, so that the rows go to the rendition after it.
            if call.change.bounds is not None:
                self._check_one_side(call.change.bounds, span.end)
            over = turn.basis.timeline.over(bounds[0].time or 0, bounds[1].time)
            self._close_old(empty_table(self.schema.updates), over, call.deadline, self.client.runtime.token())
            return None
        call.written.append(self._of_rendition(call.written[-1], span.rendition, call.opened))
        return by_shard(call.written[-1], span.rendition.names)

    def _commit_prepared(
        self, call: StagedCall[CollectionStaged], turn: Turn[Active], prepared: Mapping[str, Prepared],
        bounds: tuple[Antichain, Antichain], token: bytes,
    ) -> tuple[SeqNo, int] | None:  # fmt: skip
        active = turn.basis
        try:
            self._commit(prepared, *bounds, call.deadline, token, call.producer, active.span.command, active.read)
        except HandedOver:
            discard(prepared)
            return None
        return UNKNOWN, 0

    def _lost(self, expected: Antichain, error: UpperMismatch) -> UpperMismatch:
        return self._mismatch(expected, error)

    def _of_rendition(
        self, staged: Sequence[CollectionStaged], rendition: RenditionRecord, restaged: ExitStack
    ) -> Sequence[CollectionStaged]:
        """The same rows in parts for a rendition: those that were written for another one are written once more."""
        old = [one for one in staged if one.rendition != rendition.number]
        if not old:
            return staged
        stage = restaged.enter_context(self._stage_of(rendition, LEASE_S, *(old[0].bounds or (None, None))))
        found = [one for one in staged if one.rendition == rendition.number]
        for shard in sorted({part.shard for one in old for part in one.staged}):
            parts = [part for one in old for part in one.staged if part.shard == shard]
            try:
                with self.client.open_writer(shard, self.schema, layer=LAYER) as write:
                    found.append(stage.write(staged_rows(write, parts)))
            except (ShardFinished, Missing) as error:
                raise LeaseExpired(
                    f"collection {self.name!r}: these parts were written for rendition {old[0].rendition}, which was "
                    "dropped since, and some of them with it. Nothing was appended. Write again, for rendition "
                    f"{rendition.number}",
                    id=parts[0].writer, shard=shard,
                ) from error  # fmt: skip
        return found

    def _staging_rendition(self, lower: object | None) -> RenditionRecord:
        if lower is None:
            return self._active().span.rendition
        start = self._times().frontier(lower, "lower").time
        timeline = self._timeline()
        return self._only or (timeline.last if start is None else timeline.at(max(start, timeline.since))).rendition

    def _check_one_side(self, bounds: tuple[Antichain, Antichain], start: int) -> None:
        if bounds[1] <= at(start):
            return
        show = self.schema.show
        raise InvalidUsage(
            f"collection {self.name!r} is handed over at {show(start)}, and these rows have times in "
            f"[{show(bounds[0])}, {show(bounds[1])}), on both sides of that. Nothing was written: stage those before "
            f"{show(start)} by themselves, with that as new_upper, and then the others",
            collection=self.name, at=start,
        )  # fmt: skip
