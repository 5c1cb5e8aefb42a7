"""Consensus in PostgreSQL: durable on return, safe among processes and machines, one round trip for each operation.

`postgresql://user@host/database?persist_schema=persist`: any URL of libpq, and the schema that holds the tables.
With `&persist_notify=1` waiting readers are woken (see `postgres.notify`), not through a pooler in transaction mode.
With `&persist_prepare=0` no statement is prepared (see `postgres.sessions.Session`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import psycopg

from persist_lib.errors import Determinate
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Row
from persist_lib.location.contract import check_limit, next_seqno, not_in_log, passes_newest
from persist_lib.location.postgres import layout
from persist_lib.location.postgres.connection import CONNECT_S, connect
from persist_lib.location.postgres.database import NOTIFY, OPERATION_S, PREPARE, Database, parse_url
from persist_lib.location.postgres.notify import Notifier
from persist_lib.location.postgres.sessions import BYTEA, INT8, TEXT, Record, Value, decode_int
from persist_lib.location.scheme import Opening, is_on
from persist_lib.runtime.ambient import Runtime

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
        """Return an iterator over the keys that exist at the time of the call."""
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
