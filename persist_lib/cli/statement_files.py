"""Files of statements: JSON lines with `table`, `op` and `row`, which `persist transact` carries out at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
import pyarrow as pa

from persist_lib.cli.input_files import read_file
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.by_key import Counts
from persist_lib.relation.statements import new_values
from persist_lib.schema.schema import Schema
from persist_lib.timeline import Tables, Transaction

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
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise InvalidUsage(
                        f"{named}, line {number} is no statement: {error}. Write {EXAMPLE}, where op is one of "
                        f"{', '.join(get_args(Op))}. Nothing was done",
                        path=named, line=number,
                    ) from error  # fmt: skip


def carry_out(transaction: Transaction, tables: Tables, statement: Statement) -> Counts:
    """Do one statement in a transaction, and count keys. Raises InvalidUsage, which names the lines."""
    name, schema = statement.table, tables.controller.describe(statement.table).schema
    try:
        rows = _rows(statement, Schema(schema.key) if statement.op == "delete" else schema)
        if statement.op == "update":
            given = new_values(name, schema, rows)
            return transaction.update(name, given.changed, given.keys())
        if statement.op == "delete":
            return transaction.delete(name, rows)
        return transaction.insert(name, rows) if statement.op == "insert" else transaction.upsert(name, rows)
    except InvalidUsage as error:
        raise InvalidUsage(f"{statement.where}: {error.message}", **error.fields) from error


def _rows(statement: Statement, schema: Schema) -> pa.Table:
    """The rows with the types of the table, read as those of any file of JSON lines."""
    return pa.concat_tables(_parsed(b"".join(row + b"\n" for row in statement.rows), schema, "the row"))


def _parsed(lines: bytes | bytearray, schema: Schema, named: str) -> list[pa.Table]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(lines)
        try:
            return list(read_file(path, schema))
        except InvalidUsage as error:
            raise InvalidUsage(error.message.replace(str(path), named), **{**error.fields, "path": ""}) from error
