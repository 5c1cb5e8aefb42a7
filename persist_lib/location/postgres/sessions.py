"""Connections to PostgreSQL, lent to one thread at a time: one request, one answer, bounded by the caller's deadline.

It uses psycopg's libpq layer, below its cursors. That layer shows what decides whether a write happened: whether
anything was sent at all, the SQLSTATE, and whether the server said that it is ready again.
"""

from __future__ import annotations

import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import NamedTuple

import psycopg
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol

TEXT, INT8, BYTEA = 25, 20, 17
"""The types of values, as PostgreSQL's object ids. All are sent as binary, because a NUL would cut a text short."""
MOST_ID = (1 << 62) - 1
GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
PREPARED_AFTER = 3
"""How often a session sends a statement whole before it prepares it, so that two more round trips pay off."""
MOST_PREPARED = 16
OF_PREPARING = NO_SUCH_STATEMENT, TAKEN_NAME = "26000", "42P05"
"""SQLSTATEs for using a prepared statement that is missing, and for preparing one that exists. Only these mean that."""
NOT_REPLICATED = ("57014", "57P01")
"""As a warning: a commit stopped waiting for its synchronous standby. The server still acknowledges it."""

Value = str | int | bytes | None
Record = tuple[bytes | None, ...]


class Dropped(Exception):
    """The connection is gone, or the answer did not come in time. The server may have acted."""


class Rejected(Exception):
    """The server answered with an error. `is_fatal`: it also ended the connection, so the commit is in doubt."""

    def __init__(self, message: str, sqlstate: str, *, is_fatal: bool) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.is_fatal = is_fatal


class Answer(NamedTuple):
    """Records, and the server's clock."""

    records: list[Record]
    clock: int


class Session:
    """One connection. `ask` sends one statement by itself, in autocommit: it is one transaction and one round trip.

    A statement that is used again and again is prepared, which saves the server a third of its work. Behind a
    pooler in transaction mode the next request may reach another server connection, which knows the statement from
    another client, or does not know it. So its name contains a hash of it: if the name is found, it is the same
    statement. If not, the server has done nothing; the statement is sent whole, and this session prepares no more.
    """

    def __init__(self, connection: psycopg.Connection, first_id: int, *, prepares: bool = True) -> None:
        self._connection = connection
        self._id = first_id & MOST_ID
        self._pgconn: PGconn = connection.pgconn
        self._pgconn.nonblocking = 1
        self._pgconn.notice_handler = self._notice
        self._poll = select.poll()
        self._is_unreplicated = False
        self._is_broken = False
        self._prepares = prepares
        self._uses: Counter[str] = Counter()
        self._prepared: dict[str, bytes] = {}

    @property
    def is_clean(self) -> bool:
        """Whether the next request may use it: alive, nothing under way, and nothing waiting to be read.

        Bytes to read now can only mean that the server ends it. A write sent now would have an unknown outcome.
        """
        if (
            self._is_broken
            or self._pgconn.status != ConnStatus.OK
            or self._pgconn.transaction_status != TransactionStatus.IDLE
        ):
            return False
        self._poll.register(self._pgconn.socket, select.POLLIN)
        return not self._poll.poll(0)

    def ask(self, sql: str, values: Sequence[tuple[Value, int]], deadline: Deadline) -> Answer:
        """Run `sql` (of `layout.Statements`) and return its answer. Raises Rejected, or Dropped: then it is not clean.

        An answer carries the id of its request. If a faulty pooler ever sent one twice, each later request of
        the connection would otherwise get the answer to the request before it.
        """
        self._id = (self._id + 1) & MOST_ID
        try:
            records = self._ask(sql, [*values, (self._id, INT8)], deadline)
        except Rejected as error:
            self._is_broken = error.is_fatal
            if error.sqlstate in OF_PREPARING:
                raise self._mixed_up() from error
            raise
        ends = [record for record in records if record[-1] is not None]
        if len(ends) != 1 or decode_int(ends[0][-1]) != self._id:
            raise self._mixed_up()
        found = [record[:-2] for record in records if any(value is not None for value in record[:-2])]
        return Answer(found, decode_int(ends[0][-2]))

    def _ask(self, sql: str, values: Sequence[tuple[Value, int]], deadline: Deadline) -> list[Record]:
        data, types = [_encode(value) for value, _ in values], [type_ for _, type_ in values]
        formats = [1] * len(data)
        if (name := self._name(sql, types, deadline)) is not None:
            try:
                return self._send(
                    lambda: self._pgconn.send_query_prepared(name, data, param_formats=formats, result_format=1),
                    deadline,
                )
            except Rejected as error:
                if error.sqlstate != NO_SUCH_STATEMENT:
                    raise
                self._prepares = False
        return self._send(
            lambda: self._pgconn.send_query_params(
                sql.encode(), data, param_types=types, param_formats=formats, result_format=1
            ),
            deadline,
        )

    def _mixed_up(self) -> Dropped:
        self._is_broken = True
        return Dropped("the answer is to another request")

    def _name(self, sql: str, types: list[int], deadline: Deadline) -> bytes | None:
        if not self._prepares:
            return None
        if sql in self._prepared:
            return self._prepared[sql]
        self._uses[sql] += 1
        if self._uses[sql] <= PREPARED_AFTER or len(self._prepared) == MOST_PREPARED:
            return None
        name = b"persist_" + sha256(f"{types} {sql}".encode()).hexdigest()[:40].encode()
        try:
            if self._send(lambda: self._pgconn.send_prepare(name, sql.encode(), types), deadline):
                raise self._mixed_up()  # preparing answers no records
        except Rejected as error:
            if error.is_fatal:
                raise
            if error.sqlstate != TAKEN_NAME:
                self._prepares = False  # sent whole, its own error says what is wrong
                return None
        self._prepared[sql] = name
        return name

    def _send(self, send: Callable[[], None], deadline: Deadline) -> list[Record]:
        """Send a statement, and read its answer.

        SUBTLE: its result comes *before* its commit. Only the message after it acknowledges the commit: that the server
        is ready and outside a transaction. An error in between rolls back.
        """
        self._is_unreplicated = False
        results: list[PGresult] = []
        try:
            send()
            self._flush(deadline)
            while (result := self._next(deadline)) is not None:
                results.append(result)
        except psycopg.Error as error:
            raise Dropped(str(error)) from error
        for result in results:
            if result.status not in GOOD:
                raise _rejected(result)
        if not results or self._pgconn.transaction_status != TransactionStatus.IDLE:
            raise Dropped("the connection was closed before the commit was acknowledged")
        if self._is_unreplicated:
            raise Dropped("committed on this server, but not confirmed by its synchronous standby")
        return [record for result in results for record in _records(result)]

    def _flush(self, deadline: Deadline) -> None:
        """Send it all. Read too, as a server that answers early stops reading, and both would wait for ever."""
        while self._pgconn.flush():
            if self._wait(select.POLLIN | select.POLLOUT, deadline) & select.POLLIN:
                self._pgconn.consume_input()

    def _next(self, deadline: Deadline) -> PGresult | None:
        while self._pgconn.is_busy():
            self._wait(select.POLLIN, deadline)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _wait(self, events: int, deadline: Deadline) -> int:
        self._poll.register(self._pgconn.socket, events)
        ready = self._poll.poll(deadline.remaining_s() * 1000)
        if not ready:
            raise Dropped(f"no answer within {deadline.timeout_s:.3g} s")
        # Any other event of the socket, such as its end, is found out by reading.
        return ready[0][1] if ready[0][1] & (select.POLLIN | select.POLLOUT) else select.POLLIN

    def _notice(self, notice: PGresult) -> None:
        if _field(notice, DiagnosticField.SQLSTATE) in NOT_REPLICATED:
            self._is_unreplicated = True

    def close(self) -> None:
        """Close the connection. Never call it in a forked child: it would end the parent's session on the server."""
        self._connection.close()


