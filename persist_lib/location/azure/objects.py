"""Objects in Azure Blob Storage, by Azure's own client: the only place where requests to it are made and judged.

The account is that of `?account=`, or of the variable AZURE_STORAGE_ACCOUNT, and its place that of `?endpoint=`, if not
Azure itself. Credentials are those of the variables AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, as for Azure's own
command, and else those that `azure.identity.DefaultAzureCredential` finds. AZURE_STORAGE_CONNECTION_STRING says all of
these at once, if the URL says none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.core.pipeline import PipelineResponse
from azure.identity import DefaultAzureCredential
from azure.storage.blob import BlobPrefix, ContainerClient, StorageErrorCode
from requests.exceptions import ConnectTimeout
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from persist_lib.errors import Determinate, InvalidName, InvalidUsage, PersistError
from persist_lib.location.api import Entry, Found, Object, Stored
from persist_lib.location.objects.store import (
    ANSWER_S,
    CONDITION_FAILED,
    ENDS_BEFORE_RANGE,
    MIB,
    MOST_BYTES,
    CloudObjects,
    Listing,
    PerProcess,
    ca_of,
    is_distrusted,
    is_inside,
)
from persist_lib.location.objects.target import Target
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.location.wrap.metering import requested
from persist_lib.location.wrap.spending import DELETES, GETS, LISTS, PUTS
from persist_lib.runtime.ambient import Runtime

MOST_IN_A_PUT = 5000 * MIB
MOST_ENDS = 1000
REQUEST_ID = "x-ms-client-request-id"
THROTTLED = ("ServerBusy", "AccountIopsLimitExceeded")
"""Refusals of a request for now, although their status says that the server failed."""


class AzureObjects(CloudObjects):
    """The `ObjectStore` below a prefix of a container of Azure. A version is an object's ETag, without quotes."""

    no_version = "0x0"

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, runtime: Runtime | None = None) -> None:
        super().__init__(target, answer_s=answer_s, runtime=runtime)
        self.clients = PerProcess(self.where, self._client)
        self._ends: dict[tuple[str, str], str] = {}
        """By prefix and last name of pages of listings: the text by which Azure continues behind it."""

    def _client(self) -> ContainerClient:
        options, given = self.target.options, os.environ.get
        # Nothing is retried, and an object is one request either way.
        how: dict[str, Any] = {"max_single_put_size": MOST_IN_A_PUT, "max_single_get_size": MOST_BYTES}
        if (ca := ca_of(self.target)) is not None:
            how["connection_verify"] = ca
        account = options.get("account") or given("AZURE_STORAGE_ACCOUNT")
        whole = given("AZURE_STORAGE_CONNECTION_STRING")
        try:
            if whole and not options.keys() & {"account", "endpoint"}:
                return ContainerClient.from_connection_string(whole, self.target.bucket, retry_total=0, **how)
            if not account and "endpoint" not in options:
                raise InvalidUsage(
                    f"cannot reach {self.where}: whose container is it? Say so with ?account=, or with the variable "
                    "AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING"
                )
            endpoint = options.get("endpoint") or f"https://{account}.blob.core.windows.net"
            key = given("AZURE_STORAGE_KEY")
            credential: Any = {"account_name": account, "account_key": key} if key and account else key
            credential = credential or given("AZURE_STORAGE_SAS_TOKEN") or DefaultAzureCredential()
            return ContainerClient(endpoint, self.target.bucket, credential, retry_total=0, **how)
        except ValueError as error:
            raise InvalidUsage(f"cannot reach {self.where}: {error}") from None

    @property
    def address(self) -> str:
        """As Hadoop's clients and Iceberg's say it, with the account: `abfss://container@account.dfs…/prefix`."""
        client: ContainerClient = self.clients.get()
        host = str(client.primary_hostname).partition(":")[0]
        host = host.replace(".blob.", ".dfs.") if ".blob." in host else f"{client.account_name}.dfs.core.windows.net"
        return f"abfss://{self.target.bucket}@{host}/{self.target.prefix}".rstrip("/")

    def at(self, name: str) -> str:
        """The name of a blob. Raises InvalidName if it is too long, or another to Azure, which reads \\ as /."""
        if "\\" in name:
            raise InvalidName(f"{name!r} cannot be a name on Azure, which takes a backslash for a slash", key=name)
        return self.target.path(name)

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        part = {} if end is None else {"offset": start, "length": end - start}
        with self._reading(doing):
            try:
                found = self._ask(GETS, "download_blob", self.at(name), **part, **_only_if(version))
                data = found.readall()
            except HttpResponseError as error:
                if _is_missing(error) or (version is not None and error.status_code == CONDITION_FAILED):
                    return None
                if end is not None and error.status_code == ENDS_BEFORE_RANGE:
                    return Object(b"", "")
                raise
            if len(data) != found.size:
                raise Determinate(f"only {len(data)} of {found.size} bytes arrived")
            return Object(data, found.properties.etag.strip('"'))

    def find(self, name: str, doing: str) -> Found | None:
        with self._reading(doing):
            try:
                found = self._ask(GETS, "get_blob_properties", blob=self.at(name))
            except HttpResponseError as error:
                if _is_missing(error):
                    return None
                raise
            return Found(found.size, {name.replace("_", "-"): value for name, value in found.metadata.items()})

    def put(
        self, name: str, data: bytes | memoryview, doing: str, replaces: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stored | None:  # fmt: skip
        with self._writing(doing):
            # Names of metadata are those of variables to Azure: without hyphens.
            named = {name.replace("-", "_"): value for name, value in (metadata or {}).items()}
            try:
                return self._upload(name, data, overwrite=replaces is not None, metadata=named, **_only_if(replaces))
            except HttpResponseError as error:
                if _code_of(error) == StorageErrorCode.BLOB_ALREADY_EXISTS or error.status_code == CONDITION_FAILED:
                    return None
                raise

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        with self._writing(doing):
            self._upload(name, data, overwrite=True)

    def _upload(self, name: str, data: bytes | memoryview, **how: Any) -> Stored:
        if "./" in f"{name}/":
            raise InvalidName(f"{name!r} cannot be a name on Azure: no part of one may end with a dot", key=name)
        whole = data if isinstance(data, bytes) else bytes(data)
        said = self._ask(PUTS, "upload_blob", whole, blob=self.at(name), length=len(whole), **how)
        return Stored(said["etag"].strip('"'))

    def delete_one(self, name: str, doing: str) -> None:
        with self._writing(doing):
            try:
                self._ask(DELETES, "delete_blob", self.at(name))
            except HttpResponseError as error:
                if not _is_missing(error):
                    raise

    def _pages(self, prefix: str, doing: str, after: str, page: int, delimiter: str) -> Iterator[Listing]:
        """Yield pages, from where an earlier one ended if `after` is its last name, and else from the beginning.

        Azure's `startFrom` is not sent: no emulator knows it, and it is said to be for names without slashes.
        """
        asked = {"name_starts_with": self._root + prefix, "results_per_page": page}
        with self._reading(doing):
            if delimiter:
                found = self._ask(LISTS, "walk_blobs", **asked, delimiter=delimiter)
            else:
                found = self._ask(LISTS, "list_blobs", **asked)
            pages = found.by_page(self._ends.get((prefix, after)))
        while True:
            with self._reading(doing):
                some = [*next(pages)]
                token = pages.continuation_token
            folders = [self._relative(one.name) for one in some if isinstance(one, BlobPrefix)]
            listed = [
                Entry(self._relative(one.name), one.size, one.etag.strip('"'))
                for one in some
                if not isinstance(one, BlobPrefix)
            ]
            if token and listed and not delimiter:
                while len(self._ends) >= MOST_ENDS:
                    self._ends.pop(next(iter(self._ends)), None)
                self._ends[prefix, listed[-1].name] = token
            yield Listing(listed, folders, not token)
            if not token:
                return

    def _ask(self, price: int, operation: str, *arguments: Any, **how: Any) -> Any:
        """Make a request, or several of a listing. The caller turns errors into those of Persist."""
        client = self.clients.get()
        connect_s, answer_s = self._timeouts()
        asked = client.get_blob_client(how.pop("blob")) if "blob" in how else client
        return getattr(asked, operation)(
            *arguments, **how, connection_timeout=connect_s, read_timeout=answer_s,
            raw_request_hook=lambda _: requested(price), raw_response_hook=self._hear,
        )  # fmt: skip

    def _hear(self, answer: PipelineResponse[Any, Any]) -> None:
        """Note the time in an answer, and see that it is one to this request: Azure says which it answers.

        If not, the answers on a connection are behind, and are so from then on. Azure's client reads again what was
        cut short, while the caller is patient.
        """
        headers, asked = answer.http_response.headers, answer.http_request.headers
        self._observed(headers.get("Date"))
        if headers.get(REQUEST_ID, asked[REQUEST_ID]) != asked[REQUEST_ID]:
            self.clients.forget()
            raise AzureError("this is the answer to another request")
        if patience_s(1.0) <= 0:
            raise Determinate("the caller's deadline has passed in the middle of an answer")

    def _failed(self, error: Exception, what: str, unknown: type[PersistError]) -> PersistError:
        if isinstance(error, HttpResponseError) and error.status_code:
            code = _code_of(error)
            return self._refused(what, error.status_code, code, Determinate if code in THROTTLED else unknown)
        if is_distrusted(error):
            return InvalidUsage(f"{what}. Its certificate is not trusted: name the bundle of its authority with ?ca=")
        if isinstance(error, ClientAuthenticationError):
            return InvalidUsage(f"{what}. Check the credentials, as docs/operations.md says")
        unsent = isinstance(error, AzureError) and is_inside(
            error, (NewConnectionError, ConnectTimeoutError, ConnectTimeout)
        )
        return (Determinate if unsent else unknown)(what)


def _only_if(version: str | None) -> dict[str, Any]:
    return {} if version is None else {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}


def _is_missing(error: HttpResponseError) -> bool:
    """Whether an object is missing. A missing container is not that, as it would make everything look empty."""
    return _code_of(error) == StorageErrorCode.BLOB_NOT_FOUND


def _code_of(error: HttpResponseError) -> str:
    """Azure's code for a refusal, such as `BlobNotFound`, or an empty text."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")
