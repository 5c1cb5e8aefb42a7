"""The kinds of sources that there are, what is declared by them, and the shard that says so: one row each, as JSON.

And what is done to make a source, and to take it away: steps that any process may repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from persist_lib.arguments import check_type, did_you_mean, parse_integer, shown
from persist_lib.catalog import records
from persist_lib.catalog.collection_arguments import MOST_SHARDS, parse_retention
from persist_lib.catalog.describe import Owners
from persist_lib.catalog.metadata_shard import Bodies, Row, finish_shard
from persist_lib.catalog.records import OF_SOURCES
from persist_lib.client import Client
from persist_lib.errors import (
    Corrupt,
    Determinate,
    HoldConflict,
    InvalidUsage,
    NameTaken,
    NotFound,
    ShardFinished,
    SinceViolation,
)
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, Schema, check_schema, stored_form
from persist_lib.shard.admin import claim
from persist_lib.sources.bindings import SCHEMA as BINDINGS
from persist_lib.sources.collection import Collection
from persist_lib.sources.decoding import Decoding, imported, parse_function_name
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files.kind import Files
from persist_lib.sources.health import SCHEMA as HEALTH
from persist_lib.sources.kafka.kind import Kafka
from persist_lib.sources.pipeline import ERRORS, RAW
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.protocol import HOLD, SourceReader
from persist_lib.sources.records import (
    OUTPUT,
    Declaration,
    Followed,
    Kind,
    Recipe,
    SourceRecord,
    Terms,
    changed,
    first_of,
    in_unit,
    minted,
)
from persist_lib.sources.schema_registry import SCHEMA as SCHEMAS
from persist_lib.sources.transactions import WAITING

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller

SCHEMA = Schema(key={"name": "string not null"}, value={"body": "string not null"}, times="ms", unique=True)


S = TypeVar("S", SourceRecord, Recipe)


class Custom(
    Kind, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="custom", forbid_unknown_fields=True
):
    """A reader of your own: `factory` is "package.module:function", which is called with `options`.

    It returns a SourceReader. The module has to be there wherever the source runs.
    """

    title = "a reader of your own"
    factory: str
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        parse_function_name(self.factory, "factory")

    def open(self) -> SourceReader:
        """What the function makes. Raises InvalidUsage if there is no such function."""
        reader: SourceReader = imported(self.factory)(**self.options)
        return reader


KINDS: dict[str, type[Kind]] = {
    "files": Files, "kafka": Kafka, "postgres": Postgres, "collection": Collection, "custom": Custom,
}  # fmt: skip
"""By the tag under which each is stored."""


def kind_of_place(url: str) -> type[Kind]:
    """The kind of a place as it is written at the shell."""
    scheme, colon, _ = url.partition(":")
    return next((kind for kind in KINDS.values() if colon and scheme in kind.schemes), Files)


def check_options(kind: type[Kind], options: Iterable[str]) -> None:
    """Raise InvalidUsage for options of `persist source create` that are about another kind."""
    for option in options:
        if option not in kind.takes:
            whose = " and ".join(one.title for one in KINDS.values() if option in one.takes)
            raise InvalidUsage(f"--{option} is for {whose}: {kind.hint}")


def _tables(reader: Kind, given: Mapping[str, Schema] | None) -> dict[str, Schema]:
    """The schemas of several tables, as far as they are declared."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidUsage(f"tables maps tables to their schemas: got {shown(given)}")
    outputs = reader.outputs(given or ())
    for name in given or {}:
        if name not in outputs:
            has = f"it reads {', '.join(outputs)}" if outputs else "it has one output: say schema="
            raise InvalidUsage(f"tables: the source has no table {shown(name)}; {has}")
    return {name: check_schema(schema) for name, schema in (given or {}).items()}


def complete(
    controller: Controller, name: str, reader: Kind, schema: Schema | None, terms: Terms
) -> tuple[Declaration, Followed | None]:  # fmt: skip
    """The declaration of a source of that name, and the collection that is read, if it is one.

    Raises InvalidUsage for what does not fit together, and what opening the place raises.
    """
    if type(reader) not in KINDS.values():
        *names, last = [f"{kind.__name__}(…)" for kind in KINDS.values()]
        raise InvalidUsage(f"reader must be {', '.join(names)} or {last}: got {shown(reader)}")
    decoding, meaning = check_terms(terms.get("decoding"), terms.get("meaning"))
    decoding, meaning = decoding or reader.default_decoding(), meaning or reader.default_meaning()
    decoded, tables = terms.get("decoded"), _tables(reader, terms.get("tables"))
    for output in reader.outputs(tables).values():
        records.parse_collection_name(f"{name}/{output}")
    if schema is not None and reader.outputs(tables):
        raise InvalidUsage("schema is for a source with one output: say tables= for those of several tables or topics")
    if schema is None:
        schema = reader.default_schema(decoding, meaning) or (first_of(tables) if tables else None)
    schema = check_schema(schema)
    given = Declaration(
        reader=reader, decoding=decoding, meaning=meaning, schema=schema, tables=tables,
        decoded=None if decoded is None else check_schema(decoded),
        shards=parse_integer(terms.get("shards", 1), "shards", 1, MOST_SHARDS),
    )  # fmt: skip
    input_ = reader.input(controller)
    schemas = (given.schema, *given.tables.values(), *([given.decoded] if given.decoded else []))
    if fills := [name for one in schemas for name in one.fills]:
        raise InvalidUsage(
            f"column {fills[0]!r} has a default that a writer fills in, and each instance of a source would fill in "
            'another: leave it out. include={"at": "time"} says when a message came',
            column=fills[0],
        )  # fmt: skip
    given = reader.complete(given, input_)
    retention = parse_retention(terms.get("retention"), given.schema, controller.client.consensus.now)
    given = changed(given, retention=retention)
    given.check()
    reader.check(given)
    return given, input_


