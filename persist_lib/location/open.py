"""Open a location by its URLs, here or in another process.

    memory:          a new one each time                     memory:name      shared by name within the process
    file:./data      blobs below ./data/blob, consensus in ./data/consensus.sqlite
    file:/x, file:///x                                       absolute paths
    ./data  data  /x  pathlib.Path("data")                   the same without the scheme
    postgresql://user@host/db?persist_schema=persist         consensus only; any URL of libpq
    postgresql://user@host/db?persist_notify=1               the same, and waiting readers are woken
    s3://bucket/prefix?endpoint=http://host:9000             blobs only; see `objects.target` for the options
    s3+cas://bucket/prefix                                   blobs and consensus, without a database
    gs://bucket/prefix  gs+cas://bucket/prefix               the same on Google Cloud Storage
    az://container/prefix  az+cas://container/prefix         the same on Azure
    persist://host:7600,host:7601                            consensus only, by way of shard servers
    persists://host:7600?ca=/path                            the same over TLS
    persist://host:7600?store=postgresql://user@host/db      the same, or that store itself where no server answers

Other packages add schemes as entry points of the group `persist.locations`: its name is the scheme, its object a
`Scheme`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TypeAlias

from persist_lib.arguments import shown
from persist_lib.core.cost import NAMED
from persist_lib.errors import HIDDEN, InvalidUsage, redacted
from persist_lib.location import embedded
from persist_lib.location.api import Blob, Consensus, Puts
from persist_lib.location.contract import Clock, machine_clock
from persist_lib.location.memory import location as memory_location
from persist_lib.location.objects.target import CLOUDS, is_on_cloud
from persist_lib.location.scheme import Opening, Scheme, lazy_scheme
from persist_lib.location.wrap.around import ReadOnlyBlob, ReadOnlyConsensus, RefusesWrites
from persist_lib.location.wrap.deadline import TIMEOUT_S
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import Resource

ENTRY_POINTS = "persist.locations"
Place: TypeAlias = "str | os.PathLike[str]"
"""Where a location is: a URL, or a path of this machine."""
_POSTGRES = lazy_scheme("persist_lib.location.postgres.consensus", "postgres", "open_consensus")


def _clouds() -> Mapping[str, Scheme]:
    """For each cloud a scheme for blobs, and one with the consensus beside them."""
    made = {}
    for name, cloud in CLOUDS.items():
        for suffix, module, *more in (("", "blob"), ("+cas", "consensus", "open_consensus")):
            made[name + suffix] = lazy_scheme(
                f"persist_lib.location.objects.{module}", cloud.extra, "open_blob", "open_puts", *more,
                prices=NAMED[cloud.extra], tells_requests=True,
            )  # fmt: skip
    return made


_RPC = lazy_scheme("persist_lib.location.rpc.consensus", "server", "open_consensus", "named")
BUILT_IN: Mapping[str, Scheme] = {
    "memory": memory_location.SCHEME,
    "file": embedded.SCHEME,
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    **_clouds(),
    "persist": _RPC,
    "persists": _RPC,
}


@dataclass(frozen=True, slots=True, repr=False)
class Location(Resource):
    """An open Blob and Consensus, and the absolute URLs by which any process can open the same. Pickles as its URLs."""

    url: str
    consensus_url: str
    read_only: bool
    blob: Blob = field(compare=False)
    consensus: Consensus = field(compare=False)

    def __repr__(self) -> str:
        urls = ", ".join(repr(redacted(url)) for url in dict.fromkeys((self.url, self.consensus_url)))
        return f"Location({urls}{', read_only=True' if self.read_only else ''})"

    def close(self) -> None:
        self.blob.close()
        self.consensus.close()

    def __reduce__(self) -> tuple[Callable[..., Location], tuple[object, ...]]:
        return _reopen, (self.url, self.consensus_url, self.read_only)


def open_location(
    url: Place,
    consensus: Place | None = None,
    *,
    create: bool = False,
    read_only: bool = False,
    clock: Clock = machine_clock,
    runtime: Runtime | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Location:
    """Open the Blob at `url` and the Consensus at `consensus` (None: the same place).

    With `create`, a missing location is made; otherwise it raises NotFound. With `read_only` nothing is ever written,
    so nothing is created either, and operations that would write raise InvalidUsage. `clock` (ns since the epoch) is
    the clock of an embedded Consensus. Everything else that is ambient comes from `runtime`, a real one by default.

    Raises InvalidUsage for a URL that is invalid or of an unknown scheme, and NewerFormat for a location of a newer
    release. A call with `create` can be repeated: it opens what exists. A shard server that does not answer yet is
    waited for up to `timeout_s` seconds.
    """
    runtime = runtime or Runtime()
    stores = _Stores(Opening(False, read_only, clock, runtime))
    opening = Opening(create and not read_only, read_only, clock, runtime, stores, timeout_s, {})
    url, consensus = url_of(url), None if consensus is None else url_of(consensus, "consensus")
    scheme = scheme_of(url)
    url = scheme.named(scheme.canonical(url), opening)
    consensus_scheme, consensus_url = scheme, url
    if consensus is not None:
        consensus_scheme = scheme_of(consensus, "consensus")
        consensus_url = consensus_scheme.named(consensus_scheme.canonical(consensus), opening)
    # Both openers before any request, so that an error in either URL is raised first.
    blob_of, consensus_of = _blob_opener(scheme, url), _consensus_opener(consensus_scheme, consensus_url)
    blob = stores.blob = _open_blob(blob_of, url, opening)
    try:
        return Location(url, consensus_url, read_only, blob, _open_consensus(consensus_of, consensus_url, opening))
    except BaseException:
        blob.close()
        raise


class _Stores:
    """Opens what stands behind the servers of a location. `blob` is set when the location's blobs are open."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.blob: Blob | None = None

    def url_of(self, url: str) -> str:
        url = url_of(url, "store")
        scheme = scheme_of(url, "store")
        _consensus_opener(scheme, url)
        return scheme.named(scheme.canonical(url), self._opening)

    def open(self, url: str) -> tuple[Blob, Consensus]:
        if self.blob is None:
            raise InvalidUsage("a store behind servers is opened after the blobs of its location")
        return self.blob, _open_consensus(_consensus_opener(scheme_of(url, "store"), url), url, self._opening)


