"""Columns that tables of PostgreSQL got since a source last looked, and what older rows have in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import namedtuple_row

from persist_lib.errors import Determinate
from persist_lib.schema.types import format_type
from persist_lib.sources.growth import Added, Growth
from persist_lib.sources.postgres.columns import arrow_type, changed
from persist_lib.sources.postgres.server import is_being_changed, parse_lsn
from persist_lib.sources.postgres.tuples import typed
from persist_lib.sources.records import Known

_COLUMNS = """
SELECT c.oid::bigint AS oid, c.relfilenode::bigint AS file, a.attname AS name, a.attnum::int AS number,
       a.atttypid::bigint AS type, a.atttypmod AS modifier,
       convert_to((a.attmissingval::text::text[])[1], 'UTF8') AS missing,
       a.xmax::text::bigint AS replacing, pg_current_wal_insert_lsn()::text AS there
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.oid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum
"""


def fetch_growth(
    connection: psycopg.Connection[Any], oids: Mapping[str, int], known: Mapping[str, Known]
) -> Growth | None:
    """What a table has that is not known yet; of several, the first that has something. None if nothing is new."""
    found: dict[int, list[Any]] = {}
    for row in _fetch(connection, [*oids.values()]):
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
    again = {row.number: row for row in _fetch(connection, [rows[0].oid])}
    for row in new:
        seen = again.get(row.number)
        if seen is None or seen[:6] != row[:6] or is_being_changed(connection, seen.replacing):
            raise Determinate(
                f"the column {row.name!r} is being changed, by a transaction that is open: it looks again"
            )
    return Growth(name, tuple(map(_added, new)), file, parse_lsn(there))


def _fetch(connection: psycopg.Connection[Any], oids: list[int]) -> list[Any]:
    """The columns that the log has. `missing` is what rows have that are older than the column."""
    return connection.cursor(row_factory=namedtuple_row).execute(_COLUMNS, [oids]).fetchall()


def _added(row: Any) -> Added:
    wanted = arrow_type(row.type, row.modifier)
    values, bad = typed(pa.field(row.name, wanted), pa.array([row.missing], pa.large_binary()))
    if bad:
        raise changed(row.there, f"older rows have a default that cannot be kept: {bad[0]}")
    return Added(row.name, row.number, format_type(wanted), values[0].as_py())
