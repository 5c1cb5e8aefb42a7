"""Files of updates (.parquet, .csv, .jsonl) as tables in bounded memory, read with the shard's types."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from persist_lib.arguments import did_you_mean
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.times import Unit

ROWS = 65_536
LINE_BYTES = 16 * 1024 * 1024
"""The longest line of JSON, in bytes."""


def read_file(path: Path, schema: Schema | None, times: Unit | None = None) -> Iterator[pa.Table]:
    """Yield the file's tables, a bounded number of rows each. Raises InvalidUsage if the file cannot be read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InvalidUsage(f"{path}: the file's name must end in one of {', '.join(READERS)}", path=str(path))
    types = {field.name: field.type for field in schema.updates} if schema else {TIME: pa.uint64(), DIFF: pa.int64()}
    if (schema.times if schema else times) is not None:
        types[TIME] = pa.string()  # ISO 8601, or integers
    try:
        yield from reader(path, types)
    except (pa.ArrowException, msgspec.ValidationError, ValueError) as error:
        hint = "" if TIME not in types or pa.types.is_string(types[TIME]) or path.suffix == ".parquet" else _INTEGERS
        raise InvalidUsage(f"{path} cannot be read: {error}{hint}", path=str(path)) from error


_INTEGERS = f". The column {TIME}, if there is one, holds integers, as the shard's times are no clock (--times)"


def infer_schema(path: Path, key: list[str], times: Unit | None = None, *, unique: bool = False) -> Schema:
    """The schema of a file: the columns in `key` are the key; the others, except `_time` and `_diff`, are the value."""
    first = next(read_file(path, None, times), None)
    if first is None:
        raise InvalidUsage(f"{path} is empty, so no schema can be made from it", path=str(path))
    if missing := [name for name in key if name not in first.column_names]:
        meant = did_you_mean(missing[0], first.column_names)
        raise InvalidUsage(f"{path} has no columns {missing}. {meant}It has {first.column_names}", key=key)
    types = {field.name: field.type for field in first.schema if field.name not in (TIME, DIFF)}
    value = {name: type_ for name, type_ in types.items() if name not in key}
    return Schema(key={name: types[name] for name in key}, value=value, times=times, unique=unique)


Types = Mapping[str, pa.DataType]


def _read_parquet(path: Path, _types: Types) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            yield pa.Table.from_batches([batch])


def _read_csv(path: Path, types: Types) -> Iterator[pa.Table]:
    # Only an empty field without quotes is null: "NA" and "null" are text.
    options = pyarrow.csv.ConvertOptions(
        column_types=dict(types), null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with pyarrow.csv.open_csv(path, convert_options=options, parse_options=parsing) as reader:
        for batch in reader:
            yield _with_integers(pa.Table.from_batches([batch]))


def _with_integers(table: pa.Table) -> pa.Table:
    """Times that were read as text, as integers where all are such."""
    at = table.schema.get_field_index(TIME)
    if at < 0 or not pa.types.is_string(table.schema.field(at).type):
        return table
    column = table.column(at)
    if not pc.all(pc.match_substring_regex(column, r"^[0-9]{1,20}$")).as_py():
        return table
    return table.set_column(at, TIME, column.cast(pa.uint64()))


def _read_jsonl(path: Path, types: Types) -> Iterator[pa.Table]:
    # SUBTLE: Arrow would fill a column that the file lacks with nulls, but it has to be refused. So only columns of the
    # first line are asked for.
    first = _first_row(path)
    types = {name: type_ for name, type_ in types.items() if name in first}
    if isinstance(first.get(TIME), int):
        types[TIME] = pa.uint64()
    asked = pa.schema([(name, pa.string() if _as_text(type_) else type_) for name, type_ in types.items()])
    parsing = pyarrow.json.ParseOptions(explicit_schema=asked, newlines_in_values=False)
    reading = pyarrow.json.ReadOptions(block_size=LINE_BYTES)
    with pyarrow.json.open_json(path, read_options=reading, parse_options=parsing) as reader:
        for batch in reader:
            columns = [_from_text(batch.column(name), types.get(name)) for name in batch.schema.names]
            yield pa.table(columns, names=batch.schema.names)


def _first_row(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    row = json.loads(first)
    if not isinstance(row, dict):
        raise InvalidUsage(f"{path}: each line must be an object with the columns as its names", path=str(path))
    return row


def _as_text(type_: pa.DataType) -> bool:
    """Whether JSON holds values of this type as text that Arrow's parser does not accept."""
    is_ = pa.types
    return is_.is_date(type_) or is_.is_time(type_) or is_.is_binary(type_) or is_.is_fixed_size_binary(type_)


def _from_text(column: pa.Array, type_: pa.DataType | None) -> pa.Array:
    """Convert a column from text: dates and times from ISO 8601, bytes from base64. Other columns stay as they are."""
    if type_ is None or not _as_text(type_):
        return column
    if pa.types.is_date(type_) or pa.types.is_time(type_):
        kind: Any = dt.date if pa.types.is_date(type_) else dt.time
        return pa.array(msgspec.convert(column.to_pylist(), list[kind | None]), type_)
    return pa.array(msgspec.convert(column.to_pylist(), list[bytes | None]), type_)


READERS: dict[str, Callable[[Path, Types], Iterator[pa.Table]]] = {
    ".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl,
}  # fmt: skip
