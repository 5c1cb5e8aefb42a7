"""The rendition shard of a collection: which rendition is the collection, from when on.

Its updates are (rendition, t, +-1), and its upper is a promise: below it, nothing about renditions will ever change.
So a reader that needs the time t first sees that this upper has passed t. It is moved there by an empty append, once
the data is there (data first, then the promise). A handover is one append at or beyond it, so it changes nothing that
was read.

Rows are routed to the shards of a rendition by a hash of their key; one task writes them for all shards in bounded
memory. Rows of one rendition can be given in the columns of another that only has more or fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.catalog.metadata_shard import states_of, unheld
from persist_lib.catalog.records import RenditionRecord, decode, encode
from persist_lib.client import Client, for_layers
from persist_lib.errors import InvariantViolated, NotFound, SchemaChanged, ShardFinished, SinceViolation
from persist_lib.frontier import MAX_TIME, MINIMUM, TOP, Antichain, at
from persist_lib.kernel.columns import Rows
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.order import take
from persist_lib.relation.changes import changes_known
from persist_lib.relation.held import kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.row_selection import RowSelection
from persist_lib.relation.snapshot import snapshot_known
from persist_lib.relation.stage import Staged
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.times import Unit


def schema_for(unit: Unit | None) -> Schema:
    """The columns of a rendition shard; its times are the collection's."""
    return Schema(
        key={"rendition": "int64 not null"}, value={"command": "string not null", "body": "string not null"},
        times=unit,
    )  # fmt: skip


def row_of(record: RenditionRecord, command: str) -> dict[str, object]:
    """The row that says that a rendition is the collection, since a handover by this command."""
    return {"rendition": record.number, "command": command, "body": encode(record)}


class Span(NamedTuple):
    """A rendition is the collection at times in `[start, end)`; `end` is None while nothing is known to follow.

    `command` names the handover. A rendition may be handed over to twice; a handover happens once.
    """

    start: int
    end: int | None
    rendition: RenditionRecord
    command: str

    def covers(self, time: int) -> bool:
        """Whether the rendition is the collection at that time, as far as is known."""
        return self.start <= time and (self.end is None or time < self.end)


class Timeline(NamedTuple):
    """What a rendition shard says. Times before `since` are forgotten, those from `upper` on are not promised yet."""

    since: int
    upper: Antichain
    spans: tuple[Span, ...]

    def is_closed(self) -> bool:
        """Whether the collection was dropped: no handover can ever follow."""
        return self.upper.is_top()

    def at(self, time: int) -> Span:
        """The span that covers a time. At or beyond `upper` it is the newest one known, and may change.

        Raises SinceViolation for a time before `since`, which only those can meet who hold nothing.
        """
        if time < self.since:
            show = self.last.rendition.columns.show
            raise SinceViolation(
                f"which rendition was the collection at {show(time)} is given up: history begins at "
                f"{show(self.since)}. Read at {show(self.since)} or later; a hold would have kept it",
                as_of=time, since=at(self.since),
            )  # fmt: skip
        for span in self.spans:
            if span.covers(time):
                return span
        raise InvariantViolated(f"no rendition is the collection at {time}: spans {self.spans}", time=time)

    @property
    def last(self) -> Span:
        return self.spans[-1]

    def over(self, lower: int, upper: int | None) -> list[tuple[int, int | None, Span]]:
        """The pieces of `[lower, upper)`, each with the span that covers it."""
        found = []
        for span in self.spans:
            start = max(lower, span.start)
            end = upper if span.end is None else span.end if upper is None else min(upper, span.end)
            if end is None or start < end:
                found.append((start, end, span))
        return found


