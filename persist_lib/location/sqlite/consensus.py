"""Consensus in an SQLite database: the embedded default, durable on return, safe among threads and processes.

A compare-and-set is one statement and therefore one transaction. So an interrupt can never leave one half done, and it
reads nothing that its correctness does not need.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import apsw

from persist_lib.errors import Determinate, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Row
from persist_lib.location.clock import Clock, machine_clock, now_ms
from persist_lib.location.contract import check_limit, is_newest, not_in_log, passes_newest
from persist_lib.location.in_place import UNTOUCHED, Identity, check_same, moved_away
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.sqlite.connections import Connections, Session
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.location.wrap.read_only import RefusesWrites
from persist_lib.runtime.ambient import Backoff, Deadline, Runtime
from persist_lib.runtime.threads import Lock, taking

T = TypeVar("T")
BUSY_S = 10.0
"""How long to wait for the one write lock. A transaction holds it for less than a millisecond."""
FIRST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.004

IN_DOUBT = (
    "A change was committed to what this process has open, and it is not known whether it is also in what is there "
    "now: delete nothing that it refers to"
)

NEWEST = "SELECT seqno, data FROM consensus WHERE key = ? ORDER BY seqno DESC LIMIT 1"
NEWEST_SEQNO = "SELECT seqno FROM consensus WHERE key = ? ORDER BY seqno DESC LIMIT 1"
SCAN = "SELECT seqno, data FROM consensus WHERE key = ? AND seqno >= ? ORDER BY seqno LIMIT ?"
CREATE = """
INSERT INTO consensus (key, seqno, data)
SELECT ?1, 1, ?2 WHERE NOT EXISTS (SELECT 1 FROM consensus WHERE key = ?1)
"""
# As seqnos are contiguous, `expected` is the newest row if it exists and its successor does not. Its start tells it
# from another row that took its place after an older copy was restored. If it is missing, there is no seqno to insert
# at; if it has a successor, the seqno is taken. Both cases insert nothing. (The substr of an empty blob is null.)
APPEND = """
INSERT OR IGNORE INTO consensus (key, seqno, data) VALUES (?1, (
    SELECT seqno + 1 FROM consensus
    WHERE key = ?1 AND seqno = ?2 AND ifnull(substr(data, 1, length(?4)), x'') = ?4
), ?3)
"""
TRUNCATE = "DELETE FROM consensus WHERE key = ? AND seqno < ?"
REWIND = "DELETE FROM consensus WHERE key = ? AND seqno > ?"
# DISTINCT and GROUP BY would read the index of every row; this seeks from key to key.
FOUND = """
WITH RECURSIVE found (key) AS (
    SELECT min(key) FROM consensus
    UNION ALL SELECT (SELECT min(key) FROM consensus WHERE key > found.key) FROM found WHERE found.key IS NOT NULL
)"""
KEYS = f"{FOUND} SELECT key FROM found WHERE key IS NOT NULL"  # noqa: S608 - of constants
NEWEST_OF = "SELECT max(seqno) FROM consensus WHERE key = found.key"
HEADS = f"{FOUND} SELECT key, ({NEWEST_OF}) FROM found WHERE key IS NOT NULL"  # noqa: S608 - of constants
HEADS_OF = """
WITH found (key, seqno) AS (SELECT value, (SELECT max(seqno) FROM consensus WHERE key = value) FROM json_each(?))
SELECT key, seqno FROM found WHERE seqno IS NOT NULL"""


class SqliteReads(ABC):
    """The reading operations of a Consensus in SQLite, over one that runs a query."""

    path: Path
    connections: Connections
    _clock: Clock

    @abstractmethod
    def _read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        """Return the rows of a query. Raises Determinate, Corrupt, or HistoryRegressed if the files were replaced."""

    def head(self, key: str) -> Row | None:
        """Return the newest row, or None when the key was never set. It is never stale here."""
        rows = self._read(NEWEST, (key,))
        return sqlite_file.row_of(rows[0], key, self.path) if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        check_limit(limit)
        return [sqlite_file.row_of(row, key, self.path) for row in self._read(SCAN, (key, from_seqno, limit))]

    def list_keys(self) -> Iterator[str]:
        """Return an iterator over the keys that exist at the time of the call."""
        return iter([sqlite_file.key_of(key, self.path) for (key,) in self._read(KEYS, ())])

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        found = self._read(HEADS, ()) if keys is None else self._read(HEADS_OF, (json.dumps(list(keys)),))
        return sqlite_file.heads_of(found, self.path)

    def now(self) -> int:
        """Return the time of this machine's clock, in ms since the epoch."""
        return now_ms(self._clock)

    def close(self) -> None:
        self.connections.close()


