"""Blobs in an object store: written once by conditional PUT, durable and visible on return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.location.api import BlobEntry, Entry, Page, Upload
from persist_lib.location.contract import (
    MARKER,
    MARKER_BODY,
    check_key,
    check_marker,
    check_prefix,
    check_range,
    foreign_place,
    no_location,
    written_before,
)
from persist_lib.location.objects.store import MIB, MOST_BYTES, PAGE, PIECE, CloudObjects, create_marker, objects_at
from persist_lib.location.objects.target import canonical
from persist_lib.location.scheme import Opening

BLOBS = "blob/"
ATTEMPTS = 5
MULTIPART_ABOVE = 32 * MIB
"""Objects above this size are sent in pieces. A usual append is one request."""


class ObjectsBlob:
    """Objects below `<prefix>/blob/` of a bucket."""

    def __init__(
        self, objects: CloudObjects, *, multipart_above: int = MULTIPART_ABOVE, piece: int = PIECE, page: int = PAGE
    ) -> None:
        self._objects = objects
        self._page = page
        objects.multipart_above, objects.piece = multipart_above, piece

    def get(self, key: str) -> bytes | None:
        found = self._objects.get(BLOBS + check_key(key), f"read blob {key!r}")
        return None if found is None else found.data

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_range(key, start, end)
        if start == end:
            return None if self._objects.find(BLOBS + key, f"look for blob {key!r}") is None else b""
        found = self._objects.get(BLOBS + key, f"read blob {key!r}", start, end)
        return None if found is None else found.data

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return. Setting the same bytes again succeeds.

        Raises Corrupt when the key holds other bytes. A failed request is not retried here.
        """
        name, view = BLOBS + check_key(key), memoryview(data).cast("B")
        for _ in range(ATTEMPTS):
            if self._objects.put(name, data, f"store blob {key!r}"):
                return
            # It exists, perhaps by our own earlier attempt whose answer was lost, or by a proxy that sent it twice.
            found = self.get(key)
            if found is not None and found != view:
                raise written_before(key, len(view), len(found))
            if found is not None:
                return
        raise Determinate(f"blob {key} could not be stored: it was deleted in each of {ATTEMPTS} attempts", key=key)

    @property
    def address(self) -> str:
        return f"{self._objects.address}/{BLOBS}"

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        name, doing = BLOBS + check_key(key), f"move {key!r}"
        found = self._objects.get(name, doing)
        if found is not None and found.data == data:
            return True
        if (None if found is None else found.data) != follows:
            return False
        return self._objects.put(name, data, doing, None if found is None else found.version) is not None

    def delete(self, key: str) -> bool:
        """Delete an object. Returns whether there was one; of two concurrent deletions, both may return True."""
        if self._objects.find(BLOBS + check_key(key), f"look for blob {key!r}") is None:
            return False
        self._objects.delete_one(BLOBS + key, f"delete blob {key!r}")
        return True

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        failures = self._objects.delete([BLOBS + check_key(key) for key in dict.fromkeys(keys)], self._page)
        return {name.removeprefix(BLOBS): error for name, error in failures.items()}

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Yield every object below `prefix`. A page is one request of up to a thousand keys; a failed page raises."""
        check_prefix(prefix)
        return map(_entry, self._objects.entries(BLOBS + prefix, f"list {prefix!r}", page=self._page))

    def page(self, prefix: str, after: str) -> Page:
        start = BLOBS + after if after else ""
        entries, is_last = self._objects.page(BLOBS + check_prefix(prefix), f"list {prefix!r}", start, self._page)
        return Page([*map(_entry, entries)], is_last)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        check_prefix(prefix)
        found = self._objects.uploads(BLOBS + prefix, f"list the uploads of {prefix!r}", self._page)
        return (one._replace(key=one.key.removeprefix(BLOBS)) for one in found)

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        given = {one._replace(key=BLOBS + one.key): one for one in uploads}
        return {given[one]: error for one, error in self._objects.abort_uploads(list(given)).items()}

    def close(self) -> None:
        self._objects.close()


def _entry(found: Entry) -> BlobEntry:
    return BlobEntry(found.name.removeprefix(BLOBS), found.size)


class ObjectsPuts:
    """Puts blobs with credentials that allow nothing else: each is one PUT, and no other request is ever made."""

    def __init__(self, objects: CloudObjects) -> None:
        self._objects = objects

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return. What is there under that key stays, and counts as stored.

        A look at what is there would need the right to read it. A key that holds a digest makes it needless.
        """
        if (size := memoryview(data).nbytes) > MOST_BYTES:
            raise InvalidUsage(f"blob {key!r} has {size} bytes, and a PUT takes at most {MOST_BYTES}", key=key)
        self._objects.put(BLOBS + check_key(key), data, f"store blob {key!r}")

    def close(self) -> None:
        self._objects.close()


def enter(url: str, opening: Opening) -> CloudObjects:
    """Return the objects of the location at a URL. Checks that it exists in a known format, or makes it.

    For the blobs and the consensus of one location these are the same, with the same connections.
    """
    if opening.entered is not None and url in opening.entered:
        return cast("CloudObjects", opening.entered[url])
    objects = objects_at(url, opening.runtime)
    try:
        if not _check_marker(objects, url):
            if not opening.create:
                raise no_location(url, MARKER)
            _create(objects, url)
    except BaseException:
        objects.close()
        raise
    if opening.entered is not None:
        opening.entered[url] = objects
    return objects


def _check_marker(objects: CloudObjects, url: str) -> bool:
    marker = objects.get(MARKER, f"open the location {url}")
    if marker is None:
        return False
    check_marker(marker.data, f"{url}: {MARKER}")
    return True


def _create(objects: CloudObjects, url: str) -> None:
    there, _ = objects.page("", f"look into {url}", page=1)
    if there and not _check_marker(objects, url):
        raise foreign_place(url, f"objects ({there[0].name})", "another prefix")
    # With a log, whose floor is replaced on the condition that it is the one that was read.
    has_log = url.partition(":")[0].endswith("+cas")
    create_marker(objects, MARKER, MARKER_BODY, url, replaces=has_log)


def open_blob(url: str, opening: Opening) -> ObjectsBlob:
    """Open the blobs of a URL of this scheme."""
    return ObjectsBlob(enter(url, opening))


def open_puts(url: str, _opening: Opening) -> ObjectsPuts:
    """Open a URL of this scheme, without a request."""
    return ObjectsPuts(objects_at(url))


__all__ = ["ObjectsBlob", "canonical", "enter", "open_blob", "open_puts"]
