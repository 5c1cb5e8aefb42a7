"""Deleted keys that a table remembers, so that a late upsert does not bring one back. Pure, as statements are.

A table that keeps them orders the changes of each key by a column. Its marks are rows of another table of its timeline,
which changes in the same transactions: a key that was deleted, the column's value in the delete, and when that came. A
mark that was kept long enough is forgotten, and the greatest value among those that are forgotten, the floor, stays.
No mark is made at or below the floor. There the floor decides, and a mark would say that nothing newer was
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_lib.arguments import did_you_mean, shown
from persist_lib.convert.by_key import GIVEN
from persist_lib.errors import DeletesForgotten, InvalidUsage
from persist_lib.kernel.columns import Flags, Rows, array_of, integers, joined
from persist_lib.kernel.keyset import Counts, Keys, count_upserted, one_row_each, replacing
from persist_lib.kernel.order import adjacent_ties, sort_order, take
from persist_lib.relation.key_lookup import completed, has_several, last_of_each
from persist_lib.relation.row_selection import RowSelection, by_keys
from persist_lib.relation.statements import Apply, Restore, Statement
from persist_lib.schema.schema import DIFF, Column, Schema

FLOOR, DELETED_AT = "_floor", "_deleted_at"
"""Columns of marks: 1 in the row that is the floor, 0 in the others; and when a delete came, by the store's clock."""
AT = pa.timestamp("ms", "UTC")
SHOWN = 5
ORDERED = "integers, decimals, dates, times, timestamps, texts or bytes"

Look = Callable[[RowSelection], pa.Table]
"""Reads marks as of the time at which the rows were read."""


class Keeping(NamedTuple):
    """How a table keeps deleted keys. `schema` is its own, in which a statement is, `marks` that of its marks."""

    table: str
    schema: Schema
    column: str
    marks: Schema


class Kept(NamedTuple):
    """What a statement does to the rows and to the marks; `keys` are those that it rests on."""

    changes: pa.Table
    marks: pa.Table
    counts: Counts
    keys: pa.Table


def marks_schema(table: str, schema: Schema, column: object) -> Schema:
    """The columns of the marks of a table. Raises InvalidUsage where it cannot keep deleted keys by this column."""
    values = {one.name: one for one in schema.value} if schema.codec == "columns" else {}
    found = values.get(column) if isinstance(column, str) else None
    why = ""
    if found is None:
        meant = did_you_mean(column, list(values)) if isinstance(column, str) else ""
        why = f"the column is one of its value columns, {list(values)}: got {shown(column)}. {meant}".rstrip()
    elif not _is_ordered(found.field.type):
        why = f"the values of the column order changes, so they are {ORDERED}, and {column!r} is {found.type}"
    elif taken := [name for name in (FLOOR, DELETED_AT) if name in schema.names]:
        why = f"a column of it has the name {taken[0]!r}, which its deleted keys have"
    if found is None or why:
        raise InvalidUsage(f"table {table!r} cannot keep deleted keys: {why}. Nothing was changed", table=table)
    keys = [Column(one.name, one.type) for one in schema.key]
    return Schema(
        [Column(FLOOR, "int8", nullable=False), *keys],
        [Column(found.name, found.type), Column(DELETED_AT, "timestamp[ms, UTC]", nullable=False)], times="ms",
    )  # fmt: skip


def kept(statement: Statement, keeping: Keeping, old: pa.Table, look: Look, now: int) -> Kept:
    """What a statement does, given the rows that it looks at, in canonical order. `now` is in ms since 1970."""
    schema, marks = statement.schema, keeping.marks
    if keeping.column not in schema.names:
        raise InvalidUsage(
            f"table {keeping.table!r} keeps deleted keys by the column {keeping.column!r}, and was opened in older "
            "columns, without it. Nothing was written; open it in its present columns",
            table=keeping.table, column=keeping.column,
        )  # fmt: skip
    if isinstance(statement, Apply):
        parts = [statement.upserts, statement.deletes, *([statement.added.rows] if statement.added else [])]
        keys = Keys.of(schema, pa.concat_tables([part.select(schema.key_names) for part in parts])).table
        return _Ordered(statement, keeping, old, _Marks(keeping, look(_of(keeping, keys)), now)).kept(keys)
    changes, counts = statement.changes(old)
    if isinstance(statement, Restore) and statement.marks is not None and statement.marks.schema == marks.contents:
        there = look(RowSelection(marks))
        return Kept(changes, replacing(marks, there, statement.marks), counts, changes.select(schema.key_names))
    keys = Keys.of(schema, changes).table
    found = _Marks(keeping, look(_of(keeping, keys)), now) if keys.num_rows else None
    return Kept(changes, marks.contents.empty_table() if found is None else found.after(changes), counts, keys)


