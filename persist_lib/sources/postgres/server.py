"""A PostgreSQL server that is a source: connections to it, what its tables are, and what it publishes of them.

And which columns they got since a source last looked, and what older rows have in them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import namedtuple_row

from persist_lib.errors import Determinate, InvalidUsage, NotFound
from persist_lib.location.postgres.connection import connection_failed, dialling
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.types import format_type
from persist_lib.sources.growth import Added, Growth
from persist_lib.sources.postgres.columns import Column, arrow_type, changed
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.tuples import typed
from persist_lib.sources.records import Known

CONNECT_S = 10
SETTINGS = (
    "-c datestyle=ISO,MDY -c intervalstyle=postgres -c timezone=UTC -c extra_float_digits=1 -c bytea_output=hex "
    "-c lc_monetary=C -c row_security=off -c wal_sender_timeout=10min -c search_path=pg_catalog -c lock_timeout=30s"
)
"""Values are texts, which depend on these; and an instance that writes for minutes is not gone."""
FORBIDDEN = "42501"
_NOTED = """
SELECT c.oid::bigint AS oid, p.oid::text || '.' || p.xmin || ' ' || r.oid || '.' || r.xmin AS published,
       p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AND NOT p.pubviaroot AS is_all,
       r.prqual IS NULL AND r.prattrs IS NULL AS is_whole,
       ARRAY[p.xmax::text::bigint, r.xmax::text::bigint] AS replacing, c.relfilenode::bigint AS file,
       (SELECT json_object_agg(attname, attnum ORDER BY attnum) FROM pg_attribute
        WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped) AS numbers,
       EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary) AS is_keyed
FROM pg_class c LEFT JOIN pg_publication p ON p.pubname = %s
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid WHERE c.oid = ANY(%s::oid[])
"""
"""One statement, so one moment: a column that comes with another file is not taken for one of the former file."""
_ENDED = """
SELECT coalesce(pg_xact_status((CASE WHEN %(xid)s > next %% 4294967296 THEN next / 4294967296 - 1
                                ELSE next / 4294967296 END * 4294967296 + %(xid)s)::text::xid8), 'aborted')
FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) now
"""
_TABLE = """
SELECT c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name, c.relreplident AS identity, c.relkind AS kind,
       c.relpersistence AS persistence, has_table_privilege(c.oid, 'SELECT') AS may_read,
       row_security_active(c.oid) AS has_policies
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
_COLUMNS = """
SELECT a.attname, a.atttypid::bigint, a.atttypmod,
       coalesce(a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]), false) AS is_key,
       coalesce(i.indimmediate, true) AS is_immediate, a.attgenerated <> '' AS is_generated
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_index i ON i.indrelid = c.oid
     AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
WHERE c.oid = {oid} ORDER BY a.attnum
"""
COLUMNS = f"SELECT * FROM ({_COLUMNS}) c WHERE NOT is_generated"  # noqa: S608 - no text of a user
"""The columns that the log has: those that are not generated."""
_PRESENT = """
SELECT c.oid::bigint AS oid, c.relfilenode::bigint AS file, a.attname AS name, a.attnum::int AS number,
       a.atttypid::bigint AS type, a.atttypmod AS modifier,
       convert_to((a.attmissingval::text::text[])[1], 'UTF8') AS missing,
       a.xmax::text::bigint AS replacing, pg_current_wal_insert_lsn()::text AS there
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.oid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum
"""
"""The columns that the log has. `missing` is what rows have that are older than the column."""


class Table(NamedTuple):
    """A table: its id in its database, its name, its columns, and the names of its key.

    `by_index`: its key is that of the index of its replica identity, not the primary key's.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    by_index: bool = False

    @property
    def key(self) -> list[str]:
        return [column.name for column in self.columns if column.is_key]

    @property
    def sql(self) -> str:
        return sql.Identifier(self.schema, self.name).as_string(None)


def slot_of(id_: str) -> str:
    """The name of a source's slot, and of its publication."""
    return f"persist_{id_}"


