"""What the records of a location promise of shards, and what of that does not hold: see `persist_lib.verify`.

The records are the catalog's (collections, renditions, timelines), those of sources and streams, pending areas and
event logs. Each is read by the reader that its layer has. A record in the middle of a command promises nothing yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

from persist_lib import pending_area, streams
from persist_lib.catalog.catalog import Contents
from persist_lib.catalog.copies import HOLDS as COPIES
from persist_lib.catalog.describe import MINTED, Owners
from persist_lib.catalog.records import LAYER, OF_SOURCES, CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import Renditions
from persist_lib.catalog.wal import wal_shard
from persist_lib.client import Client
from persist_lib.core.holds import layer_of
from persist_lib.core.state import State
from persist_lib.core.units import of
from persist_lib.errors import Damage, NewerFormat
from persist_lib.events.stores.persist import HOLD as OF_LOGS
from persist_lib.events.stores.persist import lock_of
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import CATALOG
from persist_lib.maintain.log_walk import Finding, Kind
from persist_lib.sources.collection import Collection
from persist_lib.sources.kinds import Declared
from persist_lib.sources.records import SourceRecord
from persist_lib.streams.stream_list import LAYER as OF_STREAMS
from persist_lib.streams.stream_list import UNSEALED
from persist_lib.streams.stream_list import Catalog as StreamList

NOTES = ".notes"
TEND = "persist maintain --only collections"


class Broken(NamedTuple):
    """A promise that does not hold, and the name of what made it."""

    name: str
    finding: Finding


class Promises:
    """One look at all records of a location, after the list of its `shards` was read."""

    def __init__(self, client: Client, shards: Sequence[str]) -> None:
        self._client, self._shards = client, shards
        self.looked_at: Counter[str] = Counter()
        self.unchecked: list[str] = []
        self._bound: dict[str, str] = {}
        """Whose each shard is."""

    def broken(self) -> Iterator[Broken]:
        """All promises that do not hold. Records that cannot be read are among them, and stop none of the others."""
        parts: Mapping[str, Callable[[], Iterator[Broken]]] = {
            "the catalog": self._catalog, "the list of streams": self._streams, "pending areas": self._pending,
            "event logs": self._logs,
        }  # fmt: skip
        for what, part in parts.items():
            yield from self._read(what, part, what)
        if unsettled := self.looked_at.pop("unsettled record", 0):
            self.unchecked.append(f"{of(unsettled, 'record')} in the middle of a command: `{TEND}` finishes it")

    def _read(self, name: str, part: Callable[[], Iterator[Broken]], what: str) -> Iterator[Broken]:
        """What a part finds. If its records cannot be read, that is found."""
        try:
            yield from part()
        except NewerFormat as error:
            self.unchecked.append(f"{what}: {error.message}")
        except Damage as error:
            yield _broken(name, "record", what, "", error.message, "persist health")

    def _catalog(self) -> Iterator[Broken]:
        with self._client.controller() as controller, closing(Declared(self._client, CATALOG)) as declared:
            sources = declared.fetch()
            contents = controller.catalog.fetch()
        owners = Owners(contents, {one.id: name for name, one in sources.items() if one.state != "dropping"})
        states = Counter[str](one.state for one in contents.collections.values())
        states.update(one.state for one in contents.renditions.values())
        states.update(one.state for one in sources.values())
        self.looked_at["unsettled record"] += states["making"] + states["dropping"]
        names = Counter(one.name for one in contents.collections.values() if one.state != "dropping")
        for name in (name for name, count in names.items() if count > 1):
            yield _broken(name, "record", f"table {name}", "a name that one table has", "several have it", TEND)
        for collection in (one for one in contents.collections.values() if one.state == "live"):
            self.looked_at["table"] += 1
            what = f"{collection.kind} {collection.name}"
            yield from self._read(collection.name, partial(self._collection, owners, collection, what), what)
        for one in contents.renditions.values():
            if one.collection not in contents.collections:
                what = f"rendition {one.number} of {one.collection}"
                yield _broken(one.collection, "record", what, "", "the catalog has no such collection", TEND)
        for line in (one for one in contents.timelines.values() if one.mode == "wal"):
            self.looked_at["timeline"] += 1
            yield from self._shard(line.name, wal_shard(line.id), f"the WAL of timeline {line.name}", LAYER)
        yield from self._sources(contents, sources)
        yield from self._strays(owners)

    def _collection(self, owners: Owners, collection: CollectionRecord, what: str) -> Iterator[Broken]:
        contents, name = owners.contents, collection.name
        if collection.timeline is not None and collection.timeline not in contents.timelines:
            yield _broken(
                name, "record", what, f"it is on timeline {collection.timeline}", "there is no such timeline", TEND
            )
        marks = [collection.keep_deletes.marks] if collection.keep_deletes else []
        for id_ in (*marks, *filter(None, [collection.marks_of])):
            if id_ not in contents.collections:
                yield _broken(name, "record", what, f"it has to do with {id_}", "the catalog has no such table", TEND)
        broken = [*self._shard(name, collection.shard, f"which renditions {what} has", LAYER)]
        yield from broken
        for record in contents.renditions_of(collection.id):
            if record.state == "live":
                yield from self._rendition(collection, record, f"{what}, rendition {record.number}")
        if not broken:
            yield from self._promise(owners, collection, what)

    def _rendition(self, collection: CollectionRecord, record: RenditionRecord, what: str) -> Iterator[Broken]:
        columns = record.columns
        for shard in record.names:
            yield from self._shard(collection.name, shard, what, LAYER)
            state = self._state(shard)
            if state is None or state.is_finished():
                continue
            if columns not in state.schemas:
                yield _broken(collection.name, "promise", shard, f"columns {columns}", f"{state.schemas[-1]}", TEND)
            if shard in record.places and state.member not in {record.member, collection.member}:
                found = f"it is of {state.member or 'no collection'}"
                yield _broken(collection.name, "promise", shard, f"a member of {record.member}", found, TEND)

    def _promise(self, owners: Owners, collection: CollectionRecord, what: str) -> Iterator[Broken]:
        """Which rendition it is from when on, and that the history is there that readers may ask for.

        How far its data is says nothing. Writers promise ahead of it, and a copy may lack what comes next.
        """
        contents, name = owners.contents, collection.name
        known = [one for one in contents.renditions_of(collection.id) if one.state != "making"]
        if not known:
            yield _broken(name, "record", what, "", "it has no rendition", TEND)
            return
        renditions = Renditions(self._client, collection.shard, known[-1].columns.times, name)
        timeline = renditions.fetch()
        for span in timeline.spans:
            if (collection.id, span.rendition.number) not in contents.renditions:
                said = f"rendition {span.rendition.number} is the {what} from {span.start} on"
                yield _broken(name, "promise", what, said, "the catalog has no such rendition", TEND)
                return
        again = timeline
        for span in timeline.spans:
            for shard in span.rendition.names:
                state = self._state(shard)
                if state is None or state.is_finished() or state.since <= at(max(timeline.since, span.start)):
                    continue
                again = renditions.fetch() if again is timeline else again  # it may have been given up since
                if state.since > at(max(again.since, span.start)):
                    show = span.rendition.columns.show
                    said = f"history of {what} from {show(max(again.since, span.start))} on"
                    yield _broken(name, "promise", shard, said, f"it is given up before {show(state.since)}", TEND)

    def _sources(self, contents: Contents, sources: Mapping[str, SourceRecord]) -> Iterator[Broken]:
        written: dict[str, str] = {}
        for name, record in sources.items():
            if record.state in {"making", "dropping"}:
                continue
            self.looked_at["source"] += 1
            what, do = f"source {name}", f"persist source show {name}"
            yield from self._shard(name, record.bindings, f"the bindings of {what}", OF_SOURCES, do)
            if record.decoding.registry is not None:
                yield from self._shard(name, record.schemas, f"the schemas of {what}", OF_SOURCES, do)
            for role, id_ in {**record.collections, "health": record.health}.items():
                if id_ and id_ not in contents.collections:
                    yield _broken(name, "record", what, f"its {role} is {id_}", "the catalog has no such table", do)
                if id_ and written.setdefault(id_, name) != name:
                    yield _broken(name, "record", what, f"its {role} is {id_}", f"source {written[id_]} has it", do)
            yield from self._settled(contents, record, do)

    def _settled(self, contents: Contents, record: SourceRecord, do: str) -> Iterator[Broken]:
        """Data is made only of messages that are bound: their shard is no older than what was made of it."""
        ids = [
            id_ for role, id_ in record.collections.items() if role in record.outputs and id_ in contents.collections
        ]
        live = [one for id_ in ids for one in contents.renditions_of(id_) if one.state == "live"]
        if isinstance(record.reader, Collection) or (bindings := self._state(record.bindings)) is None:
            return
        uppers = [state.upper for one in live for shard in one.names if (state := self._state(shard)) is not None]
        made = max((upper for upper in uppers if not upper.is_top()), default=MINIMUM)
        if bindings.upper < made:
            bindings = self._client.machine(record.bindings).fetch().state
        if bindings.upper < made:
            show = record.schema.show
            said = f"bindings up to {show(made)}, of which data of source {record.name} was made"
            yield _broken(record.name, "promise", record.bindings, said, f"they are up to {show(bindings.upper)}", do)

    def _strays(self, owners: Owners) -> Iterator[Broken]:
        """Shards that no record names, and holds for what is gone. An interrupted command may have left them."""
        ids = owners.contents.collections
        for shard in self._shards:
            if (state := self._state(shard)) is None or state.is_finished():
                continue
            if MINTED.fullmatch(shard.partition(".")[0]) and owners.is_gone(shard):
                yield _broken(shard, "stray", shard, "", "no record names this shard", f"persist shard show {shard}")
            if (of_ := state.member.partition("/")[0]) and of_ not in ids:
                said, found = f"a member of {of_}", "the catalog has no such table"
                yield _broken(shard, "stray", shard, said, found, f"persist shard show {shard}")
            for hold in state.holds:
                if self._is_stray(hold, shard, owners):
                    found = f"hold {hold} keeps history for what is gone"
                    yield _broken(shard, "stray", shard, "", found, TEND)

    def _is_stray(self, hold: str, shard: str, owners: Owners) -> bool:
        if hold.startswith(COPIES) and shard.endswith(".renditions"):
            number = hold.removeprefix(COPIES)
            return number.isdigit() and (shard.partition(".")[0], int(number)) not in owners.contents.renditions
        return hold.startswith("source-s") and hold.removeprefix("source-") not in owners.sources

    def _streams(self) -> Iterator[Broken]:
        if (lock := streams.fetch_lock(self._client)) is None:
            return
        del lock  # that it can be read is what it promises
        with closing(StreamList(self._client)) as listed:
            records = listed.fetch()
        known = {shard for one in records.values() for shard in (one.sealed, one.unsealed)}
        for name, record in records.items():
            self.looked_at["stream"] += not record.dropped
            for shard in () if record.dropped else (record.sealed, record.unsealed):
                yield from self._shard(name, shard, f"stream {name}", OF_STREAMS, "persist streams show")
        for shard in self._shards:
            state = self._state(shard) if shard.endswith(UNSEALED) and shard not in known else None
            if state is not None and not state.is_finished():
                yield _broken(shard, "stray", shard, "", "no stream is listed with this shard", "persist streams show")

    def _pending(self) -> Iterator[Broken]:
        for name in pending_area.pending_collections(self._client):
            self.looked_at["pending area"] += 1
            if name not in self._shards and self._client.machine(name).try_fetch() is None:
                says = "batches are pending for a table that is not there"
                yield _broken(name, "stray", f"-pending/{name}/", "", says, f"persist pending show {name}")

    def _logs(self) -> Iterator[Broken]:
        """Event logs: who writes them can be read, and each has its notes, which are those of the same log."""
        for shard in self._shards:
            state = self._state(shard)
            if state is None or OF_LOGS not in state.holds or state.is_finished():
                continue
            lock, do = lock_of(state, f"shard {shard}"), f"persist events check persist:URL:{shard}"
            if shard.endswith(NOTES):
                continue
            self.looked_at["event log"] += 1
            notes = self._state(shard + NOTES)
            if notes is None or OF_LOGS not in notes.holds:
                yield _broken(shard, "promise", shard + NOTES, f"the notes of log {shard}", "there is no such log", do)
            elif lock is not None and (other := lock_of(notes, shard + NOTES)) is not None and other.log != lock.log:
                yield _broken(shard, "promise", shard + NOTES, f"notes of log {lock.log}", f"of log {other.log}", do)

    def _shard(self, name: str, shard: str, whose: str, layer: str, do: str = TEND) -> Iterator[Broken]:
        """What is wrong with a shard that a record names: it is there, of the layer, and of no other record."""
        if (before := self._bound.setdefault(shard, whose)) != whose:
            yield _broken(name, "promise", shard, whose, f"it is {before}, too", do)
        try:
            version = self._client.machine(shard).known or self._client.machine(shard).try_fetch()
        except Damage:
            return  # what is wrong with the shard itself is found there
        if version is None:
            yield _broken(name, "promise", shard, whose, "there is no such shard", do)
        elif version.state.is_finished():
            yield _broken(name, "promise", shard, whose, "it is finished for good", do)
        elif (found := layer_of(version.state)) != layer and not version.state.member:
            yield _broken(name, "promise", shard, f"{whose}, a shard of layer {layer!r}", f"its layer is {found!r}", do)

    def _state(self, shard: str) -> State | None:
        """The state of a shard, as it was just verified; None if it cannot be read."""
        machine = self._client.machine(shard)
        try:
            version = machine.known or machine.try_fetch()
        except Damage:
            return None
        return None if version is None else version.state


def _broken(name: str, kind: Kind, about: str, said: str, found: str, do: str) -> Broken:
    return Broken(name, Finding(kind, about, said, found, do, is_damage=kind != "stray"))
