"""Directories that survive a power cut, and a private place for half-written files.

An entry of a directory is durable once the directory was fsynced after it was made, and so on up to the root. These
classes pay for that once per directory and process, so that storing an object costs two fsyncs and few other calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from persist_lib.config import Runtime

OPEN_DIRECTORIES = 128
LOCK = "lock"


def fsync_directory(path: Path) -> None:
    """Make the entries of `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make `path` and its missing parents, durably.

    SUBTLE: also those that are there already. Who made them may not have come to the fsync yet, and may never. So
    whatever this makes is in a durable directory from the moment on at which somebody else can find it.
    """
    missing = list(itertools.takewhile(lambda p: not p.exists(), (path, *path.parents)))
    for directory in path.parents[len(missing) :]:
        with contextlib.suppress(PermissionError):  # of somebody else, who made it long ago
            fsync_directory(directory)
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


class OpenDirectory:
    """A directory's file descriptor, closed when nobody uses it any more (so never under another thread's feet)."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __del__(self) -> None:
        # The attribute is missing when opening failed.
        if (fd := getattr(self, "fd", None)) is not None:
            os.close(fd)


class DurableDirectories:
    """The directories below `root`, made when first needed, kept open, the most recently used ones.

    SUBTLE: linking through the descriptor, not the path, is what makes the cache safe. If the directory was removed
    (and perhaps made anew by someone else who has not synced it yet), the descriptor answers ENOENT instead of lying.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenDirectory] = OrderedDict()

    def open(self, name: str) -> OpenDirectory:
        """The directory `name` below the root ("" is the root), with every entry that leads to it durable."""
        with self._lock:
            if (found := self._open.get(name)) is not None:
                self._open.move_to_end(name)
                return found
        opened = self._make(name)
        with self._lock:
            self._open[name] = opened
            while len(self._open) > OPEN_DIRECTORIES:
                self._open.popitem(last=False)
        return opened

    def _make(self, name: str) -> OpenDirectory:
        if not self._root.exists():
            make_directories(self._root)
        path = self._root / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(path) from error
        # SUBTLE: also when it existed: who made it may not have come to syncing its parents yet, and may never.
        while path != self._root.parent:
            path = path.parent
            fsync_directory(path)
        return OpenDirectory(self._root / name)

    def forget(self, name: str) -> None:
        """Look `name` up afresh next time: it was, or may have been, removed."""
        with self._lock:
            self._open.pop(name, None)

    def prune(self, name: str) -> None:
        """Remove `name` and its parents below the root as far as they are empty."""
        while name:
            try:
                (self._root / name).rmdir()
            except OSError:
                return
            self.forget(name)
            name = name.rpartition("/")[0]

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            self._open.clear()


class Staging:
    """One process's own directory below `parent`, for files that are not whole yet.

    Its `lock` file is flocked as long as the process lives: what it left behind is known by the lock, not by an age.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._guard = threading.Lock()
        self._names = itertools.count()
        self._pid = 0
        self._path: Path | None = None
        self._lock_fd = -1

    def fresh_path(self) -> Path:
        """A path that nobody else uses."""
        path = self._path
        # A forked child must not share its parent's directory: the parent's death would not be told from its own.
        if path is None or self._pid != os.getpid():
            path = self._enter()
        return path / str(next(self._names))

    def _enter(self) -> Path:
        with self._guard:
            if self._path is not None and self._pid == os.getpid():
                return self._path
            self._drop_lock()
            path = self._parent / f"{os.getpid()}-{Runtime().entropy():016x}"
            path.mkdir(parents=True)
            lock_fd = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            if not _try_flock(lock_fd):
                # A sweeper was faster than our lock; what it removes is empty.
                os.close(lock_fd)
                raise FileNotFoundError(path)
            self._path, self._pid, self._lock_fd = path, os.getpid(), lock_fd
            return path

    def abandon(self) -> None:
        """Start anew next time if the directory is gone."""
        with self._guard:
            if self._path is not None and not self._path.exists():
                self._drop_lock()
                self._path = None

    def _drop_lock(self) -> None:
        # In a forked child this closes its copy only: the parent's lock stays.
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """Remove it. Only what failed to be stored is in it."""
        path, is_own = self._path, self._pid == os.getpid()
        if path is not None and is_own:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._parent.rmdir()
        self.abandon()

    def sweep(self) -> int:
        """Remove what dead processes left behind; answers how many files."""
        if not self._parent.exists():
            return 0
        return sum(_sweep_one(Path(entry.path)) for entry in os.scandir(self._parent) if entry.is_dir())


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep_one(path: Path) -> int:
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Being made just now, or its maker died in between: only an empty one can be removed.
        with contextlib.suppress(OSError):
            path.rmdir()
        return 0
    try:
        if not _try_flock(fd):
            return 0
        left = sum(1 for name in os.listdir(path) if name != LOCK)  # noqa: PTH208 - names only
        shutil.rmtree(path, ignore_errors=True)
        return left
    finally:
        os.close(fd)
