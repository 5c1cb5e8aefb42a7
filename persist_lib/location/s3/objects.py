"""Objects on S3, or on a server with its protocol: the only place where requests are made and their answers judged.

Clients survive a fork and obey the caller's deadline. Credentials come from boto3's usual chain. Nothing is retried
here: a conditional PUT that is sent twice would mistake its own success for another writer's. `wrap.deadline` retries
what is safe to retry, within the caller's deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import boto3
from botocore import session as botocore_session
from botocore.config import Config as ClientConfig
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.loaders import create_loader
from urllib3.util.ssl_match_hostname import CertificateError

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, NotFound, PersistError
from persist_lib.location.api import Entry, Found, Object, Stored, Upload
from persist_lib.location.objects.store import (
    ANSWER_S,
    CONDITION_FAILED,
    CONNECT_S,
    CONNECTIONS,
    ENDS_BEFORE_RANGE,
    PAGE,
    CloudObjects,
    Listing,
    PerProcess,
    ca_of,
    is_distrusted,
    one_answer_s,
    whole_body,
)
from persist_lib.location.objects.target import Target
from persist_lib.location.wrap.metering import requested
from persist_lib.location.wrap.spending import DELETES, GETS, LISTS, PUTS
from persist_lib.runtime.ambient import Runtime

PIECE_THREADS = 4
NEVER_SENT = (EndpointConnectionError, ConnectTimeoutError, CredentialRetrievalError)
MISCONFIGURED = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, NoRegionError, ParamValidationError)
PASSING = ("RequestTimeTooSkewed", "ExpiredToken", "TokenRefreshRequired", "RequestExpired")
"""Refusals of a request's credentials that the next request may not meet."""
THROTTLED = ("SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests")
ARCHIVED = (
    "It is in an archive class of storage, which cannot be read: restore the object, and take such classes out of the "
    "bucket's lifecycle rules for the location's prefix"
)


class Clients:
    """boto3 clients for one target: one per process and timeout."""

    def __init__(self, target: Target, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._made = PerProcess(target.where, partial(_make, target))

    def get(self) -> Any:
        """Return a client that waits for an answer about as long as the caller's deadline allows."""
        return self._made.get(one_answer_s(self._answer_s))

    def close(self) -> None:
        self._made.close()


_models = create_loader()
"""Botocore's description of S3. It is parsed once, as that takes ten times longer than making a client."""


def _make(target: Target, answer_s: float) -> Any:
    options = target.options
    config = ClientConfig(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(CONNECT_S, answer_s),
        read_timeout=answer_s,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        s3={"addressing_style": "path" if options.get("path_style") == "true" else "auto"},
        # Its own text, which names the machine and what was called, takes a seventh of the CPU of a request.
        user_agent=f"persist boto3/{boto3.__version__}",
        # Checksums protect data on its way to S3. Our own digests verify the data that comes back.
        request_checksum_calculation="when_required"
        if options.get("checksums") == "when_required"
        else "when_supported",
        response_checksum_validation="when_required",
    )
    try:
        inner = botocore_session.get_session()
        inner.register_component("data_loader", _models)
        # Times of objects are not read; parsing them takes most of the CPU of a listing.
        inner.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_as_it_is)
        session = boto3.session.Session(
            botocore_session=inner, profile_name=options.get("profile"), region_name=options.get("region")
        )
        client = session.client(
            "s3", endpoint_url=options.get("endpoint"), config=config, verify=ca_of(target),
            region_name=session.region_name or "us-east-1",
        )  # fmt: skip
    except (*MISCONFIGURED, ValueError) as error:
        raise InvalidUsage(f"cannot make an S3 client for bucket {target.bucket}: {error}") from error
    client.meta.events.register_last("before-call.s3", _expect_nothing)
    client.meta.events.register("before-send.s3", _count)
    return client


def _as_it_is(value: object) -> object:
    return value


def _count(event_name: str, **_: object) -> None:
    operation = event_name.rpartition(".")[2]
    if operation.startswith(("Get", "Head")):
        requested(GETS)
    elif operation.startswith(("Delete", "Abort")):
        requested(DELETES)
    else:
        requested(LISTS if operation.startswith("List") else PUTS)


def _expect_nothing(params: dict[str, Any], **_: object) -> None:
    """Send bodies without `Expect: 100-continue`, which costs a round trip.

    If the connection ends in the middle of the 100 response, botocore reads its end for ever in a busy loop.
    """
    params["headers"].pop("Expect", None)


