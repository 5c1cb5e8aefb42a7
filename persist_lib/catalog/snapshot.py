"""The contents of a collection as of a time: those of the shards of the rendition that is the collection then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from persist_lib.catalog.records import RenditionRecord
from persist_lib.catalog.splits import CollectionSplit, packed
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.held import Named
from persist_lib.relation.projection import is_projection
from persist_lib.relation.snapshot import PlaceContents, SnapshotOf, parse_splits
from persist_lib.relation.view import View
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema


class CollectionSnapshot(SnapshotOf[PlaceContents]):
    """A collection's contents as of the time `as_of`: shard by shard, each in key order; rows as in a shard's snapshot.

    `rendition` is the number of the one that it is read from. Use it in a `with` block, or drop it after use.
    """

    def __init__(
        self, name: str, as_of: int, rendition: int, view: View, parts: Sequence[PlaceContents], runtime: Runtime,
        spent: Spending,
    ) -> None:  # fmt: skip
        super().__init__(Named("collection", name), as_of, view, parts, runtime, spent)
        self.rendition = rendition

    def by_shard(self) -> list[Iterator[pa.Table]]:
        """The distinct rows of each shard, with `_diff`, in key order. No key is in two shards."""
        return [self._spent.over(self._view.one(part.stream(), part.schema)) for part in self._parts]

    def splits(self, n: int) -> list[CollectionSplit]:
        """Cut the snapshot into at most `n` disjoint splits of about equal size, whose union is the snapshot.

        They pickle, and any process that reaches the location can read them. With `diff` each adds up its own rows:
        where `columns=` leaves out a key column, equal rows may be in several splits. Keep this snapshot and its reader
        until the splits have been read.
        """
        n = parse_splits(n)
        with self._spent.again():
            found = packed(self._parts, n)
        return [CollectionSplit(self.name, self.rendition, splits, self._view) for splits in found]


def view_of(
    schema: Schema, rendition: RenditionRecord, columns: tuple[str, ...] | None, merge_bytes: int, *, diff: bool
) -> View:
    """How a rendition's rows are shown: added up where rows that look alike may be in two shards.

    They can only be there where columns that decide the shard were left out.
    """
    is_spread = rendition.shards > 1 and not set(rendition.hash_columns) <= set(columns or ())
    return View(schema, columns, merge_bytes, is_spread and is_projection(schema, columns), diff)
