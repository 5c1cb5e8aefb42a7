"""The database file of `SqliteConsensus`: how it is created, checked and opened, and what its errors mean.

The file is created whole or not at all. Its own header identifies it: `application_id` says that it is ours, and
`user_version` is the version of its format. Both are read before SQLite makes any file beside the database.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import apsw

from persist_lib.arguments import shown
from persist_lib.errors import (
    Corrupt,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NotFound,
    PersistError,
)
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.contract import check_known
from persist_lib.location.directories import NO_ROOM, fsync_directory, no_room
from persist_lib.location.in_place import UNTOUCHED, Identity, InPlace, identity_of

APPLICATION_ID = 0x50525354  # "PRST"
FORMAT = 1
MAGIC = b"SQLite format 3\0"
HEADER_BYTES = 100
FORMATS = {18: (1, 2), 19: (1, 2), 47: (1, 2, 3, 4)}
"""What may stand at some bytes of the header. SQLite calls any other a database to read only, or an unknown error."""
CHECKPOINT_PAGES = 1000
"""The log is written back to the database about every 4 MiB (some hundred commits), and then overwritten in place."""
LOG_LIMIT_BYTES = 64 * 1024 * 1024
"""A log that grew because of a long read is cut back to this size."""

# `exists` on the primary key is what makes compare-and-set one statement. Not WITHOUT ROWID: that keeps at most 1,000
# bytes of a row in its page, and the rest of each row in a page of its own, which every commit would have to sync.
SCHEMA = """
CREATE TABLE consensus (
    key TEXT NOT NULL, seqno INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (key, seqno)
)
"""

NEVER_BEGAN = (
    apsw.BusyError, apsw.LockedError, apsw.ProtocolError, apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError,
    apsw.AuthError,
)  # fmt: skip
"""Errors of SQLite when it cannot take a lock, open the file or begin to write. A commit raises none of them."""
DAMAGED = (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeDecodeError)
"""Errors of a damaged database. Our statements do not change, so what is wrong with one of them is in the schema."""
FAILURES = (apsw.Error, UnicodeDecodeError)


class Layout(NamedTuple):
    """What is in a database: the number that says whose it is, the version of its format, and its tables."""

    application_id: int
    format: int
    schema: str


CONSENSUS = Layout(APPLICATION_ID, FORMAT, SCHEMA)


def create(path: Path, entropy: Callable[[], int], layout: Layout = CONSENSUS) -> None:
    """Make the database at `path`, durably, unless it exists. `entropy` draws 64 random bits for a temporary name."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{entropy():016x}")
    try:
        connection = apsw.Connection(str(temporary))
        connection.pragma("application_id", layout.application_id)
        connection.pragma("user_version", layout.format)
        connection.execute(layout.schema)
        connection.pragma("journal_mode", "wal")
        connection.close()
        os.link(temporary, path)
        fsync_directory(path.parent)
    except FileExistsError:
        return  # another process made it first
    except (OSError, apsw.Error) as error:
        raise Determinate(f"could not create the SQLite database {path}: {error}", path=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_format(path: Path, layout: Layout = CONSENSUS) -> None:
    """Raise NotFound, InvalidUsage, NewerFormat or Corrupt for a database that cannot be opened as what it should be.

    Writes nothing, not even beside the file. SUBTLE: never read the file with `open`. Closing any descriptor of a file
    drops all POSIX locks that the process has on it, also those of its SQLite connections. SQLite's own file object
    avoids that. Only the header is read, as it never changes: the pages after it can be torn while another process
    writes its log back.
    """
    if not path.exists():
        raise NotFound(f"there is no SQLite database {path}; create the location first", path=str(path))
    try:
        file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0])
        header = file.xRead(HEADER_BYTES, 0)
        file.xClose()
    except apsw.Error as error:
        raise read_failed(error, path) from error
    is_sound = len(header) == HEADER_BYTES and all(header[at] in known for at, known in FORMATS.items())
    if not is_sound or not header.startswith(MAGIC):
        raise read_failed(apsw.NotADBError("file is not a database"), path)
    version, application = (int.from_bytes(header[at : at + 4]) for at in (60, 68))
    _check_ids(application, version, path, layout)
    if path.with_name(f"{path.name}-wal").exists():
        from persist_lib.location.sqlite.log_file import check_log  # noqa: PLC0415 - it loads numpy; mostly there is no log

        check_log(path)


def _check_ids(application: int, found: int, path: Path, layout: Layout) -> None:
    if application != layout.application_id:
        raise InvalidUsage(
            f"{path} is an SQLite database, but not one of Persist's that belongs here; nothing was touched",
            path=str(path),
        )
    check_known(f"{path} has format", found, layout.format)


class Connection(apsw.Connection):
    """A connection that can check whether its database, log and shared memory are still at their paths."""

    files: InPlace | None = None

    def find_files(self, path: Path, before: Identity) -> None:
        """Remember the open files. Call it after a first read, because only then are all of them open.

        Raises Determinate when the database was replaced since `before`: then it is unknown which one is open.
        """
        try:
            self.files = InPlace((str(path), self.filename_wal, f"{self.filename}-shm"))
        except OSError as error:
            raise Determinate(f"{path} was moved while it was opened ({error}); try again", path=str(path)) from error
        if self.files.first != before:
            raise Determinate(f"{path} was replaced while it was opened; try again", path=str(path))

    def check_in_place(self, happened: str = UNTOUCHED) -> None:
        """Raise HistoryRegressed unless the open files are at their paths. `happened` says what was done before."""
        if self.files is not None:
            self.files.check(happened)

    def close(self, force: bool = False) -> None:
        """Close it, and write the log back if this is the last connection to it.

        The log is not written back when one of the files was replaced. It then belongs to another history than
        the database at the path, and would overwrite that.
        """
        if self.files is not None and self.files.moved() is not None:
            self.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        super().close(force)


