"""A snapshot: contents as of one time, read in bounded memory, whole or in splits. A shard's have one part.

A snapshot holds the states that it reads from, so that nothing they refer to is collected while it is in use. Use it in
a `with` block, or drop it after use. Splits are disjoint key ranges whose union is the snapshot. They pickle, and any
process can read them while the snapshot that made them is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from persist_lib.arguments import check_type, not_pickled, parse_integer
from persist_lib.config import Config
from persist_lib.convert.codecs import rows_as_models
from persist_lib.core.plan.cutting import cut_evenly
from persist_lib.core.plan.requests import TaskInput
from persist_lib.errors import Missing, redacted
from persist_lib.format.predicate import Where
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import ShardId
from persist_lib.kernel.columns import integers
from persist_lib.kernel.multiplicity import built, check_count, check_rows, repeated, total
from persist_lib.location.api import Blob
from persist_lib.location.stack import open_stack
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation import projection
from persist_lib.relation.conversions import Doors
from persist_lib.relation.held import Named, Part, Place, resuming
from persist_lib.relation.projection import Shown
from persist_lib.relation.row_selection import KeyRange, RowSelection, View, packed_keys, unpacked_keys
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.shard.runs import Stored, holding, inputs_of, may_keep, newest_schema, overlapping
from persist_lib.shard.small_runs import pieces
from persist_lib.shard.stretches import stretches

if TYPE_CHECKING:
    from persist_lib.relation.reader import ReadHandle
    from persist_lib.relation.reader_lease import Reading


MOST_SPLITS = 1 << 20
MEMORY_ROWS = 65_536
"""Rows of each table of contents that are in memory already."""
THREADS = 4
"""How many shards of one collection are read at a time."""


class Split(msgspec.Struct, frozen=True):
    """One of the disjoint key ranges of a snapshot. It pickles, and any process that reaches the location can read it.

    `Spending` tells the cost of reading it, as of any call:

        with persist.Spending() as spent:
            table = split.to_arrow()
        return table, spent.cost
    """

    urls: tuple[str, str]
    shard: str
    as_of: int
    schema: Schema
    schemas: tuple[Schema, ...]
    inputs: tuple[TaskInput, ...]
    key_lower: bytes | None
    key_upper: bytes | None
    columns: tuple[str, ...] | None
    merge_bytes: int
    where: Where | None = None
    only: tuple[str, ...] | None = None
    keys: bytes | None = None
    """The only keys that it has, as `read.keyed` packs them; None: all keys of its range."""
    diff: bool = False
    """Whether it gives each distinct row once, with `_diff`, and not each row as often as it is there."""

    def __repr__(self) -> str:
        where = redacted(self.urls[0])
        return f"Split({where!r}, {self.shard!r}, as_of={self.schema.show_as_of(self.as_of)}, size={self.size})"

    @property
    def size(self) -> int:
        """Bytes of the parts that it reads from. Of some parts it reads only some chunks."""
        return sum(part.size for run in self.inputs for part in run.parts)

    def batches(self, blob: Blob | None = None) -> Iterator[pa.Table]:
        """The split's contents in key order, as tables of bounded size.

        `blob` is an open Blob of the location, such as `client.blob`; without one, this process opens the location.
        """
        return self._batches(self._opened(blob))

    def _opened(self, blob: Blob | None) -> Blob:
        if blob is None:
            return _blob(self.urls)
        return check_type(blob, Blob, "blob", "client.blob")  # type: ignore[type-abstract]

    def _batches(self, blob: Blob) -> Iterator[pa.Table]:
        with Runtime(background=False).pool(1, "persist-split") as pool:
            tables = streamed(self, blob, pool)
        yield from tables if self.diff else repeated(tables, repr(self))

    def _of_keys(self, blob: Blob, keys: bytes, pool: Executor) -> pa.Table:
        stored = self._stored(blob)
        return projection.of_keys(stored, self.inputs, unpacked_keys(stored.schema, keys), self._shown, pool)

    def _stored(self, blob: Blob) -> Stored:
        shard = ShardId(self.shard)
        return Stored(blob, shard, self.schemas, self._stored_schema, self.key_lower, self.key_upper, self.where)

    @property
    def _shown(self) -> Shown:
        """What is shown of the stored contents: without columns that the reader does not have, and in its order.

        Of columns that are only in another order, some can be selected without reading all.
        """
        columns, stored = self.columns, self._stored_schema
        is_same = stored == self.schema or (self.only is not None and len(stored.names) == len(self.schema.names))
        if columns is None and not is_same:
            columns = tuple(self.schema.names)
        return Shown(columns, self.where, self.only)

    @property
    def _stored_schema(self) -> Schema:
        """The reader's schema, or the newest of the parts if that is newer.

        Columns that the reader does not have are dropped after that, and rows that are equal then are added up.
        """
        return newest_schema(self.schema, self.schemas, self.inputs)

    def to_arrow(self, blob: Blob | None = None) -> pa.Table:
        """The split's contents as one table. `blob` is as in `batches`."""
        target = self._shown.schema(self.schema)
        blob = self._opened(blob)
        with Runtime(background=False).pool(1, "persist-split") as pool:
            table = pa.concat_tables([empty_table(target), *streamed(self, blob, pool)]).combine_chunks()
        return table if self.diff else built(table, repr(self))


