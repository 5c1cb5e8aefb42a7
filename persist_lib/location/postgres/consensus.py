"""Consensus in PostgreSQL: durable on return, safe among processes and machines, one round trip for each operation.

`postgresql://user@host/database?persist_schema=persist`: any URL of libpq, and the schema that holds the tables.
With `&persist_notify=1` waiting readers are woken (see `postgres.notify`), not through a pooler in transaction mode.
With `&persist_prepare=0` no statement is prepared (see `postgres.sessions.Session`).
Event logs use the same `Database`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl, quote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Row
from persist_lib.location.contract import RemoteClock, check_limit, next_seqno, not_in_log, passes_newest
from persist_lib.location.postgres import layout
from persist_lib.location.postgres.connection import CONNECT_S, connect, connected
from persist_lib.location.postgres.layout import ASK_CLOCK, NAME, creation_failed, filled
from persist_lib.location.postgres.notify import Notifier
from persist_lib.location.postgres.sessions import (
    BYTEA,
    INT8,
    TEXT,
    Answer,
    Dropped,
    Record,
    Rejected,
    Session,
    Sessions,
    Value,
    decode_int,
)
from persist_lib.location.scheme import Opening, is_on
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")
Values = Sequence[tuple[Value, int]]
SCHEMA = "persist"
OWN_OPTIONS = NOTIFY, PREPARE = "persist_notify", "persist_prepare"
OPERATION_S = 20.0
"""The longest that one operation may take. The caller's deadline may end it earlier."""
LOCK_SHARE = 0.8
"""The share of it that the server may wait for a row's lock: it must give up before the client does."""

NOT_NOW = re.compile(r"08...|57P..|58...|XX...|F0...|40003")
"""Errors that do not say what became of a write: broken connections, shutdowns, I/O errors, bugs, and unknown ones."""
UNIQUE_VIOLATION = "23505"
NO_TABLE = ("42P01", "3F000")
FORBIDDEN = "42501"
QUOTED = re.compile(r'"[^"]*"')


class Database:
    """A schema of a database. Every statement is one transaction and one round trip, by one of `connections`.

    After a failure of the connection, a write is Indeterminate. After an error of the server itself it is Determinate,
    because the server rolled it back. An operation takes at most `operation_s` seconds, or less if the caller's
    deadline is earlier. `what` goes before the name of the database in messages.
    """

    def __init__(
        self, url: str, runtime: Runtime, connections: int, *, what: str = "", operation_s: float = OPERATION_S,
        prepares: bool = True,
    ) -> None:  # fmt: skip
        self._runtime, self._operation_s, self._prepares = runtime, operation_s, prepares
        self._conninfo, self._schema = parse_url(url)
        self._name = what + describe(self._conninfo)
        self._clock = RemoteClock(runtime)
        self._sessions = Sessions(self._connect, self._name, connections)

    def opened(self, work: Callable[[psycopg.Connection, str, str], T]) -> T:
        """What `work` does with a connection of its own, the schema, and the name for messages."""
        try:
            with connected(self._conninfo, self._name, self._deadline()) as connection:
                return work(connection, self._schema, self._name)
        except psycopg.Error as error:
            raise creation_failed(error, self._schema, self._name) from error

    def _connect(self, deadline: Deadline) -> Session:
        connection = connected(self._conninfo, self._name, deadline)
        return Session(connection, self._runtime.entropy(), prepares=self._prepares)

    def _deadline(self) -> Deadline:
        return self._runtime.deadline(patience_s(self._operation_s))

    def read(self, text: str, values: Values) -> list[Record]:
        """The records that a statement of `layout.reading` answers."""
        try:
            return self._ask(text, values, locks=False).records
        except (Dropped, Rejected) as error:
            raise read_failed(error, self._name) from error

    def write(self, text: str, values: Values, doing: str, *, locks: bool = True) -> Record:
        """The one record that a statement answers. Its lock timeout, if it `locks`, comes before the values."""
        try:
            return self._ask(text, values, locks=locks).records[0]
        except (Dropped, Rejected) as error:
            raise write_failed(error, doing, self._name) from error

    def now(self) -> int:
        """Return the server's time in ms since the epoch: that of its last answer, plus the time since then."""

        def ask() -> int:
            self.read(ASK_CLOCK, [])
            return self._clock.last

        return self._clock.now(ask)

    def _ask(self, text: str, values: Values, *, locks: bool) -> Answer:
        deadline = self._deadline()
        with self._sessions.lend(deadline) as session:
            if locks:
                lock_ms = max(1, int(deadline.remaining_s() * 1000 * LOCK_SHARE))
                values = [(str(lock_ms), TEXT), *values]
            answer = session.ask(filled(text, self._schema), values, deadline)
        self._clock.observe(answer.clock)
        return answer

    def close(self) -> None:
        self._sessions.close()


