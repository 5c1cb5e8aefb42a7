"""Consensus in an SQLite database: the embedded default, durable on return, safe among threads and processes.

A compare-and-set is one statement and therefore one transaction. So an interrupt can never leave one half done, and it
reads nothing that its correctness does not need.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw

from persist_lib.errors import Determinate, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Row
from persist_lib.location.contract import (
    Clock,
    check_limit,
    is_newest,
    machine_clock,
    not_in_log,
    now_ms,
    passes_newest,
)
from persist_lib.location.in_place import check_same
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.sqlite.connections import BUSY_S, IN_DOUBT, Connections, Database, Session, check_in_place
from persist_lib.location.wrap.around import RefusesWrites
from persist_lib.runtime.ambient import Runtime

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
    def read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        """Return the rows of a query. Raises Determinate, Corrupt, or HistoryRegressed if the files were replaced."""

    def head(self, key: str) -> Row | None:
        """Return the newest row, or None when the key was never set. It is never stale here."""
        rows = self.read(NEWEST, (key,))
        return sqlite_file.row_of(rows[0], key, self.path) if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        check_limit(limit)
        return [sqlite_file.row_of(row, key, self.path) for row in self.read(SCAN, (key, from_seqno, limit))]

    def list_keys(self) -> Iterator[str]:
        return iter([sqlite_file.key_of(key, self.path) for (key,) in self.read(KEYS, ())])

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        found = self.read(HEADS, ()) if keys is None else self.read(HEADS_OF, (json.dumps(list(keys)),))
        return sqlite_file.heads_of(found, self.path)

    def now(self) -> int:
        return now_ms(self._clock)

    def close(self) -> None:
        self.connections.close()


class SqliteConsensus(Database, SqliteReads):
    """Rows in the table `consensus` of the database at `path`.

    `truncate` never deletes a key's newest row, so it cannot make a key look new.
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
        path, self._clock = Path(path).absolute(), clock
        super().__init__(path, runtime or Runtime(), f"the SQLite database {path}", busy_s=busy_s)
        self.connections.under_way(lambda: self._prepare(create=create))

    def _prepare(self, *, create: bool) -> None:
        if create:
            sqlite_file.create(self.path, self._runtime.entropy)
        sqlite_file.check_format(self.path)

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

        return self.write(append)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:

        def append_all(session: Session) -> bool | None:
            won = all(_append(session, key, expected, data) for key, (expected, data) in changes.items())
            return won or None

        return not changes or self.transact(append_all) is True

    def truncate(self, key: str, seqno: SeqNo) -> int:

        def drop(session: Session) -> int:
            newest: SeqNo | None = session.cursor.execute(NEWEST_SEQNO, (key,)).get
            if newest is None or seqno > newest:
                raise passes_newest(key, seqno, newest)
            session.cursor.execute(TRUNCATE, (key, seqno))
            return session.connection.changes()

        return self.transact(drop) or 0

    def overwrite(self) -> str:
        """Write the log into the database, whose deleted rows are overwritten, and empty it."""
        busy, *_ = self.connections.use(
            lambda session: session.cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0]
        )
        return f"other programs are reading {self.path.name}-wal, in which rows are that were deleted" if busy else ""

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:

        def take_back(session: Session) -> int | None:
            found = [Row(*row) for row in session.cursor.execute(NEWEST, (key,))]
            if not found or not is_newest(newest, found[0]):
                return None
            if seqno and (
                seqno > newest.seqno or session.cursor.execute(SCAN, (key, seqno, 1)).fetchall()[0][0] != seqno
            ):
                raise not_in_log(key, seqno)
            session.cursor.execute(REWIND, (key, seqno))
            return session.connection.changes()

        return self.transact(take_back) or 0


def _append(session: Session, key: str, expected: Newest | None, data: bytes) -> bool:
    if expected is None:
        session.cursor.execute(CREATE, (key, data))
    else:
        session.cursor.execute(APPEND, (key, expected.seqno, data, expected.start))
    return bool(session.connection.changes())


ATTEMPTS, AT_ONCE, PAUSE_S = 60, 20, 0.05
"""How often a reader looks, how many of these looks are made without a pause, and the pause before each later one."""


class ReadOnlySqliteConsensus(RefusesWrites, SqliteReads):
    """The reading half of `SqliteConsensus`, which writes nothing, not even the files SQLite keeps beside a database.

    Opening a database in write-ahead mode read-only still creates `-wal` and `-shm`. So there are two ways to
    read. If a log exists, another process uses the database or was killed while using it: then it is read with locks,
    on the existing shared memory. If no log exists, the database file holds everything: then it is read as immutable,
    and read again if it changed during the read. SQLite's last process takes the shared memory away before the log: a
    reader that comes between the two waits for it, as that process may be waiting for a busy machine.
    """

    def __init__(self, path: Path | str, *, clock: Clock = machine_clock, runtime: Runtime | None = None) -> None:
        self.path = Path(path).absolute()
        self._runtime = runtime or Runtime()
        self._log = self.path.with_name(self.path.name + "-wal")
        self._clock = clock
        self.connections = Connections(self._connect, f"the SQLite database {self.path}", only_reads=True)
        self.connections.under_way(lambda: sqlite_file.check_format(self.path))
        self._first_seen = sqlite_file.find_identity(self.path)

    def _connect(self) -> apsw.Connection:
        connection = sqlite_file.connect(self.path, None)
        connection.set_busy_timeout(int(BUSY_S * 1000))
        return connection

    def read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        failure: Exception | None = None
        for number in range(ATTEMPTS):
            if number >= AT_ONCE and isinstance(failure, apsw.CantOpenError):
                self._runtime.sleep(PAUSE_S)
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
