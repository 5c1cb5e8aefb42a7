"""Objects on S3, or on a server with its protocol: the only place where requests are made and their answers judged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.location.api import Entry, Found, Object, Upload
from persist_lib.location.objects.store import (
    ANSWER_S,
    CONDITION_FAILED,
    ENDS_BEFORE_RANGE,
    PAGE,
    CloudObjects,
    Listing,
    whole_body,
)
from persist_lib.location.objects.target import Target
from persist_lib.location.s3.client import Clients, code_of, is_missing, reading, status_of, writing
from persist_lib.runtime.ambient import Runtime

PIECE_THREADS = 4


class S3Objects(CloudObjects):
    """The `ObjectStore` below a prefix of a bucket of S3. Large objects are sent in pieces, several at a time."""

    no_version = '"00000000000000000000000000000000"'

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, runtime: Runtime | None = None) -> None:
        super().__init__(target, answer_s=answer_s, runtime=runtime)
        self.clients = Clients(target, answer_s)

    def at(self, name: str) -> dict[str, str]:
        """Where a request finds an object. Raises InvalidName if its name is too long for S3."""
        return {"Bucket": self.target.bucket, "Key": self.target.path(name)}

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        asked = self.at(name)
        if end is not None:
            asked["Range"] = f"bytes={start}-{end - 1}"
        if version is not None:
            asked["IfMatch"] = version
        with reading(doing):
            try:
                answer = self._ask("get_object", **asked)
            except ClientError as error:
                if is_missing(error) or (version is not None and status_of(error) == CONDITION_FAILED):
                    return None
                if end is not None and status_of(error) == ENDS_BEFORE_RANGE:
                    return Object(b"", "")
                raise
            with contextlib.closing(answer["Body"]) as body:
                data = whole_body(body.read, answer["ContentLength"])
            if end is not None and answer["ResponseMetadata"]["HTTPStatusCode"] == 200:
                data = data[start:end]  # some servers answer with the whole object to a range
            return Object(data, str(answer.get("ETag", "")))

    def find(self, name: str, doing: str) -> Found | None:
        at = self.at(name)
        with reading(doing):
            try:
                answer = self._ask("head_object", **at)
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
            return Found(int(answer["ContentLength"]), answer.get("Metadata", {}))

    def put(
        self, name: str, data: bytes | memoryview, doing: str, replaces: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:  # fmt: skip
        """Store an object as `ObjectStore.put` does; a large one in pieces, if it replaces none."""
        asked: dict[str, Any] = {**self.at(name), **({"Metadata": metadata} if metadata else {})}
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        view = memoryview(data).cast("B")
        with writing(doing):
            try:
                if len(view) > self.multipart_above and replaces is None:
                    self._put_in_pieces(name, asked, view)
                else:
                    self._ask("put_object", **asked, Body=data if isinstance(data, bytes) else bytes(view), **condition)
            except ClientError as error:
                # What was to be replaced may be gone.
                if status_of(error) == CONDITION_FAILED or (replaces is not None and code_of(error) == "NoSuchKey"):
                    return False
                raise
        return True

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        with writing(doing):
            self._ask("put_object", **self.at(name), Body=data)

    def _put_in_pieces(self, name: str, asked: dict[str, Any], view: memoryview) -> None:
        """Store an object in pieces. It is visible only after the last request, and given up if one before it fails."""
        started = Upload(name, self._ask("create_multipart_upload", **asked)["UploadId"])
        upload = {**self.at(name), "UploadId": started.id}

        def put(number: int) -> dict[str, Any]:
            body = bytes(view[(number - 1) * self.piece : number * self.piece])
            answer = self._ask("upload_part", **upload, PartNumber=number, Body=body)
            checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        try:
            with self._runtime.pool(PIECE_THREADS, "persist-upload") as pool:
                pieces = list(pool.map(put, range(1, -(-len(view) // self.piece) + 1)))
        except BaseException:
            self.abort_uploads([started])
            raise
        try:
            self._ask("complete_multipart_upload", **upload, MultipartUpload={"Parts": pieces}, IfNoneMatch="*")
        except ClientError as error:
            # Only if S3 refused. After an unknown outcome it may be completing now: it is left to the sweep.
            if 400 <= status_of(error) < 500:
                self.abort_uploads([started])
            raise

    def _pages(self, prefix: str, doing: str, after: str, page: int, delimiter: str) -> Iterator[Listing]:
        more = {"StartAfter": self._root + after} if after else {}
        options = {"Delimiter": delimiter} if delimiter else {}
        while True:
            with reading(doing):
                answer = self._ask(
                    "list_objects_v2", Bucket=self.target.bucket, Prefix=self._root + prefix, MaxKeys=page, **options,
                    **more,
                )  # fmt: skip
                more = {"ContinuationToken": answer["NextContinuationToken"]} if _is_truncated(answer) else {}
            listed = [
                Entry(self._relative(found["Key"]), found["Size"], found.get("ETag", ""))
                for found in answer.get("Contents", ())
            ]
            folders = [self._relative(found["Prefix"]) for found in answer.get("CommonPrefixes", ())]
            yield Listing(listed, folders, not more)
            if not more:
                return

    def delete(self, names: Sequence[str], page: int | None = None) -> dict[str, Exception]:
        failures: dict[str, Exception] = {}
        page = page or PAGE
        for start in range(0, len(names), page):
            chunk = names[start : start + page]
            try:
                failures |= self._delete_chunk(chunk)
            except PersistError as error:
                failures |= dict.fromkeys(chunk, error)
        return failures

    def _delete_chunk(self, names: Sequence[str]) -> dict[str, Exception]:
        """Delete a page. The status is 200 even if all failed, so each key has to be found in the answer."""
        keys = {name: self.target.path(name) for name in names}
        objects = {"Objects": [{"Key": key} for key in keys.values()]}
        with writing(f"delete {len(names)} objects"):
            answer = self._ask("delete_objects", Bucket=self.target.bucket, Delete=objects)
        errors = {error["Key"]: error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"}
        said = {entry["Key"] for entry in answer.get("Deleted", [])} - set(errors)
        return {name: _not_deleted(key, errors.get(key)) for name, key in keys.items() if key not in said}

    def delete_one(self, name: str, doing: str) -> None:
        """Delete an object, which needs no right to delete several at once."""
        with writing(doing):
            self._ask("delete_object", **self.at(name))

    def uploads(self, prefix: str, doing: str, page: int | None = None) -> Iterator[Upload]:
        after: dict[str, str] = {}
        while True:
            with reading(doing):
                answer = self._ask(
                    "list_multipart_uploads", Bucket=self.target.bucket, Prefix=self._root + prefix,
                    MaxUploads=page or PAGE, **after,
                )  # fmt: skip
                if is_truncated := _is_truncated(answer):
                    after = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
            yield from (Upload(self._relative(one["Key"]), one["UploadId"]) for one in answer.get("Uploads", []))
            if not is_truncated:
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
            self._ask("abort_multipart_upload", **self.at(upload.key), UploadId=upload.id)
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":  # finished, or given up by another process
                raise

    def _ask(self, operation: str, **arguments: Any) -> Any:
        """Make a request. The caller turns its errors into those of Persist."""
        try:
            answer = getattr(self.clients.get(), operation)(**arguments)
        except ClientError as error:
            self._observe(error.response)
            raise
        self._observe(answer)
        return answer

    def _observe(self, answer: Any) -> None:
        self._observed(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"))

    def _failed(self, error: Exception, what: str, unknown: type[PersistError]) -> PersistError:
        raise NotImplementedError  # `client.failed` is used instead


def _is_truncated(answer: Mapping[str, Any]) -> bool:
    """Whether a page of a listing has a next one.

    An answer that was cut short looks like an empty page; only a complete one has IsTruncated. Raises
    Determinate for one that has not.
    """
    if "IsTruncated" not in answer:
        raise Determinate("the answer to a listing was cut short: it does not say whether there is more")
    return bool(answer["IsTruncated"])


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
