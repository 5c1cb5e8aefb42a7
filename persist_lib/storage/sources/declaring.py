"""What is declared of a source, completed and checked before anything is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

from persist_lib.arguments import check_type, shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.storage.sources.declared import Collection, Decoding, From, Meaning, check_place
from persist_lib.storage.sources.derived import declared_over, in_unit
from persist_lib.storage.sources.files import Files
from persist_lib.storage.sources.opening import of_table
from persist_lib.storage.sources.pipeline import Pipeline
from persist_lib.storage.sources.postgres import Postgres
from persist_lib.storage.sources.records import Followed

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

DECODERS = {"jsonl": "json", "csv": "csv", "text": "text", "parquet": "rows", "avro": "avro"}


class Declaration(NamedTuple):
    """What is declared: all of it, also what the caller left out."""

    reader: From
    schema: Schema
    decoding: Decoding
    meaning: Meaning
    decoded: Schema | None
    followed: Followed | None
    """Of a source over a collection: what it reads."""


def completed(
    controller: Controller, reader: From, schema: Schema | None, decoding: Decoding | None, meaning: Meaning | None,
    decoded: Schema | None,
) -> Declaration:  # fmt: skip
    """The declaration. Raises InvalidUsage for what does not fit together, and what opening the place raises."""
    followed = None
    if not isinstance(reader, get_args(From)):
        raise InvalidUsage(
            f"reader must be Files(…), Kafka(…), Postgres(…), Collection(…) or Custom(…): got {shown(reader)}"
        )
    if isinstance(reader, Postgres):
        schema, decoding, meaning = of_table(reader, schema, decoding, meaning)
    schema = check_schema(schema)
    meaning = check_type(meaning or Meaning(), Meaning, "meaning", 'Meaning(envelope="upsert")')
    if isinstance(reader, Collection):
        followed, schema, decoding, decoded = declared_over(controller, reader, schema, decoding, meaning, decoded)
    elif schema.times not in {None, "ms"}:
        raise InvalidUsage(f"the times of a source are in milliseconds: pass times='ms', not {schema.times!r}")
    else:
        schema = in_unit(schema, "ms")
    if decoding is None:
        decoding = Decoding(decoder=DECODERS[reader.format] if isinstance(reader, Files) else "json")  # type: ignore[arg-type]
    check_type(decoding, Decoding, "decoding", 'Decoding(decoder="json")')
    decoded = None if decoded is None else check_schema(decoded)
    Pipeline(decoding, meaning, schema, decoded)
    if isinstance(reader, Files) and reader.format == "parquet" and meaning.keep_raw:
        raise InvalidUsage("keep_raw keeps bytes, and Parquet's messages are rows: their files are what is raw")
    if isinstance(reader, Files) and reader.format == "csv" and reader.identity != "path":
        raise InvalidUsage(
            'identity="first line" tells files apart by their first lines, and every CSV of one shape begins with the '
            "same: leave it out, so that each path is a file of its own"
        )
    check_place(reader)
    return Declaration(reader, schema, decoding, meaning, decoded, followed)
