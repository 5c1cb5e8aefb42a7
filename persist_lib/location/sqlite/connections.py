"""Connections to one SQLite database, lent to one thread at a time, none of which is ever open across a fork.

SUBTLE: it is not enough that a forked child opens a connection of its own. SQLite remembers per process which locks it
holds on a file; the child inherits that memory but not the locks, so its new connection relies on locks that nobody
holds. When the parent closes, it believes itself alone and deletes the write-ahead log under the child, and what the
child commits and acknowledges from then on is lost. Therefore connections are closed *before* each fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import apsw

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import SLICE_S, Bell

T = TypeVar("T")

FORK_WAITS_S = 30.0
"""How long a fork waits for operations under way. A transaction takes less than a millisecond, a scan a few."""


class Session:
    """One connection and its cursor, which keeps the statements prepared. Of one thread at a time."""

    __slots__ = ("connection", "cursor")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()


class _Loan:
    """One use of SQLite that is under way, and the session that it has, if any."""

    __slots__ = ("session",)

    def __init__(self) -> None:
        self.session: Session | None = None


class Connections:
    """Connections made by `connect` when needed. At most as many as threads have used one at the same time."""

    def __init__(self, connect: Callable[[], apsw.Connection], name: str) -> None:
        self._connect = connect
        self._name = name
        self._reset()
        self._closed = False
        enrol(self, Stage.STORES)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._gate = threading.Condition(self._mutex)  # only who forks waits for it
        self._bell = Bell(self._mutex)
        self._idle: list[Session] = []
        self._loans: set[_Loan] = set()
        self._forking = False
        self._pid = os.getpid()

    def is_lent(self) -> bool:
        """Whether SQLite is being used right now."""
        return bool(self._loans)

    def under_way(self, work: Callable[[], T]) -> T:
        """`work`, which uses SQLite otherwise than through a session; forks wait for it likewise."""
        loan = _Loan()
        try:
            self._begin(loan)
            return work()
        finally:
            self._loans.discard(loan)
            self._tell_fork()

    def use(self, work: Callable[[Session], T]) -> T:
        """`work` with a session of its own, which must come back without an open transaction.

        SUBTLE: an interrupt comes after any call, also in here and in `finally`. So the loan is made first; it gets its
        session, and gives it back, by instructions that call nothing; and it ends by the first call there is.
        """
        loan = _Loan()
        try:
            self._begin(loan, has_session=True)
            if loan.session is None:
                loan.session = Session(self._connect())
            return work(loan.session)
        finally:
            # A transaction left open means that even rolling back failed: SQLite is not to be trusted with it any more.
            is_kept = loan.session is not None and not (self._closed or loan.session.connection.in_transaction)
            if is_kept:
                self._idle += (loan.session,)  # type: ignore[arg-type]
            self._loans.discard(loan)
            if loan.session is not None and not is_kept:
                loan.session.connection.close()
            self._tell_fork()

    def _begin(self, loan: _Loan, *, has_session: bool = False) -> None:
        while self._forking:
            self._bell.wait(lambda: not self._forking, SLICE_S)
        with self._mutex:
            self._check()
            self._loans.add(loan)
            if has_session and self._idle:
                loan.session = self._idle[-1]
                del self._idle[-1]

    def _tell_fork(self) -> None:
        if self._forking:
            with self._mutex:
                self._gate.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise InvalidUsage(f"{self._name} was closed, by itself or with its client; open it again", name=self._name)
        if self._pid != os.getpid():
            raise InvalidUsage(
                f"{self._name} was open while native code forked this process (not os.fork), which SQLite cannot "
                "survive. Open locations after the fork",
                name=self._name,
            )

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.connection.close()

    def before_fork(self) -> None:
        """Wait for what is under way, close everything, and lend nothing until the fork is over."""
        self._gate.acquire()
        self._forking = True
        self._gate.wait_for(lambda: not self._loans, FORK_WAITS_S)
        for session in self._idle:
            # Without this each fork would pay for a checkpoint; the log stays, and whoever opens next goes on with it.
            session.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            session.connection.close()
        self._idle.clear()

    def after_fork_in_parent(self) -> None:
        """Lend again."""
        self._forking = False
        self._bell.ring()
        self._gate.release()

    def after_fork_in_child(self) -> None:
        """Begin with nothing open. With something open (see FORK_WAITS_S), never again: the pid stays the parent's."""
        if not self._loans:
            self._reset()
        else:
            self._mutex, self._forking = threading.Lock(), False
            self._gate, self._bell = threading.Condition(self._mutex), Bell(self._mutex)
