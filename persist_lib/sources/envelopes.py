"""What rows mean: updates of a collection. Pure, and as if each time were processed alone, in order.

An envelope is a class. A new one is a line in `ENVELOPES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import parse_flag, parse_integer, shown
from persist_lib.convert.lines.debezium import DELETES
from persist_lib.convert.lines.file_columns import Sifted
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import Flags, array_of, integers, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import distinct
from persist_lib.kernel.order import sort_order, take
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, TIME_FIELD, Schema
from persist_lib.sources.decoding import Decoding, decode, decode_changes, decode_keyed, parse_function_name
from persist_lib.sources.postgres.changes import decode_rows, decode_table
from persist_lib.sources.transactions import Transactions

Lookup = Callable[[pa.Table | None], pa.Table]
"""Makes of distinct keys their rows as of just before the first time, as `schema.contents`; of None, all rows."""


def added(schema: Schema, rows: pa.Table) -> pa.Table:
    """Each row is added at its time; or as often as its `_diff` says, if there is one."""
    if DIFF not in rows.column_names:
        rows = rows.append_column(DIFF_FIELD, array_of(np.ones(rows.num_rows, np.int64)))
    return consolidate(schema, exactly(schema.updates, rows))


def upserted(schema: Schema, rows: pa.Table, deletes: Flags, lookup: Lookup) -> pa.Table:
    """Each row becomes the one row of its key at its time, or takes the key's row away. `rows` go up in `_time`.

    Of several rows of a key at one time, the last decides.
    """
    if not rows.num_rows:
        return schema.updates.empty_table()
    keys = rows.select(schema.key_names)
    keys = take(keys, distinct([joined(column) for column in keys.columns]))
    old = lookup(keys).select(schema.names)
    # What takes a row away has a key, and nothing else.
    loose = pa.schema([one if one.name in schema.key_names else one.with_nullable(True) for one in schema.data])
    every = pa.concat_tables([exactly(loose, old), exactly(loose, rows)])
    every = pa.table([joined(column) for column in every.columns], schema=every.schema)
    # Old rows have the time -1: they come before all others, and are not added.
    times = np.concatenate([np.full(old.num_rows, -1), integers(rows.column(TIME)).astype(np.int64)])
    takes_away = np.concatenate([np.zeros(old.num_rows, np.bool_), deletes])
    order, ties = sort_order([every.column(name).chunk(0) for name in schema.key_names])  # stable: old ones first
    times, takes_away = times[order], takes_away[order]
    adds = np.flatnonzero((times >= 0) & ~takes_away)
    # Each row takes away the one before it of its key. Of those of one time only the last is left then.
    retracts = np.flatnonzero(ties & ~takes_away[:-1]) + 1
    # Where a key had several rows, all of them go when its first new one comes; they stay where none does.
    comes = np.minimum.accumulate(np.where(times >= 0, np.arange(len(times)), len(times))[::-1])[::-1][retracts]
    keys_at = np.append(0, np.cumsum(~ties))
    has_new = np.append(keys_at, -1)[comes] == keys_at[retracts]
    retracts, comes = retracts[has_new], comes[has_new]
    changes = take(every, np.concatenate([order[adds], order[retracts - 1]]))
    changes = changes.append_column(TIME_FIELD, array_of(np.concatenate([times[adds], times[comes]]).astype("u8")))
    diffs = np.concatenate([np.ones(len(adds), np.int64), np.full(len(retracts), -1, np.int64)])
    return consolidate(schema, exactly(schema.updates, changes.append_column(DIFF_FIELD, array_of(diffs))))


def decisive(schema: Schema, rows: pa.Table) -> pa.Table:
    """The rows that decide what upserts come to: of several of a key at one time, the last. Their order stays."""
    if rows.num_rows < 2:
        return rows
    keys = exactly(pa.schema([schema.data.field(name) for name in schema.key_names]), rows)
    order, ties = sort_order([joined(column) for column in keys.columns])  # stable: in their order
    times = integers(rows.column(TIME))[order]
    decided = ties & (times[1:] == times[:-1])
    return take(rows, np.sort(order[np.append(~decided, True)])) if decided.any() else rows


def exactly(schema: pa.Schema, rows: pa.Table) -> pa.Table:
    """The rows with exactly these columns. Raises InvalidUsage for what is missing, of another type, or null."""
    columns = []
    for field in schema:
        if field.name not in rows.column_names:
            raise InvalidUsage(f"the rows have no column {field.name!r}; they have {rows.column_names}")
        column = rows.column(field.name)
        if column.type != field.type:
            raise InvalidUsage(f"column {field.name!r} is {field.type}, and the rows have {column.type} there")
        if not field.nullable and column.null_count:
            raise InvalidUsage(f"column {field.name!r} must not be null, and the rows have nulls there")
        columns.append(column)
    return pa.table(columns, schema=schema)


NO_DELETES = 'deletes names a column of messages with envelope="upsert"'
NO_TRANSACTIONS = 'transactions are those of Debezium: pass envelope="debezium"'
NO_TRANSFORM = "changes are applied as they are: leave out transform"


class Envelope:
    """What rows mean, in steps that a pipeline takes. `refused`: fields of a `Meaning` that it cannot have, and why.

    `by_key`: the output has one row of each key, so the rows before and the order of messages matter.
    `brings_key`: a message has its key in it. `of_changes`: the row is within what a message says of it.
    """

    refused: ClassVar[Mapping[str, str]]
    by_key: ClassVar[bool] = True
    brings_key: ClassVar[bool] = False
    of_changes: ClassVar[bool] = False

    def check(self, decoding: Decoding) -> None:
        """Raise InvalidUsage for a way to decode that does not go with it."""
        if decoding.reads.is_log:
            raise InvalidUsage(PGOUTPUT)

    def columns(self, types: dict[str, str], keys: list[str], *, is_keyed: bool) -> Schema:
        """The columns of messages, of which `keys` are the output's key."""
        return _with_key(types, keys) if is_keyed or self.of_changes else Schema(key=types)

    def decode(
        self, decoding: Decoding, columns: Schema, schema: Schema, messages: pa.Table, lookup: Lookup
    ) -> tuple[Sifted, Lookup]:
        """The rows of messages, and what has the rows before that `updates` needs."""
        del schema
        if decoding.key is not None:
            return decode_keyed(decoding, columns, messages, deletes=self.by_key), lookup
        return decode(decoding, columns, messages), lookup

    def updates(self, schema: Schema, rows: pa.Table, deletes: str | None, lookup: Lookup) -> pa.Table:
        """The updates of rows that go up in time. `deletes` is the column that takes a key's row away, if any."""
        if not self.by_key:
            return added(schema, rows)
        if DIFF in rows.column_names and (negative := integers(rows.column(DIFF)) < 0).any():
            row = rows.slice(int(np.argmax(negative)), 1).select(schema.key_names).to_pylist()[0]
            raise InvalidUsage(
                f"a row was taken away ({shown(row)}), and the envelope 'upsert' is for rows that are only added: "
                "which row of its key comes back is not known. Nothing of these times was written; declare the source "
                "with the envelope 'none', which takes rows away where they are taken away"
            )
        flags = np.zeros(rows.num_rows, np.bool_)
        if deletes is not None:
            exactly(pa.schema([pa.field(deletes, pa.bool_())]), rows)
            flags = np.asarray(pc.fill_null(joined(rows.column(deletes)), False))
        return upserted(schema, rows, flags, lookup)


