"""The part of an `ObjectStore` that all clouds have in common: listings, processes that fork, and what errors mean."""

from __future__ import annotations

import os
import re
import ssl
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, NotFound, PersistError
from persist_lib.location.api import Entry, ObjectStore, Upload
from persist_lib.location.objects.target import Target, parse_url
from persist_lib.location.scheme import with_extra
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Runtime

MIB = 1024 * 1024
MOST_BYTES = 5 << 30
"""The largest object in one PUT."""
PIECE = 16 * MIB
PAGE = 1000
"""The most names that are listed in one request."""
CONNECT_S = 5.0
ANSWER_S = 16
"""The longest wait for the server, in seconds."""
LEAST_S = 0.1
CONNECTIONS = 32
DELETE_THREADS = 16
ENDS_BEFORE_RANGE = 416
CONDITION_FAILED = 412
MISSING = 404
QUERY = re.compile(r"\?[^\s'\"<>()]+")
"""Of a URL in an error of a library: it may hold a signature, which is as good as a password."""


class Listing(NamedTuple):
    """A page of a listing: names below the location, and whether there are no more."""

    entries: list[Entry]
    folders: list[str]
    is_last: bool


class PerProcess:
    """Clients of a store, made when needed: one for each process and for each choice of arguments.

    A forked child inherits its parent's connections, and the answers to both would mix on them. So the child
    makes its own and never uses the inherited ones. There is no lock, as one held during a fork would stay held.
    """

    def __init__(self, where: str, make: Callable[..., Any]) -> None:
        self._where, self._make = where, make
        self._made: dict[tuple[object, ...], Any] = {}
        self._closed = False

    def get(self, *arguments: object) -> Any:
        """Return the client of this process. Raises InvalidUsage after `close`."""
        if self._closed:
            raise InvalidUsage(f"the location at {self._where} was closed, by itself or with its client; open it again")
        key = os.getpid(), *arguments
        client = self._made.get(key)
        return self._made.setdefault(key, self._make(*arguments)) if client is None else client

    def forget(self) -> None:
        """Make new ones from now on. Other threads may still use the old ones."""
        self._made.clear()

    def close(self) -> None:
        self._closed = True
        for (pid, *_), client in list(self._made.items()):
            if pid == os.getpid():
                client.close()


