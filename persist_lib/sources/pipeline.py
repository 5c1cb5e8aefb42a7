"""The pipeline of a source: a pure function of the state, and of messages with their times, to updates and errors.

The state is what the output has as of just before the first time. However many times are given at once, the answer is
that of giving each time alone, in order.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import did_you_mean, shown
from persist_lib.convert.lines.file_columns import Sifted
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import array_of, integers, joined, plain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, TIME_FIELD, Schema
from persist_lib.sources.decoding import READS, Decoding, NewFields, imported, problems_of
from persist_lib.sources.envelopes import WHOLE_ROWS, Lookup, Meaning
from persist_lib.sources.schema_registry import Written
from persist_lib.sources.transactions import WAITING, hold_back

_WHERE = {"partition": "string not null", "address": "uint64 not null"}
ERRORS = Schema(key=_WHERE, value={"reason": "string not null", "raw": "binary"}, times="ms")
RAW = Schema(
    key=_WHERE,
    value={
        "key": "binary", "header": "string", "value": "binary", "problem": "string", "headers": "string",
        "timestamp": "timestamp[ms, UTC]",
    },
    times="ms",
)  # fmt: skip
"""All that a message can have, so that it can be decoded again."""
MOST_RAW = 64 << 10
"""Bytes of a bad message that are kept in the error collection. `keep_raw` keeps all of it."""
ABOUT: Mapping[str, pa.DataType] = {
    "partition": pa.string(), "address": pa.uint64(), "time": pa.timestamp("ms", "UTC"), "key": pa.binary(),
    "headers": pa.string(), "timestamp": pa.timestamp("ms", "UTC"),
}  # fmt: skip
NO_SCHEMAS: Mapping[int, Written] = {}
Transform = Callable[[pa.Table], pa.Table]
NO_OUTPUT = "no output is for it: it neither begins a transaction nor ends one"
"""Why a message of a partition without an output is bad: the topic of transactions is one."""


def no_state(_keys: pa.Table | None) -> pa.Table:
    """For rows that are only added, which need no state."""
    raise AssertionError("rows that are only added need no state")


class Ready(NamedTuple):
    """Messages that wait for nothing: as errors name them, and as they are `read`. Avro is JSON then, by `decoding`;
    other messages are decoded as each output is declared.

    And consolidated updates of the raw messages, and of what waits for the rest of its transaction.
    """

    messages: pa.Table
    read: pa.Table
    decoding: Decoding | None
    raw: pa.Table
    waiting: pa.Table

    def only(self, which: pa.Array) -> Self:
        """Those messages of which this is true."""
        messages = self.messages.filter(which)
        return self._replace(
            messages=messages, read=messages if self.read is self.messages else self.read.filter(which)
        )


class Made(NamedTuple):
    """What messages amount to: consolidated updates of the output, of the errors, of the raw messages, and of what
    waits for the rest of its transaction. Halfway, `output` has decoded rows, in their order and with their times.
    """

    output: pa.Table
    errors: pa.Table
    raw: pa.Table
    waiting: pa.Table


class Pipeline:
    """What is declared of a source's messages, ready to be applied to some.

    `decoded` are the columns that messages have, where a transformation makes those of `schema` of them. `keyless`:
    they are changes of a table without a primary key. It raises InvalidUsage for what does not fit together.
    """

    def __init__(
        self, decoding: Decoding, meaning: Meaning, schema: Schema, decoded: Schema | None = None,
        *, keyless: bool = False,
    ) -> None:  # fmt: skip
        self.decoding, self.meaning, self.schema = decoding, meaning, schema
        self._rows = WHOLE_ROWS if keyless else meaning.rows
        _check_encoding(decoding)
        self._transform: Transform | None = None if meaning.transform is None else imported(meaning.transform)
        self.decoded = _decoded(meaning, schema, decoded, is_keyed=decoding.key is not None)
        meaning.rows.check(decoding)
        _check_taking(decoding, meaning)
        keys = [] if decoding.key is None else self.decoded.key_names
        _check_one_column(decoding.decoder, self.decoded, [name for name in self.decoded.names if name not in keys])
        if decoding.key is not None:
            _check_one_column(decoding.key, self.decoded, keys)
        self.needs_avro = "avro" in {decoding.decoder, decoding.key}
        if self.needs_avro:
            from persist_lib.sources.avro import check  # noqa: PLC0415 - fastavro is an extra

            check(decoding)

    def ready(
        self, messages: pa.Table, schemas: Mapping[int, Written] = NO_SCHEMAS, waiting: pa.Table | None = None
    ) -> Ready:
        """Keep messages, and hold back what waits. For all outputs of a source at once: they share transactions.

        Messages are in the order of their times, partitions and addresses. `schemas` are those of a registry, by their
        ids: all that the messages name. `waiting` is what waits as of just before the first time.
        """
        if not messages.num_rows:
            return Ready(messages, messages, None, RAW.updates.empty_table(), WAITING.updates.empty_table())
        raw = raw_of(messages) if self.meaning.keep_raw else RAW.updates.empty_table()
        decoding, read = self._as_json(messages, schemas)
        held = WAITING.updates.empty_table()
        if self.meaning.transactions is not None:
            state = WAITING.contents.empty_table() if waiting is None else waiting
            messages, held = hold_back(self.meaning.transactions, read, state)
            read = messages
        return Ready(messages, read, decoding, raw, held)

    def apply(self, ready: Ready, lookup: Lookup) -> Made:
        """Make updates of messages that are ready."""
        if not ready.messages.num_rows:
            return Made(self.schema.updates.empty_table(), ERRORS.updates.empty_table(), ready.raw, ready.waiting)
        found, lookup = self.rows_of(ready, lookup)
        return found._replace(output=self.updates_of(found.output, lookup))

    def rows_of(self, ready: Ready, lookup: Lookup = no_state) -> tuple[Made, Lookup]:
        """The half of `apply` that needs no state of the output, but for the envelope `changes`; and the state."""
        messages = ready.messages
        found, lookup = self._rows.decode(
            ready.decoding or self.decoding, self.decoded, self.schema, ready.read, lookup
        )
        rows = self._with_places(found, messages)
        rows = self._transformed(rows, has_diffs=DIFF in messages.column_names)
        return Made(rows, _errors_of(messages, found.bad), ready.raw, ready.waiting), lookup

    def _as_json(self, messages: pa.Table, schemas: Mapping[int, Written]) -> tuple[Decoding | None, pa.Table]:
        if not self.needs_avro:
            return None, messages
        from persist_lib.sources.avro import as_json, new_fields  # noqa: PLC0415 - fastavro is an extra

        if self.decoding.takes_fields:
            known = {self.decoding.source(name) for name in (*self.decoded.names, *self.schema.key_names)}
            if new := new_fields(self.decoding, known, messages, schemas, of_change=self.meaning.rows.of_changes):
                names = ", ".join(map(repr, new))
                raise NewFields(f"messages have new fields: {names}. They are taken at the next look", columns=new)
        return as_json(self.decoding, messages, schemas)

    def updates_of(self, rows: pa.Table, lookup: Lookup) -> pa.Table:
        """The half that may need it: rows that go up in time become updates. Each key's are by themselves."""
        return self._rows.updates(self.schema, rows, self.meaning.deletes_in(self.decoding), lookup)

    def _with_places(self, found: Sifted, messages: pa.Table) -> pa.Table:
        """The rows with the times (and diffs) of their messages, and with what is asked for of their places."""
        places = pa.array(found.lines, pa.int64())
        rows = found.table.append_column(TIME_FIELD, messages.column(TIME).take(places))
        for name, about in self.meaning.include.items():
            name_there = TIME if about == "time" else about
            if name_there not in messages.column_names:
                rows = rows.append_column(name, pa.nulls(rows.num_rows, ABOUT[about]))
                continue
            column = plain(messages.column(name_there)).take(places)
            if about == "time":
                column = column.cast(pa.int64())
            rows = rows.append_column(name, column.cast(ABOUT[about]))
        if DIFF in messages.column_names:
            rows = rows.append_column(DIFF_FIELD, joined(messages.column(DIFF)).take(places))
        return rows

    def _transformed(self, rows: pa.Table, *, has_diffs: bool) -> pa.Table:
        if self._transform is None:
            return rows
        try:
            made = self._transform(rows)
        except Exception as error:
            raise InvalidUsage(f"the transform {self.meaning.transform} failed: {error!r}") from error
        if not isinstance(made, pa.Table) or TIME not in made.column_names:
            raise InvalidUsage(
                f"the transform {self.meaning.transform} must return a pyarrow.Table of rows with _time: got "
                f"{shown(made)}"
            )
        if has_diffs and DIFF not in made.column_names:
            raise InvalidUsage(f"the transform {self.meaning.transform} must pass on _diff: rows also go")
        if made.num_rows > 1 and self.meaning.rows.by_key:
            times = integers(made.column(TIME))
            if (times[1:] < times[:-1]).any():
                raise InvalidUsage(f"the transform {self.meaning.transform} must keep rows in the order of _time")
        return made


