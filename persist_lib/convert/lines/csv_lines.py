"""Lines of CSV: Arrow's own reader over blocks, strict about what it lets pass."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from persist_lib.convert.json_columns import REFUSED, canonical_texts
from persist_lib.convert.lines import file_columns
from persist_lib.convert.lines.file_columns import Flags, Reading, Refused
from persist_lib.convert.lines.line_blocks import record_ends
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import is_json

BOM = b"\xef\xbb\xbf"


def header_of(line: bytes, settings: Reading) -> tuple[str, ...]:
    """The names in a file's first line. Raises InvalidUsage if it is no header."""
    try:
        text = line.removeprefix(BOM).decode(settings.encoding).rstrip("\r\n")
        found = next(csv.reader([text], delimiter=settings.delimiter, quotechar=settings.quote, strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidUsage(f"the first line is no header: {error}") from error
    names = tuple(name.strip() for name in found)
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidUsage(f"the header has the column {twice[0]!r} twice")
    if not all(names):
        raise InvalidUsage("the header has a column without a name; is there a header at all? Else give --names")
    return names


def check_names(names: Sequence[str], settings: Reading, schema: Schema) -> str | None:
    """Why a file with these columns cannot be taken; None if it can."""
    wanted = [settings.source(name) for name in schema.names]
    if (lacks := [name for name in wanted if name not in names]) and settings.missing == "refuse":
        return f"it has no column {', '.join(lacks)} (--missing null reads null)"
    if (extra := [name for name in names if name not in wanted]) and settings.extra == "refuse":
        return f"the shard has no column {', '.join(extra)} (--extra ignore leaves them out)"
    return None


class CsvLines:
    """Parses lines of CSV whose columns are `names`, in that order."""

    def __init__(self, settings: Reading, schema: Schema, names: Sequence[str]) -> None:
        self._settings, self._schema, self._names = settings, schema, list(names)
        self._wanted = [settings.source(name) for name in schema.names]
        self._types = {settings.source(field.name): self._read_as(field) for field in schema.data}
        self._quote, self._delimiter = settings.quote.encode(), settings.delimiter.encode()
        self.empty = file_columns.no_rows(schema)

    def _read_as(self, field: pa.Field) -> pa.DataType:
        return pa.int64() if field.name in self._settings.epochs else file_columns.csv_type(field.type)

    def parse(self, lines: Sequence[bytes]) -> pa.Table:
        return self.parse_data(b"\n".join(lines) + b"\n", is_one=len(lines) == 1)

    def parse_data(self, data: bytes, *, is_one: bool = False) -> pa.Table:
        """The rows of whole lines, or Refused. Blank lines make no row."""
        data = self._utf8(data)
        if not is_one and b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
            # Arrow ends a row at a lone \r. Such a row more could hide that an open quote swallowed a line.
            raise Refused("there is a carriage return inside of a line")
        has_quotes = self._quote in data
        table = self._read(self._closed(data) if has_quotes else data)
        return table.slice(0, max(0, table.num_rows - 1)) if has_quotes else table

    def _closed(self, data: bytes) -> bytes:
        """The data with its last line once more.

        Arrow lets a quote that is still open at the end pass. It swallows this copy, and then a row is missing.
        """
        whole = data if data.endswith(b"\n") else data + b"\n"
        stripped = whole.rstrip(b"\r\n")
        if self._settings.multiline:
            ends = record_ends(stripped, self._quote[0])
            last = stripped[int(ends[-1]) + 1 :] if len(ends) else stripped
        else:
            last = stripped[stripped.rfind(b"\n") + 1 :]
        return whole + last + b"\n"

    def _read(self, data: bytes) -> pa.Table:
        settings = self._settings
        options = pyarrow.csv.ConvertOptions(
            column_types=self._types, null_values=list(settings.nulls), strings_can_be_null=True,
            quoted_strings_can_be_null=False, include_columns=self._wanted, include_missing_columns=True,
        )  # fmt: skip
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(data), self._reading(data), self._parsing(), options,
            )  # fmt: skip
            return file_columns.fitted(table, self._settings, self._schema, self._lacks, _read)
        except (pa.ArrowException, *REFUSED) as error:
            raise file_columns.said(error, self._names) from error

    def _lacks(self, name: str, column: pa.ChunkedArray) -> Flags:
        return np.full(len(column), name not in self._names)

    def _reading(self, data: bytes) -> Any:
        size = max(len(data) + 1, 1024)
        return pyarrow.csv.ReadOptions(column_names=self._names, use_threads=False, block_size=size)

    def _parsing(self, **more: Any) -> Any:
        settings = self._settings
        return pyarrow.csv.ParseOptions(
            delimiter=settings.delimiter, quote_char=settings.quote, newlines_in_values=settings.multiline, **more
        )

    def _utf8(self, data: bytes) -> bytes:
        if self._settings.encoding == "utf-8":
            return data
        try:
            return data.decode(self._settings.encoding).encode()
        except UnicodeDecodeError as error:
            raise Refused(f"this is not {self._settings.encoding}: {error.reason}") from error

    def suspect(self, lines: Sequence[bytes]) -> set[int]:
        """Lines that may be the bad ones: with open quotes, another number of values, or values that do not convert."""
        quote = self._quote
        # Arrow cannot hand a row to `note` that is no UTF-8.
        found = {index for index, line in enumerate(lines) if line.count(quote) % 2 or _is_odd(line)}
        rest = [index for index in range(len(lines)) if index not in found]
        wrong: list[int] = []

        def note(row: Any) -> str:
            wrong.append(row.number - 1)
            return "skip"

        try:
            data = self._utf8(b"\n".join(lines[index] for index in rest) + b"\n")
        except Refused:
            return found
        names = {name: pa.binary() for name in self._names}
        options = pyarrow.csv.ConvertOptions(
            column_types=names, null_values=list(self._settings.nulls), strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )  # fmt: skip
        try:
            parsing = self._parsing(invalid_row_handler=note)
            table = pyarrow.csv.read_csv(pa.BufferReader(data), self._reading(data), parsing, options)
        except pa.ArrowException:
            return found
        if table.num_rows + len(wrong) != len(rest):
            return found
        found |= {rest[row] for row in wrong}
        kept = np.delete(np.array(rest, np.int64), wrong)
        for name, target in self._types.items():
            if name in table.column_names and not pa.types.is_binary(target):
                found |= set(kept[file_columns.failing(table.column(name), target)].tolist())
        return found


def _read(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    return canonical_texts(column) if is_json(field) else file_columns.from_csv(column, field.type)


def _is_odd(line: bytes) -> bool:
    """Whether it has a carriage return inside, or is not UTF-8."""
    if b"\r" in line and b"\r" in line.replace(b"\r\n", b""):
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False
