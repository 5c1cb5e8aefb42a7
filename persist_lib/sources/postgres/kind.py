"""A table of PostgreSQL as a source: what is declared of it, and what the source has on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from persist_lib.arguments import parse_integer, parse_text, shown
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage
from persist_lib.location.scheme import with_extra
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.bindings import Clock
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.postgres.columns import Header, check_declared, derived_schema, places_of
from persist_lib.sources.records import Declaration, Followed, Kind, Known, Place, SourceRecord, changed

if TYPE_CHECKING:
    from persist_lib.sources.postgres.reader import TableReader
    from persist_lib.sources.postgres.server import Table

MOST_RETAINED = 10 * 1024 * MIB


class Postgres(
    Kind, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="postgres", forbid_unknown_fields=True
):
    """A table of PostgreSQL 15 or newer, followed by logical replication.

    `url` is one of libpq, without a password: it is kept in the catalog. Passwords come from where libpq takes them
    (`~/.pgpass`, PGPASSWORD, a service file). `table` is written as in SQL, with its schema. The source makes a
    replication slot of its own, and a publication, unless `publication` names one that is there. Once the slot holds
    back more than `most_retained` bytes of the server's log, instances say so in the source's health.
    """

    title = "a table of PostgreSQL"
    schemes = ("postgresql", "postgres")
    takes = frozenset({"table", "add-columns"})
    hint = "a table of PostgreSQL says itself what its changes mean: give --table, and no --envelope"
    brings_schema = True
    begins_with_copy = True
    unloadable = "a table's first snapshot is one copy"

    url: str
    table: str
    publication: str | None = None
    most_retained: int = MOST_RETAINED

    def __post_init__(self) -> None:
        for name in ("url", "table"):
            if not parse_text(getattr(self, name), name, 4096):
                raise InvalidUsage(f"{name} must not be empty")
        if not self.url.startswith(("postgresql://", "postgres://")):
            raise InvalidUsage(f"url must start with postgresql://: got {shown(self.url)}")
        if self.publication is not None and not parse_text(self.publication, "publication", 63):
            raise InvalidUsage("publication must name one that is there, or be left out")
        parse_integer(self.most_retained, "most_retained", 1)

    def inspect(self) -> Table:
        """What the table is. Raises InvalidUsage, which says what to do, if it cannot be followed."""
        found: Table = _part("server").inspect(self)
        return found

    @classmethod
    def of_place(cls, place: Place) -> tuple[Postgres, str]:
        if place.table is None:
            raise InvalidUsage("of PostgreSQL, give --table, and no --envelope")
        return cls(url=place.url, table=place.table), "pgoutput"

    def default_decoding(self) -> Decoding:
        return Decoding(decoder="pgoutput", extra="ignore")

    def default_meaning(self) -> Meaning:
        return Meaning(envelope="changes")

    def default_schema(self, decoding: Decoding, meaning: Meaning) -> Schema:
        _check_changes(decoding, meaning)
        if meaning.include or decoding.columns:
            raise InvalidUsage("columns and include: pass a schema, with the columns of the output")
        table = self.inspect()
        return derived_schema(table.columns, table.key)

    def complete(self, given: Declaration, input_: Followed | None) -> Declaration:
        _check_changes(given.decoding, given.meaning)
        table, schema, decoding = self.inspect(), given.schema, given.decoding
        check_declared(schema, decoding)
        if sorted(map(decoding.source, schema.key_names)) != sorted(table.key):
            raise InvalidUsage(
                f"the key of {table.sql} is {table.key}, and the schema's is {schema.key_names}: these must be alike"
            )
        columns = Pipeline(decoding, given.meaning, schema).decoded
        if decoding.extra == "add":
            _check_takes_all(decoding, columns, table)
            given = changed(given, decoding=msgspec.structs.replace(decoding, added={}))
        problem = places_of(columns, schema.key_names, decoding, Header(table.columns))
        if isinstance(problem, str):
            raise InvalidUsage(f"{table.sql} does not fit the schema: {problem}. Nothing was made")
        return super().complete(given, input_)

    def check(self, _given: Declaration) -> None:
        """Nothing: the table was looked at to complete the declaration."""

    def open_reader(self, client: Client, record: SourceRecord, _clock: Clock | None = None) -> TableReader:
        """A reader of the source. What was noted of the table has to be so at each look."""
        reader: TableReader = _part("reader").TableReader(
            self, record.id, Choices(client, record.choices), record.table, adds=record.decoding.extra == "add"
        )
        return reader

    def make(self, client: Client, record: SourceRecord, deadline: Deadline) -> Known:
        """Make the slot and the publication, and room for the snapshot."""
        Choices(client, record.choices).create(record.fence)
        return _taken(record, _part("server").make(self, record.id, deadline.left_s()))

    def look(self, record: SourceRecord) -> Known:
        return _taken(record, _part("server").look(self, record.id))

    def remove(self, client: Client, record: SourceRecord) -> list[str]:
        """Drop the slot, and the publication that the source made."""
        Choices(client, record.choices).forget()
        left: list[str] = _part("server").take_away(self, record.id)
        return left


def _check_changes(decoding: Decoding, meaning: Meaning) -> None:
    if not decoding.reads.is_log or meaning.envelope != "changes":
        raise InvalidUsage(
            'a table of PostgreSQL is read with decoder="pgoutput" and envelope="changes": leave them out'
        )


def _check_takes_all(decoding: Decoding, columns: Schema, table: Table) -> None:
    taken = {decoding.source(name) for name in columns.names}
    if left := [column.name for column in table.columns if column.name not in taken]:
        raise InvalidUsage(f'extra="add" takes all columns of {table.sql}, and the schema leaves out {left}')


def _taken(record: SourceRecord, known: Known) -> Known:
    """What is known of a table, of the columns that a source takes."""
    columns = record.decoded or record.schema
    taken = {record.decoding.source(name) for name in columns.names}
    return Known(known.published, {name: number for name, number in known.columns.items() if name in taken}, known.file)


def _part(name: str) -> Any:
    return with_extra(f"persist_lib.sources.postgres.{name}", "PostgreSQL as a source", "postgres")
