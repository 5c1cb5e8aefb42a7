"""Writing a collection: rows go to the shards of the rendition that is the collection at their times.

SUBTLE: a writer sees to it that the times at which it writes are promised with that rendition active there, before or
with its data. Else a handover could come below data that was acknowledged, and lose it. With transactions the promise
is part of the append, which then loses to a handover that was first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds
from persist_lib.client import Client
from persist_lib.convert.by_key import parse_keys, parse_rows, without_times
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.core.cost import Cost
from persist_lib.errors import Indeterminate, InvalidUsage, SchemaMismatch, TimedOut, UpperMismatch
from persist_lib.format.parts import within as updates_within
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import parse_producer, parse_token
from persist_lib.kernel.by_key import Counts, count_deleted, count_upserted, one_row_each, replacing
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.storage.at_once import at_once, states_of
from persist_lib.storage.records import CollectionRecord, RenditionRecord
from persist_lib.storage.routing import routed
from persist_lib.storage.timeline import Renditions, Span, Timeline
from persist_lib.storage.upper import meet, upper_of
from persist_lib.times import Times, Unit
from persist_lib.write.appending import parse_bounds
from persist_lib.write.handle import WriteHandle
from persist_lib.write.looking import Looking
from persist_lib.write.many import Append
from persist_lib.write.times import bounds_of, format_token, next_time

PAUSE_S = 0.05
"""Between two looks at a rendition that is still being copied."""


class Written(msgspec.Struct, frozen=True):
    """What a write did. `upper` is the collection's upper from it, `count` the updates that it brought.

    After a change by key, `time` is its time, and the other counts say what became of the keys.
    """

    upper: Antichain
    count: int
    token: bytes
    cost: Cost
    time: int | None = None
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0


class CollectionWriter:
    """Writes one collection. Its methods are those of a shard's writer, as far as the collection's mode has them."""

    def __init__(
        self, client: Client, collection: CollectionRecord, unit: Unit | None, only: RenditionRecord | None
    ) -> None:
        self.client, self.collection, self._only = client, collection, only
        self._renditions = Renditions(client, collection.shard, unit, collection.name)
        self._writers: dict[str, WriteHandle] = {}
        self._registered: set[str] = set()
        self._closed = False
        rendition = only or self._span_to_write(self._timeline())[0].rendition
        self.mode = rendition.mode
        self.schema: Schema = client.machine(rendition.names[0]).fetch().state.schemas[-1]
        self.has_transactions = _has_transactions(client)

    def __repr__(self) -> str:
        return f"CollectionWriter({self.collection.name!r})"

    @property
    def name(self) -> str:
        """The collection's name when it was opened."""
        return self.collection.name

    def fetch_upper(self) -> Antichain:
        """How far the collection (or the rendition that this handle writes) has come: read from the location."""
        self._check_open()
        if self._only is not None:
            return meet(self.client, self._only.names)
        return upper_of(self.client, self._timeline())

    def compare_and_append(
        self,
        updates: object,
        expected_upper: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Written:
        """Append updates with times in `[expected_upper, new_upper)`, if upper is exactly `expected_upper`.

        All shards are appended to in one transaction. The arguments and errors are those of a shard's
        `compare_and_append`; the updates are held in memory. Raises InvalidUsage for a collection that is written by
        definite appends.
        """
        self._check_mode("compare_and_append")
        times = self._times()
        lower, upper = parse_bounds(expected_upper, new_upper, times)
        token, producer = None if token is None else parse_token(token), parse_producer(producer)
        if producer is not None and (self._only is not None or not self.has_transactions):
            raise InvalidUsage(
                f"collection {self.name!r}: a producer is remembered with the collection, in one transaction with the "
                "data: this takes a store with transactions, and a writer that was opened without rendition=",
                collection=self.name,
            )
        deadline = self._deadline(timeout)
        table = self._parsed(updates, lower, upper, times)
        with Spending() as spent:
            sent = self._commit(table, lower, upper, deadline, token, producer)
            return Written(upper, table.num_rows, sent, spent.cost)

    def append_on(
        self, basis: str, updates: pa.Table, lower: int, upper: int, *, timeout: float, token: bytes
    ) -> bytes:
        """Append as `compare_and_append` does, if the collection is still the rendition of the handover `basis`.

        Raises UpperMismatch otherwise, as what was made of the contents of one rendition may not fit another.
        """
        self._check_mode("compare_and_append")
        try:
            return self._commit(updates, at(lower), at(upper), self._deadline(timeout), token, None, basis)
        except _HandedOver as error:
            moved = UpperMismatch("it was handed over", expected=at(lower), actual=self._timeline().upper)
            raise self._mismatch(at(lower), moved) from error

    def append(self, updates: object, lower: object, new_upper: object, *, timeout: float | None = None) -> Written:
        """Append those updates with times in `[lower, new_upper)` that the collection does not have yet.

        For writers that write identical data: whoever is first at a time wins, and the others add what lies beyond.
        Each shard is appended to by itself; a call that was killed in between is finished by the next one, of any
        writer. Raises UpperMismatch when there is a gap before `lower`.
        """
        self._check_mode("append")
        times = self._times()
        low, upper = parse_bounds(lower, new_upper, times)
        deadline = self._deadline(timeout)
        table = self._parsed(updates, low, upper, times)
        with Spending() as spent:
            self._check_no_gap(low)
            for start, end, span in self._promised(low, upper, deadline):
                self._copied(span, deadline)

                def send(share: tuple[WriteHandle, pa.Table], start: int = start, end: int | None = end) -> None:
                    write, rows = share
                    write.append(rows, start, _frontier(end), timeout=max(0.001, deadline.remaining_s()))

                at_once(self.client.runtime, send, self._shares(span.rendition, _piece(table, start, end)))
            return Written(upper, table.num_rows, b"", spent.cost)

    def append_now(self, updates: object, *, timeout: float | None = None, token: bytes | None = None) -> Written:
        """Append updates at the next time: upper; where times are a clock, now if that is later.

        `updates` have no `_time`. No updates are no append. After Indeterminate, repeat with the token of the error.
        """
        self._check_mode("append_now")
        empty = empty_table(self.schema.contents)
        tables = [table.select(empty.schema.names) for table in without_times(self.schema, updates)]
        table = pa.concat_tables([empty, *tables])
        return self._change(lambda _span, _deadline: (table, Counts()), timeout, token, is_dry=False)

    def upsert(
        self, rows: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Written:
        """Make each of `rows` the one row of its key, at the next time. Rows of other keys stay as they are.

        As a shard's `upsert`: what is there for these keys is looked up and retracted in the same transaction; rows
        that are there already are not written again. If another writer is first, only what it changed is read again.
        """
        self._check_mode("upsert")
        new = one_row_each(self.schema, parse_rows(self.schema, rows))
        return self._change(_ByKey(self, new, new), timeout, token, is_dry=parse_flag(dry_run, "dry_run"))

    def delete(
        self, keys: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Written:
        """Retract all rows of these keys, at the next time. Keys that have none are left alone."""
        self._check_mode("delete")
        table = parse_keys(self.schema, keys)
        return self._change(_ByKey(self, table, None), timeout, token, is_dry=parse_flag(dry_run, "dry_run"))

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Written:
        """Advance upper to `new_upper` without writing updates, from wherever upper is now."""
        upper, deadline = self._times().frontier(new_upper, "new_upper"), self._deadline(timeout)
        with Spending() as spent:
            while (reached := self.fetch_upper()) < upper:
                if self.mode == "append" or self._only is not None:
                    for _start, end, span in self._promised(reached, upper, deadline):
                        self._copied(span, deadline)
                        for name in span.rendition.names:
                            self.shard(name).advance_upper(_frontier(end), timeout=max(0.001, deadline.remaining_s()))
                    self._check_time(deadline, "others are at it")
                    continue
                try:
                    self._commit(empty_table(self.schema.updates), reached, upper, deadline, None, None)
                except UpperMismatch:
                    self._check_time(deadline, "others were first")
            return Written(self.fetch_upper(), 0, b"", spent.cost)

    def close(self) -> None:
        """Retire this writer. Idempotent. The data that it wrote stays."""
        self._closed = True
        at_once(self.client.runtime, WriteHandle.close, list(self._writers.values()))

    __reduce__ = not_pickled("A writer", "Open one in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shard(self, name: str) -> WriteHandle:
        """This writer's handle of one shard."""
        self._check_open()
        if name not in self._writers:
            is_data = name != self.collection.shard
            try:
                self._writers[name] = self.client.open_writer(name, self.schema if is_data else self._renditions.schema)
            except SchemaMismatch as error:
                raise SchemaMismatch(
                    f"collection {self.name!r} was handed over to a rendition that does not have this writer's "
                    f"columns. Nothing was written; open a new writer. {error.message}",
                    **error.fields,
                ) from error
        return self._writers[name]

    def _commit(
        self, table: pa.Table, lower: Antichain, upper: Antichain, deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, seen: str | None = None,
    ) -> bytes:  # fmt: skip
        """Append to all shards at once, together with the promise of these times; answers the token.

        `seen` is the handover to the rendition whose contents decided what is appended. Where another followed, it
        raises _HandedOver and appends nothing.
        """
        token = token or self.client.runtime.token()
        if self._only is not None:
            self._append_all([(lower.time or 0, upper.time, self._only)], table, None, lower, deadline, token)
            return token
        promise = _promise_for(table, lower, upper)
        while True:
            timeline = self._timeline()
            over = timeline.over(lower.time or 0, upper.time)
            if seen is not None and [span.command for *_, span in over] != [seen]:
                raise _HandedOver
            if len(over) > 1 and (over[-1][2].rendition.copies is not None or not self.has_transactions):
                lower = self._close(table, over, deadline, token)
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
                self._append_all(pieces, table, promising, lower, deadline, token)
            except UpperMismatch as error:
                if error.fields.get("shard") != self.collection.shard:
                    raise
            else:
                return token
            self._check_time(deadline, "others promised or handed over first")

    def _append_all(
        self, pieces: Sequence[tuple[int, int | None, RenditionRecord]], table: pa.Table, promising: Append | None,
        lower: Antichain, deadline: Deadline, token: bytes,
    ) -> None:  # fmt: skip
        appends = [] if promising is None else [promising]
        appends += [
            Append(write, rows, start, _frontier(end))
            for start, end, rendition in pieces
            for write, rows in self._shares(rendition, _piece(table, start, end))
        ]
        try:
            self._send(appends, deadline, token)
        except UpperMismatch as error:
            if error.fields.get("shard") == self.collection.shard:
                raise
            raise self._mismatch(lower, error) from error

    def _send(self, appends: Sequence[Append], deadline: Deadline, token: bytes) -> None:
        timeout = max(0.001, deadline.remaining_s())
        if len(appends) > 1 and self.has_transactions:
            new = [one.write for one in appends if one.write.shard not in self._registered]
            within(deadline, lambda: at_once(self.client.runtime, lambda write: write.id, new))  # registers them
            self._registered.update(write.shard for write in new)
            self.client.compare_and_append_many(appends, timeout=timeout, token=token)
            return
        for one in appends:
            one.write.compare_and_append(
                one.updates, one.expected_upper, one.new_upper, timeout=timeout, token=token, producer=one.producer
            )

    def _change(self, find: Finding, timeout: float | None, token: bytes | None, *, is_dry: bool) -> Written:
        """Append what `find` makes of the newest contents, at the next time; again if another writer was first."""
        deadline = self._deadline(timeout)
        known = None if token is None else bounds_of(token)
        with Spending() as spent:
            while True:
                timeline = self._timeline()
                span, later = self._span_to_write(timeline)
                if known is not None and self._was_committed(span, *known):
                    return Written(known[2], 0, known[0], spent.cost, (known[2].time or 1) - 1)
                upper = self._upper_to_change(span, deadline)
                table, counts = find(span, deadline)
                if not table.num_rows:
                    return Written(upper, 0, b"", spent.cost, None, *counts)
                time = next_time(self.schema, self.name, upper, self.client.runtime)  # type: ignore[arg-type]
                sent = format_token(self.client.runtime, upper, at(time + 1))
                if known is not None and known[1] == upper:
                    sent, time = known[0], (known[2].time or 1) - 1
                if is_dry:
                    return Written(upper, table.num_rows, b"", spent.cost, None, *counts)
                try:
                    if later is not None and later <= time:
                        # What the keys have there is looked up in the rendition that is the collection by then.
                        self._close(table.slice(0, 0), timeline.over(upper.time or 0, time + 1), deadline, sent)
                        continue
                    seen = None if self._only is not None else span.command
                    self._commit(at_time(table, time), upper, at(time + 1), deadline, sent, None, seen)
                except UpperMismatch:
                    self._check_time(deadline, "other writers were first")
                except _HandedOver:
                    self._check_time(deadline, "it was handed over meanwhile")
                else:
                    return Written(at(time + 1), table.num_rows, sent, spent.cost, time, *counts)

    def _span_to_write(self, timeline: Timeline) -> tuple[Span, int | None]:
        """The span that is written next, and where another one follows."""
        if self._only is not None:
            states_of(self.client, self._only.names)
            return Span(0, None, self._only, ""), None
        upper = upper_of(self.client, timeline)
        span = timeline.last if upper.is_top() else timeline.at(max(upper.time or 0, timeline.since))
        return span, span.end

    def _was_committed(self, span: Span, token: bytes, lower: Antichain, upper: Antichain) -> bool:
        """Whether an earlier call with this token was committed. Raises Indeterminate if that is not known any more."""
        timeline = self._timeline()
        rendition = timeline.at(lower.time or 0).rendition if self._only is None else span.rendition
        verdict = self.client.judge_append(rendition.names[0], token, lower, upper)
        if verdict.answer == "unknown":
            raise Indeterminate(
                f"collection {self.name!r}: it is not known any more whether the append with this token was committed. "
                "Read the collection to find out",
                token=token, collection=self.name,
            )  # fmt: skip
        return verdict.seqno is not None

    def _upper_to_change(self, span: Span, deadline: Deadline) -> Antichain:
        """The upper of all shards of a rendition, which is one while nobody is in between.

        SUBTLE: as far as this process knows. It has just read them; and where that is too old, the append is refused.
        """
        names = span.rendition.names
        uppers = {self.shard(name).upper for name in names}
        while True:
            upper = max(uppers, default=MINIMUM)
            if len(uppers) == 1 and at(span.start) <= upper:
                return upper
            self._check_time(deadline, f"the rendition is complete up to {min(uppers, default=MINIMUM)} only")
            deadline.pause(PAUSE_S)
            uppers = {state.upper for state in states_of(self.client, names)}

    def _close(self, table: pa.Table, over: Pieces, deadline: Deadline, token: bytes) -> Antichain:
        """Say that nothing more comes before the newest rendition, which can then be copied to its end.

        SUBTLE: with the token of the append that it is for, so that a repeated append finds this done as well.
        """
        start = over[-1][0]
        if len(_piece(table, over[0][0], start)):
            show = self.schema.show
            raise InvalidUsage(
                f"collection {self.name!r} is handed over at {show(start)}, and this append has updates on both sides "
                f"of that. Nothing was written: append what is before {show(start)} first, with that as new_upper",
                collection=self.name, at=start,
            )  # fmt: skip
        for first, end, span in over[:-1]:
            appends = [Append(self.shard(name), [], first, _frontier(end)) for name in span.rendition.names]
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
            self.shard(self.collection.shard).advance_upper(upper, timeout=max(0.001, deadline.remaining_s()))

    def _shares(self, rendition: RenditionRecord, table: pa.Table) -> list[tuple[WriteHandle, pa.Table]]:
        return [(self.shard(name), rows) for name, rows in zip(rendition.names, routed(rendition, table), strict=True)]

    def _timeline(self) -> Timeline:
        timeline = self._renditions.fetch()
        if timeline.is_closed():
            raise self._renditions.dropped()
        return timeline

    def _parsed(self, updates: object, lower: Antichain, upper: Antichain, times: Times) -> pa.Table:
        only = lower.time if lower.time is not None and upper.time == lower.time + 1 else None
        tables = [empty_table(self.schema.updates)]
        for table in iter_updates(self.schema, updates, time=only, times=times):
            check_times(table, lower, upper, times)
            tables.append(table)
        return pa.concat_tables(tables)

    def _mismatch(self, expected: Antichain, error: UpperMismatch) -> UpperMismatch:
        actual = error.fields.get("actual")
        show = self.schema.show
        shown = show(actual) if isinstance(actual, Antichain) else actual
        return UpperMismatch(
            f"collection {self.name!r}: the append starts at {show(expected)}, but upper is {shown}: another writer "
            "was first, or there is a gap. Nothing was written; decide from there on",
            collection=self.name, expected=expected, actual=actual,
        )  # fmt: skip

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(f"this writer of collection {self.name!r} was closed; open a new one")

    def _check_mode(self, verb: str) -> None:
        self._check_open()
        if (verb == "append") != (self.mode == "append"):
            one = "write.append of identical data" if self.mode == "append" else "compare_and_append, upsert and so on"
            raise InvalidUsage(
                f"collection {self.name!r} has the mode {self.mode!r}, so it is written by {one}, and not by {verb}. "
                "The mode is fixed when a collection is created, as one kind of writer would lock the other out",
                collection=self.name, mode=self.mode,
            )  # fmt: skip

    def _check_time(self, deadline: Deadline, why: str) -> None:
        if deadline.has_passed():
            raise TimedOut(
                f"collection {self.name!r}: gave up after {deadline.timeout_s:g} s, as {why}. This call wrote nothing; "
                "try again, or with a longer timeout",
                timeout_s=deadline.timeout_s, collection=self.name,
            )  # fmt: skip

    def _times(self) -> Times:
        return Times(self.schema.times, self.client.runtime.clock_ms)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.client.runtime.deadline(self.client.config.timeout_s if timeout is None else parse_seconds(timeout))


class _HandedOver(Exception):
    """Another rendition is the collection at the times of an append than the one that decided what is appended."""


class _ByKey:
    """The changes that make rows the only ones of their keys (or, without rows, that take the keys' rows away)."""

    def __init__(self, writer: CollectionWriter, keyed: pa.Table, rows: pa.Table | None) -> None:
        self._writer, self._keyed, self._rows = writer, keyed, rows
        self._keys = Keys.of(writer.schema, keyed)
        self._looking: dict[str, Looking] = {}

    def __call__(self, span: Span, deadline: Deadline) -> tuple[pa.Table, Counts]:
        schema = self._writer.schema
        found = [empty_table(schema.contents)]
        for name, share in zip(span.rendition.names, routed(span.rendition, self._keyed), strict=True):
            machine = self._writer.shard(name).machine
            looking = self._looking.setdefault(name, Looking(machine, Keys.of(schema, share)))
            found.append(looking.contents(machine.version, deadline)[1])
        old = consolidate(schema, pa.concat_tables(found))
        new = old.slice(0, 0) if self._rows is None else self._rows
        changes = replacing(schema, old, new)
        counts = count_deleted(self._keys, old) if self._rows is None else count_upserted(self._keys, old, changes)
        return changes, counts


Pieces = Sequence[tuple[int, int | None, Span]]
Finding = Callable[[Span, Deadline], tuple[pa.Table, Counts]]
"""Makes of a rendition's newest contents the changes to append, and what they amount to."""


def _piece(table: pa.Table, start: int, end: int | None) -> pa.Table:
    return updates_within(table, start, end)


def _frontier(end: int | None) -> Antichain:
    return Antichain(end)


def _promise_for(table: pa.Table, lower: Antichain, upper: Antichain) -> Antichain:
    """Up to where these times have to be promised: never to the end of all times."""
    if upper.time is not None:
        return upper
    times = table.column("_time").to_pylist()
    return at(max([lower.time or 0, *times]) + 1)


def _has_transactions(client: Client) -> bool:
    try:
        client.consensus.compare_and_set_many({})
    except InvalidUsage:
        return False
    return True
