"""The definition of a URL scheme: how to open its Blob, its Consensus, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import parse_qsl

from persist_lib.core.cost import FREE, Prices
from persist_lib.errors import InvalidUsage
from persist_lib.location.api import Blob, Consensus, Puts
from persist_lib.location.contract import Clock, machine_clock
from persist_lib.runtime.ambient import Runtime


class Stores(Protocol):
    """Another place of the location's consensus, for a Consensus that goes there when its own does not answer."""

    def url_of(self, url: str) -> str:
        """The URL of a Consensus, which means the same in any process. Raises InvalidUsage for an invalid one."""

    def open(self, url: str) -> tuple[Blob, Consensus]:
        """The location's blobs, and the Consensus at such a URL, which exists. Close the Consensus after use."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a location is to be opened. Never both `create` and `read_only`.

    A store takes time, sleep, random numbers and threads only from `runtime`, so that a simulation controls them.
    """

    create: bool = False
    read_only: bool = False
    clock: Clock = machine_clock
    runtime: Runtime = field(default_factory=Runtime)
    stores: Stores | None = None
    timeout_s: float = 0.0
    """For how long a server is asked again that is there, and does not answer."""
    entered: dict[str, object] | None = None
    """What the openers of a Blob and a Consensus that are closed together share, by URL; None: nothing."""


def is_on(url: str, option: str, *, default: bool) -> bool:
    """Whether a URL switches `option` on by `option=1`. Raises InvalidUsage for a value other than 0 and 1."""
    given = dict(parse_qsl(url.partition("?")[2], keep_blank_values=True)).get(option, "1" if default else "0")
    if given not in ("0", "1"):
        raise InvalidUsage(f"{option} must be 0 or 1: got {given!r}", url=option)
    return given == "1"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A URL scheme: its openers, and what the library has to know about its URLs and prices.

    `blob` and `consensus` open the stores at a URL; None: the scheme has no such store. An opener raises NotFound when
    the location does not exist, unless `create` is set; with `read_only` it writes nothing. `canonical` returns a URL
    that means the same in any process (for example, with an absolute path). `prices` are the costs of its operations
    unless the user passes others. `tells_requests`: an operation may take several requests or none, and the store calls
    `metering.requested` for each of them; logs of such a Consensus are rolled up more often. `named` adds a name to a
    canonical URL that has none and so would mean a new place each time. `puts` opens what only puts blobs, for a
    program whose credentials allow nothing else; None: `blob` does that as well, and opening it asks for no more than
    that.
    """

    blob: Callable[[str, Opening], Blob] | None = None
    consensus: Callable[[str, Opening], Consensus] | None = None
    canonical: Callable[[str], str] = lambda url: url
    prices: Prices = FREE
    tells_requests: bool = False
    named: Callable[[str, Opening], str] = lambda url, _opening: url
    puts: Callable[[str, Opening], Puts] | None = None


LAZY = {"open_blob": "blob", "open_consensus": "consensus", "open_puts": "puts", "named": "named"}
"""The functions of a module by which it implements a scheme, and what they are of the scheme."""


def lazy_scheme(
    module: str, extra: str, *functions: str, prices: Prices = FREE, tells_requests: bool = False
) -> Scheme:
    """Return the scheme that `module` implements by `canonical` and these functions, which have the names of `LAZY`.

    A missing package raises InvalidUsage, which names the `extra` to install, when the scheme is used.
    """

    def call(function: str) -> Callable[..., Any]:
        def later(*arguments: object) -> Any:
            return getattr(with_extra(module, "this location", extra), function)(*arguments)

        return later

    given = {LAZY[name]: call(name) for name in functions}
    return Scheme(canonical=call("canonical"), prices=prices, tells_requests=tells_requests, **given)


def with_extra(module: str, what: str, extra: str) -> ModuleType:
    """A module that needs packages of an extra. Raises InvalidUsage where these are not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("persist_lib"):
            raise
        raise InvalidUsage(
            f"{what} needs the package {error.name}, which is not installed: pip install 'persist-lib[{extra}]'",
            extra=extra,
        ) from error