class Sessions:
    """Sessions made by `connect` when needed, at most `most` at a time. A session that is not clean is thrown away.

    After a fork the child begins with none: it neither uses nor closes its parent's.
    """

    def __init__(self, connect: Callable[[Deadline], Session], name: str, most: int) -> None:
        self._connect = connect
        self._name = name
        self._most = most
        self._closed = False
        self._idle: list[Session] = []
        self._lent = 0
        self._gate = threading.Condition(threading.Lock())
        self._inherited: list[Session] = []
        enrol(self, Stage.STORES)

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Session]:
        """Lend a session to the caller alone. Raises Determinate if none becomes free before the deadline."""
        session, pid = self._take(deadline), os.getpid()
        try:
            yield session
        finally:
            if pid == os.getpid():
                self._leave(session)

    def _take(self, deadline: Deadline) -> Session:
        with self._gate:
            if not self._gate.wait_for(lambda: self._lent < self._most, deadline.remaining_s()):
                raise Determinate(f"all {self._most} connections to {self._name} are busy; nothing was sent")
            if self._closed:
                raise InvalidUsage(
                    f"{self._name} was closed, by itself or with its client; open it again", name=self._name
                )
            self._lent += 1
            idle = self._idle.pop() if self._idle else None
        try:
            while idle is not None:
                if idle.is_clean:
                    return idle
                idle.close()
                with self._gate:
                    idle = self._idle.pop() if self._idle else None
            return self._connect(deadline)
        except BaseException:
            self._leave(None)
            raise

    def _leave(self, session: Session | None) -> None:
        is_kept = session is not None and session.is_clean
        with self._gate:
            self._lent -= 1
            is_kept = is_kept and not self._closed
            if session is not None and is_kept:
                self._idle.append(session)
            self._gate.notify()
        if session is not None and not is_kept:
            session.close()

    def close(self) -> None:
        """Close idle sessions now, and lent ones when they come back. Idempotent."""
        with self._gate:
            self._closed = True
            idle, self._idle = self._idle, []
            self._gate.notify_all()
        for session in idle:
            session.close()

    def after_fork_in_child(self) -> None:
        """Begin with no sessions. The parent's stay referenced, as collecting them might close them."""
        self._inherited += self._idle
        self._idle, self._lent = [], 0
        self._gate = threading.Condition(threading.Lock())


def _encode(value: Value) -> bytes | None:
    match value:
        case str():
            return value.encode()
        case int():
            return value.to_bytes(8, "big", signed=True)
        case _:
            return value


def decode_int(data: bytes | None) -> int:
    """An int8 as PostgreSQL sends it."""
    return int.from_bytes(data or b"", "big", signed=True)


def _records(result: PGresult) -> Iterator[Record]:
    columns = range(result.nfields)
    return (tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples))


def _field(result: PGresult, field: DiagnosticField) -> str:
    return (result.error_field(field) or b"").decode(errors="replace")


def _rejected(result: PGresult) -> Exception:
    sqlstate = _field(result, DiagnosticField.SQLSTATE)
    severity = _field(result, DiagnosticField.SEVERITY_NONLOCALIZED)
    message = _field(result, DiagnosticField.MESSAGE_PRIMARY)
    if not sqlstate:  # not the server's words but libpq's: the connection broke
        return Dropped(message or result.get_error_message().strip())
    return Rejected(f"{message} (SQLSTATE {sqlstate})", sqlstate, is_fatal=severity not in ("", "ERROR"))
