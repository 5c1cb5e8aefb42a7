"""The contents of some rows as of a shard's upper, for calls that write what depends on them; rows in part completed.

They are read from the newest state without a lease, so that looking changes nothing. What that state refers to may be
collected by then, which is seen (Missing), and then a newer state is read.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.convert.by_key import GIVEN
from persist_lib.convert.filling import Filling
from persist_lib.core import refusals as r
from persist_lib.core.state import Batch, State, Version
from persist_lib.errors import ConstraintViolated, InvalidUsage, Missing, SchemaMismatch
from persist_lib.format.conform import conform
from persist_lib.format.predicate import Where
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import integers, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys, Violation, distinct, find_violation, touched
from persist_lib.kernel.order import adjacent_ties, sort_order, take
from persist_lib.location.wrap.deadline import within
from persist_lib.relation.contents import stream
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import fill, named_as
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.refusals import refused
from persist_lib.shard.runs import Stored, inputs_of, look_up, may_keep, overlapping
from persist_lib.times import Unit, show_time


class Looking:
    """The contents of some rows, read again as upper moves: then only what was appended since, where that can be told.

    Contents are tables of the shard's newest schema, with the names and types of the writer's, consolidated.
    They are the sum of all updates that there are, and not contents as of a time that a reader could name. So it does
    not matter how far since is.
    """

    def __init__(self, machine: Machine, schema: Schema, keys: Keys | None, where: Where | None = None) -> None:
        """Of these keys; or of all rows, or those that `where` keeps, which are held in memory."""
        self._machine, self._schema, self._keys, self._where = machine, schema, keys, where
        self._known: tuple[Antichain, Schema, pa.Table] | None = None

    @property
    def schema(self) -> Schema:
        """That of the contents which were read last."""
        return self._schema if self._known is None else self._known[1]

    def contents(self, version: Version, deadline: Deadline) -> tuple[Version, pa.Table]:
        """The contents at `version`, and that; or at a newer version, if objects of this one are collected already."""
        while True:
            try:
                return version, within(deadline, partial(self._contents, version.state))
            except Missing:
                newer = within(deadline, self._machine.fetch)
                if newer.seqno == version.seqno:
                    raise
                version = newer

    def _contents(self, state: State) -> pa.Table:
        schema, upper = named_as(state.schemas[-1], self._schema), state.upper
        known = self._known
        if known is not None and known[1] == schema and _can_continue(state, known[0]):
            lower, tables = known[0], [known[2]]
            batches = [batch for batch in state.trace if lower < batch.upper]
        else:
            lower, tables, batches = Antichain(0), [], list(state.batches_at())
        found = self._read(state, schema, [batch for batch in batches if batch.count], lower)
        contents = consolidate(schema, pa.concat_tables([*tables, found]))
        self._known = upper, schema, contents
        return contents

    def _read(self, state: State, schema: Schema, batches: list[Batch], lower: Antichain) -> pa.Table:
        machine = self._machine
        stored = Stored(machine.lookups, machine.shard, state.schemas, schema, where=self._where)
        inputs = overlapping(inputs_of(batches, lower.time or 0), None, None)
        inputs = may_keep(self._where, inputs, state.schemas, self._schema)
        with machine.runtime.pool(machine.config.read_threads, "persist-look") as pool:
            if self._keys is not None:
                return look_up(stored, inputs, self._keys, None, pool)
            found = stream(stored, inputs, machine.config.merge_bytes, pool)
            kept = found if self._where is None else map(self._where.kept, found)
            return pa.concat_tables([empty_table(schema.contents), *kept])


def _can_continue(state: State, known: Antichain) -> bool:
    """Whether the updates since `known` can be told from those before it.

    SUBTLE: a compaction moves updates forward to its since. In a batch that it made of both, an update from before
    `known` looks like a later one if since is there or beyond.
    """
    newer = [batch for batch in state.trace if known < batch.upper]
    return all(known <= batch.lower or batch.since < known for batch in newer)


WHAT = {"unique": "each key has at most one row, once", "non_negative": "no row's multiplicity is below 0"}


def check_constraints(
    machine: Machine, written: Schema, updates: pa.Table, lower: Antichain, deadline: Deadline
) -> None:
    """Raise ConstraintViolated if these updates, appended at `lower`, would break a constraint at any of their times.

    `updates` are consolidated, in the schema `written`. What dropped columns hold does not count. Does nothing when
    upper is beyond `lower` already: the append can only be refused, or have been committed before. Raises UpperMismatch
    when upper is before `lower`.
    """
    version = _at(machine, lower, deadline)
    if version is None:
        return
    schema = named_as(version.state.schemas[-1], written)
    keys, relevant = touched(schema, conform("the append", updates, schema))
    if not len(keys):
        return
    version, contents = Looking(machine, written, keys).contents(version, deadline)
    if version.state.upper != lower:
        return  # another writer was first, so that the commit is refused
    if schema.shown is not schema:
        schema = schema.shown
        contents = consolidate(schema, contents.select(schema.contents.names))
        relevant = consolidate(schema, relevant.select(schema.updates.names))
    if (found := find_violation(schema, contents, relevant)) is not None:
        raise violated(machine.shard, found, schema.times)


def violated(shard: ShardId, found: Violation, times: Unit | None) -> ConstraintViolated:
    """The error that names the constraint and the first few rows."""
    keys = "keys" if found.constraint == "unique" else "rows"
    return ConstraintViolated(
        f"shard {shard}: the schema says {found.constraint} ({WHAT[found.constraint]}), and after this append "
        f"{found.breaks} {keys} would break that at time {show_time(found.time, times)}, first {found.rows[:3]}. "
        f"Nothing was written. Retract what the shard holds for these keys in the same append, or use upsert",
        shard=shard, constraint=found.constraint, time=found.time, count=found.breaks, rows=found.rows,
    )  # fmt: skip


def _at(machine: Machine, lower: Antichain, deadline: Deadline) -> Version | None:
    """A version whose upper is `lower`; None if upper is beyond.

    All versions with the same upper have the same contents, so the one that this process knows will do.
    """
    version = machine.version
    if version.state.upper != lower:
        version = within(deadline, machine.fetch)
    upper = version.state.upper
    if upper < lower:
        raise refused(machine.shard, r.WrongUpper(lower, upper))
    return version if upper == lower else None


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
