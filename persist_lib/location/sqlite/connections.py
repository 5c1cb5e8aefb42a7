"""Connections to one SQLite database. Each is lent to one thread at a time, and none is ever open across a fork.

SUBTLE: it is not enough that a forked child opens a connection of its own. SQLite remembers per process which locks it
holds on a file; the child inherits that memory but not the locks, so its new connection relies on locks that it does
not hold. When the parent closes, it believes itself alone and deletes the write-ahead log under the child, and what the
child commits and acknowledges from then on is lost. Therefore connections are closed *before* each fork.

A `Database`, of a consensus or of event logs, is read and written where its files are: what is done to a file that was
replaced is never acknowledged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import apsw

from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.location.in_place import UNTOUCHED, Identity, check_same, moved_away
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Backoff, Deadline, Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import SLICE_S, Bell, Lock, taking

T = TypeVar("T")

FORK_WAITS_S = 30.0
"""How long a fork waits for running operations. A transaction takes less than a millisecond, a scan a few."""


class Session:
    """One connection and its cursor, which keeps the statements prepared. One thread at a time uses it."""

    __slots__ = ("connection", "cursor")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()

    def close_only(self) -> None:
        """Close the connection, and leave the log to the next one."""
        self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.connection.close()


class _Loan:
    """One running use of SQLite, and its session, if it has one."""

    __slots__ = ("session",)

    def __init__(self) -> None:
        self.session: Session | None = None


class Connections:
    """Connections made by `connect` when needed, at most as many as threads have used at the same time.

    `only_reads`: they cannot write the files that SQLite keeps beside the database.
    """

    _every: ClassVar[WeakSet[Connections]] = WeakSet()

    def __init__(self, connect: Callable[[], apsw.Connection], name: str, *, only_reads: bool = False) -> None:
        self._connect = connect
        self.name = name
        self.only_reads = only_reads
        self._reset()
        self._every.add(self)
        self._closed = False
        enrol(self, Stage.STORES)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._gate = threading.Condition(self._mutex)  # only a forking thread waits for it
        self._bell = Bell(self._mutex)
        self._idle: list[Session] = []
        self._loans: set[_Loan] = set()
        self._pauses: set[object] = set()
        self._forking = False
        self._pid = os.getpid()

    def is_lent(self) -> bool:
        return bool(self._loans)

    def under_way(self, work: Callable[[], T]) -> T:
        """Run `work`, which uses SQLite without a session, and return its result. Forks wait for it too."""
        loan = _Loan()
        try:
            self._begin(loan)
            return work()
        finally:
            self._loans.discard(loan)
            self._tell_fork()

    def use(self, work: Callable[[Session], T]) -> T:
        """Run `work` with a session of its own and return its result. `work` must leave no open transaction.

        An interrupt can come after any call, also in here and in `finally`. So the loan is made first. It gets
        and gives back its session by instructions that call nothing, and it ends by the first call in `finally`.
        """
        loan = _Loan()
        try:
            self._begin(loan, has_session=True)
            if loan.session is None:
                loan.session = Session(self._connect())
            return work(loan.session)
        finally:
            # An open transaction means that even rolling back failed, so this connection is not used again.
            is_kept = loan.session is not None and not (self._closed or loan.session.connection.in_transaction)
            if is_kept:
                self._idle += (loan.session,)  # type: ignore[arg-type]
            self._loans.discard(loan)
            if loan.session is not None and not is_kept:
                loan.session.connection.close()
            self._tell_fork()

    def _begin(self, loan: _Loan, *, has_session: bool = False, in_pause: bool = False) -> None:
        while loan not in self._loans:
            while self._forking or (self._pauses and not in_pause):
                self._bell.wait(lambda: not (self._forking or self._pauses), SLICE_S)
            with self._mutex:
                self._check()
                if self._pauses and not in_pause:
                    continue
                self._loans.add(loan)
                if has_session and self._idle:
                    loan.session = self._idle[-1]
                    del self._idle[-1]

    def _tell_fork(self) -> None:
        if self._pauses:
            self._bell.ring()
        if self._forking:
            with self._mutex:
                self._gate.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise InvalidUsage(f"{self.name} was closed, by itself or with its client; open it again", name=self.name)
        if self._pid != os.getpid():
            raise InvalidUsage(
                f"{self.name} was open while native code forked this process (not os.fork), which SQLite cannot "
                "survive. Open locations after the fork",
                name=self.name,
            )

    def make_writable(self, deadline: Deadline) -> bool:
        """Open a connection that writes, although others of this process to this database only read.

        SQLite opens the shared memory of a database once for each process, as the first connection does. If
        that one only reads, later ones cannot write either, until all are closed. So for a moment none is lent. Waits
        until `deadline` for those that are. Returns False if none of them only reads: then that is not the reason.
        """
        same, pause = [one for one in list(self._every) if one.name == self.name], object()
        if not any(one.only_reads for one in same):
            return False
        try:
            for one in same:
                one.pause(pause)
            for one in same:
                one.wait_for_loans(deadline)
            for one in same:
                one.let_go()
            self._open_in_pause()
        finally:
            for one in same:
                one.go_on(pause)
        return True

    def pause(self, pause: object) -> None:
        with self._mutex:
            self._pauses.add(pause)

    def go_on(self, pause: object) -> None:
        """Lend again, if nothing else has paused it."""
        self._pauses.discard(pause)
        self._bell.ring()

    def wait_for_loans(self, deadline: Deadline) -> None:
        while not (self._bell.wait(lambda: not self._loans, deadline.left_s()) or deadline.has_passed()):
            pass

    def let_go(self) -> None:
        """Close idle connections, to open others when they are needed. The log stays."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close_only()

    def _open_in_pause(self) -> None:
        loan = _Loan()
        try:
            self._begin(loan, in_pause=True)
            self._idle += (Session(self._connect()),)
        finally:
            self._loans.discard(loan)
            self._tell_fork()

    def close(self) -> None:
        """Close idle connections now, and lent ones when they come back. Idempotent."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.connection.close()

    def before_fork(self) -> None:
        """Wait for running operations, close all idle connections, and lend none until the fork is over."""
        self._gate.acquire()
        self._forking = True
        self._gate.wait_for(lambda: not self._loans, FORK_WAITS_S)
        for session in self._idle:
            session.close_only()  # else each fork would pay for a checkpoint
        self._idle.clear()

    def after_fork_in_parent(self) -> None:
        self._forking = False
        self._bell.ring()
        self._gate.release()

    def after_fork_in_child(self) -> None:
        """Begin with no connections. If a loan outlasted FORK_WAITS_S, refuse all use: the pid stays the parent's."""
        if not self._loans:
            self._reset()
        else:
            self._mutex, self._forking, self._pauses = threading.Lock(), False, set()
            self._gate, self._bell = threading.Condition(self._mutex), Bell(self._mutex)


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