def read_failed(error: Dropped | Rejected, name: str) -> PersistError:
    """Return the error for a failed read. A read changes nothing, so it is never Indeterminate."""
    return _refusal(error, f"could not read {name}", name) or Determinate(f"could not read {name}: {error}")


def write_failed(error: Dropped | Rejected, doing: str, name: str) -> PersistError:
    """Return the error for a failed write. It is Determinate only if the server said that it rolled back."""
    what = f"could not {doing} in {name}"
    if refusal := _refusal(error, what, name):
        return refusal
    if isinstance(error, Dropped) or error.is_fatal or NOT_NOW.fullmatch(error.sqlstate):
        return Indeterminate(f"{what}, as far as is known, but it may still have been done: {error}")
    if error.sqlstate == UNIQUE_VIOLATION:
        return Corrupt(
            f"{what}: the row after the newest is there already ({error}): the tables come from different copies. "
            "Nothing was written; restore one whole copy",
            key=name, expected=None, actual=str(error),
        )  # fmt: skip
    return Determinate(f"{what}; nothing was written: {error}", sqlstate=error.sqlstate)


def _refusal(error: Dropped | Rejected, what: str, name: str) -> PersistError | None:
    """Return the error for a failure that no retry can mend, or None for any other."""
    if isinstance(error, Dropped):
        return None
    if error.sqlstate == FORBIDDEN:
        return InvalidUsage(f"{what}: {error}. Grant the role what docs/operations.md says", name=name)
    if error.sqlstate in NO_TABLE:
        return Corrupt(
            f"{what}: the tables were there, and are gone ({error}). Restore them from a copy", key=name, expected=None,
            actual=str(error),
        )  # fmt: skip
    return None


def parse_url(url: str) -> tuple[str, str]:
    """Return libpq's connection string for a URL, and the schema. Raises InvalidUsage for an invalid URL."""
    url, schema = _split(url)
    settings: dict[str, str | int | None] = {
        "application_name": "persist",
        "client_encoding": "utf8",
        "keepalives_idle": "30",
        "target_session_attrs": "primary",  # a standby may answer with stale rows
        "tcp_user_timeout": "20000",
    }
    try:
        settings.update(conninfo_to_dict(url))
        return make_conninfo("", **settings), schema
    except psycopg.ProgrammingError as error:
        # Libpq quotes text that it does not understand, which may be part of the password: so no `from error` either.
        said = QUOTED.sub('"…"', str(error).strip())
        raise InvalidUsage(f"{url!r} is no URL of PostgreSQL: {said}") from None


def _split(url: str) -> tuple[str, str]:
    base, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    schema = dict(pairs).get("persist_schema", SCHEMA)
    if not NAME.fullmatch(schema):
        raise InvalidUsage(
            f"persist_schema must be 1 to 48 lower-case letters, digits or '_': got {schema!r}", schema=schema
        )
    ours = ("persist_schema", *OWN_OPTIONS)
    rest = "&".join(f"{name}={quote(value, safe='')}" for name, value in pairs if name not in ours)
    return f"{base}?{rest}" if rest else base, schema


def describe(conninfo: str) -> str:
    """Return the name of a database for messages, without its password."""
    given = conninfo_to_dict(conninfo)
    return f"PostgreSQL database {given.get('dbname', '')!r} at {given.get('host', 'the default host')}"


CONNECTIONS = 8
"""The most from a process to a location. An operation takes about a millisecond; a server has some hundred of them."""
ROLLED_BACK = "22012"