def open_puts(url: Place, *, runtime: Runtime | None = None) -> Puts:
    """Open the place of a location's blobs to put objects there, and for nothing else. `url` is as in `open_location`.

    In an object store this makes no request, and none but a PUT is ever made; so it is not found out here whether there
    is such a location. No Consensus is opened. Raises InvalidUsage for an invalid URL, and NotFound where a directory
    is missing.
    """
    opening, url = Opening(runtime=runtime or Runtime()), url_of(url)
    scheme = scheme_of(url)
    url = scheme.named(scheme.canonical(url), opening)
    return (scheme.puts or _blob_opener(scheme, url))(url, opening)


def _reopen(url: str, consensus_url: str, read_only: bool) -> Location:
    return open_location(url, consensus_url, read_only=read_only)


def _blob_opener(scheme: Scheme, url: str) -> Callable[[str, Opening], Blob]:
    if scheme.blob is None:
        raise InvalidUsage(
            f"{url} keeps no blobs: it is for consensus= (--consensus at a shell), beside the URL of a place for them, "
            "as in file:/path or s3://bucket/prefix",
            url=url,
        )
    return scheme.blob


def _consensus_opener(scheme: Scheme, url: str) -> Callable[[str, Opening], Consensus]:
    if scheme.consensus is None:
        alone = f", or open {url.replace(':', '+cas:', 1)}, which needs no database" if is_on_cloud(url) else ""
        raise InvalidUsage(
            f"{url} keeps blobs only. Say where the consensus is, with consensus= (--consensus at a shell), as in "
            f"postgresql://user@host/database{alone}",
            url=url,
        )
    return scheme.consensus


