"""What Persist keeps in PostgreSQL: three tables in a schema of their own, and the statements over them.

    layout      the version of all this
    shard_head  key, seqno of its newest row, how that starts; never deleted: a key once created is never created again
    shard_log   key, seqno, data; the rows from the last truncation up to and including the newest

A writer that moves `shard_head` from n to n + 1 inserts row n + 1; see docs/design/0010-consensus-on-postgresql.md.
Every statement is a transaction by itself and makes its settings only for itself, so that a pooler may give each one
another server connection. All names are qualified, so no search_path plays a role.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import psycopg
from psycopg import sql

from persist_lib.errors import Corrupt, Determinate, InvalidUsage, NotFound
from persist_lib.location.api import START_BYTES
from persist_lib.location.contract import check_known

NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
TIMEOUTS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
LOCAL_SETTINGS = {"search_path": "pg_catalog", "synchronous_commit": "on", **dict.fromkeys(TIMEOUTS, "20000")}
"""Those under which tables are made: of the transaction only, with timeouts in ms."""

CLOCK = "(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::int8"

# The lock timeout is $1. For the statement alone (true: local to its transaction). A commit that the operating system
# or a standby may still lose is no commit; whatever the administrator has set beyond that stays.
SETTINGS = """settings AS MATERIALIZED (
    SELECT pg_catalog.set_config('lock_timeout', $1, true),
           CASE pg_catalog.current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply'
                ELSE pg_catalog.set_config('synchronous_commit', 'on', true) END
)"""

START = rf"substring(\1 FROM 1 FOR {START_BYTES})"
STARTS = r"substring(\1.start FROM 1 FOR pg_catalog.octet_length(\2)) = \2"


@lru_cache(maxsize=32)
def filled(text: str, schema: str) -> str:
    """A statement over the tables of a schema. Its lock timeout, if any, is $1; its last parameter is the request's id.

    Each answers one record that ends with the server's clock and that id; in all others, both are null.
    """
    text = re.sub(r"\{start (\S+)\}", START, text.replace("{settings}", SETTINGS))
    text = re.sub(r"\{starts (\w+) with (\S+)\}", STARTS, text)
    return text.replace("{s}", f'"{schema}"').replace("{clock}", CLOCK)


def reading(columns: str, rest: str, given: int) -> str:
    """A statement that reads. So many parameters are given."""
    nulls = ", ".join("NULL" for _ in columns.split(","))
    return f"(SELECT {columns}, NULL::int8, NULL::int8 {rest}) UNION ALL SELECT {nulls}, {{clock}}, ${given + 1}"


HEAD = reading("seqno, data", "FROM {s}.shard_log WHERE key = $1 ORDER BY seqno DESC LIMIT 1", 1)
# From seqno $2, at most $3. Answers seqno, data, in no promised order.
SCAN = reading("seqno, data", "FROM {s}.shard_log WHERE key = $1 AND seqno >= $2 ORDER BY seqno LIMIT $3", 3)
KEYS = reading("key", "FROM {s}.shard_head", 0)
HEADS = reading("key, seqno", "FROM {s}.shard_head", 0)
# Of the keys in the JSON array $1.
OF_KEYS = "FROM {s}.shard_head WHERE key IN (SELECT jsonb_array_elements_text($1::jsonb))"
HEADS_OF = reading("key, seqno", OF_KEYS, 1)
# Answers nothing but the clock.
ASK_CLOCK = "SELECT NULL, {clock}, $1"
# Key $2, data $3. Answers how many rows were inserted (0 or 1).
CREATE = """WITH {settings}, moved AS (
    INSERT INTO {s}.shard_head AS head (key, seqno, start) SELECT $2, 1, {start $3} FROM settings
    ON CONFLICT DO NOTHING RETURNING seqno
), added AS (
    INSERT INTO {s}.shard_log (key, seqno, data) SELECT $2, seqno, $3 FROM moved RETURNING 1
) SELECT (SELECT count(*) FROM added), {clock}, $4"""
# Key $2, data $3, expected $4, its start $5. Answers how many rows were inserted (0 or 1).
APPEND = """WITH {settings}, moved AS (
    UPDATE {s}.shard_head AS head SET seqno = head.seqno + 1, start = {start $3} FROM settings
    WHERE head.key = $2 AND head.seqno = $4 AND {starts head with $5::bytea} RETURNING head.seqno
), added AS (
    INSERT INTO {s}.shard_log (key, seqno, data) SELECT $2, seqno, $3 FROM moved RETURNING 1
) SELECT (SELECT count(*) FROM added), {clock}, $6"""
# Key $1, below seqno $2. Answers the newest seqno (null: none), how many were deleted. It waits for no row's lock.
TRUNCATE = """WITH newest AS (SELECT max(seqno) AS seqno FROM {s}.shard_head WHERE key = $1), gone AS (
    DELETE FROM {s}.shard_log WHERE key = $1 AND seqno < $2 AND $2 <= (SELECT seqno FROM newest) RETURNING 1
) SELECT (SELECT seqno FROM newest), (SELECT count(*) FROM gone), {clock}, $3"""
# Key $2, to seqno $3 (0: all), expected $4, its start $5. Answers how many were taken back; -1: there is no row at $3.
REWIND = """WITH {settings}, target AS (
    SELECT data FROM {s}.shard_log WHERE key = $2 AND seqno = $3
), moved AS (
    UPDATE {s}.shard_head AS head SET seqno = $3, start = {start target.data} FROM settings, target
    WHERE head.key = $2 AND head.seqno = $4 AND {starts head with $5::bytea} RETURNING 1
), dropped AS (
    DELETE FROM {s}.shard_head AS head USING settings
    WHERE $3 = 0 AND head.key = $2 AND head.seqno = $4 AND {starts head with $5::bytea} RETURNING 1
), gone AS (
    DELETE FROM {s}.shard_log WHERE key = $2 AND seqno > $3
    AND (EXISTS (TABLE moved) OR EXISTS (TABLE dropped)) RETURNING 1
) SELECT CASE WHEN $3 > 0 AND NOT EXISTS (TABLE target) THEN -1 ELSE (SELECT count(*) FROM gone) END, {clock}, $6"""


def append_many(count: int) -> str:
    """Key, expected (null: create), its start, data for each of so many. Answers whether all were set.

    None is changed unless all were as expected. A key that another writer creates at the same moment only
    shows as a conflict, after other keys have been moved: dividing by zero (22012) rolls these back.
    Locks are taken in the order of the keys, first those of existing ones and then those of new ones.
    """
    row = "(${}::text, ${}::int8, ${}::bytea, ${}::bytea)"
    wanted = ", ".join(row.format(*range(4 * n + 2, 4 * n + 6)) for n in range(count))
    text = APPEND_MANY.replace("{wanted}", wanted).replace("{count}", str(count))
    return text.replace("{id}", str(4 * count + 2))


APPEND_MANY = """
WITH {settings}, wanted (key, expected, start, data) AS MATERIALIZED (
    VALUES {wanted}
), locked AS MATERIALIZED (
    SELECT head.key, head.seqno, head.start FROM {s}.shard_head AS head, settings
    WHERE head.key IN (SELECT key FROM wanted) ORDER BY head.key FOR UPDATE OF head
), verdict AS MATERIALIZED (
    SELECT count(*) FILTER (WHERE locked.seqno IS DISTINCT FROM wanted.expected
                            OR NOT {starts locked with wanted.start}) = 0 AS is_won
    FROM wanted LEFT JOIN locked USING (key)
), moved AS (
    UPDATE {s}.shard_head AS head SET seqno = head.seqno + 1, start = {start wanted.data} FROM wanted, locked, verdict
    WHERE head.key = locked.key AND head.key = wanted.key AND verdict.is_won RETURNING head.key, head.seqno
), created AS (
    INSERT INTO {s}.shard_head AS head (key, seqno, start)
    SELECT key, 1, {start data} FROM wanted, verdict WHERE expected IS NULL AND verdict.is_won ORDER BY key
    ON CONFLICT DO NOTHING RETURNING head.key, head.seqno
), added AS (
    INSERT INTO {s}.shard_log (key, seqno, data)
    SELECT key, one.seqno, wanted.data FROM (TABLE moved UNION ALL TABLE created) AS one
    JOIN wanted USING (key) RETURNING 1
) SELECT CASE WHEN NOT (SELECT is_won FROM verdict) THEN 0
              ELSE 1 / (((SELECT count(*) FROM added) = {count})::int) END::int8, {clock}, ${id}
