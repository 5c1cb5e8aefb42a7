"""The objects below an S3 prefix, each in the version that was listed."""

from __future__ import annotations

from collections.abc import Iterator

from persist_lib.errors import Determinate, NotFound
from persist_lib.location.s3.client import parse_url
from persist_lib.location.s3.objects import S3Objects
from persist_lib.sources.files.folders import File, Opened, is_hidden


class S3Prefix:
    """The objects below a prefix of a bucket."""

    is_growing = False

    def __init__(self, place: str) -> None:
        self._objects = S3Objects(parse_url(place))

    def list(self) -> Iterator[File]:
        """Every object, by pages."""
        for found in self._objects.entries("", f"list {self._objects.where}"):
            if found.name and not found.name.endswith("/") and not is_hidden(found.name):
                yield File(found.name, found.size, found.version.strip('"'))

    def open(self, file: File) -> Opened:
        """Open an object in the version that was listed."""
        return _OnS3(self._objects, file)

    def close(self) -> None:
        """Close connections."""
        self._objects.close()


class _OnS3:
    """One version of an object. Once it is replaced, it is not found."""

    def __init__(self, objects: S3Objects, file: File) -> None:
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

    def close(self) -> None:
        """There is nothing to release."""
