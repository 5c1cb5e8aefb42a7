"""Chunks as files in a directory that any number of processes share, up to a limit in bytes.

    <path>/persist-cache-1/<location>/<first two digits>/<digest>

There is no index. The name of a file is the digest of its contents, its modification time is the time of its last use,
and the sum of all sizes says how full the cache is. A file appears by a rename, so it exists whole or not at all. After
a crash of the machine it may hold anything, and its digest shows that. No process waits for another one: a process that
cannot take the lock does not store.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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
    """One location's part of a shared directory. A failure is logged once, and counts as a miss."""

    def __init__(self, path: str, namespace: str, limit: int, entropy: Callable[[], int]) -> None:
        self._root = Path(path).expanduser().absolute() / FOLDER
        self._folder = self._root / namespace
        self._limit = limit
        self._entropy = entropy
        self._unseen = 0
        self._has_warned = False
        self.stored = self.evicted = self.refused = 0

    def get(self, name: bytes) -> bytes | None:
        """Return the bytes stored under `name`, or None. The caller has to verify them."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse("read", error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # SUBTLE: the time of access is not kept on most file systems
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
        """Delete what is stored under `name`."""
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
            # SUBTLE: this may delete a file that is still being written, if it is that old. Its rename then fails.
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