def streamed(split: Split, blob: Blob, pool: Executor) -> Iterator[pa.Table]:
    """Its distinct rows, with `_diff`. Small runs are read whole, in the pool, before this returns."""
    if split.keys is not None:
        return pieces(split._of_keys(blob, split.keys, pool))
    return projection.stream(split._stored(blob), split.inputs, split._shown, split.merge_bytes, pool)


class PlaceContents(Place):
    """The contents of one shard as of a time: each distinct row once, with `_diff`, in key order."""

    def __init__(self, handle: ReadHandle, as_of: int, rows: RowSelection, reading: Reading | None = None) -> None:
        super().__init__(handle, max(0, as_of), reading)
        self._as_of, self._diff = as_of, rows.diff
        self.schema = rows.schema  # which may be other columns than those in which its handle was opened
        self._keys, self._shown, self._wanted = rows.range_, Shown(rows.columns, rows.where), rows.keys

    @property
    def size(self) -> int:
        return self._split(self._keys).size

    def stream(self, where: Where | None = None, only: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows as tables of bounded size: those that `where` keeps, and the columns `only` of them.

        Rows that look alike in these stay apart. Of parts that are not stored whole in memory, only what is wanted is
        fetched.
        """
        shown = self._shown if where is None else self._shown._replace(where=where.both(self._shown.where))
        shown = shown if only is None else shown._replace(only=tuple(only))
        return resuming(partial(self._stream, shown), self.look_again)

    def to_arrow(self) -> pa.Table:
        machine = self.handle.machine
        try:
            with machine.runtime.pool(machine.config.read_threads, "persist-read") as pool:
                split, blob = self._split(self._keys), machine.reads
                if split.keys is not None:
                    return split._of_keys(blob, split.keys, pool)
                return projection.at_once(split._stored(blob), split.inputs, split._shown, split.merge_bytes, pool)
        except Missing as missing:
            self.look_again(missing)
        empty = empty_table(self._shown.schema(self.schema))
        return pa.concat_tables([empty, *self.stream()]).combine_chunks()

    def splits(self, n: int) -> list[Split]:
        whole, machine = self._split(self._keys), self.handle.machine
        found = stretches(machine.reads, machine.shard, whole.inputs, whole.schemas, whole.size // n)
        ranges = [KeyRange(*edges) for edges in pairwise([None, *cut_evenly(found, n), None])]
        return [self.of_keys(range_) for range_ in ranges]

    def of_keys(self, range_: KeyRange) -> Split:
        return self._split(self._keys.meet(range_))

    def _split(self, keys: KeyRange, shown: Shown | None = None) -> Split:
        handle, state, shown = self.handle, self.state, shown or self._shown
        found = state.batches_at(self._as_of) if self._as_of >= 0 else ()
        batches = (b for b in found if b.count and b.lower.is_before(self._as_of))
        upper = None if self._as_of == MAX_TIME else self._as_of + 1
        overlap = overlapping(inputs_of(batches, 0, upper), keys.lower, keys.upper)
        inputs = tuple(may_keep(shown.where, overlap, state.schemas, self.schema))
        wanted = None if self._wanted is None else self._wanted.in_range(keys.lower, keys.upper)
        return Split(
            handle.urls, handle.shard, self._as_of, self.schema, state.schemas,
            inputs if wanted is None else holding(inputs, wanted), keys.lower, keys.upper,
            shown.columns, handle.machine.config.merge_bytes, shown.where, shown.only,
            None if wanted is None else packed_keys(wanted), self._diff,
        )  # fmt: skip

    def _stream(self, shown: Shown) -> Iterator[pa.Table]:
        machine = self.handle.machine
        with machine.runtime.pool(machine.config.read_threads, "persist-read") as pool:
            return streamed(self._split(self._keys, shown), machine.reads, pool)


P = TypeVar("P", bound="PlaceContents | MemoryContents")


class MemoryContents(Part):
    """Contents that were read and added up already: of a table, with what its WAL has beyond it."""

    def __init__(self, schema: Schema, table: pa.Table) -> None:
        self.schema, self._table = schema, table

    @property
    def size(self) -> int:
        """Nothing more is read."""
        return 0

    def stream(self, where: Where | None = None, only: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for start in range(0, self._table.num_rows, MEMORY_ROWS):
            table = self._table.slice(start, MEMORY_ROWS)
            kept = table if where is None else where.kept(table)
            yield kept if only is None else kept.select(list(only))

    def to_arrow(self) -> pa.Table:
        return self._table


class SnapshotOf(Doors[P]):
    """The contents of a shard, a collection or a table as of a time, read part by part when they are asked for.

    Doors give each row as often as it is there; where `diff` is set, each distinct row once, with a last column
    `_diff`, the multiplicity, which may be negative. Without it, reading raises InvalidUsage for a negative one, and
    where more than `most_rows` (100 million) rows would be built in memory.

    The consolidated tables are what `diff` shows. Everything that repeats rows does so here, last.
    """

    diff: bool = False

    def __init__(
        self, named: Named, as_of: int, view: View, parts: Sequence[P], runtime: Runtime, spent: Spending
    ) -> None:
        super().__init__(named, view.schema, parts, spent)
        self.as_of, self.diff = as_of, view.diff
        self._view, self._runtime = view, runtime

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, as_of={self._view.schema.show_as_of(self.as_of)})"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its tables."""
        found = self._view.shown
        return found if self.diff else found.remove(found.get_field_index(DIFF))

    def batches(self) -> Iterator[pa.Table]:
        """The contents as tables of bounded size, however large they are."""
        return self._consolidated() if self.diff else repeated(self._consolidated(), self._named())

    def to_arrow(self) -> pa.Table:
        """The contents as one table. Parts are fetched and decoded in parallel."""
        table = self._consolidated_table()
        return table if self.diff else built(table, self._named())

    def _selected(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the rows that `where` keeps, in the order of `batches`. Query engines read through this."""
        if self.diff:
            return self._consolidated_selection(names, where)
        return repeated(self._consolidated_selection([*names, DIFF], where), self._named())

    def count(self) -> int:
        """How many rows there are: the sum of the multiplicities, whether `diff` is set or not."""
        count = 0
        for table in self._consolidated_selection([DIFF], None):
            diffs = integers(table.column(DIFF))
            check_rows(table, diffs, self._named())
            count += total(diffs)
        return count

    def to_models(self, model: type[Any] | None = None) -> list[Any]:
        """The rows as instances of a pydantic model, each as often as it is there. See `Doors.to_models`."""
        table = self._consolidated_table()
        check_count(total(integers(table.column(DIFF))), self._named())
        return rows_as_models(self._schema, table, model)

    @property
    def size(self) -> int:
        """Bytes of the parts that this snapshot reads from."""
        return sum(part.size for part in self._parts)

    def _consolidated(self) -> Iterator[pa.Table]:
        """Each distinct row once, with `_diff`, as tables of bounded size."""
        return self._spent.over(self._view.of((part.stream(), part.schema) for part in self._parts))

    def _consolidated_selection(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the distinct rows that `where` keeps; rows that look alike stay apart."""
        if self._view.adds_up or any(part.schema != self._view.schema for part in self._parts):
            kept = (table if where is None else where.kept(table) for table in self._consolidated())
            return (table.select(list(names)) for table in kept)
        return self._spent.over(table for part in self._parts for table in part.stream(where, names))

    def _consolidated_table(self) -> pa.Table:
        """Each distinct row once, with `_diff`, as one table. Shards are read in parallel."""
        with self._spent.again():
            if self._view.adds_up:
                tables = list(self._view.of((part.stream(), part.schema) for part in self._parts))
            elif len(self._parts) <= 1:
                tables = [table for part in self._parts for table in self._whole(part)]
            else:
                with self._runtime.pool(min(THREADS, len(self._parts)), "persist-collection") as pool:
                    tables = [table for found in pool.map(self._whole, self._parts) for table in found]
        return tables[0] if len(tables) == 1 else pa.concat_tables([empty_table(self._view.shown), *tables])

    __reduce__ = not_pickled(
        "A snapshot", "Pass its splits, as in snapshot.splits(1), and read them in the other process"
    )

    def _named(self) -> str:
        return f"this snapshot of {self._of} as of {self._view.schema.show_as_of(self.as_of)}"

    def _whole(self, part: P) -> list[pa.Table]:
        return list(self._view.one(iter([part.to_arrow()]), part.schema))


class Snapshot(SnapshotOf[PlaceContents]):
    """A shard's contents as of the time `as_of`, in key order: each row as often as it is there.

    `as_of` is -1 where no time is complete yet: the contents are empty.

    Its tables have the schema's columns, or those of a projection, in the order of these. With `diff` they have each
    distinct row once, then `_diff`, its multiplicity; with a projection that is the sum over the rows that look alike.
    """

    def splits(self, n: int) -> list[Split]:
        """Cut the snapshot into at most `n` disjoint key ranges of about equal size, whose union is the snapshot.

        With `diff` each split adds up its own rows: where `columns=` leaves out a key column, equal rows may be in
        several splits. Keep this snapshot and its reader until the splits have been read.
        """
        with self._spent.again():
            return self._parts[0].splits(parse_splits(n))

    def of_keys(self, lower: bytes | None, upper: bytes | None) -> Split:
        """The contents whose encoded keys are in `[lower, upper)`, as a split. None means no bound.

        Keys are encoded as in the bounds of parts and of splits: `split.key_lower`, `part.key_upper`. Keep this
        snapshot and its reader until the split has been read.
        """
        for name, bound in (("lower", lower), ("upper", upper)):
            if bound is not None:
                check_type(bound, bytes, name, "split.key_lower")
        return self._parts[0].of_keys(KeyRange(lower, upper))


def snapshot_known(
    handle: ReadHandle, as_of: int, rows: RowSelection, reading: Reading | None = None, spent: Spending | None = None
) -> Snapshot:
    """Some rows of a shard as of a time that this process knows to be complete."""
    machine = handle.machine
    view = View(handle.schema, rows.columns, machine.config.merge_bytes, diff=rows.diff)
    parts = [PlaceContents(handle, as_of, rows, reading)]
    return Snapshot(Named("shard", handle.shard), as_of, view, parts, machine.runtime, spent or Spending())


def consolidated_table(rows: SnapshotOf[Any]) -> pa.Table:
    """Each distinct row once, with `_diff`, as one table."""
    return rows._consolidated_table()


def parse_splits(n: object) -> int:
    """The number of splits that a caller passed. Raises InvalidUsage."""
    return parse_integer(n, "the number of splits", 1, MOST_SPLITS)


@lru_cache(maxsize=8)
def _blob(urls: tuple[str, str]) -> Blob:
    """The location's Blob in this process. It is opened once, as a process may read many splits from it."""
    return open_stack(*urls, Config(), Runtime(), read_only=True).blob
