"""A cache for chunks of parts and rollups, in memory and on local disk, by their digests.

An entry is one chunk (8 MiB, or the whole object if that is smaller). Its name is the digest that the shard's state
has of it. So an entry is never stale, whatever becomes of the object. It is never a wrong chunk, because the digest is
computed again on each read from the cache. A wrong answer of a store is never kept. Any fault of the cache itself
counts as a miss, and a read from the store mends it.

Only `fetch` looks into the cache. All other operations of a `CachingBlob` go to the store. Code that must see the store
itself (commits, maintenance, scrubs, audits) does not get a `CachingBlob`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from persist_lib.config import CacheConfig
from persist_lib.format.digest import CHUNK, WIDTH, chunk_range
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import AroundBlob
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol

log = logging.getLogger("persist.cache")

FOLDER = "persist-cache-1"
FULL = 7 / 8
"""A process that finds more than this share of the limit in use deletes files."""
TIDY = 3 / 4
"""It deletes down to this share, so that the work of listing all files pays off."""
UNSEEN = 64
"""A process stores this part (1/64) of the limit before it looks again at what others stored. So the limit holds for up
to eight processes that store at once: at most 7/8 was in use at the last look, and each has stored 1/64 since."""


class CacheFiles:
    """One location's part of a directory that any number of processes share. A failure is logged once, as a miss.

        <path>/persist-cache-1/<location>/<first two digits>/<digest>

    There is no index. A file's name is the digest of its contents, its modification time that of its last use. A file
    appears by a rename, so it exists whole or not at all. After a crash of the machine it may hold anything, and its
    digest shows that. No process waits for another one: one that cannot take the lock does not store.
    """

    def __init__(self, path: str, namespace: str, limit: int, entropy: Callable[[], int]) -> None:
        self._root = Path(path).expanduser().absolute() / FOLDER
        self._folder = self._root / namespace
        self._limit = limit
        self._entropy = entropy
        self._unseen = 0
        self._has_warned = False
        self.stored = self.evicted = self.refused = 0

    def get(self, name: bytes) -> bytes | None:
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse("read", error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of access is not kept on most file systems
        return data

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Store `data` under `name`, and delete the least recently used files if the cache gets too full."""
        path = self._path(name)
        try:
            if len(data) <= self._limit // 2 and not path.exists():
                self._store(path, data)
        except OSError as error:
            self.refused += 1
            self._refuse("store", error)

    def delete(self, name: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: bytes) -> Path:
        digits = name.hex()
        return self._folder / digits[:2] / digits

    def _store(self, path: Path, data: bytes | memoryview) -> None:
        if len(data) <= self._unseen:
            self._unseen -= len(data)
            self._write(path, data)
            return
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as is_locked:
            if is_locked:
                self._make_room(len(data))
                self._write(path, data)
                self._unseen = self._limit // UNSEEN

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yield whether this process got the lock for deleting. A paused holder of the lock stops no reader."""
        with (self._root / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True  # closing lets it go

    def _make_room(self, size: int) -> None:
        files = sorted(self._files())
        total = sum(length for _, length, _ in files)
        if total + size <= self._limit * FULL:
            return
        for _, length, path in files:
            if total + size <= self._limit * TIDY:
                return
            # This may delete a file that is still being written, if it is that old. Its rename then fails.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                self.evicted += 1
            total -= length

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Every file of every location: when it was last used, its size, its path."""
        for location in _entries(self._root):
            for folder in _entries(Path(location)):
                for entry in _entries(Path(folder)):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime_ns, found.st_size, Path(entry)

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{self._entropy():016x}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self.stored += 1

    def _refuse(self, doing: str, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("could not %s in the cache %s, so reads go to the store instead: %s", doing, self._root, error)


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
        yield from found


T = TypeVar("T")


class CacheCounts(msgspec.Struct, frozen=True):
    """Counts of a cache, in chunks: hits in memory, hits on disk, misses, and what became of entries.

    `damaged` chunks were found with a wrong digest and deleted; they count as misses too. `refused` chunks could not be
    stored, for example for lack of permission or on a full disk. Sizes are in bytes.
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
        """How many chunks did not have to be read from the store."""
        return self.memory_hits + self.disk_hits

    @property
    def hit_rate(self) -> float:
        """The share of chunks (0 to 1) that did not have to be read from the store; 0 before the first read."""
        return self.hits / max(1, self.hits + self.misses)


class Memory:
    """The most recently used chunks in memory, at most `limit` bytes of them, each of at most `most` bytes."""

    def __init__(self, limit: int, most: int) -> None:
        self._limit, self._most = limit, most
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.size = 0
        self.lock = threading.Lock()

    def get(self, name: bytes) -> bytes | None:
        with self.lock:
            data = self._entries.get(name)
            if data is not None:
                self._entries.move_to_end(name)
            return data

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Keep a chunk, and drop the least recently used ones if they exceed the limit."""
        if len(data) > self._most:
            return
        kept = bytes(data)
        with self.lock:
            if name in self._entries:
                return
            self._entries[name] = kept
            self.size += len(data)
            while self.size > self._limit:
                self.size -= len(self._entries.popitem(last=False)[1])

    def delete(self, name: bytes) -> None:
        with self.lock:
            self.size -= len(self._entries.pop(name, b""))


class Cache:
    """Both tiers, memory and disk. Safe for use by several threads and after a fork."""

    def __init__(self, config: CacheConfig, url: str, runtime: Runtime, most: int | None = None) -> None:
        """`most` is that of a chunk in memory, in bytes; None: as much as there is room for."""
        self._memory = Memory(config.memory_bytes, config.memory_bytes if most is None else most)
        namespace = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
        self._files = (
            CacheFiles(config.path, namespace, config.disk_bytes, runtime.entropy)
            if config.path is not None and config.disk_bytes
            else None
        )
        self._tiers: dict[str, Memory | CacheFiles] = {"memory_hits": self._memory}
        if self._files is not None:
            self._tiers["disk_hits"] = self._files
        self._counts = dict.fromkeys(("memory_hits", "disk_hits", "misses", "hit_bytes", "missed_bytes", "damaged"), 0)
        enrol(self, Stage.STORES)

    def get(self, name: bytes, size: int) -> bytes | None:
        for hits, tier in self._tiers.items():
            if (found := tier.get(name)) is None:
                continue
            if _is(found, name):
                if tier is not self._memory:
                    self._memory.put(name, found)
                self._count(hit_bytes=len(found), **{hits: 1})
                return found
            tier.delete(name)
            self._count(damaged=1)
        self._count(misses=1, missed_bytes=size)
        return None

    def put(self, name: bytes, data: bytes | memoryview) -> None:
        """Keep a chunk if `name` is its digest."""
        if not _is(data, name):
            return  # the caller verifies it too, and reports the damage
        for tier in self._tiers.values():
            tier.put(name, data)

    def counts(self) -> CacheCounts:
        stored = {name: getattr(self._files, name, 0) for name in ("stored", "evicted", "refused")}
        with self._memory.lock:
            return CacheCounts(**self._counts, memory_bytes=self._memory.size, **stored)

    def _count(self, **more: int) -> None:
        with self._memory.lock:
            for name, count in more.items():
                self._counts[name] += count

    def after_fork_in_child(self) -> None:
        """Renew the lock. If another thread held it during the fork, it would stay held for ever."""
        self._memory.lock = threading.Lock()


class CachingBlob(AroundBlob):
    """A Blob with a cache beside it, which `fetch` looks into first. Everything else goes to the store."""

    def __init__(self, inner: Blob, cache: Cache) -> None:
        super().__init__(inner)
        self.cache = cache

    def fetch(self, key: str, start: int, end: int, size: int, digests: bytes) -> bytes | None:
        """Return bytes `[start, end)` of an object of `size` bytes whose chunks have `digests`; None if it is gone."""
        if start % CHUNK or (end != size and end % CHUNK) or start >= end:
            return read(self.inner, key, start, end, size)
        indices = range(start // CHUNK, -(-end // CHUNK))
        spans = {index: chunk_range(index, size) for index in indices}
        names = {index: digests[index * WIDTH : (index + 1) * WIDTH] for index in indices}
        found = {index: self.cache.get(names[index], spans[index][1] - spans[index][0]) for index in indices}
        for run in _runs([index for index in indices if found[index] is None]):
            first, last = spans[run[0]][0], spans[run[-1]][1]
            data = read(self.inner, key, first, last, size)
            self._keep(data, run, spans, names)
            if data is None or len(run) == len(indices):
                return data
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
    """Return bytes `[start, end)` of an object, from the cache if `blob` has one. None if the object is gone.

    `size` is that of the whole object in bytes, `digests` are those of its chunks. The caller verifies the bytes.
    """
    if isinstance(blob, CachingBlob):
        return blob.fetch(key, start, end, size, digests)
    return read(blob, key, start, end, size)


def read(blob: Blob, key: str, start: int, end: int, size: int) -> bytes | None:
    """Return bytes `[start, end)` of an object from the store, by `get` if they are all of it; None if it is gone."""
    return blob.get(key) if (start, end) == (0, size) else blob.get_range(key, start, end)


def _runs(indices: list[int]) -> Iterator[list[int]]:
    """Group neighbouring indices into runs: each run is one request."""
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        yield [index for _, index in run]


def _is(data: bytes | memoryview, name: bytes) -> bool:
    return xxhash.xxh3_128_digest(data) == name
