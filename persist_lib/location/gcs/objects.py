"""Objects on Google Cloud Storage, by its JSON API: the only place where requests to it are made and judged.

Credentials are Google's application default ones (`google.auth.default`). Over plain `http:`, as to an emulator, none
are sent. The variable STORAGE_EMULATOR_HOST is the endpoint where a URL names none, as for Google's own clients. See
docs/design/0195-gcs-and-azure.md for why this is not written over `google-cloud-storage`.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from hashlib import md5
from typing import Any
from urllib.parse import quote

import google.auth
import requests
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.auth.transport.requests import AuthorizedSession
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from persist_lib.errors import Determinate, InvalidUsage, PersistError
from persist_lib.location.api import Entry, Found, Object, Stored
from persist_lib.location.objects.store import (
    ANSWER_S,
    CONDITION_FAILED,
    CONNECTIONS,
    ENDS_BEFORE_RANGE,
    MISSING,
    CloudObjects,
    Listing,
    PerProcess,
    ca_of,
    is_distrusted,
    is_inside,
    whole_body,
)
from persist_lib.location.objects.target import Target
from persist_lib.location.wrap.metering import requested
from persist_lib.location.wrap.spending import DELETES, GETS, LISTS, PUTS
from persist_lib.runtime.ambient import Runtime

ENDPOINT = "https://storage.googleapis.com"
EMULATOR = "STORAGE_EMULATOR_HOST"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GcsObjects(CloudObjects):
    """The `ObjectStore` below a prefix of a bucket of Google Cloud Storage. A version is an object's generation."""

    no_version = "1"

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, runtime: Runtime | None = None) -> None:
        super().__init__(target, answer_s=answer_s, runtime=runtime)
        self.clients = PerProcess(self.where, self._session)
        self._is_bucket_there = False
        given = target.options.get("endpoint") or os.environ.get(EMULATOR) or ENDPOINT
        self._endpoint = (given if "://" in given else f"http://{given}").rstrip("/")
        self._bucket = f"/storage/v1/b/{quote(target.bucket, safe='')}/o"

    def _session(self) -> requests.Session:
        ca = ca_of(self.target)
        if self._endpoint.startswith("http:"):
            credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call]
        else:
            try:
                credentials, _ = google.auth.default(scopes=[SCOPE])
            except DefaultCredentialsError as error:
                raise InvalidUsage(f"cannot reach {self.where}: {error}") from error
        session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        session.mount(self._endpoint, HTTPAdapter(pool_connections=1, pool_maxsize=CONNECTIONS))
        session.verify = ca or session.verify
        return session

    def at(self, name: str) -> str:
        return f"{self._bucket}/{quote(self.target.path(name), safe='')}"

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        # As it is stored: an object with `Content-Encoding: gzip` would otherwise be unpacked on its way.
        headers = {"Accept-Encoding": "gzip", **({} if end is None else {"Range": f"bytes={start}-{end - 1}"})}
        asked = {"alt": "media", **({} if version is None else {"generation": version, "ifGenerationMatch": version})}
        at = self.at(name)
        with self._reading(doing), self._ask(GETS, "GET", at, asked, headers=headers, stream=True) as answer:
            if end is not None and answer.status_code == ENDS_BEFORE_RANGE:
                return Object(b"", "")
            if self._is_missing(answer) or (version is not None and answer.status_code == CONDITION_FAILED):
                return None
            self._check(answer)
            data = whole_body(partial(answer.raw.read, decode_content=False), answer.headers["Content-Length"])
            if end is not None and answer.status_code == requests.codes.ok:
                data = data[start:end]  # it answered with the whole object to a range
            return Object(data, answer.headers["X-Goog-Generation"])

    def find(self, name: str, doing: str) -> Found | None:
        with self._reading(doing), self._ask(GETS, "GET", self.at(name), {"fields": "size,metadata"}) as answer:
            if self._is_missing(answer):
                return None
            said = self._check(answer).json()
            return Found(int(said["size"]), said.get("metadata", {}))

    def put(
        self, name: str, data: bytes | memoryview, doing: str, replaces: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stored | None:  # fmt: skip
        return self._upload(name, data, doing, metadata, ifGenerationMatch="0" if replaces is None else replaces)

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        self._upload(name, data, doing, None)

    def _upload(
        self, name: str, data: bytes | memoryview, doing: str, metadata: Mapping[str, str] | None, **condition: str
    ) -> Stored | None:
        """Store an object by one request with two parts: what it is, with its digest, and its bytes.

        By the other two kinds of uploads (media, resumable), emulators ignore the condition.
        """
        digest = md5(data, usedforsecurity=False)
        about = {"name": self.target.path(name), "md5Hash": b64encode(digest.digest()).decode(), "metadata": metadata}
        line = f"--{digest.hexdigest()}".encode()
        kinds = (b"application/json", b"application/octet-stream")
        heads = [b"%b\r\nContent-Type: %b\r\n\r\n" % (line, kind) for kind in kinds]
        body = b"".join((heads[0], json.dumps(about).encode(), b"\r\n", heads[1], data, b"\r\n", line, b"--\r\n"))
        headers = {"Content-Type": f"multipart/related; boundary={digest.hexdigest()}"}
        asked = {"uploadType": "multipart", "fields": "generation", **condition}
        with (
            self._writing(doing),
            self._ask(PUTS, "POST", f"/upload{self._bucket}", asked, data=body, headers=headers) as answer,
        ):
            if condition and answer.status_code == CONDITION_FAILED:
                return None
            return Stored(str(self._check(answer).json()["generation"]))

    def delete_one(self, name: str, doing: str) -> None:
        with self._writing(doing), self._ask(DELETES, "DELETE", self.at(name), {}) as answer:
            if not self._is_missing(answer):
                self._check(answer)

    def _pages(self, prefix: str, doing: str, after: str, page: int, delimiter: str) -> Iterator[Listing]:
        asked = {
            "prefix": self._root + prefix, "maxResults": str(page),
            "fields": "items(name,size,generation),prefixes,nextPageToken",
            **({"startOffset": self._root + after} if after else {}), **({"delimiter": delimiter} if delimiter else {}),
        }  # fmt: skip
        while True:
            with self._reading(doing), self._ask(LISTS, "GET", self._bucket, asked) as answer:
                said = self._check(answer).json()
            token = said.get("nextPageToken")
            listed = [
                Entry(self._relative(found["name"]), int(found["size"]), str(found["generation"]))
                for found in said.get("items", ())
            ]
            yield Listing(listed, [*map(self._relative, said.get("prefixes", ()))], not token)
            if not token:
                return
            asked["pageToken"] = token

    def _ask(self, price: int, method: str, path: str, params: Mapping[str, str], **how: Any) -> closing[Any]:
        """Make a request; close its answer. The caller turns errors into those of Persist."""
        session = how.pop("session", None) or self.clients.get()
        requested(price)
        answer = session.request(
            method, self._endpoint + path, params=params, timeout=self._timeouts(), allow_redirects=False, **how
        )
        self._observed(answer.headers.get("Date"))
        self._is_bucket_there |= answer.ok
        return closing(answer)

    def _is_missing(self, answer: Any) -> bool:
        """Whether an object is missing. A missing bucket answers the same, and would make everything look empty.

        So before anything was found in the bucket, it is asked for a listing, which raises NotFound: by a connection
        of its own, as on this one the same answer may come again.
        """
        if answer.status_code == MISSING and not self._is_bucket_there:
            with closing(self._session()) as session:
                asked = {"maxResults": "1", "fields": "nextPageToken"}
                with self._ask(LISTS, "GET", self._bucket, asked, session=session) as listing:
                    self._check(listing)
        return bool(answer.status_code == MISSING)

    def _check(self, answer: requests.Response) -> requests.Response:
        if not requests.codes.ok <= answer.status_code < requests.codes.multiple_choices:
            raise requests.HTTPError(f"{answer.status_code} {answer.reason}: {_said(answer)}", response=answer)
        return answer

    def _failed(self, error: Exception, what: str, unknown: type[PersistError]) -> PersistError:
        if isinstance(error, requests.HTTPError) and error.response is not None:
            return self._refused(what, error.response.status_code, error.response.reason, unknown)
        if is_distrusted(error):
            return InvalidUsage(f"{what}. Its certificate is not trusted: name the bundle of its authority with ?ca=")
        if isinstance(error, GoogleAuthError):  # there is no token, so nothing was sent
            return (Determinate if getattr(error, "retryable", False) else InvalidUsage)(what)
        return (Determinate if is_inside(error, (NewConnectionError, ConnectTimeoutError)) else unknown)(what)


def _said(answer: requests.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
