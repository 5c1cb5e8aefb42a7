"""The carriers that rows can have, behind one small interface, so that each rule is said once for all of them.

A shard; a collection of one shard and of three; a table on a timeline without a WAL, and on one with a WAL. What a
carrier does otherwise today, and is to do as the others, is marked by the word "today".
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome, contents_of, updates_of
from tests.carriers import ALL
from tests.carriers import Carrier as Made
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string"}, times="ms")
WIDER = persist.Schema({"id": "int64 not null"}, {"word": "string", "more": "int64"}, times="ms")
UNIQUE = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True, times="ms")
Rows = list[dict[str, Any]]
KINDS = ("compare_and_set", "compare_and_set_many")
"""The requests that commit."""


def rows(*ids: int, word: str | None = "w") -> Rows:
    return [{"id": id_, "word": word} for id_ in ids]


class Relation:
    """What one client has open of a carrier: a writer and a reader, each opened when it is first needed."""

    def __init__(self, carrier: Carrier, client: persist.Client) -> None:
        self.carrier, self.client = carrier, client
        self.controller = client.controller()
        self._writer: Any = None
        self._reader: Any = None
        self.tables: Any = self.controller.tables() if carrier.mode else None

    @property
    def write(self) -> Any:
        """The writer of a shard or a collection."""
        if self._writer is None:
            open_ = self.controller.open_writer if self.carrier.shards else self._open_shards_writer
            self._writer = open_("c")
        return self._writer

    @property
    def read(self) -> Any:
        """The reader of a shard or a collection."""
        if self._reader is None:
            open_ = self.controller.open_reader if self.carrier.shards else self.client.open_reader
            self._reader = open_("c")
        return self._reader

    def _open_shards_writer(self, name: str, **options: Any) -> Any:
        return self.client.open_writer(name, self.client.inspect(name).state.schemas[0], **options)

    def queue(self, bytes_: int = 1 << 20) -> Any:
        """A writer that holds accepted appends back until it is flushed."""
        open_ = self.controller.open_writer if self.carrier.shards else self._open_shards_writer
        self._writer = open_("c", batching=persist.Batching(bytes=bytes_, age_s=1000))
        return self._writer

    def now(self, added: object, **options: Any) -> Any:
        """Append rows at the next time."""
        return self.tables.insert("c", added, **options) if self.tables else self.write.append_now(added, **options)

    def upsert(self, new: object, **options: Any) -> Any:
        return self.tables.upsert("c", new, **options) if self.tables else self.write.upsert(new, **options)

    def delete(self, keys: object, **options: Any) -> Any:
        return self.tables.delete("c", keys, **options) if self.tables else self.write.delete(keys, **options)

    def at(self, added: object, lower: object, upper: object, **options: Any) -> Any:
        """Append rows at times of the caller's own, which tables do not take."""
        return self.write.compare_and_append(added, lower, upper, **options)

    def snapshot(self, as_of: Any = None, **options: Any) -> Any:
        if self.tables:
            return self.tables.read("c", as_of, **options)
        return self.read.snapshot(as_of, **options)

    def contents(self, as_of: int | None = None) -> Counter[Any]:
        with self.snapshot(as_of, diff=True) as found:
            return contents_of(found.to_arrow())

    def changes(self, from_: Any, to: Any = None, **options: Any) -> Any:
        """A table of updates."""
        return self.lazy_changes(from_, to, **options).to_arrow()

    def lazy_changes(self, from_: Any, to: Any = None, **options: Any) -> Any:
        if self.tables:
            return self.tables.changes("c", from_, to, **options)
        return self.read.changes(from_, to, **options)

    def listen(self, as_of: Any, **options: Any) -> Any:
        return self.tables.listen("c", as_of, **options) if self.tables else self.read.listen(as_of, **options)

    def repeat(self, verb: str, argument: object, error: persist.Indeterminate) -> None:
        """See to it that a call is done once that ended in doubt."""
        if not self.tables:
            getattr(self, verb)(argument, token=error.token)
        elif (time := self.tables.outcome(error.token, table="c")) is None:
            getattr(self, verb)(argument)
        else:
            assert self.contents(time) != self.contents(time - 1), "that is its time"

    def hand_over(self, **options: Any) -> int:
        """Copy it to a new rendition, and hand it over. Answers from which time on that one is read."""
        made = self.controller.make_rendition("c", copy=True, **options).number
        self.controller.copy_rendition("c", made)
        if not self.tables:
            return self.controller.hand_over("c", made, advance=True)
        time = self.controller.hand_over("c", made)
        self.tables.apply()
        self.controller.copy_rendition("c", made, to_end=True)
        return time

    def shards(self) -> tuple[str, ...]:
        """The shards that have its rows."""
        return tuple(self.controller.describe("c").active.shards) if self.carrier.shards else ("c",)

    def tend(self) -> None:
        """All the upkeep that there is."""
        if self.tables:
            self.tables.apply()
            self.tables.tidy()
        if self.carrier.shards:
            self.controller.tend("c")
        for shard in self.shards():
            self.client.maintain(shard, policy=persist.Policy(weight=1e9, advance=0.01))

    def bound_history(self, distance: int) -> None:
        """Keep this many milliseconds of history, and give up the rest as far as no hold needs it."""
        if self.carrier.shards:
            self.controller.alter("c", retention=distance)
        else:
            self.client.set_retention("c", distance)
            self.client.retain("c")
        for _ in range(2):
            self.tend()

    def close(self) -> None:
        for one in (self._writer, self._reader, self.tables):
            if one is not None:
                one.close()


