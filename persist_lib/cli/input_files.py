"""Files of updates (.parquet, .csv, .jsonl) as tables in bounded memory, read with the shard's types.

And files of statements: JSON lines with `table`, `op` and `row`, which `persist transact` carries out at once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from persist_lib.arguments import UNREADABLE, did_you_mean, shown
from persist_lib.convert.lines import nested_json
from persist_lib.convert.lines.file_columns import Refused, csv_type, from_csv
from persist_lib.convert.lines.json_lines import check_objects, from_json, json_type
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.keyset import Counts
from persist_lib.relation.statements import new_values
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, TIME_FIELD, Schema
from persist_lib.timeline import Tables, Transaction
from persist_lib.times import Unit

ROWS = 65_536
LINE_BYTES = 16 * 1024 * 1024
"""The longest line of JSON, in bytes."""
TAIL_BYTES = 1 << 16


def read_file(path: Path, schema: Schema | None, times: Unit | None = None) -> Iterator[pa.Table]:
    """Yield the file's tables, a bounded number of rows each. Raises InvalidUsage if the file cannot be read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InvalidUsage(f"{path}: the file's name must end in one of {', '.join(READERS)}", path=str(path))
    fields = {field.name: field for field in (schema.updates if schema else (TIME_FIELD, DIFF_FIELD))}
    if (schema.times if schema else times) is not None:
        fields[TIME] = pa.field(TIME, pa.string())  # ISO 8601, or integers
    try:
        yield from reader(path, fields)
    except (pa.ArrowException, msgspec.ValidationError, ValueError, RecursionError, OSError, Refused) as error:
        is_of_times = TIME in fields and not pa.types.is_string(fields[TIME].type) and path.suffix != ".parquet"
        hint = _INTEGERS if is_of_times and not isinstance(error, Refused) else ""
        raise InvalidUsage(f"{path} cannot be read: {error}{hint}", path=str(path)) from error


_INTEGERS = f". The column {TIME}, if there is one, holds integers, as the shard's times are no clock (--times)"


def first_rows(path: Path, times: Unit | None = None) -> pa.Table:
    """The first rows of a file, from which a schema is made. Raises InvalidUsage where there are none."""
    if (first := next(read_file(path, None, times), None)) is None:
        raise InvalidUsage(f"{path} is empty, so no schema can be made from it", path=str(path))
    return first


def infer_schema(path: Path, key: list[str], times: Unit | None = None, *, unique: bool = False) -> Schema:
    """The schema of a file: the columns in `key` are the key; the others, except `_time` and `_diff`, are the value."""
    first = first_rows(path, times)
    if missing := [name for name in key if name not in first.column_names]:
        meant = did_you_mean(missing[0], first.column_names)
        raise InvalidUsage(
            f"{path} has no columns {missing}. {meant}It has {first.column_names}", key=key, path=str(path)
        )
    types = {field.name: field.type for field in first.schema if field.name not in (TIME, DIFF)}
    value = {name: type_ for name, type_ in types.items() if name not in key}
    return Schema(key={name: types[name] for name in key}, value=value, times=times, unique=unique)


Fields = Mapping[str, pa.Field]


def _read_parquet(path: Path, _fields: Fields) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            yield pa.Table.from_batches([batch])


