"""Rows that one task writes for all shards of a rendition: routed, and staged as parts in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from persist_lib.catalog.records import RenditionRecord
from persist_lib.kernel.columns import Rows
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.order import take
from persist_lib.relation.stage import Staged
from persist_lib.schema.schema import Schema


def places(rendition: RenditionRecord, table: pa.Table) -> Rows:
    """The index of the shard of each row: by a hash of its key columns, the same on every machine, for ever.

    The hash is that of fingerprints, whose definition is durable. A null counts as nothing, so that it has one place.
    """
    columns = {column.name: column for column in rendition.columns.key}
    hashed = Schema(key=tuple(columns[name] for name in rendition.hash_columns))
    return (hash_rows(hashed, table.select(list(rendition.hash_columns))) % np.uint64(rendition.shards)).view(np.int64)


def routed(rendition: RenditionRecord, table: pa.Table) -> list[pa.Table]:
    """The rows of each shard, in their order."""
    if rendition.shards == 1:
        return [table]
    found = places(rendition, table)
    order = np.argsort(found, kind="stable")
    ordered = take(table, order) if table.num_rows else table
    edges = np.searchsorted(found[order], np.arange(rendition.shards + 1))
    return [ordered.slice(start, end - start) for start, end in pairwise(edges.tolist())]


BUFFER_BYTES = 128 << 20
"""How much a task holds back for all shards together, before it writes the largest share as a part."""

Write = Callable[[object], Staged]


class Spreading:
    """The parts of one task. `writes` has one function a shard of the rendition; None where nothing is written."""

    def __init__(self, rendition: RenditionRecord, writes: Sequence[Write | None]) -> None:
        self._rendition, self._writes = rendition, writes
        self._buffers: list[list[pa.Table]] = [[] for _ in writes]
        self._sizes = [0] * len(writes)
        self._staged: list[list[Staged]] = [[] for _ in writes]
        self.written = 0

    def add(self, table: pa.Table) -> None:
        """Take rows, and write the largest share if too many are held back."""
        for index, share in enumerate(routed(self._rendition, table)):
            if share.num_rows and self._writes[index] is not None:
                self._buffers[index].append(share)
                self._sizes[index] += share.nbytes
                self.written += share.num_rows
        if sum(self._sizes) > BUFFER_BYTES:
            self._flush(max(range(len(self._sizes)), key=self._sizes.__getitem__))

    def finish(self) -> tuple[tuple[Staged, ...], ...]:
        """Write what is held back. Returns for each shard what was staged for it."""
        for index in range(len(self._writes)):
            self._flush(index)
        return tuple(map(tuple, self._staged))

    def _flush(self, index: int) -> None:
        write = self._writes[index]
        if self._buffers[index] and write is not None:
            self._staged[index].append(write(self._buffers[index]))
        self._buffers[index], self._sizes[index] = [], 0
