"""Connections to PostgreSQL, without a server: which of them are lent again, and how long a caller waits."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg.pq import ConnStatus, TransactionStatus

from persist_lib.errors import Determinate
from persist_lib.location.postgres import connection
from persist_lib.location.postgres.sessions import (
    NO_SUCH_STATEMENT,
    PREPARED_AFTER,
    Record,
    Rejected,
    Session,
    Sessions,
)
from persist_lib.runtime.ambient import Deadline, Runtime
from tests.unit.location.test_turned_away import Speaker


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        yield ours, theirs


class Connected:
    """A connection in a state that a test says. It cannot be asked anything."""

    def __init__(self, ours: socket.socket) -> None:
        self.pgconn = SimpleNamespace(
            socket=ours.fileno(), status=ConnStatus.OK, transaction_status=TransactionStatus.IDLE
        )
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


def test_a_session_is_used_again_only_where_nothing_is_under_way(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    made: list[Connected] = []

    def connect(_: object) -> Session:
        made.append(Connected(ours))
        return Session(cast("Any", made[-1]), 0)

    sessions, deadline = Sessions(connect, "a database", 1), Runtime().deadline(60)

    def open_ones() -> list[int]:
        """Which sessions are open while one is lent."""
        with sessions.lend(deadline):
            return [number for number, one in enumerate(made) if one.is_open]

    assert open_ones() == open_ones() == [0]
    states = {"status": ConnStatus.BAD, "transaction_status": TransactionStatus.INTRANS}
    for number, (name, value) in enumerate(states.items()):
        with sessions.lend(deadline):
            setattr(made[-1].pgconn, name, value)
        assert open_ones() == [2 * number + 1], name
        setattr(made[-1].pgconn, name, value)  # while it is idle
        assert open_ones() == [2 * number + 2], name
    theirs.sendall(b"the server ends it")
    assert open_ones() == [5]
    sessions.close()


def test_a_caller_waits_for_a_busy_connection_no_longer_than_its_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sessions = Sessions(lambda _: Session(cast("Any", Connected(pair[0])), 0), "a database", 1)
    runtime = Runtime()
    with (
        sessions.lend(runtime.deadline(60)),
        pytest.raises(Determinate, match="all 1 connections to a database are busy"),
    ):
        sessions.lend(runtime.deadline(0)).__enter__()


def test_why_a_server_rejects_us_is_waited_for_as_long_as_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Poll:
        """Notes how long it may wait, and waits until there is something."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waited.append(milliseconds)
            return self._poll.poll()

    quiet = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    runtime = Runtime(monotonic=lambda: 100.0)
    with closing(Speaker(("28P01", "no"))) as speaker:
        url = f"postgresql://x:y@127.0.0.1:{speaker.port}/x"
        with monkeypatch.context() as patch:
            patch.setattr(connection, "select", quiet)
            cause = connection._cause(url, runtime.deadline(7))
    assert cause is not None
    assert waited
    assert set(waited) == {7000.0}


class Pooled(Session):
    """Behind a pooler: whether the next connection knows what was prepared is for a test to say. It notes requests."""

    def __init__(self, ours: socket.socket) -> None:
        made = Connected(ours)
        super().__init__(cast("Any", made), 0)
        self.knows, self.sent = True, list[str]()
        self._id_sent: bytes | None = None
        made.pgconn.send_query_params = partial(self._note, "whole")
        made.pgconn.send_query_prepared = partial(self._note, "by name")
        made.pgconn.send_prepare = lambda *_: self.sent.append("prepare")

    def _note(self, how: str, _: bytes, data: list[bytes | None], **__: object) -> None:
        self.sent.append(how)
        self._id_sent = data[-1]

    def _send(self, send: Callable[[], None], deadline: Deadline) -> list[Record]:
        send()
        if self.sent[-1] == "by name" and not self.knows:
            raise Rejected("no such statement", NO_SUCH_STATEMENT, is_fatal=False)
        return [] if self.sent[-1] == "prepare" else [(b"", self._id_sent)]


def test_a_statement_that_a_pooler_does_not_know_is_sent_whole_from_then_on(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    session, deadline = Pooled(pair[0]), Runtime().deadline(60)

    def asked() -> list[str]:
        session.sent.clear()
        session.ask("SELECT 1", [], deadline)
        return [*session.sent]

    assert [asked() for _ in range(PREPARED_AFTER)] == [["whole"]] * PREPARED_AFTER
    assert [asked(), asked()] == [["prepare", "by name"], ["by name"]]
    session.knows = False
    assert [asked(), asked(), asked()] == [["by name", "whole"], ["whole"], ["whole"]]
