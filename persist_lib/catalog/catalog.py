"""The catalog: a shard that says what collections there are, and what is being done to them.

Its rows are (kind, id) -> body: collections by their minted id, renditions by `collection/number`, commands by the id
that their callers gave them. A change is one compare-and-append at the catalog's upper, so that all changes by all
processes come one after the other. Its times are a clock, so that it can be read as of a moment.

The schema does not say that rows are unique. A change retracts the row that it replaces as of the upper at
which it is appended, so they are; and to have the shard look that up again would cost more with each collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from persist_lib.arguments import did_you_mean
from persist_lib.catalog.metadata_shard import append_once, unheld
from persist_lib.catalog.records import (
    OF_CATALOGS,
    CollectionRecord,
    CommandRecord,
    Kind,
    Record,
    RenditionRecord,
    TimelineRecord,
    decode,
    encode,
)
from persist_lib.client import Client, for_layers
from persist_lib.core.holds import layer_of
from persist_lib.errors import (
    InvalidUsage,
    InvariantViolated,
    NewerFormat,
    NotFound,
    SchemaMismatch,
    SinceViolation,
    UpperMismatch,
)
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import CATALOG
from persist_lib.ids import NAME as SHARD_NAME
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.registration import next_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.machine import as_one_call

SCHEMA = Schema(key={"kind": "string not null", "id": "string not null"}, value={"body": "string not null"}, times="ms")
RETENTION = "90 days"
"""How long a new catalog keeps its own history."""
MOST_COMMANDS = 10_000
"""How many finished commands are remembered. One that is repeated after that is taken for a new one."""
KINDS: Mapping[str, type[Record]] = {
    "collection": CollectionRecord, "rendition": RenditionRecord, "command": CommandRecord,
    "timeline": TimelineRecord,
}  # fmt: skip


Listed = CollectionRecord | RenditionRecord | CommandRecord | TimelineRecord


class Row(NamedTuple):
    """A record, and the body that it has in the shard: what takes it away has to be equal to the letter."""

    record: Record
    body: str


Rows = Mapping[tuple[str, str], Row]
Changes = Mapping[tuple[str, str], Record | None]
"""The rows that a change sets; None for one that it takes away."""
T = TypeVar("T")


class Contents(NamedTuple):
    """The catalog as of one upper. Dropped collections are in it as long as something is left of them."""

    upper: Antichain
    collections: Mapping[str, CollectionRecord]
    renditions: Mapping[tuple[str, int], RenditionRecord]
    commands: Mapping[str, CommandRecord]
    timelines: Mapping[str, TimelineRecord] = MappingProxyType({})
    rows: Rows = MappingProxyType({})
    """All of them by kind and id, as they are stored."""

    def named(self, name: str) -> CollectionRecord | None:
        return next((c for c in self.collections.values() if c.name == name and c.state != "dropping"), None)

    def names(self, *kinds: Kind) -> list[str]:
        """What lists show, sorted: all, or those of some kinds."""
        shown = (c for c in self.collections.values() if c.state == "live" and not c.marks_of)
        return sorted(c.name for c in shown if not kinds or c.kind in kinds)

    def marks_of(self, collection: CollectionRecord) -> list[CollectionRecord]:
        """The table of its deleted keys, where it keeps these."""
        kept = collection.keep_deletes
        found = None if kept is None else self.collections.get(kept.marks)
        return [] if found is None else [found]

    def renamed(self, name: str) -> str | None:
        """What the collection is called now that had this name last, as far as commands are remembered."""
        renames = (c for c in self.commands.values() if c.what == "rename" and not c.refused)
        last = max((c for c in renames if c.asked["was"] == name), key=attrgetter("number"), default=None)
        found = None if last is None else self.collections.get(last.collection)
        return None if found is None or found.state == "dropping" else found.name

    def find(self, name: str) -> CollectionRecord:
        """The same. Raises NotFound."""
        if (found := self.named(name)) is None:
            meant = did_you_mean(name, self.names())
            raise NotFound(
                f"there is no collection {name!r} in this location. {meant}Create it with controller.create, or look "
                "at controller.list(). A table on one shard is not among them: db.table(name).promote()",
                collection=name,
            )
        return found

    def renditions_of(self, collection: str) -> list[RenditionRecord]:
        """The collection's renditions that are not dropped, oldest first."""
        return sorted((r for r in self.renditions.values() if r.collection == collection), key=lambda r: r.number)

    def pending(self, collection: str | None = None) -> list[CommandRecord]:
        """The commands that are decided and not carried out, oldest first."""
        found = (c for c in self.commands.values() if c.pending and collection in {None, c.collection})
        return sorted(found, key=lambda command: command.number)


