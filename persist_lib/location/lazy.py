"""Schemes whose client library is an extra. The library is imported when such a URL is first used, not before."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from persist_lib.core.cost import FREE, Prices
from persist_lib.errors import InvalidUsage
from persist_lib.location.api import Blob, Consensus, Puts
from persist_lib.location.scheme import Opening, Scheme, named_already


def lazy_scheme(
    module: str,
    extra: str,
    *,
    has_blob: bool,
    has_consensus: bool,
    has_puts: bool = False,
    prices: Prices = FREE,
    tells_requests: bool = False,
    is_named: bool = False,
) -> Scheme:
    """Return the scheme that `module` implements by its functions open_blob, open_consensus and canonical.

    `has_puts`, `is_named`: it also has the functions open_puts and `named`.

    A missing package raises InvalidUsage, which names the `extra` to install, when the scheme is used.
    """

    def call(function: str, *arguments: object) -> Any:
        return getattr(_load(module, extra), function)(*arguments)

    def open_blob(url: str, opening: Opening) -> Blob:
        return call("open_blob", url, opening)

    def open_consensus(url: str, opening: Opening) -> Consensus:
        return call("open_consensus", url, opening)

    def open_puts(url: str, opening: Opening) -> Puts:
        return call("open_puts", url, opening)

    def canonical(url: str) -> str:
        return call("canonical", url)

    def named(url: str, opening: Opening) -> str:
        return call("named", url, opening)

    return Scheme(
        open_blob if has_blob else None, open_consensus if has_consensus else None, canonical, prices, tells_requests,
        puts=open_puts if has_puts else None, named=named if is_named else named_already,
    )  # fmt: skip


def _load(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("persist_lib"):
            raise
        raise InvalidUsage(
            f"this location needs the package {error.name}, which is not installed: pip install 'persist-lib[{extra}]'",
            extra=extra,
        ) from error
