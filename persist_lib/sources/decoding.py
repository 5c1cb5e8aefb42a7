"""Messages become rows of a schema, many at once; those that do not are named, each with why.

Decoders are pure. What they say of a message depends on nothing but that message (and its header): messages that are
decoded together do not change one another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.convert.casts import cast_column
from persist_lib.convert.lines.csv_lines import CsvLines, check_names, header_of
from persist_lib.convert.lines.debezium import DELETES, ChangeLines, parse_change
from persist_lib.convert.lines.file_columns import (
    Changes,
    EpochUnit,
    Refused,
    Sifted,
    defaults_of,
    no_rows,
    sift,
    without_nulls,
)
from persist_lib.convert.lines.json_lines import JsonLines
from persist_lib.errors import Determinate, InvalidUsage, SchemaMismatch
from persist_lib.kernel.columns import Rows, array_of, joined, plain
from persist_lib.schema.schema import Column, Schema
from persist_lib.sources.schema_registry import Registry

Decoder = Literal["json", "csv", "text", "bytes", "rows", "avro", "pgoutput"]
KeyDecoder = Literal["json", "text", "bytes", "avro"]
DECODERS: Mapping[str, Decoder] = {
    "jsonl": "json", "csv": "csv", "text": "text", "parquet": "rows", "avro": "avro", "bytes": "bytes",
}  # fmt: skip
"""What decodes the messages of a format."""
NEWLINE = 10
WHAT_TO_DO = (
    "Nothing of it was written. Declare a source of the messages under another name, with the columns that it is to "
    'have and extra="ignore", and drop this one once its history is not needed'
)
"""About fields that messages have, and that a source cannot take."""


class Decoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a message becomes a row. `decoder` is by default what fits the files' format.

    - "json": an object with the columns as names. "csv": the columns of the header, or `names`.
    - "text" and "bytes": one column of that type has it all.
    - "rows": the message is a struct already (Parquet). "pgoutput": it is a change of PostgreSQL's log.
    - "avro": a record. `registry` says where the schemas of messages are; files have theirs. `avro` is a schema to read
      by, as JSON: its defaults, aliases and promotions hold. Without registry and file, messages were written by it.

    `columns` says what a column is called in the messages, where that is something else. `extra` and `missing` say what
    becomes of fields without a column, and of columns that a CSV header or a struct does not have; `epochs` names
    columns of moments that are numbers, and their unit. `key` says how the key columns are read from the keys of
    messages, where these have some (Kafka): "json" (an object, or the value of the only column), "text" or "bytes".
    With `json_text`, a text in a column of type json is that of a document, and not a document that is a text. So it
    always is in Avro and in changes of Debezium, which have no other JSON.

    With `extra="add"` a table of PostgreSQL gives the source the columns that it gets later, too, and so do the schemas
    that Avro was written with; `added` is set by the source of a table then: by which place of the log each was there.
    """

    decoder: Decoder = "json"
    key: KeyDecoder | None = None
    columns: Mapping[str, str] = {}
    names: tuple[str, ...] | None = None
    delimiter: str = ","
    quote: str = '"'
    nulls: tuple[str, ...] = ("",)
    encoding: str = "utf-8"
    extra: Literal["refuse", "ignore", "add"] = "refuse"
    missing: Literal["refuse", "null"] = "refuse"
    epochs: Mapping[str, EpochUnit] = {}
    avro: str | None = None
    registry: Registry | None = None
    added: Mapping[str, int] = {}
    json_text: bool = False

    def __post_init__(self) -> None:
        if self.decoder not in get_args(Decoder):
            raise InvalidUsage(f"decoder must be one of {get_args(Decoder)}: got {shown(self.decoder)}")
        if self.key is not None and self.key not in get_args(KeyDecoder):
            raise InvalidUsage(f"key must be one of {get_args(KeyDecoder)}: got {shown(self.key)}")
        if "avro" not in {self.decoder, self.key} and (self.avro is not None or self.registry is not None):
            raise InvalidUsage('avro and registry are about Avro: pass decoder="avro" or key="avro"')
        if self.key == "avro" and self.registry is None:
            raise InvalidUsage('key="avro" needs a registry, as nothing else says how a key was written')
        for name in ("delimiter", "quote"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text in "\r\n":
                raise InvalidUsage(f"{name} is one ASCII character and no line end: got {shown(text)}")
        if self.delimiter == self.quote:
            raise InvalidUsage(f"delimiter and quote must differ: both are {shown(self.quote)}")
        for name, known in (("extra", ("refuse", "ignore", "add")), ("missing", ("refuse", "null"))):
            if getattr(self, name) not in known:
                raise InvalidUsage(f"{name} must be one of {known}: got {shown(getattr(self, name))}")
        if self.extra == "add" and not (self.reads.is_log or self.decoder == "avro"):
            raise InvalidUsage(
                'extra="add" is for tables of PostgreSQL and for Avro, which say what type a new column has'
            )
        if self.extra == "add" and self.avro is not None:
            raise InvalidUsage('avro says which fields messages are read with, and extra="add" takes all: drop one')

    @property
    def multiline(self) -> bool:
        """A message is one line."""
        return False

    @property
    def changes(self) -> Changes:
        """The last change of a key decides."""
        return "by-key"

    @property
    def takes_fields(self) -> bool:
        """Whether fields that messages get later become columns of the output."""
        return self.extra == "add" and self.decoder == "avro"

    @property
    def reads(self) -> Reads:
        """What its decoder does."""
        return READS[self.decoder]

    def source(self, column: str) -> str:
        """The name that a column has in the messages."""
        return self.columns.get(column, column)


class NewFields(Determinate):
    """Messages have fields that are to become columns first. Fields: columns (their types, by name)."""

    @property
    def columns(self) -> Mapping[str, str]:
        columns: Any = self.fields["columns"]
        return dict(columns)


def decode(decoding: Decoding, schema: Schema, messages: pa.Table) -> Sifted:
    """Decode messages, in their order. Those that say nothing are neither rows nor bad; the lines are messages."""
    values = joined(messages.column("value"))
    problems = problems_of(messages)
    missing = np.asarray(pc.is_null(values))
    bad = {**dict.fromkeys(np.flatnonzero(missing).tolist(), "there is no value"), **problems}
    kept = others(len(values), bad)
    sifted = without_nulls(schema, decoding.reads.sift(decoding, schema, messages, kept))
    return sifted._replace(bad=dict(sorted({**bad, **sifted.bad}.items())))


def decode_changes(decoding: Decoding, schema: Schema, messages: pa.Table) -> Sifted:
    """Decode changes of Debezium. The rows have the column `_deletes`: whether the key's row is taken away."""
    values = joined(messages.column("value"))
    bad = problems_of(messages)
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
    found = sifted.at(np.array(kept, np.int64))
    return found._replace(bad=dict(sorted({**bad, **found.bad}.items())))


def others(count: int, places: Collection[int]) -> Rows:
    """All places below `count` but these, going up."""
    is_other = np.ones(count, np.bool_)
    is_other[np.fromiter(places, np.int64, len(places))] = False
    return np.flatnonzero(is_other)


def _empties(line: bytes) -> bool:
    try:
        parse_change(line)
    except Refused:
        return False
    except InvalidUsage:
        return True
    return False


def problems_of(messages: pa.Table) -> dict[int, str]:
    """What is wrong with messages, as those who read them found, by their numbers."""
    if "problem" not in messages.column_names or messages.column("problem").null_count == messages.num_rows:
        return {}
    return {n: why for n, why in enumerate(messages.column("problem").to_pylist()) if why is not None}


def _json(decoding: Decoding, schema: Schema, messages: pa.Table, kept: Rows) -> Sifted:
    return _lines(JsonLines(decoding, schema, is_text=decoding.json_text), joined(messages.column("value")), kept)


def _changes(_decoding: Decoding, _schema: Schema, _messages: pa.Table, _kept: Rows) -> Sifted:
    raise InvalidUsage("changes of a table are not decoded without their state: see postgres.changes")


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
    return sift(parser.parse, parser.suspect, lines, parser.empty).in_order().at(kept)


def _one_line(value: bytes) -> bytes:
    """JSON over several lines in one; anything else as it is, which then does not parse."""
    if b"\n" not in value:
        return value
    try:
        return msgspec.json.format(value, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return value


def _csv(decoding: Decoding, schema: Schema, messages: pa.Table, kept: Rows) -> Sifted:
    values = joined(messages.column("value"))
    has_headers = "header" in messages.column_names and messages.column("header").null_count == 0
    if decoding.names is not None or not has_headers:
        names = decoding.names or tuple(decoding.source(name) for name in schema.names)
        return _lines(CsvLines(decoding, schema, names), values, kept)
    headers, found = plain(messages.column("header")), []
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


def _together(schema: Schema, found: Sequence[Sifted]) -> Sifted:
    if len(found) == 1:
        return found[0]
    lines = np.concatenate([np.array([], np.int64), *(one.lines for one in found)])
    table = pa.concat_tables([no_rows(schema), *(one.table for one in found)])
    return Sifted(table, lines, {n: why for one in found for n, why in one.bad.items()}).in_order()


def _plain(_decoding: Decoding, schema: Schema, messages: pa.Table, kept: Rows) -> Sifted:
    (field,) = schema.data
    values = joined(messages.column("value")).take(pa.array(kept))
    if not pa.types.is_string(field.type):
        return Sifted(pa.table({field.name: values}), kept, {})

    def parse(some: Sequence[Any]) -> pa.Table:
        try:
            texts = values.take(pa.array(some, pa.int64())).cast(pa.string())
        except pa.ArrowException as error:
            raise Refused("this is not UTF-8") from error
        return pa.table({field.name: pc.utf8_rtrim(texts, "\r")})

    return sift(parse, lambda _: (), range(len(values)), no_rows(schema)).at(kept)  # type: ignore[arg-type]


def _rows(decoding: Decoding, schema: Schema, messages: pa.Table, kept: Rows) -> Sifted:
    values = joined(messages.column("value"))
    if not pa.types.is_struct(values.type):
        return Sifted(no_rows(schema), kept[:0], dict.fromkeys(kept.tolist(), "the message is no row"))
    names = [field.name for field in values.type]
    if (why := check_names(names, decoding, schema)) is not None:
        return Sifted(no_rows(schema), kept[:0], dict.fromkeys(kept.tolist(), f"of the file: {why}"))

    def parse(some: Sequence[Any]) -> pa.Table:
        chosen = values.take(pa.array(some, pa.int64()))
        try:
            chosen.validate(full=True)  # Parquet's files may hold any bytes as text
        except pa.ArrowException as error:  # not what it says: that depends on the messages beside
            raise Refused("it has a text that is no UTF-8, or another value that its type does not have") from error
        fields = dict(zip(names, chosen.flatten(), strict=True))
        columns = []
        for field in schema.data:
            column = fields.get(decoding.source(field.name))
            if column is None:
                default = defaults_of(schema).get(field.name)
                column = pa.nulls(len(chosen), field.type) if default is None else pa.repeat(default, len(chosen))
            try:
                columns.append(cast_column(pa.chunked_array([column]), field))
            except (InvalidUsage, SchemaMismatch) as error:
                raise Refused(f"column {field.name}: {error.fields.get('problem', 'a value')} does not fit") from error
        return pa.table(columns, names=schema.names)

    return sift(parse, lambda _: (), kept.tolist(), no_rows(schema)).at(kept)


class Reads(NamedTuple):
    """What a decoder does: `sift` makes rows of the messages at some places.

    `fills` is the type of the one column that has all of a message, where it is one; `is_object`: a message has the
    columns as names; `is_log`: it needs what the output has; `counts` is what addresses in files are.
    """

    sift: Callable[[Decoding, Schema, pa.Table, Rows], Sifted]
    fills: pa.DataType | None = None
    is_object: bool = False
    is_log: bool = False
    has_encoding: bool = False
    counts: str = "bytes"


READS: Mapping[str, Reads] = {
    "json": Reads(_json, is_object=True),
    "avro": Reads(_json, is_object=True),  # it has become JSON
    "csv": Reads(_csv, has_encoding=True),
    "text": Reads(_plain, fills=pa.string()),
    "bytes": Reads(_plain, fills=pa.binary()),
    "rows": Reads(_rows, counts="rows"),
    "pgoutput": Reads(_changes, is_log=True),
}


def decode_keyed(decoding: Decoding, schema: Schema, messages: pa.Table, *, deletes: bool) -> Sifted:
    """Decode messages. With `deletes`, one without a value takes its key's row away, as the column `_deletes` says.

    The fields of the key may be in the value too. Then they say nothing there.
    """
    values = joined(messages.column("value"))
    is_deletion = np.asarray(pc.is_null(values)) & deletes
    if "problem" in messages.column_names:
        is_deletion &= np.asarray(pc.is_null(joined(messages.column("problem"))))
    keys = _keys(decoding, schema, messages)
    found = _values(decoding, schema, messages, np.flatnonzero(~is_deletion))
    has_key, has_rest = np.zeros(len(values), np.bool_), is_deletion.copy()
    has_key[keys.lines] = has_rest[found.lines] = True
    both = np.flatnonzero(has_key & has_rest)
    key_rows = keys.table.take(array_of(np.searchsorted(keys.lines, both)))
    # A deletion is the row of no message: its values are null.
    at = np.searchsorted(found.lines, both)
    is_there = ~is_deletion[both]
    rows = found.table.take(pa.array(at, mask=~is_there))
    columns = [(key_rows if name in schema.key_names else rows).column(name) for name in schema.names]
    table = pa.table([*columns, pa.array(~is_there)], names=[*schema.names, DELETES])
    return Sifted(table, both, dict(sorted({**found.bad, **keys.bad}.items())))


def _keys(decoding: Decoding, schema: Schema, messages: pa.Table) -> Sifted:
    count = messages.num_rows
    keys = joined(messages.column("key")) if "key" in messages.column_names else pa.nulls(count, pa.binary())
    of_key = [column for column in schema.columns if column.name in schema.key_names]
    if decoding.key == "json" and len(of_key) == 1:
        opening = msgspec.json.encode({decoding.source(of_key[0].name): 0}).removesuffix(b"0}")
        is_object = pc.equal(pc.binary_slice(keys, 0, 1), b"{")
        keys = pc.if_else(is_object, keys, pc.binary_join_element_wise(opening, keys, b"}", b""))
    how = msgspec.structs.replace(decoding, decoder=decoding.key or "json", key=None)
    found = decode(how, Schema(key=of_key), pa.table({"value": keys}))
    bad = {n: f"the key: {why}" if keys[n].is_valid else "there is no key" for n, why in found.bad.items()}
    if len(found.lines) + len(bad) < count:
        bad |= dict.fromkeys(others(count, [*found.lines.tolist(), *bad]).tolist(), "the key is empty")
    return found._replace(bad=bad)


def _values(decoding: Decoding, schema: Schema, messages: pa.Table, places: Rows) -> Sifted:
    columns = [column for column in schema.columns if column.name not in schema.key_names]
    if decoding.decoder == "json":
        columns += [Column(one.name, one.type) for one in schema.columns if one.name in schema.key_names]
    if not columns:
        return Sifted(pa.table({}), places, {})
    how = msgspec.structs.replace(decoding, key=None)
    return decode(how, Schema(key=columns), messages.take(array_of(places))).at(places)


def imported(name: str) -> Any:
    """The function of "package.module:function". Raises InvalidUsage."""
    module, _, function = parse_function_name(name, "the function").partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidUsage(f"there is no function {name!r} here: {error}. Install or mend it") from error
    if not callable(found):
        raise InvalidUsage(f"{name!r} is no function")
    return found


def parse_function_name(name: object, what: str) -> str:
    """The name of a function as it is declared. Raises InvalidUsage."""
    module, _, function = str(name).partition(":")
    if not isinstance(name, str) or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise InvalidUsage(f'{what} must be a text like "package.module:function": got {shown(name)}')
    return name
