"""A log that a newer release made is refused, by readers and writers, before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import NewerFormat
from persist_lib.events.store import LogStore
from persist_lib.events.stores.persist import HOLD
from tests import servers
from tests.eventlogs import KINDS, specifier, store_of, write


def make_newer(kind: str, store: LogStore, folder: Path) -> None:
    """Let a log say that it is of format 2."""
    newer = {"events": 2, "log": "00" * 8, "whatever": "comes"}
    place = folder / store.specifier.options[0].rpartition("/")[2]
    match kind:
        case "disk":
            (place / "format.json").write_text(json.dumps(newer))
        case "sqlt":
            import apsw  # noqa: PLC0415

            connection = apsw.Connection(str(place))
            connection.pragma("user_version", 2)
            connection.pragma("wal_checkpoint", "truncate")
            connection.close()
        case "lmdb":
            import lmdb  # noqa: PLC0415

            with lmdb.open(str(place)) as env, env.begin(write=True) as transaction:
                transaction.put(b"\0meta", json.dumps(newer).encode())
        case "rock":
            from rocksdict import Options, Rdict  # noqa: PLC0415

            db = Rdict(str(place), Options(raw_mode=True))
            db[b"\0meta"] = json.dumps(newer).encode()
            db.close()
        case "s3":
            records: Any = store.open_driver(create=False)
            records._objects.overwrite("events.json", json.dumps(newer).encode())
            records.close()
        case _:
            with persist.open(store.specifier.options[0]) as client:
                machine = client.machine("events")
                machine.commit(
                    lambda state, _: c.SetHold(HOLD, state.since, state.holds[HOLD].opaque, msgspec.json.encode(newer))
                )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pg"])
def test_a_newer_format_is_refused_before_any_change(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    write(store, [b"one"])
    make_newer(kind, store, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} if kind == "disk" else {}
    for call in (store.reader, store.writer):
        with pytest.raises(NewerFormat) as refused:
            call()
        assert (refused.value.found, refused.value.known) == (2, 1)
    assert before == ({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} if before else {})


def test_newer_tables_of_postgresql_are_refused_before_any_change(tmp_path: Path) -> None:
    url = servers.postgres_at(persist_schema="newer_events")
    from persist_lib.events import open_store  # noqa: PLC0415

    store = open_store("pg:" + url.replace(":", "\\:") + ":ledger")
    write(store, [b"one"])
    with psycopg.connect(servers.postgres_url(), autocommit=True) as connection:
        connection.execute("UPDATE newer_events.event_layout SET version = 2")
        for call in (store.reader, store.writer):
            with pytest.raises(NewerFormat):
                call()
        connection.execute("DROP SCHEMA newer_events CASCADE")
    assert specifier("pg", tmp_path)
