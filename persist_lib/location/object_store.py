"""What Persist needs of an object store: locations, event logs and file sources are built on this alone.

Names are those of objects below one prefix. An implementation does not retry. It raises `Determinate` (it certainly did
not happen), `Indeterminate` (it may have happened), and `InvalidUsage` or `NotFound` where trying again cannot help.
`doing` says in its messages what was attempted, as in "read blob 'k'".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


class Object(NamedTuple):
    """The bytes of an object, or of a range of them, and its version. Two versions of an object are never equal."""

    data: bytes
    version: str


class Found(NamedTuple):
    """What a store says of an object without its bytes."""

    size: int
    metadata: Mapping[str, str]


class Entry(NamedTuple):
    """One listed object."""

    name: str
    size: int
    version: str


class ObjectStore(Protocol):
    """Objects by name: linearizable, durable and visible on return, listed in the order of their names.

    Several threads may use one at a time, and a forked child may use it as well.
    """

    where: str
    """The place of the objects, for messages: without options or secrets."""

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        """Return an object, or bytes `[start, end)` of it, cut at its end.

        Returns None if there is none, or none of this `version`. The bytes have arrived whole.
        """

    def find(self, name: str, doing: str) -> Found | None:
        """Return what the store says of an object, or None if there is none."""

    def put(
        self, name: str, data: bytes | memoryview, doing: str, replaces: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:  # fmt: skip
        """Store an object if there is none, or if it `replaces` this version. Returns whether it did.

        After Indeterminate, a retry may return False for an object of its own.
        """

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        """Store an object, whether there is one or not."""

    def entries(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> Iterator[Entry]:
        """Yield the objects whose names start with `prefix` and are greater than `after`: `page` for each request."""

    def page(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> tuple[list[Entry], bool]:
        """Return the first of them, and whether these are all: one request."""

    def folders(self, prefix: str, doing: str, page: int | None = None) -> Iterator[str]:
        """Yield each different text up to the next `/` that follows `prefix` in the names."""

    def delete(self, names: Sequence[str], page: int | None = None) -> dict[str, Exception]:
        """Delete objects, `page` for each request. Returns an error for each that may still be there."""

    def close(self) -> None:
        """Release connections. Idempotent."""
