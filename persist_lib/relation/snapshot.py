"""A snapshot: the contents of a shard as of one time, read in bounded memory, whole or in splits.

A snapshot holds the state that it reads from, so that nothing it refers to is collected while it is in use. Use it in a
`with` block, or drop it after use. Splits are disjoint key ranges whose union is the snapshot. They pickle, and any
process can read them while the snapshot that made them is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from persist_lib.arguments import check_type, not_pickled, parse_integer
from persist_lib.config import Config
from persist_lib.core.plan.compaction import TaskInput
from persist_lib.core.plan.cutting import cut_evenly
from persist_lib.errors import Missing, redacted
from persist_lib.format.predicate import Where
from persist_lib.ids import ShardId
from persist_lib.kernel.multiplicity import built, repeated
from persist_lib.location.api import Blob
from persist_lib.location.stack import open_stack
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation import contents, projection
from persist_lib.relation.changes import Held
from persist_lib.relation.conversions import Rows
from persist_lib.relation.projection import Shown
from persist_lib.relation.row_selection import KeyRange, RowSelection, packed, unpacked
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.lookup import holding
from persist_lib.shard.runs import Stored, inputs_of, newest_schema, overlapping
from persist_lib.shard.small_runs import pieces
from persist_lib.shard.stretches import stretches

if TYPE_CHECKING:
    from persist_lib.relation.reader import ReadHandle, Reading


MOST_SPLITS = 1 << 20


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
            tables = self.streamed(blob, pool)
        yield from tables if self.diff else repeated(tables, repr(self))

    def streamed(self, blob: Blob, pool: Executor) -> Iterator[pa.Table]:
        """Its distinct rows, with `_diff`. Small runs are read whole, in the pool, before this returns."""
        if self.keys is not None:
            return pieces(self._of_keys(blob, self.keys, pool))
        return projection.stream(self._stored(blob), self.inputs, self._shown, self.merge_bytes, pool)

    def at_once(self, blob: Blob, pool: Executor) -> pa.Table | None:
        """Its distinct rows as one table, read in parallel; None when they have to be streamed."""
        if self.keys is not None:
            return self._of_keys(blob, self.keys, pool)
        return projection.at_once(self._stored(blob), self.inputs, self._shown, self.merge_bytes, pool)

    def _of_keys(self, blob: Blob, keys: bytes, pool: Executor) -> pa.Table:
        stored = self._stored(blob)
        return projection.of_keys(stored, self.inputs, unpacked(stored.schema, keys), self._shown, pool)

    def _stored(self, blob: Blob) -> Stored:
        shard = ShardId(self.shard)
        return Stored(blob, shard, self.schemas, self._stored_schema, self.key_lower, self.key_upper, self.where)

    @property
    def _shown(self) -> Shown:
        """What is shown of the stored contents. Columns that the reader does not have are projected away."""
        columns = self.columns
        if columns is None and self._stored_schema != self.schema:
            columns = tuple(self.schema.names)
        return Shown(columns, self.where, self.only)

    @property
    def _stored_schema(self) -> Schema:
        """The reader's schema, or the newest of the parts if that is newer.

        Columns that the reader does not have are dropped after that, and rows that are equal then are added up.
        """
        return newest_schema(self.schema, self.schemas, self.inputs)

    def is_contents(self) -> bool:
        """Whether the parts as stored are the contents. It does not look whether a sum in them was split."""
        return self.keys is None and contents.is_one_time(self.inputs) and self._shown.is_whole()

    def to_arrow(self, blob: Blob | None = None) -> pa.Table:
        """The split's contents as one table. `blob` is as in `batches`."""
        target = self._shown.schema(self.schema)
        blob = self._opened(blob)
        with Runtime(background=False).pool(1, "persist-split") as pool:
            table = pa.concat_tables([empty_table(target), *self.streamed(blob, pool)]).combine_chunks()
        return table if self.diff else built(table, repr(self))