def code_of(error: Exception) -> str:
    """Return S3's code for an error, such as `NoSuchKey`. A HEAD has no body, so its code is the HTTP status."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """Return the HTTP status, or 0 if there was no answer."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: Exception) -> bool:
    """Whether the object is missing. A missing bucket is not that, as it would make everything look empty.

    Only a HEAD cannot tell the two apart: it answers 404 for both.
    """
    is_head = isinstance(error, ClientError) and error.operation_name.startswith("Head")
    return code_of(error) == "NoSuchKey" or (code_of(error) == "404" and is_head)


class S3Objects(CloudObjects):
    """The `ObjectStore` below a prefix of a bucket of S3. Large objects are sent in pieces, several at a time."""

    no_version = '"00000000000000000000000000000000"'
    signs_urls = False

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, runtime: Runtime | None = None) -> None:
        super().__init__(target, answer_s=answer_s, runtime=runtime)
        self.clients = Clients(target, answer_s)

    def at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.target.bucket, "Key": self.target.path(name)}

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        asked = self.at(name)
        if end is not None:
            asked["Range"] = f"bytes={start}-{end - 1}"
        if version is not None:
            asked["IfMatch"] = version
        with self._reading(doing):
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
        with self._reading(doing):
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
    ) -> Stored | None:  # fmt: skip
        """Store an object as `ObjectStore.put` does; a large one in pieces, if it replaces none."""
        asked: dict[str, Any] = {**self.at(name), **({"Metadata": metadata} if metadata else {})}
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        view = memoryview(data).cast("B")
        with self._writing(doing):
            try:
                if len(view) > self.multipart_above and replaces is None:
                    answer = self._put_in_pieces(name, asked, view)
                else:
                    body = data if isinstance(data, bytes) else bytes(view)
                    answer = self._ask("put_object", **asked, Body=body, **condition)
            except ClientError as error:
                # What was to be replaced may be gone.
                if status_of(error) == CONDITION_FAILED or (replaces is not None and code_of(error) == "NoSuchKey"):
                    return None
                raise
        return Stored(str(answer.get("ETag", "")))

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        with self._writing(doing):
            self._ask("put_object", **self.at(name), Body=data)

    def _put_in_pieces(self, name: str, asked: dict[str, Any], view: memoryview) -> Any:
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
            return self._ask("complete_multipart_upload", **upload, MultipartUpload={"Parts": pieces}, IfNoneMatch="*")
        except ClientError as error:
            # Only if S3 refused. After an unknown outcome it may be completing now: it is left to the sweep.
            if 400 <= status_of(error) < 500:
                self.abort_uploads([started])
            raise

    def _pages(self, prefix: str, doing: str, after: str, page: int, delimiter: str) -> Iterator[Listing]:
        more = {"StartAfter": self._root + after} if after else {}
        options = {"Delimiter": delimiter} if delimiter else {}
        while True:
            with self._reading(doing):
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
        with self._writing(f"delete {len(names)} objects"):
            answer = self._ask("delete_objects", Bucket=self.target.bucket, Delete=objects)
        errors = {error["Key"]: error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"}
        said = {entry["Key"] for entry in answer.get("Deleted", [])} - set(errors)
        return {name: _not_deleted(key, errors.get(key)) for name, key in keys.items() if key not in said}

    def delete_one(self, name: str, doing: str) -> None:
        with self._writing(doing):
            self._ask("delete_object", **self.at(name))

    def uploads(self, prefix: str, doing: str, page: int | None = None) -> Iterator[Upload]:
        after: dict[str, str] = {}
        while True:
            with self._reading(doing):
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
        failed: dict[Upload, Exception] = {}
        for upload in uploads:
            try:
                with self._writing(f"give up the upload of {upload.key!r}"):
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
        code, status = code_of(error), status_of(error)
        if isinstance(error, MISCONFIGURED):
            return InvalidUsage(what)
        if is_distrusted(error, (CertificateError,)):
            return InvalidUsage(
                f"{what}. Its certificate is not trusted: name the bundle of its authority with ?ca=, and check the "
                "host"
            )
        if isinstance(error, NEVER_SENT):
            return Determinate(what)
        if code == "NoSuchBucket":
            return NotFound(f"{what}. Check the URL; buckets are not made by Persist")
        if code == "InvalidObjectState":
            return InvalidUsage(f"{what}. {ARCHIVED}", code=code)
        if status in (401, 403) and code not in PASSING:
            return InvalidUsage(f"{what}. Check the credentials, and the policy in docs/operations.md", code=code)
        if status in (301, 307, 308):
            return InvalidUsage(f"{what}. The bucket is in another region: say which with ?region=", code=code)
        if 400 <= status < 500 or code in THROTTLED:
            return Determinate(what, code=code)
        return unknown(what, code=code)


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
