"""What a writer of a collection has open, and what it writes next: the rendition that is the collection there."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.catalog.metadata_shard import at_once, states_of
from persist_lib.catalog.records import LAYER, CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import Renditions, Span, Timeline, meet, upper_of
from persist_lib.catalog.wal import has_wal
from persist_lib.client import Client, for_layers
from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage, SchemaMismatch, UpperMismatch
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import parse_producer
from persist_lib.relation.appends import Batching
from persist_lib.relation.verbs import Verbs
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import known_schema
from persist_lib.times import PER_SECOND, Unit

PAUSE_S = 0.05
"""Between two looks at a rendition that is still being copied."""
SLACK_S = 1
"""How far ahead of its data a writer promises, in seconds: by so much the next handover may be later."""


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
    late: int = 0


class Active(NamedTuple):
    """The rendition that is written, and what is known of the others: kept from before, or read by this call."""

    timeline: Timeline
    span: Span
    read: Timeline | None = None


class Writing(Verbs[pa.Table, Active, Written, Written]):
    """A writer's handles of the collection's shards, and its view of which rendition is written.

    It writes one rendition only, if it was opened for one that is not the collection yet.
    """

    def __init__(
        self, client: Client, collection: CollectionRecord, unit: Unit | None, only: RenditionRecord | None,
        batching: Batching | None = None, owner: str = "", schema: Schema | None = None,
    ) -> None:  # fmt: skip
        self.client, self.collection = for_layers(client).in_epoch(collection.epoch), collection
        self._only, self._owner = only, owner
        self._renditions = Renditions(client, collection.shard, unit, collection.name)
        what, runtime, config = f"collection {collection.name!r}", client.runtime, client.config
        super().__init__(what, collection.shard, runtime, config, client.consensus.now, batching)
        self._writers: dict[str, WriteHandle] = {}
        self._registered: set[str] = set()
        self._closed = False
        self._entered = ""
        """The handover to the rendition that was written last. All before it is complete."""
        rendition = only or self._active().span.rendition
        self.mode = "append" if has_wal(collection) else rendition.mode  # of what it was before it joined the timeline
        machine = self.client.machine(rendition.names[0])
        newest = machine.fetch().state.schemas[-1]
        self.schema: Schema = newest if schema is None else known_schema(machine, schema)[1]
        self.has_transactions = _has_transactions(client)

    @property
    def name(self) -> str:
        """The collection's name when it was opened."""
        return self.collection.name

    def fetch_upper(self) -> Antichain:
        """How far the collection (or the rendition that this handle writes) has come: read from the location."""
        self._check_open()
        if self._only is not None:
            return meet(self.client, self._only.names)
        kept = self._kept()
        return upper_of(self.client, self._timeline()) if kept is None else kept[1]

    def _place(self, name: str) -> WriteHandle:
        self._check_open()
        if name not in self._writers:
            is_data = name != self.collection.shard
            try:
                schema = self.schema if is_data else self._renditions.schema
                self._writers[name] = self.client.open_writer(name, schema, owner=self._owner, layer=LAYER)
            except SchemaMismatch as error:
                raise SchemaMismatch(
                    f"collection {self.name!r} was handed over to a rendition that does not have this writer's "
                    f"columns. Nothing was written; open a new writer. {error.message}",
                    **error.fields,
                ) from error
        return self._writers[name]

    def _retire(self) -> None:
        self._closed = True
        at_once(self.client.runtime, WriteHandle.close, list(self._writers.values()))

    def _active(self) -> Active:
        """The rendition that is written next. Reads how far its shards have come."""
        if (kept := self._kept()) is not None:
            return kept[0]
        timeline = self._timeline()
        if self._only is not None:
            states_of(self.client, self._only.names)
            return Active(timeline, Span(0, None, self._only, ""), timeline)
        upper = upper_of(self.client, timeline)
        span = timeline.last if upper.is_top() else timeline.at(max(upper.time or 0, timeline.since))
        self._entered = span.command if at(span.start) <= upper else ""
        return Active(timeline, span, timeline)

    def _kept(self, *, is_likely: bool = False) -> tuple[Active, Antichain] | None:
        """The same, and the collection's upper, where a promise that was read before says it: it is a fact for ever.

        With `is_likely`, its upper is what this process knows, if no other process seems to write; nothing is read.

        SUBTLE: only while upper is below that promise. Where upper is at it, a handover may have taken the writes
        elsewhere, and the collection may have come further there.
        """
        if self._only is not None or not self._entered:
            return None
        timeline = self._timeline(is_known=True)
        for span in timeline.spans:
            if span.command == self._entered:
                names = span.rendition.names
                machines = [self.client.machine(name) for name in names]
                uppers = {machine.upper for machine in machines}
                if is_likely and not (len(uppers) == 1 and all(machine.alone_at for machine in machines)):
                    return None
                if (known := min(uppers)) >= timeline.upper:
                    continue
                upper = known if is_likely else meet(self.client, names)
                # The span covers the times that come next, and no handover can change that.
                if upper.time is not None and span.covers(upper.time) and upper < timeline.upper:
                    return Active(timeline, span), upper
        return None

    def _upper_to_change(self, span: Span, deadline: Deadline) -> Antichain:
        """The upper of all shards of a rendition, which is one unless a commit is under way.

        As far as this process knows. It has just read them; and where that is too old, the append is refused.
        """
        names = span.rendition.names
        uppers = {self._place(name).upper for name in names}
        while True:
            upper = max(uppers, default=MINIMUM)
            if len(uppers) == 1 and at(span.start) <= upper:
                return upper
            self._check_time(deadline, f"the rendition is complete up to {min(uppers, default=MINIMUM)} only")
            deadline.pause(PAUSE_S)
            uppers = {state.upper for state in states_of(self.client, names)}

    def _timeline(self, *, is_known: bool = False) -> Timeline:
        timeline = self._renditions.fetch(is_known=is_known)
        if timeline.is_closed():
            raise self._renditions.dropped()
        return timeline

    def _timeline_to(self, upper: Antichain) -> Timeline:
        """What is the collection below `upper`, if that is promised: read from the location unless it is known."""
        known = self._timeline(is_known=True)
        return known if upper <= known.upper else self._timeline()

    def _ahead(self, promise: Antichain) -> Antichain:
        """How far to promise where this is needed: where times are a clock a little further, for what comes next.

        Never further beyond this machine's clock than that, so that handovers do not push one another ahead.
        """
        unit, slack = self.schema.times, slack_of(self.collection, self.schema)
        if unit is None or promise.time is None or not slack:
            return promise
        now = self.client.runtime.clock_ms() * PER_SECOND[unit] // 1_000
        return promise.join(at(min(promise.time, now) + slack))

    def _parse_producer(self, producer: object) -> tuple[str, int] | None:
        found = parse_producer(producer)
        if found is not None and (self._only is not None or not self.has_transactions):
            raise InvalidUsage(
                f"collection {self.name!r}: a producer is remembered with the collection, in one transaction with the "
                "data: this takes a store with transactions, and a writer that was opened without rendition=",
                collection=self.name,
            )
        return found

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

    def _is_closed(self) -> bool:
        return self._closed

    def _told(self) -> tuple[str, dict[str, str]]:
        return self._what, {"collection": self.name}

    def _check_verb(self, verb: str) -> None:
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
            raise self._out_of_time(deadline, why)


def slack_of(collection: CollectionRecord, schema: Schema) -> int:
    """How far writers promise ahead of their data, in times of the collection: 0 where these are no clock."""
    if schema.times is None or collection.kind != "collection":
        return 0
    return SLACK_S * PER_SECOND[schema.times]


def _has_transactions(client: Client) -> bool:
    try:
        client.consensus.compare_and_set_many({})
    except InvalidUsage:
        return False
    return True