RoleOf = Callable[[str], str]
"""For which output a partition's messages are."""


def made_of(
    pipelines: Mapping[str, Pipeline], role_of: RoleOf, messages: pa.Table,
    lookup: Callable[[str, pa.Table | None], pa.Table], schemas: Mapping[int, Written] = NO_SCHEMAS,
    waiting: pa.Table | None = None,
) -> dict[str, pa.Table]:  # fmt: skip
    """What messages of a source amount to: updates by the role of the collection.

    `pipelines` are those of its outputs, by their roles. What is for none of them is bad. `lookup` also gets the role;
    the others are as in `Pipeline.ready`.
    """
    ready = next(iter(pipelines.values())).ready(messages, schemas, waiting)
    found = {"raw": ready.raw, "waiting": ready.waiting}
    errors: list[pa.Table] = []
    for role, some in _by_role(ready, pipelines, role_of):
        if role in pipelines:
            made = pipelines[role].apply(some, partial(lookup, role))
            found[role] = made.output
            errors.append(made.errors)
        else:
            bad = {**dict.fromkeys(range(some.messages.num_rows), NO_OUTPUT), **problems_of(some.read)}
            errors.append(_errors_of(some.messages, bad))
    return {**found, "errors": errors[0] if len(errors) == 1 else consolidate(ERRORS, pa.concat_tables(errors))}