class Added(Envelope):
    """Each row is added."""

    refused: ClassVar = {"deletes": NO_DELETES, "transactions": NO_TRANSACTIONS}
    by_key = False


class Upserted(Envelope):
    """Each row becomes the row of its key."""

    refused: ClassVar = {"transactions": NO_TRANSACTIONS}


class Debezium(Envelope):
    """Changes as Debezium writes them."""

    refused: ClassVar = {"deletes": NO_DELETES, "transform": NO_TRANSFORM}
    brings_key = of_changes = True

    def check(self, decoding: Decoding) -> None:
        if decoding.key is not None:
            raise InvalidUsage("a change of Debezium brings its key itself: leave out Decoding(key=…)")
        if not decoding.reads.is_object:
            raise InvalidUsage('changes of Debezium are read with decoder="json" or "avro"')

    def decode(
        self, decoding: Decoding, columns: Schema, _schema: Schema, messages: pa.Table, lookup: Lookup
    ) -> tuple[Sifted, Lookup]:
        return decode_changes(decoding, columns, messages), lookup


class Changes(Envelope):
    """Changes of a table of PostgreSQL. What the output has is needed to decode them: not every value is sent."""

    refused: ClassVar = {
        "deletes": NO_DELETES, "transform": NO_TRANSFORM, "transactions": NO_TRANSACTIONS,
        "keep_raw": "keep_raw keeps messages by address, and those of a transaction share one: leave it out",
    }  # fmt: skip
    brings_key = True

    def check(self, decoding: Decoding) -> None:
        if not decoding.reads.is_log:
            raise InvalidUsage(PGOUTPUT)

    def decode(
        self, decoding: Decoding, columns: Schema, schema: Schema, messages: pa.Table, lookup: Lookup
    ) -> tuple[Sifted, Lookup]:
        found, old = decode_table(decoding, columns, schema, messages, lookup)
        return found, lambda _: old