class Snapshot(Rows, Held):
    """A shard's contents as of the time `as_of`, in key order: each row as often as it is there.

    `as_of` is -1 where no time is complete yet: the contents are empty.

    Its tables have the schema's columns, or those of a projection, in the order of these. With `diff` they have each
    distinct row once, then `_diff`, its multiplicity; with a projection that is the sum over the rows that look alike.
    """

    def __init__(
        self,
        handle: ReadHandle,
        reading: Reading,
        as_of: int,
        rows: RowSelection,
        spent: Spending,
    ) -> None:
        super().__init__(handle, reading, spent)
        self.diff, self.as_of = rows.diff, as_of
        self._keys, self._shown, self._wanted = rows.range_, Shown(rows.columns, rows.where), rows.keys

    def __repr__(self) -> str:
        return f"Snapshot({self._handle.shard!r}, as_of={self._handle.schema.show_as_of(self.as_of)})"

    @property
    def contents_schema(self) -> pa.Schema:
        """The columns, then `_diff`."""
        return self._shown.schema(self._handle.schema)

    @property
    def size(self) -> int:
        """Bytes of the parts that this snapshot reads from."""
        return self._whole().size

    def consolidated(self) -> Iterator[pa.Table]:
        """Each distinct row once, in key order, with `_diff`, as tables of bounded size."""
        return self._spent.over(self._resuming(partial(self._stream, self._keys, self._shown)))

    def consolidated_selection(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the distinct rows that `where` keeps; rows that look alike stay apart.

        Of parts that are not stored whole in memory, only what is wanted is fetched.
        """
        shown = self._shown
        if where is not None:
            shown = shown._replace(where=where.both(shown.where))
        return self._spent.over(self._resuming(partial(self._stream, self._keys, shown._replace(only=tuple(names)))))

    def consolidated_table(self) -> pa.Table:
        """Each distinct row once, with `_diff`, as one table. Parts are fetched and decoded in parallel."""
        whole = self._whole()
        with self._spent.again():
            table = self._read(whole)
        if table is None:
            return pa.concat_tables([empty_table(self.contents_schema), *self.consolidated()]).combine_chunks()
        return table

    def splits(self, n: int) -> list[Split]:
        """Cut the snapshot into at most `n` disjoint key ranges of about equal size, whose union is the snapshot.

        With `diff` each split adds up its own rows: where `columns=` leaves out a key column, equal rows may be in
        several splits. Keep this snapshot and its reader until the splits have been read.
        """
        n = parse_integer(n, "the number of splits", 1, MOST_SPLITS)
        whole = self._whole()
        machine = self._handle.machine
        with self._spent.again():
            found = stretches(machine.reads, machine.shard, whole.inputs, whole.schemas, whole.size // n)
        ranges = [KeyRange(*edges) for edges in pairwise([None, *cut_evenly(found, n), None])]
        return [self._split(self._keys.meet(range_)) for range_ in ranges]

    def of_keys(self, lower: bytes | None, upper: bytes | None) -> Split:
        """The contents whose encoded keys are in `[lower, upper)`, as a split. None means no bound.

        Keys are encoded as in the bounds of parts and of splits: `split.key_lower`, `part.key_upper`. Keep this
        snapshot and its reader until the split has been read.
        """
        for name, bound in (("lower", lower), ("upper", upper)):
            if bound is not None:
                check_type(bound, bytes, name, "split.key_lower")
        return self._split(self._keys.meet(KeyRange(lower, upper)))

    __reduce__ = not_pickled(
        "A snapshot", "Pass its splits, as in snapshot.splits(1), and read them in the other process"
    )

    def _named(self) -> str:
        return f"this snapshot of {self._handle.shard} as of {self._handle.schema.show_as_of(self.as_of)}"

    def _earliest(self) -> int:
        return max(0, self.as_of)

    def _whole(self) -> Split:
        return self._split(self._keys)

    def _read(self, whole: Split) -> pa.Table | None:
        """All of it as one table; None when it must be streamed, or when a blob vanished under a read-only client."""
        machine = self._handle.machine
        try:
            with machine.runtime.pool(machine.config.read_threads, "persist-read") as pool:
                return whole.at_once(machine.reads, pool)
        except Missing as missing:
            self._look_again(missing)
            return None

    def _split(self, keys: KeyRange, shown: Shown | None = None) -> Split:
        handle, state, shown = self._handle, self._reading.version.state, shown or self._shown
        batches = (b for b in state.trace if b.count and self.as_of >= 0 and b.lower.is_before(self.as_of))
        upper = None if self.as_of == 2**64 - 1 else self.as_of + 1
        inputs = tuple(overlapping(inputs_of(batches, 0, upper), keys.lower, keys.upper))
        wanted = None if self._wanted is None else self._wanted.in_range(keys.lower, keys.upper)
        return Split(
            handle.urls, handle.shard, self.as_of, handle.schema, state.schemas,
            inputs if wanted is None else holding(inputs, wanted), keys.lower, keys.upper,
            shown.columns, handle.machine.config.merge_bytes, shown.where, shown.only,
            None if wanted is None else packed(wanted), self.diff,
        )  # fmt: skip

    def _stream(self, keys: KeyRange, shown: Shown) -> Iterator[pa.Table]:
        machine = self._handle.machine
        with machine.runtime.pool(machine.config.read_threads, "persist-read") as pool:
            return self._split(keys, shown).streamed(machine.reads, pool)


def snapshot_known(handle: ReadHandle, as_of: int, rows: RowSelection) -> Snapshot:
    """Some rows, each distinct one once, as of a time that this process knows to be complete."""
    return Snapshot(handle, handle.acquire(as_of), as_of, rows._replace(diff=True), Spending())


@lru_cache(maxsize=8)
def _blob(urls: tuple[str, str]) -> Blob:
    """The location's Blob in this process. It is opened once, as a process may read many splits from it."""
    return open_stack(*urls, Config(), Runtime(), read_only=True).blob
