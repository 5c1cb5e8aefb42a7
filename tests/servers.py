"""The servers of `persist_lib.testing.servers`, each started once per test process when first needed.

Imported also by the processes that race, which start none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pytest

from persist_lib.testing.servers import (
    AzureServer,
    GcsServer,
    PostgresServer,
    S3Server,
    StoreServer,
    children,
    free_port,
    use_test_credentials,
)
from tests.pooler import Pooler

DSN = "PERSIST_TEST_PG_DSN"
"""A PostgreSQL to use instead of one of our own: a URL whose role may create schemas."""
BUCKET = "tests"


@functools.cache
def postgres_url() -> str:
    """A PostgreSQL for everything that does not stop it."""
    return os.environ.get(DSN) or PostgresServer().url


def postgres_at(port: int | None = None, **options: str) -> str:
    """Its URL, through another port (of a proxy, say), with options added."""
    parts = urlsplit(postgres_url())
    place = parts.netloc if port is None else f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}"
    query = [*parse_qsl(parts.query), *options.items()]
    return urlunsplit(parts._replace(netloc=place, query=urlencode(query)))


def postgres_port() -> int:
    """Where it listens on the loopback interface."""
    return urlsplit(postgres_url()).port or 5432


LOGICAL = {"wal_level": "logical", "max_replication_slots": "50", "max_wal_senders": "50"}


@functools.cache
def logical_server() -> PostgresServer:
    """A PostgreSQL of our own whose changes can be read from its log, for everything that does not stop it."""
    return PostgresServer(LOGICAL)


@functools.cache
def pooler() -> Pooler:
    """One in front of `postgres_url`, in this process."""
    return Pooler(postgres_port())


@functools.cache
def s3_server() -> S3Server:
    """One for everything that does not stop it, with the bucket `tests`."""
    return S3Server(BUCKET)


@functools.cache
def gcs_server() -> GcsServer:
    """One for everything that does not stop it."""
    return GcsServer(BUCKET)


@functools.cache
def azure_server() -> AzureServer:
    """One for everything that does not stop it. Skips the test where azurite is not installed."""
    if AzureServer.program() is None:
        pytest.skip("azurite is not installed: scripts/azurite does it")
    return AzureServer(BUCKET)


STORES: dict[str, Callable[[], StoreServer]] = {"s3": s3_server, "gs": gcs_server, "az": azure_server}


def store_url(scheme: str, port: int | None = None, name: str = "location") -> str:
    """A location in a bucket of its own, as moto's listings go through all of a bucket; through another port, say."""
    server, bucket = STORES[scheme.removesuffix("+cas")](), f"t{os.urandom(8).hex()}"
    server.make_bucket(bucket)
    url = server.location(name, scheme, bucket)
    return url if port is None else url.replace(f":{server.port}", f":{port}")


def s3_url(scheme: str = "s3", port: int | None = None, name: str = "location") -> str:
    """The same on S3."""
    return store_url(scheme, port, name)


__all__ = [
    "BUCKET", "DSN", "LOGICAL", "STORES", "PostgresServer", "S3Server", "azure_server", "children", "free_port",
    "gcs_server", "logical_server", "pooler", "postgres_at", "postgres_port", "postgres_url", "s3_server", "s3_url",
    "store_url", "use_test_credentials",
]  # fmt: skip
