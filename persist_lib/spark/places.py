"""Open locations in a Python worker of Spark. A worker serves many queries, so each location is opened once in it."""

from __future__ import annotations

import os
from functools import lru_cache

from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.runtime.ambient import Runtime
from persist_lib.settings import config_of


def client_of(location: str, consensus: str | None, *, read_only: bool = False) -> Client:
    """The client of a location in this process, with the settings in PERSIST_CONFIG. It is never closed.

    It has no background thread: nothing in it renews a lease unless its caller does. Raises NotFound where there is no
    location.
    """
    return _client(os.getpid(), location, consensus, read_only)


@lru_cache(maxsize=16)
def _client(_pid: int, location: str, consensus: str | None, read_only: bool) -> Client:
    # SUBTLE: by process, as Spark forks its workers, and a fork must not use its parent's connections.
    config = Config.model_validate(config_of(os.environ))  # noqa: TID251 - an edge, as in `options`
    return open_client(
        location, consensus, config=config, runtime=Runtime(background=False), read_only=read_only, create=False
    )
