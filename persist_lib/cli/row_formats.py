"""Contents as text and files, a bounded number of rows at a time: table, json, jsonl, csv, parquet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rich.text import Text

from persist_lib.cli.json_values import encode
from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session, console
from persist_lib.errors import InvalidUsage
from persist_lib.times import show_time

if TYPE_CHECKING:
    from persist_lib.schema.schema import Schema

ROWS_AT_ONCE = 10_000
"""Rows that become Python values at once."""
CELL_WIDTH = 60
WORD_WIDTH = 160
"""A cell that is one word, such as a digest, is cut only beyond this."""


class Counted:
    """Tables up to a limit of rows (0: no limit). Afterwards `rows` is their count; `is_cut` if more were left."""

    def __init__(self, tables: Iterator[Any], limit: int) -> None:
        self._tables = tables
        self._limit = limit
        self.rows = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[Any]:
        for table in self._tables:
            left = self._limit - self.rows if self._limit else table.num_rows
            self.is_cut = table.num_rows > left
            piece = table.slice(0, left)
            self.rows += piece.num_rows
            if piece.num_rows:
                yield piece
            if self.is_cut:
                return

    def batches(self) -> Iterator[Any]:
        """The same as record batches of few rows."""
        for table in self:
            yield from rows_of(table)


def rows_of(table: Any) -> Iterator[Any]:
    """Record batches of few rows, in types that Python can hold."""
    import pyarrow as pa

    fields = [field.with_type(_presentable(field.type)) for field in table.schema]
    yield from table.cast(pa.schema(fields)).to_batches(max_chunksize=ROWS_AT_ONCE)


def _presentable(kind: Any) -> Any:
    """A type that Python and JSON have: nanoseconds are text, durations a number of their units."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_presentable(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_presentable(kind.key_type), _presentable(kind.item_type))
    if pa.types.is_nested(kind):
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        return pa.list_(_presentable(kind.value_type), size)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.string()
    return pa.int64() if pa.types.is_duration(kind) else kind


def python_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows for JSON, which has no number for a float that is not finite: such ones are their text.

    Documents are in it as they are stored, each digit.
    """
    import msgspec
    import pyarrow as pa
    import pyarrow.compute as pc

    from persist_lib.convert.lines.nested_json import with_odd_floats
    from persist_lib.schema.types import is_json

    rows = batch.to_pylist(maps_as_pydicts="strict")
    for field, column in zip(batch.schema, batch.columns, strict=True):
        is_float = pa.types.is_floating(field.type)
        if pa.types.is_nested(field.type) or (is_float and not pc.all(pc.is_finite(column)).as_py()):
            for row in rows:
                row[field.name] = with_odd_floats(row[field.name])
        elif is_json(field):
            for row in rows:
                row[field.name] = None if row[field.name] is None else msgspec.Raw(row[field.name].encode())
    return rows


def as_said(columns: Schema, schema: Any, tables: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    """The same rows, with uuids in their usual text, and fields that say which columns are documents."""
    import pyarrow as pa

    from persist_lib.convert.filling import uuid_texts
    from persist_lib.schema.types import is_json

    documents = {field.name: field for field in columns.data if is_json(field) and field.name in schema.names}
    names = [one.name for one in columns.columns if one.type == "uuid" and one.name in schema.names]
    for name in names:
        place = schema.get_field_index(name)
        schema = schema.set(place, schema.field(name).with_type(pa.string()))

    for name, field in documents.items():
        schema = schema.set(schema.get_field_index(name), field)

    def shown(table: Any) -> Any:
        for name, field in documents.items():
            table = table.set_column(table.schema.get_field_index(name), field, table.column(name))
        for name in names:
            chunks = [uuid_texts(chunk) for chunk in table.column(name).chunks]
            place = table.schema.get_field_index(name)
            table = table.set_column(place, schema.field(name), pa.chunked_array(chunks, pa.string()))
        return table

    return schema, map(shown, tables) if names or documents else tables


@contextmanager
def target(path: Path | None) -> Iterator[BinaryIO]:
    """Yield standard output, or a file. The file appears under its name only once it is complete."""
    if path is None:
        sys.stdout.flush()
        yield cast("BinaryIO", sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(stream: BinaryIO, _schema: Any, tables: Counted, head: Mapping[str, object]) -> None:
    """Write one object: the fields of `head`, then all rows."""
    stream.write(encode(head).removesuffix("}").encode() + b',"rows":[')
    comma = b""
    for batch in filter(len, tables.batches()):  # of a table with an empty chunk, one is empty
        stream.write(comma + encode(python_rows(batch))[1:-1].encode())
        comma = b","
    stream.write(b"]}\n")


def write_jsonl(stream: BinaryIO, _schema: Any, tables: Counted, _head: Mapping[str, object]) -> None:
    """One object a line."""
    for batch in tables.batches():
        stream.writelines(f"{encode(row)}\n".encode() for row in python_rows(batch))


def write_csv(stream: BinaryIO, schema: Any, tables: Counted, _head: Mapping[str, object]) -> None:
    """Write comma-separated values with a header. Raises InvalidUsage for bytes that are not text."""
    import pyarrow as pa
    import pyarrow.csv as pc

    def as_text(field: Any) -> Any:
        is_text = pa.types.is_binary(field.type) or pa.types.is_nested(field.type)
        return field.with_type(pa.string()) if is_text else field

    text = pa.schema(map(as_text, schema))
    with pc.CSVWriter(stream, text) as writer:
        for table in tables:
            try:
                writer.write_table(with_nested_as_json(table).cast(text))
            except pa.ArrowInvalid as error:
                raise InvalidUsage(f"CSV cannot hold these bytes ({error}); use --format parquet or jsonl") from error


def with_nested_as_json(table: Any) -> Any:
    """The same rows, their nested values as JSON."""
    import pyarrow as pa

    from persist_lib.convert.lines.nested_json import with_odd_floats

    for place, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            shown = table.column(place).cast(_presentable(field.type))
            values = with_odd_floats(shown.to_pylist(maps_as_pydicts="strict"))
            texts = [None if value is None else encode(value) for value in values]
            table = table.set_column(place, field.name, pa.array(texts, pa.string()))
    return table


def write_parquet(stream: BinaryIO, schema: Any, tables: Counted, _head: Mapping[str, object]) -> None:
    """Parquet, exact to the bit."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(stream, schema) as writer:
        for table in tables:
            writer.write_table(table)


