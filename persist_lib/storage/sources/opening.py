"""What sources have outside of their collections: their readers, what these agree on, and what they own upstream."""

from __future__ import annotations

from persist_lib.arguments import check_type
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.storage.sources.agreed_value import Choices
from persist_lib.storage.sources.declared import Collection, Decoding, Meaning
from persist_lib.storage.sources.pipeline import Pipeline
from persist_lib.storage.sources.postgres import Known, Postgres
from persist_lib.storage.sources.postgres.columns import Header, check_declared, derived_schema, places_of
from persist_lib.storage.sources.protocol import SourceReader
from persist_lib.storage.sources.records import SourceRecord


def open_reader(client: Client, record: SourceRecord) -> SourceReader:
    """The reader of a source."""
    if isinstance(record.reader, Postgres):
        return record.reader.open(record.id, Choices(client, record.choices), record.table)
    if isinstance(record.reader, Collection):
        raise AssertionError(f"{record.name} reads a collection by its clock")  # noqa: TRY004 - no caller's mistake
    return record.reader.open()


def make_outside(client: Client, record: SourceRecord, deadline: Deadline) -> Known | None:
    """Make what a source has apart from its collections; return what is known of its table. Idempotent."""
    if not isinstance(record.reader, Postgres):
        return None
    Choices(client, record.choices).create(record.fence)
    return of_source(record, record.reader.make(record.id, deadline.left_s()))


def of_source(record: SourceRecord, known: Known) -> Known:
    """What is known of a table, of the columns that a source takes."""
    columns = record.message_columns or record.columns
    taken = {record.decoding.source(name) for name in columns.names}
    return Known(known.published, {name: number for name, number in known.columns.items() if name in taken})


def take_outside_away(client: Client, record: SourceRecord) -> list[str]:
    """Take that away. Answers what could not be, as texts for who has to do it."""
    if not isinstance(record.reader, Postgres):
        return []
    Choices(client, record.choices).forget()
    return record.reader.take_away(record.id)


def of_table(
    reader: Postgres, schema: Schema | None, decoding: Decoding | None, meaning: Meaning | None
) -> tuple[Schema, Decoding, Meaning]:
    """What is declared of a source of a table, completed. Raises InvalidUsage for what the table cannot be."""
    decoding = decoding or Decoding(decoder="pgoutput", extra="ignore")
    check_type(decoding, Decoding, "decoding", 'Decoding(decoder="pgoutput")')
    meaning = check_type(meaning or Meaning(envelope="changes"), Meaning, "meaning", 'Meaning(envelope="changes")')
    schema = None if schema is None else check_schema(schema)
    if decoding.decoder != "pgoutput" or meaning.envelope != "changes":
        raise InvalidUsage(
            'a table of PostgreSQL is read with decoder="pgoutput" and envelope="changes": leave them out'
        )
    table = reader.inspect()
    if schema is None:
        if meaning.include or decoding.columns:
            raise InvalidUsage("columns and include: pass a schema, with the columns of the output")
        schema = derived_schema(table.columns, table.key)
    check_declared(schema, decoding)
    if sorted(map(decoding.source, schema.key_names)) != sorted(table.key):
        raise InvalidUsage(
            f"the key of {table.sql} is {table.key}, and the schema's is {schema.key_names}: these must be alike"
        )
    columns = Pipeline(decoding, meaning, schema).decoded
    problem = places_of(columns, schema.key_names, decoding, Header(table.columns))
    if isinstance(problem, str):
        raise InvalidUsage(f"{table.sql} does not fit the schema: {problem}. Nothing was made")
    return schema, decoding, meaning
