"""What rows mean: updates of a collection. Pure, and as if each time were processed alone, in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import Flags, array_of, integers, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import distinct
from persist_lib.kernel.order import sort_order, take
from persist_lib.schema.schema import DIFF, DIFF_FIELD, TIME, TIME_FIELD, Schema

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
