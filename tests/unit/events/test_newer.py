"""A log that a newer release made is refused, by readers and writers, before anything is changed.

Logs that the first version wrote, as files: later releases read them, continue them, and write the same bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import NewerFormat
from persist_lib.events import open_store
from persist_lib.events.api import EVENTS
from persist_lib.events.log import cut
from persist_lib.events.record import NOTHING
from persist_lib.events.store import LogStore
from persist_lib.events.stores.persist import HOLD
from persist_lib.events.stores.segments import HEADER_BYTES, encode_frame, encode_header
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


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "events_v1"
PAYLOADS = [b"event %d of the first version " % id_ * (1 if id_ % 2 else 5) for id_ in range(1, 5)]
"""Two writers wrote two of them each. Every second one is in fragments."""


@pytest.mark.parametrize("kind", ["disk", "sqlt"])
def test_a_log_of_the_first_version_is_read_and_goes_on(kind: str, tmp_path: Path) -> None:
    if kind == "disk":
        shutil.copytree(GOLDEN / kind, tmp_path / kind)
    else:
        shutil.copy(GOLDEN / kind, tmp_path / kind)
    store = open_store(f"{kind}:{tmp_path / kind}:limit=100")
    with store.reader() as reader:
        assert [bytes(event.payload) for event in reader.replay()] == PAYLOADS
        assert reader.newest_snapshot() == (4, b"state after 4")
        assert reader.newest_snapshot(3) == (2, b"state after 2")
        assert reader.read_mark("released") == b'{"through":4}'
    with store.writer() as writer:
        assert (writer.last, writer.epoch) == (4, 3)
        writer.write(4, PAYLOADS[3]).result(60)
        writer.write(5, b"new").result(60)
    with store.reader() as reader:
        assert [bytes(event.payload) for event in reader.replay()] == [*PAYLOADS, b"new"]


def test_this_release_writes_the_bytes_of_the_first_version() -> None:
    """Otherwise a new version of the format is due, which older releases refuse."""
    log, previous = bytes.fromhex(json.loads((GOLDEN / "disk" / "format.json").read_bytes())["log"]), NOTHING
    for epoch, first in ((1, 1), (2, 3)):
        found = (GOLDEN / "disk" / "events" / f"{epoch:010d}-{first:020d}").read_bytes()
        expected = encode_header(log, epoch, first)
        assert len(expected) == HEADER_BYTES
        for batch, id_ in enumerate((first, first + 1)):
            payload = PAYLOADS[id_ - 1]
            puts, previous = cut(
                EVENTS, id_, payload, log=log, epoch=epoch, previous=previous, limit=100
            )  # fmt: skip
            for put in puts:
                expected += encode_frame(put, batch, is_last=put is puts[-1]) + put.head + bytes(put.body)
        assert found == expected
