"""Messages become rows of a schema, many at once; those that do not are named, each with why.

Decoders are pure. What they say of a message depends on nothing but that message (and its header): messages that are
decoded together do not change one another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.convert.casts import cast_column
from persist_lib.convert.lines.csv_lines import CsvLines, check_names, header_of
from persist_lib.convert.lines.debezium import DELETES, ChangeLines, parse_change
from persist_lib.convert.lines.file_columns import Refused, Sifted, no_rows, sift, without_nulls
from persist_lib.convert.lines.json_lines import JsonLines
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.kernel.columns import Rows, joined, plain
from persist_lib.schema.schema import Schema
from persist_lib.storage.sources.declared import Decoding

NEWLINE = 10


class Decoded(NamedTuple):
    """The rows, the number of the message that each comes from (going up), and why other messages are bad.

    Messages that say nothing are in neither.
    """

    rows: pa.Table
    lines: npt.NDArray[np.int64]
    bad: dict[int, str]


def decode(decoding: Decoding, schema: Schema, messages: pa.Table) -> Decoded:
    """Decode messages, in their order."""
    values = joined(messages.column("value"))
    problems = _problems(messages)
    missing = np.asarray(pc.is_null(values))
    bad = {**dict.fromkeys(np.flatnonzero(missing).tolist(), "there is no value"), **problems}
    kept = others(len(values), bad)
    match decoding.decoder:
        case "rows":
            found = _rows(decoding, schema, values, kept)
        case "text" | "bytes":
            found = _plain(schema, values, kept)
        case "json" | "avro":  # Avro has become JSON
            parser = JsonLines(decoding, schema)
            found = _lines(parser, values, kept)
        case "csv":
            found = _csv(decoding, schema, messages, values, kept)
        case "pgoutput":
            raise InvalidUsage("changes of a table are not decoded without their state: see postgres.changes")
    sifted = without_nulls(schema, found)
    return Decoded(sifted.table, sifted.lines, dict(sorted({**bad, **sifted.bad}.items())))


def decode_changes(decoding: Decoding, schema: Schema, messages: pa.Table) -> Decoded:
    """Decode changes of Debezium. The rows have the column `_deletes`: whether the key's row is taken away."""
    values = joined(messages.column("value"))
    bad = _problems(messages)
    kept = [n for n in range(len(values)) if n not in bad and values[n].is_valid]
    lines = [_one_line(value) for value in values.take(pa.array(kept, pa.int64())).to_pylist()]
    parser = ChangeLines(decoding, schema)
    try:
        sifted, _ = parser.sift(lines)
    except InvalidUsage:  # a change that empties the table
        emptied = [n for n, line in zip(kept, lines, strict=True) if _empties(line)]
        bad |= dict.fromkeys(emptied, "it says that the source's table was emptied (op t), which is not applied")
        lines = [line for n, line in zip(kept, lines, strict=True) if n not in bad]
        kept = [n for n in kept if n not in bad]
        sifted, _ = parser.sift(lines)
    places = np.array(kept, np.int64)
    bad |= {kept[n]: why for n, why in sifted.bad.items()}
    return Decoded(sifted.table, places[sifted.lines], dict(sorted(bad.items())))


def others(count: int, places: Collection[int]) -> Rows:
    """All places below `count` but these, going up."""
    is_other = np.ones(count, np.bool_)
    is_other[np.fromiter(places, np.int64, len(places))] = False
    return np.flatnonzero(is_other)


def _empties(line: bytes) -> bool:
    """Whether it is a change that empties the table."""
    try:
        parse_change(line)
    except Refused:
        return False
    except InvalidUsage:
        return True
    return False


def _problems(messages: pa.Table) -> dict[int, str]:
    if "problem" not in messages.column_names or messages.column("problem").null_count == messages.num_rows:
        return {}
    return {n: why for n, why in enumerate(messages.column("problem").to_pylist()) if why is not None}


def _lines(parser: JsonLines | CsvLines, values: pa.Array, kept: npt.NDArray[np.int64]) -> Sifted:
    """Parse messages that are texts. Those that are empty say nothing."""
    if len(kept) != len(values):
        values = values.take(pa.array(kept))
    blank = np.asarray(pc.is_in(values, value_set=pa.array([b"", b"\r"], values.type)))
    if blank.any():
        kept, values = kept[~blank], values.filter(pa.array(~blank))
    if not len(values):
        return Sifted(parser.empty, np.array([], np.int64), {})
    data = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values), b"\n")[0].as_py()
    if int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE)) == len(values) - 1:
        try:
            table = parser.parse_data(data + b"\n")
        except Refused:
            table = None
        if table is not None and table.num_rows == len(values):
            return Sifted(table, kept, {})
        lines: Sequence[bytes] = values.to_pylist()
    else:
        lines = [_one_line(value) for value in values.to_pylist()]
    found = sift(parser.parse, parser.suspect, lines, parser.empty)
    order = np.argsort(found.lines, kind="stable")
    table = found.table.take(pa.array(order))
    return Sifted(table, kept[found.lines[order]], {int(kept[n]): why for n, why in found.bad.items()})