class SqliteConsensus(SqliteReads):
    """Rows in the table `consensus` of the database at `path`.

    `truncate` never deletes a key's newest row, so it cannot make a key look new. A write waits at most `busy_s`
    seconds for the write lock, and not beyond the caller's deadline; then it raises Determinate.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        create: bool = True,
        clock: Clock = machine_clock,
        runtime: Runtime | None = None,
        busy_s: float = BUSY_S,
    ) -> None:
        self.path = Path(path).absolute()
        self._clock = clock
        self._runtime = runtime or Runtime()
        self.busy_s = busy_s
        self.connections = Connections(self._connect, f"the SQLite database {self.path}")
        self.connections.under_way(lambda: self._prepare(create=create))
        self.turn = threading.Lock()
        self._first_opened: Identity | None = None

    def _prepare(self, *, create: bool) -> None:
        if create:
            sqlite_file.create(self.path, self._runtime.entropy)
        sqlite_file.check_format(self.path)

    def _connect(self) -> apsw.Connection:
        if self._first_opened is not None:
            check_same(str(self.path), self._first_opened)
        try:
            connection = sqlite_file.connect(self.path, Patience(self._runtime, self.busy_s))
        except apsw.Error as error:
            raise sqlite_file.read_failed(error, self.path) from error
        opened = connection.files.first if connection.files is not None else None
        if self._first_opened is not None and opened != self._first_opened:
            connection.close()
            raise moved_away(str(self.path))
        self._first_opened = opened
        return connection

    def check_in_place(self) -> None:
        self.connections.use(check_in_place)

    def _read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        def read(session: Session) -> list[Any]:
            try:
                rows = session.cursor.execute(sql, values).fetchall()
            except sqlite_file.FAILURES as error:
                check_in_place(session)  # raises the likeliest cause first
                raise sqlite_file.read_failed(error, self.path) from error
            check_in_place(session)  # after the read: so the file was in place during it
            return rows

        return self.connections.use(read)

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        """Append `data` if `expected` is the newest row. Returns whether it did.

        An interrupt that arrives during it is raised after it; the log then shows whether the row was appended.
        """

        def append(session: Session) -> bool:
            check_in_place(session)
            won = _append(session, key, expected, data)
            # Check again, so that a commit to a file that was replaced during it is never acknowledged.
            check_in_place(session, IN_DOUBT)
            return won

        return self._write(append)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        if not changes:
            return True

        def append_all(session: Session) -> bool:
            if not all(_append(session, key, expected, data) for key, (expected, data) in changes.items()):
                return False
            check_in_place(session)
            session.cursor.execute("COMMIT")
            check_in_place(session, IN_DOUBT)
            return True

        return self._write(lambda session: transaction(session, lambda: append_all(session)))

    def truncate(self, key: str, seqno: SeqNo) -> int:

        def drop(session: Session) -> int:
            newest: SeqNo | None = session.cursor.execute(NEWEST_SEQNO, (key,)).get
            if newest is None or seqno > newest:
                raise passes_newest(key, seqno, newest)
            session.cursor.execute(TRUNCATE, (key, seqno))
            dropped = session.connection.changes()
            check_in_place(session)
            session.cursor.execute("COMMIT")
            return dropped

        return self._write(lambda session: transaction(session, lambda: drop(session)))

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:

        def take_back(session: Session) -> int:
            found = [Row(*row) for row in session.cursor.execute(NEWEST, (key,))]
            if not found or not is_newest(newest, found[0]):
                return 0
            if seqno and (
                seqno > newest.seqno or session.cursor.execute(SCAN, (key, seqno, 1)).fetchall()[0][0] != seqno
            ):
                raise not_in_log(key, seqno)
            session.cursor.execute(REWIND, (key, seqno))
            taken = session.connection.changes()
            check_in_place(session)
            session.cursor.execute("COMMIT")
            return taken

        return self._write(lambda session: transaction(session, lambda: take_back(session)))

    def _write(self, work: Callable[[Session], T]) -> T:
        """Run `work` with a session. One thread of this process writes at a time, and the others wait here."""
        deadline: Deadline | None = None
        while True:
            try:
                return self.connections.use(lambda session: self._in_turn(session, work))
            except Determinate as error:
                is_read_only = isinstance(error.__cause__, apsw.ReadOnlyError)
                deadline = deadline or self._runtime.deadline(patience_s(self.busy_s))
                if not is_read_only or deadline.has_passed() or not self.connections.make_writable(deadline):
                    raise

    def _in_turn(self, session: Session, work: Callable[[Session], T]) -> T:
        """Run `work` while holding `turn`. It is only held while a session is lent, so no fork finds it held."""
        seconds, held = patience_s(self.busy_s), list[Lock]()
        try:
            held += taking(self.turn, seconds)
            if not held:
                raise Determinate(
                    f"waited {seconds:g} s for this process's other writers of {self.path}; nothing was written"
                )
            return work(session)
        except sqlite_file.FAILURES as error:
            raise sqlite_file.write_failed(error, self.path, session.connection.system_errno) from error
        finally:
            if held:
                self.turn.release()


def check_in_place(session: Session, happened: str = UNTOUCHED) -> None:
    """Raise HistoryRegressed unless the session's files are still at their paths. `happened` is for the message."""
    connection = session.connection
    if isinstance(connection, sqlite_file.Connection):
        connection.check_in_place(happened)


