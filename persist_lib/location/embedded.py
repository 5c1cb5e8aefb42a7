"""The scheme `file:`: a directory with `persist.json` (its format), `blob/` and `consensus.sqlite`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from persist_lib.errors import Determinate, InvalidUsage, Missing, NotFound
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.contract import MARKER, MARKER_BODY, check_marker, foreign_place, no_location
from persist_lib.location.directories import fsync_directory, make_directories, write_file
from persist_lib.location.file.blob import FileBlob
from persist_lib.location.scheme import Opening, Scheme

BLOBS = "blob"
CONSENSUS = "consensus.sqlite"


def _canonical(url: str) -> str:
    rest = url.removeprefix("file:")
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            raise InvalidUsage(
                f"{url} names the host {rest.partition('/')[0]!r}; a file location is file:./relative, "
                "file:/absolute or file:///absolute",
                url=url,
            )
    if not rest or "\0" in rest:
        raise InvalidUsage(f"{url!r} names no directory; a file location is file:./relative or file:/absolute", url=url)
    return f"file:{os.path.abspath(rest)}"  # noqa: PTH100 - also takes `..` away


def _open_blob(url: str, opening: Opening) -> Blob:
    return FileBlob(_enter(url, opening) / BLOBS, opening.runtime)


def _open_consensus(url: str, opening: Opening) -> Consensus:
    path = _enter(url, opening)
    database = path / CONSENSUS
    if not database.exists():
        _check_never_had_one(url, path, opening)
    # Loaded by name, so that a program that only puts blobs loads no database driver.
    sqlite = import_module("persist_lib.location.sqlite.consensus")
    if opening.read_only:
        return sqlite.ReadOnlySqliteConsensus(database, clock=opening.clock, runtime=opening.runtime)
    return sqlite.SqliteConsensus(database, create=opening.create, clock=opening.clock, runtime=opening.runtime)


def _enter(url: str, opening: Opening) -> Path:
    """Return the directory of the location, after a check that it exists and that its format is known."""
    path = Path(url.removeprefix("file:"))
    marker = path / MARKER
    try:
        if marker.exists():
            check_marker(marker.read_bytes(), str(marker))
            if not opening.read_only:
                fsync_directory(path)  # the process that made the marker may never have come to this
        elif opening.create:
            _create(url, path, opening)
        else:
            raise no_location(url, str(marker))
    except OSError as error:
        raise Determinate(f"could not open the location {url}: {error}", url=url) from error
    return path


def _create(url: str, path: Path, opening: Opening) -> None:
    foreign = [n for n in _names(path) if not n.startswith((BLOBS, CONSENSUS, "." + MARKER, "." + CONSENSUS))]
    # Another process may have made the marker since we looked.
    if foreign and MARKER not in foreign:
        raise foreign_place(url, f"files ({', '.join(sorted(foreign)[:3])})", "an empty or a new directory")
    make_directories(path)
    write_file(path / MARKER, MARKER_BODY, opening.runtime.entropy, once=True)
    check_marker((path / MARKER).read_bytes(), str(path / MARKER))


def _names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()] if path.exists() else []


def _check_never_had_one(url: str, path: Path, opening: Opening) -> None:
    """Raise Missing if there are blobs but no database: it was lost, and a new, empty one would hide that."""
    try:
        blobs = _names(path / BLOBS)
    except OSError as error:
        raise Determinate(f"could not open the location {url}: {error}", url=url) from error
    if any(not name.startswith(".") for name in blobs):
        raise Missing(
            f"{path / CONSENSUS} is missing, but {path / BLOBS} holds blobs. Restore it, or pass consensus= if the "
            "location's consensus is elsewhere",
            key=CONSENSUS, url=url,
        )  # fmt: skip
    if not opening.create:
        raise NotFound(f"there is no consensus at {url}; open it with create=True, or pass consensus=", url=url)


SCHEME = Scheme(_open_blob, _open_consensus, _canonical)
