"""What the catalog and rendition shards hold: one row each, as JSON that may gain fields; and how things are named.

Each body says in which version it is written. A newer one is refused (NewerFormat) before anything is changed.

Names of collections are chosen by people; those of the shards behind them are minted. A shard is never named after its
collection: a shard that is gone stays a tombstone, and a collection's name must be free again once it is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from persist_lib.arguments import UNREADABLE, shown
from persist_lib.errors import Corrupt, InvalidName, NewerFormat
from persist_lib.schema.schema import Schema, by_ids, stored_form

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
LONGEST = 200
COMMAND = re.compile(r"[!-~]{1,200}")

LAYER, OF_SOURCES, OF_CATALOGS = "collection", "source", "catalog"
"""As which layer (`core.holds`) a shard is written: those of collections and tables, of sources, and the catalogs."""
HOLD = "collection"
"""The durable hold that each shard of a collection has from its creation on."""


def parse_collection_name(name: object) -> str:
    """Check that `name` can be a collection's: words as those of shards, several of them with `/` in between."""
    if not isinstance(name, str) or len(name) > LONGEST or not NAME.fullmatch(name):
        raise InvalidName(
            f"a collection's name must be 1 to {LONGEST} letters, digits, '_', '-', '.' or '/', and no part of it "
            f"between '/' may be empty or start with '-' or '.': got {shown(name)}",
            name=name,
        )
    return str(name)


def parse_command_id(command: object) -> str:
    """Check that `command` can name a command: 1 to 200 printable letters of ASCII, without spaces."""
    if not isinstance(command, str) or not COMMAND.fullmatch(command):
        raise InvalidName(
            f"a command's id is 1 to 200 printable letters of ASCII without spaces: got {shown(command)}", name=command
        )
    return str(command)


def minted(entropy: int) -> str:
    """The id of a new collection."""
    return f"c{entropy:016x}"


def rendition_shard(collection: str) -> str:
    """The shard that says which rendition is the collection, from when on."""
    return f"{collection}.renditions"


def marks_name(collection: str) -> str:
    """The name of the table of deleted keys with this id. It is minted, so that another table's rename needs none."""
    return f"deleted-keys/{collection}"


def data_shard(collection: str, rendition: int, index: int) -> str:
    """One of a rendition's shards."""
    return f"{collection}.r{rendition}.s{index}"


def member_of(collection: str, epoch: int = 0) -> str:
    """What a shard is as a place of a collection.

    In the epoch 0 it is that of a shard that was promoted; in the next one that of all its shards, since it joined a
    timeline.
    """
    return f"{collection}/{epoch}"


VERSION, OF_PLACES, OF_DELETES, OF_TABLES, OF_INDEXES, OF_JOINED, OF_TOPICS = 1, 2, 3, 4, 5, 6, 7
"""The version of records, and those of what a release before promotions, kept deletes, sources of several tables and of
tables without a key, of tables whose key is an index, of tables that came later, or of an output for each topic, must
not write to."""
NEWEST = OF_TOPICS

Mode = Literal["append", "compare_and_append"]
State = Literal["making", "live", "dropping"]
Kind = Literal["collection", "table"]
TableMode = Literal["yolo", "wal"]
What = Literal[
    "create",
    "alter",
    "rename",
    "drop",
    "evolve",
    "make rendition",
    "drop rendition",
    "hand over",
    "promote",
    "join",
    "keep deletes",
]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a row. Fields that this release does not know are refused by `v`, never dropped."""

    v: int = VERSION


class RenditionRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One rendition: fixed when it is made, but for its state, and whether it ever was the collection (`begun`).

    `copies` is the number of the rendition that it copies, None for one that is written independently. `places` are
    shards that stood by themselves before: members, which keep their names.
    """

    collection: str
    number: int
    shards: int
    schema: Any
    hash_columns: tuple[str, ...]
    mode: Mode
    copies: int | None = None
    command: str = ""
    state: State = "making"
    begun: bool = False
    places: tuple[str, ...] = ()

    @property
    def member(self) -> str:
        """What a command to one of its places has to name."""
        return member_of(self.collection)

    @property
    def names(self) -> list[str]:
        return list(self.places) or [data_shard(self.collection, self.number, index) for index in range(self.shards)]

    @property
    def kept(self) -> str:
        """The name of the shard with kept differences between it and others; it may not be there."""
        return f"{self.collection}.r{self.number}.kept"

    @property
    def every(self) -> list[str]:
        """The names of all shards that go with it."""
        return [*self.names, self.kept]

    @property
    def columns(self) -> Schema:
        return schema_of(self.schema)


class KeptDeletes(msgspec.Struct, frozen=True):
    """How a table keeps deleted keys: by which column, for how long (ms), and the id of the table of its marks."""

    column: str
    span_ms: int
    marks: str


class CollectionRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One collection. `made` counts the renditions that were ever made for it; `retention` is in times of its own.

    From `epoch` 1 on it was a collection and has joined a timeline: then all of its shards are members. `marks_of` is
    the id of the table whose deleted keys it has; it is shown in no list, and changed with that table alone.
    """

    id: str
    name: str
    kind: Kind = "collection"
    state: State = "making"
    made: int = 1
    retention: int | None = None
    timeline: str | None = None
    command: str = ""
    epoch: int = 0
    keep_deletes: KeptDeletes | None = None
    marks_of: str = ""

    @property
    def shard(self) -> str:
        return rendition_shard(self.id)

    @property
    def member(self) -> str:
        """What a command to one of its shards has to name, if it has joined a timeline."""
        return member_of(self.id, self.epoch)


class TimelineRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A timeline: the times that its tables share, and how they are written."""

    id: str
    name: str
    mode: TableMode


class CommandRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A command: what was asked (as text), and what came of it. A pending one is finished by any process.

    `number` counts the commands of a catalog. `refused` is the reason why it was not done, once that is certain.
    """

    id: str
    what: What
    collection: str
    asked: dict[str, Any]
    number: int
    pending: bool = False
    answer: dict[str, Any] = {}
    refused: str = ""


R = TypeVar("R", bound=Record)
_JSON = msgspec.json.Encoder(order="sorted")
_DECODERS: dict[type[Record], msgspec.json.Decoder[Any]] = {}


class _Versioned(msgspec.Struct):
    v: int = VERSION


def encode(record: Record) -> str:
    """The body of a row."""
    return _JSON.encode(record).decode()


def decode(kind: type[R], body: str, where: str, dec_hook: Callable[[type, Any], Any] | None = None) -> R:
    """The record in the body of a row. Raises NewerFormat for one of a newer release, Corrupt for anything else."""
    decoder = _DECODERS.get(kind) or _DECODERS.setdefault(kind, msgspec.json.Decoder(kind, dec_hook=dec_hook))
    try:
        if (version := msgspec.json.decode(body, type=_Versioned).v) > NEWEST:
            raise NewerFormat(
                f"{where} is written in version {version}, and this release knows {NEWEST}: use a newer release of "
                "persist-lib. Nothing was changed",
                version=version, known=NEWEST,
            )  # fmt: skip
        record: R = decoder.decode(body)
    except UNREADABLE as error:
        raise Corrupt(f"{where} does not decode: {error}", key=where) from error
    return record


def schema_form(schema: Schema) -> Any:
    """A schema as it is stored in a record."""
    return msgspec.json.decode(msgspec.json.encode(stored_form(schema)))


def schema_of(form: Any) -> Schema:
    """The schema of a record."""
    return by_ids(msgspec.convert(form, Schema))
