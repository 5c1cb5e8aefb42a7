"""Rows that one task writes for all shards of a rendition: routed, and staged as parts in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from persist_lib.relation.stage import Staged
from persist_lib.storage.records import RenditionRecord
from persist_lib.storage.routing import routed

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
