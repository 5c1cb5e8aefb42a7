"""Tables of PostgreSQL as a source: what is declared of them, and what the source has on the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from persist_lib.arguments import parse_integer, parse_text, shown
from persist_lib.catalog.records import OF_TABLES, VERSION
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.errors import Determinate, InvalidUsage, ShardFinished
from persist_lib.location.scheme import with_extra
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.bindings import Clock
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.postgres.columns import Header, check_declared, derived_schema, places_of
from persist_lib.sources.records import (
    Declaration,
    Followed,
    Kind,
    Known,
    Place,
    SourceRecord,
    changed,
    first_of,
    version_of,
)

if TYPE_CHECKING:
    from persist_lib.sources.postgres.reader import TableReader
    from persist_lib.sources.postgres.server import Table

MOST_RETAINED = 10 * 1024 * MIB
LOG = "log"
"""The partition of a source of several tables."""


class Postgres(
    Kind, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="postgres", forbid_unknown_fields=True
):
    """A table of PostgreSQL 15 or newer, followed by logical replication; or with `tables` several of one database.

    `url` is one of libpq, without a password: it is kept in the catalog. Passwords come from where libpq takes them
    (`~/.pgpass`, PGPASSWORD, a service file). `table` is written as in SQL, with its schema. Each of several tables has
    an output of its own, `NAME/SCHEMA.TABLE`, and at each time all of them show the database as of one moment. The
    source makes a replication slot of its own, and a publication, unless `publication` names one that is there. Once
    the slot holds back more than `most_retained` bytes of the server's log, instances say so in the source's health.
    """

    title = "a table of PostgreSQL"
    schemes = ("postgresql", "postgres")
    takes = frozenset({"table", "add-columns"})
    hint = "a table of PostgreSQL says itself what its changes mean: give --table, and no --envelope"
    brings_schema = True
    begins_with_copy = True
    unloadable = "a table's first snapshot is one copy"

    url: str
    table: str | None = None
    tables: tuple[str, ...] = ()
    publication: str | None = None
    most_retained: int = MOST_RETAINED

    def __post_init__(self) -> None:
        if (self.table is None) == (not self.tables):
            raise InvalidUsage(f"pass table= or tables=, one of them: got {shown(self.table)} and {shown(self.tables)}")
        if not isinstance(self.tables, tuple):
            raise InvalidUsage(f"tables must be a tuple of texts, as in ('public.orders',): got {shown(self.tables)}")
        for name, given in (("url", self.url), *(("table", one) for one in self.names)):
            if not parse_text(given, name, 4096):
                raise InvalidUsage(f"{name} must not be empty")
        _check_distinct(self.tables)
        if not self.url.startswith(("postgresql://", "postgres://")):
            raise InvalidUsage(f"url must start with postgresql://: got {shown(self.url)}")
        if self.publication is not None and not parse_text(self.publication, "publication", 63):
            raise InvalidUsage("publication must name one that is there, or be left out")
        parse_integer(self.most_retained, "most_retained", 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The tables, as they are declared."""
        return self.tables if self.table is None else (self.table,)

    @property
    def partition(self) -> str:
        """What the source's one partition is called: the log of the server has the changes of all tables in it."""
        return self.table or LOG

    def inspect(self) -> Mapping[str, Table]:
        """What the tables are. Raises InvalidUsage, which says what to do, if one cannot be followed."""
        found: Mapping[str, Table] = _part("upstream").inspect(self)
        return found

    @classmethod
    def of_place(cls, place: Place) -> tuple[Postgres, str]:
        if not place.tables:
            raise InvalidUsage("of PostgreSQL, give --table, and no --envelope")
        if len(place.tables) > 1:
            return cls(url=place.url, tables=place.tables), "pgoutput"
        return cls(url=place.url, table=place.tables[0]), "pgoutput"

    def outputs(self, _declared: Iterable[str] = ()) -> Mapping[str, str]:
        return {table: table.replace('"', "") for table in self.tables}

    def unlike(self, wanted: Kind) -> str:
        if isinstance(wanted, Postgres) and self.tables and set(self.names) != set(wanted.names):
            return (
                ", as its tables are others. Add one to it with `persist source add-table`; to have fewer, drop it and "
                "create it again, which copies all of them"
            )
        return ""

    def with_table(self, table: str) -> Postgres:
        if not self.tables:
            raise InvalidUsage(
                f"a source of the one table {self.table} has one output: declare a second source for {shown(table)}; "
                f"or one with tables=({self.table!r}, {table!r}), to which more can be added"
            )
        return msgspec.structs.replace(self, tables=(*self.tables, table))

    def join(self, client: Client, record: SourceRecord, table: str, schema: Schema | None) -> tuple[Schema, Known]:
        with suppress(ShardFinished):
            Choices(client, record.choices).find()
            raise Determinate(
                f"source {record.name!r} has not used its own first snapshot yet, in which a table that comes later is "
                "not. Nothing was changed: run an instance for some seconds, and add the table then",
                source=record.name,
            )  # fmt: skip
        found = _part("upstream").find_joining(self.with_table(table), table)
        columns = derived_schema(found.columns, found.key) if schema is None else schema
        _check_fits(record, columns, found)
        known = _part("upstream").join(self, record.id, table, found)
        part = changed(record, tables={**record.tables, table: columns})
        return columns, _taken(part, {table: known})[table]

    def default_decoding(self) -> Decoding:
        return Decoding(decoder="pgoutput", extra="ignore")

    def default_meaning(self) -> Meaning:
        return Meaning(envelope="changes")

    def default_schema(self, decoding: Decoding, meaning: Meaning) -> Schema:
        _check_changes(decoding, meaning)
        if meaning.include or decoding.columns:
            alone = "pass a schema, with the columns of the output"
            raise InvalidUsage(f"columns and include: {'they are for a source of one table' if self.tables else alone}")
        return first_of({name: derived_schema(table.columns, table.key) for name, table in self.inspect().items()})

    def complete(self, given: Declaration, input_: Followed | None) -> Declaration:
        _check_changes(given.decoding, given.meaning)
        tables = self.inspect()
        if self.tables:
            derived = {name: derived_schema(table.columns, table.key) for name, table in tables.items()}
            schemas = {**derived, **given.tables}
            given = changed(given, schema=first_of(schemas), tables=schemas)
        versions = [version_of(keyless=not table.key, by_index=table.by_index) for table in tables.values()]
        given = changed(given, v=max(OF_TABLES if self.tables else VERSION, *versions))
        for name, table in tables.items():
            _check_fits(given, given.tables.get(name, given.schema), table)
        if given.decoding.extra == "add":
            given = changed(given, decoding=msgspec.structs.replace(given.decoding, added={}))
        return super().complete(given, input_)

    def check(self, _given: Declaration) -> None:
        """Nothing: the tables were looked at to complete the declaration."""

    def open_reader(self, client: Client, record: SourceRecord, _clock: Clock | None = None) -> TableReader:
        """A reader of the source. What was noted of the tables has to be so at each look."""
        parts = {name: record.part(name).table for name in self.names}
        known = {name: one for name, one in parts.items() if one is not None}
        joins = {name: Choices(client, record.choices_of(name)) for name in record.joined}
        reader: TableReader = _part("reader").TableReader(
            self, record.id, Choices(client, record.choices), known, adds=record.decoding.extra == "add", joins=joins
        )
        return reader

    def make(self, client: Client, record: SourceRecord, deadline: Deadline) -> Mapping[str, Known]:
        """Make the slot and the publication, and room for the snapshot."""
        Choices(client, record.choices).create(record.fence)
        return _taken(record, _part("upstream").make(self, record.id, deadline.left_s()))

    def look(self, record: SourceRecord) -> Mapping[str, Known]:
        return _taken(record, _part("upstream").look(self, record.id))

    def remove(self, client: Client, record: SourceRecord) -> list[str]:
        """Drop the slot, and the publication that the source made."""
        for shard in (record.choices, *map(record.choices_of, record.joined)):
            Choices(client, shard).forget()
        left: list[str] = _part("upstream").take_away(self, record.id)
        return left


