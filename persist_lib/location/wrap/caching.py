"""A cache of what was read: chunks of parts and rollups, in memory and on local disk, by their digests.

An entry is one chunk (of 8 MiB, or the whole object where that is smaller), and its name is the digest that the shard's
state has of it. So an entry is never stale, whatever becomes of the object; it is never anything else than what was
asked for, as its digest is computed again on the way out; and what a store answered wrongly is never kept. Whatever is
wrong with the cache itself is a miss, and is mended by reading from the store.

Only `fetch` looks into the cache. Everything else a `CachingBlob` is asked for goes to the store, and whoever must see
the store (writers, maintenance, scrubs, audits) is not given one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TypeVar

import msgspec
import xxhash

from persist_lib.config import CacheConfig
from persist_lib.format.digest import CHUNK, WIDTH, chunk_range
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import AroundBlob, Operation
from persist_lib.location.wrap.cache_files import CacheFiles
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol

T = TypeVar("T")


class CacheCounts(msgspec.Struct, frozen=True):
    """What was asked of a cache, in chunks: found in memory, found on disk, or not; and what became of entries.

    `damaged` ones were found, were not what they should be, and were deleted (they are misses too). `refused` ones
    could not be stored: no permission, a full disk.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    memory_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0
    refused: int = 0

    @property
    def hits(self) -> int:
        """Chunks that the store was not asked for."""
        return self.memory_hits + self.disk_hits

    @property
    def hit_rate(self) -> float:
        """The share of chunks that the store was not asked for; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


class Memory:
    """At most `limit` bytes of chunks, the most recently used ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.size = 0
        self.lock = threading.Lock()

    def get(self, name: bytes) -> bytes | None:
        """A chunk, if it is here."""
        with self.lock:
            data = self._entries.get(name)
            if data is not None:
                self._entries.move_to_end(name)
            return data

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Keep a chunk, and let go of those not used for longest."""
        if len(data) > self._limit:
            return
        kept = bytes(data)
        with self.lock:
            if name in self._entries:
                return
            self._entries[name] = kept
            self.size += len(data)
            while self.size > self._limit:
                self.size -= len(self._entries.popitem(last=False)[1])

    def forget(self, name: bytes) -> None:
        """Let go of a chunk."""
        with self.lock:
            self.size -= len(self._entries.pop(name, b""))


class Cache:
    """Both tiers. Safe among threads, and after a fork."""

    def __init__(self, config: CacheConfig, url: str, runtime: Runtime) -> None:
        self._memory = Memory(config.memory_bytes)
        namespace = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
        self._files = (
            CacheFiles(config.path, namespace, config.disk_bytes, runtime.entropy)
            if config.path is not None and config.disk_bytes
            else None
        )
        self._counts = dict.fromkeys(("memory_hits", "disk_hits", "misses", "hit_bytes", "missed_bytes", "damaged"), 0)
        enrol(self, Stage.STORES)

    def get(self, name: bytes, size: int) -> bytes | None:
        """The chunk with this digest; None when it is not here, or not what it should be."""
        found, tier = self._memory.get(name), "memory_hits"
        if found is not None and not _is(found, name):
            self._memory.forget(name)
            self._count(damaged=1)
            found = None
        if found is None and self._files is not None:
            found, tier = self._files.get(name), "disk_hits"
            if found is not None and not _is(found, name):
                self._files.delete(name)
                self._count(damaged=1)
                found = None
            if found is not None:
                self._memory.put(name, found)
        if found is None:
            self._count(misses=1, missed_bytes=size)
        else:
            self._count(hit_bytes=len(found), **{tier: 1})
        return found

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Keep a chunk, if it is the one with this digest."""
        if not _is(data, name):
            return  # whoever asked for it finds out too, and says so
        self._memory.put(name, data)
        if self._files is not None:
            self._files.put(name, data)

    def counts(self) -> CacheCounts:
        """What was asked of it so far."""
        files = self._files
        stored = (0, 0, 0) if files is None else (files.stored, files.evicted, files.refused)
        with self._memory.lock:
            names = ("stored", "evicted", "refused")
            return CacheCounts(**self._counts, memory_bytes=self._memory.size, **dict(zip(names, stored, strict=True)))

    def _count(self, **more: int) -> None:
        with self._memory.lock:
            for name, count in more.items():
                self._counts[name] += count

    def after_fork_in_child(self) -> None:
        """SUBTLE: a lock that another thread held during the fork would stay held for ever."""
        self._memory.lock = threading.Lock()


class CachingBlob(AroundBlob):
    """A Blob with a cache beside it, which `fetch` looks into first. Everything else goes to the store."""

    def __init__(self, inner: Blob, cache: Cache) -> None:
        super().__init__(inner)
        self.cache = cache

    def around(self, operation: Operation, call: Callable[[], T]) -> T:  # noqa: ARG002 - nothing is done around
        """As the store does."""
        return call()

    def fetch(self, key: str, start: int, end: int, size: int, digests: bytes) -> bytes | None:
        """Bytes `[start, end)` of an object of `size` bytes whose chunks have these digests; None when it is gone."""
        if start % CHUNK or (end != size and end % CHUNK) or start >= end:
            return read(self.inner, key, start, end, size)
        indices = range(start // CHUNK, -(-end // CHUNK))
        spans = {index: chunk_range(index, size) for index in indices}
        names = {index: digests[index * WIDTH : (index + 1) * WIDTH] for index in indices}
        found = {index: self.cache.get(names[index], spans[index][1] - spans[index][0]) for index in indices}
        for run in _runs([index for index in indices if found[index] is None]):
            first, last = spans[run[0]][0], spans[run[-1]][1]
            data = read(self.inner, key, first, last, size)
            if data is None or len(run) == len(indices):
                self._keep(data, run, spans, names)
                return data
            self._keep(data, run, spans, names)
            found |= {index: data[spans[index][0] - first : spans[index][1] - first] for index in run}
        pieces = [piece for piece in found.values() if piece is not None]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _keep(
        self, data: bytes | None, run: list[int], spans: dict[int, tuple[int, int]], names: dict[int, bytes]
    ) -> None:
        if data is None:
            return
        first, view = spans[run[0]][0], memoryview(data)
        for index in run:
            start, end = spans[index]
            self.cache.put(names[index], data if len(run) == 1 else view[start - first : end - first])


def fetch(blob: Blob, key: str, start: int, end: int, size: int, digests: bytes) -> bytes | None:
    """Bytes `[start, end)` of an object, from the cache if `blob` has one. Whoever asks verifies them."""
    if isinstance(blob, CachingBlob):
        return blob.fetch(key, start, end, size, digests)
    return read(blob, key, start, end, size)


def read(blob: Blob, key: str, start: int, end: int, size: int) -> bytes | None:
    """The same from the store. A whole object is asked for as such."""
    return blob.get(key) if (start, end) == (0, size) else blob.get_range(key, start, end)


def _runs(indices: list[int]) -> Iterator[list[int]]:
    """Neighbours together: each run is one request."""
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        yield [index for _, index in run]


def _is(data: bytes | memoryview, name: bytes) -> bool:
    return xxhash.xxh3_128_digest(data) == name
