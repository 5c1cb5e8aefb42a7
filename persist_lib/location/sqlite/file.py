"""The database file of `SqliteConsensus`: made whole or not at all, recognised before it is touched, errors understood.

What it holds is told by the header of the file itself: `application_id` says that it is ours, `user_version` is the
version of its format. Both are read before SQLite makes any file beside the database.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import apsw

from persist_lib.arguments import shown
from persist_lib.errors import (
    Corrupt,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NewerFormat,
    NotFound,
    PersistError,
)
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.directories import NO_ROOM, fsync_directory, no_room
from persist_lib.location.in_place import UNTOUCHED, Identity, InPlace, identity_of

APPLICATION_ID = 0x50525354  # "PRST"
FORMAT = 1
MAGIC = b"SQLite format 3\0"
HEADER_BYTES = 100
CHECKPOINT_PAGES = 1000
"""The log is written back to the database about every 4 MiB (some hundred commits), and then overwritten in place."""
LOG_LIMIT_BYTES = 64 * 1024 * 1024
"""A log that grew because somebody read for long is cut back to this."""

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
"""What SQLite answers when it cannot have a lock, open the file, or write to it. A commit to the log answers none."""


def create(path: Path, entropy: Callable[[], int]) -> None:
    """Make the database at `path`, durably, unless there is one. `entropy` draws a name that nobody else uses."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{entropy():016x}")
    try:
        connection = apsw.Connection(str(temporary))
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", FORMAT)
        connection.execute(SCHEMA)
        connection.pragma("journal_mode", "wal")
        connection.close()
        os.link(temporary, path)
        fsync_directory(path.parent)
    except FileExistsError:
        return  # somebody else made it meanwhile
    except (OSError, apsw.Error) as error:
        raise Determinate(f"could not create the SQLite database {path}: {error}", path=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    """Refuse a database that is missing, foreign, or of a newer release; nothing is written, not even beside it.

    SUBTLE: never read the file with `open`. Closing any descriptor of a file drops all POSIX locks that the process has
    on it, also those of its SQLite connections; SQLite's own file object knows. And only the header is looked at, which
    never changes there: the pages behind it are torn while another process writes its log back.
    """
    if not path.exists():
        raise NotFound(f"there is no SQLite database {path}; create the location first", path=str(path))
    try:
        file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0])
        header = file.xRead(HEADER_BYTES, 0)
        file.xClose()
    except apsw.Error as error:
        raise read_failed(error, path) from error
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise read_failed(apsw.NotADBError("file is not a database"), path)
    version, application = (int.from_bytes(header[at : at + 4]) for at in (60, 68))
    _check_ids(application, version, path)


def _check_pragmas(connection: apsw.Connection, path: Path) -> None:
    _check_ids(connection.pragma("application_id"), connection.pragma("user_version"), path)


def _check_ids(application: int, found: int, path: Path) -> None:
    if application != APPLICATION_ID:
        raise InvalidUsage(
            f"{path} is an SQLite database, but not one of Persist's; nothing was touched", path=str(path)
        )
    if found > FORMAT:
        raise NewerFormat(
            f"{path} has format {found}, this release knows up to {FORMAT}; nothing was touched. Upgrade persist-lib",
            found=found, known=FORMAT,
        )  # fmt: skip


class Connection(apsw.Connection):
    """A connection that knows whether its database, log and shared memory are still what their paths lead to."""

    files: InPlace | None = None

    def find_files(self, path: Path, before: Identity) -> None:
        """Remember what is open, after something was read, so that all of it is.

        Raises Determinate when it was replaced in the meantime: then nobody knows which one is open.
        """
        try:
            self.files = InPlace((str(path), self.filename_wal, f"{self.filename}-shm"))
        except OSError as error:
            raise Determinate(f"{path} was moved while it was opened ({error}); try again", path=str(path)) from error
        if self.files.first != before:
            raise Determinate(f"{path} was replaced while it was opened; try again", path=str(path))

    def check_in_place(self, happened: str = UNTOUCHED) -> None:
        """Raise HistoryRegressed unless all that is open is still at its path. `happened` says what was done before."""
        if self.files is not None:
            self.files.check(happened)

    def close(self, force: bool = False) -> None:
        """Close it, and write the log back if this is the last connection to it.

        SUBTLE: not when one of the files was replaced. The log that is open here is then of another history than the
        database at the path, and would be written over it.
        """
        if self.files is not None and self.files.moved() is not None:
            self.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        super().close(force)


