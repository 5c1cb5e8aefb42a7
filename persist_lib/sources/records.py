"""What is declared of a source, as it is stored, and what each kind of place has to answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypedDict, TypeVar

import msgspec

from persist_lib.arguments import shown, within
from persist_lib.catalog.collection_arguments import Retention
from persist_lib.catalog.records import OF_INDEXES, OF_TABLES, VERSION, Record, schema_of
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.sources.bindings import Bindings, Clock
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.protocol import SourceReader
from persist_lib.sources.schema_registry import Schemas
from persist_lib.times import Unit

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller

State = Literal["making", "running", "paused", "dropping"]
OUTPUT = "output"
"""The role of the one output that most sources have."""


class Followed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The collection that a source reads: its id, the columns in which it is read, and from which time on."""

    id: str
    form: Any
    begins: int = 0

    @property
    def columns(self) -> Schema:
        return schema_of(self.form)


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Another way to decode a source's messages, of which renditions are made, by the roles of their collections.

    `number` counts such attempts. Once it is `decided`, the next process hands over.
    """

    number: int
    decoding: Decoding
    meaning: Meaning
    schema: Schema
    decoded: Schema | None = None
    renditions: dict[str, int] = {}
    decided: bool = False

    def applied(self, record: SourceRecord, **more: Any) -> SourceRecord:
        return changed(
            record, decoding=self.decoding, meaning=self.meaning, schema=self.schema, decoded=self.decoded, **more
        )


def version_of(*, keyless: bool, by_index: bool) -> int:
    """The version of the record of a source of a table without a primary key, or with an index instead of it."""
    return OF_INDEXES if by_index else OF_TABLES if keyless else VERSION


class Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a source's table and its publication were when the source was made.

    `published` names the rows of the server's catalog that say what is published of the table, each by its id and by
    the transaction that wrote it (`xmin`). Any change writes such a row again, also one that is taken back. `columns`
    are the numbers of the table's columns by name: a number stays with its column, whatever that is called. `file` is
    the one with its rows: another one once these were all written again. `added`, of one of several tables, is what
    `Decoding.added` is of a source of one. `keyless`: it has no primary key, and the log has its rows whole.
    `by_index`: its key is that of the index of its replica identity, and unique only while that is so.
    """

    published: str
    columns: dict[str, int]
    file: int = 0
    added: dict[str, int] = {}
    keyless: bool = False
    by_index: bool = False

    @property
    def version(self) -> int:
        return version_of(keyless=self.keyless, by_index=self.by_index)


class Terms(TypedDict, total=False):
    """What may be declared beside a kind and a schema. What is left out, or None, is as the kind has it."""

    decoding: Decoding | None
    meaning: Meaning | None
    decoded: Schema | None
    tables: Mapping[str, Schema]
    shards: int
    retention: Retention


