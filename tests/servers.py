"""The servers of `persist_lib.testing.servers`, each started once per test process when first needed.

Imported also by the processes that race, which start none.
"""

from __future__ import annotations

import functools
import os

from persist_lib.testing.servers import PostgresServer, S3Server, children, free_port, use_test_credentials

DSN = "PERSIST_TEST_PG_DSN"
"""A PostgreSQL to use instead of one of our own: a URL whose role may create schemas."""
BUCKET = "tests"


@functools.cache
def postgres_url() -> str:
    """A PostgreSQL for everything that does not stop it."""
    return os.environ.get(DSN) or PostgresServer().url


@functools.cache
def s3_server() -> S3Server:
    """One for everything that does not stop it, with the bucket `tests`."""
    return S3Server(BUCKET)


__all__ = ["BUCKET", "DSN", "PostgresServer", "S3Server", "children", "free_port", "postgres_url", "s3_server",
           "use_test_credentials"]  # fmt: skip
