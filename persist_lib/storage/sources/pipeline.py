"""The pipeline of a source: a pure function of the state, and of messages with their times, to updates and errors.

The state is what the output has as of just before the first time. However many times are given at once, the answer is
that of giving each time alone, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import array_of, integers, joined, plain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, TIME_FIELD, Schema
from persist_lib.storage.sources.declared import Decoding, Meaning, imported
from persist_lib.storage.sources.decoding import DELETES, Decoded, decode, decode_changes
from persist_lib.storage.sources.envelopes import Lookup, added, exactly, upserted
from persist_lib.storage.sources.postgres.changes import decode_table

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
"""All that a message can have, so that it can be decoded anew."""
MOST_RAW = 64 << 10
"""Bytes of a bad message that are kept in the error collection. `keep_raw` keeps all of it."""
ABOUT: Mapping[str, pa.DataType] = {"partition": pa.string(), "address": pa.uint64(), "time": pa.timestamp("ms", "UTC")}
Transform = Callable[[pa.Table], pa.Table]


class Made(NamedTuple):
    """What messages amount to: consolidated updates of the output, of the errors, and of the raw messages."""

    output: pa.Table
    errors: pa.Table
    raw: pa.Table


class Pipeline:
    """What is declared of a source's messages, ready to be applied to some.

    `decoded` are the columns that messages have, where a transformation makes those of `schema` of them. It raises
    InvalidUsage for what does not fit together.
    """

    def __init__(self, decoding: Decoding, meaning: Meaning, schema: Schema, decoded: Schema | None = None) -> None:
        self.decoding, self.meaning, self.schema = decoding, meaning, schema
        self._transform: Transform | None = None if meaning.transform is None else imported(meaning.transform)
        self.decoded = _decoded(meaning, schema, decoded)
        if decoding.decoder in {"text", "bytes"} and len(self.decoded.names) != 1:
            raise InvalidUsage(
                f"the decoder {decoding.decoder!r} fills one column, and these are to be filled: {self.decoded.names}. "
                'Fill the others with include=, as in {"line": "address"}'
            )
        if decoding.decoder in {"text", "bytes"}:
            wanted = pa.string() if decoding.decoder == "text" else pa.binary()
            if self.decoded.data.field(0).type != wanted:
                raise InvalidUsage(f"the decoder {decoding.decoder!r} fills a column of type {wanted}")
        if meaning.envelope == "debezium" and decoding.decoder != "json":
            raise InvalidUsage('changes of Debezium are read with decoder="json"')
        if (meaning.envelope == "changes") != (decoding.decoder == "pgoutput"):
            raise InvalidUsage(
                'a table of PostgreSQL is read with decoder="pgoutput" and envelope="changes", and nothing else'
            )

    def apply(self, messages: pa.Table, lookup: Lookup) -> Made:
        """Make updates of messages, which are in the order of their times, partitions and addresses."""
        if not messages.num_rows:
            return Made(*(schema.updates.empty_table() for schema in (self.schema, ERRORS, RAW)))
        if self.meaning.envelope == "changes":
            return self._changes(messages, lookup)
        raw = raw_of(messages) if self.meaning.keep_raw else RAW.updates.empty_table()
        is_change = self.meaning.envelope == "debezium"
        found = (decode_changes if is_change else decode)(self.decoding, self.decoded, messages)
        places = pa.array(found.lines, pa.int64())
        rows = found.rows.append_column(TIME_FIELD, messages.column(TIME).take(places))
        rows = self._with_places(rows, messages, places)
        if DIFF in messages.column_names:
            rows = rows.append_column(DIFF_FIELD, joined(messages.column(DIFF)).take(places))
        rows = self._transformed(rows, has_diffs=DIFF in messages.column_names)
        return Made(self._updates(rows, lookup), _errors_of(messages, found), raw)

    def _changes(self, messages: pa.Table, lookup: Lookup) -> Made:
        """Apply the changes of a table."""
        found, old = decode_table(self.decoding, self.decoded, self.schema, messages, lookup)
        places = pa.array(found.lines, pa.int64())
        rows = found.rows.append_column(TIME_FIELD, messages.column(TIME).take(places))
        rows = self._with_places(rows, messages, places)
        deletes = np.asarray(joined(rows.column(DELETES)))
        updates = upserted(self.schema, rows, deletes, lambda _: old)
        return Made(updates, _errors_of(messages, found), RAW.updates.empty_table())

    def _updates(self, rows: pa.Table, lookup: Lookup) -> pa.Table:
        if self.meaning.envelope == "none":
            return added(self.schema, rows)
        if DIFF in rows.column_names and (negative := integers(rows.column(DIFF)) < 0).any():
            row = rows.slice(int(np.argmax(negative)), 1).select(self.schema.key_names).to_pylist()[0]
            raise InvalidUsage(
                f"a row was taken away ({shown(row)}), and the envelope 'upsert' is for rows that are only added: "
                "which row of its key comes back is not known. Nothing of these times was written; declare the source "
                "with the envelope 'none', which takes rows away where they are taken away"
            )
        flag = DELETES if self.meaning.envelope == "debezium" else self.meaning.deletes
        deletes = np.zeros(rows.num_rows, np.bool_)
        if flag is not None:
            exactly(pa.schema([pa.field(flag, pa.bool_())]), rows)
            deletes = np.asarray(pc.fill_null(joined(rows.column(flag)), False))
        return upserted(self.schema, rows, deletes, lookup)

    def _with_places(self, rows: pa.Table, messages: pa.Table, places: pa.Array) -> pa.Table:
        for name, about in self.meaning.include.items():
            column = plain(messages.column(TIME if about == "time" else about)).take(places)
            if about == "time":
                column = column.cast(pa.int64())
            rows = rows.append_column(name, column.cast(ABOUT[about]))
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
        if made.num_rows > 1 and self.meaning.envelope != "none":
            times = integers(made.column(TIME))
            if (times[1:] < times[:-1]).any():
                raise InvalidUsage(f"the transform {self.meaning.transform} must keep rows in the order of _time")
        return made


def _decoded(meaning: Meaning, schema: Schema, decoded: Schema | None) -> Schema:
    """The columns that messages have."""
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
    if meaning.envelope in {"debezium", "changes"} and set(meaning.include) & set(schema.key_names):
        raise InvalidUsage("include: a change brings its key itself")
    if meaning.deletes is not None and meaning.deletes in schema.names:
        raise InvalidUsage(f"deletes: {meaning.deletes!r} is a column of the output; name one that only messages have")
    kept = [column for column in schema.columns if column.name not in meaning.include]
    if not kept:
        raise InvalidUsage("include: no column is left for what is in the messages")
    types = {column.name: column.type + ("" if column.nullable else " not null") for column in kept}
    if meaning.envelope == "debezium":
        keys = {name: types.pop(name) for name in schema.key_names}
        return Schema(key=keys, value=types)
    if meaning.deletes is not None:
        types[meaning.deletes] = "bool"
    return Schema(key=types)


_KEPT = ("partition", "address", "value", TIME, DIFF)


def _ones(count: int) -> pa.Array:
    return array_of(np.ones(count, np.int64))


def _errors_of(messages: pa.Table, found: Decoded) -> pa.Table:
    if not found.bad:
        return ERRORS.updates.empty_table()
    places = pa.array(list(found.bad), pa.int64())
    if DIFF in messages.column_names:  # a bad row that goes was bad when it came
        places = places.filter(pc.greater(joined(messages.column(DIFF)).take(places), 0))
    reasons = [found.bad[place] for place in places.to_pylist()]
    bad = messages.select([name for name in _KEPT if name in messages.column_names]).take(places)
    values = joined(bad.column("value"))
    if pa.types.is_struct(values.type):
        raw = pa.array([msgspec.json.encode(row, enc_hook=str) for row in values.to_pylist()], pa.binary())
    else:
        raw = pc.binary_slice(values, 0, MOST_RAW)
    return _at_places(ERRORS, bad, {"reason": pa.array(reasons, pa.string()), "raw": raw})


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
    columns = {
        "partition": plain(messages.column("partition")), "address": joined(messages.column("address")), **found,
        TIME: joined(messages.column(TIME)),
        DIFF: joined(messages.column(DIFF)) if DIFF in messages.column_names else _ones(messages.num_rows),
    }  # fmt: skip
    table = pa.table([columns[name] for name in schema.updates.names], schema=schema.updates)
    return consolidate(schema, table)
