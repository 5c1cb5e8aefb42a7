"""Objects put on S3 with credentials that allow nothing else: each is one PUT, and no other request is ever made."""

from __future__ import annotations

from botocore.exceptions import ClientError

from persist_lib.errors import InvalidUsage
from persist_lib.location.contract import check_key
from persist_lib.location.s3.blob import BLOBS
from persist_lib.location.s3.client import Clients, is_taken, parse_url, writing
from persist_lib.location.scheme import Opening

MOST_BYTES = 5 << 30
"""The largest object that S3 takes in one PUT."""


class S3Puts:
    """Puts objects below `<prefix>/blob/` of a bucket. A failed request is not retried here."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return. What is there under that key stays, and counts as stored.

        SUBTLE: a look at what is there would need the right to read it. A key that holds a digest makes it needless.
        """
        view, target = memoryview(data).cast("B"), self._clients.target
        if len(view) > MOST_BYTES:
            raise InvalidUsage(f"blob {key!r} has {len(view)} bytes, and S3 takes {MOST_BYTES} in one PUT", key=key)
        name = target.path(BLOBS, check_key(key))
        with writing(f"store blob {key!r}"):
            try:
                self._clients.get().put_object(Bucket=target.bucket, Key=name, Body=bytes(view), IfNoneMatch="*")
            except ClientError as error:
                if not is_taken(error):
                    raise

    def close(self) -> None:
        """Close this process's connections."""
        self._clients.close()


def open_puts(url: str, _opening: Opening) -> S3Puts:
    """Open a URL of this scheme, without a request."""
    return S3Puts(Clients(parse_url(url)))