def check_terms(decoding: object, meaning: object) -> tuple[Decoding | None, Meaning | None]:
    """How to decode, and what rows mean, which must be that; None for what is not given."""
    return (
        None if decoding is None else check_type(decoding, Decoding, "decoding", 'Decoding(decoder="json")'),
        None if meaning is None else check_type(meaning, Meaning, "meaning", 'Meaning(envelope="upsert")'),
    )


Decide = Callable[[dict[str, SourceRecord]], Mapping[str, SourceRecord | None]]
"""Makes of the sources by name those to set, and None for one to take away. Raises what refuses it. Called again."""


def fetch_owners(controller: Controller) -> Owners:
    """Whose the minted shards are. Read it after the list of shards: what is new in that is then in this."""
    with closing(Declared(controller.client, controller.catalog.shard)) as declared:
        sources = {record.id: name for name, record in declared.fetch().items() if record.state != "dropping"}
    return Owners(controller.catalog.fetch(), sources)


def owners_of(client: Client) -> Owners:
    """The same of a location."""
    with client.controller() as controller:
        return fetch_owners(controller)


class Declared:
    """One process's view of the sources of a catalog."""

    def __init__(self, client: Client, catalog: str) -> None:
        self._bodies = Bodies(client, f"{catalog}.sources", SCHEMA, "the list of sources")

    def fetch(self) -> dict[str, SourceRecord]:
        return _decoded(self._bodies.fetch())

    def find(self, name: str) -> SourceRecord:
        """One source. Raises NotFound."""
        sources = self.fetch()
        if name not in sources:
            raise NotFound(
                f"there is no source {name!r}. {did_you_mean(name, sources)}Create it, or look at the list", source=name
            )
        return sources[name]

    def change(self, decide: Decide, deadline: Deadline) -> None:
        """Set the rows that `decide` says, in one append."""

        def rows(bodies: dict[str, str]) -> list[Row]:
            sources = _decoded(bodies)
            found: list[Row] = []
            for name, record in decide(sources).items():
                old = sources.get(name)
                if old is not None and old != record:
                    # As it is stored. msgspec leaves a default out or not, by which of equal texts it is.
                    found.append({"name": name, "body": bodies[name], DIFF: -1})
                if record is not None and old != record:
                    found.append({"name": name, "body": encode(record), DIFF: 1})
            return found

        self._bodies.change(rows, deadline)

    def update(
        self, record: SourceRecord, change: Callable[[SourceRecord], SourceRecord | None], deadline: Deadline,
        *, gone: str = "",
    ) -> None:  # fmt: skip
        """Set what `change` makes of this source's row; None takes it away.

        Nothing where it is another source of that name by now, or none: NotFound, if it is to say that it is `gone`.
        """

        def decide(sources: dict[str, SourceRecord]) -> Mapping[str, SourceRecord | None]:
            now = sources.get(record.name)
            if now is not None and now.id == record.id:
                return {record.name: change(now)}
            if gone:
                raise NotFound(gone, source=record.name)
            return {}

        self.change(decide, deadline)

    def close(self) -> None:
        self._bodies.close()


def _decoded(bodies: dict[str, str]) -> dict[str, SourceRecord]:
    return {name: decode(name, body) for name, body in bodies.items()}


def encode(record: SourceRecord) -> str:
    """What is stored of a record."""
    mending = record.mending and _stored(record.mending)
    return records.encode(_stored(changed(record, mending=mending)))


def _stored(record: S) -> S:
    """With its schemas as they are stored."""
    forms: dict[str, object] = {"schema": stored_form(record.schema), "decoded": stored_form(record.decoded)}
    if isinstance(record, SourceRecord):
        forms["tables"] = {name: stored_form(schema) for name, schema in record.tables.items()}
    return msgspec.structs.replace(record, **forms)


def decode(name: str, body: str) -> SourceRecord:
    """The record in a row. Raises NewerFormat and Corrupt."""
    where = f"the row of source {name}"
    try:
        return records.decode(SourceRecord, body, where, dec_hook=_kind)
    except InvalidUsage as error:
        raise Corrupt(f"{where} does not decode: {error.message}", key=where) from error


def _kind(_type: type, stored: Any) -> Kind:
    tag = stored.get("type") if isinstance(stored, dict) else None
    if tag not in KINDS:
        raise ValueError(f"there is no kind of source {tag!r} here; there are {sorted(KINDS)}")
    return msgspec.convert(stored, KINDS[tag])