class CloudObjects(ObjectStore):
    """An `ObjectStore` below a prefix of a bucket. Nothing is retried here. See `api.ObjectStore`."""

    no_version: ClassVar[str]
    """A version that no object has."""
    signs_urls: ClassVar[bool] = True
    """Whether what its library says of an error may hold a signed URL: then it is not even the cause of ours."""

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, runtime: Runtime | None = None) -> None:
        self.target, self.where, self._answer_s = target, target.where, answer_s
        self.multipart_above, self.piece = MOST_BYTES, PIECE
        """Objects above a size are sent in pieces of this size, where the store has unfinished uploads."""
        self.observe: Callable[[int], None] | None = None
        """Gets the time of the store in each answer, in ms since the epoch."""
        self._runtime = runtime or Runtime()
        self._root = target.path("")

    clients: Any
    """What makes requests: a client for each process. `clients.get()` is this one's."""

    @property
    def address(self) -> str:
        """The place for programs that do not know us: a URL without options."""
        return self.where

    @abstractmethod
    def at(self, name: str) -> Any:
        """Where a request finds an object, as the client takes it. Raises InvalidName for a name that is too long."""

    @abstractmethod
    def delete_one(self, name: str, doing: str) -> None:
        """Delete an object, if there is one, which needs no right to delete several at once."""

    @abstractmethod
    def _pages(self, prefix: str, doing: str, after: str, page: int, delimiter: str) -> Iterator[Listing]:
        """Yield a listing's pages, a request for each. It may start before `after`."""

    def entries(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> Iterator[Entry]:
        for found in self._listings(prefix, doing, after, page):
            yield from found.entries

    def page(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> tuple[list[Entry], bool]:
        """Return the first page with a name behind `after`: one request, unless the server ignores where to start."""
        listed = (found for found in self._listings(prefix, doing, after, page) if found.entries or found.is_last)
        return next((found.entries, found.is_last) for found in listed)

    def folders(self, prefix: str, doing: str, page: int | None = None) -> Iterator[str]:
        for found in self._pages(prefix, doing, "", page or PAGE, "/"):
            yield from (name[len(prefix) : -1] for name in found.folders)

    def _listings(self, prefix: str, doing: str, after: str, page: int | None) -> Iterator[Listing]:
        """Yield pages of the names greater than `after`. Some servers ignore where a listing is to start.

        Others list in another order. What follows a name would then be looked for in vain, so this raises InvalidUsage.
        """
        last = ""
        for found in self._pages(prefix, doing, after, page or PAGE, ""):
            names = [entry.name for entry in found.entries]
            if names and (names[0] <= last or names != sorted(names)):
                raise InvalidUsage(
                    f"could not {doing}: {self.where} lists its objects in another order than that of their names, as "
                    f"a store with real directories does. Use a {self.target.cloud.bucket} with a flat namespace"
                )
            last = names[-1] if names else last
            if names and names[0] <= after:
                found = found._replace(entries=[entry for entry in found.entries if entry.name > after])  # noqa: PLW2901
            yield found

    def _relative(self, key: str) -> str:
        return key[len(self._root) :]

    def delete(self, names: Sequence[str], page: int | None = None) -> dict[str, Exception]:  # noqa: ARG002
        """Delete objects, each by a request of its own, several at a time."""

        def delete(name: str) -> Exception | None:
            try:
                self.delete_one(name, f"delete {name!r}")
            except PersistError as error:
                return error
            return None

        with self._runtime.pool(DELETE_THREADS, "persist-delete") as pool:
            failed = pool.map(delete, names)
            return {name: error for name, error in zip(names, failed, strict=True) if error is not None}

    def uploads(self, prefix: str, doing: str, page: int | None = None) -> Iterator[Upload]:  # noqa: ARG002
        """Yield unfinished uploads. Here there are none: an object of any size is one request."""
        return iter(())

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:  # noqa: ARG002
        return {}

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        """Raise failures as Determinate: a failed read changes nothing."""
        with self._failing_as(Determinate, doing):
            yield

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Raise failures as Indeterminate, unless the store refused or nothing was sent."""
        with self._failing_as(Indeterminate, doing):
            yield

    @contextmanager
    def _failing_as(self, unknown: type[PersistError], doing: str) -> Iterator[None]:
        try:
            yield
        except PersistError:
            raise
        except Exception as error:  # noqa: BLE001 - what was cut short makes a library fail in any way (ValueError, KeyError)
            said = QUERY.sub("?…", str(error)) if self.signs_urls else str(error)
            failed = self._failed(error, f"could not {doing}: {type(error).__name__}: {said}", unknown)
            raise failed from None if self.signs_urls else error

    def close(self) -> None:
        self.clients.close()

    @abstractmethod
    def _failed(self, error: Exception, what: str, unknown: type[PersistError]) -> PersistError:
        """Return the PersistError for an error. It is `unknown` if the error does not say what happened."""

    def _refused(self, what: str, status: int, code: str, unknown: type[PersistError]) -> PersistError:
        """Return the error for an answer with an HTTP status. A missing object is no refusal, so 404 is the bucket."""
        cloud = self.target.cloud
        if status in (401, 403):
            return InvalidUsage(f"{what}. Check the credentials, and the roles in docs/operations.md", code=code)
        if status == MISSING:
            return NotFound(f"{what}. Check the URL; {cloud.bucket}s are not made by Persist", code=code)
        return (Determinate if 400 <= status < 500 else unknown)(what, code=code)

    def _observed(self, date: str | None) -> None:
        """Note the time in the `Date` header of an answer."""
        if date and self.observe is not None:
            self.observe(int(parsedate_to_datetime(date).timestamp() * 1000))

    def _timeouts(self) -> tuple[float, float]:
        """Seconds to wait for a connection and for an answer."""
        answer_s = max(LEAST_S, min(one_answer_s(self._answer_s), patience_s(self._answer_s)))
        return min(CONNECT_S, answer_s), answer_s


def ca_of(target: Target) -> str | None:
    """The file of authorities that a URL names. Raises InvalidUsage if it is not there."""
    ca = target.options.get("ca")
    if ca is not None and not Path(ca).exists():
        raise InvalidUsage(f"there is no file {ca}; ?ca= names the certificates of authorities (PEM)")
    return ca


def one_answer_s(longest_s: float) -> float:
    """How long to wait for one answer: the greatest power of two (in seconds) within the caller's deadline, or 1.

    So an answer that is lost does not take all of the time, and the request is sent again in the rest. These are few
    values, as some clients are made for one.
    """
    return min(longest_s, float(2 ** max(0, int(patience_s(longest_s)).bit_length() - 1)))


def is_distrusted(error: BaseException | None, kinds: tuple[type[BaseException], ...] = ()) -> bool:
    """Whether the server's certificate was refused. Then nothing was sent, and no retry helps.

    Other failures of TLS may pass. A library's error wraps that of urllib3, which wraps that of Python's ssl.
    """
    kinds = (ssl.SSLCertVerificationError, *kinds)
    return _holds(error, kinds, lambda one: [*getattr(one, "kwargs", {}).values(), one.__cause__, one.__context__])


def is_inside(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether an error is one of these, or holds one. What was being handled when it was raised does not count."""
    return _holds(error, kinds, lambda one: [getattr(one, "reason", None), getattr(one, "inner_exception", None)])


def _holds(
    error: object, kinds: tuple[type[BaseException], ...], more: Callable[[BaseException], list[object]]
) -> bool:
    seen = [error]
    for found in seen:
        if isinstance(found, kinds):
            return True
        if isinstance(found, BaseException) and len(seen) < 50:
            seen += [*found.args, *more(found)]
    return False


def create_marker(objects: CloudObjects, name: str, body: bytes, where: str, *, replaces: bool) -> None:
    """Write a marker twice: the second PUT must be refused. Raises InvalidUsage if the server ignores conditions.

    Such a server would overwrite what another writer stored, and acknowledge both. With `replaces`, it must also know
    the condition that an object is still the one that was read. `where` is the place for messages.
    """
    ignored, doing = None, f"create {name} at {where}"
    if objects.put(name, body, doing) and objects.put(name, body, doing):
        ignored = "If-None-Match"
    elif replaces and objects.put(name, body, doing, replaces=objects.no_version):
        ignored = "If-Match"
    if ignored is not None:
        raise InvalidUsage(
            f"the server of {where} ignores {ignored}: it would overwrite what others wrote. Use one that has "
            "conditional writes",
            url=where,
        )


def objects_at(url: str, runtime: Runtime | None = None) -> CloudObjects:
    """Return the objects at a URL of any cloud, without a request.

    Raises InvalidUsage for an invalid URL, and where the extra of its cloud is not installed.
    """
    return objects_of(parse_url(url), runtime)


def objects_of(target: Target, runtime: Runtime | None = None) -> CloudObjects:
    """Return the objects of a parsed URL."""
    module, kind = target.cloud.kind
    made: CloudObjects = getattr(with_extra(module, "this location", target.cloud.extra), kind)(target, runtime=runtime)
    return made


def whole_body(read: Callable[[int], bytes], announced: object) -> bytes:
    """What an answer's body holds. Raises Determinate if it is shorter than announced, or the deadline has passed."""
    pieces = []
    while piece := read(4 * MIB):
        pieces.append(piece)
        if patience_s(1.0) <= 0:
            raise Determinate("the caller's deadline has passed in the middle of an answer")
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    # An answer that ends among its headers announces no length, and looks like an empty object.
    if len(data) != int(str(announced)):
        raise Determinate(f"only {len(data)} of {announced} bytes arrived")
    return data
