"""Where files are: a folder of this machine, or an S3 prefix. What is in it, and bytes of one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from persist_lib.errors import NotFound

PACKED = (".gz", ".zst")


class File(NamedTuple):
    """One file as it is listed: its path below the folder, its size as stored, and a text that changes with it."""

    path: str
    size: int
    version: str

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

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Folder(Protocol):
    """A place that holds files."""

    is_growing: bool
    """Whether files may be appended to. An object of S3 never is."""

    def list(self) -> Iterator[File]:
        """Every file, in no order. Hidden ones (a part of the path starts with `.` or `_`) are left out."""
        ...

    def open(self, file: File) -> Opened:
        """Open a file. Raises FileNotFoundError."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def open_folder(place: str) -> Folder:
    """The folder at a path or `s3://bucket/prefix/?options`. Raises InvalidUsage, and NotFound for a missing folder."""
    if place.startswith("s3://"):
        from persist_lib.storage.sources.files.s3 import S3Prefix  # noqa: PLC0415 - boto3 is an extra

        return S3Prefix(place)
    return Directory(place.removeprefix("file:").removeprefix("//") if place.startswith("file:") else place)


def is_hidden(path: str) -> bool:
    """Whether a part of the path says that it is not meant to be read (yet)."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


class Directory:
    """A folder of this machine, searched in depth."""

    is_growing = True

    def __init__(self, place: str) -> None:
        self.root = Path(place)
        if not self.root.is_dir():
            raise NotFound(f"{place}: there is no such folder. A source reads files in a folder, or an s3:// prefix")

    def list(self) -> Iterator[File]:
        """Every file that is there now."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.root).as_posix()
                if is_hidden(relative):
                    continue
                try:
                    said = path.stat()
                except FileNotFoundError:
                    continue
                yield File(relative, said.st_size, f"{said.st_ino}-{said.st_mtime_ns:x}-{said.st_size:x}")

    def open(self, file: File) -> Opened:
        """Open a file of this machine."""
        return _OnDisk(self.root / file.path)

    def close(self) -> None:
        """There is nothing to release."""


class _OnDisk:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