def settle(
    controller: Controller, declared: Declared, record: SourceRecord, deadline: Deadline, *, is_kept: bool = True
) -> None:
    """Create what a declared source needs, and say that it is there; without `is_kept`, only to drop it.

    What it has outside of the catalog is made only where it is kept.
    """
    if record.state != "making":
        return
    client = controller.client
    if is_kept:
        record = record.reader.hold(client, record, is_new=True)
    ids: dict[str, str] = {}
    errors = in_unit(ERRORS, record.schema.times)
    outputs = {role: record.part(role).schema for role in record.outputs}
    schemas = {**outputs, "errors": errors, "raw": RAW, "waiting": WAITING, "health": HEALTH}
    for role, name in names_of(record).items():
        made = controller.create(
            name, schemas[role], shards=record.shards if role in outputs else 1,
            mode="compare_and_append" if role == "health" else "append",
            retention={**dict.fromkeys(outputs, record.retention), "waiting": 0}.get(role),
            command=f"{record.id}.{role}",
        )  # fmt: skip
        ids[role] = made.id
    health = ids.pop("health")
    client.open_writer(record.bindings, BINDINGS, layer=OF_SOURCES).close()
    if record.decoding.registry is not None:
        client.open_writer(record.schemas, SCHEMAS, layer=OF_SOURCES).close()
        claim(client.machine(record.schemas), OF_SOURCES)
    record.reader.begin(controller, record, [name for role, name in names_of(record).items() if role != "health"])
    hold(controller, changed(record, collections=ids), is_new=True)
    known = record.reader.make(client, record, deadline) if is_kept else {}

    def settled(now: SourceRecord) -> SourceRecord:
        if now.state != "making":
            return now
        made = changed(now, state="running", collections=ids, health=health, input=record.input)
        return made.with_known(known)

    declared.update(record, settled, deadline)


def hold(controller: Controller, record: SourceRecord, *, is_new: bool = False) -> None:
    """Set the holds of a source where there are none: as it is made, or after one was released."""
    contents, client = controller.catalog.fetch(), controller.client
    if not is_new:
        record.reader.hold(client, record, is_new=False)
    for shard in (*(contents.collections[id_].shard for id_ in record.collections.values()), record.bindings):
        with suppress(HoldConflict, SinceViolation):  # it is there
            client.set_hold(shard, HOLD, client.inspect(shard).state.since, opaque=record.fence, expected=None)


def take_away(controller: Controller, declared: Declared, record: SourceRecord, deadline: Deadline) -> list[str]:
    """Drop what a source has, and forget it; or, where it begins again, declare it again.

    Answers what could not be taken away outside, and what to do about it.
    """
    client = controller.client
    if not record.collections:  # its making was cut off
        settle(controller, declared, changed(record, state="making"), deadline, is_kept=False)
    contents = controller.catalog.fetch()
    for one in contents.collections.values():
        if not one.command.startswith(f"{record.id}."):
            continue
        with suppress(HoldConflict, ShardFinished, NotFound):
            client.release_hold(one.shard, HOLD)
        if one.state != "dropping":
            with suppress(NotFound):
                controller.drop(one.name, timeout=deadline.remaining_s() + 0.001)
    finish_shard(client, record.bindings, BINDINGS, HOLD)
    finish_shard(client, record.schemas, SCHEMAS)
    left = record.reader.remove(client, record)
    if left and record.again:
        raise Determinate(f"the source {record.name!r} cannot begin again now: {left[0]}. Or reset it again then")
    if record.again:
        id_, again = minted(client), record.reader.input(controller)
        declared.update(
            record, lambda now: changed(fresh(now), id=id_, epoch=now.epoch + 1, input=again), deadline
        )  # fmt: skip
    else:
        declared.update(record, lambda _: None, deadline)
    return left


def taken(name: str) -> NameTaken:
    """The error for a collection of the name of one that a source would make."""
    return NameTaken(
        f"there is a collection {name!r} already, and the source would make one. Nothing was changed; choose another "
        "name",
        collection=name,
    )


def names_of(record: SourceRecord) -> dict[str, str]:
    """The collections of a source, by what they are for."""
    name = record.name
    raw = {"raw": f"{name}/raw"} if record.meaning.keep_raw else {}
    waiting = {} if record.meaning.transactions is None else {"waiting": f"{name}/waiting"}
    outputs = {role: f"{name}/{one}" for role, one in record.reader.outputs(record.tables).items()} or {OUTPUT: name}
    return {**outputs, "errors": f"{name}/errors", **raw, **waiting, "health": f"{name}/health"}


def fresh(record: SourceRecord) -> SourceRecord:
    """A record as it was when the source was declared, under no id."""
    return changed(
        record, id="", state="making", why="", epoch=1, collections={}, health="", again=False, input=None,
        mending=None, mends=0, mended=0, table=None, known={}, joined=(),
        decoding=msgspec.structs.replace(record.decoding, added={}),
    )  # fmt: skip