def _read_csv(path: Path, fields: Fields) -> Iterator[pa.Table]:
    # Only an empty field without quotes is null: "NA" and "null" are text.
    nested = {name: field for name, field in fields.items() if nested_json.is_apart(field)}
    read_as = {name: pa.string() if name in nested else csv_type(field.type) for name, field in fields.items()}
    options = pyarrow.csv.ConvertOptions(
        column_types=read_as, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with pyarrow.csv.open_csv(path, convert_options=options, parse_options=parsing) as reader:
        row, last = 0, None
        for batch in reader:
            columns = []
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if name in nested:  # JSON in a cell
                    columns.append(nested_json.column_of(column.to_pylist(), nested[name], row))
                else:
                    columns.append(from_csv(column, fields[name].type) if name in fields else column)
            yield _with_integers(pa.table(columns, names=batch.schema.names))
            row += batch.num_rows
            last = batch.columns[-1][-1].as_py() if batch.num_rows else None
        if isinstance(last, str) and "\n" in last and not _tail(path).endswith(b'"'):
            raise Refused(f"a quote is open at its end: {shown(last)}")


def _tail(path: Path) -> bytes:
    """The last line of a file, or the end of it. Arrow takes all that follows an open quote for one value."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().rstrip()


def _with_integers(table: pa.Table) -> pa.Table:
    """Times that were read as text, as integers where all are such."""
    at = table.schema.get_field_index(TIME)
    if at < 0 or not pa.types.is_string(table.schema.field(at).type):
        return table
    column = table.column(at)
    if not pc.all(pc.match_substring_regex(column, r"^[0-9]{1,20}$")).as_py():
        return table
    return table.set_column(at, TIME, column.cast(pa.uint64()))


def _read_jsonl(path: Path, fields: Fields) -> Iterator[pa.Table]:
    """Lines of objects, a block at a time."""
    # Arrow would fill a column that the file lacks with nulls, but it has to be refused. So only columns of the
    # first line are asked for.
    first, row, line = _first_row(path), 0, 0
    fields = {name: field for name, field in fields.items() if name in first}
    if isinstance(first.get(TIME), int):
        fields[TIME] = TIME_FIELD
    with path.open("rb") as file:
        while lines := file.readlines(LINE_BYTES):
            data = b"".join(lines)
            _check_objects(data, lines, line)
            line += len(lines)
            odd = nested_json.has_odd_floats(data)
            apart = {
                name: field
                for name, field in fields.items()
                if nested_json.is_apart(field) or (odd and pa.types.is_floating(field.type))
            }
            rest, taken = nested_json.without(data, apart) if apart else (data, {})
            if not rest.strip():
                continue
            asked = pa.schema([(name, json_type(field.type)) for name, field in fields.items() if name not in apart])
            found = pyarrow.json.read_json(
                pa.BufferReader(rest), pyarrow.json.ReadOptions(block_size=len(rest) + 1),
                pyarrow.json.ParseOptions(explicit_schema=asked, newlines_in_values=False),
            )  # fmt: skip
            columns = {
                name: from_json(found.column(name), fields[name]) if name in fields else found.column(name)
                for name in found.schema.names
            }
            columns |= {name: nested_json.column_of(raws, apart[name], row) for name, raws in taken.items()}
            yield pa.table(columns)
            row += found.num_rows


def _check_objects(data: bytes, lines: Sequence[bytes], before: int) -> None:
    """Raise Refused unless each of these lines, of which so many were before, is one object; it names the first."""
    try:
        check_objects(data)
    except Refused:
        for number, line in enumerate(lines, before + 1):
            try:
                check_objects(line)
            except Refused as error:
                raise Refused(f"line {number}: {error}") from None
        raise


def _first_row(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    row = json.loads(first)
    if not isinstance(row, dict):
        raise InvalidUsage(f"{path}: each line must be an object with the columns as its names", path=str(path))
    return row


READERS: dict[str, Callable[[Path, Fields], Iterator[pa.Table]]] = {
    ".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl,
}  # fmt: skip


Op = Literal["insert", "upsert", "update", "delete"]


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a file."""

    table: str
    op: Op
    row: msgspec.Raw


class Statement(NamedTuple):
    """Consecutive lines that do the same to one table, with the same columns. `where` says which, for messages."""

    table: str
    op: Op
    rows: list[bytes]
    where: str


def parse_statements(path: Path | None, named: str) -> list[Statement]:
    """The statements of a file, in order. Raises InvalidUsage for a line that is not one, before anything is done."""
    lines = [] if path is None else list(_lines(path, named))
    found = []
    for (table, op, _), group in groupby(lines, key=lambda line: (line[1].table, line[1].op, line[2])):
        rows = list(group)
        first, last = rows[0][0], rows[-1][0]
        where = f"{named}, line {first}" if first == last else f"{named}, lines {first} to {last}"
        found.append(Statement(table, op, [bytes(line.row) for _, line, _ in rows], where))
    if not found:
        raise InvalidUsage(f"{named} has no statements: each line is {EXAMPLE}", path=named)
    return found


EXAMPLE = '{"table": "accounts", "op": "upsert", "row": {"id": 1, "cents": 5}}'


def check_columns(path: Path, named: str) -> None:
    """Raise InvalidUsage unless all lines of a file have the same columns: what a line lacks would become null."""
    first = None
    for number, _, columns in _objects(path, named):
        first = first or columns
        if columns != first:
            raise InvalidUsage(
                f"{named}, line {number} has the columns {sorted(columns)}, and the first line has "
                f"{sorted(first)}: the lines of one update have the same columns. Nothing was done",
                path=named, line=number,
            )  # fmt: skip


def rows_by_line(path: Path, named: str, schema: Schema) -> Iterator[pa.Table]:
    """The rows of a file. Lines of JSON with other columns are other tables, so that none has null for what it lacks.

    What is not of one set of columns is held in memory. Raises InvalidUsage.
    """
    groups: dict[frozenset[str], bytearray] = {}
    if path.suffix.lower() == ".jsonl":
        for _, text, columns in _objects(path, named):
            groups.setdefault(columns, bytearray()).extend(text.rstrip(b"\n") + b"\n")
    if len(groups) < 2:
        yield from read_file(path, schema)
    for lines in groups.values() if len(groups) > 1 else ():
        yield from _parsed(lines, schema, named)


def _objects(path: Path, named: str) -> Iterator[tuple[int, bytes, frozenset[str]]]:
    """Each line that is not blank, with its number and its columns."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield number, text, frozenset(_COLUMNS.decode(text))
                except UNREADABLE as error:
                    raise InvalidUsage(f"{named}, line {number} is no JSON object: {error}", path=named) from error


_COLUMNS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _lines(path: Path, named: str) -> Iterator[tuple[int, Line, frozenset[str]]]:
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    line = decoder.decode(text)
                    yield number, line, frozenset(_COLUMNS.decode(line.row))
                except UNREADABLE as error:
                    raise InvalidUsage(
                        f"{named}, line {number} is no statement: {error}. Write {EXAMPLE}, where op is one of "
                        f"{', '.join(get_args(Op))}. Nothing was done",
                        path=named, line=number,
                    ) from error  # fmt: skip


def carry_out(transaction: Transaction, tables: Tables, statement: Statement) -> Counts:
    """Do one statement in a transaction, and count keys. Raises InvalidUsage, which names the lines."""
    name, schema = statement.table, tables.controller.describe(statement.table).schema
    try:
        lines = b"".join(row + b"\n" for row in statement.rows)  # read with the table's types, as any file
        rows = pa.concat_tables(_parsed(lines, Schema(schema.key) if statement.op == "delete" else schema, "the row"))
        if statement.op == "update":
            given = new_values(name, schema, rows)
            return transaction.update(name, given.changed, given.keys())
        if statement.op == "delete":
            return transaction.delete(name, rows)
        return transaction.insert(name, rows) if statement.op == "insert" else transaction.upsert(name, rows)
    except InvalidUsage as error:
        raise InvalidUsage(f"{statement.where}: {error.message}", **error.fields) from error


def _parsed(lines: bytes | bytearray, schema: Schema, named: str) -> list[pa.Table]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(lines)
        try:
            return list(read_file(path, schema))
        except InvalidUsage as error:
            raise InvalidUsage(error.message.replace(str(path), named), **{**error.fields, "path": ""}) from error
