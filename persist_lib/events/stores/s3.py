r"""Event logs on S3: `s3:URL`, as in `s3:s3\://bucket/ledger`, with the options of a location's URL.

An event is one conditional PUT. See `events.conditional`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from botocore.exceptions import ClientError

from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.events.api import Kind, Opening
from persist_lib.events.stores.conditional import ConditionalRecords
from persist_lib.events.stores.shared import encode_meta, open_meta
from persist_lib.location.s3.blob import body_of, delete_objects
from persist_lib.location.s3.client import (
    Clients,
    code_of,
    is_missing,
    is_taken,
    is_truncated,
    parse_url,
    reading,
    status_of,
    writing,
)

MARKER = "events.json"
LIMIT = 64 << 20


class S3Places:
    """See `conditional.Places`. A version is an ETag: as each record says its epoch, no two have the same bytes."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self._target = clients, clients.target

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._target.bucket, "Key": self._target.path(name)}

    def get(self, name: str, most: int | None = None) -> tuple[bytes, str] | None:
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
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        with writing(f"store {name!r}"):
            try:
                self._clients.get().put_object(**self._at(name), Body=data, **condition)
            except ClientError as error:
                if is_taken(error) or (version is not None and code_of(error) == "NoSuchKey"):
                    return False
                raise
        return True

    def overwrite(self, name: str, data: bytes) -> None:
        with writing(f"store {name!r}"):
            self._clients.get().put_object(**self._at(name), Body=data)

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
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
        failures = delete_objects(self._clients, [self._target.path(name) for name in names])
        if failures:
            raise next(iter(failures.values()))

    def close(self) -> None:
        self._clients.close()


def open_s3(options: Sequence[str], opening: Opening) -> ConditionalRecords:
    """Open a log: `s3:URL`."""
    if len(options) != 1 or not options[0].startswith("s3://"):
        raise InvalidUsage(
            r"a store of events on S3 is s3:URL, with \: for each colon in the URL, as in s3:s3\://bucket/ledger"
        )
    clients = Clients(parse_url(options[0]))
    places, where = S3Places(clients), f"s3://{clients.target.bucket}/{clients.target.prefix}"
    try:
        found = places.get(MARKER)
        if found is None:
            if not opening.create:
                raise NotFound(f"there is no event log at {where}. Check the URL; a writer makes one")
            found = _create(places, where, opening)
        return ConditionalRecords(places, open_meta(found[0], where), LIMIT, where, opening.runtime)
    except BaseException:
        places.close()
        raise


def _create(places: S3Places, where: str, opening: Opening) -> tuple[bytes, str]:
    """Make the marker, and refuse a server that ignores conditions: it would overwrite what another writer stored."""
    if (foreign := next(places.names(""), None)) is not None and foreign != MARKER:
        raise InvalidUsage(f"{where} holds other objects ({foreign}), and no event log. Choose another prefix")
    marker = encode_meta(opening.runtime)
    places.put(MARKER, marker, None)
    found = places.get(MARKER)
    ignores = places.put(MARKER, marker, None) or places.put(MARKER, marker, '"00000000000000000000000000000000"')
    if ignores or found is None:
        raise InvalidUsage(
            f"the server of {where} ignores If-None-Match or If-Match: it would overwrite what others wrote. Use one "
            "that has conditional writes"
        )
    return found


KIND = Kind(open_s3)