class Renditions:
    """One process's view of a rendition shard; through a reader that holds it, if one is given."""

    def __init__(
        self, client: Client, shard: str, unit: Unit | None, name: str, reader: ReadHandle | None = None
    ) -> None:
        self._client, self.shard, self.schema, self._name = for_layers(client), shard, schema_for(unit), name
        self._reader, self._lease = reader, None if reader is None else kept_of(reader)
        self._known: Timeline | None = None

    def fetch(self, *, is_known: bool = False) -> Timeline:
        """The newest timeline. Raises NotFound for a collection that was dropped, LeaseExpired for a lost reader.

        With `is_known` it is the one of the newest state that this process knows, without a request if it was read.
        """
        reader, lease = self._reader, self._lease
        if reader is None or lease is None:
            reader, is_known = unheld(self._client, self.shard, self.schema), True  # it has just been read
            lease = kept_of(reader)
            self._reader, self._lease = reader, lease
        machine = reader.machine
        while True:
            try:
                upper, since = machine.state.upper if is_known else reader.fetch_upper(), lease.since.time
                if since is None:
                    raise self.dropped()
                if (error := lease.expired(machine.state)) is not None:
                    raise error
                known = self._known
                # A reader may have let go of more than is promised. Nothing can be read then, nor has changed.
                is_ahead = known is not None and known.upper == upper <= at(since)
                if known is None or not (is_ahead or (known.since, known.upper) == (since, upper)):
                    self._known = known = self._read(reader, since, upper)
            except ShardFinished as error:
                raise self.dropped() from error
            except SinceViolation:
                if lease.since.time == since:
                    raise
                # History was given up just now, by another reader or by the handle itself: what is left is read again.
            else:
                return known
            is_known = False

    def dropped(self) -> NotFound:
        return NotFound(
            f"collection {self._name!r} was dropped; nothing of it can be read any more", collection=self._name
        )

    def _read(self, reader: ReadHandle, since: int, upper: Antichain) -> Timeline:
        if upper == at(0):
            return Timeline(since, upper, ())
        last = MAX_TIME if upper.time is None else max(since, upper.time - 1)
        with snapshot_known(reader, since, RowSelection(self.schema, diff=True)) as snapshot:
            rows = [{**row, TIME: since} for row in snapshot.to_pylist()]
        with changes_known(reader, since, last) as changes:
            table = changes.to_arrow()
        times = table.column(TIME).cast("int64").to_pylist()
        rows += [{**row, TIME: time} for row, time in zip(table.to_pylist(), times, strict=True)]
        spans = _spans(rows, self._name)
        for span in spans:
            self._client.know_members(span.rendition.places, span.rendition.member)
        return Timeline(since, upper, spans)


def _spans(rows: list[dict[str, Any]], name: str) -> tuple[Span, ...]:
    began: list[tuple[int, RenditionRecord, str]] = []
    ended: dict[tuple[object, object], int] = {}
    for row in sorted(rows, key=itemgetter(TIME, DIFF)):
        time, diff, handed = row[TIME], row[DIFF], (row["rendition"], row["command"])
        if diff == 1:
            where = f"rendition {row['rendition']} of collection {name!r}"
            began.append((time, decode(RenditionRecord, str(row["body"]), where), str(row["command"])))
        else:
            ended[handed] = time
    spans = []
    for index, (time, record, command) in enumerate(began):
        end = ended.get((record.number, command))
        follows = began[index + 1][0] if index + 1 < len(began) else None
        if end != follows:
            raise InvariantViolated(
                f"collection {name!r} has two renditions at once, or none: {record.number} from {time} "
                f"ends at {end}, and the next one starts at {follows}",
                collection=name,
            )  # fmt: skip
        spans.append(Span(time, end, record, command))
    return tuple(spans)


def meet(client: Client, names: Sequence[str]) -> Antichain:
    """The least upper of shards, read from the location."""
    return min((state.upper for state in states_of(client, names)), default=TOP)


def handed_over_at(timeline: Timeline, rendition: RenditionRecord) -> int | None:
    """When a copy became the collection; None if it did not yet."""
    starts = [span.start for span in timeline.spans if span.rendition.number == rendition.number]
    return starts[0] if starts else None


def is_copied(client: Client, rendition: RenditionRecord, start: int | None) -> bool:
    """Whether a rendition lacks nothing of what it copies, up to where it became the collection.

    `start` is that time; None: it did not yet, so that there may be more to copy. Once it lacks nothing, that is so for
    ever.
    """
    return rendition.copies is None or (start is not None and at(start) <= meet(client, rendition.names))