def connect(path: Path, when_busy: Callable[[int], bool]) -> Connection:
    """A connection whose acknowledged commits survive a power cut. Does not create the database."""
    before = find_identity(path)
    connection = Connection(_url(path, "rw"), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_URI)
    try:
        # First of all: the first look at the file may already meet somebody who recovers its log.
        connection.set_busy_handler(when_busy)
        # WAL with synchronous below FULL, and FULL without WAL, lose acknowledged commits.
        # SUBTLE: one by one; of several in one string, those after the first that answers a row are not run.
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "full")
        connection.pragma("wal_autocheckpoint", CHECKPOINT_PAGES)
        connection.pragma("journal_size_limit", LOG_LIMIT_BYTES)
        # Once more: an upgrade may still be in the log, which the immutable look at the header does not see.
        _check_pragmas(connection, path)
        connection.find_files(path, before)
    except BaseException:
        connection.close()
        raise
    return connection


def find_identity(path: Path) -> Identity:
    """Which file is at the path. Raises Determinate when that cannot be told."""
    try:
        return identity_of(str(path))
    except OSError as error:
        raise Determinate(f"could not open the SQLite database {path}: {error}", path=str(path)) from error


def connect_read_only(path: Path) -> Connection:
    """A connection that writes neither the database nor its log nor its shared memory; both must exist."""
    before = find_identity(path)
    url = _url(path, "ro") + "&readonly_shm=1"
    connection = Connection(url, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        _check_pragmas(connection, path)
        connection.find_files(path, before)
    except BaseException:
        connection.close()
        raise
    return connection


def open_immutable(path: Path) -> apsw.Connection:
    """A connection that sees the database file alone, as if nobody ever wrote: without locks and without its log."""
    url = _url(path, "ro") + "&immutable=1"
    return apsw.Connection(url, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _url(path: Path, mode: str) -> str:
    return f"file:{quote(str(path))}?mode={mode}"


def row_of(found: tuple[object, object], key: str, path: Path) -> Row:
    """A row as it was read; Corrupt where it does not hold what is written there: SQLite keeps any type anywhere."""
    seqno, data = found
    if type(seqno) is int and type(data) is bytes:
        return Row(SeqNo(seqno), data)
    raise Corrupt(
        f"the SQLite database {path} is damaged: of {key!r} it has a row with {shown(data)} at {shown(seqno)}, where "
        "bytes belong. Restore it from a copy",
        key=key, expected="bytes", actual=type(data).__name__,
    )  # fmt: skip


def key_of(found: object, path: Path) -> str:
    """A key as it was read; Corrupt where it is no text."""
    if type(found) is str:
        return found
    raise Corrupt(
        f"the SQLite database {path} is damaged: a key in it is {shown(found)}, and no text. Restore it from a copy",
        key=str(path), expected="text", actual=type(found).__name__,
    )  # fmt: skip


def read_failed(error: apsw.Error, path: Path) -> PersistError:
    """What a failed read means: it changed nothing, whatever it was."""
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return Corrupt(
            f"the SQLite database {path} is damaged ({error}); restore it from a copy", key=str(path), expected=None,
            actual=str(error),
        )  # fmt: skip
    return Determinate(f"could not read the SQLite database {path}: {error}", path=str(path))


def write_failed(error: apsw.Error, path: Path, code: int = 0) -> PersistError:
    """What a failed write means; `code` is the system's for it. Only what comes before the commit is determinate.

    An I/O error may have come after the last frame of the log was written: a recovery would find it. SUBTLE: not one
    that says that a write found no room. The frame that makes a commit is the last thing that is written before the
    sync, and one that was not written whole is none: its checksum tells.
    """
    is_write = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_WRITE
    if isinstance(error, apsw.FullError) or (is_write and code in NO_ROOM):
        cause = OSError(code, os.strerror(code)) if code in NO_ROOM else None
        if (full := no_room("a row", path, cause)) is not None:
            return full
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return read_failed(error, path)
    if isinstance(error, apsw.TooBigError):
        return InvalidUsage(f"a row is too large for the SQLite database {path}; nothing was written", path=str(path))
    if isinstance(error, NEVER_BEGAN):
        return Determinate(f"could not begin to write to the SQLite database {path}: {error}", path=str(path))
    return Indeterminate(f"writing to the SQLite database {path} may have failed: {error}", path=str(path))