def forget(marks: Schema, column: str, overdue: pa.Table, floor: pa.Table, now: int) -> pa.Table:
    """What takes these marks away, and makes the floor at least the greatest value among them."""
    both = pa.concat_tables([overdue, floor])
    ranks = _ranks(both.column(column))[0]
    greatest = both.slice(int(ranks.argmax()), 1).column(column)
    nulls = [pa.nulls(1, field.type) for field in list(marks.contents)[1 : len(marks.key)]]
    values = [pa.array([1], pa.int8()), *nulls, joined(greatest), pa.array([now], AT), pa.array([1], pa.int64())]
    return replacing(marks, both, pa.table(values, schema=marks.contents))


def floor_of(marks: Schema) -> RowSelection:
    """The floor alone."""
    return by_keys(marks, Keys.of(marks, keyed(marks, None)))


class _Marks:
    """The marks of some keys, which are in canonical order, and the floor."""

    def __init__(self, keeping: Keeping, rows: pa.Table, now: int) -> None:
        self._keeping, self._now = keeping, now
        is_floor = integers(rows.column(FLOOR)) == 1
        self.rows, self.floor = take(rows, np.flatnonzero(~is_floor)), take(rows, np.flatnonzero(is_floor))

    def after(self, changes: pa.Table) -> pa.Table:
        """What becomes of them with changes that say no order: a key with a row has none, one that went its row's."""
        schema, column = self._keeping.schema, self._keeping.column
        diffs = integers(changes.column(DIFF))
        came, went = (take(changes, np.flatnonzero(one)) for one in (diffs > 0, diffs < 0))
        stays = Keys.of(schema, came)
        gone = greatest(schema, went, column)
        gone = take(gone, np.setdiff1d(np.arange(gone.num_rows), stays.find(gone)))
        keys = Keys.of(schema, gone)
        own, known, floor = _ranks(gone.column(column), self.rows.column(column), self.floor.column(column))
        known = _picked(known, _places(keys, self.rows))
        marked = np.flatnonzero((own > known) & (own > _least(floor)) & (own >= 0))
        new = take(gone, marked)
        return self.changed(np.concatenate([stays.find(self.rows), Keys.of(schema, new).find(self.rows)]), new)

    def changed(self, out: Rows, new: pa.Table) -> pa.Table:
        """These marks out, and new ones of keys with a value of the column in."""
        marks, count = self._keeping.marks, new.num_rows
        values = [pa.array(np.zeros(count, np.int8)), *(joined(column) for column in new.columns)]
        values += [pa.repeat(pa.scalar(self._now, AT), count), array_of(np.ones(count, np.int64))]
        return replacing(marks, take(self.rows, out), pa.table(values, schema=marks.contents))