class Carrier(Made):
    """One that a test can use."""

    def make(self, client: persist.Client, schema: persist.Schema = SCHEMA) -> Relation:
        """Make it, with the name "c"."""
        self.make_table(client, "c", schema)
        return self.open(client)

    def open(self, client: persist.Client) -> Relation:
        return Relation(self, client)


CARRIERS = SHARD, PROMOTED, ONE, THREE, _, WAL = tuple(Carrier(*one) for one in ALL)
HANDLES = (SHARD, ONE, THREE, PROMOTED)


def over(*carriers: Carrier) -> pytest.MarkDecorator:
    """Run a test for each of these carriers, as its argument `carrier`."""
    return pytest.mark.parametrize("carrier", carriers, ids=[carrier.name for carrier in carriers])


over_all, over_handles = over(*CARRIERS), over(*HANDLES)


def time_of(done: Any) -> int:
    """At which time a write was committed."""
    time = getattr(done, "time", None)
    return int(done.upper.time - 1 if time is None else time)


def racing(world: World, carrier: Carrier, schema: persist.Schema = SCHEMA) -> tuple[Relation, Relation]:
    """Ours, before whose next compare-and-set `world.rival` acts, and theirs. Both have written, so have their ids."""
    theirs = carrier.make(world.client(), schema)
    ours = carrier.open(world.client(rival=world.rival))
    for one in (ours, theirs):
        one.upsert(rows(0, word="a"))
        one.delete([0])
    ours.contents()
    return ours, theirs


class Cut:
    """A plan: from the next commit of these kinds on, nothing is answered; that commit itself happens or not."""

    def __init__(self, outcome: Outcome, *kinds: str) -> None:
        self.outcome, self.kinds = outcome, kinds
        self.is_armed = self.is_cut = False

    def decide(self, operation: Operation) -> Fate:
        if not self.is_armed or (not self.is_cut and operation.kind not in self.kinds):
            return Fate()
        first, self.is_cut = not self.is_cut, True
        return Fate(self.outcome if first else Outcome.LOST_UNKNOWN, 0.01)


class Heard:
    """What a listener has delivered, checked as it comes: each update after the last progress, and progress forward."""

    def __init__(self, listener: Any, as_of: int) -> None:
        self.listener, self.frontier = listener, persist.at(as_of + 1)
        self.updates: Counter[Any] = Counter()

    def poll(self) -> Heard:
        return self.take(self.listener.poll())

    def take(self, events: Any) -> Heard:
        for event in events:
            if isinstance(event, persist.Progress):
                assert self.frontier < event.frontier
                self.frontier = event.frontier
            else:
                found = updates_in(event.table)
                assert found
                assert all(self.frontier.is_before(time) for _, time, _ in found), "nothing of what was complete"
                for data, time, diff in found:
                    self.updates[data, time] += diff
        return self

    def contents(self) -> Counter[Any]:
        """All updates added up, whatever their times."""
        found: Counter[Any] = Counter()
        for (data, _), diff in self.updates.items():
            found[data] += diff
        return Counter({data: diff for data, diff in found.items() if diff})


def updates_in(table: pa.Table) -> list[tuple[Any, int, int]]:
    """The updates of a table: data, time as a number, and diff."""
    times = table.schema.get_field_index("_time")
    if pa.types.is_integer(table.schema.field(times).type):
        return updates_of(table)
    return updates_of(table.set_column(times, "_time", table.column(times).cast(pa.int64())))
