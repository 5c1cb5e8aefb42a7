"""A collection as a source: its updates are messages that have times already, so nothing gives them others.

The one partition is the collection, and an address is a time. What a source makes of the updates at a time is at the
same time in its own collections. So a reader of both as of one time reads the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.catalog.answers import integer_times, updates_between
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import parse_collection_name, rendition_shard, schema_form
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.errors import Gone, HoldConflict, InvalidUsage, NotFound, SinceViolation
from persist_lib.kernel.columns import at_time, integers, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.order import take
from persist_lib.relation.held import kept_of
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.sources.bindings import Bound, Clock, Propose, Step
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.protocol import Lag, Mark, SourceReader
from persist_lib.sources.records import DECODED, Declaration, Followed, Kind, Place, SourceRecord, changed
from persist_lib.sources.targets import Target
from persist_lib.times import PER_SECOND

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.core.state import Part

STEP_BYTES = 32 * MIB
"""At most about so much is between two times at which a window may be cut, unless it is all of one time."""
UNPACKED = 4
"""By how much a part is larger in memory, about."""
TABLE_ROWS = 1 << 16


class Following:
    """Reads one collection from a time on, in the columns that it had. It is a `SourceReader`, and its own bindings.

    With `until`, its bindings end before that time.
    """

    def __init__(
        self, controller: Controller, source: str, followed: Followed, partition: str, owner: str,
        *, is_leased: bool = True, until: int | None = None,
    ) -> None:  # fmt: skip
        self._controller, self._client, self._owner, self._until = controller, controller.client, owner, until
        self._is_leased = is_leased
        self._source, self._input = source, followed
        self.partition, self.schema = partition, followed.columns
        self.shard, self.hold = rendition_shard(followed.id), ""
        self._reader: RenditionReader | None = None
        self._weights: list[tuple[int, int]] = []
        self._is_ingesting = False

    def since(self, time: int) -> Bound:
        """What is there from `time` on, as bindings would say it: each step is from its time up to its mark."""
        upper, is_dropped = self._reached(time)
        upper = upper if self._until is None else max(time, min(upper, self._until))
        if is_dropped and self._is_ingesting and upper <= time:
            raise Gone(
                f"source {self._source!r}: the collection {self.partition!r} that it reads was dropped. All that it "
                f"had is in the source's collections, up to {self.schema.show(time)}. They can be read until the "
                "source is dropped",
                partition=self.partition, address=time,
            )  # fmt: skip
        start = {self.partition: Mark(time)} if time > self._input.begins else {}
        edges = [time, *self._edges(time, upper)] if time < upper else []
        steps = [Step(low, {self.partition: Mark(high)}) for low, high in pairwise(edges)]
        return Bound(start, tuple(steps), max(time, upper))

    def mint(self, _propose: Propose, _deadline: Deadline, _tick_ms: int = 0) -> None:
        """Nothing: the collection's times are bound."""
        self._is_ingesting = True

    def fetch_told(self) -> int:
        """Nothing: the hold on the collection says it."""
        return 0

    def has_news(self, _bound: Bound, time: int) -> bool:
        return bool(self.lag({self.partition: Mark(time)}))

    def behind_ms(self, time: int) -> int:
        """By how much `time` is behind the collection, in milliseconds; 0 where its times are no clock."""
        unit = self.schema.times
        if unit is None:
            return 0
        return max(0, self._reached(time)[0] - time) * 1000 // PER_SECOND[unit]

    def let_go(self, time: int) -> None:
        """Give up history before a time, where this handle kept it."""
        reader = self._reader
        if reader is not None and reader.since.time is not None and reader.since.time < time:
            reader.downgrade_since(time)

    def high_watermarks(self, bound: Mapping[str, Mark], _most_bytes: int) -> Mapping[str, Mark]:
        known = bound.get(self.partition, Mark(0)).address
        upper, _ = self._reached(known)
        return {self.partition: Mark(upper)} if upper > max(known, self._input.begins) else {}

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        """Yield the updates with times in `[start, end)`: with `_time` and `_diff`, and the row as a struct.

        Updates of one time come in the order of their rows, however the collection is cut into shards.
        """
        begins = self._input.begins
        if partition != self.partition or end.address <= max(begins, start.address):
            return
        table = self.updates(start.address, end.address)
        fields = [joined(table.column(name)) for name in self.schema.names]
        times = joined(table.column(TIME))
        value = pa.StructArray.from_arrays(fields, fields=list(self.schema.data))
        found = pa.table({"address": times, "value": value, DIFF: joined(table.column(DIFF)), TIME: times})
        for place in range(0, found.num_rows, TABLE_ROWS):
            yield found.slice(place, TABLE_ROWS)

    def updates(self, start: int, end: int) -> pa.Table:
        """The updates with times in `[start, end)`, in the order of times and rows. Raises Gone."""
        begins = self._input.begins
        reader, last = self._opened(), end - 1
        deadline = self._client.runtime.deadline(self._client.config.timeout_s)
        tables = [self.schema.updates.empty_table()]
        try:
            first = start - 1
            if start <= begins:
                with reader.snapshot(begins, diff=True) as snapshot:
                    tables += [at_time(table, begins) for table in snapshot.batches()]
                first = begins
            if first < last:
                kept_of(reader).check_since(first)
                reader.known(last, deadline)
                tables += map(integer_times, updates_between(reader, first, last, deadline))
        except SinceViolation as error:
            raise Gone(
                f"source {self._source!r}: history of collection {self.partition!r} that it still needs was given up, "
                f"from {self.schema.show(start)} on: {error.message}",
                partition=self.partition, address=start,
            ) from error  # fmt: skip
        names = self.schema.updates.names
        table = consolidate(self.schema, pa.concat_tables([one.select(names) for one in tables]))
        return take(table, np.argsort(integers(table.column(TIME)), kind="stable"))

    def estimate(self, _partition: str, start: int, end: int) -> int:
        return sum(weight for edge, weight in self._weights if start < edge <= end)

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        mark = marks.get(self.partition, Mark(0)).address
        found = sum(part.rows for part in self._parts() if part.time_upper >= mark)
        return {self.partition: found} if found else {}

    def lags(self, marks: Mapping[str, Mark]) -> Mapping[str, Lag]:
        return {partition: Lag(messages=left) for partition, left in self.lag(marks).items()}

    def tell(self, marks: Mapping[str, Mark]) -> None:
        """Nothing: the source's hold says so."""

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _opened(self) -> RenditionReader:
        if self._reader is None:
            found = self._controller.catalog.fetch().collections.get(self._input.id)
            if found is None:
                raise Gone(
                    f"source {self._source!r}: the collection {self.partition!r} that it reads was dropped, and "
                    "nothing of it is left",
                    partition=self.partition, address=0,
                )  # fmt: skip
            self._reader = RenditionReader(
                self._client, found, self.schema.times, self.schema, self._owner, is_leased=self._is_leased
            )
        return self._reader

    def _reached(self, time: int) -> tuple[int, bool]:
        """Up to where the collection is complete, but at least `time`; and whether it was dropped."""
        reader = self._opened()
        upper = reader.fetch_upper()
        if upper.time is not None:
            return max(time, upper.time), False
        is_dropped = reader.timeline(is_known=True).is_closed()
        return max(time, reader.last_time(reader.timeline(is_known=True).last) + 1), is_dropped

    def _parts(self) -> list[Part]:
        reader = self._opened()
        renditions = {span.rendition.number: span.rendition for span in reader.timeline(is_known=True).spans}
        states = [handle.machine.state for one in renditions.values() for handle in reader.shards_of(one)]
        return [part for state in states for batch in state.trace for part in batch.parts]

    def _edges(self, start: int, upper: int) -> list[int]:
        """Times at which to cut, so that about `STEP_BYTES` are between two. A part counts as even over its times."""
        weights = []
        for part in self._parts():
            low, high = max(start, part.time_lower), min(upper, max(part.time_upper, self._input.begins) + 1)
            size = part.size * UNPACKED
            pieces = min(1 + size // STEP_BYTES, max(1, high - low))
            if start < high:
                weights += [(low + (high - low) * (n + 1) // pieces, size // pieces) for n in range(pieces)]
        self._weights = sorted(weights)
        edges: list[int] = []
        before, some = start, 0
        for edge, weight in self._weights:
            if some + weight > STEP_BYTES and before < edge and (edges or [start])[-1] < before:
                edges.append(before)
                some = 0
            before, some = edge, some + weight
        return [*(edge for edge in edges if edge < upper), upper]


class Collection(Kind, msgspec.Struct, frozen=True, omit_defaults=True, tag="collection", forbid_unknown_fields=True):
    """A collection of the same catalog, by its name: its updates are the messages, at the times that they have.

    A row is a message when it comes, and one again, with `_diff` -1, when it goes.
    """

    title = "a collection"
    schemes = ("collection",)
    takes = DECODED
    hint = "a collection is read as rows"
    unloadable = "collection is read in order"
    has_upstream = False

    name: str

    def __post_init__(self) -> None:
        parse_collection_name(self.name)

    @classmethod
    def of_place(cls, place: Place) -> tuple[Collection, str]:
        return cls(place.url.partition(":")[2]), "rows"

    def default_decoding(self) -> Decoding:
        return Decoding(decoder="rows")

    def complete(self, given: Declaration, input_: Followed | None) -> Declaration:
        assert input_ is not None  # noqa: S101 - each source of this kind has one
        meaning, decoder, times = given.meaning, given.decoding.decoder, given.schema.times
        columns = input_.columns
        if times not in {None, columns.times}:
            unit = "plain integers" if columns.times is None else repr(columns.times)
            raise InvalidUsage(
                f"a source over a collection has its times: those of {self.name!r} are {unit}, not {times!r}"
            )
        if decoder != "rows":
            raise InvalidUsage(f"updates of a collection are rows: leave out the decoder {decoder!r}")
        if meaning.keep_raw:
            raise InvalidUsage(f"keep_raw keeps bytes, and these messages are rows: {self.name!r} is what is raw")
        if "time" in meaning.include.values() and columns.times != "ms":
            raise InvalidUsage(f"include: the times of {self.name!r} are not in milliseconds, so that no column is one")
        decoded = given.decoded
        if meaning.transform is not None and decoded is None:
            types = {one.name: msgspec.structs.replace(one, fill="").said for one in columns.columns}
            decoded = Schema(key=types)
        return changed(given.with_times(columns.times), decoded=decoded)

    def check(self, _given: Declaration) -> None:
        """Nothing: the collection was looked at to complete the declaration."""

    def input(self, controller: Controller) -> Followed:
        return followed(controller, self.name)

    def clock(self, controller: Controller, record: SourceRecord, owner: str, *, is_leased: bool = True) -> Following:
        assert record.input is not None  # noqa: S101 - each source of this kind has one
        found = Following(controller, record.name, record.input, self.name, owner, is_leased=is_leased)
        found.hold = hold_name(record)
        return found

    def open_reader(self, _client: Client, _record: SourceRecord, clock: Clock | None = None) -> SourceReader:
        assert isinstance(clock, Following)  # noqa: S101 - no caller's mistake
        return clock

    def hold(self, client: Client, record: SourceRecord, *, is_new: bool) -> SourceRecord:
        """Hold the collection that is read, where that is not done yet; with the time from which on it can be read.

        Only while a source is made (`is_new`) it begins there: what is read back decides. Raises NotFound.
        """
        assert record.input is not None  # noqa: S101 - each source of this kind has one
        shard, name = rendition_shard(record.input.id), hold_name(record)
        while True:
            state = None if client.machine(shard).try_fetch() is None else client.inspect(shard).state
            if state is None or state.is_finished() or (is_new and state.upper.is_top()):
                raise NotFound(
                    f"the collection that the source {record.name!r} reads was dropped: drop the source",
                    collection=self.name,
                )  # fmt: skip
            if (found := state.holds.get(name)) is not None:
                break
            with suppress(HoldConflict, SinceViolation):  # another process was first, or history was given up just now
                client.set_hold(shard, name, state.since, opaque=record.fence, expected=None)
        return changed(record, input=msgspec.structs.replace(record.input, begins=found.since.time or 0))

    def begin(self, controller: Controller, record: SourceRecord, names: Iterable[str]) -> None:
        """See to it that a source's collections say nothing of times before what it reads begins.

        They can be read as of the time before, where they are empty, as a reader that starts reads the state there.
        """
        if record.input is None or not (begins := record.input.begins):
            return
        for name in names:
            with closing(Target(controller, controller.catalog.fetch().find(name).id, "begin")) as target:
                target.begin(begins)

    def remove(self, client: Client, record: SourceRecord) -> list[str]:
        if record.input is not None:
            with suppress(HoldConflict, NotFound):
                client.release_hold(rendition_shard(record.input.id), hold_name(record))
        return []


def hold_name(record: SourceRecord) -> str:
    """The hold that a source has on the collection that it reads. A collection may be read by many."""
    return f"source-{record.id}"


def followed(controller: Controller, name: str) -> Followed:
    """What is to be read of a collection. Raises NotFound."""
    found = controller.describe(name)
    return Followed(found.id, schema_form(found.schema))
