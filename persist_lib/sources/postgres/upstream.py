"""What a source has on a PostgreSQL server: whether its tables can be followed, its publication and its slot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.server import (
    Noted,
    Table,
    asking,
    check_published,
    connect,
    described,
    fetch_noted,
    find_tables,
    list_of,
    plain_sql,
    publication_of,
    refused,
    slot_of,
)
from persist_lib.sources.records import Known

OLDEST = 150_000
DROP_ATTEMPTS = 20
THERE = (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation)
"""Another process may make the same just now."""
_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'), rolsuper OR rolreplication OR
       EXISTS (SELECT FROM pg_roles r WHERE r.rolname = 'rds_replication' AND pg_has_role(r.oid, 'MEMBER')),
       quote_ident(current_user), max - (SELECT count(*) FROM pg_replication_slots), max
FROM pg_roles, (SELECT current_setting('max_replication_slots')::int AS max) s WHERE rolname = current_user
"""
_MAY_PUBLISH = """
SELECT pg_has_role(c.relowner, 'USAGE') AND has_database_privilege(current_database(), 'CREATE')
FROM pg_class c WHERE c.oid = %s
"""


def inspect(declared: Postgres) -> dict[str, Table]:
    """What the tables are, once it is certain that they can be followed. Raises InvalidUsage otherwise."""
    with connect(declared) as connection, asking(declared, f"look at {', '.join(declared.names)}"):
        _check_server(connection, declared)
        tables = find_tables(connection, declared)
        check_publication(connection, declared, tables, declared.publication)
        return tables


def find_joining(declared: Postgres, table: str) -> Table:
    """The one of the tables that is to be added to a source of the others. Raises InvalidUsage, and NotFound."""
    with connect(declared) as connection, asking(declared, f"look at {table}"):
        found = find_tables(connection, declared, is_known={*declared.names} - {table})[table]
        check_publication(connection, declared, {table: found}, declared.publication, adds=True)
        return found


def join(declared: Postgres, id_: str, name: str, table: Table) -> Known:
    """Publish one more table, where the publication is the source's own; what is known of it then. Idempotent.

    What the publication is, is asked for before the table's snapshot is made, as in `make`.
    """
    with connect(declared) as connection, asking(declared, f"publish {name}"):
        if declared.publication is None:
            slot = sql.Identifier(slot_of(id_)).as_string(None)
            with suppress(*THERE):
                connection.execute(plain_sql(f"ALTER PUBLICATION {slot} ADD TABLE ONLY {table.sql}"))
        return _known(connection, declared, id_, {name: table})[name]


def _check_server(connection: psycopg.Connection[Any], declared: Postgres) -> None:
    row = connection.execute(_SERVER).fetchone()
    version, level, may, user, free, most = row or (0, "", False, "", 0, 0)
    if version < OLDEST:
        raise InvalidUsage(f"{described(declared)} has version {version / 10_000:.0f}; it must be 15 or newer")
    slots = f"all but {free} of its {most} replication slots are used; a source needs one, each instance one"
    for is_wrong, what, run in (
        (
            level != "logical", f"wal_level is {level!r}, so changes cannot be read from its log",
            "ALTER SYSTEM SET wal_level = 'logical'; and restart the server",
        ),
        (not may, f"the role {user} may not replicate", f"ALTER ROLE {user} REPLICATION;"),
        (free < 2, slots, f"ALTER SYSTEM SET max_replication_slots = {most + 10}; and restart the server"),
    ):  # fmt: skip
        if is_wrong:
            raise refused(declared, what, run)


def check_publication(
    connection: psycopg.Connection[Any], declared: Postgres, tables: Mapping[str, Table], publication: str | None,
    *, adds: bool = False,
) -> None:  # fmt: skip
    """Refuse a publication that is not there or does not give all of the tables; without one, who may not make it.

    It has to name each table. Of one for all tables, or for those of a schema, the catalog does not tell whether a
    table was left out for a while.
    """
    for table in tables.values():
        if publication is None:
            _check_may_publish(connection, declared, table, list_of(tables))
        else:
            check_published(connection, declared, table, publication, list_of(tables), adds=adds)


