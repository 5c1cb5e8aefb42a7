"""What drivers have in common: what a log says of itself, its path, requests that are sent again, and errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from persist_lib.errors import Corrupt, Determinate, Fenced, InvalidUsage, NewerFormat, NotFound, PersistError
from persist_lib.events.api import Buffer, Opening
from persist_lib.location.directories import make_directories, no_room
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.retrying import retry
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
    except (ValueError, KeyError, TypeError) as error:
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
    if not data.isdigit():
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
