"""Reading a `SqliteConsensus` database without writing anything, not even the files SQLite keeps beside it.

SUBTLE: opening a database in write-ahead mode read-only still creates `-wal` and `-shm`. So there are two ways to read.
If a log exists, another process uses the database or was killed while using it: then it is read with locks, on the
existing shared memory. If no log exists, the database file holds everything: then it is read as immutable, and read
again if it changed during the read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw

from persist_lib.errors import Determinate, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.clock import Clock, machine_clock, now_ms
from persist_lib.location.contract import check_limit
from persist_lib.location.in_place import check_same
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.sqlite.connections import Connections, Session
from persist_lib.location.sqlite.consensus import BUSY_S, KEYS, NEWEST, SCAN, check_in_place, heads_query
from persist_lib.location.wrap.read_only import RefusesWrites

ATTEMPTS = 50


class ReadOnlySqliteConsensus(RefusesWrites):
    """The reading half of `SqliteConsensus`. Operations that would write raise InvalidUsage."""

    def __init__(self, path: Path | str, *, clock: Clock = machine_clock) -> None:
        self._path = Path(path).absolute()
        self._log = self._path.with_name(self._path.name + "-wal")
        self._clock = clock
        self._connections = Connections(self._connect, f"the SQLite database {self._path}", only_reads=True)
        self._connections.under_way(lambda: sqlite_file.check_format(self._path))
        self._first_seen = sqlite_file.find_identity(self._path)

    def _connect(self) -> apsw.Connection:
        connection = sqlite_file.connect_read_only(self._path)
        connection.set_busy_timeout(int(BUSY_S * 1000))
        return connection

    def head(self, key: str) -> Row | None:
        rows = self._read(NEWEST, (key,))
        return sqlite_file.row_of(rows[0], key, self._path) if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        check_limit(limit)
        return [sqlite_file.row_of(row, key, self._path) for row in self._read(SCAN, (key, from_seqno, limit))]

    def list_keys(self) -> Iterator[str]:
        return iter([sqlite_file.key_of(key, self._path) for (key,) in self._read(KEYS, ())])

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        return sqlite_file.heads_of(self._read(*heads_query(keys)), self._path)

    def _read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                rows = self._read_locked(sql, values) if self._log.exists() else self._read_still(sql, values)
            except (*sqlite_file.FAILURES, OSError) as error:
                check_same(str(self._path), self._first_seen)
                failure = error  # the log came or went between looking and opening
                continue
            if rows is not None:
                check_same(str(self._path), self._first_seen)
                return rows
        raise self._failed(failure)

    def _read_locked(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        def read(session: Session) -> list[Any]:
            rows = session.cursor.execute(sql, values).fetchall()
            check_in_place(session)
            return rows

        return self._connections.use(read)

    def _read_still(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any] | None:
        """Return the rows, or None when another process opened or changed the database during the read."""
        before = _identity(self._path)

        def read() -> list[Any]:
            with closing(sqlite_file.open_immutable(self._path)) as connection:
                return connection.execute(sql, values).fetchall()

        rows = self._connections.under_way(read)
        # In this order: a process that changes the database has a log, and removes it after its last change.
        return rows if not self._log.exists() and _identity(self._path) == before else None

    def _failed(self, failure: Exception | None) -> PersistError:
        if isinstance(failure, apsw.CantOpenError):
            return Determinate(
                f"the SQLite database {self._path} has a write-ahead log, but its -shm file is missing: it was copied "
                "while in use. Open it once for writing, or copy it after closing",
                path=str(self._path),
            )
        if isinstance(failure, OSError):
            return Determinate(f"could not read the SQLite database {self._path}: {failure}", path=str(self._path))
        if failure is not None:
            return sqlite_file.read_failed(failure, self._path)
        return Determinate(
            f"the database {self._path} changed during each of {ATTEMPTS} attempts to read it", path=str(self._path)
        )

    def now(self) -> int:
        return now_ms(self._clock)

    def close(self) -> None:
        self._connections.close()


def _identity(path: Path) -> tuple[int, int, int]:
    """Return values of which at least one changes when the file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
