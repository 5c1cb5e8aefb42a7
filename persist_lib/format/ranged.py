"""Reading some of an object: a file of whole chunks that are fetched when needed and verified before use.

A Parquet reader asks for the footer and for the column chunks of the row groups it wants. `ChunkedReader` answers it
from 8 MiB chunks, of which it keeps few, so that a task that touches some row groups of a large part fetches only
the chunks around them, and its memory does not depend on the size of the part.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from persist_lib.errors import Corrupt
from persist_lib.format.digest import CHUNK, WIDTH, chunk_count, chunk_range, verify_chunk

Fetch = Callable[[int, int], bytes]
"""Bytes `[start, end)` of the object; raises what the location raises, Missing included."""
Map = Callable[[Callable[[int], bytes], Iterable[int]], Iterator[bytes]]
"""Like `map`; an executor's map fetches in parallel."""


class ChunkedReader(io.RawIOBase):
    """A read-only, seekable file over `fetch`. At most `keep` chunks are in memory, plus what was prefetched."""

    def __init__(
        self, key: str, size: int, digests: bytes, fetch: Fetch, *, keep: int = 1, parallel: Map = map
    ) -> None:
        super().__init__()
        if len(digests) != WIDTH * chunk_count(size):
            raise Corrupt(f"{key}: {size} bytes need {chunk_count(size)} digests, got {len(digests)} bytes", key=key)
        self._key, self._size, self._digests = key, size, digests
        self._fetch, self._parallel, self._keep = fetch, parallel, keep
        self._chunks: dict[int, memoryview] = {}  # the most recently used last
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read starts."""
        return self._at

    def size(self) -> int:
        """Bytes of the whole object."""
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as files do."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, count: int | None = -1) -> bytes | memoryview:
        """At most `count` bytes, all that are left for None or -1; fewer only at the end. Within a chunk, no copy."""
        end = self._size if count is None or count < 0 else min(self._size, self._at + count)
        pieces = [self._piece(index, end) for index in self._between(self._at, end)]
        self._at = max(self._at, end)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        """As `read`, into a buffer."""
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the chunks under these byte ranges at once and keep them, whatever `keep` says."""
        wanted = {index for start, end in ranges for index in self._between(start, end)} - self._chunks.keys()
        for index, data in zip(sorted(wanted), self._parallel(self._load, sorted(wanted)), strict=True):
            self._chunks[index] = memoryview(data)
        self._keep = max(self._keep, len(self._chunks))

    def forget(self) -> None:
        """Drop all chunks."""
        self._chunks.clear()

    def _between(self, start: int, end: int) -> range:
        return range(start // CHUNK, -(-end // CHUNK)) if end > start else range(0)

    def _piece(self, index: int, end: int) -> memoryview:
        start, stop = chunk_range(index, self._size)
        return self._chunk(index)[max(0, self._at - start) : min(stop, end) - start]

    def _chunk(self, index: int) -> memoryview:
        chunk = self._chunks.pop(index, None)
        if chunk is None:
            while len(self._chunks) >= self._keep:
                self._chunks.pop(next(iter(self._chunks)))
            chunk = memoryview(self._load(index))
        self._chunks[index] = chunk
        return chunk

    def _load(self, index: int) -> bytes:
        start, end = chunk_range(index, self._size)
        data = self._fetch(start, end)
        verify_chunk(self._key, index, data, self._digests)
        return data