def upper_of(client: Client, timeline: Timeline) -> Antichain:
    """All updates of the collection before this are known: of each rendition, up to where the next one follows."""
    return upper_by(timeline, lambda rendition: meet(client, rendition.names))


def upper_by(timeline: Timeline, meet_of: Callable[[RenditionRecord], Antichain]) -> Antichain:
    """The same, of uppers of renditions that were read after the timeline."""
    for span in timeline.spans:
        upper = meet_of(span.rendition)
        if span.end is None or upper < at(span.end):
            return upper if span.start == 0 or at(span.start) < upper else at(span.start)
    return MINIMUM


def places(rendition: RenditionRecord, table: pa.Table) -> Rows:
    """The index of the shard of each row: by a hash of its key columns, the same on every machine, for ever.

    The hash is that of fingerprints, whose definition is durable. A null counts as nothing, so that it has one place.
    """
    columns = {column.name: column for column in rendition.columns.key}
    hashed = Schema(key=tuple(columns[name] for name in rendition.hash_columns))
    return (hash_rows(hashed, table.select(list(rendition.hash_columns))) % np.uint64(rendition.shards)).view(np.int64)


def routed(rendition: RenditionRecord, table: pa.Table) -> list[pa.Table]:
    """The rows of each shard, in their order."""
    if rendition.shards == 1:
        return [table]
    found = places(rendition, table)
    order = np.argsort(found, kind="stable")
    ordered = take(table, order) if table.num_rows else table
    edges = np.searchsorted(found[order], np.arange(rendition.shards + 1))
    return [ordered.slice(start, end - start) for start, end in pairwise(edges.tolist())]


BUFFER_BYTES = 128 << 20
"""How much a task holds back for all shards together, before it writes the largest share as a part."""

Write = Callable[[object], Staged]


class Spreading:
    """The parts of one task. `writes` has one function a shard of the rendition; None where nothing is written."""

    def __init__(self, rendition: RenditionRecord, writes: Sequence[Write | None]) -> None:
        self._rendition, self._writes = rendition, writes
        self._buffers: list[list[pa.Table]] = [[] for _ in writes]
        self._sizes = [0] * len(writes)
        self._staged: list[list[Staged]] = [[] for _ in writes]
        self.written = 0

    def add(self, table: pa.Table) -> None:
        """Take rows, and write the largest share if too many are held back."""
        for index, share in enumerate(routed(self._rendition, table)):
            if share.num_rows and self._writes[index] is not None:
                self._buffers[index].append(share)
                self._sizes[index] += share.nbytes
                self.written += share.num_rows
        if sum(self._sizes) > BUFFER_BYTES:
            self._flush(max(range(len(self._sizes)), key=self._sizes.__getitem__))

    def finish(self) -> tuple[tuple[Staged, ...], ...]:
        """Write what is held back. Returns for each shard what was staged for it."""
        for index in range(len(self._writes)):
            self._flush(index)
        return tuple(map(tuple, self._staged))

    def _flush(self, index: int) -> None:
        write = self._writes[index]
        if self._buffers[index] and write is not None:
            self._staged[index].append(write(self._buffers[index]))
        self._buffers[index], self._sizes[index] = [], 0


def is_additive(one: Schema, other: Schema) -> bool:
    """Whether the two differ at most by value columns at the end that one of them does not have."""
    few, many = sorted((one.value, other.value), key=len)
    same = (one.key, one.codec, one.times) == (other.key, other.codec, other.times)
    return same and many[: len(few)] == few and all(column.nullable for column in many[len(few) :])


def check_additive(collection: str, wanted: Schema, found: Schema, time: int) -> None:
    """Raise SchemaChanged unless rows of `found` can be given in the columns of `wanted`."""
    if not is_additive(wanted, found):
        raise SchemaChanged(
            f"collection {collection!r}: from {wanted.show(time)} on it has the schema {found}, and this reader has "
            f"{wanted}, in which its rows cannot be given. Open a reader in the new schema and read from there, or "
            "listen with replace=True, which takes all old rows out and gives all new ones",
            collection=collection, time=time, actual=found, expected=wanted,
        )  # fmt: skip
