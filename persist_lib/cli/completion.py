"""Completion of the names of shards and collections in a shell: quick, and silent about whatever goes wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import typer

SECONDS = 2.0
"""How long the shell waits for names, at most. A location that is far away gives none then."""
CATALOG_SECONDS = 6.0
"""The same for collections: their catalog is data, for which Arrow is loaded."""


def shard_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's shards that begin so, without those on the command line. Empty after any failure."""
    typed = ctx.params.get("names") or ()
    return [name for name in _asked(_ask, ctx, SECONDS) if name.startswith(incomplete) and name not in typed]


def collection_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's collections that begin so. Empty after any failure."""
    return [name for name in _asked(_ask_catalog, ctx, CATALOG_SECONDS) if name.startswith(incomplete)]


def table_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's tables that begin so. Empty after any failure."""
    return [name for name in _asked(_ask_tables, ctx, CATALOG_SECONDS) if name.startswith(incomplete)]


def _asked(ask: Callable[[dict[str, str | None], list[str]], None], ctx: typer.Context, seconds: float) -> list[str]:
    found: list[str] = []
    # SUBTLE: a thread of its own that is not waited for: connecting to a host that does not answer takes long.
    asking = threading.Thread(target=ask, args=(_options(ctx), found), daemon=True)
    asking.start()
    asking.join(seconds)
    return list(found)


def _options(ctx: typer.Context) -> dict[str, str | None]:
    """The location and Consensus as they are given on the command line so far."""
    own, before = ctx.params, ctx.find_root().params
    return {name: own.get(name) or before.get(name) for name in ("location", "consensus")}


def _ask(options: dict[str, str | None], found: list[str]) -> None:
    with suppress(BaseException):  # a shell shows what is printed in the middle of what is typed
        from persist_lib.location.open import open_location

        url, consensus = _urls(options)
        with open_location(url, consensus, read_only=True) as location:
            found.extend(sorted(location.consensus.list_keys()))


def _ask_catalog(options: dict[str, str | None], found: list[str]) -> None:
    with suppress(BaseException):
        from persist_lib.client import open as open_client

        url, consensus = _urls(options)
        with open_client(url, consensus, read_only=True) as client, client.controller() as controller:
            found.extend(controller.list())


def _ask_tables(options: dict[str, str | None], found: list[str]) -> None:
    with suppress(BaseException):
        from persist_lib.client import open as open_client

        url, consensus = _urls(options)
        with open_client(url, consensus, read_only=True) as client, client.controller() as controller:
            found.extend(controller.tables().list())


def _urls(options: dict[str, str | None]) -> tuple[str, str | None]:
    from persist_lib.cli.session import DEFAULT_LOCATION
    from persist_lib.settings import resolve

    settings = resolve(options, os.environ)
    return settings.text("location") or DEFAULT_LOCATION, settings.text("consensus")
