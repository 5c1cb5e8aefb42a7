"""A SQLite database that this process reads and writes, for a consensus and for event logs.

It is read and written where its files are: what is done to a file that was replaced is never acknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from persist_lib.errors import Determinate
from persist_lib.location.in_place import UNTOUCHED, Identity, check_same, moved_away
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.sqlite.connections import Connections, Session
from persist_lib.location.wrap.deadline import patience_s
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


class Database:
    """The database at `path`, which exists. A write waits at most `busy_s` seconds for the write lock.

    It does not wait beyond the caller's deadline; then it raises Determinate.
    """

    def __init__(
        self, path: Path, runtime: Runtime, name: str, layout: sqlite_file.Layout = sqlite_file.CONSENSUS,
        busy_s: float = BUSY_S,
    ) -> None:  # fmt: skip
        self.path, self._runtime, self._layout, self.busy_s = path, runtime, layout, busy_s
        self.connections = Connections(self._connect, name)
        self.turn = threading.Lock()
        self._first_opened: Identity | None = None

    def _connect(self) -> apsw.Connection:
        if self._first_opened is not None:
            check_same(str(self.path), self._first_opened)
        try:
            connection = sqlite_file.connect(self.path, Patience(self._runtime, self.busy_s), self._layout)
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

    def read(self, sql: str, values: tuple[str | int | bytes, ...]) -> list[Any]:
        """Return the rows of a query. Raises Determinate, Corrupt, or HistoryRegressed if the files were replaced."""

        def read(session: Session) -> list[Any]:
            try:
                rows = session.cursor.execute(sql, values).fetchall()
            except sqlite_file.FAILURES as error:
                check_in_place(session)  # raises the likeliest cause first
                raise sqlite_file.read_failed(error, self.path) from error
            check_in_place(session)  # after the read: so the file was in place during it
            return rows

        return self.connections.use(read)

    def transact(self, work: Callable[[Session], T | None]) -> T | None:
        """Run `work` in a transaction, and return what it answers. If that is None, nothing is changed."""

        def commit(session: Session) -> T | None:
            if (done := work(session)) is not None:
                check_in_place(session)
                session.cursor.execute("COMMIT")
                # Check again, so that a commit to a file that was replaced during it is never acknowledged.
                check_in_place(session, IN_DOUBT)
            return done

        return self.write(lambda session: transaction(session, lambda: commit(session)))

    def write(self, work: Callable[[Session], T]) -> T:
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