class Declaration(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What is declared of a source: the fields of a file that creates it, and of what is stored and shown of it.

    `schema` is that of the output; `decoded` that of messages, where a transform makes the output's rows of them.
    `tables` has those of the outputs of a source of several tables (or topics), and `schema` is one of them then.
    `retention` is in the output's times.
    """

    reader: Kind
    decoding: Decoding
    meaning: Meaning
    schema: Schema
    decoded: Schema | None = None
    tables: dict[str, Schema] = {}  # noqa: RUF012 - msgspec copies it
    shards: int = 1
    retention: int | None = None

    def pipeline(self) -> Pipeline:
        """What makes updates of its messages. Raises InvalidUsage for what does not fit together."""
        return Pipeline(self.decoding, self.meaning, self.schema, self.decoded)

    def check(self) -> None:
        """Raise InvalidUsage for what does not fit together, of each output."""
        if not self.tables:
            self.pipeline()
        for name, schema in self.tables.items():
            with within(f"tables: {name}"):
                changed(self, schema=schema).pipeline()

    def with_times(self, unit: Unit | None) -> Self:
        tables = {name: in_unit(schema, unit) for name, schema in self.tables.items()}
        return changed(self, schema=in_unit(self.schema, unit), tables=tables)


class Place(NamedTuple):
    """What a user names at the shell: a place, and options that only some kinds take."""

    url: str
    format: str | None = None
    tables: tuple[str, ...] = ()


DECODED = frozenset({"envelope", "keep-raw"})
"""Options of `persist source create` about messages that have to be decoded."""


class Kind:
    """A kind of place that messages come from: all that differs between sources is asked of it.

    A kind is a frozen `msgspec.Struct` with a tag of its own, whose fields are what is declared, and a line in
    `kinds.KINDS`. Most need `open`, which answers a `SourceReader`; the other methods have answers that fit where the
    location alone knows of the source. `make` and `remove` are for what a source has outside of its collections: both
    are idempotent.
    """

    __slots__ = ()
    title: ClassVar[str]
    """What error messages call it."""
    schemes: ClassVar[tuple[str, ...]] = ()
    """What its places start with, before a colon."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """The options of `persist source create` that it takes, of those that not every kind does."""
    hint: ClassVar[str] = ""
    """What to do instead of an option that it does not take."""
    brings_schema: ClassVar[bool] = False
    """Whether the columns need not be declared."""
    unloadable: ClassVar[str] = ""
    """Why tasks cannot load it side by side; empty if they can."""
    begins_with_copy: ClassVar[bool] = False
    """Whether its first messages are rows to be added, of which each has a key of its own if there are keys."""
    has_upstream: ClassVar[bool] = True
    """Whether its reader has to ask for what is new; otherwise its clock knows."""

    @classmethod
    def of_place(cls, place: Place) -> tuple[Kind, str]:
        """What is declared of a place at the shell, and the decoder of what is there. Raises InvalidUsage."""
        raise InvalidUsage(f"{cls.title} is not declared by a place: {place.url}")

    def open(self) -> SourceReader:
        """A reader. Raises what is wrong with the place."""
        raise NotImplementedError

    def default_decoding(self) -> Decoding:
        """How messages are decoded where the caller does not say."""
        return Decoding()

    def default_meaning(self) -> Meaning:
        """What rows mean where the caller does not say."""
        return Meaning()

    def with_table(self, table: str) -> Self:
        """The kind that reads one more table. Raises InvalidUsage."""
        raise InvalidUsage(
            f"tables can be added to a source of several tables of PostgreSQL, and this one reads {self.title}. "
            f"Declare a second source, of {shown(table)}"
        )

    def join(self, _client: Client, _record: SourceRecord, _table: str, _schema: Schema | None) -> tuple[Schema, Known]:
        """See to it that upstream one more table can be read, and answer what its output has, and what is known of it.

        Idempotent. Raises InvalidUsage for one that cannot be followed.
        """
        raise NotImplementedError

    def outputs(self, _declared: Iterable[str] = ()) -> Mapping[str, str]:
        """Of several outputs, what each of them is called below the source's name, by its role; none for one output.

        `_declared` are the roles whose columns are declared.
        """
        return {}

    def role_of(self, partition: str) -> str:
        """Of several outputs, the role of the one that a partition's messages are for."""
        return partition

    def unlike(self, _wanted: Kind) -> str:
        """Why a source of this kind cannot become another one, where that is not plain."""
        return ""

    def default_schema(self, _decoding: Decoding, _meaning: Meaning) -> Schema | None:
        """The columns of the output where the caller does not say. Raises InvalidUsage."""
        return None

    def complete(self, given: Declaration, _input: Followed | None) -> Declaration:
        """What is declared, completed by what the place brings. Raises InvalidUsage for what does not fit it."""
        for schema in (given.schema, *given.tables.values()):
            if schema.times not in {None, "ms"}:
                raise InvalidUsage(f"the times of a source are in milliseconds: pass times='ms', not {schema.times!r}")
        return given.with_times("ms")

    def check(self, _given: Declaration) -> None:
        """Raise for what cannot be opened here and now, or not be read as it is declared."""
        self.open().close()

    def input(self, _controller: Controller) -> Followed | None:
        """The collection that is read, if it is one. Raises NotFound."""
        return None

    def clock(self, controller: Controller, record: SourceRecord, _owner: str, *, is_leased: bool = True) -> Clock:
        """What says at which times messages are. Without `is_leased`, for a caller that reads no messages."""
        del is_leased
        return Bindings(controller.client, record.bindings)

    def open_reader(self, _client: Client, _record: SourceRecord, _clock: Clock | None = None) -> SourceReader:
        """A reader of the source's messages."""
        return self.open()

    def hold(self, _client: Client, record: SourceRecord, *, is_new: bool) -> SourceRecord:
        """Hold what the source reads in the location; the record with what is known of it since, if it `is_new`."""
        del is_new
        return record

    def begin(self, _controller: Controller, _record: SourceRecord, _names: Iterable[str]) -> None:
        """See to it that the source's collections, by these names, begin where what it reads begins."""

    def make(self, _client: Client, _record: SourceRecord, _deadline: Deadline) -> Mapping[str, Known]:
        """Make what the source has upstream; return what is known of that, by table."""
        return {}

    def look(self, _record: SourceRecord) -> Mapping[str, Known]:
        """What is known of it now, of a source that was made before this was noted."""
        return {}

    def remove(self, _client: Client, _record: SourceRecord) -> list[str]:
        """Take away what the source has outside of its collections. Returns what could not be, as texts."""
        return []


class SourceRecord(Declaration, frozen=True, kw_only=True, omit_defaults=True):
    """A source: what is declared, and what came of it.

    `collections` are the ids of those that it writes by definite appends, by what they are for. `epoch` counts how
    often it was reset; instances of another epoch are fenced off. `again`: once it is dropped, it is to be created
    again. `mends` counts the recipes that were tried, `mended` is the number of the one that decodes its messages now,
    0 for the first. `table` is what a table of PostgreSQL was when the source was made; `known` is that of several.
    `joined` are those of them that were added while it ran: each is a partition of its own in the bindings, whose mark
    says from which place of the log on its changes are among those of the others.
    """

    id: str
    name: str
    state: State = "making"
    why: str = ""
    epoch: int = 1
    again: bool = False
    command: str = ""
    collections: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    health: str = ""
    input: Followed | None = None
    mending: Recipe | None = None
    mends: int = 0
    mended: int = 0
    table: Known | None = None
    known: dict[str, Known] = {}  # noqa: RUF012 - msgspec copies it
    joined: tuple[str, ...] = ()

    def part(self, table: str) -> SourceRecord:
        """The record of a source of this one of its tables; of a source with one output, itself."""
        if not self.tables:
            return self
        known = self.known.get(table)
        decoding = msgspec.structs.replace(self.decoding, added={} if known is None else known.added)
        output = {"output": self.collections[table]} if table in self.collections else {}
        return changed(
            self, schema=self.tables[table], tables={}, decoding=decoding, table=known, known={},
            collections={**self.collections, **output},
        )  # fmt: skip

    def with_part(self, table: str, part: SourceRecord) -> SourceRecord:
        """The record with columns of one of its tables as they are in that one's record."""
        if not self.tables:
            return part
        tables, known = {**self.tables, table: part.schema}, dict(self.known)
        if part.table is not None:
            known[table] = msgspec.structs.replace(part.table, added=part.decoding.added)
        return changed(self, schema=first_of(tables), tables=tables, known=known)

    def with_known(self, found: Mapping[str, Known]) -> SourceRecord:
        """The record with what is known of what it has upstream."""
        # A table may have lost its key since it was declared.
        version = max(self.v, *(one.version for one in found.values()), VERSION)
        if self.tables:
            return changed(self, known=dict(found), v=version)
        return changed(self, table=next(iter(found.values()), None), v=version)

    def pipeline(self) -> Pipeline:
        keyless = self.table is not None and self.table.keyless
        return Pipeline(self.decoding, self.meaning, self.schema, self.decoded, keyless=keyless)

    def pipelines(self) -> dict[str, Pipeline]:
        """What makes updates of its messages, by the role of the output: of several tables, the table."""
        return {role: self.part(role).pipeline() for role in self.outputs}

    def role_of(self, partition: str) -> str:
        """The role of the output that a partition's messages are for."""
        return self.reader.role_of(partition) if self.tables else OUTPUT

    @property
    def outputs(self) -> list[str]:
        """The roles of its outputs: of several tables, the tables."""
        return sorted(self.tables) or [OUTPUT]

    @property
    def bindings(self) -> str:
        return f"{self.id}.bindings"

    @property
    def choices(self) -> str:
        return f"{self.id}.choices"

    def choices_of(self, table: str) -> str:
        """The shard of the first snapshot of a table that was added."""
        return f"{self.choices}.{self.collections[table]}"

    def least(self, uppers: Mapping[str, int]) -> int:
        """t, by the uppers of its collections. Those of tables that are yet to join are at 0, and do not count."""
        return min(upper for role, upper in uppers.items() if upper or role not in self.joined)

    @property
    def schemas(self) -> str:
        return f"{self.id}.schemas"

    def open_schemas(self, client: Client) -> Schemas | None:
        """The schemas of its messages, if a registry has them."""
        registry = self.decoding.registry
        return None if registry is None else Schemas(client, self.schemas, registry)

    @property
    def fence(self) -> bytes:
        return f"{self.id}/{self.epoch}".encode()


def declaration_of(record: Declaration) -> dict[str, Any]:
    """What is declared, by its fields."""
    return {field: getattr(record, field) for field in Declaration.__struct_fields__}


def first_of(tables: Mapping[str, Schema]) -> Schema:
    """The schema that a source of several tables has as its own, as they are stored in the order of their names."""
    return tables[min(tables)]


D = TypeVar("D", bound=Declaration)


def changed(record: D, **fields: Any) -> D:
    """The record with other fields."""
    return msgspec.structs.replace(record, **fields)


def mend_command(record: SourceRecord, number: int, role: str) -> str:
    """The command that makes a rendition of a source's collection, for a recipe."""
    return f"{record.id}.mend{number}.{role}"


def mend_number(record: SourceRecord, command: str) -> int | None:
    """For which recipe a rendition was made; None for one that was made otherwise."""
    head, _, rest = command.partition(".mend")
    return int(rest.partition(".")[0]) if head == record.id and rest else None


def minted(client: Client) -> str:
    """The id of a new source."""
    return f"s{client.runtime.entropy():016x}"


def in_unit(schema: Schema, unit: object) -> Schema:
    """The schema with other times."""
    models = schema.models
    schema = msgspec.structs.replace(schema, times=unit)
    schema.__dict__["models"] = models
    return schema
