"""The messages of a slot's stream, one after the other, as transactions of some tables. Pure.

Each comes as the server's protocol has it: a kind, and for a message of pgoutput its place and time before it. What is
not as the protocol says is Corrupt, and nothing of the transaction that is open then is given.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from persist_lib.errors import Corrupt
from persist_lib.sources.postgres.columns import Column, Header

_BEGIN = struct.Struct(">Qqi")
_COMMIT = struct.Struct(">BQQq")
_LONG, _SHORT = struct.Struct(">I"), struct.Struct(">H")
PAYLOAD = 25
"""Where the message is, behind its place and time."""
CHANGES = b"IUD"
WHOLE = b"f"
"""The replica identity FULL."""


class Logged(NamedTuple):
    """A table in the log: how it is declared, the numbers of its columns by their names, and what tells rows apart."""

    name: str
    numbers: Mapping[str, int]
    by_index: bool = False


class Change(NamedTuple):
    """A message about a table, and the columns that it has."""

    table: str
    value: bytes
    header: str


class Transaction(NamedTuple):
    """The changes of the tables in one transaction. `end` is the first place behind its commit."""

    address: int
    end: int
    changes: list[Change]
    size: int


class LogMessages:
    """What a stream has said. `reached`: all transactions that committed before that place were given.

    `tables` are those of which changes are given, by their ids.
    """

    def __init__(self, tables: Mapping[int, Logged], start: int) -> None:
        self._tables = tables
        self.reached = start
        self._headers: dict[int, str] = {}
        self._open: tuple[int, list[Change]] | None = None

    def take(self, data: bytes) -> Transaction | None:
        """Take one message, and answer the transaction that ends with it. Raises Corrupt for anything else."""
        try:
            return self._take(data)
        except (struct.error, IndexError, ValueError) as error:  # cut short, or a text that is no UTF-8
            raise Corrupt(
                f"a message of PostgreSQL's log cannot be read: {error}. Nothing of its transaction was written",
                key="pgoutput", expected="pgoutput", actual=data[:PAYLOAD],
            ) from error  # fmt: skip

    def _take(self, data: bytes) -> Transaction | None:
        if data[0] == ord("k"):
            if self._open is None:
                self.reached = max(self.reached, int.from_bytes(data[1:9], "big"))
        elif data[0] == ord("w") and (done := self._message(data[PAYLOAD:])) is not None:
            self.reached = max(self.reached, done.end)
            return done
        return None

    def _message(self, message: bytes) -> Transaction | None:
        kind = message[:1]
        if kind == b"B":
            self._open = (_BEGIN.unpack_from(message, 1)[0], [])
        elif kind == b"C":
            _, commit, end, _ = _COMMIT.unpack_from(message, 1)
            if self._open is None or self._open[0] != commit:
                raise Corrupt("a transaction ends that did not begin", key="pgoutput", expected=None, actual=commit)
            _, changes = self._open
            self._open = None
            return Transaction(commit, end, changes, sum(len(change.value) for change in changes))
        elif kind == b"R":
            oid = _LONG.unpack_from(message, 1)[0]
            if oid in self._tables:
                self._headers[oid] = _relation(message, self._tables[oid]).text()
        elif self._open is not None:
            for oid in _subjects(kind, message):
                if oid in self._tables:
                    if oid not in self._headers:
                        raise Corrupt("a change comes without its columns", key="pgoutput", expected="R", actual=kind)
                    self._open[1].append(Change(self._tables[oid].name, message, self._headers[oid]))
        return None


def _subjects(kind: bytes, message: bytes) -> tuple[int, ...]:
    """The ids of the tables that a message is about: a TRUNCATE may be about several."""
    if kind in CHANGES:
        return _LONG.unpack_from(message, 1)
    if kind != b"T":
        return ()
    (count,) = _LONG.unpack_from(message, 1)
    return struct.unpack_from(f">{count}I", message, 6)


def _relation(message: bytes, table: Logged) -> Header:
    """What a message says of a table: its replica identity, and its columns in the order of their numbers."""
    numbers = table.numbers
    at = message.index(b"\0", message.index(b"\0", 5) + 1) + 2
    is_unsure = table.by_index and message[at - 1 : at] == WHOLE
    (count,) = _SHORT.unpack_from(message, at)
    at += 2
    columns = []
    for _ in range(count):
        end = message.index(b"\0", at + 1)
        type_, modifier = struct.unpack_from(">Ii", message, end + 1)
        columns.append(Column(message[at + 1 : end].decode(), type_, modifier, bool(message[at] & 1)))
        at = end + 9
    known = [(numbers[column.name], column.name) for column in columns if column.name in numbers]
    moved = next((f"{one[1]} and {other[1]}" for one, other in pairwise(known) if one > other), "")
    return Header(tuple(columns), moved=moved, is_unsure=is_unsure)
