"""Blobs on S3, or on a server with its protocol: written once by conditional PUT, durable and visible on return."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from botocore.exceptions import ClientError

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, NewerFormat, NotFound, PersistError
from persist_lib.location.api import BlobEntry, Page, Upload
from persist_lib.location.contract import check_key, check_prefix, check_range, written_before
from persist_lib.location.s3.client import (
    Clients,
    canonical,
    code_of,
    is_missing,
    is_taken,
    is_truncated,
    parse_url,
    reading,
    status_of,
    writing,
)
from persist_lib.location.scheme import Opening
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Runtime

FORMAT = 1
MARKER = "persist.json"
BLOBS = "blob"
MIB = 1024 * 1024
MULTIPART_ABOVE = 32 * MIB
"""Objects above this size are sent in pieces, several at a time. A usual append is one request."""
PIECE = 16 * MIB
PIECE_THREADS = 4
PAGE = 1000
"""The most keys that S3 lists or deletes in one request."""
ATTEMPTS = 5


class S3Blob:
    """Objects below `<prefix>/blob/` of a bucket."""

    def __init__(
        self,
        clients: Clients,
        *,
        runtime: Runtime | None = None,
        multipart_above: int = MULTIPART_ABOVE,
        piece: int = PIECE,
        page: int = PAGE,
    ) -> None:
        self._target = clients.target
        self._clients = clients
        self._runtime = runtime or Runtime()
        self._multipart_above = multipart_above
        self._piece = piece
        self._page = page

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._target.bucket, "Key": self._target.path(BLOBS, check_key(key))}

    def get(self, key: str) -> bytes | None:
        at = self._at(key)
        with reading(f"read blob {key!r}"):
            try:
                return body_of(self._clients.get().get_object(**at))
            except ClientError as error:
                if is_missing(error):
                    return None
                raise

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_range(key, start, end)
        if start == end:
            return None if self._size(key) is None else b""
        with reading(f"read blob {key!r}"):
            try:
                answer = self._clients.get().get_object(**self._at(key), Range=f"bytes={start}-{end - 1}")
            except ClientError as error:
                if is_missing(error):
                    return None
                if status_of(error) == 416:
                    return b""  # the object exists, and ends before the range
                raise
            data = body_of(answer)
            # Some servers answer with the whole object to a range that they do not support.
            is_whole = answer["ResponseMetadata"]["HTTPStatusCode"] == 200
            return data[start:end] if is_whole else data

    def _size(self, key: str) -> int | None:
        at = self._at(key)
        with reading(f"look for blob {key!r}"):
            try:
                return int(self._clients.get().head_object(**at)["ContentLength"])
            except ClientError as error:
                if is_missing(error):
                    return None
                raise

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return. Setting the same bytes again succeeds.

        Raises Corrupt when the key holds other bytes. A failed request is not retried here.
        """
        at = self._at(key)
        view = memoryview(data).cast("B")
        for _ in range(ATTEMPTS):
            with writing(f"store blob {key!r}"):
                try:
                    return self._put(key, at, view if isinstance(data, memoryview) else data, view)
                except ClientError as error:
                    if not is_taken(error):
                        raise
            # It exists, perhaps by our own earlier attempt whose answer was lost, or by a proxy that sent it twice.
            found = self.get(key)
            if found is not None and found != view:
                raise written_before(key, len(view), len(found))
            if found is not None:
                return None
        raise Determinate(f"blob {key} could not be stored: it was deleted in each of {ATTEMPTS} attempts", key=key)

    def _put(self, key: str, at: dict[str, str], data: bytes | memoryview, view: memoryview) -> None:
        if len(view) > self._multipart_above:
            self._put_in_pieces(key, at, view)
        else:
            body = data if isinstance(data, bytes) else bytes(view)
            self._clients.get().put_object(**at, Body=body, IfNoneMatch="*")

    def _put_in_pieces(self, key: str, at: dict[str, str], view: memoryview) -> None:
        """Store an object in pieces. It is visible only after the last request, and given up if one before it fails."""
        client = self._clients.get()
        started = Upload(key, client.create_multipart_upload(**at)["UploadId"])
        upload = {**at, "UploadId": started.id}

        def put(number: int) -> dict[str, Any]:
            body = bytes(view[(number - 1) * self._piece : number * self._piece])
            answer = client.upload_part(**upload, PartNumber=number, Body=body)
            checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        try:
            with self._runtime.pool(PIECE_THREADS, "persist-upload") as pool:
                pieces = list(pool.map(put, range(1, -(-len(view) // self._piece) + 1)))
        except BaseException:
            self.abort_uploads([started])
            raise
        try:
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": pieces}, IfNoneMatch="*")
        except ClientError as error:
            # SUBTLE: only if S3 refused. After an unknown outcome it may be completing now: it is left to the sweep.
            if 400 <= status_of(error) < 500:
                self.abort_uploads([started])
            raise

    def delete(self, key: str) -> bool:
        """Delete an object. Returns whether there was one; of two concurrent deletions, both may return True."""
        if self._size(key) is None:
            return False
        with writing(f"delete blob {key!r}"):
            self._clients.get().delete_object(**self._at(key))
        return True

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete several objects, a thousand per request. Returns an error for each key that was not deleted."""
        names = {self._at(key)["Key"]: key for key in keys}
        return {names[name]: error for name, error in delete_objects(self._clients, list(names), self._page).items()}

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Yield every object below `prefix`. A page is one request of up to a thousand keys; a failed page raises."""
        check_prefix(prefix)
        return self._pages(prefix)

    def _pages(self, prefix: str) -> Iterator[BlobEntry]:
        root = self._target.path(BLOBS, "")
        token: dict[str, str] = {}
        while True:
            with reading(f"list {prefix!r}"):
                page = self._clients.get().list_objects_v2(
                    Bucket=self._target.bucket, Prefix=root + prefix, MaxKeys=self._page, **token
                )
                token = {"ContinuationToken": page["NextContinuationToken"]} if is_truncated(page) else {}
            yield from (BlobEntry(entry["Key"].removeprefix(root), entry["Size"]) for entry in page.get("Contents", []))
            if not token:
                return

    def page(self, prefix: str, after: str) -> Page:
        """Return up to a thousand objects below `prefix` whose keys are greater than `after`, in order: one request."""
        root = self._target.path(BLOBS, "")
        start = {"StartAfter": root + after} if after else {}
        with reading(f"list {prefix!r}"):
            page = self._clients.get().list_objects_v2(
                Bucket=self._target.bucket, Prefix=root + check_prefix(prefix), MaxKeys=self._page, **start
            )
            is_last = not is_truncated(page)
        found = [BlobEntry(entry["Key"].removeprefix(root), entry["Size"]) for entry in page.get("Contents", [])]
        return Page(found, is_last)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield unfinished uploads below `prefix`, in pages of a thousand."""
        check_prefix(prefix)
        root, bucket = self._target.path(BLOBS, ""), self._target.bucket
        after: dict[str, str] = {}
        while True:
            with reading(f"list the uploads of {prefix!r}"):
                page = self._clients.get().list_multipart_uploads(
                    Bucket=bucket, Prefix=root + prefix, MaxUploads=self._page, **after
                )
                after = (
                    {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
                    if is_truncated(page)
                    else {}
                )
            yield from (Upload(found["Key"].removeprefix(root), found["UploadId"]) for found in page.get("Uploads", []))
            if not after:
                return

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        """Give up uploads, with a request for each. Returns an error for each that could not be given up."""
        failed: dict[Upload, Exception] = {}
        for upload in uploads:
            try:
                with writing(f"give up the upload of {upload.key!r}"):
                    self._abort(upload)
            except PersistError as error:
                failed[upload] = error
        return failed

    def _abort(self, upload: Upload) -> None:
        try:
            self._clients.get().abort_multipart_upload(**self._at(upload.key), UploadId=upload.id)
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":  # finished, or given up by another process
                raise

    def close(self) -> None:
        self._clients.close()


def body_of(answer: Any) -> bytes:
    """Return the whole body. Raises Determinate if it is shorter than announced or the caller's deadline has passed."""
    with contextlib.closing(answer["Body"]) as body:
        pieces = []
        while piece := body.read(4 * MIB):
            pieces.append(piece)
            if patience_s(1.0) <= 0:
                raise Determinate("the caller's deadline has passed in the middle of an answer")
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    # SUBTLE: an answer that ends among its headers announces no length, and looks like an empty object.
    if len(data) != answer["ContentLength"]:
        raise Determinate(f"only {len(data)} of {answer['ContentLength']} bytes arrived")
    return data


def delete_objects(clients: Clients, names: list[str], page: int = PAGE) -> dict[str, Exception]:
    """Delete objects by their full names, a page per request. Returns an error for each that was not deleted."""
    failures: dict[str, Exception] = {}
    for start in range(0, len(names), page):
        chunk = names[start : start + page]
        try:
            failures |= _delete_chunk(clients, chunk)
        except PersistError as error:
            failures |= dict.fromkeys(chunk, error)
    return failures


def _delete_chunk(clients: Clients, names: list[str]) -> dict[str, Exception]:
    """Delete a page. SUBTLE: the status is 200 even if all failed, so each key has to be found in the answer."""
    objects = {"Objects": [{"Key": name} for name in names]}
    with writing(f"delete {len(names)} objects"):
        answer = clients.get().delete_objects(Bucket=clients.target.bucket, Delete=objects)
    errors = {error["Key"]: error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"}
    unsaid = set(names) - {entry["Key"] for entry in answer.get("Deleted", [])}
    return {name: _not_deleted(name, errors.get(name)) for name in names if name in errors or name in unsaid}


def _not_deleted(name: str, error: dict[str, str] | None) -> Exception:
    if error is None:
        return Indeterminate(f"{name} may have been deleted: the answer does not say")
    if error.get("Code") == "AccessDenied":  # reported per key, as a policy may allow some; a retry does not help
        return InvalidUsage(
            f"could not delete {name}: AccessDenied {error.get('Message', '')}. Check the credentials, and the policy "
            "in docs/operations.md",
            code="AccessDenied",
        )
    return Determinate(
        f"could not delete {name}: {error.get('Code')} {error.get('Message', '')}", code=error.get("Code")
    )


def enter(url: str, opening: Opening) -> Clients:
    """Return clients for the location at a URL. Checks that it exists in a known format, or makes it."""
    clients = Clients(parse_url(url))
    try:
        if not _check_marker(clients, url):
            if not opening.create:
                raise NotFound(
                    f"there is no location at {url}: {MARKER} is missing. Check the URL, or open it with create=True",
                    url=url,
                )
            _create(clients, url)
    except BaseException:
        clients.close()
        raise
    return clients


def _check_marker(clients: Clients, url: str) -> bool:
    with reading(f"open the location {url}"):
        try:
            data = body_of(clients.get().get_object(Bucket=clients.target.bucket, Key=clients.target.path(MARKER)))
        except ClientError as error:
            if is_missing(error):
                return False
            raise
    try:
        found = json.loads(data)["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{url}: {MARKER} is not what Persist wrote; restore it ({{\"format\": {FORMAT}}})", key=MARKER,
            expected={"format": FORMAT}, actual=str(error),
        ) from error  # fmt: skip
    if not isinstance(found, int) or found > FORMAT:
        raise NewerFormat(
            f"{url} has format {found}, this release knows up to {FORMAT}; nothing was touched. Upgrade persist-lib",
            found=found, known=FORMAT,
        )  # fmt: skip
    return True


def _create(clients: Clients, url: str) -> None:
    """Write the marker twice: the second PUT must be refused, or this server does not know conditional writes.

    Such a server would overwrite what another writer stored, and acknowledge both.
    """
    with reading(f"look into {url}"):
        folder = f"{clients.target.prefix}/" if clients.target.prefix else ""
        there = clients.get().list_objects_v2(Bucket=clients.target.bucket, Prefix=folder, MaxKeys=1)
        is_truncated(there)
    if there.get("Contents") and not _check_marker(clients, url):
        raise InvalidUsage(
            f"{url} holds other objects ({there['Contents'][0]['Key']}), but no {MARKER}: it is no location. Choose "
            "another prefix",
            url=url,
        )
    if _put_marker(clients, url) and _put_marker(clients, url):
        raise InvalidUsage(
            f"the server of {url} ignores If-None-Match: it would overwrite what others wrote. Use one that has "
            "conditional writes",
            url=url,
        )


def _put_marker(clients: Clients, url: str) -> bool:
    body = json.dumps({"format": FORMAT}).encode() + b"\n"
    with writing(f"create the location {url}"):
        try:
            clients.get().put_object(
                Bucket=clients.target.bucket, Key=clients.target.path(MARKER), Body=body, IfNoneMatch="*"
            )
        except ClientError as error:
            if is_taken(error):
                return False
            raise
    return True


def open_blob(url: str, opening: Opening) -> S3Blob:
    """Open the blobs of a URL of this scheme."""
    return S3Blob(enter(url, opening), runtime=opening.runtime)


__all__ = ["S3Blob", "body_of", "canonical", "delete_objects", "enter", "open_blob"]
