"""The objects below an S3 prefix, each in the version that was listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persist_lib.errors import Determinate, NotFound
from persist_lib.location.s3.client import Clients, code_of, is_missing, is_truncated, parse_url, reading
from persist_lib.storage.sources.files.folders import File, Opened, is_hidden


class S3Prefix:
    """The objects below a prefix of a bucket."""

    is_growing = False

    def __init__(self, place: str) -> None:
        self._target = parse_url(place)
        self._clients = Clients(self._target)
        self._root = f"{self._target.prefix}/" if self._target.prefix else ""

    def list(self) -> Iterator[File]:
        more: dict[str, Any] = {}
        while True:
            with reading(f"list s3://{self._target.bucket}/{self._root}"):
                answer = self._clients.get().list_objects_v2(Bucket=self._target.bucket, Prefix=self._root, **more)
                more = {"ContinuationToken": answer["NextContinuationToken"]} if is_truncated(answer) else {}
            for item in answer.get("Contents", ()):
                path = item["Key"][len(self._root) :]
                if path and not path.endswith("/") and not is_hidden(path):
                    yield File(path, item["Size"], item["ETag"].strip('"'))
            if not more:
                return

    def open(self, file: File) -> Opened:
        return _OnS3(self._clients, self._target.bucket, self._root + file.path, file)

    def close(self) -> None:
        self._clients.close()


class _OnS3:
    """One version of an object. Once it is replaced, it is not found."""

    def __init__(self, clients: Clients, bucket: str, key: str, file: File) -> None:
        self._clients, self._bucket, self._key, self._version = clients, bucket, key, file.version
        self.size = file.size

    def range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        if start >= end:
            return b""
        with reading(f"read s3://{self._bucket}/{self._key}"):
            try:
                answer = self._clients.get().get_object(
                    Bucket=self._bucket, Key=self._key, Range=f"bytes={start}-{end - 1}", IfMatch=self._version
                )
                data = bytes(answer["Body"].read())
            except Exception as error:
                if is_missing(error) or code_of(error) in {"PreconditionFailed", "412"}:
                    raise NotFound(f"{self._key} was replaced or deleted") from error
                raise
        if len(data) != end - start:
            raise Determinate(f"s3://{self._bucket}/{self._key}: {len(data)} bytes came of {end - start}")
        return data

    def close(self) -> None:
        """There is nothing to release."""
