"""Objects on S3 by name, put on a condition, as an event log uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from botocore.exceptions import ClientError

from persist_lib.errors import Determinate, Indeterminate
from persist_lib.events.stores.shared import sent_again
from persist_lib.location.s3.blob import body_of, delete_objects
from persist_lib.location.s3.client import (
    Clients,
    code_of,
    is_missing,
    is_taken,
    is_truncated,
    reading,
    status_of,
    writing,
)
from persist_lib.runtime.ambient import Runtime


class Objects:
    """Objects by name. A version is an ETag: as each record says its epoch, no two have the same bytes.

    Each request is sent again while it fails: a condition that our own request made false is recognised.
    """

    def __init__(self, clients: Clients, runtime: Runtime) -> None:
        self._clients, self._target, self._runtime = clients, clients.target, runtime
        self.where = f"s3://{self._target.bucket}/{self._target.prefix}"

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._target.bucket, "Key": self._target.path(name)}

    def get(self, name: str, most: int | None = None) -> tuple[bytes, str] | None:
        """Return an object, or its first `most` bytes, and its version; None if there is none."""
        try:
            return sent_again(self._runtime, lambda: self._get(name, most))
        except Indeterminate as error:
            raise Determinate(f"could not read {name} of {self.where}: {error.message}") from error

    def _get(self, name: str, most: int | None) -> tuple[bytes, str] | None:
        cut = {} if most is None else {"Range": f"bytes=0-{most - 1}"}
        with reading(f"read {name!r}"):
            try:
                answer = self._clients.get().get_object(**self._at(name), **cut)
                return body_of(answer), str(answer["ETag"])
            except ClientError as error:
                if is_missing(error):
                    return None
                if most is not None and status_of(error) == 416:  # an empty object has no range
                    return b"", ""
                raise

    def put(self, name: str, data: bytes, version: str | None) -> bool:
        """Store an object if there is none (version None), or if its version is this one. Returns whether it did."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return self._put(name, data, condition)

    def overwrite(self, name: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        self._put(name, data, {})

    def _put(self, name: str, data: bytes, condition: dict[str, str]) -> bool:
        def put() -> bool:
            with writing(f"store {name!r}"):
                try:
                    self._clients.get().put_object(**self._at(name), Body=data, **condition)
                except ClientError as error:
                    if is_taken(error) or ("IfMatch" in condition and code_of(error) == "NoSuchKey"):
                        return False
                    raise
            return True

        return sent_again(self._runtime, put)

    def names(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """The names that start with a prefix and are greater than `after`, ascending; the first `most` of them."""
        return sent_again(self._runtime, lambda: list(islice(self._pages(prefix, after), most)))

    def _pages(self, prefix: str, after: str) -> Iterator[str]:
        root = self._target.path("")
        start = {"StartAfter": root + after} if after else {}
        while True:
            with reading(f"list {prefix!r}"):
                page = self._clients.get().list_objects_v2(Bucket=self._target.bucket, Prefix=root + prefix, **start)
                is_last = not is_truncated(page)
                names = [str(entry["Key"]) for entry in page.get("Contents", [])]
            yield from (name.removeprefix(root) for name in names)
            if is_last:
                return
            start = {"StartAfter": names[-1]}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. It is no error if there are none."""

        def delete() -> None:
            failures = delete_objects(self._clients, [self._target.path(name) for name in names])
            if failures:
                raise next(iter(failures.values()))

        sent_again(self._runtime, delete)

    def close(self) -> None:
        """Release connections. Idempotent."""
        self._clients.close()