class WholeRows(Changes):
    """Changes of a table without a primary key: rows come and go whole, and equal ones are counted."""

    by_key = False

    def decode(
        self, decoding: Decoding, columns: Schema, schema: Schema, messages: pa.Table, lookup: Lookup
    ) -> tuple[Sifted, Lookup]:
        return decode_rows(decoding, columns, schema, messages, lookup), lookup


WHOLE_ROWS = WholeRows()


def _with_key(types: dict[str, str], keys: list[str]) -> Schema:
    return Schema(key={name: types[name] for name in keys}, value={n: t for n, t in types.items() if n not in keys})


PGOUTPUT = 'a table of PostgreSQL is read with decoder="pgoutput" and envelope="changes", and nothing else'
ENVELOPES: Mapping[str, Envelope] = {
    "none": Added(), "upsert": Upserted(), "debezium": Debezium(), "changes": Changes(),
}  # fmt: skip
About = Literal["partition", "address", "time", "key", "headers", "timestamp"]


class Meaning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes of rows. With the envelope "none" each is added. With "upsert" it replaces the row of its key.

    "debezium" takes changes as Debezium writes them, and applies them by key; "changes" is that for a table of
    PostgreSQL, which can be emptied too. `deletes` (of "upsert") is a column of the messages, not of the output, that
    is true where the key's row is taken away. `include` fills columns of the output with what a message's place is,
    not with what is in it. `transform` is "package.module:function", a pure function of the decoded rows with `_time`
    (Arrow) that makes the output's rows of them; it is called for many messages at once. `transactions` (of "debezium")
    lets changes wait until theirs is whole. `most_errors` stops the source when there are more than that many bad
    messages.
    """

    envelope: str = "none"
    deletes: str | None = None
    include: Mapping[str, About] = {}
    transform: str | None = None
    most_errors: int | None = None
    keep_raw: bool = False
    transactions: Transactions | None = None

    def __post_init__(self) -> None:
        if self.envelope not in ENVELOPES:
            raise InvalidUsage(f"envelope must be one of {tuple(ENVELOPES)}: got {shown(self.envelope)}")
        if self.deletes is not None and not isinstance(self.deletes, str):
            raise InvalidUsage(NO_DELETES)
        if not isinstance(self.include, Mapping) or set(self.include.values()) - set(get_args(About)):
            raise InvalidUsage(f"include maps columns to one of {get_args(About)}: got {shown(self.include)}")
        if self.transform is not None:
            parse_function_name(self.transform, "transform")
        for name, why in self.rows.refused.items():
            if getattr(self, name) not in {None, False}:
                raise InvalidUsage(why)
        if self.most_errors is not None:
            parse_integer(self.most_errors, "most_errors", 0)
        parse_flag(self.keep_raw, "keep_raw")

    @property
    def rows(self) -> Envelope:
        return ENVELOPES[self.envelope]

    def deletes_in(self, decoding: Decoding) -> str | None:
        """The column of decoded rows that says whether a key's row is taken away, if there is one."""
        return DELETES if self.rows.brings_key or decoding.key is not None else self.deletes
