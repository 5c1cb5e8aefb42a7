"""Statements: which rows each one looks at, and what it makes of them. Pure, so that it can be done again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import did_you_mean, parse_text, shown
from persist_lib.convert.by_key import parse_deletes, parse_keys, parse_partial, parse_rows
from persist_lib.convert.filling import Filling
from persist_lib.convert.rows import build_column
from persist_lib.core.cost import Cost
from persist_lib.errors import ConstraintViolated, InvalidUsage
from persist_lib.format.predicate import evaluated
from persist_lib.kernel.columns import array_of, at_time, joined
from persist_lib.kernel.keyset import (
    Counts,
    Keys,
    count_deleted,
    count_upserted,
    find_violation,
    one_row_each,
    replacing,
)
from persist_lib.kernel.order import adjacent_ties, take
from persist_lib.relation.key_lookup import check_order_by, completed, filled, has_several, last_of_each
from persist_lib.relation.row_selection import Asked, RowSelection, by_keys, in_older_columns, summed
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema
from persist_lib.schema.types import is_json

Change = Callable[[pa.Table], pa.Table] | Mapping[str, Any]
"""New rows of old ones: a function of an Arrow table, or for each column a value, an expression or a function."""


class Done(msgspec.Struct, frozen=True):
    """What a statement or a transaction did. `time` is when; None if nothing was to be changed, and so nothing written.

    `count` is the number of updates, each the change in multiplicity of one row. The other counts are of keys.
    """

    time: int | None
    count: int
    token: bytes
    cost: Cost
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    late: int = 0


class Statement(ABC):
    """One statement on one table. `wanted` are the rows that it looks at; None if it does not look.

    `keyed` is a table with the key columns of these, where they are chosen by keys.
    """

    def __init__(
        self, table: str, schema: Schema, *, keyed: pa.Table | None = None, wanted: RowSelection | None = None
    ) -> None:
        self.table, self.schema, self.keyed = table, schema, keyed
        self.wanted = wanted if keyed is None else by_keys(schema, Keys.of(schema, keyed))

    @abstractmethod
    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        """What to add to the contents, given the wanted rows of them: both in canonical order."""

    def in_its_columns(self, rows: pa.Table, of: Schema, what: str, **fields: object) -> pa.Table:
        """Rows in the columns `of` the table in its own, which may be older.

        Raises SchemaMismatch where it could not retract them. `what` and the fields are for the error.
        """
        return in_older_columns(rows, self.schema, of, what, **fields)

    def keys_of(self, old: pa.Table) -> Keys:
        """The keys that it is about: those by which rows are chosen, or those of the rows that a filter has chosen."""
        return Keys.of(self.schema, old) if self.wanted is None or self.wanted.keys is None else self.wanted.keys


class Insert(Statement):
    """Adds rows. If the schema has constraints, it looks at what has their keys."""

    def __init__(self, table: str, schema: Schema, rows: object, filling: Filling) -> None:
        super().__init__(table, schema)
        data = parse_rows(schema, rows, whole=False, filling=filling)
        ones = array_of(np.ones(data.num_rows, np.int64))
        self.rows = summed(schema, data.append_column(DIFF_FIELD, ones))
        self._keys = Keys.of(schema, self.rows)
        self.wanted = by_keys(schema, self._keys) if schema.constraints else None

    def in_its_columns(self, rows: pa.Table, of: Schema, what: str, **fields: object) -> pa.Table:  # noqa: ARG002
        """The rows, whatever they have in newer columns, as it retracts none."""
        return summed(self.schema, rows.select(self.schema.contents.names))

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        """The rows. Raises ConstraintViolated if a constraint would not hold with them."""
        if self.schema.constraints and (found := find_violation(self.schema, old, at_time(self.rows, 1))) is not None:
            raise ConstraintViolated(
                f"table {self.table!r}: its schema says {found.constraint}, and with these rows {found.breaks} keys "
                f"would break that, first {found.rows[:3]}. Nothing was written. Use upsert to replace what is there",
                table=self.table, constraint=found.constraint, count=found.breaks, rows=found.rows,
            )  # fmt: skip
        return self.rows, Counts(inserted=len(self._keys))


class Upsert(Statement):
    """Makes each row the one row of its key. Columns that it lacks keep what the row of its key has."""

    def __init__(self, table: str, schema: Schema, rows: object, filling: Filling) -> None:
        self._rows = one_row_each(schema, filled(schema, parse_partial(schema, rows, filling), filling))
        super().__init__(table, schema, keyed=self._rows)

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        changes = replacing(self.schema, old, completed(self.table, self.schema, self._rows, old))
        return changes, count_upserted(self.keys_of(old), old, changes)


class Delete(Statement):
    """Takes rows away, by their keys or by a filter."""

    def __init__(self, table: str, schema: Schema, keys: object, filter: pc.Expression | None) -> None:
        super().__init__(table, schema, **_chosen(table, schema, keys, filter))

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        return replacing(self.schema, old, old.slice(0, 0)), count_deleted(self.keys_of(old), old)


class Restore(Statement):
    """Makes the contents what they were: `rows`, in canonical order with `_diff`. It looks at all that is there.

    `marks` are the deleted keys of then, of a table that keeps them; None: what goes now is marked as deleted.
    """

    def __init__(self, table: str, schema: Schema, rows: pa.Table, marks: pa.Table | None = None) -> None:
        super().__init__(table, schema, wanted=RowSelection(schema))
        self._rows, self.marks = rows, marks

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        return replacing(self.schema, old, self._rows), Counts()


class Update(Statement):
    """Changes values of the rows that a filter or keys choose. Keys stay as they are."""

    def __init__(self, table: str, schema: Schema, change: Change, keys: object, filter: pc.Expression | None) -> None:
        every = keys is None and filter is None
        super().__init__(
            table, schema, **({"wanted": RowSelection(schema)} if every else _chosen(table, schema, keys, filter))
        )
        if isinstance(change, Mapping):
            self._check_names(change)
        elif not callable(change):
            raise InvalidUsage(
                f"update takes a function of a pyarrow.Table, or a mapping of columns: got {shown(change)}"
            )
        self._change = change

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        """The old rows out, what was made of them in."""
        if not old.num_rows:
            return old, Counts()
        data = old.select(self.schema.shown.names)
        made = _computed(self.schema, data, self._change) if isinstance(self._change, Mapping) else self._change(data)
        if not isinstance(made, pa.Table) or made.num_rows != data.num_rows:
            what = f"{made.num_rows} rows" if isinstance(made, pa.Table) else f"a {type(made).__name__}"
            raise InvalidUsage(
                f"table {self.table!r}: an update makes one row of each row, so {data.num_rows} in a pyarrow.Table: "
                f"got {what}. Nothing was written",
                table=self.table,
            )  # fmt: skip
        new = parse_rows(self.schema, made)
        for name in self.schema.key_names:
            if not new.column(name).equals(data.column(name)):
                raise InvalidUsage(
                    f"table {self.table!r}: an update cannot change the key column {name!r}. Delete the rows and "
                    "insert others, in one transaction. Nothing was written",
                    table=self.table, column=name,
                )  # fmt: skip
        # Rows may become equal: then they are one row, as often as they were together.
        changes = replacing(self.schema, old, new.append_column(DIFF_FIELD, old.column(DIFF)))
        keys = Keys.of(self.schema, old)
        return changes, count_upserted(keys, old, changes)

    def _check_names(self, change: Mapping[str, Any]) -> None:
        values = [column.name for column in self.schema.value]
        if not change or (unknown := [name for name in change if name not in values]):
            named = shown(unknown[0]) if change else "no column at all"
            meant = did_you_mean(unknown[0], values) if change else ""
            raise InvalidUsage(
                f"table {self.table!r}: an update changes value columns, which are {values}, and not {named}. {meant}",
                table=self.table, columns=list(change),
            )  # fmt: skip


OLD = "_old"


def old(column: str) -> pc.Expression:
    """The column of the row that is there, in `only_if=` of `apply`: `pc.field("seq") > persist.old("seq")`."""
    return pc.field(OLD, parse_text(column, "column", 10_000))


class Apply(Statement):
    """Upserts, deletes and appends as one change.

    Of the upserts, those that a condition takes, and of each key the last one. A table that keeps deleted keys does it
    otherwise (`relation.deleted_keys`), of the same `upserts` and `deletes`, which are as they were given.
    """

    def __init__(
        self, table: str, schema: Schema, upserts: object, deletes: object, appends: object = None, *,
        filling: Filling, only_if: pc.Expression | None = None, order_by: str | None = None,
    ) -> None:  # fmt: skip
        rows = empty_table(schema.data) if upserts is None else parse_partial(schema, upserts, filling)
        self.upserts = filled(schema, rows, filling)
        keys = self.upserts.select(schema.key_names)
        self.deletes = keys.slice(0, 0) if deletes is None else parse_deletes(schema, deletes)
        self.only_if, self.order_by = only_if, order_by
        if order_by is not None:
            check_order_by(table, schema, order_by)
        self.added = None if appends is None else Insert(table, schema, appends, filling)
        keyed = [keys, self.deletes.select(schema.key_names)]
        if self.added is not None and schema.constraints:
            keyed.append(self.added.rows.select(schema.key_names))
        super().__init__(table, schema, keyed=pa.concat_tables(keyed))
        if only_if is not None:
            self._check_condition()

    @cached_property
    def _parts(self) -> tuple[pa.Table, Keys]:
        """One row of each key to upsert, and the keys to delete. Raises InvalidUsage, before anything is written."""
        schema = self.schema
        is_bare = self.deletes.column_names == schema.key_names
        gone = Keys.of(schema, self.deletes if is_bare else parse_keys(schema, self.deletes))  # refuses value columns
        if self.only_if is not None and len(gone):
            raise self._no_condition(
                "a deleted key keeps no row to compare with, so that a late upsert would bring it back. On a timeline "
                "with a WAL a table can keep deleted keys (Table.set_keep_deletes). Elsewhere keep them as rows: with "
                "a column 'deleted', upserted as true under the same condition and left out by filter= when reading "
                '(docs/recipes.md, "Deletes that come out of order"). Or delete in a call of its own'
            )
        rows = self.upserts
        if self.order_by is not None:
            rows = last_of_each(self.table, schema, rows, self.order_by)
        rows = one_row_each(schema, rows)
        keys = Keys.of(schema, rows)
        self._check_apart(keys, gone.table, "the rows to upsert and the keys to delete")
        self.check_added(keys, gone)
        return rows, gone

    def check_added(self, keys: Keys, gone: Keys) -> None:
        """Raise InvalidUsage where a key is appended, and upserted or deleted, too."""
        if self.added is not None:
            added = self.added.rows.select(self.schema.key_names)
            for other, what in ((keys, "the rows to upsert"), (gone, "the keys to delete")):
                self._check_apart(other, added, f"{what} and the rows to append")

    def changes(self, old: pa.Table) -> tuple[pa.Table, Counts]:
        (given, gone), schema = self._parts, self.schema
        keys = Keys.of(schema, given)
        mine, removed = take(old, keys.find(old)), take(old, gone.find(old))
        rows = completed(self.table, schema, given, mine)
        if self.only_if is not None and mine.num_rows:
            takes = self.takes(rows, mine)
            late = Keys.of(schema, mine).find(rows)[~takes]
            rows, mine = take(rows, np.delete(np.arange(rows.num_rows), late)), take(mine, np.flatnonzero(takes))
        changes = replacing(schema, pa.concat_tables([mine, removed]), rows)
        up, down = count_upserted(keys, old, changes), count_deleted(gone, removed)
        return self.with_added(old, changes, up._replace(unchanged=up.unchanged + down.unchanged, deleted=down.deleted))

    def with_added(self, old: pa.Table, changes: pa.Table, counts: Counts) -> tuple[pa.Table, Counts]:
        """Changes and counts, with those of the rows to append."""
        if self.added is None:
            return changes, counts
        there = old if self.added.wanted is None else self.added.wanted.kept(old)
        added, more = self.added.changes(there)
        return summed(self.schema, changes, added), counts._replace(inserted=counts.inserted + more.inserted)

    def _check_apart(self, keys: Keys, others: pa.Table, what: str) -> None:
        """Raise InvalidUsage where a key is in both."""
        if (twice := keys.found_in(others)).any():
            first = take(keys.table, np.flatnonzero(twice)[:1]).to_pylist()
            raise InvalidUsage(
                f"table {self.table!r}: {int(twice.sum())} keys are both among {what}, first {first}. Which of both is "
                "meant only the caller can say. Nothing was written",
                table=self.table, problem="key twice",
            )  # fmt: skip

    def takes(self, rows: pa.Table, mine: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each of the rows that are there, one a key, whether the new row of its key replaces it."""
        if has_several(self.schema, mine):
            raise InvalidUsage(
                f"table {self.table!r}: only_if compares a row with the one that is there, and a key has several. "
                "Nothing was written. Upsert these keys without only_if, or make tables with unique=True",
                table=self.table, problem="several rows",
            )  # fmt: skip
        found = self._compared(take(rows, Keys.of(self.schema, mine).find(rows)), mine)
        return np.asarray(found.column(0).fill_null(False).combine_chunks().to_numpy(zero_copy_only=False), np.bool_)

    def _compared(self, rows: pa.Table, mine: pa.Table) -> pa.Table:
        had = [joined(mine.column(name)) for name in self.schema.names]
        both = rows.drop_columns([DIFF]).append_column(OLD, pa.StructArray.from_arrays(had, self.schema.names))
        return evaluated(both, {"takes": self.only_if})

    def _check_condition(self) -> None:
        """Raise InvalidUsage unless the condition can be one."""
        why, empty = "", empty_table(self.schema.contents)
        if not isinstance(self.only_if, pc.Expression):
            why = f"it is an Arrow expression, such as pc.field('seq') > persist.old('seq'): got {shown(self.only_if)}"
        elif OLD in self.schema.names:
            why = f"a column of the table has the name {OLD!r}, which here is the row that is there"
        else:
            try:
                kind = self._compared(empty, empty).column(0).type
            except (pa.ArrowException, KeyError, TypeError) as error:
                why = str(error)
            else:
                why = "" if pa.types.is_boolean(kind) else f"it is a {kind}, not true or false"
        if why:
            raise self._no_condition(why)

    def _no_condition(self, why: str) -> InvalidUsage:
        return InvalidUsage(
            f"table {self.table!r}: only_if cannot be used: {why}. Nothing was written", table=self.table
        )


