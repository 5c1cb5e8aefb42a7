"""Avro as JSON: each message is read by the schema that it was written with, and becomes what JSON has for it.

So all that is known of JSON holds of Avro too: columns by name, envelopes, keys, what is bad. Bytes become base64,
moments ISO text, decimals text; a column of such a type reads it back exactly. Pure.

This loops over messages: fastavro makes Python objects, one message at a time.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import InvalidUsage, SchemaChanged
from persist_lib.kernel.columns import plain
from persist_lib.schema.types import canonical_type
from persist_lib.sources.decoding import WHAT_TO_DO, Decoding
from persist_lib.sources.schema_registry import Written

try:
    import fastavro
except ModuleNotFoundError as error:
    raise InvalidUsage(
        "Avro needs the package fastavro, which is not installed: pip install 'persist-lib[avro]'", extra="avro"
    ) from error

MOMENTS = "timestamp-"
"""What is in the text of a schema that has moments."""
MAGIC = 0
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
HEAD = 5
"""Bytes before a message of a registry: 0, and the id of its schema in four bytes."""


Schemas = Mapping[int, Written]


class Refused(Exception):
    """A message, or its schema, is no Avro."""


def as_json(decoding: Decoding, messages: pa.Table, schemas: Schemas) -> tuple[Decoding, pa.Table]:
    """Make JSON of what is Avro in messages, keys and values. What cannot be read has a problem then."""
    problems: dict[int, str] = {}
    if decoding.decoder == "avro":
        writer_of = _by_id(schemas) if decoding.registry is not None else _by_header(decoding, messages)
        values, problems = _made(messages.column("value"), writer_of, decoding.avro)
        messages = messages.set_column(messages.column_names.index("value"), "value", values)
    if decoding.key == "avro" and "key" in messages.column_names:
        keys, bad = _made(messages.column("key"), _by_id(schemas), None)
        messages = messages.set_column(messages.column_names.index("key"), "key", keys)
        problems |= {n: f"the key: {why}" for n, why in bad.items()}
    if problems:
        known = messages.column("problem").to_pylist() if "problem" in messages.column_names else None
        whole = [(known[n] if known else None) or problems.get(n) for n in range(messages.num_rows)]
        if known is not None:
            messages = messages.drop_columns(["problem"])
        messages = messages.append_column("problem", pa.array(whole, pa.string()))
    how: dict[str, Any] = {name: "json" for name in ("decoder", "key") if getattr(decoding, name) == "avro"}
    is_text = decoding.json_text or decoding.decoder == "avro"
    # By now each field has a column, where fields are taken.
    extra = "refuse" if decoding.takes_fields else decoding.extra
    how = {**how, "avro": None, "registry": None, "json_text": is_text, "extra": extra}
    return msgspec.structs.replace(decoding, **how), messages


def new_fields(
    decoding: Decoding, known: Container[str], messages: pa.Table, schemas: Schemas, *, of_change: bool
) -> dict[str, str]:
    """The fields of records that are not `known`, each with the type of a column for it: by the first that has it.

    Messages are in their order, so that all who meet a field first give it the same type. `of_change`: a record is a
    change of Debezium, and its rows are within. Raises SchemaChanged for a field that no column can hold.
    """
    found: dict[str, str] = {}
    for written in _writers(decoding, messages, schemas):
        for name, kind, why in _fields(written, of_change):
            if name in known or name in found:
                continue
            if why:
                raise SchemaChanged(
                    f"messages have the new field {name!r}, and no column takes it: it is {why}. {WHAT_TO_DO}",
                    where=name,
                )
            found[name] = kind
    return found


def _writers(decoding: Decoding, messages: pa.Table, schemas: Schemas) -> Iterator[Written]:
    """The schemas that values were written with, in the order of the first of each."""
    if decoding.registry is None:
        headers = pc.unique(plain(messages.column("header"))).to_pylist() if "header" in messages.column_names else []
        yield from (Written(text) for text in headers if text is not None)
        return
    for head in pc.unique(pc.binary_slice(plain(messages.column("value")), 0, HEAD)).to_pylist():
        if head is not None and len(head) == HEAD and head[0] == MAGIC:
            yield schemas[int.from_bytes(head[1:])]


@lru_cache(maxsize=1000)
def _fields(written: Written, of_change: bool) -> tuple[tuple[str, str, str], ...]:
    """The names of a record's fields, the types of columns for them, and why there is none. No record has no fields."""
    try:
        record = parsed(written)
    except Refused:  # the messages are bad
        return ()
    named = record.get("__named_schemas", {}) if isinstance(record, dict) else {}
    if of_change:  # `after` is null, or the row
        kinds = [one["type"] for one in _fields_in(record) if one["name"] == "after"]
        rows = [named.get(one, one) if isinstance(one, str) else one for kind in kinds for one in _each(kind)]
        record = next(filter(_fields_in, rows), None)
    found = []
    for field in _fields_in(record):
        try:
            found.append((field["name"], _column_type(field["type"], named), ""))
        except ValueError as error:
            found.append((field["name"], "", str(error)))
    return tuple(found)


