"""JSON lines: an object a line, read by Arrow after msgspec has shown that each line is exactly one object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from persist_lib.convert.lines import file_columns, nested_json
from persist_lib.convert.lines.file_columns import Flags, Reading, Refused
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import is_json

_is = pa.types
_raws = msgspec.json.Decoder(msgspec.Raw)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonLines:
    """Parses lines that are JSON objects with the columns as names. A field that is not there has its default.

    `is_text`: in a column of documents, a text is that of a document.
    """

    def __init__(
        self, settings: Reading, schema: Schema, *, extra: Literal["refuse", "ignore"] | None = None,
        is_text: bool = False,
    ) -> None:  # fmt: skip
        self._settings, self._schema, self._extra = settings, schema, extra or settings.extra
        self._is_text = is_text
        self._nested = {settings.source(field.name): field for field in schema.data if nested_json.is_apart(field)}
        floats = {settings.source(field.name): field for field in schema.data if _is.is_floating(field.type)}
        self._odd = {**self._nested, **floats} if floats else {}
        self._asked = {
            settings.source(field.name): self._read_as(field)
            for field in schema.data
            if not nested_json.is_apart(field)
        }
        self._parsing, self._parsing_odd = self._without(self._nested), self._without(self._odd)
        self._known = {settings.source(name) for name in schema.names}
        self.empty = file_columns.no_rows(schema)

    def _without(self, apart: Mapping[str, pa.Field]) -> pyarrow.json.ParseOptions:
        asked = pa.schema([(name, kind) for name, kind in self._asked.items() if name not in apart])
        return pyarrow.json.ParseOptions(
            explicit_schema=asked, newlines_in_values=False,
            unexpected_field_behavior="error" if self._extra == "refuse" else "ignore",
        )  # fmt: skip

    def _read_as(self, field: pa.Field) -> pa.DataType:
        return pa.int64() if field.name in self._settings.epochs else json_type(field.type)

    def parse(self, lines: Sequence[bytes]) -> pa.Table:
        return self.parse_data(b"\n".join(lines) + b"\n")

    def parse_data(self, data: bytes) -> pa.Table:
        """The rows of whole lines, or Refused. Blank lines make no row."""
        if not check_objects(data):
            return self.empty
        try:
            apart, parsing = self._nested, self._parsing
            if self._odd and nested_json.has_odd_floats(data):
                apart, parsing = self._odd, self._parsing_odd
            rest, nested = nested_json.without(data, apart) if apart else (data, {})
            reading = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(rest) + 1, 1024))
            table = pyarrow.json.read_json(pa.BufferReader(rest), reading, parsing)
            for name, raws in nested.items():
                column = nested_json.column_of(raws, apart[name], is_text=self._is_text)
                table = table.append_column(name, column)
            return file_columns.fitted(table, self._settings, self._schema, partial(_lacks, data), from_json)
        except (pa.ArrowException, msgspec.ValidationError, InvalidUsage, ValueError, OverflowError) as error:
            if self._extra == "refuse" and (extra := self._unknown(data)):
                named = ", ".join(map(repr, extra[:5]))
                raise Refused(
                    f"the shard has no column for the field {named} (--extra ignore leaves them out)"
                ) from error
            raise file_columns.said(error) from error

    def _unknown(self, data: bytes) -> list[str]:
        """The fields of one line that no column is for. Where several lines failed, each is looked at by itself."""
        try:
            return [name for name in _objects.decode(data) if name not in self._known]
        except msgspec.DecodeError:
            return []

    def suspect(self, lines: Sequence[bytes]) -> set[int]:
        """Lines that are no objects, or whose values are of another kind than the column's."""
        found = set()
        kinds = {
            self._settings.source(field.name): _ANY if is_json(field) else _first_bytes(self._read_as(field))
            for field in self._schema.data
        }
        ignores = self._extra == "ignore"
        for index, line in enumerate(lines):
            try:
                line.decode()
                row = _objects.decode(line)
            except (ValueError, RecursionError):  # msgspec's errors and UnicodeDecodeError are such
                found.add(index)
                continue
            for name, raw in row.items():
                kind = kinds.get(name)
                if kind is None:
                    if not ignores:
                        found.add(index)
                elif bytes(raw)[:1] not in kind:
                    found.add(index)
        return found