WRITERS: Mapping[str, Callable[[BinaryIO, Any, Counted, Mapping[str, object]], None]] = {
    "json": write_json, "jsonl": write_jsonl, "csv": write_csv, "parquet": write_parquet,
}  # fmt: skip


def write_table(session: Session, stream: BinaryIO | None, schema: Any, tables: Counted) -> None:
    """A table for people, in memory."""
    import pyarrow as pa

    is_ = pa.types
    numbers = [field.name for field in schema
               if is_.is_integer(field.type) or is_.is_floating(field.type) or is_.is_decimal(field.type)]  # fmt: skip
    table = plain_table(*schema.names, right=numbers)
    for batch in tables.batches():
        for row in _with_shown_times(batch).to_pylist(maps_as_pydicts="strict"):
            table.add_row(*(Text(cell(value), "dim" if value is None else "") for value in row.values()))
    if stream is None:
        session.out.print(table, crop=False)
        return
    out = console(open(os.dup(stream.fileno()), "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - closed below
    out.print(table, crop=False)
    out.file.close()


def _with_shown_times(batch: Any) -> Any:
    """The same rows; where times are a clock, `_time` is text as all times of the shard are shown."""
    import pyarrow as pa

    place = batch.schema.get_field_index("_time")
    if place < 0 or not pa.types.is_timestamp(batch.schema.field(place).type):
        return batch
    unit = batch.schema.field(place).type.unit
    texts = [show_time(time, unit) for time in batch.column(place).cast(pa.int64()).to_pylist()]
    return batch.set_column(place, "_time", pa.array(texts, pa.string()))


def cell(value: object) -> str:
    """A value as text. Null is shown as ∅, so that it differs from the text "null"; bytes that are not text as b'…',
    nested values as JSON.
    """
    if value is None:
        return "∅"
    if isinstance(value, (list, dict)):
        value = encode(value)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            value = repr(value)
    text = str(value)
    text = text if text.isprintable() else repr(text)[1:-1]
    width = CELL_WIDTH if " " in text else WORD_WIDTH
    return text if len(text) <= width else text[: width - 1] + "…"