def _one_line(value: bytes) -> bytes:
    """JSON over several lines in one; anything else as it is, which then does not parse."""
    if b"\n" not in value:
        return value
    try:
        return msgspec.json.format(value, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return value


def _csv(
    decoding: Decoding, schema: Schema, messages: pa.Table, values: pa.Array, kept: npt.NDArray[np.int64]
) -> Sifted:
    """Parse CSV, by the header that each message came with."""
    headers = plain(messages.column("header")) if _has_headers(messages) else None
    if decoding.names is not None or headers is None:
        names = decoding.names or tuple(decoding.source(name) for name in schema.names)
        return _lines(CsvLines(decoding, schema, names), values, kept)
    found = []
    for header in pc.unique(headers.take(pa.array(kept))).to_pylist():
        mine = kept[np.asarray(pc.equal(headers.take(pa.array(kept)), header))]
        try:
            names = header_of(header.encode(), decoding)
            if (why := check_names(names, decoding, schema)) is not None:
                raise InvalidUsage(f"of the file: {why}")
            found.append(_lines(CsvLines(decoding, schema, names), values, mine))
        except InvalidUsage as error:
            found.append(Sifted(no_rows(schema), np.array([], np.int64), dict.fromkeys(mine.tolist(), error.message)))
    return _together(schema, found)


def _has_headers(messages: pa.Table) -> bool:
    return "header" in messages.column_names and messages.column("header").null_count == 0


def _together(schema: Schema, found: Sequence[Sifted]) -> Sifted:
    if len(found) == 1:
        return found[0]
    lines = np.concatenate([np.array([], np.int64), *(one.lines for one in found)])
    order = np.argsort(lines, kind="stable")
    table = pa.concat_tables([no_rows(schema), *(one.table for one in found)]).take(pa.array(order))
    bad: dict[int, str] = {}
    for one in found:
        bad |= one.bad
    return Sifted(table, lines[order], bad)


def _plain(schema: Schema, values: pa.Array, kept: npt.NDArray[np.int64]) -> Sifted:
    """One column that has the whole message."""
    (field,) = schema.data
    values = values.take(pa.array(kept))
    if not pa.types.is_string(field.type):
        return Sifted(pa.table({field.name: values}), kept, {})

    def parse(some: Sequence[Any]) -> pa.Table:
        try:
            texts = values.take(pa.array(some, pa.int64())).cast(pa.string())
        except pa.ArrowException as error:
            raise Refused("this is not UTF-8") from error
        return pa.table({field.name: pc.utf8_rtrim(texts, "\r")})

    found = sift(parse, lambda _: (), range(len(values)), no_rows(schema))  # type: ignore[arg-type]
    return Sifted(found.table, kept[found.lines], {int(kept[n]): why for n, why in found.bad.items()})


def _rows(decoding: Decoding, schema: Schema, values: pa.Array, kept: npt.NDArray[np.int64]) -> Sifted:
    """Structs, whose fields are cast to the columns."""
    if not pa.types.is_struct(values.type):
        return Sifted(no_rows(schema), kept[:0], dict.fromkeys(kept.tolist(), "the message is no row"))
    names = [field.name for field in values.type]
    if (why := check_names(names, decoding, schema)) is not None:
        return Sifted(no_rows(schema), kept[:0], dict.fromkeys(kept.tolist(), f"of the file: {why}"))

    def parse(some: Sequence[Any]) -> pa.Table:
        chosen = values.take(pa.array(some, pa.int64()))
        fields = dict(zip(names, chosen.flatten(), strict=True))
        columns = []
        for field in schema.data:
            column = fields.get(decoding.source(field.name))
            column = pa.nulls(len(chosen), field.type) if column is None else column
            try:
                columns.append(cast_column(pa.chunked_array([column]), field))
            except (InvalidUsage, SchemaMismatch) as error:
                raise Refused(f"column {field.name}: {error.fields.get('problem', 'a value')} does not fit") from error
        return pa.table(columns, names=schema.names)

    found = sift(parse, lambda _: (), kept.tolist(), no_rows(schema))
    return Sifted(found.table, kept[found.lines], {int(kept[n]): why for n, why in found.bad.items()})


__all__ = ["DELETES", "Decoded", "decode", "decode_changes"]
