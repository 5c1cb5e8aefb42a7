"""Reads one version of a file: its bytes in pieces of a fixed size, unpacked where it is compressed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from jobs.ingesting.inputs import File, asking_store, local_file
from persist_lib.config import MIB
from persist_lib.convert.lines.decompression import PIECE, same_size, unpacked
from persist_lib.errors import Determinate, InvalidUsage, NotFound
from persist_lib.format.range_reader import RangeReader
from persist_lib.location.objects.target import is_on_cloud

S3_PIECE = 8 * MIB


class FileChanged(InvalidUsage):
    """A file is not the version any more that was planned. Field: path."""


class LostFile(NotFound):
    """A file is there no more. Field: path."""


def changed(file: File) -> FileChanged:
    """The error for a file that is another one now."""
    return FileChanged(
        f"{file.path} has changed since this run was planned, so that its rows would no longer be the same however "
        "often the run is killed. Nothing of this group was written. Put the former version back and run again, or go "
        "on without what is left of it by --lost bad",
        path=file.path,
    )


def local_file_is(file: File) -> bool:
    """Whether a file of this machine is still the version that was planned."""
    return local_file(file.path) == file


def said_gone(file: File) -> LostFile:
    """The error for a file that is there no more."""
    return LostFile(
        f"{file.path} is gone, and this run is not done with it. Nothing of this group was written. Put it back and "
        "run again, or continue without what is left of it by --lost bad",
        path=file.path,
    )


def read_range(file: File, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the file's bytes `[start, end)` as stored, in pieces. Raises FileChanged or NotFound."""
    end = file.size if end is None else min(end, file.size)
    if is_on_cloud(file.path):
        for at in range(start, end, S3_PIECE):
            yield _get(file, at, min(at + S3_PIECE, end))
        return
    try:
        with open(file.path, "rb") as opened:  # noqa: PTH123
            _check(file, opened)
            opened.seek(start)
            while start < end and (piece := opened.read(min(PIECE, end - start))):
                start += len(piece)
                yield piece
            _check(file, opened)
    except FileNotFoundError as error:
        raise said_gone(file) from error


def _check(file: File, opened: Any) -> None:
    said = os.fstat(opened.fileno())
    if f"{said.st_mtime_ns:x}-{said.st_size:x}" != file.etag:
        raise changed(file)


def _get(file: File, start: int, end: int) -> bytes:
    scheme, _, place = file.path.partition("://")
    bucket, _, key = place.partition("/")

    def ask(store: Any) -> bytes:
        found = store.get(key, f"read {file.path}", start, end, file.etag)
        if found is None:
            raise said_gone(file) if store.find(key, f"look for {file.path}") is None else changed(file)
        if len(found.data) != end - start:
            raise Determinate(f"{file.path}: {len(found.data)} bytes came of {end - start}")
        return bytes(found.data)

    return asking_store(f"{scheme}://{bucket}/", file.options, ask)


def read_unpacked(file: File) -> Iterator[bytes]:
    """Yield all bytes of a compressed file, unpacked. Raises DamagedFile where it cannot be unpacked."""
    pieces = same_size(read_range(file))
    yield from unpacked(pieces, file.compression)


class RandomAccess(RangeReader):
    """An object as Parquet's reader needs it: ranges by GETs."""

    def __init__(self, file: File) -> None:
        super().__init__(file.size, lambda start, end: b"".join(read_range(file, start, end)))
