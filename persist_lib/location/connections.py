"""Connections to one SQLite database, lent to one thread at a time, none of which is ever open across a fork.

SUBTLE: it is not enough that a forked child opens a connection of its own. SQLite remembers per process which locks it
holds on a file; the child inherits that memory but not the locks, so its new connection relies on locks that nobody
holds. When the parent closes, it believes itself alone and deletes the write-ahead log under the child, and what the
child commits and acknowledges from then on is lost. Therefore connections are closed *before* each fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import apsw

from persist_lib.errors import InvalidUsage

FORK_WAITS_S = 30.0
"""How long a fork waits for operations under way. A transaction takes less than a millisecond, a scan a few."""


class Session:
    """One connection and its cursor, which keeps the statements prepared. Of one thread at a time."""

    __slots__ = ("connection", "cursor")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()


class Connections:
    """Connections made by `connect` when needed. At most as many as threads have used one at the same time."""

    def __init__(self, connect: Callable[[], apsw.Connection], name: str) -> None:
        self._connect = connect
        self._name = name
        self._reset()
        self._closed = False
        with _registering:
            _everywhere.add(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._gate = threading.Condition(self._mutex)
        self._idle: list[Session] = []
        self._lent = 0
        self._forking = False
        self._pid = os.getpid()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Use SQLite otherwise than through a session; forks wait for it likewise."""
        session = self._enter()
        try:
            yield
        finally:
            self._leave(session)

    @contextmanager
    def lend(self) -> Iterator[Session]:
        """A session for the caller alone. It must come back without an open transaction."""
        session = self.take()
        try:
            yield session
        finally:
            self.give_back(session)

    def give_back(self, session: Session) -> None:
        """End what `take` began."""
        # A transaction left open means that even rolling back failed: SQLite is not to be trusted with it any more.
        self._leave(None if session.connection.in_transaction else session)

    def take(self) -> Session:
        """A session that must be given back; `lend` does both, and costs more."""
        session = self._enter()
        if session is not None:
            return session
        try:
            return Session(self._connect())
        except BaseException:
            self._leave(None)
            raise

    def _check(self) -> None:
        if self._closed:
            raise InvalidUsage(f"{self._name} was closed, by itself or with its client; open it again", name=self._name)
        if self._pid != os.getpid():
            raise InvalidUsage(
                f"{self._name} was open while native code forked this process (not os.fork), which SQLite cannot "
                "survive. Open locations after the fork",
                name=self._name,
            )

    def _enter(self) -> Session | None:
        with self._mutex:
            while self._forking:
                self._gate.wait()
            self._check()
            self._lent += 1
            return self._idle.pop() if self._idle else None

    def _leave(self, session: Session | None) -> None:
        with self._mutex:
            self._lent -= 1
            is_kept = session is not None and not self._closed
            if session is not None and is_kept:
                self._idle.append(session)
            if self._forking:
                self._gate.notify_all()
        if session is not None and not is_kept:
            session.connection.close()

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back."""
        with self._gate:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.connection.close()

    def before_fork(self) -> None:
        """Wait for what is under way, close everything, and lend nothing until the fork is over."""
        self._gate.acquire()
        self._forking = True
        self._gate.wait_for(lambda: self._lent == 0, FORK_WAITS_S)
        for session in self._idle:
            # Without this each fork would pay for a checkpoint; the log stays, and whoever opens next goes on with it.
            session.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            session.connection.close()
        self._idle.clear()

    def after_fork_in_parent(self) -> None:
        """Lend again."""
        self._forking = False
        self._gate.notify_all()
        self._gate.release()

    def after_fork_in_child(self) -> None:
        """Begin with nothing open. With something open (see FORK_WAITS_S), never again: the pid stays the parent's."""
        if self._lent == 0:
            self._reset()
        else:
            self._mutex, self._forking = threading.Lock(), False
            self._gate = threading.Condition(self._mutex)


_everywhere: weakref.WeakSet[Connections] = weakref.WeakSet()
_forking_now: list[Connections] = []
_registering = threading.Lock()


def _before() -> None:
    _registering.acquire()
    _forking_now[:] = list(_everywhere)
    for connections in _forking_now:
        connections.before_fork()


def _in_parent() -> None:
    while _forking_now:
        _forking_now.pop().after_fork_in_parent()
    _registering.release()


def _in_child() -> None:
    while _forking_now:
        _forking_now.pop().after_fork_in_child()
    _registering.release()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
