"""The same for logs in PostgreSQL and on S3, whose bytes are columns of rows, and objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from persist_lib.events import open_store
from tests import servers
from tests.eventlogs import specifier
from tests.storedbytes import PAYLOADS, fill, look, of_bytes

FEW = PAYLOADS[:5]
SNAPSHOT = 4
Said = dict[tuple[str, str], list[str]]
Place = tuple[str, bytes, Callable[[bytes], object]]
"""A region, the bytes that are stored there, and what stores others."""


def damage_served(kind: str, folder: Path, count: int, *, is_sample: bool = False) -> Said:
    """What is said of each damage, by region and kind. `is_sample`: of one kind for each value."""
    where = specifier(kind, folder)
    with open_store(where) as store, store.writer() as writer:
        fill(writer, FEW, SNAPSHOT)
    name = where.rpartition(":")[2] if kind == "pg" else where.partition("?")[0].rpartition("/")[2]
    found: Said = {}
    chance = random.Random(1)
    for at, (region, data, write) in enumerate(_columns(name) if kind == "pg" else _objects(where)):
        cases = list(of_bytes(region, data, count, chance))
        if is_sample:  # of every second value
            cases = cases[at // 2 % len(cases) :: len(cases)] if at % 2 == 0 else []
        for wrong in cases:
            changed = wrong.of(data)
            write(changed)
            found.setdefault((region, wrong.kind), []).append(look(where, (name,), FEW, SNAPSHOT))
        write(data)
    return found


def _columns(name: str) -> Iterator[Place]:
    with psycopg.connect(servers.postgres_url(), autocommit=True) as connection:
        number, log = _row(connection, "SELECT number, log FROM persist.event_log WHERE name = %s", (name,))

        def of_log(data: bytes) -> object:
            return connection.execute("UPDATE persist.event_log SET log = %s WHERE number = %s", (data, number))

        yield "event_log.log", log, of_log
        for space, id_ in (("events", 2), ("events", len(FEW)), ("mark-m", 1), ("snapshots", SNAPSHOT)):
            for column in ("head", "body"):
                where = "WHERE number = %s AND space = %s AND id = %s"
                found = sql.SQL("SELECT {} FROM persist.event_record " + where).format(sql.Identifier(column))
                change = sql.SQL("UPDATE persist.event_record SET {} = %s " + where).format(sql.Identifier(column))
                (data,) = _row(connection, found, (number, space, id_))
                yield f"{space}, {column}", data, partial(_replace, connection, change, (number, space, id_))


def _replace(connection: Any, change: Any, where: tuple[object, ...], data: bytes) -> None:
    connection.execute(change, (data, *where))


def _row(connection: Any, query: Any, values: tuple[object, ...]) -> Any:
    return connection.execute(query, values).fetchone()


def _objects(where: str) -> Iterator[Place]:
    with open_store(where) as store:
        records: Any = store.records
        for name in list(records._objects.names("")):
            if not name.startswith("events/") or int(name.split("/")[1]) in (2, len(FEW)):
                data, _ = records._objects.get(name)
                yield name.partition("/")[0], data, partial(records._objects.overwrite, name)