def publication_of(declared: Postgres, id_: str) -> str:
    """The publication that a source reads."""
    return declared.publication or slot_of(id_)


def conninfo(url: str, **more: str) -> str:
    """Libpq's connection string. Raises InvalidUsage for a URL that it does not understand, or with a password."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise InvalidUsage("url is no URL of PostgreSQL, such as postgresql://user@host/database") from None
    if given.get("password"):
        raise InvalidUsage(
            "url has a password, which would be kept in the catalog: leave it out, and give it to instances by "
            "~/.pgpass, PGPASSWORD or a service file"
        )
    settings: dict[str, Any] = {
        "application_name": "persist source", "client_encoding": "utf8", "connect_timeout": CONNECT_S,
        "keepalives_idle": "30", "tcp_user_timeout": "60000", "target_session_attrs": "primary", **given, **more,
    }  # fmt: skip
    settings["options"] = f"{given.get('options') or ''} {SETTINGS}".strip()
    return make_conninfo("", **settings)


def connect(declared: Postgres, **more: str) -> psycopg.Connection[Any]:
    """A connection. Raises Determinate if the server cannot be reached, and InvalidUsage if it turns it away."""
    wanted = conninfo(declared.url, **more)
    try:
        with dialling():
            return psycopg.connect(wanted, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise connection_failed(error, described(declared), wanted, Runtime().deadline(CONNECT_S)) from error


def described(declared: Postgres) -> str:
    """The database for messages."""
    given = conninfo_to_dict(declared.url)
    return f"PostgreSQL database {given.get('dbname', '')!r} at {given.get('host', 'the default host')}"


@contextmanager
def asking(declared: Postgres, what: str) -> Iterator[None]:
    """Errors of the server in Persist's words."""
    try:
        yield
    except psycopg.Error as error:
        said = f"{described(declared)}: could not {what}: {str(error).strip()}"
        if error.sqlstate == FORBIDDEN:
            raise InvalidUsage(f"{said}. Grant the role what it lacks; docs/sources.md says what that is") from error
        raise Determinate(said, sqlstate=error.sqlstate) from error


def refused(declared: Postgres, what: str, run: str) -> InvalidUsage:
    """The error for what the server lacks, and the SQL that mends it."""
    return InvalidUsage(f"{described(declared)}: {what}. Nothing was made. Run: {run}", run=run)


def find_tables(
    connection: psycopg.Connection[Any], declared: Postgres, is_known: Container[str] = ()
) -> dict[str, Table]:
    """The tables by their names as they are declared, once it is certain that changes tell their rows apart.

    Of those that are followed already (`is_known`) the log tells what is not so any more, at the first row.
    """
    found: dict[str, Table] = {}
    for name in declared.names:
        table = _find_table(connection, declared, name, is_known=name in is_known)
        if other := next((other for other, one in found.items() if one.oid == table.oid), None):
            raise InvalidUsage(f"{other!r} and {name!r} are one table: name it once. Nothing was made")
        found[name] = table
    return found


def _find_table(
    connection: psycopg.Connection[Any], declared: Postgres, given: str, *, is_known: bool
) -> Table:  # fmt: skip
    cursor = connection.cursor(row_factory=namedtuple_row)
    try:
        row: Any = cursor.execute(_TABLE, [given]).fetchone()
    except psycopg.errors.InvalidName as error:
        raise InvalidUsage(f"table must be a name as in SQL, such as public.orders: got {given!r}") from error
    if row is None:
        raise NotFound(
            f"{described(declared)} has no table {given!r}. Say its schema too, such as public.orders; a table of "
            "another database takes a source of its own",
            table=given,
        )  # fmt: skip
    columns: list[Any] = cursor.execute(_COLUMNS.format(oid=row.oid).encode()).fetchall()
    logged = tuple(Column(*column[:4]) for column in columns if not column.is_generated)
    table = Table(row.oid, row.schema, row.name, logged, by_index=row.identity == "i")
    if not is_known:
        _check_table(connection, declared, table, row, columns)
    return table