def connect(path: Path, when_busy: Callable[[int], bool] | None, layout: Layout = CONSENSUS) -> Connection:
    """Open a connection whose acknowledged commits survive a power cut. Does not create the database.

    `when_busy` is SQLite's busy handler: it gets the number of prior calls, and returns whether to continue waiting.
    None: it only reads, and writes neither the database nor its log nor its shared memory. These files must exist.
    """
    before = find_identity(path)
    url = _url(path, "ro") + "&readonly_shm=1" if when_busy is None else _url(path, "rw")
    mode = apsw.SQLITE_OPEN_READONLY if when_busy is None else apsw.SQLITE_OPEN_READWRITE
    connection = Connection(url, flags=mode | apsw.SQLITE_OPEN_URI)
    try:
        if when_busy is not None:
            # First of all, because another process may be recovering the log already at the first read.
            connection.set_busy_handler(when_busy)
            # WAL with synchronous below FULL, and FULL without WAL, lose acknowledged commits.
            # One by one: of several in one string, those after the first one that returns a row do not run.
            connection.pragma("journal_mode", "wal")
            connection.pragma("synchronous", "full")
            connection.pragma("wal_autocheckpoint", CHECKPOINT_PAGES)
            connection.pragma("journal_size_limit", LOG_LIMIT_BYTES)
            connection.pragma("secure_delete", True)  # what is truncated is gone, and does not stay in free pages
        # Check again: an upgrade may still be in the log, which `check_format` does not read.
        _check_ids(connection.pragma("application_id"), connection.pragma("user_version"), path, layout)
        connection.find_files(path, before)
    except BaseException:
        connection.close()
        raise
    return connection


def find_identity(path: Path) -> Identity:
    """Return the identity of the file at `path`. Raises Determinate when that cannot be told."""
    try:
        return identity_of(str(path))
    except OSError as error:
        raise Determinate(f"could not open the SQLite database {path}: {error}", path=str(path)) from error


def open_immutable(path: Path) -> apsw.Connection:
    """Open a connection that reads the database file alone, as if it never changed: without locks and its log."""
    url = _url(path, "ro") + "&immutable=1"
    return apsw.Connection(url, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _url(path: Path, mode: str) -> str:
    return f"file:{quote(str(path))}?mode={mode}"


def row_of(found: tuple[object, object], key: str, path: Path) -> Row:
    """Return a row that was read. Raises Corrupt if its types are wrong: SQLite keeps any type in any column."""
    seqno, data = found
    if type(seqno) is int and type(data) is bytes:
        return Row(SeqNo(seqno), data)
    raise Corrupt(
        f"the SQLite database {path} is damaged: of {key!r} it has a row with {shown(data)} at {shown(seqno)}, where "
        "bytes belong. Restore it from a copy",
        key=key, expected="bytes", actual=type(data).__name__,
    )  # fmt: skip


def key_of(found: object, path: Path) -> str:
    """Return a key that was read. Raises Corrupt if it is no text."""
    if type(found) is str:
        return found
    raise Corrupt(
        f"the SQLite database {path} is damaged: a key in it is {shown(found)}, and no text. Restore it from a copy",
        key=str(path), expected="text", actual=type(found).__name__,
    )  # fmt: skip


def heads_of(found: list[tuple[object, object]], path: Path) -> dict[str, SeqNo]:
    """Return the newest seqnos that were read. Raises Corrupt if their types, or those of their keys, are wrong."""
    return {key_of(key, path): row_of((seqno, b""), str(key), path).seqno for key, seqno in found}


def read_failed(error: Exception, path: Path) -> PersistError:
    """Return the error for a failed read: Corrupt for damage, else Determinate, as a read changes nothing."""
    if isinstance(error, DAMAGED):
        return Corrupt(
            f"the SQLite database {path} is damaged ({error}); restore it from a copy", key=str(path), expected=None,
            actual=str(error),
        )  # fmt: skip
    return Determinate(f"could not read the SQLite database {path}: {error}", path=str(path))


def write_failed(error: Exception, path: Path, code: int = 0) -> PersistError:
    """Return the error for a failed write; `code` is the errno. Only failures before the commit are determinate.

    An I/O error may have come after the last frame of the log was written: a recovery would then find the commit.
    This does not hold for a write that found no room. The frame that makes a commit is the last write before
    the sync, and a frame that was not written whole does not count: its checksum is wrong.
    """
    is_write = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_WRITE
    if isinstance(error, apsw.FullError) or (is_write and code in NO_ROOM):
        cause = OSError(code, os.strerror(code)) if code in NO_ROOM else None
        if (full := no_room("a row", path, cause)) is not None:
            return full
    if isinstance(error, DAMAGED):
        return read_failed(error, path)
    if isinstance(error, apsw.TooBigError):
        return InvalidUsage(f"a row is too large for the SQLite database {path}; nothing was written", path=str(path))
    if isinstance(error, NEVER_BEGAN):
        return Determinate(f"could not begin to write to the SQLite database {path}: {error}", path=str(path))
    return Indeterminate(f"writing to the SQLite database {path} may have failed: {error}", path=str(path))