def _by_role(ready: Ready, roles: Iterable[str], role_of: RoleOf) -> Iterator[tuple[str, Ready]]:
    """What is ready for each of these, also if it is nothing, and for others that partitions are for."""
    column = joined(ready.messages.column("partition"))
    every: list[str] = pc.unique(column).to_pylist()
    partitions: dict[str, list[str]] = {role: [] for role in roles}
    for one in every:
        partitions.setdefault(role_of(one), []).append(one)
    for role, its in partitions.items():
        is_whole = len(its) == len(every)
        yield role, ready if is_whole else ready.only(pc.is_in(plain(column), value_set=pa.array(its, pa.string())))


def _check_encoding(decoding: Decoding) -> None:
    """Refuse an encoding in which a line's end, or a delimiter, is not the byte that it is in ASCII."""
    ascii_ = bytes(range(128))
    try:
        is_fit = ascii_.decode(decoding.encoding) == ascii_.decode()
    except (LookupError, UnicodeError):
        is_fit = False
    if not is_fit:
        raise InvalidUsage(
            f"encoding must be one with the bytes of ASCII, such as latin-1 or cp1252, as messages are lines: got "
            f"{shown(decoding.encoding)}. Convert the files to UTF-8"
        )
    if not decoding.reads.has_encoding and codecs.lookup(decoding.encoding).name != "utf-8":
        raise InvalidUsage(f"encoding is for CSV, and {decoding.decoder} is read as UTF-8: leave it out")


def _check_taking(decoding: Decoding, meaning: Meaning) -> None:
    if not decoding.takes_fields:
        return
    if meaning.transform is not None:
        raise InvalidUsage('extra="add" gives the output all fields, and a transform makes its rows: leave one out')
    if meaning.keep_raw:
        raise InvalidUsage(
            'extra="add" takes fields as they come, and keep_raw keeps messages to decode them by other columns later: '
            "leave one out"
        )


def _check_one_column(decoder: str, schema: Schema, names: Sequence[str]) -> None:
    if (wanted := READS[decoder].fills) is None:
        return
    if len(names) != 1:
        raise InvalidUsage(
            f"the decoder {decoder!r} fills one column, and these are to be filled: {list(names)}. "
            'Fill the others with include=, as in {"line": "address"}'
        )
    if schema.data.field(names[0]).type != wanted:
        raise InvalidUsage(f"the decoder {decoder!r} fills a column of type {wanted}")


