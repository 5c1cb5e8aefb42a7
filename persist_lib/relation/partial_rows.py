"""The rows of an upsert: of several of a key the last one, and what a row lacks taken from the one that is there."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.convert.by_key import GIVEN
from persist_lib.convert.filling import Filling
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.kernel.columns import integers, joined
from persist_lib.kernel.keyset import Keys, distinct
from persist_lib.kernel.order import adjacent_ties, sort_order, take
from persist_lib.schema.evolution import fill
from persist_lib.schema.schema import DIFF, Schema


def marks_of(rows: pa.Table) -> list[str]:
    """The columns that say which rows have a value column (`convert.by_key.parse_partial`)."""
    return [name for name in rows.column_names if name.startswith(GIVEN)]


def has_several(schema: Schema, old: pa.Table) -> bool:
    """Whether a key has several of these rows, or one of them several times. They are in canonical order."""
    ties = adjacent_ties([joined(old.column(name)) for name in schema.key_names])
    return ties is None or bool(ties.any() or (integers(old.column(DIFF)) != 1).any())


def filled(schema: Schema, rows: pa.Table, filling: Filling) -> pa.Table:
    """Rows of an upsert, with what a writer fills in where they lack it: it counts in new keys.

    Equal rows become one first, as they would differ by it.
    """
    fills = [one for one in schema.value if one.fill and GIVEN + one.name in rows.column_names]
    if not fills:
        return rows
    rows = take(rows, distinct(rows.columns))
    for column in fills:
        missing = integers(rows.column(GIVEN + column.name)) == 0
        place = rows.schema.get_field_index(column.name)
        values = filling.into(column, rows.column(place), missing)
        rows = rows.set_column(place, rows.schema.field(place), values)
    return rows


def completed(table: str, schema: Schema, rows: pa.Table, old: pa.Table) -> pa.Table:
    """Rows, one a key and in canonical order, with all columns: what a row lacks is that of its key in `old`, or what
    was filled in for it, or its default, or null.

    Raises InvalidUsage where a key has several rows in `old`, and SchemaMismatch where a new key lacks a column that
    takes no null.
    """
    if not (marks := marks_of(rows)):
        return rows
    given = {name.removeprefix(GIVEN): integers(rows.column(name)).astype(np.bool_) for name in marks}
    lacking = np.flatnonzero(~np.logical_and.reduce(list(given.values())))
    keys = Keys.of(schema, take(rows, lacking))
    mine = take(old, keys.find(old))
    if has_several(schema, mine):
        raise InvalidUsage(
            f"table {table!r}: rows lack some of the columns {list(given)}, which keep what the row of their key has, "
            "and a key has several rows. Nothing was written. Give all columns, or make tables with unique=True",
            table=table, problem="several rows",
        )  # fmt: skip
    declared = {column.name: column for column in schema.columns}
    place, count = np.full(rows.num_rows, mine.num_rows), rows.num_rows
    place[lacking[keys.found_in(old)]] = np.arange(mine.num_rows)
    columns = []
    for field in schema.contents:
        column = joined(rows.column(field.name))
        if (is_given := given.get(field.name)) is not None:
            new = np.flatnonzero(~is_given & (place == mine.num_rows))
            if declared[field.name].fill:
                is_given = is_given | (place == mine.num_rows)
            elif new.size and not declared[field.name].may_lack:
                first = take(rows, new[:1]).select(schema.key_names).to_pylist()
                raise SchemaMismatch(
                    f"table {table!r}: column {field.name!r} is missing in {new.size} rows of new keys, first {first}, "
                    f"and it is {field.type} not null. Nothing was written. Give these rows a value; only rows of keys "
                    "that are there may lack it",
                    problem="missing column", table=table, column=field.name, keys=first, count=int(new.size),
                )  # fmt: skip
            both = pa.concat_arrays([column, joined(mine.column(field.name)), fill(declared[field.name], 1)])
            chosen = np.where(is_given, np.arange(count), count + place)
            column = joined(take(pa.table([both], names=[field.name]), chosen).column(0))
        columns.append(column)
    return pa.table(columns, schema=schema.contents)


def check_order_by(table: str, schema: Schema, order_by: object) -> None:
    """Raise InvalidUsage unless it is a value column."""
    values = [column.name for column in schema.value]
    if not isinstance(order_by, str) or order_by not in values:
        raise InvalidUsage(
            f"table {table!r}: order_by is one of the value columns, {values}: got {shown(order_by)}", table=table
        )


def last_of_each(table: str, schema: Schema, rows: pa.Table, order_by: str) -> pa.Table:
    """Of the rows of each key the one with the greatest value in a column; null is less than all others."""
    if not rows.num_rows:
        return rows
    if pa.types.is_floating(rows.schema.field(order_by).type) and pc.any(pc.is_nan(rows.column(order_by))).as_py():
        raise InvalidUsage(
            f"table {table!r}: NaN in {order_by!r} is neither before nor after another value, so no row is the last. "
            "Nothing was written. Leave these rows out, or give them a value",
            table=table, column=order_by,
        )  # fmt: skip
    lacks = GIVEN + order_by
    if lacks in rows.column_names and not integers(rows.column(lacks)).all():
        raise InvalidUsage(
            f"table {table!r}: some rows lack the column {order_by!r}, so none of them is the last. Nothing was "
            "written. Give it to all rows, or leave out order_by",
            table=table, column=order_by,
        )  # fmt: skip
    rows = take(rows, distinct(rows.columns))
    ties = adjacent_ties([joined(rows.column(name)) for name in schema.key_names])
    is_first = np.ones(rows.num_rows, np.bool_)
    if ties is None:
        raise AssertionError("distinct rows are in order")
    is_first[1:] = ~ties
    groups, firsts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
    order, equal = sort_order([joined(rows.column(order_by))])
    ranks = np.empty(rows.num_rows, np.int64)
    ranks[order] = np.cumsum(np.concatenate([[0], ~equal]))
    is_last = ranks == np.maximum.reduceat(ranks, firsts)[groups]
    if int(is_last.sum()) > len(firsts):
        tied = np.flatnonzero(np.bincount(groups[is_last]) > 1)
        first = take(rows, firsts[tied[:1]]).select(schema.key_names).to_pylist()
        raise InvalidUsage(
            f"table {table!r}: {len(tied)} keys have different rows with the same {order_by!r}, first {first}. Which "
            "of them is the last only the caller can say. Nothing was written",
            table=table, problem="key twice", column=order_by,
        )  # fmt: skip
    for name in marks_of(rows):
        given = integers(rows.column(name))
        if (lost := np.maximum.reduceat(given, firsts) > given[is_last]).any():
            first = take(rows, firsts[np.flatnonzero(lost)[:1]]).select(schema.key_names).to_pylist()
            column = name.removeprefix(GIVEN)
            raise InvalidUsage(
                f"table {table!r}: {int(lost.sum())} keys have several rows, of which the last by {order_by!r} lacks "
                f"the column {column!r} and another one has it, first {first}. Only the last row of a key counts, so "
                "that value would be lost. Nothing was written. Apply these rows in calls of their own, one a key",
                table=table, problem="key twice", column=column,
            )  # fmt: skip
    return take(rows, np.flatnonzero(is_last))
