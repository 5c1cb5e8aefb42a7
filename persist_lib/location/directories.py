"""Directories that survive a power cut, and a private place for half-written files.

An entry of a directory is durable once the directory was fsynced after the entry was made, and likewise each parent up
to the root. These classes do that once per directory and process, so that storing an object costs two fsyncs and few
other calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from persist_lib.errors import DiskFull
from persist_lib.location.in_place import moved_away
from persist_lib.runtime.forks import Stage, enrol

OPEN_DIRECTORIES = 128
LOCK = "lock"
NAMES = "="
LONGEST_NAME = 255
"""The longest file name, in bytes. The name of a half-written file is a number and its key, unless that is longer."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk is full, a quota is used up, or the file would exceed a size limit."""


def fsync_directory(path: Path) -> None:
    """Make the entries of `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make `path` and its missing parents, durably.

    This also fsyncs parents that exist already. The process that made them may not have fsynced them yet, and
    may never do so. So every directory made here is in a durable one from the moment at which others can find it.
    """
    missing = list(itertools.takewhile(lambda p: not p.exists(), (path, *path.parents)))
    for directory in path.parents[len(missing) :]:
        with contextlib.suppress(PermissionError):  # owned by another user and made long ago
            fsync_directory(directory)
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


def write_file(path: Path, content: bytes, entropy: Callable[[], int], *, once: bool = False) -> None:
    """Replace a file, durably and as a whole. `once`: it stays as it is if it is there."""
    temporary = path.with_name(f".{path.name}.{entropy():016x}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if once:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def ensure_directory(path: Path) -> None:
    """Make `path` and its missing parents, not durably, while other processes may remove empty directories.

    Raises NotADirectoryError when a part of the path is no directory. Raises FileNotFoundError when another process
    removed a part of the path at the same time; the caller can then try again.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # `exist_ok` looks again at what was in its way, and also raises this if that was removed in between.
        found = Path(error.filename)
        if os.path.lexists(found) and not found.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(found)) from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(found)) from error


def no_room(what: str, path: Path, error: OSError | None = None) -> DiskFull | None:
    """Return DiskFull if `error` means that `path` has no room (None: it is known to mean that), else None."""
    if error is not None and error.errno not in NO_ROOM:
        return None
    try:
        found = os.statvfs(next(above for above in (path, *path.parents) if above.exists()))
        free = found.f_bavail * found.f_frsize
    except OSError:
        free = -1
    room = f"{free:,} bytes are free there" if free >= 0 else "how much is free there cannot be told"
    reason = "" if error is None else f" ({error.strerror})"
    return DiskFull(
        f"there is no room for {what} at {path}{reason}; {room}. Nothing was stored. Make room, or raise the quota or "
        "limit, then try again: waiting does not help",
        path=str(path), free=free, errno=None if error is None else error.errno,
    )  # fmt: skip


class OpenDirectory:
    """A directory's file descriptor. It is closed when no thread refers to it any more, so never while one uses it."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __del__(self) -> None:
        # The attribute is missing when opening failed.
        if (fd := getattr(self, "fd", None)) is not None:
            os.close(fd)


class DurableDirectories:
    """The directories below `root`, made when first needed. The most recently used ones are kept open.

    SUBTLE: linking through the descriptor, not the path, is what makes the cache safe. If the directory was removed
    (and perhaps made again by another process that has not fsynced it yet), linking fails with ENOENT.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenDirectory] = OrderedDict()
        self._first_found: OpenDirectory | None = None
        enrol(self, Stage.STORES)

    def after_fork_in_child(self) -> None:
        """Renew the lock, which a thread of the parent may hold. Parent and child both use the open directories."""
        self._lock = threading.Lock()

    def check_in_place(self) -> None:
        """Raise HistoryRegressed unless the root is the directory that was there when it was first looked for.

        The root is kept open from then on, so that no other directory gets its inode. Does nothing before there is one.
        """
        first = self._first_found or self._find_root()
        try:
            is_same = first is None or os.path.samestat(self._root.stat(), os.fstat(first.fd))
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            raise moved_away(str(self._root))

    def _find_root(self) -> OpenDirectory | None:
        with self._lock:
            if self._first_found is None:
                with contextlib.suppress(FileNotFoundError):
                    self._first_found = OpenDirectory(self._root)
            return self._first_found

    def open(self, name: str) -> OpenDirectory:
        """Return the directory `name` below the root ("" is the root). Every entry on the way to it is durable."""
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
        self.check_in_place()
        path = self._root / name
        ensure_directory(path)
        # Also when it existed: the process that made it may never come to fsync its parents.
        while path != self._root.parent:
            path = path.parent
            fsync_directory(path)
        return OpenDirectory(self._root / name)

    def forget(self, name: str) -> None:
        """Look `name` up again next time, because it may have been removed."""
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
        with self._lock:
            self._open.clear()
            self._first_found = None


class Leftover(NamedTuple):
    """A file in a process's staging directory: its path below `parent`, its size in bytes, its key if known."""

    path: str
    key: str | None
    size: int
    is_dead: bool
    """Whether the process that wrote it is gone: the lock of its directory was free."""


class Staging:
    """One process's own directory below `parent`, for files that are not whole yet.

    Its `lock` file is flocked as long as the process lives. So leftovers are recognised by a free lock, not by their
    age. A file's name holds its key, so that it can also be judged by that key's writer. Removing a file of a living
    process does no harm: objects are linked from such files, and a process that finds its file gone starts again.
    """

    def __init__(self, parent: Path, entropy: Callable[[], int]) -> None:
        self._parent = parent
        self._entropy = entropy
        self._guard = threading.Lock()
        self._names = itertools.count()
        self._pid = 0
        self._path: Path | None = None
        self._lock_fd = -1
        enrol(self, Stage.STORES)

    def after_fork_in_child(self) -> None:
        """Renew the guard, which a thread of the parent may hold. The parent keeps its directory (see `fresh_path`)."""
        self._guard = threading.Lock()

    def fresh_path(self, key: str = "") -> Path:
        """Return a path that nothing else uses, for a file that is to be stored under `key`."""
        path = self._path
        # A forked child must not share its parent's directory: the lock could not tell which of the two has died.
        if path is None or self._pid != os.getpid():
            path = self._enter()
        name = f"{next(self._names)}{NAMES}{quote(key, safe='')}"
        return path / (name if len(name) <= LONGEST_NAME else name.partition(NAMES)[0])

    def _enter(self) -> Path:
        with self._guard:
            if self._path is not None and self._pid == os.getpid():
                return self._path
            self._drop_lock()
            path = self._parent / f"{os.getpid()}-{self._entropy():016x}"
            ensure_directory(path)
            lock_fd = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            if not _try_flock(lock_fd):
                # A sweeper took the lock before us. The directory that it removes is empty.
                os.close(lock_fd)
                raise FileNotFoundError(path)
            self._path, self._pid, self._lock_fd = path, os.getpid(), lock_fd
            return path

    def abandon(self) -> None:
        """Use a new directory next time if this one is gone."""
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
        """Remove the directory. It only holds files that could not be stored."""
        path, is_own = self._path, self._pid == os.getpid()
        if path is not None and is_own:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.sweep_empty()
                self._parent.rmdir()
        self.abandon()

    def leftovers(self) -> Iterator[Leftover]:
        """Yield every file in every staging directory, including this process's own. Changes nothing."""
        for folder in _names(self._parent):
            names = [name for name in _names(self._parent / folder) if name != LOCK]
            is_dead = bool(names) and _is_dead(self._parent / folder)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    size = (self._parent / folder / name).stat().st_size
                    _, told, key = name.partition(NAMES)
                    yield Leftover(f"{folder}/{name}", unquote(key) if told else None, size, is_dead)

    def remove(self, path: str) -> None:
        (self._parent / path).unlink(missing_ok=True)
        self.sweep_empty()

    def sweep_empty(self) -> None:
        """Remove the empty directories of dead processes."""
        for folder in _names(self._parent):
            if set(_names(self._parent / folder)) <= {LOCK}:
                _sweep_one(self._parent / folder)


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - names only
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_dead(path: Path) -> bool:
    """Whether the process of a staging directory is gone. False where locks cannot tell."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _try_flock(fd, fcntl.LOCK_SH)
    except OSError:
        return False
    finally:
        os.close(fd)


def _try_flock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep_one(path: Path) -> None:
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # It is being made just now, or its maker died while making it. `rmdir` removes it only if it is empty.
        with contextlib.suppress(OSError):
            path.rmdir()
        return
    try:
        if _try_flock(fd):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
