"""Reading some of an object: a file of whole chunks that are fetched when needed and verified before use.

A Parquet reader asks for the footer and for the column chunks of the row groups it wants. `ChunkedReader` answers it
from 8 MiB chunks, of which it keeps few, so that a task that touches some row groups of a large part fetches only
the chunks around them, and its memory does not depend on the size of the part. A merge has such a reader for each of
its runs, so what a reader that goes from front to back has behind it is let go of, piece by piece.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from persist_lib.errors import Corrupt
from persist_lib.format.digest import CHUNK, WIDTH, chunk_count, chunk_range, verify_chunk

Fetch = Callable[[int, int], bytes]
"""Bytes `[start, end)` of the object; raises what the location raises, Missing included."""
Map = Callable[[Callable[[int], bytes], Iterable[int]], Iterator[bytes]]
"""Like `map`; an executor's map fetches in parallel."""
PIECE = 1 << 20
"""What a reader lets go of at a time, in bytes."""
FORGOTTEN = memoryview(b"")


class RangeReader(io.RawIOBase):
    """A read-only, seekable file of `size` bytes over `fetch`."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        super().__init__()
        self._size, self._fetch, self._at = size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, count: int | None = -1) -> bytes | memoryview:
        """At most `count` bytes, all that are left for None or -1; fewer only at the end."""
        end = self._end(count)
        found = self._fetch(self._at, end) if self._at < end else b""
        self._at += len(found)
        return found

    def _end(self, count: int | None) -> int:
        return self._size if count is None or count < 0 else min(self._size, self._at + count)


class ChunkedReader(RangeReader):
    """A file over `fetch` in verified chunks. At most `keep` chunks are in memory, plus what was prefetched.

    With `forward`, a read that starts where the last one ended lets go of what lies before it. What is asked for again
    nevertheless is fetched again.
    """

    def __init__(
        self,
        key: str,
        size: int,
        digests: bytes,
        fetch: Fetch,
        *,
        keep: int = 1,
        parallel: Map = map,
        forward: bool = False,
    ) -> None:
        super().__init__(size, fetch)
        if len(digests) != WIDTH * chunk_count(size):
            raise Corrupt(f"{key}: {size} bytes need {chunk_count(size)} digests, got {len(digests)} bytes", key=key)
        self._key, self._digests, self._parallel, self._keep = key, digests, parallel, keep
        self._chunks: dict[int, Chunk] = {}  # the most recently used last
        self._forward, self._last_end = forward, -1

    def read(self, count: int | None = -1) -> bytes | memoryview:
        """As `RangeReader.read`. Within a chunk, it makes no copy."""
        end = self._end(count)
        is_next = self._at == self._last_end
        pieces = [piece for index in self._between(self._at, end) for piece in self._pieces(index, end)]
        if is_next and (chunk := self._chunks.get(self._at // CHUNK)) is not None:
            chunk.forget(self._at % CHUNK)
        self._at = self._last_end = max(self._at, end)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the chunks under these byte ranges at once and keep them, whatever `keep` says."""
        wanted = {index for start, end in ranges for index in self._between(start, end)} - self._chunks.keys()
        for index, data in zip(sorted(wanted), self._parallel(self._load, sorted(wanted)), strict=True):
            self._chunks[index] = Chunk(data, CHUNK)
        self._keep = max(self._keep, len(self._chunks))

    def forget(self) -> None:
        self._chunks.clear()

    def _between(self, start: int, end: int) -> range:
        return range(start // CHUNK, -(-end // CHUNK)) if end > start else range(0)

    def _pieces(self, index: int, end: int) -> list[memoryview]:
        start, stop = chunk_range(index, self._size)
        first, last = max(0, self._at - start), min(stop, end) - start
        return self._chunk(index, first).between(first, last)

    def _chunk(self, index: int, first: int) -> Chunk:
        chunk = self._chunks.pop(index, None)
        if chunk is None or first < chunk.first:
            while len(self._chunks) >= self._keep:
                self._chunks.pop(next(iter(self._chunks)))
            chunk = Chunk(self._load(index), PIECE if self._forward else CHUNK)
        self._chunks[index] = chunk
        return chunk

    def _load(self, index: int) -> bytes:
        start, end = chunk_range(index, self._size)
        data = self._fetch(start, end)
        verify_chunk(self._key, index, data, self._digests)
        return data


class Chunk:
    """A verified chunk in pieces of `width` bytes, the first of which may be forgotten. `first` is what is left of it.

    A view keeps all of what it is a view of, so pieces are copies. They are mapped, because the C heap would
    keep most of them: what lies between the arrays of a merge does not go back to the system.
    """

    def __init__(self, data: bytes, width: int) -> None:
        whole = memoryview(data)
        self._width = width
        starts = range(0, len(data), width)
        self._pieces = [whole] if len(data) <= width else [_mapped(whole[at : at + width]) for at in starts]
        self.first = 0

    def between(self, first: int, last: int) -> list[memoryview]:
        """Bytes `[first, last)` of the chunk, none of which is forgotten."""
        width = self._width
        return [
            self._pieces[index][max(0, first - index * width) : last - index * width]
            for index in range(first // width, -(-last // width))
        ]

    @property
    def held(self) -> int:
        return sum(map(len, self._pieces))

    def forget(self, first: int) -> None:
        for index in range(self.first // self._width, first // self._width):
            self._pieces[index] = FORGOTTEN
            self.first = (index + 1) * self._width


def _mapped(data: memoryview) -> memoryview:
    """A copy that goes back to the system as soon as nothing refers to it."""
    pages = mmap.mmap(-1, len(data), access=mmap.ACCESS_COPY)
    pages[:] = data
    return memoryview(pages).toreadonly()
