"""What drivers have in common: what a log says of itself, its path, requests that are sent again, errors, end marks.

The end mark of a log in files says which event a writer acknowledged last, in a small file beside the store. It is
written after each commit and never synced: it costs no time, and can never be ahead of the store. A process that is
killed leaves it exact; a power cut may leave an older one, or none, which says less and nothing wrong. So a log that
ends before its end mark has lost acknowledged events, whatever its store makes of the bytes that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import xxhash

from persist_lib.arguments import UNPARSED
from persist_lib.errors import (
    Corrupt,
    Determinate,
    Fenced,
    Indeterminate,
    InvalidUsage,
    Missing,
    NewerFormat,
    NotFound,
    PersistError,
)
from persist_lib.events.api import EVENTS, Buffer, Opening, Put
from persist_lib.events.record import REPAIR, lost
from persist_lib.location.api import Object, ObjectStore
from persist_lib.location.directories import make_directories, no_room
from persist_lib.location.wrap.deadline import retry, within
from persist_lib.runtime.ambient import Runtime

T = TypeVar("T")
FORMAT = 1
PATIENCE_S = 20.0
"""How long a failed request is sent again."""


def sent_again(runtime: Runtime, call: Callable[[], T]) -> T:
    """Make a request, and again for PATIENCE_S while it fails. Only for requests that may be carried out twice."""
    deadline = runtime.deadline(PATIENCE_S)
    return within(deadline, lambda: retry(call, is_idempotent=True, deadline=deadline))


def fenced(where: str, epoch: int, found: int, *, is_certain: bool = True) -> Fenced:
    """The error of a store that looked at the epoch in the transaction that would have written.

    `is_certain`: no earlier attempt can have written.
    """
    outcome = "nothing of this was written" if is_certain else "whether this is in the log, only the log says"
    return Fenced(
        f"another writer took over {where} (epoch {found}, and this one is {epoch}). What was acknowledged is in the "
        f"log, and {outcome}. Open a writer again if this program is to write",
        epoch=epoch, found=found,
    )  # fmt: skip


def encode_meta(runtime: Runtime) -> bytes:
    """What a new log says of itself: its format, and its name, eight random bytes."""
    return json.dumps({"events": FORMAT, "log": runtime.entropy().to_bytes(8, "big").hex()}).encode()


def open_meta(data: bytes, where: str) -> bytes:
    """The name of a log. Raises NewerFormat for one that a newer release made."""
    try:
        found = json.loads(data)
        version, log = found["events"], bytes.fromhex(found["log"])
    except (*UNPARSED, KeyError, TypeError) as error:
        raise Corrupt(
            f"{where} is no event log, or damaged: what it says of itself is not as it was written ({error}). Nothing "
            "was changed",
            key=where,
        ) from error
    if not isinstance(version, int) or version > FORMAT:
        raise newer(where, version)
    if len(log) != 8:
        raise Corrupt(f"{where} is damaged: the name of the log is {log.hex()!r}", key=where)
    return log


def newer(where: object, found: object) -> NewerFormat:
    """The error for what a newer release wrote."""
    return NewerFormat(
        f"{where} has format {found}, this release knows up to {FORMAT}; nothing was touched. Upgrade persist-lib",
        found=found, known=FORMAT,
    )  # fmt: skip


def parse_epoch(data: bytes | None, where: str) -> int:
    """The newest epoch of a log, as its record says; 0 where there is none yet. Raises Corrupt."""
    if data is None:
        return 0
    if not data.isdigit() or len(data) > 20:
        raise Corrupt(f"{where} is damaged: its epoch is {bytes(data[:20])!r}. Restore it from a copy", key=where)
    return int(data)


def as_bytes(buffer: Buffer) -> bytes:
    """The same as `bytes`, without a copy if it is a view of the whole of some: for clients that take nothing else."""
    if isinstance(buffer, memoryview) and isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj):
        return buffer.obj
    return bytes(buffer)


def parse_path(options: Sequence[str], default: str, usage: str) -> Path:
    """The path of a store in files, which takes at most that option."""
    if len(options) > 1 or not all(options):
        raise InvalidUsage(f"{usage}: got {len(options)} options")
    return Path(options[0] if options else default).absolute()


def take_option(options: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The options without those of the form `name=value`, and their values."""
    start = f"{name}="
    rest = [option for option in options if not option.startswith(start)]
    return rest, [option.removeprefix(start) for option in options if option.startswith(start)]