NOTHING = Contents(MINIMUM, {}, {}, {})
Decide = Callable[[Contents], tuple[Changes, T]]
"""Makes of the catalog the rows to change, and an answer; raises what refuses it. Called again after a lost race."""


class Catalog:
    """One process's view of a location's catalog."""

    def __init__(self, client: Client, shard: str = CATALOG) -> None:
        self.client, self.shard = client, shard
        self._reader: ReadHandle | None = None
        self._writer: WriteHandle | None = None
        self._known: Contents | None = None

    def fetch(self, seqno: int | None = None) -> Contents:
        """The newest contents. A location without a catalog has none. One request, if nothing has changed.

        `seqno` is that of the shard's newest row, if the caller has just asked: then no request, if nothing has.
        """
        return as_one_call(partial(self._fetch, seqno))

    def _fetch(self, seqno: int | None) -> Contents:
        try:
            reader = self._reader or self._open()
            is_known = seqno is not None and reader.machine.version.seqno >= seqno
            upper = reader.upper if is_known else reader.machine.newest().state.upper
        except NotFound:
            return NOTHING
        known = self._known
        if known is None or known.upper != upper:
            known = self._keep(_contents(upper, self._read(reader, upper, known)))
        return known

    def _keep(self, contents: Contents) -> Contents:
        know = for_layers(self.client).know_members
        for rendition in contents.renditions.values():
            know(rendition.places, rendition.member)
            if (owner := contents.collections.get(rendition.collection)) is not None and owner.epoch:
                know(rendition.names, owner.member)
        self._known = contents
        return contents

    @staticmethod
    def _read(reader: ReadHandle, upper: Antichain, known: Contents | None) -> Rows:
        """The rows as of just before `upper`: those known and what has changed since, or all of them."""
        if known is not None and known.upper.time and upper.time is not None and known.upper < upper:
            with suppress(SinceViolation), reader.changes(known.upper.time - 1, upper.time - 1) as changes:
                rows = sorted(changes.to_pylist(), key=itemgetter(TIME, DIFF))  # what is retracted before what follows
                return _applied(dict(known.rows), rows)
        if upper == MINIMUM:
            return {}
        with reader.snapshot((upper.time or 1) - 1, diff=True) as snapshot:
            return _applied({}, snapshot.to_pylist())

    def latest(self) -> Contents:
        """The newest contents that this process has read or made; read from the location if it knows none."""
        return self._known or self.fetch()

    def change(self, decide: Decide[T], deadline: Deadline, *, from_latest: bool = False) -> T:
        """Change what `decide` makes of the newest contents, in one transition. No change is no transition.

        With `from_latest` it is tried from the newest contents that this process knows, without a request: for a
        `decide` that refuses nothing, and makes no change only where none can ever be needed any more.
        """
        write = self._open_writer()
        races = 0
        while True:
            contents = self.latest() if from_latest and not races else self.fetch()
            changes, answer = decide(contents)
            changes = {**changes, **_trimmed(contents, changes)}
            rows = _updates(contents, changes)
            if not rows:
                return answer
            time = next_time(
                SCHEMA, f"shard {write.shard}", contents.upper, self.client.runtime, self.client.consensus.now
            )
            try:
                append_once(
                    write, [{**row, "_time": time} for row in rows], contents.upper.time or 0, time + 1, deadline
                )
            except UpperMismatch:
                races += 1
            else:
                made = {key: None if record is None else _stored(key, record) for key, record in changes.items()}
                left = {key: row for key, row in {**contents.rows, **made}.items() if row is not None}
                self._keep(_contents(at(time + 1), left))
                return answer
            if deadline.has_passed():
                raise deadline.gave_up("the catalog", f"as other commands were first {races} times")

    def close(self) -> None:
        for handle in (self._writer, self._reader):
            if handle is not None:
                handle.close()
        self._writer = self._reader = None

    def _open(self) -> ReadHandle:
        try:
            self._reader = unheld(self.client, self.shard, SCHEMA)
        except SchemaMismatch as error:
            raise self._no_catalog() from error
        return self._reader

    def _open_writer(self) -> WriteHandle:
        if self._writer is None:
            try:
                self._writer = self.client.open_writer(self.shard, SCHEMA, layer=OF_CATALOGS)
            except SchemaMismatch as error:
                raise self._no_catalog() from error
            if layer_of(state := self._writer.machine.state) != OF_CATALOGS:
                kept = RETENTION if state.retention is None else state.retention
                self.client.set_retention(self.shard, kept, layer=OF_CATALOGS)
        return self._writer

    def _no_catalog(self) -> InvalidUsage:
        return InvalidUsage(
            f"shard {self.shard!r} of this location is not a catalog: it has other columns. Collections need a shard "
            "of that name: use another location, or pass catalog= with a name that is free",
            shard=self.shard,
        )  # fmt: skip


