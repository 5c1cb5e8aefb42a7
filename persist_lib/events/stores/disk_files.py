"""Files of a log on disk: names, claims, and writes that are whole and durable."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from persist_lib.errors import PersistError
from persist_lib.events.api import Key
from persist_lib.location.directories import fsync_directory, no_room
from persist_lib.runtime.ambient import Runtime

MOST_VECTORS = 1020
CLAIM = "epoch-"


def claim_name(epoch: int) -> str:
    """The file that claims an epoch."""
    return f"{CLAIM}{epoch:010d}"


def claims_in(root: Path) -> list[int]:
    """The epochs that are claimed."""
    names = os.listdir(root)  # noqa: PTH208 - names only
    return [int(name.removeprefix(CLAIM)) for name in names if name.startswith(CLAIM)]


def segment_name(epoch: int, first: int) -> str:
    """The file of the events that a writer wrote, from an id on."""
    return f"{epoch:010d}-{first:020d}"


def note_name(key: Key) -> str:
    """The file of a record of a snapshot or mark."""
    return f"{key.id:020d}.{key.fragment}"


def is_held(claim: Path) -> bool:
    """Whether the process that made a claim lives (or is paused)."""
    try:
        fd = os.open(claim, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # replaced by a newer one: look again
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_all(fd: int, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
    """Write buffers one after the other, without joining them. Returns how many bytes they have."""
    total = 0
    for start in range(0, len(pieces), MOST_VECTORS):
        views = [memoryview(piece).cast("B") for piece in pieces[start : start + MOST_VECTORS]]
        while views:
            written = os.writev(fd, views)
            total += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
    return total


def write_file(path: Path, content: dict[str, object], runtime: Runtime) -> None:
    """Replace a file, durably."""
    temporary = path.with_name(f".{path.name}.{runtime.entropy():016x}")
    with temporary.open("xb") as file:
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)


@contextlib.contextmanager
def failing(kind: type[PersistError], doing: str, path: Path) -> Iterator[None]:
    """Raise an error of the system as `kind`, and a lack of room as DiskFull where nothing can have happened."""
    try:
        yield
    except OSError as error:
        if (full := no_room("events", path, error)) is not None:
            raise full from error
        raise kind(f"could not {doing} {path}: {error}", path=str(path), errno=error.errno) from error