def _fields_in(record: Any) -> list[Any]:
    return record["fields"] if isinstance(record, dict) and record.get("type") == "record" else []


def _each(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


def _only(kind: Any, named: Mapping[str, Any]) -> Any:
    """What a type is beside null, by itself. Raises ValueError for one of several."""
    rest = [one for one in _each(kind) if one != "null"]
    if len(rest) != 1:
        raise ValueError("one of several types" if rest else "always null")
    return named.get(rest[0], rest[0]) if isinstance(rest[0], str) else rest[0]


def _column_type(kind: Any, named: Mapping[str, Any]) -> str:
    """The column type that has all values of a type, also of those that it may be promoted to. Raises ValueError."""
    kind = _only(kind, named)
    plain_, logical = (kind["type"], kind.get("logicalType", "")) if isinstance(kind, dict) else (kind, "")
    if logical == "decimal" and plain_ in {"bytes", "fixed"}:
        return canonical_type(f"decimal({kind['precision']}, {kind.get('scale', 0)})")
    found = _LOGICAL.get((plain_, logical)) or _COLUMNS.get(plain_)
    if found is None:
        raise ValueError(f"of the type {plain_}")
    return found


_COLUMNS = {
    "boolean": "bool", "int": "int64", "long": "int64", "float": "float64", "double": "float64", "string": "string",
    "enum": "string", "bytes": "binary", "fixed": "binary", "record": "json", "array": "json", "map": "json",
}  # fmt: skip
_LOGICAL = {
    ("int", "date"): "date32", ("int", "time-millis"): "time64[us]", ("long", "time-micros"): "time64[us]",
    ("long", "timestamp-millis"): "timestamp[ms, UTC]", ("long", "timestamp-micros"): "timestamp[us, UTC]",
    ("long", "local-timestamp-millis"): "timestamp[ms]", ("long", "local-timestamp-micros"): "timestamp[us]",
    ("string", "uuid"): "uuid",
}  # fmt: skip


def check(decoding: Decoding) -> None:
    """Raise InvalidUsage for a schema to read by that is not valid."""
    try:
        if decoding.avro is not None:
            parsed(Written(decoding.avro))
    except Refused as refused:
        raise InvalidUsage(f"avro: {refused}") from refused


def ids_of(decoding: Decoding, messages: pa.Table) -> set[int]:
    """The ids of the schemas that messages name."""
    found: set[int] = set()
    if decoding.registry is None:
        return found
    for column, is_avro in (("value", decoding.decoder == "avro"), ("key", decoding.key == "avro")):
        if is_avro and column in messages.column_names:
            heads = {value[:HEAD] for value in plain(messages.column(column)).to_pylist() if value is not None}
            found |= {int.from_bytes(head[1:]) for head in heads if len(head) == HEAD and head[0] == MAGIC}
    return found


WriterOf = Callable[[int, bytes], tuple[Written, int]]
"""The schema of a message, by its number and bytes, and where what it wrote begins. Raises Refused."""


def _made(column: pa.ChunkedArray, writer_of: WriterOf, reader: str | None) -> tuple[pa.Array, dict[int, str]]:
    found: list[bytes | None] = []
    problems: dict[int, str] = {}
    reading = None if reader is None else parsed(Written(reader))
    encode = msgspec.json.Encoder().encode
    for number, value in enumerate(plain(column).to_pylist()):
        if value is None:
            found.append(None)
            continue
        try:
            writer, start = writer_of(number, value)
            row = read_one(value, start, parsed(writer), reading)
            text = encode(_with_text(row) if MOMENTS in writer.text else row)
            if b"null" in text:
                _check_finite(row)
            found.append(text)
        except Refused as refused:
            problems[number] = str(refused)
            found.append(value)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:  # JSON has nothing for it
            problems[number] = f"it does not become JSON: {error}"[:500]
            found.append(value)
    return pa.array(found, pa.binary()), problems


def read_one(value: bytes, start: int, writer: Any, reading: Any) -> Any:
    """What one message says. Raises Refused if it is not exactly one."""
    stream = BytesIO(value)
    stream.seek(start)
    row = read_from(stream, writer, reading)
    if stream.tell() != len(value):
        raise Refused(f"{len(value) - stream.tell()} bytes are left after what its schema says")
    return row


def read_from(stream: BytesIO, writer: Any, reading: Any = None) -> Any:
    """Read what is next. Raises Refused."""
    try:
        return fastavro.schemaless_reader(stream, writer, reading)
    except Exception as error:
        # Without addresses in memory. A reason is a row of the source's errors, which every instance has to
        # write alike.
        why = _ADDRESS.sub("the message", f"{type(error).__name__} {error}")
        raise Refused(f"it is not what its schema says: {why}".strip()[:500]) from error


@lru_cache(maxsize=1000)
def parsed(written: Written) -> Any:
    """A schema that is ready for use. Raises Refused for one that is not valid."""
    if written.kind != "AVRO":
        raise Refused(f"its schema is {written.kind}, not Avro")
    named: dict[str, Any] = {}
    try:
        for text in written.references:
            fastavro.parse_schema(msgspec.json.decode(text), named_schemas=named)
        return fastavro.parse_schema(msgspec.json.decode(written.text), named_schemas=named)
    except Exception as error:
        raise Refused(f"its schema is wrong: {type(error).__name__} {error}"[:500]) from error


def _by_id(schemas: Schemas) -> WriterOf:
    def writer_of(_number: int, value: bytes) -> tuple[Written, int]:
        if len(value) < HEAD or value[0] != MAGIC:
            raise Refused("it does not begin with 0 and the id of a schema, as messages of a registry do")
        id_ = int.from_bytes(value[1:HEAD])
        return schemas[id_], HEAD

    return writer_of


def _by_header(decoding: Decoding, messages: pa.Table) -> WriterOf:
    """By what its file says; or, without files, by the schema that is declared."""
    headers = plain(messages.column("header")).to_pylist() if "header" in messages.column_names else None

    def writer_of(number: int, _value: bytes) -> tuple[Written, int]:
        text = decoding.avro if headers is None else headers[number]
        if text is None:
            raise Refused("nothing says by which schema it was written")
        return Written(text), 0

    return writer_of


def _with_text(row: Any) -> Any:
    """A row whose moments are texts, with no more digits than they need: a column of milliseconds takes three."""
    match row:
        case dt.datetime():
            digits = "milliseconds" if row.microsecond % 1000 == 0 else "microseconds"
            return row.isoformat(timespec=digits if row.microsecond else "seconds").replace("+00:00", "Z")
        case dict():
            return {name: _with_text(value) for name, value in row.items()}
        case list():
            return [_with_text(value) for value in row]
        case _:
            return row


def _check_finite(row: Any) -> None:
    """Raise for a float that JSON does not have: it would become null."""
    match row:
        case float() if not math.isfinite(row):
            raise ValueError(f"{row} is no number that JSON has")
        case dict():
            for value in row.values():
                _check_finite(value)
        case list() | tuple():
            for value in row:
                _check_finite(value)
        case _:
            pass