def _check_changes(decoding: Decoding, meaning: Meaning) -> None:
    if not decoding.reads.is_log or meaning.envelope != "changes":
        raise InvalidUsage(
            'a table of PostgreSQL is read with decoder="pgoutput" and envelope="changes": leave them out'
        )


def _check_distinct(tables: tuple[str, ...]) -> None:
    """Refuse tables that are named twice, or of which the outputs would have one name."""
    outputs: dict[str, str] = {}
    for name in tables:
        other = outputs.setdefault(name.replace('"', ""), name)
        if tables.count(name) > 1:
            raise InvalidUsage(f"the table {name} is named twice: name it once")
        if other != name:
            raise InvalidUsage(f"the outputs of {other} and {name} would have one name: declare a source of each")


def _check_fits(given: Declaration, schema: Schema, table: Table) -> None:
    decoding = given.decoding
    keyless = not table.key
    check_declared(schema, decoding, keyless=keyless)
    if keyless and given.meaning.include:
        raise InvalidUsage(
            f"include: {table.sql} has no primary key, so its rows go as they came, and where that was is not in the "
            "log: leave it out"
        )
    if not keyless and sorted(map(decoding.source, schema.key_names)) != sorted(table.key):
        raise InvalidUsage(
            f"the key of {table.sql} is {table.key}, and the schema's is {schema.key_names}: these must be alike"
        )
    columns = Pipeline(decoding, given.meaning, schema).decoded
    if decoding.extra == "add":
        taken = {decoding.source(name) for name in columns.names}
        if left := [column.name for column in table.columns if column.name not in taken]:
            raise InvalidUsage(f'extra="add" takes all columns of {table.sql}, and the schema leaves out {left}')
    problem = places_of(columns, None if keyless else schema.key_names, decoding, Header(table.columns, copied=keyless))
    if isinstance(problem, str):
        raise InvalidUsage(f"{table.sql} does not fit the schema: {problem}. Nothing was made")


def _taken(record: SourceRecord, found: Mapping[str, Known]) -> Mapping[str, Known]:
    """What is known of tables, of the columns that a source takes."""
    taken: dict[str, Known] = {}
    for table, known in found.items():
        part = record.part(table)
        names = {part.decoding.source(name) for name in (part.decoded or part.schema).names}
        columns = {name: number for name, number in known.columns.items() if name in names}
        taken[table] = msgspec.structs.replace(known, columns=columns)
    return taken


def _part(name: str) -> Any:
    return with_extra(f"persist_lib.sources.postgres.{name}", "PostgreSQL as a source", "postgres")
