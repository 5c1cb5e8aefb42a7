"""What a change by key amounts to: the updates that turn the contents of some keys into one row each, or into none.

Contents and rows are tables of `schema.contents`: the schema's columns, then `_diff`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.errors import DiffOverflow, InvalidUsage
from persist_lib.kernel.columns import Rows, array_of, integers, joined
from persist_lib.kernel.consolidate import I64_MIN, consolidate
from persist_lib.kernel.keyset import Keys, distinct
from persist_lib.kernel.order import adjacent_ties, take
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema

SHOWN = 5
"""Keys that a message names."""


class Counts(NamedTuple):
    """How many keys got their first row, another row, kept what they had, and lost all they had.

    `late` are those whose change was left out, as a later one is there (tables that keep deleted keys).
    """

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    late: int = 0


def one_row_each(schema: Schema, rows: pa.Table) -> pa.Table:
    """The distinct rows, in canonical order, each with `_diff` 1. Raises InvalidUsage if two rows differ for a key."""
    rows = pa.table([joined(column) for column in rows.columns], schema=rows.schema)
    if rows.num_rows > 1:
        rows = take(rows, distinct(rows.columns))
        ties = adjacent_ties([joined(rows.column(name)) for name in schema.key_names])
        if ties is None or ties.any():
            raise _twice(schema, rows, np.flatnonzero(ties) if ties is not None else np.zeros(1, np.int64))
    return rows.append_column(DIFF_FIELD, array_of(np.ones(rows.num_rows, np.int64)))


def replacing(schema: Schema, old: pa.Table, new: pa.Table) -> pa.Table:
    """The changes that make `new` of `old`, consolidated. Of what is in both nothing is in the answer."""
    diffs = integers(old.column(DIFF))
    if diffs.size and diffs.min() == I64_MIN:
        data = old.slice(int(diffs.argmin()), 1).drop_columns([DIFF]).to_pylist()[0]
        raise DiffOverflow(
            f"{data} has the multiplicity {I64_MIN}, and no one update can retract that; add to it first",
            data=data, total=I64_MIN,
        )  # fmt: skip
    retracted = old.set_column(old.num_columns - 1, DIFF_FIELD, array_of(-diffs))
    return consolidate(schema, pa.concat_tables([retracted, new]))


def count_upserted(keys: Keys, old: pa.Table, changes: pa.Table) -> Counts:
    """What an upsert does to each of the keys, by their contents before it and the changes."""
    had, changed = keys.found_in(old), keys.found_in(changes)
    updated = int((had & changed).sum())
    return Counts(int(changed.sum()) - updated, updated, len(keys) - int(changed.sum()), 0)


def count_deleted(keys: Keys, old: pa.Table) -> Counts:
    """What a delete does to each of the keys, by their contents before it."""
    deleted = int(keys.found_in(old).sum())
    return Counts(0, 0, len(keys) - deleted, deleted)


def _twice(schema: Schema, rows: pa.Table, at: Rows) -> InvalidUsage:
    twice = distinct(take(rows.select(schema.key_names), at).columns)
    keys = take(rows.select(schema.key_names), at[twice[:SHOWN]]).to_pylist()
    more = f" and {len(twice) - SHOWN} others" if len(twice) > SHOWN else ""
    return InvalidUsage(
        f"an upsert has one row for each key, and there are different rows for {shown(keys)}{more}. Which of them is "
        "meant only the caller can say: keep one of each. Nothing was written",
        problem="key twice", keys=keys, count=len(twice),
    )  # fmt: skip