def check_objects(data: bytes) -> int:
    """Return how many lines are not blank. Raises Refused unless each of them is one JSON object in UTF-8.

    Arrow's reader crashes on a line like `null`, takes two objects in one line for two rows, an object over
    two lines for one, and bytes that are no UTF-8 for text. msgspec counts the values; values that are all in braces
    can neither go over a line's end (`}` is never followed by `{`) nor, if there are as many as lines, share one.
    """
    try:
        data.decode()
        count = len(_raws.decode_lines(data))
    except UnicodeDecodeError as error:
        raise Refused(f"this is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise Refused("it is nested too deep") from error
    except msgspec.DecodeError as error:
        raise Refused(str(error)) from error
    if count and count != _braced(data):
        raise Refused("the line is not one JSON object")
    return count


def _braced(data: bytes) -> int:
    """How many lines begin with `{` and end with `}`; -1 if any other is not blank."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == 10)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.concatenate([[0], ends[:-1] + 1])
    ends = np.where((ends > starts) & (array[ends - 1] == 13), ends - 1, ends)
    full = ends > starts
    starts, ends = starts[full], ends[full]
    is_braced = (array[starts] == ord("{")) & (array[ends - 1] == ord("}"))
    if is_braced.all():
        return len(starts)
    odd = [data[starts[index] : ends[index]].strip() for index in np.flatnonzero(~is_braced)]
    if any(line and not (line.startswith(b"{") and line.endswith(b"}")) for line in odd):
        return -1
    return int(is_braced.sum()) + sum(map(bool, odd))


def _lacks(data: bytes, name: str, column: pa.ChunkedArray) -> Flags:
    """In which rows a field, which is null there, is not. Those that may say it are looked at one by one."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    found = np.asarray(pc.is_null(column))
    places = np.flatnonzero(found)
    some = pa.array([lines[place] for place in places.tolist()], pa.binary())
    may = pc.or_(pc.match_substring(some, json.dumps(name, ensure_ascii=False)), pc.match_substring(some, "\\"))
    for place in places[np.asarray(may)].tolist():
        found[place] = name not in _objects.decode(lines[place])
    return found


def json_type(target: pa.DataType) -> pa.DataType:
    """What Arrow reads a plain field of JSON as, of which `from_json` makes values of its type."""
    if _is.is_duration(target):
        return pa.int64()
    return pa.string() if _as_text(target) else target


def from_json(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """The values of a column that was read as `json_type` says. Raises ArrowInvalid or ValidationError."""
    if _is.is_duration(field.type):
        return column.cast(field.type)
    return file_columns.from_text(column, field.type) if _as_text(field.type) else column


def _as_text(type_: pa.DataType) -> bool:
    """Whether JSON holds values of this type as text that Arrow does not read exactly (it would drop a zone)."""
    temporal = _is.is_date(type_) or _is.is_time(type_) or _is.is_timestamp(type_)
    return bool(temporal or _is.is_binary(type_) or _is.is_fixed_size_binary(type_))


_ANY = tuple(bytes([byte]) for byte in b'{["-0123456789tfn')


def _first_bytes(type_: pa.DataType) -> Any:
    """With what byte a JSON value of this type can begin."""
    if _is.is_nested(type_):
        return (b"{" if _is.is_struct(type_) or _is.is_map(type_) else b"[", b"n")
    if _is.is_string(type_):
        return (b'"', b"n")
    if _is.is_boolean(type_):
        return (b"t", b"f", b"n")
    if _is.is_decimal(type_):
        return tuple(bytes([byte]) for byte in b'"-0123456789n')
    return tuple(bytes([byte]) for byte in b"-0123456789n")
