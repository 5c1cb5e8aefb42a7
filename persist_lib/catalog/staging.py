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
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.catalog.committing import Committing, HandedOver, Pieces, discard
from persist_lib.catalog.names import LAYER
from persist_lib.catalog.parallel import at_once, states_of
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.staged import CollectionStage, CollectionStaged, CollectionTicket, by_shard
from persist_lib.catalog.writing import Active, Written
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.outcomes import staged_before
from persist_lib.core.state import Outcome
from persist_lib.errors import (
    InvalidUsage,
    LeaseExpired,
    Missing,
    NotFound,
    PersistError,
    Refused,
    ShardFinished,
    UpperMismatch,
)
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.by_key import Counts
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.next_time import next_time
from persist_lib.relation.registration import check_produced, lease_ended
from persist_lib.relation.stage import LEASE_S, Stage, can_append, parse_staged, token_of
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.staging import StagedChange, StagedVerbs
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table


class _Call(NamedTuple):
    """A commit of staged rows: what was given, how often it was written for another rendition, and until when."""

    staged: Sequence[CollectionStaged]
    written: list[Sequence[CollectionStaged]]
    change: StagedChange
    producer: tuple[str, int] | None
    deadline: Deadline
    spent: Spending
    restaged: ExitStack


class CollectionStaging(Committing, StagedVerbs[pa.Table, CollectionStaged, Written, Written]):
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
            stages = self._stages_of(rendition, lease_s, lower, new_upper)
        return CollectionStage(self.client.runtime, self.collection.id, rendition, stages)

    def resume_stage(self, ticket: CollectionTicket) -> CollectionStage:
        """The stage of a ticket that another process opened, to write more or to close it."""
        self._check_ticket(ticket)
        with self._lock:
            stages = [self.shard(one.shard).resume_stage(one) for one in ticket.tickets]
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

    def _append_staged(
        self, staged: list[CollectionStaged], change: StagedChange, producer: tuple[str, int] | None,
        timeout: float | None,
    ) -> Written:  # fmt: skip
        return self._in_turn(timeout, lambda deadline: self._carry_out(staged, change, producer, deadline))

    _change_staged = _append_staged

    def _carry_out(
        self,
        staged: Sequence[CollectionStaged],
        change: StagedChange,
        producer: tuple[str, int] | None,
        deadline: Deadline,
    ) -> Written:
        with Spending() as spent, ExitStack() as restaged:
            if producer is not None:
                check_produced(self.shard(self.collection.shard).machine, producer)
            if not (change.everything or change.bounds or any(one.staged for one in staged)):
                return Written(self.fetch_upper(), 0, b"", spent.cost)
            call = _Call(staged, [staged], change, producer, deadline, spent, restaged)
            while True:
                active = self._active()
                if (done := self._appended_before(staged, active.span.rendition)) is not None:
                    time = None if change.bounds is not None else (done.upper.time or 1) - 1
                    return Written(done.upper, 0, done.token, spent.cost, time)
                try:
                    if (written := self._try_staged(call, active)) is not None:
                        return written
                except (InvalidUsage, Refused):  # perhaps an earlier call came through just now
                    if self._appended_before(staged, active.span.rendition) is None:
                        raise

    def _try_staged(self, call: _Call, active: Active) -> Written | None:
        """Append what is staged to the active rendition. None: another writer or a handover was first."""
        change, deadline, span = call.change, call.deadline, active.span
        lower, upper = self._staged_bounds(change, self._upper_to_change(span, deadline))
        prepared: dict[str, Prepared] = {}
        try:
            if span.end is not None and at(span.end) < upper:
                over = active.timeline.over(lower.time or 0, upper.time)
                self._close_before(span.end, change, over, deadline)
                return None
            staged = self._of_rendition(call.written[-1], span.rendition, call.restaged)
            call.written.append(staged)
            self._prepare(prepared, staged, span.rendition, change, (lower, upper), deadline, call.spent)
            if change.kind is not None and all(one.is_empty() for one in prepared.values()):
                self._drop_staged(staged, change)
                return _written(lower, None, b"", prepared, call.spent.cost)
            token = token_of(one.id for one in call.staged) if call.staged else None
            token = self._commit(prepared, lower, upper, deadline, token, call.producer, span.command, active.read)
        except UpperMismatch as error:
            if change.bounds is not None or change.when is not None:
                raise self._mismatch(lower, error) from error
            self._check_time(deadline, "other writers were first")
        except HandedOver:
            discard(prepared)
            self._check_time(deadline, "it was handed over since")
        except LeaseExpired as error:
            self._check_stage(error, prepared)
            raise
        else:
            self._drop_staged(staged, change)
            time = None if change.bounds is not None else (upper.time or 1) - 1
            return _written(upper, time, token, prepared, call.spent.cost)
        return None

    def _appended_before(self, staged: Sequence[CollectionStaged], rendition: RenditionRecord) -> Outcome | None:
        """The outcome of the append of all of these answers, if it was made. Raises InvalidUsage for some of them.

        SUBTLE: asked once it is known which rendition is written. So an append to another one, which was handed over
        since, is there already or never will be. And what some shards have, those that were read before it have too.
        """
        if not staged:
            return None
        names = {part.shard for one in staged for part in one.staged}
        parts, token = sum(len(one.staged) for one in staged), token_of(one.id for one in staged)
        for is_fresh in (False, True):
            found: list[Outcome] = []
            for name in sorted({*names, *rendition.names}):
                with suppress(ShardFinished, NotFound):  # of a rendition that was dropped
                    machine = self.client.machine(name)
                    state = machine.state if name in rendition.names and not is_fresh else machine.fetch().state
                    if (known := next((one for one in state.outcomes if one.token == token), None)) is not None:
                        return known
                    given = [part.name for one in staged for part in one.staged if part.shard == name]
                    found += staged_before(state, given)
            if not found:
                return None
            if len(found) == parts:
                return msgspec.structs.replace(max(found, key=lambda one: one.upper), token=token)
        raise self.shard(rendition.names[0]).machine.refused(r.Exists(f"{r.STAGED}{found[0].token.hex()}"))

    def _prepare(
        self, into: dict[str, Prepared], staged: Sequence[CollectionStaged], rendition: RenditionRecord,
        change: StagedChange, bounds: tuple[Antichain, Antichain], deadline: Deadline, spent: Spending,
    ) -> None:  # fmt: skip
        """Make a batch of what is staged for each shard. One after the other, as each may take the memory of a pass."""
        time = None if change.bounds is not None else (bounds[1].time or 1) - 1
        try:
            for name, parts in by_shard(staged, rendition.names).items():
                into[name] = self.shard(name).prepare(
                    parts, change.kind, bounds, time, deadline, spent, everything=change.everything
                )
        except Exception:
            discard(into)
            raise

    def _close_before(self, start: int, change: StagedChange, over: Pieces, deadline: Deadline) -> None:
        """Say that nothing more comes before a handover, so that the rows go to the rendition after it."""
        if change.bounds is not None:
            self._check_one_side(change.bounds, start)
        self._close_old(empty_table(self.schema.updates), over, deadline, self.client.runtime.token())

    def _staged_bounds(self, change: StagedChange, upper: Antichain) -> tuple[Antichain, Antichain]:
        if change.bounds is not None:
            return change.bounds
        time = next_time(self.schema, self.name, upper, self.client.runtime, self.client.consensus.now)
        if change.when is not None:
            if not upper.is_before(change.when):
                raise self._mismatch(at(change.when), UpperMismatch("", expected=at(change.when), actual=upper))
            time = change.when
        return upper, at(time + 1)

    def _of_rendition(
        self, staged: Sequence[CollectionStaged], rendition: RenditionRecord, restaged: ExitStack
    ) -> Sequence[CollectionStaged]:
        """The same rows in parts for a rendition: those that were written for another one are written once more."""
        old = [one for one in staged if one.rendition != rendition.number]
        if not old:
            return staged
        lower, upper = old[0].bounds or (None, None)
        stages = self._stages_of(rendition, LEASE_S, lower, upper)
        stage = restaged.enter_context(CollectionStage(self.client.runtime, self.collection.id, rendition, stages))
        found = [one for one in staged if one.rendition == rendition.number]
        for shard in sorted({part.shard for one in old for part in one.staged}):
            parts = [part for one in old for part in one.staged if part.shard == shard]
            try:
                with self.client.open_writer(shard, self.schema, layer=LAYER) as write:
                    found.append(stage.write(write.staged_rows(parts)))
            except (ShardFinished, Missing) as error:
                raise LeaseExpired(
                    f"collection {self.name!r}: these parts were written for rendition {old[0].rendition}, which was "
                    "dropped since, and some of them with it. Nothing was appended. Write again, for rendition "
                    f"{rendition.number}",
                    id=parts[0].writer, shard=shard,
                ) from error  # fmt: skip
        return found

    def _drop_staged(self, staged: Sequence[CollectionStaged], change: StagedChange) -> None:
        """Delete parts of which only the difference was appended. What cannot be deleted is the audit's."""
        if change.kind is None:
            return
        for shard in {part.shard for one in staged for part in one.staged}:
            with suppress(PersistError):
                self.shard(shard).drop_staged([part for one in staged for part in one.staged if part.shard == shard])

    def _stages_of(
        self, rendition: RenditionRecord, lease_s: float, lower: object | None, new_upper: object | None
    ) -> list[Stage]:
        writes = [self.shard(name) for name in rendition.names]
        return at_once(
            self.client.runtime, lambda write: write.stage(lease_s=lease_s, lower=lower, new_upper=new_upper), writes
        )

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

    def _check_stage(self, error: LeaseExpired, prepared: Mapping[str, Prepared]) -> None:
        """Say so if it was a stage's id that is not live any more."""
        shard = error.fields.get("shard")
        if isinstance(shard, str) and shard in prepared and prepared[shard].is_lent():
            raise lease_ended(self.shard(shard).machine, str(error.fields.get("id"))) from error


def _written(upper: Antichain, time: int | None, token: bytes, prepared: Mapping[str, Prepared], cost: Cost) -> Written:
    counts = Counts(*(sum(of) for of in zip(*(one.counts for one in prepared.values()), strict=True)))
    count = sum(one.built.batch.count for one in prepared.values())
    return Written(upper, count, token, cost, time, *counts)