def look(declared: Postgres, id_: str) -> dict[str, Known]:
    """What the tables and the publication of a source are now. Raises InvalidUsage if it does not give all of them."""
    with connect(declared) as connection, asking(declared, "look at the publication"):
        return _known(connection, declared, id_, find_tables(connection, declared))


def _known(
    connection: psycopg.Connection[Any], declared: Postgres, id_: str, tables: Mapping[str, Table]
) -> dict[str, Known]:
    publication, oids = publication_of(declared, id_), [table.oid for table in tables.values()]
    check_publication(connection, declared, tables, publication)
    noted = fetch_noted(connection, publication, oids)
    found = {}
    for name, table in tables.items():
        one = noted.get(table.oid, Noted("", {}, 0, is_keyed=False))
        found[name] = Known(one.published, one.columns, one.file, keyless=not table.key, by_index=table.by_index)
    return found


def _check_may_publish(
    connection: psycopg.Connection[Any], declared: Postgres, table: Table, all_tables: str
) -> None:  # fmt: skip
    row = connection.execute(_MAY_PUBLISH, [table.oid]).fetchone()
    if row is None or not row[0]:
        raise refused(
            declared, f"the role {connection.info.user!r} may not publish {table.sql}: that takes its owner, with "
            "CREATE on the database. Let them make a publication, and declare the source with it",
            f"CREATE PUBLICATION persist FOR TABLE {all_tables};",
        )  # fmt: skip


def make(declared: Postgres, id_: str, timeout_s: float) -> dict[str, Known]:
    """Make the publication, then the slot. What is there already is left as it is.

    What the publication is, is asked for before the slot and the first snapshot are made: so it is so behind these.
    """
    slot, name = slot_of(id_), sql.Identifier(slot_of(id_)).as_string(None)
    with connect(declared) as connection, asking(declared, "make the replication slot"):
        tables = find_tables(connection, declared)
        if declared.publication is None and not _has(connection, "pg_publication WHERE pubname", slot):
            with suppress(*THERE):
                connection.execute(plain_sql(f"CREATE PUBLICATION {name} FOR TABLE {list_of(tables)}"))
        known = _known(connection, declared, id_, tables)
        if _has(connection, "pg_replication_slots WHERE slot_name", slot):
            return known
        connection.execute("SELECT set_config('statement_timeout', %s, false)", [str(max(1, int(timeout_s * 1000)))])
        try:
            with suppress(*THERE):
                connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        except psycopg.errors.QueryCanceled as error:
            raise Determinate(
                f"{described(declared)}: the slot was not made in {timeout_s:.0f} s, as it waits for all "
                "transactions that are running to end. Look for old ones in pg_stat_activity, and try again",
            ) from error
        return known


def take_away(declared: Postgres, id_: str) -> list[str]:
    """Drop the slot, and the publication if the source made it. Answers what could not be dropped, and why."""
    slot, name = slot_of(id_), sql.Identifier(slot_of(id_)).as_string(None)
    left = [f"SELECT pg_drop_replication_slot('{slot}');"]
    if declared.publication is None:
        left.append(f"DROP PUBLICATION IF EXISTS {name};")
    try:
        with connect(declared) as connection, asking(declared, "drop the replication slot"):
            _drop_slot(connection, slot)
            left.pop(0)
            if left:
                connection.execute(plain_sql(left[0]))
    except (Determinate, InvalidUsage) as error:
        run = " ".join(left)
        what = f"not dropped, so that the slot may hold back the server's log for ever: {error.message}"
        return [f"{what}. Once it can be reached, run there: {run}"]
    return []


def _drop_slot(connection: psycopg.Connection[Any], slot: str) -> None:
    for attempt in range(DROP_ATTEMPTS):
        if not _has(connection, "pg_replication_slots WHERE slot_name", slot):
            return
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        except psycopg.errors.UndefinedObject:
            return
        except psycopg.errors.ObjectInUse:  # an instance advances or copies it just now
            if attempt == DROP_ATTEMPTS - 1:
                raise
            connection.execute("SELECT pg_sleep(0.25)")


def _has(connection: psycopg.Connection[Any], where: str, name: str) -> bool:
    found = connection.execute(plain_sql(f"SELECT EXISTS (SELECT FROM {where} = %s)"), [name]).fetchone()  # noqa: S608 - no text of a user
    return bool(found and found[0])