class _Ordered:
    """An `apply` to a table that keeps deleted keys: of each key the change with the greatest value counts.

    The ranks are of the column's values in the order of keys, below 0 for no value: of the row to upsert (`up`),
    the delete (`down`), the row that is there (`had`), the mark (`mark`); and of the floor.
    """

    def __init__(self, statement: Apply, keeping: Keeping, old: pa.Table, marks: _Marks) -> None:
        schema, column = statement.schema, keeping.column
        self._statement, self._keeping, self._old, self._marks = statement, keeping, old, marks
        if statement.order_by not in {None, column}:
            raise InvalidUsage(
                f"table {keeping.table!r} keeps deleted keys by the column {column!r}, so that its changes are ordered "
                f"by that: got order_by={shown(statement.order_by)}. Nothing was written; leave it out",
                table=keeping.table, column=column,
            )  # fmt: skip
        for rows, what in ((statement.upserts, "rows to upsert"), (statement.deletes, "deletes")):
            self._check_given(rows, what)
        self._rows = one_row_each(schema, last_of_each(keeping.table, schema, statement.upserts, column))
        deletes = statement.deletes if statement.deletes.num_rows else self._rows.slice(0, 0)
        self._gone = greatest(schema, deletes, column)
        statement.check_added(Keys.of(schema, self._rows), Keys.of(schema, self._gone))
        names = schema.key_names
        self._keys = Keys.of(schema, pa.concat_tables([self._rows.select(names), self._gone.select(names)]))
        self._there = take(old, self._keys.find(old))
        if has_several(schema, self._there):
            raise InvalidUsage(
                f"table {keeping.table!r} orders its changes by {column!r}, of the row that is there as well, and a "
                "key has several rows. Nothing was written. Upsert these keys first, or make tables with unique=True",
                table=keeping.table, problem="several rows",
            )  # fmt: skip
        tables = (self._rows, self._gone, self._there, marks.rows)
        ranks = _ranks(*(table.column(column) for table in tables), marks.floor.column(column))
        self._at = [_places(self._keys, table) for table in tables]
        self._up, self._down, self._had, self._mark = map(_picked, ranks, self._at)
        self._floor = _least(ranks[-1])

    def kept(self, keys: pa.Table) -> Kept:
        """What it does. Raises DeletesForgotten."""
        up, down, had, mark, is_there = self._up, self._down, self._had, self._mark, self._at[2] >= 0
        newest, known = np.maximum(had, mark), is_there | (self._at[3] >= 0)
        is_up = up > down  # of both in one call the later one counts, and where they tie the delete
        is_down = (self._at[1] >= 0) & ~is_up
        self._check_known(is_up & ~known & (up <= self._floor))
        takes, removes = is_up & (up > newest), is_down & is_there & (down >= newest)
        asks = takes & is_there & ~((down >= 0) & (down >= newest))  # else the row is deleted before
        rows, takes = self._taken(takes, asks)
        schema, out = self._statement.schema, is_there & (takes | removes)
        changes = replacing(schema, take(self._there, self._at[2][out]), rows)
        marked = is_down & (down > self._floor) & (down > mark) & (down >= had)
        ended = self._at[3][(takes | marked) & (self._at[3] >= 0)]
        if (added := self._statement.added) is not None:
            ended = np.concatenate([ended, Keys.of(schema, added.rows).find(self._marks.rows)])
        marks = self._marks.changed(ended, take(self._gone, self._at[1][marked]))
        counts = count_upserted(Keys.of(schema, rows), self._old, changes)
        deleted, late = int(removes.sum()), int(((is_up & (up < newest)) | (is_down & (down < newest))).sum())
        rest = int((is_up | is_down).sum()) - int(takes.sum()) - deleted - late
        counts = counts._replace(unchanged=counts.unchanged + rest, deleted=deleted, late=late)
        changes, counts = self._statement.with_added(self._old, changes, counts)
        return Kept(changes, marks, counts, keys)

    def _taken(self, takes: Flags, asks: Flags) -> tuple[pa.Table, Flags]:
        """The rows to upsert, whole, and which keys they are of: without those that the condition leaves out."""
        statement = self._statement
        base = take(self._there, self._at[2][asks])
        rows = completed(statement.table, statement.schema, take(self._rows, self._at[0][takes]), base)
        if statement.only_if is None or not base.num_rows:
            return rows, takes
        refused = asks.copy()
        refused[asks] = ~statement.takes(rows, base)
        takes_now = takes & ~refused
        return take(rows, np.flatnonzero(~refused[takes])), takes_now

    def _check_given(self, rows: pa.Table, what: str) -> None:
        """Raise InvalidUsage unless all of them say their order."""
        column, given = self._keeping.column, GIVEN + self._keeping.column
        if not rows.num_rows:
            return
        lacks = column not in rows.column_names or rows.column(column).null_count > 0
        if lacks or (given in rows.column_names and not integers(rows.column(given)).all()):
            raise InvalidUsage(
                f"table {self._keeping.table!r} keeps deleted keys by the column {column!r}, so that the {what} of "
                f"apply have it beside their keys, and it is not null: some have none. Nothing was written. "
                "delete(keys) takes the value of the row that is there, and upsert(rows) asks for no order",
                table=self._keeping.table, column=column,
            )  # fmt: skip

    def _check_known(self, is_lost: Flags) -> None:
        """Raise DeletesForgotten where it is not known any more whether a key was deleted later."""
        if not is_lost.any():
            return
        first = take(self._keys.table, np.flatnonzero(is_lost)[:SHOWN]).to_pylist()
        column, floor = self._keeping.column, self._marks.floor.column(self._keeping.column)[0].as_py()
        raise DeletesForgotten(
            f"table {self._keeping.table!r}: {int(is_lost.sum())} rows to upsert, first {first}, have no row and no "
            f"deleted key to compare with, and {column!r} at or below {shown(floor)}, the greatest of the deletes that "
            "are forgotten: perhaps their keys were deleted later. Nothing was written. Leave these rows out; or, "
            "where they are right, upsert(rows) asks for no order",
            table=self._keeping.table, column=column, keys=first, count=int(is_lost.sum()), floor=floor,
        )  # fmt: skip