def _chosen(table: str, schema: Schema, keys: object, filter: pc.Expression | None) -> dict[str, Any]:
    if (keys is None) == (filter is None):
        raise InvalidUsage(
            f"table {table!r}: say which rows are meant, by either keys= or filter=; for all of them, "
            "filter=pyarrow.compute.scalar(True)",
            table=table,
        )
    if keys is not None:
        return {"keyed": parse_keys(schema, keys)}
    return {"wanted": Asked(filter=filter).of(schema)}


def _computed(schema: Schema, data: pa.Table, change: Mapping[str, Any]) -> pa.Table:
    given = {name: value for name, value in change.items() if isinstance(value, pc.Expression)}
    if given:
        try:
            found = evaluated(data, given)
        except (pa.ArrowException, KeyError) as error:
            raise InvalidUsage(f"an expression of this update cannot be computed: {error}") from error
    for name, value in change.items():
        index = data.schema.get_field_index(name)
        if name in given:
            column = found.column(name)
        elif callable(value):
            column = value(data)
        else:
            column = _repeated(value, schema.data.field(name), data.num_rows)
        kind = column.type if isinstance(column, (pa.Array, pa.ChunkedArray)) else None
        if kind is None:
            raise InvalidUsage(f"a function for column {name!r} returns an Arrow array: got {shown(column)}")
        data = data.set_column(index, name, column)
    return data


