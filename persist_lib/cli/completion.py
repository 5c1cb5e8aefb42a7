"""Completion of the names of shards and collections in a shell: quick, and silent about whatever goes wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer

SECONDS = 2.0
"""How long the shell waits for names, at most. A location that is far away gives none then."""
CATALOG_SECONDS = 6.0
"""The same for collections: their catalog is data, for which Arrow is loaded."""
Options = dict[str, str | None]


def shard_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's shards that begin so, without those on the command line. Empty after any failure."""
    typed = ctx.params.get("names") or ()
    return [name for name in _asked(_ask, ctx, SECONDS, incomplete) if name not in typed]


def collection_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's collections that begin so. Empty after any failure."""
    return _asked(_ask_catalog(lambda controller: controller.list()), ctx, CATALOG_SECONDS, incomplete)


def names_of_tables(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of all tables that begin so, whatever carries them. Empty after any failure."""
    listed = _ask_catalog(lambda controller: controller.list())
    found = {*_asked(_ask, ctx, SECONDS, incomplete), *_asked(listed, ctx, CATALOG_SECONDS, incomplete)}
    return sorted(found.difference(ctx.params.get("names") or ()))


def _asked(ask: Callable[[Options, list[str]], None], ctx: typer.Context, seconds: float, begin: str) -> list[str]:
    own, before = ctx.params, ctx.find_root().params
    options = {name: own.get(name) or before.get(name) for name in ("location", "consensus")}
    found: list[str] = []
    # A thread of its own that is not waited for: connecting to a host that does not answer takes long.
    asking = threading.Thread(target=ask, args=(options, found), daemon=True)
    asking.start()
    asking.join(seconds)
    return [name for name in found if name.startswith(begin)]


def _ask(options: Options, found: list[str]) -> None:
    with suppress(BaseException):  # a shell shows what is printed in the middle of what is typed
        from persist_lib.location.open import open_location

        with open_location(*_urls(options), read_only=True) as location:
            found.extend(sorted(location.consensus.list_keys()))


def _ask_catalog(names: Callable[[Any], list[str]]) -> Callable[[Options, list[str]], None]:
    def ask(options: Options, found: list[str]) -> None:
        with suppress(BaseException):
            from persist_lib.client import open as open_client

            with open_client(*_urls(options), read_only=True) as client, client.controller() as controller:
                found.extend(names(controller))

    return ask


def _urls(options: Options) -> tuple[str, str | None]:
    from persist_lib.cli.session import DEFAULT_LOCATION
    from persist_lib.settings import resolve

    settings = resolve(options, os.environ)
    return settings.text("location") or DEFAULT_LOCATION, settings.text("consensus")
