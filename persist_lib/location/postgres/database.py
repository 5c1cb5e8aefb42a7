"""A database of PostgreSQL, as a consensus and event logs use it: its URL, what is sent to it, and what errors mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, quote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.location.contract import RemoteClock
from persist_lib.location.postgres.connection import connected
from persist_lib.location.postgres.layout import ASK_CLOCK, NAME, creation_failed, filled
from persist_lib.location.postgres.sessions import TEXT, Answer, Dropped, Record, Rejected, Session, Sessions, Value
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
