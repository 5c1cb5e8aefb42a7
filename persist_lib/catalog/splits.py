"""Splits of a collection's snapshot: pieces of its shards, which any process can read, in the columns of the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec
import pyarrow as pa

from persist_lib.errors import redacted
from persist_lib.kernel.multiplicity import built, repeated
from persist_lib.location.api import Blob
from persist_lib.relation.row_selection import KeyRange
from persist_lib.relation.snapshot import PlaceContents, Split
from persist_lib.relation.view import View
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema

FINER = 4
"""How many pieces make up a group, where groups do not fall on shards."""


class CollectionSplit(msgspec.Struct, frozen=True):
    """One of the disjoint splits of a collection's snapshot. It pickles.

    It has `splits` of one or several shards, each a range of keys, one after the other.
    """

    collection: str
    rendition: int
    splits: tuple[Split, ...]
    view: View

    def __repr__(self) -> str:
        first = self.splits[0]
        where, time = redacted(first.urls[0]), self.view.schema.show_as_of(first.as_of)
        return f"CollectionSplit({where!r}, {self.collection!r}, as_of={time}, size={self.size})"

    @property
    def as_of(self) -> int:
        """The time of the snapshot."""
        return self.splits[0].as_of

    @property
    def schema(self) -> Schema:
        """The schema of the reader whose snapshot it is of."""
        return self.view.schema

    @property
    def size(self) -> int:
        """Bytes of the parts that it reads from. Of some parts it reads only some chunks."""
        return sum(split.size for split in self.splits)

    def batches(self, blob: Blob | None = None) -> Iterator[pa.Table]:
        """The split's contents as tables of bounded size: shard by shard, each in key order.

        `blob` is an open Blob of the location, such as `client.blob`; without one, this process opens the location.
        """
        tables = self._consolidated(blob)
        return tables if self.view.diff else repeated(tables, repr(self))

    def to_arrow(self, blob: Blob | None = None) -> pa.Table:
        """The split's contents as one table. `blob` is as in `batches`."""
        table = pa.concat_tables([empty_table(self.view.shown), *self._consolidated(blob)]).combine_chunks()
        return table if self.view.diff else built(table, repr(self))

    def _consolidated(self, blob: Blob | None) -> Iterator[pa.Table]:
        return self.view.of((split.batches(blob), split.schema) for split in self.splits)


def packed(parts: Sequence[PlaceContents], n: int) -> list[tuple[Split, ...]]:
    """Cut snapshots of shards into at most `n` groups of splits, of about equal size."""
    total = sum(part.size for part in parts)
    # Pieces that are finer than a group let groups be even where there are few groups for the shards.
    fine = max(n, min(FINER * n, FINER * len(parts)))
    cut = [part.splits(max(1, round(fine * part.size / max(1, total)))) for part in parts]
    # SUBTLE: of pieces of one shard each counts the same, as `size` has whole parts, of which several pieces read.
    pieces = [(index, split, parts[index].size / len(splits)) for index, splits in enumerate(cut) for split in splits]
    groups: dict[int, list[tuple[int, Split]]] = {}
    before = 0.0
    for place, (index, split, size) in enumerate(pieces):
        middle = (before + size / 2) / total if total else place / len(pieces)
        groups.setdefault(min(n - 1, int(middle * n)), []).append((index, split))
        before += size
    return [tuple(_joined(parts, group)) for group in groups.values()]


def _joined(parts: Sequence[PlaceContents], group: list[tuple[int, Split]]) -> Iterator[Split]:
    """The splits of a group, those of one shard as one range of keys."""
    for index, found in groupby(group, itemgetter(0)):
        first, *others = (split for _, split in found)
        yield parts[index].of_keys(KeyRange(first.key_lower, others[-1].key_upper)) if others else first
