"""The peer on PostgreSQL: a log of rows, each appended by one bare compare-and-set over psycopg, and nothing else.

An append is one prepared statement and one round trip, in its own transaction, as durable as the server makes it. A
program would do this if it needs no schema, no sums and no leases, and need not know what became of a lost request.
"""

from __future__ import annotations

from typing import Self

import psycopg

TABLES = """
CREATE TABLE IF NOT EXISTS bare_head (key text PRIMARY KEY, seqno int8 NOT NULL) WITH (fillfactor = 40);
CREATE TABLE IF NOT EXISTS bare_log (key text, seqno int8, data bytea NOT NULL, PRIMARY KEY (key, seqno));
INSERT INTO bare_head VALUES ('k', 0) ON CONFLICT DO NOTHING;
"""
MOVE = """
WITH moved AS (UPDATE bare_head SET seqno = seqno + 1 WHERE key = 'k' AND seqno = %s RETURNING seqno)
INSERT INTO bare_log SELECT 'k', seqno, %b FROM moved
"""
SETTINGS = "psycopg, autocommit, one prepared statement an append, one connection a process; "


class BareLog:
    """One connection to the log."""

    def __init__(self, url: str, size: int) -> None:
        self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=1)
        self._data = b"x" * size
        self.seqno = 0

    @classmethod
    def create(cls, url: str, size: int) -> Self:
        """Make the log's tables, and open it."""
        with psycopg.connect(url) as connection:
            connection.execute(TABLES)
        return cls(url, size)

    def try_append(self) -> bool:
        """Whether a row was added after the one that this connection knows as the newest."""
        won = self._connection.execute(MOVE, (self.seqno, self._data)).rowcount == 1
        self.seqno += won
        return won

    def refresh(self) -> None:
        """Learn which row is the newest."""
        found = self._connection.execute("SELECT seqno FROM bare_head WHERE key = 'k'").fetchone()
        self.seqno = int(found[0]) if found else 0

    def durability(self) -> str:
        """How the server makes commits durable."""
        names = "server_version", "fsync", "synchronous_commit", "shared_buffers"
        found = [self._connection.execute(f"SHOW {name}").fetchone() or ("?",) for name in names]
        version, *rest = [str(value) for (value,) in found]
        return f"PostgreSQL {version}, " + ", ".join(map("=".join, zip(names[1:], rest, strict=True)))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
