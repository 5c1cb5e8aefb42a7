"""Where files are: a folder of this machine, or a prefix in an object store. What is in it, and bytes of one file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from persist_lib.errors import Determinate, NotFound
from persist_lib.location.objects.store import CloudObjects, objects_at
from persist_lib.location.objects.target import is_on_cloud
from persist_lib.sources.protocol import Unread

PACKED = (".gz", ".zst")


OTHERWISE_PACKED = (*PACKED, ".bz2", ".xz", ".lz4", ".br", ".zip", ".z", ".7z")


class File(NamedTuple):
    """One file as it is listed: its path below the folder, its size as stored, and a text that changes with it.

    `changed_ms` is when it was last changed, where it may still be written. `problem` says why it cannot be read.
    """

    path: str
    size: int
    version: str
    changed_ms: int | None = None
    problem: str = ""

    @property
    def packing(self) -> str | None:
        """`.gz`, `.zst`, or None, by its name."""
        return next((suffix for suffix in PACKED if self.path.lower().endswith(suffix)), None)

    @property
    def plain_path(self) -> str:
        """Its path without what says how it is packed."""
        return self.path[: len(self.path) - len(self.packing or "")]


class Opened(Protocol):
    """A file that is open for reading."""

    size: int

    def range(self, start: int, end: int) -> bytes:
        """Bytes `[start, end)`, cut at its end."""
        ...

    def close(self) -> None:
        """Release what it has open."""
        return


class Folder(Protocol):
    """A place that holds files."""

    is_growing: bool
    """Whether files may be appended to. An object of a store never is."""

    def list(self) -> Iterator[File]:
        """Every file, in no order. Hidden ones (a part of the path starts with `.` or `_`) are left out."""
        ...

    def open(self, file: File) -> Opened:
        """Open a file. Raises FileNotFoundError."""
        ...

    def close(self) -> None:
        """Release what it has open."""
        return


def open_folder(place: str) -> Folder:
    """The folder at a path or a URL as `s3://bucket/prefix/?options`, of any cloud.

    Raises InvalidUsage, and NotFound for a missing folder.
    """
    if is_on_cloud(place):
        return Prefix(place)
    return Directory(place.removeprefix("file:").removeprefix("//") if place.startswith("file:") else place)


def readable(folder: Folder, is_ours: Callable[[File], bool]) -> tuple[list[File], dict[str, Unread]]:
    """The files that can be read, in the order of their names; and those that cannot, with why.

    Raises Determinate if the folder cannot be listed: what is not in a list counts as gone.
    """
    found: list[File] = []
    unread: dict[str, Unread] = {}
    for file in sorted(folder.list()):
        packing = next((suffix for suffix in OTHERWISE_PACKED if file.path.lower().endswith(suffix)), "")
        name = os.fsencode(file.path).decode(errors="backslashreplace")
        if not is_ours(file):
            if packing and is_ours(file._replace(path=file.path[: -len(packing)])):
                unread[name] = Unread(f"it is packed in a way that is not read here ({packing})")
        elif name != file.path:
            unread[name] = Unread("its name is not UTF-8: rename it")
        elif file.problem:
            unread[name] = Unread(file.problem)
        else:
            found.append(file)
    return found, unread


def is_hidden(path: str) -> bool:
    """Whether a part of the path says that it is not meant to be read (yet)."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


class Directory(Folder):
    """A folder of this machine, searched in depth."""

    is_growing = True

    def __init__(self, place: str) -> None:
        self.root = Path(place)
        if not self.root.is_dir():
            raise NotFound(
                f"{place}: there is no such folder. A source reads files in one, or below s3://, gs:// or az://…"
            )

    def list(self) -> Iterator[File]:
        """Every file that is there now. Links to folders are not followed."""
        for folder, _, names in os.walk(self.root, onerror=self._failed):
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.root).as_posix()
                if not is_hidden(relative) and (file := _found(path, relative)) is not None:
                    yield file

    def _failed(self, error: OSError) -> None:
        """Without this, a folder that cannot be listed would be an empty one, and its files gone for ever."""
        if not isinstance(error, FileNotFoundError) or error.filename == str(self.root):  # else it went just now
            raise Determinate(
                f"the folder {error.filename} could not be listed: {error.strerror}. It is looked at again"
            ) from error

    def open(self, file: File) -> Opened:
        return _OnDisk(self.root / file.path)


def _found(path: Path, relative: str) -> File | None:
    """A file as it is listed; None if it went just now."""
    try:
        said = path.stat()
    except FileNotFoundError:
        return File(relative, 0, "", problem="it is a link to nothing") if path.is_symlink() else None
    except OSError as error:
        return File(relative, 0, "", problem=f"it could not be looked at: {error.strerror}")
    version = f"{said.st_ino}-{said.st_mtime_ns:x}-{said.st_size:x}"
    problem = "" if stat.S_ISREG(said.st_mode) else "it is no plain file"
    return File(relative, said.st_size, version, said.st_mtime_ns // 1_000_000, problem)


class _OnDisk(Opened):
    """A file of this machine: the one that had the name when it was opened, whatever is renamed since."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size

    def range(self, start: int, end: int) -> bytes:
        pieces = []
        while start < end and (piece := os.pread(self._file, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        os.close(self._file)


class Prefix(Folder):
    """The objects below a prefix of a bucket."""

    is_growing = False

    def __init__(self, place: str) -> None:
        self._objects = objects_at(place)

    def list(self) -> Iterator[File]:
        """Every object, by pages."""
        for found in self._objects.entries("", f"list {self._objects.where}"):
            if found.name and not found.name.endswith("/") and not is_hidden(found.name):
                yield File(found.name, found.size, found.version.strip('"'))

    def open(self, file: File) -> Opened:
        return _Stored(self._objects, file)

    def close(self) -> None:
        self._objects.close()


class _Stored(Opened):
    """One version of an object. Once it is replaced, it is not found."""

    def __init__(self, objects: CloudObjects, file: File) -> None:
        self._objects, self._file, self.size = objects, file, file.size

    def range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        if start >= end:
            return b""
        where = f"{self._objects.where}/{self._file.path}"
        found = self._objects.get(self._file.path, f"read {where}", start, end, self._file.version)
        if found is None:
            raise NotFound(f"{self._file.path} was replaced or deleted")
        if len(found.data) != end - start:
            raise Determinate(f"{where}: {len(found.data)} bytes came of {end - start}")
        return found.data