def _repeated(value: object, field: pa.Field, count: int) -> pa.Array:
    if is_json(field):
        return pa.repeat(build_column([value], field)[0], count)
    try:
        return pa.repeat(pa.scalar(value, field.type), count)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(
            f"column {field.name!r} is {field.type}, and {shown(value)} is no value of it", column=field.name
        ) from error


class NewValues(NamedTuple):
    """Rows of `schema`, whose columns are the key and some of a table's value columns: one row a key, in order."""

    schema: Schema
    rows: pa.Table

    def keys(self) -> pa.Table:
        return self.rows.select(self.schema.key_names)

    def changed(self, old: pa.Table) -> pa.Table:
        """The rows of a table, which are in canonical order and have these keys, with the new values."""
        keys = [column.combine_chunks() for column in old.select(self.schema.key_names).columns]
        ties = adjacent_ties(keys)
        is_new = np.ones(old.num_rows, np.bool_)
        is_new[1:] = True if ties is None else ~ties
        found = take(self.rows, Keys.of(self.schema, old).find(self.rows))
        places = np.cumsum(is_new) - 1
        for column in self.schema.value:
            index = old.schema.get_field_index(column.name)
            old = old.set_column(index, old.schema.field(index), take(found.select([column.name]), places).column(0))
        return old


def new_values(table: str, schema: Schema, rows: pa.Table) -> NewValues:
    """Rows of a table's key and of some of its value columns. Raises InvalidUsage."""
    values = [column.name for column in schema.value]
    names = rows.column_names
    if unknown := [name for name in names if name not in schema.names]:
        meant = did_you_mean(unknown[0], schema.names)
        raise InvalidUsage(
            f"table {table!r} has no column {unknown[0]!r}. {meant}It has {schema.names}", table=table, columns=unknown
        )
    some = Schema(schema.key, [column for column in schema.value if column.name in names])
    if not some.value:
        raise InvalidUsage(
            f"table {table!r}: an update has the key columns, {schema.key_names}, and some of {values}, which change: "
            f"got {names}",
            table=table, columns=names,
        )  # fmt: skip
    return NewValues(some, one_row_each(some, parse_rows(some, rows)))
