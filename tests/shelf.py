"""Objects behind a cache, and what the store is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import persist_lib as persist
from persist_lib.format.digest import digest
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.location.wrap.around import Operation
from persist_lib.location.wrap.chunk_cache import FOLDER, Cache, CachingBlob, fetch
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import RecordingBlob


def files_of(path: Path) -> list[Path]:
    """The entries on disk."""
    return [file for file in (path / FOLDER).rglob("*") if file.is_file() and file.name != "lock"]


class Shelf:
    """Objects of given sizes behind a cache, and what the store is asked for."""

    def __init__(
        self, *, memory_bytes: int = 0, path: Path | None = None, disk_bytes: int = 1 << 30,
        most: int | None = None,
    ) -> None:  # fmt: skip
        self.requests: list[Operation] = []
        self.store = MemoryBlob()
        config = persist.CacheConfig(path=path and str(path), disk_bytes=disk_bytes, memory_bytes=memory_bytes)
        self.cache = Cache(config, "memory:shelf", Runtime(), most)
        self.blob = CachingBlob(RecordingBlob(self.store, self.requests), self.cache)
        self.objects: dict[str, bytes] = {}

    def add(self, key: str, size: int) -> None:
        self.objects[key] = os.urandom(size)
        self.store.set(key, self.objects[key])

    def read(self, key: str, start: int = 0, end: int | None = None) -> list[str]:
        """Read, verify, and answer the requests it took."""
        data = self.objects[key]
        end = len(data) if end is None else end
        self.requests.clear()
        found = fetch(self.blob, key, start, end, len(data), digest(data))
        assert found is not None
        assert bytes(found) == data[start:end]
        return [request.kind for request in self.requests]
