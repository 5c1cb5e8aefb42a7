"""Committing to a collection: the updates go to the shards of the rendition that is the collection at their times.

SUBTLE: a writer sees to it that the times at which it writes are promised with that rendition active there, before or
with its data. Else a handover could come below data that was acknowledged, and lose it. With transactions the promise
is part of the append, which then loses to a handover that was first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa

from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, UpperMismatch
from persist_lib.format.parts import within as updates_within
from persist_lib.frontier import Antichain, at
from persist_lib.location.wrap.deadline import within
from persist_lib.relation.append_many import Append
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.storage.parallel import at_once
from persist_lib.storage.partition_rows import routed
from persist_lib.storage.records import CollectionRecord, RenditionRecord
from persist_lib.storage.renditions import Span, meet
from persist_lib.storage.writing import PAUSE_S, Writing
from persist_lib.times import Unit

Brought: TypeAlias = pa.Table | Mapping[str, Prepared]
"""Updates, or what staged writes come to for each shard of the one rendition that is written."""
Pieces = Sequence[tuple[int, int | None, Span]]


class HandedOver(Exception):
    """Another rendition is the collection at the times of an append than the one that decided what is appended."""


class Committing(Writing):
    """A writer that commits updates to all shards at once, or definite ones to each shard by itself."""

    def __init__(
        self, client: Client, collection: CollectionRecord, unit: Unit | None, only: RenditionRecord | None,
        owner: str = "",
    ) -> None:  # fmt: skip
        super().__init__(client, collection, unit, only, owner)
        self._registered: set[str] = set()

    def _commit(
        self, brought: Brought, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, seen: str | None = None,
    ) -> bytes:  # fmt: skip
        """Append to all shards at once, together with the promise of these times; answers the token.

        What was prepared is for the shards of one rendition, and has an upper.

        `seen` is the handover to the rendition whose contents decided what is appended. Where another followed, it
        raises HandedOver and appends nothing.
        """
        token = token or self.client.runtime.token()
        if self._only is not None:
            self._append_all([(lower.time or 0, upper.time, self._only)], brought, None, lower, deadline, token)
            return token
        promise = _promise_for(brought, lower, upper)
        while True:
            timeline = self._timeline()
            over = timeline.over(lower.time or 0, upper.time)
            if seen is not None and [span.command for *_, span in over] != [seen]:
                raise HandedOver
            if len(over) > 1 and (over[-1][2].rendition.copies is not None or not self.has_transactions):
                lower = self._close_old(brought, over, deadline, token)
                continue
            for *_, span in over:
                self._copied(span, deadline)
            promising = None
            if self.has_transactions:
                if timeline.upper < promise or producer is not None:
                    # SUBTLE: a producer is remembered where the promise is, which then has to move.
                    target = promise.join(at((timeline.upper.time or 0) + 1)) if producer is not None else promise
                    promising = Append(self.shard(self.collection.shard), [], timeline.upper, target, producer)
            elif timeline.upper < promise and meet(self.client, over[0][2].rendition.names) == lower:
                self._promise(promise, deadline)  # only for an append that can be: it is never taken back
                continue
            pieces = [(start, end, span.rendition) for start, end, span in over]
            try:
                self._append_all(pieces, brought, promising, lower, deadline, token)
            except UpperMismatch as error:
                if error.fields.get("shard") != self.collection.shard:
                    raise
            else:
                return token
            self._check_time(deadline, "others promised or handed over first")

    def _append_definite(self, table: pa.Table, lower: Antichain, upper: Antichain, deadline: Deadline) -> None:
        """Append to each shard by itself what it does not have yet, once the promise is past it."""
        self._check_no_gap(lower)
        for start, end, span in self._promised(lower, upper, deadline):
            self._copied(span, deadline)

            def send(share: tuple[WriteHandle, pa.Table], start: int = start, end: int | None = end) -> None:
                write, rows = share
                write.append(rows, start, Antichain(end), timeout=deadline.left_s())

            at_once(self.client.runtime, send, self._shares(span.rendition, updates_within(table, start, end)))

    def _advance_each(self, reached: Antichain, upper: Antichain, deadline: Deadline) -> None:
        """Advance the upper of each shard by itself, once the promise is past it."""
        for _start, end, span in self._promised(reached, upper, deadline):
            self._copied(span, deadline)

            def advance(name: str, end: int | None = end) -> None:
                self.shard(name).advance_upper(Antichain(end), timeout=deadline.left_s())

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
            self._send(appends, deadline, token)
        except UpperMismatch as error:
            if error.fields.get("shard") == self.collection.shard:
                raise
            raise self._mismatch(lower, error) from error

    def _send(self, appends: Sequence[Append], deadline: Deadline, token: bytes) -> None:
        send_all(self.client, appends, deadline, token, self._registered, together=self.has_transactions)

    def _close_old(self, brought: Brought, over: Pieces, deadline: Deadline, token: bytes) -> Antichain:
        """Say that nothing more comes before the newest rendition, which can then be copied to its end.

        SUBTLE: with the token of the append that it is for, so that a repeated append finds this done as well.
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
            appends = [Append(self.shard(name), [], first, Antichain(end)) for name in span.rendition.names]
            try:
                self._send(appends, deadline, token)
            except UpperMismatch as error:
                raise self._mismatch(at(first), error) from error
        return at(start)

    def _copied(self, span: Span, deadline: Deadline) -> None:
        """Wait until a copy that was handed over to has all that the rendition before it had."""
        while span.rendition.copies is not None and meet(self.client, span.rendition.names) < at(span.start):
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
        return self._timeline().over(lower.time or 0, upper.time)

    def _promise(self, upper: Antichain, deadline: Deadline) -> None:
        if self._timeline().upper < upper:
            self.shard(self.collection.shard).advance_upper(upper, timeout=deadline.left_s())

    def _brought(
        self, rendition: RenditionRecord, brought: Brought, start: int, end: int | None
    ) -> Sequence[tuple[WriteHandle, object]]:
        if isinstance(brought, pa.Table):
            return self._shares(rendition, updates_within(brought, start, end))
        return [(self.shard(name), brought[name]) for name in rendition.names]

    def _shares(self, rendition: RenditionRecord, table: pa.Table) -> list[tuple[WriteHandle, pa.Table]]:
        return [(self.shard(name), rows) for name, rows in zip(rendition.names, routed(rendition, table), strict=True)]


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
        within(deadline, lambda: at_once(client.runtime, lambda write: write.id, new))  # registers them
        registered.update(write.shard for write in new)
        client.compare_and_append_many(appends, timeout=timeout, token=token)
        return
    for one in appends:
        if isinstance(one.updates, Prepared):
            one.write.append_prepared(one.updates, deadline, token)
            continue
        one.write.compare_and_append(
            one.updates, one.expected_upper, one.new_upper, timeout=timeout, token=token, producer=one.producer
        )


def discard(prepared: Mapping[str, Prepared]) -> None:
    """Delete what was uploaded, to which no command refers."""
    for one in prepared.values():
        one.builder.discard()


def _registers(append: Append) -> bool:
    """Whether it is written under the handle's own id, and not under that of a stage."""
    return not (isinstance(append.updates, Prepared) and append.updates.is_lent())


def _promise_for(brought: Brought, lower: Antichain, upper: Antichain) -> Antichain:
    """Up to where these times have to be promised: never to the end of all times."""
    if upper.time is not None or not isinstance(brought, pa.Table):
        return upper
    times = brought.column("_time").to_pylist()
    return at(max([lower.time or 0, *times]) + 1)
