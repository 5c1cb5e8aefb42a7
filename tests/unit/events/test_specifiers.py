"""Naming a store: kinds, options with escaped colons, passwords that are never shown, other packages' kinds.

A log that a newer release made is refused, by readers and writers, before anything is changed.

Logs that the first version wrote, as files: later releases read them, continue them, and write the same bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib import events
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, InvalidUsage, NewerFormat, PersistError
from persist_lib.events import Kind, Opening, RecordStore, Specifier, known_kinds, open_store, parse_specifier
from persist_lib.events import store as kinds_module
from persist_lib.events.api import EVENTS
from persist_lib.events.log import cut
from persist_lib.events.record import NOTHING
from persist_lib.events.store import LogStore
from persist_lib.events.stores import disk
from persist_lib.events.stores.persist import HOLD
from persist_lib.events.stores.segments import HEADER_BYTES, encode_frame, encode_header
from tests import servers
from tests.eventlogs import KINDS, specifier, store_of, write


@pytest.mark.parametrize(
    ("text", "kind", "options"),
    [
        ("disk", "disk", ()),
        ("disk:/var/lib/ledger", "disk", ("/var/lib/ledger",)),
        (r"pg:postgresql\://u@h\:5432/db:ledger", "pg", ("postgresql://u@h:5432/db", "ledger")),
        (r"disk:a\\:b", "disk", ("a\\", "b")),
        (r"disk:C\dir", "disk", ("C\\dir",)),
        ("disk:", "disk", ("",)),
        ("found:jb7EK47A:DTu9A6qm@127.0.0.1\\:4500", "found", ("jb7EK47A", "DTu9A6qm@127.0.0.1:4500")),
    ],
)
def test_a_specifier_is_a_kind_and_options_in_which_colons_are_escaped(
    text: str, kind: str, options: tuple[str, ...]
) -> None:
    assert parse_specifier(text) == Specifier(kind, options)


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126))))
def test_a_specifier_is_written_as_it_is_read(options: list[str]) -> None:
    specifier = Specifier("disk", tuple(options))
    assert parse_specifier(specifier.text()) == specifier


@pytest.mark.parametrize("wrong", ["", "  ", ":x", "7:x", "a b:c", None, 7, b"disk", "disk:\n", "../x"])
def test_what_is_no_specifier_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidUsage, match="a store of events"):
        open_store(wrong)


def test_an_unknown_kind_lists_what_there_is_and_what_to_install() -> None:
    with pytest.raises(InvalidUsage) as refused:
        open_store("rocks:user:hunter2")
    said = str(refused.value)
    assert "no kind of event store called 'rocks'. Did you mean rock?" in said
    for kind in (
        "disk",
        "sqlt",
        "persist",
        "lmdb (pip install 'persist-lib[lmdb]')",
        "rock (pip install 'persist-lib[",
    ):
        assert kind in said
    assert "hunter2" not in said
    assert {*known_kinds()} >= {"disk", "sqlt", "lmdb", "rock", "pg", "s3", "gs", "az", "persist"}


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("lmdb", "lmdb"),
        ("rock", "rocksdict"),
        ("pg", "psycopg"),
        ("s3", "boto3"),
        ("gs", "google.auth"),
        ("az", "azure.core"),
    ],
)
def test_a_missing_extra_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name == f"persist_lib.events.stores.{kind}" or name.startswith(
            tuple(f"persist_lib.location.{one}" for one in ("postgres", "s3", "gcs", "azure"))
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InvalidUsage, match=rf"needs the package {package}, which is not installed: pip install 'persist-lib\["
    ):
        open_store(f"{kind}:x")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        rf"pg:postgresql\://u\:{SECRET}@127.0.0.1\:1/db:ledger",
        f"pg:postgresql://u:{SECRET}@127.0.0.1:1/db",
        rf"persist:file\:./nowhere:consensus=postgresql\://u\:{SECRET}@127.0.0.1\:1/db",
        rf"s3:s3\://bucket/x?endpoint=http\://u\:{SECRET}@127.0.0.1\:1",
        f"disk:a:password={SECRET}",
    ],
)
def test_a_password_is_shown_nowhere(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(text)
    assert SECRET not in f"{store!r} {store.specifier} {store.specifier!r}"
    for call in (store.reader, store.writer):
        with pytest.raises(PersistError) as failed:
            call()
        assert SECRET not in f"{failed.value} {failed.value.fields}"


@pytest.mark.parametrize("wrong", ["limit=", "limit=x", "limit=-1", "limit=89", "limit=100:limit=100"])
def test_a_limit_that_leaves_no_room_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"limit"):
        open_store(f"disk:{tmp_path}/log:{wrong}")


@pytest.mark.parametrize(
    "text", ["disk:a:b", "disk:", "sqlt:a:b", "lmdb:a:map=x", "rock:a:b", "pg:x", "pg", "s3", "s3:x", "persist"]
)
def test_wrong_options_are_refused_before_anything_is_made(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUsage, match="a store of events"):
        open_store(text).writer()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb", "rock"])
def test_a_place_that_cannot_be_made_is_a_determinate_failure(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Determinate, match="Not a directory"):
        open_store(f"{kind}:{tmp_path}/file/folder/log").writer()


def test_other_packages_add_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "third_party_events.py"
    of_ours = "from persist_lib.events.stores.disk import open_disk"
    module.write_text(f"from persist_lib.events import Kind\n{of_ours}\nKIND = Kind(open_disk)\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("theirs", "third_party_events:KIND", "persist.events"),
        EntryPoint("wrong", "os:path", "persist.events"),
    ]
    monkeypatch.setattr(kinds_module, "entry_points", lambda group: points if group == "persist.events" else [])
    assert known_kinds()["theirs"] == "of third_party_events:KIND"
    with open_store(f"theirs:{tmp_path}/log").writer() as writer:
        writer.write(1, b"one").result(30)
    with pytest.raises(InvalidUsage, match=r"entry point of wrong is no persist_lib.events.Kind"):
        open_store("wrong")
    sys.modules.pop("third_party_events", None)


def test_a_limit_bounds_what_a_driver_is_given(tmp_path: Path) -> None:
    most: list[int] = []

    def opened(options: Any, opening: Opening) -> RecordStore:
        records = disk.open_disk(options, opening)
        put = records.put

        def counted(epoch: int, puts: Any) -> None:
            most.extend(len(one.head) + memoryview(one.body).nbytes for one in puts)
            put(epoch, puts)

        records.put = counted  # type: ignore[method-assign]
        return records

    from persist_lib.events.store import LogStore  # noqa: PLC0415
    from persist_lib.runtime.ambient import Runtime  # noqa: PLC0415

    store = LogStore(Specifier("disk", (str(tmp_path / "log"), "limit=100")), Kind(opened), Runtime())
    with store.writer() as writer:
        for size in (0, 27, 33, 34, 35, 34 * 127, 34 * 127 + 1, 34 * 128, 10_000):
            writer.write(writer.accepted + 1, bytes(size))
        writer.write_snapshot(9, bytes(1000))
        writer.flush(30)
    assert max(most) == 100


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def named(given_input: str | None = None, given_output: str | None = None) -> tuple[str, str | None]:
    store, source = events.choose(given_input, given_output)
    return events.name_of(store), None if source is None else events.name_of(source)


@pytest.mark.usefixtures("_here")
def test_both_default_to_disk_and_an_input_that_was_not_given_counts_only_if_there_is_a_log() -> None:
    assert named() == ("disk", None)
    assert named(None, "sqlt:x") == ("sqlt:x", None)
    assert named("sqlt:x", "sqlt:x") == ("sqlt:x", None)
    assert named("sqlt:x") == ("disk", "sqlt:x"), "also one that is not there: it was given"
    assert named("sqlt:x", "lmdb:y") == ("lmdb:y", "sqlt:x")
    assert not list(Path().iterdir()), "nothing is opened"
    events.open_store("disk").writer().close()
    assert named(None, "sqlt:x") == ("sqlt:x", "disk")


@pytest.mark.parametrize("given", [("", None), (None, ""), ("found:x", None), (None, "5"), ("disk:\n", None)])
def test_what_names_no_store_is_refused(given: tuple[str | None, str | None]) -> None:
    with pytest.raises(persist.InvalidUsage):
        events.choose(*given)


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