class PostgresConsensus(Database):
    """Rows in the tables of `postgres.layout`. Raises NotFound when there are no tables, unless `create`.

    With `persist_notify=1`, one more connection of the process wakes waiting readers.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        runtime: Runtime | None = None,
        operation_s: float = OPERATION_S,
        connections: int = CONNECTIONS,
    ) -> None:
        runtime, prepares = runtime or Runtime(), is_on(url, PREPARE, default=True)
        super().__init__(url, runtime, connections, operation_s=operation_s, prepares=prepares)
        self.opened(partial(layout.open_layout, create=create))
        self._notifier = (
            Notifier(self._listening, f"persist_{self._schema}", runtime) if is_on(url, NOTIFY, default=False) else None
        )

    def _listening(self) -> psycopg.Connection:
        return connect(self._conninfo, self._runtime.deadline(CONNECT_S))

    def head(self, key: str) -> Row | None:
        """Return the newest row, or None when the key was never set. It is never stale here."""
        rows = _rows(self.read(layout.HEAD, [(key, TEXT)]))
        return rows[0] if rows else None

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        check_limit(limit)
        return _rows(self.read(layout.SCAN, [(key, TEXT), (from_seqno, INT8), (limit, INT8)]))

    def list_keys(self) -> Iterator[str]:
        return iter(sorted((key or b"").decode() for (key,) in self.read(layout.KEYS, [])))

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        """Return the newest seqnos of one moment. It reads the table of newest rows only, never the log."""
        if keys is None:
            found = self.read(layout.HEADS, [])
        else:
            found = self.read(layout.HEADS_OF, [(json.dumps(list(keys)), TEXT)])
        return {(key or b"").decode(): SeqNo(decode_int(seqno)) for key, seqno in found}

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        values: list[tuple[Value, int]] = [(key, TEXT), (bytes(data), BYTEA)]
        doing, text = f"set {key!r} to v{next_seqno(expected)}", layout.CREATE
        if expected is not None:
            text = layout.APPEND
            values += _expected(expected)
        return self._announced(decode_int(self.write(text, values, doing)[0]) == 1, {key: (expected, data)})

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        if not changes:
            return True
        values: list[tuple[Value, int]] = []
        for key, (expected, data) in sorted(changes.items()):
            values += [(key, TEXT), *_expected(expected), (bytes(data), BYTEA)]
        try:
            (won, *_) = self.write(layout.append_many(len(changes)), values, f"set {len(changes)} keys")
        except Determinate as error:
            if error.fields.get("sqlstate") == ROLLED_BACK:
                return False  # lost against another writer, which created one of the keys
            raise
        return self._announced(decode_int(won) == 1, changes)

    def _announced(self, won: bool, changes: Mapping[str, Change]) -> bool:
        if won and self._notifier is not None:
            for key, (expected, _) in changes.items():
                self._notifier.announce(key, next_seqno(expected))
        return won

    def truncate(self, key: str, seqno: SeqNo) -> int:
        values: list[tuple[Value, int]] = [(key, TEXT), (seqno, INT8)]
        newest, dropped = self.write(layout.TRUNCATE, values, f"truncate {key!r}", locks=False)
        if newest is None or seqno > decode_int(newest):
            raise passes_newest(key, seqno, None if newest is None else SeqNo(decode_int(newest)))
        return decode_int(dropped)

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        values: list[tuple[Value, int]] = [(key, TEXT), (seqno, INT8), *_expected(newest)]
        taken = decode_int(self.write(layout.REWIND, values, f"take {key!r} back to v{seqno}")[0])
        if taken < 0:
            raise not_in_log(key, seqno)
        return taken

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        return self._notifier is not None and self._notifier.wait(key, seqno, longest_s)

    def heard(self, longest_s: float) -> Mapping[str, SeqNo] | None:
        return None if self._notifier is None else self._notifier.heard(longest_s)

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.close()
        super().close()


def _expected(newest: Newest | None) -> list[tuple[Value, int]]:
    return [(None, INT8), (None, BYTEA)] if newest is None else [(newest.seqno, INT8), (newest.start, BYTEA)]


def _rows(records: Sequence[Record]) -> list[Row]:
    return sorted(Row(SeqNo(decode_int(seqno)), data or b"") for seqno, data in records)


def canonical(url: str) -> str:
    """Return the URL with the scheme `postgresql:`. Raises InvalidUsage if libpq does not understand it."""
    url = "postgresql:" + url.partition(":")[2]
    parse_url(url)
    is_on(url, NOTIFY, default=False)
    is_on(url, PREPARE, default=True)
    return url


def open_consensus(url: str, opening: Opening) -> PostgresConsensus:
    """Open the consensus of a URL of this scheme."""
    return PostgresConsensus(url, create=opening.create, runtime=opening.runtime)
