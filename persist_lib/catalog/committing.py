"""Committing to a collection: the updates go to the shards of the rendition that is the collection at their times.

SUBTLE: a writer sees to it that the times at which it writes are promised with that rendition active there, before or
with its data. Else a handover could come below data that was acknowledged, and lose it. With transactions the promise
is part of the append, which then loses to a handover that was first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import pyarrow as pa

from persist_lib.catalog.metadata_shard import at_once
from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.renditions import Span, Timeline, is_copied, meet, routed
from persist_lib.catalog.writing import PAUSE_S, Active, Writing, Written
from persist_lib.client import Client
from persist_lib.core.state import Outcome
from persist_lib.errors import Indeterminate, InvalidUsage, PersistError, UpperMismatch
from persist_lib.format.parts import within as updates_within
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.keyset import Counts
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.ordered_writer import Checked
from persist_lib.relation.registration import Named, undoubted
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.staging import append_prepared
from persist_lib.relation.verbs import NOTHING, UNKNOWN, Change, Changes, Turn
from persist_lib.relation.writer import Append, WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.shard.commit import Machine
from persist_lib.shard.outcomes import Verdict, find_placed, find_since
from persist_lib.shard.refusals import named

Brought: TypeAlias = pa.Table | Mapping[str, Prepared]
"""Updates, or what staged writes come to for each shard of the one rendition that is written."""
Pieces = Sequence[tuple[int, int | None, Span]]


class HandedOver(Exception):
    """Another rendition is the collection at the times of an append than the one that decided what is appended."""


class Committing(Writing):
    """A writer that commits updates to all shards at once, or definite ones to each shard by itself."""

    # --- appends that are accepted, and changes at the next time ------------------------------------------------------

    def _producing(self) -> Machine:
        return self._place(self.collection.shard).machine

    def _bring(self, tables: Iterator[pa.Table], _bounds: tuple[Antichain, Antichain], _deadline: Deadline) -> pa.Table:
        return pa.concat_tables([empty_table(self.schema.updates), *tables])

    def _brought_again(self, brought: pa.Table, _deadline: Deadline) -> pa.Table:
        return brought

    def _count_of(self, brought: pa.Table) -> int:
        return int(brought.num_rows)

    def _commit_brought(
        self, brought: pa.Table, bounds: tuple[Antichain, Antichain], deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, spent: Spending,
    ) -> Written:  # fmt: skip
        sent = self._commit(brought, *bounds, deadline, token, producer)
        return Written(bounds[1], brought.num_rows, sent, spent.cost)

    def _committed_before(
        self, _token: bytes, _bounds: tuple[Antichain, Antichain], _count: int, refusal: PersistError, _spent: Spending
    ) -> Written:
        raise refusal  # the appends to the shards were judged already

    def _append_placed(
        self, table: pa.Table, deadline: Deadline, token: bytes | None, since: SeqNo | None,
        producer: tuple[str, int] | None,
    ) -> Written:  # fmt: skip
        """What became of an append that a server placed in a shard by its own name: of one of this collection's.

        It is made here, with another token, if it certainly never comes there, as the shard was promoted. Raises
        Indeterminate if that is not certain: it may be on its way, and no append here would exclude it.
        """
        if token is None or since is None:
            raise AssertionError("no server places the appends of a collection")
        with Spending() as spent:
            rendition = self._only or self._timeline().spans[0].rendition
            shard, find = rendition.names[0], find_placed if rendition.places else find_since
            found = within(deadline, partial(find, self.client.machine(shard), token, since))
            if isinstance(found, Outcome):
                return Written(found.upper, 0, token, spent.cost, (found.upper.time or 1) - 1)
        if found is None:
            return self._append_next(table, None, producer, deadline)
        raise Indeterminate(
            f"collection {self.name!r}: the append with this token was made to the shard {shard} by its own name. It "
            f"is not there up to v{found}, and may still be on its way. This call wrote nothing. Read the collection "
            "later to find out what became of it",
            token=token, collection=self.name,
        )  # fmt: skip

    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        """In the rendition that was the collection at its lower.

        Where that is not known any more, the oldest one that is known may still say that it has the append.
        """
        timeline, lower = self._timeline(), known.lower.time or 0
        is_known = self._only is not None or timeline.since <= lower
        rendition = self._only or timeline.at(max(lower, timeline.since)).rendition
        verdict = within(deadline, partial(self.client.judge_append, rendition.names[0], *known))
        if is_known or verdict.seqno is not None:
            return verdict
        show = self.schema.show
        why = (
            f"which rendition was the collection at {show(lower)} is given up: history begins at {show(timeline.since)}"
        )
        return Verdict("unknown", None, why)

    def _likely_turn(self) -> Turn[Active] | None:
        kept = self._kept(is_likely=True)
        return None if kept is None else self._turn_of(*kept)

    def _next_turn(self, deadline: Deadline) -> Turn[Active]:
        active = self._active()
        return self._turn_of(active, self._upper_to_change(active.span, deadline))

    def _turn_of(self, active: Active, upper: Antichain) -> Turn[Active]:
        rendition = active.span.rendition
        machines = [self._place(name).machine for name in rendition.names]
        places = [(machine, machine.version) for machine in machines]
        return Turn(upper, places, partial(routed, rendition), active)

    def _try_turn(
        self, call: Change, turn: Turn[Active], changes: Changes, named: Named, deadline: Deadline
    ) -> Written | None:
        (token, lower, upper), active = named, turn.basis
        try:
            if (later := active.span.end) is not None and later <= named.time:
                # What the keys have there is looked up in the rendition that is the collection by then.
                over = active.timeline.over(lower.time or 0, upper.time)
                self._close_old(empty_table(self.schema.updates), over, deadline, token)
                return None
            rows = at_time(changes.table, named.time)
            self._commit(rows, lower, upper, deadline, token, call.producer, active.span.command, active.read)
        except (UpperMismatch, HandedOver):
            return None
        return self._answer(upper, rows.num_rows, token, call.spent, named.time, changes.counts)

    def _answer(
        self, upper: Antichain, count: int, token: bytes, spent: Spending, time: int | None = None,
        counts: Counts = NOTHING, seqno: SeqNo = UNKNOWN, attempts: int = 0,  # noqa: ARG002 - several shards have several
    ) -> Written:  # fmt: skip
        return Written(upper, count, token, spent.cost, time, *counts)

    def _plain(self, answer: Written) -> Written:
        return answer

    def _gap(self, lower: Antichain, upper: Antichain) -> PersistError:
        return self._mismatch(lower, UpperMismatch("", expected=lower, actual=upper))

    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        return self._out_of_time(deadline, f"other writers, or a handover, were first {races} times")

    # --- commits ------------------------------------------------------------------------------------------------------

    def _commit(
        self, brought: Brought, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, seen: str | None = None, read: Timeline | None = None,
    ) -> bytes:  # fmt: skip
        """Append to all shards at once, together with the promise of these times if they lack it; answers the token.

        What was prepared is for the shards of one rendition, and has an upper.

        `seen` is the handover to the rendition whose contents decided what is appended. Where another followed, it
        raises HandedOver and appends nothing. `read` is what the call has just read of handovers.
        """
        token = token or self.client.runtime.token()
        if self._only is not None:
            self._append_all([(lower.time or 0, upper.time, self._only)], brought, None, lower, deadline, token)
            return token
        promise = _promise_for(brought, lower, upper)
        while True:
            # SUBTLE: what is kept is a promise, never which rendition was active: beyond it, that is read.
            timeline = read or (self._timeline_to(promise) if producer is None else self._timeline())
            over, read = timeline.over(lower.time or 0, upper.time), None
            if seen is not None and [span.command for *_, span in over] != [seen]:
                raise HandedOver
            if len(over) > 1 and (over[-1][2].rendition.copies is not None or not self.has_transactions):
                lower = self._close_old(brought, over, deadline, token)
                continue
            for *_, span in over:
                self._copied(span, deadline)
            if not self.has_transactions and timeline.upper < promise:
                if (reached := meet(self.client, over[0][2].rendition.names)) == lower:
                    self._promise(self._ahead(promise), deadline)  # only for an append that can be: it is for ever
                    continue
                if reached < lower:  # others may come up to it at any moment, and it is not promised
                    raise self._mismatch(lower, UpperMismatch("", expected=lower, actual=reached))
            promising = self._promising(timeline, promise, producer) if self.has_transactions else None
            pieces = [(start, end, span.rendition) for start, end, span in over]
            try:
                self._append_all(pieces, brought, promising, lower, deadline, token)
            except UpperMismatch as error:
                if error.fields.get("shard") != self.collection.shard:
                    raise
            else:
                return token
            self._check_time(deadline, "others promised or handed over first")

    def _promising(
        self, timeline: Timeline, promise: Antichain, producer: tuple[str, int] | None
    ) -> Append | None:  # fmt: skip
        """The promise as a part of the commit, if these times lack it. It fails where a handover was first."""
        target = self._ahead(promise) if timeline.upper < promise else timeline.upper
        if producer is not None:  # a producer is remembered where the promise is, which then has to move
            target = target.join(at((timeline.upper.time or 0) + 1))
        if target == timeline.upper:
            return None
        return Append(self._place(self.collection.shard), [], timeline.upper, target, producer)

    def _append_definite(
        self, table: pa.Table, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None
    ) -> None:
        """Append to each shard by itself what it does not have yet, once the promise is past it."""
        self._check_no_gap(lower)
        for start, end, span in self._promised(lower, upper, deadline):
            self._copied(span, deadline)

            def send(share: tuple[WriteHandle, Checked], start: int = start, end: int | None = end) -> None:
                write, rows = share
                write.append(rows, start, Antichain(end), timeout=deadline.left_s(), token=token)

            at_once(self.client.runtime, send, self._shares(span.rendition, updates_within(table, start, end)))

    def _advance_each(self, reached: Antichain, upper: Antichain, deadline: Deadline) -> None:
        """Advance the upper of each shard by itself, once the promise is past it."""
        for _start, end, span in self._promised(reached, upper, deadline):
            self._copied(span, deadline)

            def advance(name: str, end: int | None = end) -> None:
                self._place(name).advance_upper(Antichain(end), timeout=deadline.left_s())

            at_once(self.client.runtime, advance, span.rendition.names)

    def _append_all(
        self, pieces: Sequence[tuple[int, int | None, RenditionRecord]], brought: Brought, promising: Append | None,
        lower: Antichain, deadline: Deadline, token: bytes,
    ) -> None:  # fmt: skip
        appends = [] if promising is None else [promising]
        appends += [
            Append(write, updates, start, Antichain(end))
            for start, end, rendition in pieces
            for write, updates in self._brought(rendition, brought, start, end)
        ]
        try:
            self._send_all(appends, deadline, token)
        except UpperMismatch as error:
            if error.fields.get("shard") == self.collection.shard:
                raise
            raise self._mismatch(lower, error) from error

    def _send_all(self, appends: Sequence[Append], deadline: Deadline, token: bytes) -> None:
        send_all(self.client, appends, deadline, token, self._registered, together=self.has_transactions)

    def _close_old(self, brought: Brought, over: Pieces, deadline: Deadline, token: bytes) -> Antichain:
        """Say that nothing more comes before the newest rendition, which can then be copied to its end.

        With the token of the append that it is for, so that a repeated append finds this done as well.
        """
        start = over[-1][0]
        if isinstance(brought, pa.Table) and len(updates_within(brought, over[0][0], start)):
            show = self.schema.show
            raise InvalidUsage(
                f"collection {self.name!r} is handed over at {show(start)}, and this append has updates on both sides "
                f"of that. Nothing was written: append what is before {show(start)} first, with that as new_upper",
                collection=self.name, at=start,
            )  # fmt: skip
        for first, end, span in over[:-1]:
            appends = [Append(self._place(name), [], first, Antichain(end)) for name in span.rendition.names]
            try:
                self._send_all(appends, deadline, token)
            except UpperMismatch as error:
                raise self._mismatch(at(first), error) from error
        return at(start)

    def _copied(self, span: Span, deadline: Deadline) -> None:
        """Wait until a copy that was handed over to has all that the rendition before it had."""
        while not is_copied(self.client, span.rendition, span.start):
            self._check_time(deadline, f"rendition {span.rendition.number} is still being copied")
            deadline.pause(PAUSE_S)

    def _check_no_gap(self, lower: Antichain) -> None:
        """Raise UpperMismatch before anything is promised for an append that cannot be: a promise is for ever."""
        if (upper := self.fetch_upper()) < lower:
            show = self.schema.show
            raise UpperMismatch(
                f"collection {self.name!r}: the append starts at {show(lower)}, but upper is {show(upper)}: there is a "
                "gap. Nothing was written; append what is in between first",
                collection=self.name, expected=lower, actual=upper,
            )  # fmt: skip

    def _promised(self, lower: Antichain, upper: Antichain, deadline: Deadline) -> list[tuple[int, int | None, Span]]:
        """The pieces of `[lower, upper)` by rendition, promised."""
        if self._only is not None:
            return [(lower.time or 0, upper.time, Span(0, None, self._only, ""))]
        self._promise(upper if upper.time is not None else at((lower.time or 0) + 1), deadline)
        return self._timeline_to(upper).over(lower.time or 0, upper.time)

    def _promise(self, upper: Antichain, deadline: Deadline) -> None:
        if self._timeline_to(upper).upper < upper:
            self._place(self.collection.shard).advance_upper(upper, timeout=deadline.left_s())

    def _brought(
        self, rendition: RenditionRecord, brought: Brought, start: int, end: int | None
    ) -> Sequence[tuple[WriteHandle, object]]:
        if isinstance(brought, pa.Table):
            return self._shares(rendition, updates_within(brought, start, end))
        return [(self._place(name), brought[name]) for name in rendition.names]

    def _shares(self, rendition: RenditionRecord, table: pa.Table) -> list[tuple[WriteHandle, Checked]]:
        """What each shard gets of updates that this writer has checked, or made."""
        shares = zip(rendition.names, routed(rendition, table), strict=True)
        return [(self._place(name), Checked(rows)) for name, rows in shares]


def send_all(
    client: Client, appends: Sequence[Append], deadline: Deadline, token: bytes, registered: set[str],
    *, together: bool,
) -> None:  # fmt: skip
    """Carry out appends to several shards: all of them or none, if `together`; else one after the other.

    In the shards that are `registered` their writers have ids already.
    """
    timeout = deadline.left_s()
    if len(appends) > 1 and together:
        new = [one.write for one in appends if one.write.shard not in registered and _registers(one)]
        try:
            within(deadline, lambda: at_once(client.runtime, lambda write: write.id, new))  # registers them
        except Indeterminate as error:
            raise undoubted(new[0].shard, error, named([write.machine.shard for write in new])) from error
        registered.update(write.shard for write in new)
        client.compare_and_append_many(appends, timeout=timeout, token=token)
        return
    for one in appends:
        if isinstance(one.updates, Prepared):
            append_prepared(one.write, one.updates, deadline, token)
            continue
        one.write.compare_and_append(
            one.updates, one.expected_upper, one.new_upper, timeout=timeout, token=token, producer=one.producer
        )


def _registers(append: Append) -> bool:
    """Whether it is written under the handle's own id, and not under that of a stage."""
    return not (isinstance(append.updates, Prepared) and append.updates.is_lent())


def _promise_for(brought: Brought, lower: Antichain, upper: Antichain) -> Antichain:
    """Up to where these times have to be promised: never to the end of all times."""
    if upper.time is not None or not isinstance(brought, pa.Table):
        return upper
    times = brought.column("_time").to_pylist()
    return at(max([lower.time or 0, *times]) + 1)