"""

# The rows of shard_head are updated again and again: free room on their pages keeps that from touching the index (HOT).
# Data is stored uncompressed, because large data is compressed already.
TABLES = """
CREATE TABLE {s}.shard_head (
    key text COLLATE "C" PRIMARY KEY, seqno int8 NOT NULL CHECK (seqno > 0), start bytea NOT NULL
) WITH (fillfactor = 40);
CREATE TABLE {s}.shard_log (
    key text COLLATE "C" NOT NULL, seqno int8 NOT NULL, data bytea NOT NULL, PRIMARY KEY (key, seqno)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE {s}.shard_log ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE {s}.layout (version int4 NOT NULL);
INSERT INTO {s}.layout VALUES ({version});
"""


class Layout(NamedTuple):
    """Tables in a schema: the one with their version, that version, how all are made, and under which advisory lock."""

    table: str
    version: int
    tables: str
    lock: int


CONSENSUS = Layout("layout", 1, TABLES, 0x5052_5354_0000_0001)  # "PRST"
# Not `to_regclass`, which may answer from a cache that is older than the wait for the lock.
IS_THERE = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
    WHERE space.nspname = %s AND class.relname = %s
)
"""


def check_layout(connection: psycopg.Connection, schema: str, name: str, layout: Layout = CONSENSUS) -> bool:
    """Whether the tables are there. Raises NewerFormat for those of a newer release; changes nothing."""
    if connection.execute(IS_THERE, (schema, layout.table), prepare=False).fetchone() != (True,):
        return False
    query = sql.SQL("SELECT max(version) FROM {}").format(sql.Identifier(schema, layout.table))
    (found,) = connection.execute(query, prepare=False).fetchone() or (None,)
    if not isinstance(found, int):
        raise Corrupt(
            f"{name}: the table {layout.table} of schema {schema} is empty; restore it (version = {layout.version})",
            key=f"{schema}.{layout.table}", expected=layout.version, actual=found,
        )  # fmt: skip
    check_known(f"{name} has layout", found, layout.version)
    return True


def create_layout(connection: psycopg.Connection, schema: str, name: str, layout: Layout = CONSENSUS) -> None:
    """Make the tables unless they exist, in one transaction. If several processes call it at once, one makes them."""
    with connection.transaction():
        for setting, value in LOCAL_SETTINGS.items():
            connection.execute("SELECT pg_catalog.set_config(%s, %s, true)", (setting, value), prepare=False)
        connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (layout.lock,), prepare=False)
        if check_layout(connection, schema, name, layout):
            return
        query = "SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = %s"
        # Not IF NOT EXISTS, which needs the right to create schemas even if the schema exists.
        if connection.execute(query, (schema,), prepare=False).fetchone() == (0,):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)), prepare=False)
        tables = sql.SQL(layout.tables).format(s=sql.Identifier(schema), version=sql.Literal(layout.version))
        connection.execute(tables, prepare=False)


def open_layout(connection: psycopg.Connection, schema: str, name: str, *, create: bool) -> None:
    """Check the tables of a consensus, or make them. Raises NotFound when there are none, unless `create`."""
    if check_layout(connection, schema, name):
        return
    if not create:
        raise NotFound(
            f"there is no consensus in schema {schema} of {name}; check the URL, or open it with create=True",
            schema=schema,
        )
    create_layout(connection, schema, name)


def creation_failed(error: psycopg.Error, schema: str, name: str) -> Exception:
    """Return the error for a failed creation or check. It is one transaction, so the next opening can repeat it."""
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return InvalidUsage(
            f"{name}: the role may not create or read schema {schema} ({str(error).strip()}). Have an administrator "
            "open the location once, and grant what docs/operations.md says",
            schema=schema,
        )  # fmt: skip
    if isinstance(error, (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject)):
        return InvalidUsage(
            f"{name}: schema {schema} holds tables of another program ({str(error).strip()}). Choose another one with "
            "?persist_schema=",
            schema=schema,
        )  # fmt: skip
    return Determinate(f"could not open {name}: {str(error).strip()}", schema=schema)
