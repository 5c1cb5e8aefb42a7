"""Connections to one SQLite database. Each is lent to one thread at a time, and none is ever open across a fork.

SUBTLE: it is not enough that a forked child opens a connection of its own. SQLite remembers per process which locks it
holds on a file; the child inherits that memory but not the locks, so its new connection relies on locks that it does
not hold. When the parent closes, it believes itself alone and deletes the write-ahead log under the child, and what the
child commits and acknowledges from then on is lost. Therefore connections are closed *before* each fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import ClassVar, TypeVar
from weakref import WeakSet

import apsw

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import SLICE_S, Bell

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

        SUBTLE: SQLite opens the shared memory of a database once for each process, as the first connection does. If
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