def _open_blob(blob_of: Callable[[str, Opening], Blob], url: str, opening: Opening) -> Blob:
    blob = blob_of(url, opening)
    return ReadOnlyBlob(blob) if opening.read_only else blob


def _open_consensus(consensus_of: Callable[[str, Opening], Consensus], url: str, opening: Opening) -> Consensus:
    consensus = consensus_of(url, opening)
    is_writable = opening.read_only and not isinstance(consensus, RefusesWrites)
    return ReadOnlyConsensus(consensus) if is_writable else consensus


def url_of(place: object, what: str = "location") -> str:
    """Return the URL of a place that is given as a URL or as a path: `file:` and the path.

    A path is a `pathlib.Path`, or text without a scheme, such as ./data, /data or data. Raises InvalidUsage for text
    that is rather something else: a scheme alone, a user at a host, a path of Windows, or one that a shell expands.
    """
    if isinstance(place, os.PathLike):
        path = os.fspath(place)
        if not isinstance(path, str):
            raise InvalidUsage(f"the {what} must be a path as text: got {shown(place)}", url=place)
        return f"file:{_one_slash(path)}"
    if not isinstance(place, str) or not place.strip() or _SCHEME.match(place):
        _check_url(place, what)
        return str(place)
    hint = None
    if place in BUILT_IN:
        hint = f"{place} is a scheme: did you mean '{place}:', or the directory './{place}'?"
    elif "\\" in place:
        hint = "write its path with slashes, as in 'file:./data'"
    elif place.startswith("~"):
        hint = "write out the home directory, or pass pathlib.Path(…).expanduser()"
    elif "@" in place.partition("/")[0]:
        place, hint = (
            HIDDEN + place[place.index("@") :],
            "a server's URL starts with its scheme, as in 'postgresql://…'",
        )
    if hint is not None:
        raise InvalidUsage(f"the {what} must be a URL or a path: got {shown(place)}; {hint}", url=place)
    return f"file:{_one_slash(place)}"


_SCHEME = re.compile(r"[^/]*:")


def _one_slash(path: str) -> str:
    """The path; after `file:`, two slashes would begin the name of a host."""
    return f"/{path.lstrip('/')}" if path.startswith("//") else path


def scheme_of(url: str, what: str = "location") -> Scheme:
    """Return the scheme of a URL. Raises InvalidUsage if it is no URL or its scheme is unknown.

    `what` names the thing that the URL is for in the message.
    """
    _check_url(url, what)
    name, colon, _ = url.partition(":")
    if colon and name in BUILT_IN:
        return BUILT_IN[name]
    added = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if not colon or name not in added:
        known = ", ".join(f"{known}:" for known in sorted({*BUILT_IN, *added}))
        # A text without a scheme may be the end of a URL: user:password@host.
        text = HIDDEN + url[url.rindex("@") :] if "@" in url and "://" not in url else url
        raise InvalidUsage(
            f"a location's URL starts with its scheme ({known}), as in 'file:./data': got {shown(text)}", url=text
        )
    scheme = added[name].load()
    if not isinstance(scheme, Scheme):
        raise InvalidUsage(
            f"the entry point of {name}: is no persist_lib.location.scheme.Scheme: got {shown(scheme)}", url=url
        )
    return scheme


def _check_url(url: object, what: str) -> None:
    """Raise InvalidUsage for what cannot be a URL. An empty one would otherwise mean the default of its reader."""
    if not isinstance(url, str):
        raise InvalidUsage(f"the {what} must be a URL as text, as in 'file:./data': got {shown(url)}", url=url)
    if not url.strip():
        raise InvalidUsage(
            f"the {what} is empty. Was it taken from a variable that is not set? Pass its URL, as in 'file:./data'",
            url=url,
        )
    if any(ord(character) < 32 or 0xD800 <= ord(character) <= 0xDFFF for character in url):
        raise InvalidUsage(f"the URL of the {what} has control characters or is no text: got {shown(url)}", url=url)