def _check_table(
    connection: psycopg.Connection[Any], declared: Postgres, table: Table, row: Any, columns: list[Any]
) -> None:
    """Refuse a table that cannot be followed, by its row and those of its columns in the catalog."""
    user, name, identity = connection.info.user, table.sql, row.identity
    if row.kind != "r":
        what = "partitioned: declare a source of each of its partitions" if row.kind == "p" else "no plain table"
        raise InvalidUsage(f"{name} is {what}. Nothing was made")
    is_deferrable = identity == "d" and not all(column.is_immediate for column in columns)
    for is_wrong, what, run in (
        (row.persistence != "p", f"{name} is not in the server's log", f"ALTER TABLE {name} SET LOGGED;"),
        (not row.may_read, f"the role {user!r} may not read {name}", f"GRANT SELECT ON {name} TO {user};"),
        (row.has_policies, f"{name} has policies that hide rows", f"ALTER ROLE {user} BYPASSRLS;"),
        (
            any(column.is_key and column.is_generated for column in columns),
            f"the key of {name} has a generated column, and the log does not have it",
            f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …; with a unique index of other columns",
        ),
        (
            not table.key and identity in {"d", "n"},
            f"{name} has no primary key (ALTER TABLE … ADD PRIMARY KEY), and its rows are not whole in the log either",
            f"ALTER TABLE {name} REPLICA IDENTITY FULL;",
        ),
        (
            identity == "n", f"the log tells the rows of {name} not apart",
            f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;",
        ),
        (
            not table.key and identity == "i", f"the index of the replica identity of {name} was dropped",
            f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;",
        ),
        (
            is_deferrable, f"the primary key of {name} is deferrable, so the log does not have it",
            f"ALTER TABLE {name} REPLICA IDENTITY FULL;",
        ),
    ):  # fmt: skip
        if is_wrong:
            raise refused(declared, what, run)


def list_of(tables: Mapping[str, Table]) -> str:
    """The tables as `FOR TABLE` takes them."""
    return ", ".join(f"ONLY {table.sql}" for table in tables.values())


def check_published(
    connection: psycopg.Connection[Any],
    declared: Postgres,
    table: Table,
    publication: str,
    all_tables: str,
    *,
    adds: bool = False,
) -> None:
    """Refuse a publication that is not there, or that does not give all of a table; `adds`: it may get that."""
    name = sql.Identifier(publication).as_string(None)
    row = next(iter(_asked(connection, _NOTED, publication, [table.oid])), None)
    if row is None or row.is_all is None:
        run = f"CREATE PUBLICATION {name} FOR TABLE {all_tables};"
        raise refused(declared, f"there is no publication {name}", run)
    if not row.is_all:
        raise refused(
            declared, f"the publication {name} leaves out some changes, or gives them another table's name",
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate', "
            "publish_via_partition_root = false);",
        )  # fmt: skip
    if row.published is None:
        does = f"ALTER PUBLICATION {name} ADD TABLE" if adds else "CREATE PUBLICATION another FOR TABLE"
        raise refused(declared, f"the publication {name} does not name the table {table.sql}", f"{does} {all_tables};")
    if not row.is_whole:
        run = f"ALTER PUBLICATION {name} DROP TABLE {table.sql}; ALTER PUBLICATION {name} ADD TABLE ONLY {table.sql};"
        raise refused(declared, f"the publication {name} has only some rows or columns of {table.sql}", run)


class Noted(NamedTuple):
    """What the catalog says of a table: what `Known` has of it, and whether it has a primary key.

    `published` is empty where the publication does not give all of the table.
    """

    published: str
    columns: dict[str, int]
    file: int
    is_keyed: bool


def _asked(connection: psycopg.Connection[Any], query: str, *values: Any) -> list[Any]:
    return connection.cursor(row_factory=namedtuple_row).execute(query.encode(), values).fetchall()