def make_place(path: Path, folder: Path, opening: Opening) -> None:
    """Make the folder of a log that is not there. Raises NotFound unless one may be made."""
    if not opening.create:
        raise NotFound(f"there is no event log in {path}. Check the path; a writer makes one", path=str(path))
    with failing(Determinate, "make", folder):
        make_directories(folder)


@contextlib.contextmanager
def failing(kind: type[PersistError], doing: str, path: Path) -> Iterator[None]:
    """Raise an error of the system as `kind`, and a lack of room as DiskFull where nothing can have happened."""
    try:
        yield
    except OSError as error:
        if (full := no_room("events", path, error)) is not None:
            raise full from error
        raise kind(f"could not {doing} {path}: {error}", path=str(path), errno=error.errno) from error


SIZE = 24


class EndMark:
    """`path` is the file: the log's name, the last event's id (8 bytes, big-endian), and the digest of both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def checked(self, log: bytes, find_last: Callable[[], int]) -> int:
        """Return the last event that `find_last` finds. Raises Missing if one behind it was acknowledged."""
        marked = self.read(log)  # before, as a writer may continue in between
        last = find_last()
        if marked > last:
            why = f"{self.path} says that event {marked} was acknowledged"
            raise lost(self.path.parent, last, marked, why, REPAIR)
        return last

    def read(self, log: bytes) -> int:
        """The last event of this log that was acknowledged, as far as is known. Raises Corrupt."""
        data = self._bytes()
        if not data.strip(b"\0"):  # a power cut may leave this
            return 0
        if len(data) != SIZE or xxhash.xxh3_64_digest(data[:16]) != data[16:]:
            raise Corrupt(
                f"{self.path} is damaged: it says which event of the log was acknowledged last, and does not verify. "
                f"Nothing was changed. {REPAIR}",
                key=str(self.path),
            )
        return int.from_bytes(data[8:16], "big") if data[:8] == log else 0

    def known(self, log: bytes) -> int:
        """As `read`; of a mark that is damaged nothing is known."""
        try:
            return self.read(log)
        except Corrupt:
            return 0

    def check_new(self) -> None:
        """Raise Missing if there was a log here: a new one in its place would hide that it is gone."""
        data = self._bytes()
        if data.strip(b"\0"):
            last = int.from_bytes(data[8:16], "big")
            raise Missing(
                f"there is no event log any more in {self.path.parent}, and {self.path} says that there was one, up to "
                f"event {last}. Nothing was changed; restore it from a copy, or remove {self.path} for a new log",
                key=str(self.path),
            )

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def note(self, log: bytes, puts: Sequence[Put]) -> None:
        if ids := [put.key.id for put in puts if put.key.space == EVENTS and put.key.fragment == 0]:
            self.write(log, ids[-1])

    def write(self, log: bytes, last: int) -> None:
        start = log + last.to_bytes(8, "big")
        with suppress(OSError):  # it is only evidence
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, start + xxhash.xxh3_64_digest(start), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Objects:
    """Objects by name. As each record says its epoch, no two have the same bytes.

    Each request is sent again while it fails: a condition that our own request made false is recognised.
    """

    def __init__(self, objects: ObjectStore, runtime: Runtime) -> None:
        self._objects, self._runtime = objects, runtime
        self.where = objects.where

    def get(self, name: str, most: int | None = None) -> Object | None:
        """Return an object, or its first `most` bytes, and its version; None if there is none."""
        try:
            return sent_again(self._runtime, lambda: self._objects.get(name, f"read {name!r}", 0, most))
        except Indeterminate as error:
            raise Determinate(f"could not read {name} of {self.where}: {error.message}") from error

    def put(self, name: str, data: bytes, version: str | None) -> bool:
        """Store an object if there is none (version None), or if its version is this one. Returns whether it did."""
        doing = f"store {name!r}"
        return sent_again(self._runtime, lambda: self._objects.put(name, data, doing, version)) is not None

    def overwrite(self, name: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        sent_again(self._runtime, lambda: self._objects.overwrite(name, data, f"store {name!r}"))

    def names(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """The names that start with a prefix and are greater than `after`, ascending; the first `most` of them."""
        doing = f"list {prefix!r}"
        found = sent_again(self._runtime, lambda: list(islice(self._objects.entries(prefix, doing, after), most)))
        return [entry.name for entry in found]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. It is no error if there are none."""

        def delete() -> None:
            for error in self._objects.delete(names).values():
                raise error

        sent_again(self._runtime, delete)

    def close(self) -> None:
        self._objects.close()