def _append(session: Session, key: str, expected: Newest | None, data: bytes) -> bool:
    if expected is None:
        session.cursor.execute(CREATE, (key, data))
    else:
        session.cursor.execute(APPEND, (key, expected.seqno, data, expected.start))
    return bool(session.connection.changes())


class Patience:
    """SQLite's busy handler: short jittered pauses, where its own would sleep 1 to 100 ms for a lock of 0.3 ms."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime = runtime
        self._deadline, self._backoff = Deadline(runtime, seconds, 0.0), Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.3)
        self._seconds = seconds

    def __call__(self, prior_calls: int) -> bool:
        if prior_calls == 0:
            self._deadline = self._runtime.deadline(patience_s(self._seconds))
            self._backoff.reset()
        if self._deadline.has_passed():
            return False
        self._deadline.pause(self._backoff.take())
        return True


def transaction(session: Session, work: Callable[[], T]) -> T:
    """Run `work` in a transaction. `work` commits it itself; otherwise it is rolled back.

    BEGIN IMMEDIATE, because a deferred transaction would fail at its first write if another writer has committed since
    its begin. This also ends it after KeyboardInterrupt, before or after the commit; SQLite itself knows which
    it was. If rolling back fails, `Connections.use` closes the connection.
    """
    try:
        session.cursor.execute("BEGIN IMMEDIATE")
        return work()
    finally:
        if session.connection.in_transaction:
            session.cursor.execute("ROLLBACK")


ATTEMPTS = 50


class ReadOnlySqliteConsensus(RefusesWrites, SqliteReads):
    """The reading half of `SqliteConsensus`, which writes nothing, not even the files SQLite keeps beside a database.

    Opening a database in write-ahead mode read-only still creates `-wal` and `-shm`. So there are two ways to
    read. If a log exists, another process uses the database or was killed while using it: then it is read with locks,
    on the existing shared memory. If no log exists, the database file holds everything: then it is read as immutable,
    and read again if it changed during the read.
    """

    def __init__(self, path: Path | str, *, clock: Clock = machine_clock) -> None:
        self.path = Path(path).absolute()
        self._log = self.path.with_name(self.path.name + "-wal")
        self._clock = clock
        self.connections = Connections(self._connect, f"the SQLite database {self.path}", only_reads=True)
        self.connections.under_way(lambda: sqlite_file.check_format(self.path))
        self._first_seen = sqlite_file.find_identity(self.path)

    def _connect(self) -> apsw.Connection:
        connection = sqlite_file.connect_read_only(self.path)
        connection.set_busy_timeout(int(BUSY_S * 1000))
        return connection

    def _read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                rows = self._read_locked(sql, values) if self._log.exists() else self._read_still(sql, values)
            except (*sqlite_file.FAILURES, OSError) as error:
                check_same(str(self.path), self._first_seen)
                failure = error  # the log came or went between looking and opening
                continue
            if rows is not None:
                check_same(str(self.path), self._first_seen)
                return rows
        raise self._failed(failure)

    def _read_locked(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        def read(session: Session) -> list[Any]:
            rows = session.cursor.execute(sql, values).fetchall()
            check_in_place(session)
            return rows

        return self.connections.use(read)

    def _read_still(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any] | None:
        """Return the rows, or None when another process opened or changed the database during the read."""
        before = _identity(self.path)

        def read() -> list[Any]:
            with closing(sqlite_file.open_immutable(self.path)) as connection:
                return connection.execute(sql, values).fetchall()

        rows = self.connections.under_way(read)
        # In this order: a process that changes the database has a log, and removes it after its last change.
        return rows if not self._log.exists() and _identity(self.path) == before else None

    def _failed(self, failure: Exception | None) -> PersistError:
        if isinstance(failure, apsw.CantOpenError):
            return Determinate(
                f"the SQLite database {self.path} has a write-ahead log, but its -shm file is missing: it was copied "
                "while in use. Open it once for writing, or copy it after closing",
                path=str(self.path),
            )
        if isinstance(failure, OSError):
            return Determinate(f"could not read the SQLite database {self.path}: {failure}", path=str(self.path))
        if failure is not None:
            return sqlite_file.read_failed(failure, self.path)
        return Determinate(
            f"the database {self.path} changed during each of {ATTEMPTS} attempts to read it", path=str(self.path)
        )


def _identity(path: Path) -> tuple[int, int, int]:
    """Return values of which at least one changes when the file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