def has_shard(client: Client, name: str) -> bool:
    """Whether there is a shard of this name that stands by itself, which no collection should be given then."""
    found = client.machine(name).try_fetch() if SHARD_NAME.fullmatch(name) else None
    return found is not None and not found.state.is_finished() and not found.state.member


def name_of(client: Client, collection: str) -> str:
    """The name that a collection has in the usual catalog, by its id; empty where it is not there, or being dropped."""
    catalog = Catalog(client)
    try:
        found = catalog.fetch().collections.get(collection)
    finally:
        catalog.close()
    return "" if found is None or found.state == "dropping" else found.name


def _key_of(record: Listed) -> tuple[str, str]:
    id_ = f"{record.collection}/{record.number}" if isinstance(record, RenditionRecord) else record.id
    return next(name for name, kind in KINDS.items() if type(record) is kind), id_


def setting(*records: Listed) -> dict[tuple[str, str], Record | None]:
    """Changes that set these rows."""
    return {_key_of(record): record for record in records}


def without(*records: Listed) -> dict[tuple[str, str], Record | None]:
    """Changes that take these rows away."""
    return {_key_of(record): None for record in records}


def _applied(found: dict[tuple[str, str], Row], rows: Iterable[Mapping[str, Any]]) -> Rows:
    for row in rows:
        key = str(row["kind"]), str(row["id"])
        if row[DIFF] == -1 and key in found and found[key].body == row["body"]:
            del found[key]
        elif row[DIFF] == 1 and key not in found:
            found[key] = Row(_decoded(key, row["body"]), row["body"])
        else:
            raise InvariantViolated(
                f"{_where(key)} is there twice, or is taken away and was not there: somebody else has written to the "
                "shard. Restore it to a time before that with client.restore",
                kind=key[0], id=key[1],
            )  # fmt: skip
    return found


def _where(key: tuple[str, str]) -> str:
    return f"row {key[0]} {key[1]} of the catalog"


def _decoded(key: tuple[str, str], body: str) -> Record:
    if key[0] not in KINDS:
        raise NewerFormat(
            f"{_where(key)} is of a kind that this release does not know: use a newer release of persist-lib. Nothing "
            "was changed",
            kind=key[0],
        )
    return decode(KINDS[key[0]], body, _where(key))


def _stored(key: tuple[str, str], record: Record) -> Row:
    """A record as it will be read: what was asked is JSON then."""
    body = encode(record)
    return Row(_decoded(key, body), body)


def _contents(upper: Antichain, rows: Rows) -> Contents:
    found: dict[str, dict[str, Record]] = {kind: {} for kind in KINDS}
    for (kind, id_), row in rows.items():
        found[kind][id_] = row.record
    renditions = {(r.collection, r.number): r for r in found["rendition"].values()}  # type: ignore[attr-defined]
    return Contents(upper, found["collection"], renditions, found["command"], found["timeline"], rows)  # type: ignore[arg-type]


def _updates(contents: Contents, changes: Changes) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for key, record in changes.items():
        old = contents.rows.get(key)
        if (old and old.record) == record:
            continue
        row = {"kind": key[0], "id": key[1]}
        if old is not None:
            rows.append({**row, "body": old.body, DIFF: -1})
        if record is not None:
            rows.append({**row, "body": encode(record), DIFF: 1})
    return rows


def _trimmed(contents: Contents, changes: Changes) -> Changes:
    """The oldest finished commands go where there are too many, a tenth at once."""
    if len(contents.commands) + sum(key[0] == "command" for key in changes) <= MOST_COMMANDS:
        return {}
    done = sorted((c for c in contents.commands.values() if not c.pending), key=lambda c: c.number)
    return {key: None for command in done[: MOST_COMMANDS // 10] if (key := _key_of(command)) not in changes}