def _decoded(meaning: Meaning, schema: Schema, decoded: Schema | None, *, is_keyed: bool) -> Schema:
    if unknown := [name for name in meaning.include if name not in schema.names and meaning.transform is None]:
        raise InvalidUsage(
            f"include: the output has no column {unknown[0]!r}. {did_you_mean(unknown[0], schema.names)}"
            f"It has {schema.names}"
        )
    for name, about in meaning.include.items():
        if name in schema.names and meaning.transform is None and schema.data.field(name).type != ABOUT[about]:
            raise InvalidUsage(f"include: column {name!r} must be {ABOUT[about]} to hold what {about!r} says")
    if decoded is not None:
        if meaning.transform is None:
            raise InvalidUsage("messages have the columns of the output, unless a transform makes them: drop decoded=")
        return decoded
    if (meaning.rows.brings_key or is_keyed) and set(meaning.include) & set(schema.key_names):
        raise InvalidUsage("include: a message brings its key itself here")
    if meaning.deletes is not None and is_keyed:
        raise InvalidUsage("deletes: a message without a value takes its key's row away here; leave it out")
    if meaning.deletes is not None and meaning.deletes in schema.names:
        raise InvalidUsage(f"deletes: {meaning.deletes!r} is a column of the output; name one that only messages have")
    kept = [column for column in schema.columns if column.name not in meaning.include]
    if not kept:
        raise InvalidUsage("include: no column is left for what is in the messages")
    types = {column.name: column.said for column in kept}
    if meaning.deletes is not None and not is_keyed:
        types[meaning.deletes] = "bool"
    return meaning.rows.columns(types, schema.key_names, is_keyed=is_keyed)


_KEPT = ("partition", "address", "value", TIME, DIFF)


def _errors_of(messages: pa.Table, found: Mapping[int, str]) -> pa.Table:
    """The errors of bad messages, by their numbers, with why each is bad."""
    if not found:
        return ERRORS.updates.empty_table()
    places = pa.array(list(found), pa.int64())
    if DIFF in messages.column_names:  # a bad row that goes was bad when it came
        places = places.filter(pc.greater(joined(messages.column(DIFF)).take(places), 0))
    reasons = [found[place] for place in places.to_pylist()]
    bad = messages.select([name for name in _KEPT if name in messages.column_names]).take(places)
    values = joined(bad.column("value"))
    if pa.types.is_struct(values.type):
        raw = pa.array([_raw_of(row) for row in values], pa.binary())
    else:
        raw = pc.binary_slice(values, 0, MOST_RAW)
    return _at_places(ERRORS, bad, {"reason": pa.array(reasons, pa.string()), "raw": raw})


def _raw_of(row: pa.StructScalar) -> bytes | None:
    """A bad row as JSON. A text that is no UTF-8 becomes base64; another value that Python does not have is named."""
    if not row.is_valid:
        return None
    found: dict[str, Any] = {}
    for place, field in enumerate(row.type):
        value = row[place]
        if pa.types.is_string(field.type):
            value = value.cast(pa.binary())
        try:
            found[field.name] = _text_of(value.as_py()) if pa.types.is_string(field.type) else value.as_py()
        except (ValueError, OverflowError):
            found[field.name] = f"no {field.type}"
    return msgspec.json.encode(found, enc_hook=str)


def _text_of(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def raw_of(messages: pa.Table) -> pa.Table:
    """Updates of the raw messages. Raises InvalidUsage where they are rows."""
    values = joined(messages.column("value"))
    if not pa.types.is_binary(values.type):
        raise InvalidUsage("keep_raw keeps bytes, and these messages are rows: their files are what is raw")
    count = messages.num_rows
    found: dict[str, pa.Array] = {"value": values}
    for field in RAW.data:
        name = field.name
        if name not in {*_WHERE, "value"}:
            there = name in messages.column_names
            found[name] = plain(messages.column(name)) if there else pa.nulls(count, field.type)
    return _at_places(RAW, messages, found)


def _at_places(schema: Schema, messages: pa.Table, found: Mapping[str, pa.Array]) -> pa.Table:
    """Rows about messages, each at its message's time and place."""
    ones = array_of(np.ones(messages.num_rows, np.int64))
    columns = {
        "partition": plain(messages.column("partition")), "address": joined(messages.column("address")), **found,
        TIME: joined(messages.column(TIME)),
        DIFF: joined(messages.column(DIFF)) if DIFF in messages.column_names else ones,
    }  # fmt: skip
    table = pa.table([columns[name] for name in schema.updates.names], schema=schema.updates)
    return consolidate(schema, table)
