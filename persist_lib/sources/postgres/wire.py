"""Replication commands to a server, over libpq: psycopg has no calls for them.

One connection of the kind `replication=database`. It takes plain SQL as one text, and the commands of walsenders. All
waiting is in short pieces, so that Ctrl-C is heard.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from persist_lib.errors import Determinate
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.server import connect, described

PIECE_S = 0.5
STATUS = struct.Struct(">cQQQqB")
Answer = list[tuple[bytes | None, ...]]


class Wire:
    """A replication connection."""

    def __init__(self, declared: Postgres) -> None:
        self._name = described(declared)
        self._connection = connect(declared, replication="database")
        self._pg: Any = self._connection.pgconn

    @property
    def process(self) -> int:
        return int(self._connection.info.backend_pid)

    def ask(self, command: str) -> Answer:
        """Run a command, and answer its rows. Raises Determinate, with the field sqlstate."""
        result = self._send(command)
        if result.status not in {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK}:
            raise self._failed(command, result)
        while self._result() is not None:
            pass
        rows, columns = range(result.ntuples), range(result.nfields)
        return [tuple(result.get_value(row, column) for column in columns) for row in rows]

    def copy(self, command: str) -> Iterator[bytes]:
        result = self._send(command)
        if result.status != ExecStatus.COPY_OUT:
            raise self._failed(command, result)
        while (data := self._copied()) is not None:
            if data:
                yield data
            else:
                self._wait(PIECE_S)
        while (result := self._result()) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                raise self._failed(command, result)

    def start(self, command: str) -> None:
        result = self._send(command)
        if result.status != ExecStatus.COPY_BOTH:
            raise self._failed(command, result)

    def receive(self, wait_s: float) -> Iterator[bytes]:
        """Yield what is there of a stream; if nothing is, what comes in `wait_s`. Raises Determinate at its end."""
        has_waited = False
        while (data := self._copied()) is not None:
            if data:
                has_waited = True
                yield data
            elif has_waited and not self._is_readable(0.0):
                return
            else:
                self._wait(0.0 if has_waited else wait_s)
                has_waited = True
        result = self._result()
        raise self._failed("send its log", result)

    def report(self, reached: int, *, asks: bool) -> None:
        """Say that all before a place was received, and ask how far the server is if it `asks`."""
        self._guarded(lambda: self._pg.put_copy_data(STATUS.pack(b"r", reached, reached, reached, 0, int(asks))))
        self._guarded(self._pg.flush)

    def close(self) -> None:
        self._connection.close()

    def _send(self, command: str) -> Any:
        self._guarded(lambda: self._pg.send_query(command.encode()))
        self._guarded(self._pg.flush)
        return self._result()

    def _result(self) -> Any:
        self._guarded(self._pg.consume_input)
        while self._pg.is_busy():
            self._wait(PIECE_S)
        return self._pg.get_result()

    def _copied(self) -> bytes | None:
        """One row; b"" if none is there yet; None at the end."""
        size, data = self._guarded(lambda: self._pg.get_copy_data(1))
        return None if size < 0 else bytes(data) if size else b""

    def _wait(self, wait_s: float) -> None:
        if self._is_readable(wait_s):
            self._guarded(self._pg.consume_input)

    def _is_readable(self, wait_s: float) -> bool:
        return bool(select.select([self._pg.socket], [], [], wait_s)[0])

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except psycopg.Error as error:
            raise Determinate(f"{self._name}: the connection broke: {str(error).strip()}", sqlstate=None) from error

    def _failed(self, command: str, result: Any) -> Determinate:
        said, state = "the connection ended", None
        if result is not None:
            said = result.error_message.decode(errors="replace").strip() or said
            state = result.error_field(DiagnosticField.SQLSTATE)
        return Determinate(f"{self._name}: could not {command}: {said}", sqlstate=state and state.decode())
