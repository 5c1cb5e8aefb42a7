"""Records what this process does to the files below a directory: Python's own calls, and SQLite's through its VFS."""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import apsw

from tests.powercut.disk import ROOT, Cut, Event, Named, Said, Synced, Written

UNLOGGED = ("-shm",)
"""What SQLite keeps in shared memory is no part of the database: it is made again by whoever opens it first."""
JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


class Recorder:
    """What was done below `root`, as events in their order. `folders` are the directories among the nodes."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._lock = threading.RLock()
        self._numbers = itertools.count(ROOT + 1)
        self._at: dict[str, int] = {self._root: ROOT}
        self._where: dict[int, str] = {}
        self._fds: dict[int, tuple[int, int]] = {}
        self._opaque: dict[int, str] = {}
        self.folders = {ROOT}
        self.events: list[Event] = []

    def say(self, word: str, number: int = 0) -> None:
        """Note that somebody was told something."""
        with self._lock:
            self.events.append(Said(word, number))

    def _is_ours(self, path: str) -> bool:
        return path.startswith(self._root + "/") and not path.endswith(UNLOGGED)

    def _path(self, path: Any, dir_fd: int | None) -> str:
        """The path as text; "" for what is not below the root."""
        if isinstance(path, int):
            return ""
        text = os.fsdecode(path)
        if dir_fd is not None and not text.startswith("/"):
            number, _ = self._fds.get(dir_fd, (-1, 0))
            text = f"{self._where.get(number, '?')}/{text}"
        return text if self._is_ours(text) else ""

    def _name(self, path: str, number: int | None) -> None:
        """Note that `path` is (no longer) the name of a node."""
        parent, _, name = path.rpartition("/")
        self.events.append(Named(self._at[parent], name, number))
        if number is None:
            del self._at[path]
        else:
            self._at[path] = number

    def made(self, path: str, *, is_folder: bool = False) -> int:
        """The number of what is at `path`, new if there was nothing."""
        if path not in self._at:
            number = next(self._numbers)
            if is_folder:
                self.folders.add(number)
                self._where[number] = path
            self._name(path, number)
        return self._at[path]

    def gone(self, path: str) -> None:
        """The name was removed."""
        if path in self._at:
            self._name(path, None)

    def wrote(self, number: int, start: int, data: bytes) -> None:
        """A write returned."""
        self.events.append(Written(number, start, data))

    def cut(self, number: int, size: int) -> None:
        """A truncation returned."""
        self.events.append(Cut(number, size))

    def synced(self, number: int) -> None:
        """An fsync returned."""
        self.events.append(Synced(number))

    def synced_parent(self, path: str) -> None:
        """An fsync of the directory of `path` returned."""
        self.synced(self._at[path.rpartition("/")[0]])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else's events come between what is done here and its event."""
        with self._lock:
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record. SQLite connections must be opened and closed within."""
        vfs = RecordingVFS(self)
        replaced: dict[str, Any] = self._replaced()
        with mock.patch.multiple(os, **replaced), mock.patch.object(io, "open", self._open_of(io.open)):
            yield
        vfs.unregister()

    def _replaced(self) -> dict[str, Callable[..., Any]]:
        real = {
            name: getattr(os, name)
            for name in (
                "open", "close", "write", "writev", "fsync", "fdatasync", "ftruncate", "link", "replace", "unlink",
                "mkdir", "rmdir",
            )
        }  # fmt: skip

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            with self._lock:
                fd: int = real["open"](path, flags, mode, dir_fd=dir_fd)
                self._opaque.pop(fd, None)  # a file object closes its descriptor without telling
                if (text := self._path(path, dir_fd)) or os.fsdecode(path) == self._root:
                    text = text or self._root
                    number = self.made(text) if flags & os.O_CREAT else self._at.get(text)
                    if number is not None:
                        self._fds[fd] = number, 0
                return fd

        def close(fd: int) -> None:
            with self._lock:
                self._fds.pop(fd, None)
                self._opaque.pop(fd, None)
                real["close"](fd)

        def write(fd: int, data: Any) -> int:
            with self._lock:
                count: int = real["write"](fd, data)
                if fd in self._fds:
                    number, start = self._fds[fd]
                    self.wrote(number, start, bytes(data[:count]))
                    self._fds[fd] = number, start + count
                return count

        def writev(fd: int, buffers: Any) -> int:
            with self._lock:
                count: int = real["writev"](fd, buffers)
                if fd in self._fds:
                    number, start = self._fds[fd]
                    self.wrote(number, start, b"".join(buffers)[:count])
                    self._fds[fd] = number, start + count
                return count

        def ftruncate(fd: int, size: int) -> None:
            with self._lock:
                real["ftruncate"](fd, size)
                if fd in self._fds:
                    number, start = self._fds[fd]
                    self.cut(number, size)
                    self._fds[fd] = number, min(start, size)

        def fsync(fd: int) -> None:
            with self._lock:
                real["fsync"](fd)
                if fd in self._opaque:
                    path = self._opaque[fd]
                    self.wrote(self._at[path], 0, Path(path).read_bytes())
                    self.synced(self._at[path])
                elif fd in self._fds:
                    self.synced(self._fds[fd][0])

        def link(source: Any, target: Any, *, dst_dir_fd: int | None = None) -> None:
            with self._lock:
                real["link"](source, target, dst_dir_fd=dst_dir_fd)
                if path := self._path(target, dst_dir_fd):
                    self._name(path, self._at[os.fsdecode(source)])

        def replace(source: Any, target: Any) -> None:
            with self._lock:
                real["replace"](source, target)
                if (path := self._path(target, None)) and (number := self._at.get(os.fsdecode(source))) is not None:
                    self._name(path, number)
                    self.gone(os.fsdecode(source))

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                real["unlink"](path, dir_fd=dir_fd)
                self.gone(self._path(path, dir_fd))

        def mkdir(path: Any, mode: int = 0o777) -> None:
            with self._lock:
                real["mkdir"](path, mode)
                if text := self._path(path, None):
                    self.made(text, is_folder=True)

        def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                real["rmdir"](path, dir_fd=dir_fd)
                self.gone(self._path(path, dir_fd))

        return {
            "open": open_, "close": close, "write": write, "writev": writev, "fsync": fsync, "fdatasync": fsync,
            "ftruncate": ftruncate, "link": link, "replace": replace, "unlink": unlink, "mkdir": mkdir, "rmdir": rmdir,
        }  # fmt: skip

    def _open_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What is written through a file object is seen at its fsync."""

        def open_(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            with self._lock:
                opened = real(file, mode, *rest, **named)
                if set(mode) & set("wx") and (path := self._path(file, None)):
                    self.made(path)
                    self._opaque[opened.fileno()] = path
                return opened

        return open_


class RecordingVFS(apsw.VFS):
    """SQLite's own, as long as this is registered the default one of this process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__(f"recording-{id(recorder):x}", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - SQLite's name
        """See SQLite."""
        path = name if isinstance(name, str | None) else name.filename()
        if path is None or not self._recorder._is_ours(path):
            return apsw.VFSFile("unix", name, flags)
        with self._recorder.alone():
            return RecordingFile(self._recorder, name, path, flags)

    def xDelete(self, name: str, sync_directory: bool) -> None:  # noqa: N802
        """See SQLite."""
        with self._recorder.alone():
            super().xDelete(name, sync_directory)
            if self._recorder._is_ours(name):
                self._recorder.gone(name)
                if sync_directory:
                    self._recorder.synced_parent(name)


class RecordingFile(apsw.VFSFile):
    """A file of SQLite's. The first fsync of a journal that it may have made syncs the directory too (`os_unix.c`)."""

    def __init__(self, recorder: Recorder, name: Any, path: str, flags: list[int]) -> None:
        self._recorder, self._path = recorder, path
        self._syncs_parent = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & JOURNALS)
        super().__init__("unix", name, flags)
        self._number = recorder.made(path)

    def xWrite(self, data: bytes, start: int) -> None:  # noqa: N802
        """See SQLite."""
        with self._recorder.alone():
            super().xWrite(data, start)
            self._recorder.wrote(self._number, start, bytes(data))

    def xTruncate(self, size: int) -> None:  # noqa: N802
        """See SQLite."""
        with self._recorder.alone():
            super().xTruncate(size)
            self._recorder.cut(self._number, size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        """See SQLite."""
        with self._recorder.alone():
            super().xSync(flags)
            self._recorder.synced(self._number)
            if self._syncs_parent:
                self._syncs_parent = False
                self._recorder.synced_parent(self._path)