def fetch_noted(connection: psycopg.Connection[Any], publication: str, oids: list[int]) -> dict[int, Noted]:
    """What the catalog says of the tables with these ids, as far as they are there.

    SUBTLE: a transaction marks the rows that it replaces (`xmax`) before its end is in the log, and shows what it did
    after that. So what is answered holds for the log up to a place that was asked for *before*. While such a
    transaction is open it is not known where its end will be: raises Determinate.
    """
    found: dict[int, Noted] = {}
    for row in _asked(connection, _NOTED, publication, oids):
        is_published = row.published is not None and row.is_all and row.is_whole
        for xid in row.replacing if is_published else ():
            if is_being_changed(connection, xid):
                raise Determinate(
                    f"the publication {publication} is being changed, by a transaction that is open: it looks again"
                )
        found[row.oid] = Noted(row.published if is_published else "", row.numbers or {}, row.file, row.is_keyed)
    return found


def is_being_changed(connection: psycopg.Connection[Any], xid: int) -> bool:
    """Whether what a row of the catalog says is replaced by a transaction (`xmax`) that is open, or committed."""
    return bool(xid) and connection.execute(_ENDED, {"xid": xid}).fetchone() != ("aborted",)


def plain_sql(text: str) -> Any:
    """SQL that was put together of quoted names."""
    return sql.SQL(text)


def lsn_text(lsn: int) -> str:
    """A place in the log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str | None) -> int:
    """A place in the log as a number; 0 for none."""
    high, _, low = (text or "0/0").partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def fetch_growth(
    connection: psycopg.Connection[Any], oids: Mapping[str, int], known: Mapping[str, Known]
) -> Growth | None:
    """What a table has that is not known yet; of several, the first that has something. None if nothing is new."""
    found: dict[int, list[Any]] = {}
    for row in _asked(connection, _PRESENT, [*oids.values()]):
        found.setdefault(row.oid, []).append(row)
    growths = (_growth(connection, name, found.get(oids[name], []), known[name]) for name in oids if name in known)
    return next((growth for growth in growths if growth is not None), None)


def _growth(connection: psycopg.Connection[Any], name: str, rows: list[Any], known: Known) -> Growth | None:
    """What a table has that is not known yet: columns, and the file with its rows; None if nothing is new.

    What older rows have in a column is known as long as they are in the file that they were in before it came: of what
    was written again, the catalog does not tell that any more. Raises SchemaChanged otherwise.

    Columns are there by the place that is asked for while they are looked at, as what their transaction did is
    seen after it is in the log. That none was gone by that place is what the second look tells: see `fetch_noted`.
    """
    if not rows:
        return None  # the table was dropped: the next look tells
    file, there = rows[0].file, rows[0].there
    new = [row for row in rows if row.name not in known.columns]
    if not new:
        return None if file == known.file else Growth(name, (), file, parse_lsn(there))
    for row in new:
        if was := next((name for name, number in known.columns.items() if number == row.number), None):
            raise changed(there, f"its column {was!r} is called {row.name!r}")
    if file != known.file:
        raise changed(
            there,
            f"it has the new column {new[0].name!r}, and all its rows were written again since (by a default such as "
            "random(), VACUUM FULL or TRUNCATE), so that what older ones have there is not in the log",
        )
    again = {row.number: row for row in _asked(connection, _PRESENT, [rows[0].oid])}
    for row in new:
        seen = again.get(row.number)
        if seen is None or seen[:6] != row[:6] or is_being_changed(connection, seen.replacing):
            raise Determinate(
                f"the column {row.name!r} is being changed, by a transaction that is open: it looks again"
            )
    return Growth(name, tuple(map(_added, new)), file, parse_lsn(there))


def _added(row: Any) -> Added:
    wanted = arrow_type(row.type, row.modifier)
    values, bad = typed(pa.field(row.name, wanted), pa.array([row.missing], pa.large_binary()))
    if bad:
        raise changed(row.there, f"older rows have a default that cannot be kept: {bad[0]}")
    return Added(row.name, row.number, format_type(wanted), values[0].as_py())
