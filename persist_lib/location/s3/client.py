"""S3 as the stores need it: clients that survive a fork and obey the caller's deadline, and what errors mean.

Credentials come from boto3's usual chain. Nothing is retried here: a conditional PUT that is sent twice would mistake
its own success for another writer's. `wrap.deadline` retries what is safe to retry, within the caller's deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
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
from persist_lib.location.objects.store import (
    ANSWER_S,
    CONNECT_S,
    CONNECTIONS,
    PerProcess,
    is_distrusted,
    one_answer_s,
)
from persist_lib.location.objects.target import Target
from persist_lib.location.wrap.metering import requested
from persist_lib.location.wrap.spending import DELETES, GETS, LISTS, PUTS

NEVER_SENT = (EndpointConnectionError, ConnectTimeoutError, CredentialRetrievalError)
MISCONFIGURED = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, NoRegionError, ParamValidationError)
PASSING = ("RequestTimeTooSkewed", "ExpiredToken", "TokenRefreshRequired", "RequestExpired")
"""Refusals of a request's credentials that the next request may not meet."""
THROTTLED = ("SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests")


class Clients:
    """boto3 clients for one target: one per process and timeout."""

    def __init__(self, target: Target, answer_s: float = ANSWER_S) -> None:
        self.target = target
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
    if "ca" in options and not Path(options["ca"]).exists():
        raise InvalidUsage(f"there is no file {options['ca']}; ?ca= names the certificates of authorities (PEM)")
    config = ClientConfig(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(CONNECT_S, answer_s),
        read_timeout=answer_s,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        s3={"addressing_style": "path" if options.get("path_style") == "true" else "auto"},
        # Checksums protect data on its way to S3. Our own digests verify the data that comes back.
        request_checksum_calculation="when_required"
        if options.get("checksums") == "when_required"
        else "when_supported",
        response_checksum_validation="when_required",
    )
    try:
        inner = botocore_session.get_session()
        inner.register_component("data_loader", _models)
        session = boto3.session.Session(
            botocore_session=inner, profile_name=options.get("profile"), region_name=options.get("region")
        )
        client = session.client(
            "s3", endpoint_url=options.get("endpoint"), config=config, verify=options.get("ca"),
            region_name=session.region_name or "us-east-1",
        )  # fmt: skip
    except (*MISCONFIGURED, ValueError) as error:
        raise InvalidUsage(f"cannot make an S3 client for bucket {target.bucket}: {error}") from error
    client.meta.events.register_last("before-call.s3", _expect_nothing)
    client.meta.events.register("before-send.s3", _count)
    return client


def _count(event_name: str, **_: object) -> None:
    """Count a request in the class that it is billed in. `event_name` ends in the operation's name."""
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
    return code_of(error) == "NoSuchKey" or (code_of(error) == "404" and _is_head(error))


def _is_head(error: Exception) -> bool:
    return isinstance(error, ClientError) and error.operation_name.startswith("Head")


@contextmanager
def reading(doing: str) -> Iterator[None]:
    """Raise failures as Determinate: a failed read changes nothing."""
    with _failing_as(Determinate, doing):
        yield


@contextmanager
def writing(doing: str) -> Iterator[None]:
    """Raise failures as Indeterminate, unless S3 refused or nothing was sent."""
    with _failing_as(Indeterminate, doing):
        yield


@contextmanager
def _failing_as(unknown: type[PersistError], doing: str) -> Iterator[None]:
    try:
        yield
    except PersistError:
        raise
    except Exception as error:  # an answer cut among its headers makes botocore fail in any way (ValueError, KeyError)
        raise failed(error, doing, unknown) from error


ARCHIVED = (
    "It is in an archive class of storage, which cannot be read: restore the object, and take such classes out of the "
    "bucket's lifecycle rules for the location's prefix"
)


def failed(error: Exception, doing: str, unknown: type[PersistError]) -> PersistError:
    """Return the PersistError for an error. It is `unknown` if the error does not say what happened."""
    what = f"could not {doing}: {type(error).__name__}: {error}"
    code, status = code_of(error), status_of(error)
    if isinstance(error, MISCONFIGURED):
        return InvalidUsage(what)
    if is_distrusted(error, (CertificateError,)):
        return InvalidUsage(
            f"{what}. Its certificate is not trusted: name the bundle of its authority with ?ca=, and check the host"
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
