"""The contents of a collection as of a time: those of the shards of the rendition that is the collection then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

import pyarrow as pa

from persist_lib.arguments import not_pickled, parse_integer
from persist_lib.catalog.splits import CollectionSplit, View, packed
from persist_lib.core.cost import Cost
from persist_lib.format.predicate import Where
from persist_lib.relation.conversions import Rows
from persist_lib.relation.projection import is_projection
from persist_lib.relation.snapshot import MOST_SPLITS, Snapshot
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema

THREADS = 4


class CollectionSnapshot(Rows):
    """A collection's contents as of the time `as_of`: shard by shard, each in key order; rows as in a shard's snapshot.

    `rendition` is the number of the one that it is read from. Use it in a `with` block, or drop it after use.
    """

    def __init__(
        self, name: str, as_of: int, rendition: int, schema: Schema, hash_columns: Sequence[str],
        columns: Sequence[str] | None, parts: Sequence[Snapshot], runtime: Runtime, merge_bytes: int, *,
        diff: bool = False,
    ) -> None:  # fmt: skip
        # The parts have each distinct row once: what they have in common is added up before anything is repeated.
        self.diff = diff
        self.as_of, self.rendition = as_of, rendition
        self._name, self._parts = name, parts
        self._runtime = runtime
        chosen = None if columns is None else tuple(columns)
        # Rows that look alike can only be in two shards where columns that decide the shard were left out.
        adds_up = len(parts) > 1 and is_projection(schema, chosen) and not set(hash_columns) <= set(chosen or ())
        self._view = View(schema, chosen, merge_bytes, adds_up, diff)

    def __repr__(self) -> str:
        return f"CollectionSnapshot({self._name!r}, as_of={self._view.schema.show_as_of(self.as_of)})"

    @property
    def contents_schema(self) -> pa.Schema:
        """The columns, then `_diff`."""
        return self._view.shown

    @property
    def size(self) -> int:
        """Bytes of the parts that this snapshot reads from."""
        return sum(part.size for part in self._parts)

    @property
    def cost(self) -> Cost:
        """The cost so far of finding it and of reading it here."""
        return reduce(add, (part.cost for part in self._parts), Cost())

    def consolidated(self) -> Iterator[pa.Table]:
        """Each distinct row once, with `_diff`, as tables of bounded size."""
        return self._view.of((part.batches(), part.shard_schema()) for part in self._parts)

    def by_shard(self) -> list[Iterator[pa.Table]]:
        """The distinct rows of each shard, with `_diff`, in key order. No key is in two shards."""
        return [self._view.one(part.batches(), part.shard_schema()) for part in self._parts]

    def consolidated_selection(self, names: Sequence[str], where: Where | None) -> Iterator[pa.Table]:
        """Some columns of the distinct rows that `where` keeps; rows that look alike stay apart."""
        if self._view.adds_up or any(part.shard_schema() != self._view.schema for part in self._parts):
            kept = (table if where is None else where.kept(table) for table in self.consolidated())
            return (table.select(list(names)) for table in kept)
        return (table for part in self._parts for table in part.selected(names, where))

    def consolidated_table(self) -> pa.Table:
        """Each distinct row once, with `_diff`, as one table. Shards are read in parallel."""
        if self._view.adds_up:
            tables = list(self.consolidated())
        else:
            with self._runtime.pool(max(1, min(THREADS, len(self._parts))), "persist-collection") as pool:
                tables = [table for found in pool.map(self._at_once, self._parts) for table in found]
        return pa.concat_tables([empty_table(self.contents_schema), *tables])

    def splits(self, n: int) -> list[CollectionSplit]:
        """Cut the snapshot into at most `n` disjoint splits of about equal size, whose union is the snapshot.

        They pickle, and any process that reaches the location can read them. With `diff` each adds up its own rows:
        where `columns=` leaves out a key column, equal rows may be in several splits. Keep this snapshot and its reader
        until the splits have been read.
        """
        n = parse_integer(n, "the number of splits", 1, MOST_SPLITS)
        return [CollectionSplit(self._name, self.rendition, found, self._view) for found in packed(self._parts, n)]

    def shard_schema(self) -> Schema:
        """The schema that it is read in."""
        return self._view.schema

    def check_readable(self) -> None:
        """Raise the error that says why it cannot be read any more, if it cannot."""
        for part in self._parts:
            part.check_readable()

    def release(self) -> None:
        """Stop keeping what is read from. Idempotent."""
        for part in self._parts:
            part.release()

    __reduce__ = not_pickled(
        "A snapshot", "Pass its splits, as in snapshot.splits(1), and read them in the other process"
    )

    def _named(self) -> str:
        return f"this snapshot of collection {self._name!r} as of {self._view.schema.show_as_of(self.as_of)}"

    def _at_once(self, part: Snapshot) -> list[pa.Table]:
        return list(self._view.one(iter([part.to_arrow()]), part.shard_schema()))
