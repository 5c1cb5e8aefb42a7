"""What a snapshot shows of its contents: the rows that a filter keeps, and some of the columns.

Columns can be left out in two ways. A projection (`columns=` of a snapshot) adds up the rows that are equal in what is
left, so that it is a collection again. A selection (of a query engine, which counts rows) leaves each row as it is.

A projection with all key columns comes in key order, in bounded memory. Any other is added up as it is read: in
memory, and beyond a share of `merge_bytes` in sorted runs in temporary files, which are then merged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import IO, NamedTuple, Self

import numpy as np
import pyarrow as pa

from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import Part
from persist_lib.errors import DiffOverflow, DiskFull
from persist_lib.format.predicate import Where
from persist_lib.kernel.columns import at_time, integers
from persist_lib.kernel.consolidate import I64_MAX, I64_MIN, consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.merge import COPIES, Run, merge_contents
from persist_lib.kernel.order import adjacent_ties, columns_in_order
from persist_lib.relation import contents
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, Column, Schema
from persist_lib.shard.runs import Stored, ahead, read_part
from persist_lib.shard.small_runs import MOST_BYTES, pieces

SPILL_ROWS = 1 << 14


class Shown(NamedTuple):
    """What is shown of contents: the rows that `where` keeps, and of them either a projection or a selection.

    `columns` are added up, `only` are selected (from the projection, where there is one); None is all of them.
    """

    columns: tuple[str, ...] | None = None
    where: Where | None = None
    only: tuple[str, ...] | None = None

    def schema(self, schema: Schema) -> pa.Schema:
        projected = narrowed(schema.contents, self.columns)
        return projected if self.only is None else pa.schema([projected.field(name) for name in self.only])

    def kept(self, table: pa.Table) -> pa.Table:
        return table if self.where is None else self.where.kept(table)

    def needed(self, schema: Schema) -> list[str] | None:
        """The columns that have to be read for it; None for all of them."""
        chosen = self.columns if self.columns is not None else self.only
        if chosen is None:
            return None
        names = {*chosen, *(self.where.names if self.where else ())}
        return None if names.issuperset(schema.names) else [name for name in schema.names if name in names]


def narrowed(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """The schema with these of its columns, in their order, and `_diff`."""
    names = None if columns is None else [name for name in columns if name in schema.names]
    return schema if names is None else pa.schema([*map(schema.field, names), schema.field(DIFF)])


def is_projection(schema: Schema, columns: Sequence[str] | None) -> bool:
    """Whether rows may become equal, or get another order, when only these columns are left, in this order."""
    return columns is not None and list(columns) != schema.names


def stream(
    stored: Stored, inputs: Sequence[TaskInput], shown: Shown, merge_bytes: int, pool: Executor
) -> Iterator[pa.Table]:
    """What is shown of the contents that the runs add up to, in order, as tables of bounded size."""
    schema = stored.schema
    if not is_projection(schema, shown.columns):
        tables = _contents(stored, inputs, shown, merge_bytes, pool)
    elif set(shown.columns or ()).issuperset(schema.key_names):
        ordered, target = Schema(key=_chosen(schema, shown.columns or ())), narrowed(schema.contents, shown.columns)
        tables = by_key(_contents(stored, inputs, shown, merge_bytes, pool), ordered, target, schema.key)
    else:
        projected = projection_of(schema, shown.columns or ())
        read = (table for run in stored.streams(inputs, shown.needed(schema)) for table in run)
        tables = added_up(_projected(read, shown, schema), projected, merge_bytes)
    names = shown.schema(schema).names
    return (table.select(names) for table in tables)


def at_once(stored: Stored, inputs: Sequence[TaskInput], shown: Shown, merge_bytes: int, pool: Executor) -> pa.Table:
    """The same as one table, read in parallel."""
    schema = stored.schema
    names = shown.schema(schema).names
    if is_projection(schema, shown.columns):
        return _projected_at_once(stored, inputs, shown, merge_bytes, pool).select(names)
    needed = shown.needed(schema)
    tables = contents.at_once(stored, inputs, needed, lambda table: shown.kept(table).select(names), merge_bytes, pool)
    return pa.concat_tables([empty_table(shown.schema(schema)), *tables])


def of_keys(stored: Stored, inputs: Sequence[TaskInput], keys: Keys, shown: Shown, pool: Executor) -> pa.Table:
    """What is shown of the contents that have one of the keys, as one table."""
    schema = stored.schema
    table = shown.kept(contents.of_keys(stored, inputs, keys, shown.needed(schema), pool))
    if is_projection(schema, shown.columns):
        table = projected_rows(schema, shown.columns, table)
    return table.select(shown.schema(schema).names)


def projected_rows(schema: Schema, columns: Sequence[str] | None, rows: pa.Table) -> pa.Table:
    """The chosen columns of contents in memory, added up."""
    narrow = rows.select(narrowed(schema.contents, columns).names)
    if columns is None or not is_projection(schema, columns):
        return narrow
    projected = projection_of(schema, columns)
    return _total([narrow]) if projected is None else consolidate(projected, narrow)


def projection_of(schema: Schema, columns: Sequence[str]) -> Schema | None:
    """A schema of these columns, by which rows are ordered and added up; None for no columns."""
    chosen = _chosen(schema, columns)
    return Schema(key=chosen) if chosen else None


def _chosen(schema: Schema, columns: Sequence[str]) -> tuple[Column, ...]:
    there = {column.name: column for column in schema.columns}
    return tuple(there[name] for name in columns if name in there)


def added_up(tables: Iterable[pa.Table], schema: Schema | None, merge_bytes: int) -> Iterator[pa.Table]:
    """Add up rows of `schema.contents` that come in any order. The sums come in order, as tables of bounded size.

    Without a schema there are no columns other than `_diff`, and the sum of all diffs is the one row.
    """
    if schema is None:
        yield _total(tables)
        return
    with _Sums(schema, min(merge_bytes // COPIES, MOST_BYTES)) as sums:
        for table in tables:
            sums.add(table)
        yield from sums.result(merge_bytes)


def _contents(
    stored: Stored, inputs: Sequence[TaskInput], shown: Shown, merge_bytes: int, pool: Executor
) -> Iterator[pa.Table]:
    """The contents that the filter keeps, with at least the columns that are needed."""
    needed = shown.needed(stored.schema)
    if needed is None or not contents.is_one_time(inputs):
        return map(shown.kept, contents.stream(stored, inputs, merge_bytes, pool))
    return _narrow(stored, inputs, shown, needed, merge_bytes, pool)


def _narrow(
    stored: Stored, inputs: Sequence[TaskInput], shown: Shown, needed: list[str], merge_bytes: int, pool: Executor
) -> Iterator[pa.Table]:
    """The contents of one consolidated run, of which only some columns are read.

    Whether two rows are shares of one sum that was split shows only in all columns. Where that may be, all
    columns are read from there on.
    """
    done = 0
    for run in stored.streams(inputs, needed):
        for table in run:
            if contents.may_be_split(table):
                yield from _after(map(shown.kept, contents.stream(stored, inputs, merge_bytes, pool)), done)
                return
            kept = shown.kept(table)
            done += kept.num_rows
            yield kept


def _after(tables: Iterable[pa.Table], done: int) -> Iterator[pa.Table]:
    for table in tables:
        dropped = min(done, table.num_rows)
        done -= dropped
        if dropped < table.num_rows:
            yield table.slice(dropped)


def _projected(tables: Iterable[pa.Table], shown: Shown, schema: Schema) -> Iterator[pa.Table]:
    names = narrowed(schema.contents, shown.columns).names
    return (shown.kept(table).select(names) for table in tables)


def _projected_at_once(
    stored: Stored, inputs: Sequence[TaskInput], shown: Shown, merge_bytes: int, pool: Executor
) -> pa.Table:
    """The projection as one table. Some parts at a time are read and added up in the pool."""
    schema, chosen = stored.schema, shown.columns or ()
    projected = projection_of(schema, chosen)
    needed = shown.needed(schema)
    empty = empty_table(narrowed(schema.contents, chosen))
    if set(chosen).issuperset(schema.key_names):
        narrow = Schema(schema.key, _chosen(Schema(schema.value), chosen))

        def finish(table: pa.Table) -> pa.Table:
            return consolidate(narrow, shown.kept(table).select(empty.schema.names), "split")

        form = contents.Form(narrow, needed, finish, False, schema.key_names)
        if (found := contents.projected_at_once(stored, inputs, form, merge_bytes, pool)) is not None:
            return pa.concat_tables([empty, *found])

    def settled(pair: tuple[TaskInput, Part]) -> pa.Table:
        # Not the pool's `map`: this runs in the pool's threads, which would wait for each other.
        (table,) = _projected([read_part(stored, *pair, needed, times=False)], shown, stored.schema)
        return table if projected is None else consolidate(projected, table, "split")

    tables = ahead(pool, settled, [(run, part) for run in inputs for part in run.parts])
    return pa.concat_tables([empty, *added_up(tables, projected, merge_bytes)]).combine_chunks()


def by_key(
    tables: Iterable[pa.Table], schema: Schema, target: pa.Schema, key: tuple[Column, ...]
) -> Iterator[pa.Table]:
    """Add up contents, or updates, that are in key order: the columns of `target`, as `schema` orders them.

    All key columns are among them. The rows of the last key wait for more.
    """
    keys, waiting = Schema(key=key), empty_table(target)
    for table in tables:
        window = consolidate(schema, pa.concat_tables([waiting, table.select(target.names)]), "split")
        ties = adjacent_ties(columns_in_order(keys, window.select(keys.names))) if window.num_rows else None
        ends = np.flatnonzero(~ties) if ties is not None else np.empty(0, np.int64)
        start = int(ends[-1]) + 1 if len(ends) else 0
        waiting = window.slice(start)
        if start:
            yield consolidate(schema, window.slice(0, start))
    yield consolidate(schema, waiting)


def _total(tables: Iterable[pa.Table]) -> pa.Table:
    """The sum of all diffs, as one row; no row for zero. Raises DiffOverflow."""
    total = 0
    for table in tables:
        diffs = integers(table.column(DIFF))
        total += (int((diffs >> 32).sum()) << 32) + int((diffs & 0xFFFF_FFFF).sum())
    if not I64_MIN <= total <= I64_MAX:
        raise DiffOverflow(f"the diffs add up to {total}, which is beyond a signed 64-bit integer", total=total)
    field = pa.field(DIFF, pa.int64(), nullable=False)
    return pa.table([pa.array([total] if total else [], pa.int64())], schema=pa.schema([field]))


class _Sums:
    """Rows that are added up: the sums so far in memory, and sorted runs of sums in temporary files beyond a limit."""

    def __init__(self, schema: Schema, limit: int) -> None:
        self._schema, self._limit = schema, limit
        self._held: list[pa.Table] = []
        self._bytes = self._settled = 0
        self._spilled: list[IO[bytes]] = []

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self._held.append(table)
        self._bytes += table.nbytes
        # Adding up costs as much as there is, so it waits until there is twice as much as after the last time.
        if self._bytes >= max(self._limit // 4, 2 * self._settled):
            self._settle()
            if self._bytes >= self._limit // 2:
                self._spill()

    def result(self, merge_bytes: int) -> Iterator[pa.Table]:
        """The sums in order. Raises DiffOverflow."""
        if not self._spilled:
            table = pa.concat_tables([empty_table(self._schema.contents), *self._held])
            yield from pieces(consolidate(self._schema, table))
            return
        self._settle()
        runs: list[Run] = [*map(_stored_run, self._spilled), (at_time(piece, 0) for piece in pieces(self._held[0]))]
        yield from merge_contents(runs, self._schema, merge_bytes=merge_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._spilled:
            file.close()

    def _settle(self) -> None:
        table = pa.concat_tables([empty_table(self._schema.contents), *self._held])
        table = consolidate(self._schema, table, "split")
        self._held, self._bytes = [table], table.nbytes
        self._settled = self._bytes

    def _spill(self) -> None:
        table = self._held[0]
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._spilled.append(file)
        try:
            with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
                writer.write_table(table, max_chunksize=SPILL_ROWS)
            file.seek(0)
        except OSError as error:
            where = tempfile.gettempdir()
            raise DiskFull(
                f"the projection does not fit into memory, and {where} cannot hold {table.nbytes} more bytes of it: "
                f"{error}. Point TMPDIR at a larger disk, or read more columns of the key",
                path=where, free=None,
            ) from error  # fmt: skip
        self._held, self._bytes, self._settled = [], 0, 0


def _stored_run(file: IO[bytes]) -> Run:
    with pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield at_time(pa.Table.from_batches([batch]), 0)
