"""Waking waiting readers with LISTEN and NOTIFY, in addition to polling and never instead of it.

A notification is only a hint. It is sent after a commit, by another connection, in the background. So it delays no
commit (inside the commit it would make all commits of the database take turns), and it is lost if its sender dies in
between. Therefore a waiting reader still polls now and then, and polls as often as without notifications while the
connection is down. See docs/design/0017-waking-and-proving-on-servers.md.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

import psycopg
from psycopg import sql

from persist_lib.errors import PersistError
from persist_lib.ids import SeqNo
from persist_lib.runtime.ambient import Backoff, Runtime
from persist_lib.runtime.forks import Stage, enrol

RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
REST_S = 0.005
"""The pause between two notifications of a process: a busy one sends several together, and its appends stay fast."""
STOP_S = 2.0
PROBE = "?"
"""The start of a payload that is meant for its sender. Other payloads are `seqno key`."""


class Notifier:
    """One connection and one thread of a process, started when first needed. A forked child starts its own.

    `connect` opens a connection in autocommit. An entry in `_heard` only means that some process announced that seqno.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection], channel: str, runtime: Runtime) -> None:
        self._connect = connect
        self._channel = channel
        self._runtime = runtime
        self._closed = False
        self._looked = threading.local()
        self._inherited: list[object] = []
        self._begin()
        enrol(self, Stage.STORES)

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._pending: dict[str, int] = {}
        self._heard: dict[str, int] = {}
        self._fresh: dict[str, SeqNo] | None = None  # what `heard` has not returned yet; None: it is not called
        self._is_live = self._is_awaited = self._is_echoed = False
        self._probe = ""
        self._epoch = 0
        self._thread: threading.Thread | None = None
        self._bell: tuple[int, int] | None = None
        self._connection: psycopg.Connection | None = None

    def announce(self, key: str, seqno: int) -> None:
        """Wake all waiting readers of `key` soon, because there may be a row `seqno`. Returns at once."""
        with self._changed:
            if not self._closed:
                is_first, self._pending[key] = not self._pending, max(seqno, self._pending.get(key, 0))
                self._ensure_thread()
                if is_first:
                    self._ring()

    def wait(self, key: str, seqno: int, longest_s: float) -> bool:
        """Wait up to `longest_s` seconds for a row above `seqno` to be announced. False at once if not listening.

        This process did not hear of commits from before its connection listened. So the first wait of each
        thread for each key after that returns True at once, and the caller looks once more.
        """
        with self._changed:
            if not self._listens():
                return False
            epoch = self._epoch
            looked = self._looked.__dict__
            if looked.get(key) != epoch:
                looked[key] = epoch
                return True
            self._changed.wait_for(lambda: self._heard.get(key, 0) > seqno or epoch != self._epoch, longest_s)
            return True

    def heard(self, longest_s: float) -> dict[str, SeqNo] | None:
        """Wait up to `longest_s` seconds for announcements since the last call, and return them. None: not listening.

        What was announced before the connection listened was not heard. A caller that gets None looks once
        more after the first answer that is not.
        """
        with self._changed:
            if not self._listens():
                self._fresh = None
                return None
            if self._fresh is None:
                self._fresh = {}
                return {}
            epoch = self._epoch
            self._changed.wait_for(lambda: bool(self._fresh) or epoch != self._epoch, longest_s)
            fresh, self._fresh = self._fresh, {} if epoch == self._epoch else None
            return fresh if epoch == self._epoch else None

    def close(self) -> None:
        """End the thread and the connection. What was announced and not yet sent is not sent. Idempotent."""
        with self._changed:
            self._closed = True
            self._lose()
            self._ring()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def after_fork_in_child(self) -> None:
        """Start again. The parent's connection stays referenced: collecting it might end it for the parent."""
        self._inherited += [self._connection, self._thread]
        if self._bell is not None:
            for end in self._bell:
                os.close(end)
        self._looked = threading.local()
        self._begin()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="persist-notify", daemon=True)
            self._thread.start()

    def _listens(self) -> bool:
        """Whether the connection listens now. See to it that it will."""
        if self._closed:
            return False
        self._ensure_thread()
        if not self._is_awaited:
            self._is_awaited = True
            self._ring()
        return self._is_live

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._bell[1], b"!")

    def _lose(self) -> None:
        """Note that no notifications arrive any more, and wake all waiting threads, so that they poll."""
        self._is_live = False
        self._epoch += 1
        self._changed.notify_all()

    def _run(self) -> None:
        bell, backoff = self._bell, Backoff(RETRY_S, LONGEST_RETRY_S)
        if bell is None:
            return
        try:
            while not self._closed:
                lasts = self._runtime.deadline(LONGEST_RETRY_S)
                try:
                    with contextlib.closing(self._connect()) as self._connection:
                        self._serve(self._connection, bell[0])
                except (psycopg.Error, PersistError, OSError):
                    with self._changed:
                        self._lose()
                    if lasts.has_passed():
                        backoff.reset()
                    self._rest(bell[0], backoff.take())
        finally:
            with self._changed:
                self._lose()
                self._bell = None
            for end in bell:
                os.close(end)

    def _rest(self, bell: int, pause_s: float) -> None:
        """Pause before the next connection. A ring does not end the pause, but `close` does."""
        deadline, rung = self._runtime.deadline(pause_s), select.poll()
        rung.register(bell, select.POLLIN)
        while not self._closed and not deadline.has_passed():
            rung.poll(deadline.remaining_s() * 1000)
            _drain(bell)
            deadline.pause(0.05)

    def _serve(self, connection: psycopg.Connection, bell: int) -> None:
        """Send what is announced and hear what others announce, until closed or the connection fails."""
        connection.add_notify_handler(lambda notify: self._note(notify.payload))
        ready = select.poll()
        ready.register(bell, select.POLLIN)
        ready.register(connection.pgconn.socket, select.POLLIN)
        rests = self._runtime.deadline(0)
        while not self._closed:
            self._listen(connection)
            if rests.has_passed() and self._send(connection):
                rests = self._runtime.deadline(REST_S)
            ready.poll(rests.remaining_s() * 1000 if self._pending else None)
            _drain(bell)
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                self._note(notify.extra.decode(errors="replace"))

    def _listen(self, connection: psycopg.Connection) -> None:
        """Begin to listen once a thread waits. It only counts if a probe that we send to ourselves comes back.

        Behind a pooler in transaction mode, LISTEN succeeds on a connection that another client gets a moment
        later. Then the probe most likely does not come back, and waiting threads poll as without notifications.
        """
        if self._is_live or not self._is_awaited:
            return
        self._probe = f"{PROBE}{self._runtime.entropy():x}"
        self._is_echoed = False
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)), prepare=False)
        self._tell(connection, [self._probe])
        if not self._is_echoed:
            raise psycopg.OperationalError("notifications do not come through")
        with self._changed:
            self._is_live = True
            self._epoch += 1

    def _send(self, connection: psycopg.Connection) -> bool:
        with self._changed:
            pending, self._pending = self._pending, {}
        if pending:
            self._tell(connection, [f"{seqno} {key}" for key, seqno in pending.items()])
        return bool(pending)

    def _tell(self, connection: psycopg.Connection, payloads: list[str]) -> None:
        query = "SELECT pg_catalog.pg_notify(%s, payload) FROM pg_catalog.unnest(%s::text[]) AS payload"
        connection.execute(query, (self._channel, payloads), prepare=False)

    def _note(self, payload: str) -> None:
        if payload.startswith(PROBE):
            self._is_echoed = self._is_echoed or payload == self._probe
            return
        seqno, _, key = payload.partition(" ")
        if seqno.isdecimal():
            with self._changed:
                self._heard[key] = max(int(seqno), self._heard.get(key, 0))
                if self._fresh is not None:
                    self._fresh[key] = SeqNo(max(int(seqno), self._fresh.get(key, 0)))
                self._changed.notify_all()


def _drain(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(bell, 4096):
            pass
