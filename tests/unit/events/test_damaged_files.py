"""Single damages to files of event logs that were once told as something else, or not at all; and how a log is mended.

That needs no guess: the first events that verify stay, and the log continues.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from persist_lib.errors import Corrupt, Damage, HistoryRegressed, InvalidUsage, Locked, Missing
from persist_lib.events import Loop, check, copy, open_store, repair
from persist_lib.events.store import LogStore
from persist_lib.events.stores.shared import EndMark
from tests.eventlogs import contents, store_of, write
from tests.storedbytes import PAYLOADS, Wrong, ask, make
from tests.unit.events.programs import Counter
from tests.unit.events.stored import MemoryStore


def log_of(kind: str, folder: Path, *, is_killed: bool = False) -> tuple[LogStore, Path]:
    place = make(kind, folder, is_killed=is_killed)
    return open_store(f"{kind}:{place / 'events'}"), place


def flip(path: Path, at: int) -> None:
    path.write_bytes(Wrong("", "flip", at).of(path.read_bytes()))


def uses_of(store: LogStore, folder: Path) -> dict[str, Callable[[], object]]:
    """All that a damaged log must not look empty, or shorter, to."""
    target, program = open_store(f"disk:{folder / 'copy'}"), Counter().program
    from persist_lib.events import Loop, compare  # noqa: PLC0415

    return {
        "check": lambda: check(store), "copy": lambda: copy(store, target), "compare": lambda: compare(store, target),
        "move": lambda: Loop(target, program, source=store), "loop": lambda: Loop(store, program),
        "writer": store.writer,
    }  # fmt: skip


@pytest.mark.parametrize("use", ["check", "copy", "compare", "move", "loop", "writer"])
def test_a_flipped_bit_in_the_last_block_of_rocksdb_is_no_empty_log(use: str, tmp_path: Path) -> None:
    """Its iterator is not valid at the end, and neither at damage."""
    store = open_store(f"rock:{tmp_path / 'events'}")
    write(store, [random.Random(number).randbytes(300) for number in range(100)])
    (table,) = tmp_path.rglob("*.sst")
    flip(table, len(table.read_bytes()) - 4000)
    (tmp_path / "events" / "end").unlink()  # an end mark would say so too
    with pytest.raises(Corrupt, match=r"RocksDB database .* is damaged"):
        uses_of(store, tmp_path)[use]()
    assert not (tmp_path / "copy" / "format.json").exists()


def test_a_damaged_rocksdb_is_not_told_as_locked(tmp_path: Path) -> None:
    """`block checksum mismatch` has the word lock in it; so may a path."""
    store, place = log_of("rock", tmp_path / "block")
    (table,) = place.rglob("*.sst")
    flip(table, len(table.read_bytes()) - 60)  # in its last block, which is read when it is opened
    with pytest.raises(Corrupt):
        store.writer()


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_rocksdb_that_another_process_writes_is_told_as_locked(tmp_path: Path) -> None:
    store, place = log_of("rock", tmp_path)
    command = [sys.executable, "-c", HOLD, str(place / "events" / "LOCK")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(Locked):
            store.writer()
        other.communicate(b"\n")
    store.writer().close()


def test_a_damaged_event_in_lmdb_is_damage_and_not_a_view_in_use(tmp_path: Path) -> None:
    store, place = log_of("lmdb", tmp_path)
    path = place / "events" / "data.mdb"
    data = path.read_bytes()
    path.write_bytes(data.replace(PAYLOADS[34][:20], PAYLOADS[34][:19] + b"X"))
    with pytest.raises(Corrupt, match=r"record 35:0 .* its digest"):
        check(store)
    path.write_bytes(data)
    assert contents(store) == PAYLOADS, "it was closed, and opened again"


def test_a_cut_lmdb_file_does_not_end_the_process(tmp_path: Path) -> None:
    place = make("lmdb", tmp_path, is_killed=False)
    size = (place / "events" / "data.mdb").stat().st_size
    cuts = [Wrong("events/data.mdb", "cut", at) for at in (size // 8, size // 2, size - 5000, 5000, 100)]
    for said in ask("lmdb", place, cuts, tmp_path / "work"):
        assert said.startswith("Corrupt: the LMDB database"), said


@pytest.mark.parametrize("kind", ["disk", "sqlt", "rock"])
def test_a_cut_end_of_a_killed_writers_file_is_missed(kind: str, tmp_path: Path) -> None:
    store, place = log_of(kind, tmp_path, is_killed=True)
    names = {"disk": "0000000001-*", "sqlt": "events-wal", "rock": "*.log"}
    (path,) = place.rglob(names[kind])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    for use in uses_of(store, tmp_path).values():
        with pytest.raises(Missing, match="are gone"):
            use()
    assert kind != "sqlt" or path.read_bytes() == data[: len(data) * 3 // 4], "what is left of it is not written over"


@pytest.mark.parametrize("kind", ["sqlt", "lmdb", "rock"])
def test_a_log_that_lost_events_is_not_claimed(kind: str, tmp_path: Path) -> None:
    store = open_store(f"{kind}:{tmp_path / 'events'}")
    write(store, [b"one"])
    with store.reader(), store as opened:
        (path,) = tmp_path.rglob("*end")
        EndMark(path).write(opened.records.log, 2)
    with pytest.raises(Missing, match="Nothing was changed"):
        store.writer()
    path.unlink()
    with store.writer() as writer:
        assert writer.epoch == 2, "the failed start claimed none"


@pytest.mark.parametrize("kind", ["sqlt", "lmdb", "rock"])
def test_no_new_log_is_made_where_one_is_gone(kind: str, tmp_path: Path) -> None:
    store, place = log_of(kind, tmp_path)
    for path in [path for path in place.rglob("*") if path.is_file() and not path.name.endswith("end")]:
        path.unlink()
    with pytest.raises(Damage, match="there was one, up to event 40"):
        store.writer()
    for path in place.rglob("*end"):
        path.unlink()
    store.writer().close()


def test_an_end_mark_of_another_log_says_nothing(tmp_path: Path) -> None:
    store, place = log_of("lmdb", tmp_path / "one")
    _, other = log_of("lmdb", tmp_path / "two")
    shutil.copy(other / "events" / "end", place / "events" / "end")
    assert check(store).events == len(PAYLOADS)


KEPT = [b"event %d " % number * 20 for number in range(1, 13)]


def damaged(kind: str, folder: Path) -> str:
    """A log of 12 events, each of its own batch, with a snapshot after the tenth; a byte of the eighth is wrong."""
    place = f"{kind}:{folder / 'log'}"
    with open_store(place) as store, store.writer() as writer:
        for number, payload in enumerate(KEPT, 1):
            writer.write(number, payload).result(60)
            if number == 10:
                writer.write_snapshot(10, b"state").result(60)
    (path,) = [path for path in folder.rglob("*") if path.is_file() and KEPT[7] in path.read_bytes()]
    data = path.read_bytes()
    wrong = KEPT[7][:30] + b"X" + KEPT[7][31:]
    path.write_bytes(data.replace(KEPT[7], wrong))  # also in pages that LMDB does not use any more
    return place


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb"])
def test_a_log_keeps_the_events_before_the_damage_and_goes_on(kind: str, tmp_path: Path) -> None:
    place = damaged(kind, tmp_path)
    with open_store(place) as store:
        planned = repair(store)
        assert (planned.events, planned.dropped, planned.snapshots) == (7, 5, 1)
        assert any("8" in finding for finding in planned.findings)
        with pytest.raises(Damage):
            check(store)
        assert repair(store, apply=True) == planned
        assert contents(store) == KEPT[:7]
        assert repair(store).findings == ()
        with store.writer() as writer:
            writer.write(8, b"again").result(60)
        assert check(store).events == 8


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb", "rock"])
def test_a_whole_log_is_left_alone(kind: str, tmp_path: Path) -> None:
    with store_of(kind, tmp_path) as store:
        with store.writer() as writer:
            writer.write(1, b"one").result(60)
        found = repair(store, apply=True)
        assert (found.events, found.dropped, found.findings) == (1, 0, ())
        with store.writer() as writer:
            assert writer.epoch == 2, "no epoch was claimed by the repair"


def test_what_cannot_be_mended_in_place_is_refused(tmp_path: Path) -> None:
    place = f"persist:file\\:{tmp_path}/data:log"
    with open_store(place) as store:
        with store.writer() as writer:
            writer.write(1, b"one").result(60)
        for one in (store, MemoryStore()):
            with pytest.raises(InvalidUsage, match="not mended in place") as told:
                repair(one)
            assert one is not store or "`persist shard repair`" in told.value.message, "what to do instead"


def test_a_loop_that_had_released_more_says_so_after_a_repair(tmp_path: Path) -> None:
    place = f"sqlt:{tmp_path}/log"
    with Loop(place, Counter().program) as loop:
        for number in range(4):
            loop.submit(b"%d" % number)
    with open_store(place) as store:
        driver = store.open_driver(create=True)
        epoch = driver.claim("")
        driver.remove(epoch, "snapshots", 100)
        driver.discard(epoch, 2)
        driver.close()
        with pytest.raises(HistoryRegressed, match="ends at event 2, and effects were released up to event 4"):
            check(store)
        with pytest.raises(HistoryRegressed):
            Loop(place, Counter().program)