def greatest(schema: Schema, rows: pa.Table, column: str) -> pa.Table:
    """The key columns and one other, of each key the greatest value: one row a key, in canonical order."""
    found = rows.select([*schema.key_names, column])
    if found.num_rows > 1:
        found = take(found, sort_order([joined(one) for one in found.columns])[0])
        ties = adjacent_ties([joined(found.column(name)) for name in schema.key_names])
        if ties is None:
            raise AssertionError("sorted rows are in order")
        found = take(found, np.flatnonzero(np.append(~ties, True)))
    return found


def _of(keeping: Keeping, keys: pa.Table) -> RowSelection:
    return by_keys(keeping.marks, Keys.of(keeping.marks, keyed(keeping.marks, keys)))


def keyed(marks: Schema, keys: pa.Table | None) -> pa.Table:
    """The keys of the marks of some keys, and that of the floor."""
    fields = list(marks.data)[: len(marks.key)]
    count = 0 if keys is None else keys.num_rows
    kinds = pa.array(np.append(np.zeros(count, np.int8), np.int8(1)))
    columns = [
        pa.concat_arrays([*([] if keys is None else [joined(keys.column(one.name))]), pa.nulls(1, one.type)])
        for one in fields[1:]
    ]
    return pa.table([kinds, *columns], schema=pa.schema(fields))


def _ranks(*columns: pa.ChunkedArray) -> list[npt.NDArray[np.int64]]:
    """The place of each value among all of these, equal ones at the same; -1 for null."""
    both = pa.concat_arrays([joined(column) for column in columns])
    ranks = np.zeros(len(both), np.int64)
    if len(both):
        order, equal = sort_order([both])
        ranks[order] = np.cumsum(np.concatenate([[0], ~equal]))
        ranks[both.is_null().to_numpy(zero_copy_only=False)] = -1
    return np.split(ranks, np.cumsum([len(column) for column in columns])[:-1])


def _places(keys: Keys, rows: pa.Table) -> Rows:
    """For each key the place of its row, of which there is one at most; -1 for no row."""
    places = np.full(len(keys), -1, np.int64)
    places[keys.found_in(rows)] = keys.find(rows)
    return places


def _picked(ranks: npt.NDArray[np.int64], places: Rows) -> npt.NDArray[np.int64]:
    return np.append(ranks, -1)[places]


def _least(ranks: npt.NDArray[np.int64]) -> int:
    return int(ranks.max(initial=-1))


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether values of a type have an order in which each two of them can be compared."""
    checks: Sequence[Callable[[pa.DataType], bool]] = (
        pa.types.is_integer, pa.types.is_decimal, pa.types.is_date, pa.types.is_time, pa.types.is_timestamp,
        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
    )  # fmt: skip
    return any(check(kind) for check in checks)
