"""The power is cut at any moment of work on files and SQLite: what was acknowledged is there, and everything continues.

PERSIST_POWER_CUTS says how many disks are looked at, of all that a cut after any operation may leave.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import persist_lib as persist
from persist_lib.location import directories, open_location
from persist_lib.location.file.blob import FileBlob
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.testing import ManualClock
from tests.powercut.cuts import History, finds, forgetting, look, sample
from tests.powercut.disk import Disk, Named, Said, Written, fates
from tests.powercut.recording import Recorder
from tests.powercut.work import ACKED, OPENED, SHARD, TRIED, Append, client_at, judge, plan, work
from tests.worlds import SCHEMA, row

CUTS = int(os.environ.get("PERSIST_POWER_CUTS", "120"))
PER_HISTORY = 60
"""Disks of one history before another one is recorded."""


def record(folder: Path, rng: random.Random, appends: int = 40) -> History:
    folder.mkdir()
    recorder, todo = Recorder(folder), plan(rng, appends)
    with recorder.recording():
        work(folder / "data", recorder, todo, rng)
    shutil.rmtree(folder)
    return History(todo, recorder.events, recorder.folders, judge_files)


def judge_files(place: Path, history: History, said: list[Said], rng: random.Random) -> None:
    for left in place.glob("data/consensus.sqlite"):
        left.with_name(left.name + "-shm").write_bytes(rng.randbytes(rng.choice([0, 32768])))
    judge(place / "data", history.todo, said, rng)


@pytest.fixture
def often_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite writes its log back, and begins it again, every few appends instead of every few hundred."""
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("often_written_back")
@pytest.mark.parametrize("history", range(-(-CUTS // PER_HISTORY)))
def test_what_was_acknowledged_survives_a_power_cut_at_any_moment(
    tmp_path: Path, rng: random.Random, history: int
) -> None:
    recorded = record(tmp_path / "recorded", rng)
    check_it_covers(recorded)
    cuts = min(PER_HISTORY, CUTS - history * PER_HISTORY)
    assert look(recorded, sample(recorded, rng, cuts), rng, tmp_path / "disk") == cuts


def check_it_covers(history: History) -> None:
    """A history without what a power cut may harm would show nothing."""
    kinds = Counter(type(event).__name__ for event in history.events)
    starts = Counter((event.node, event.start) for event in history.events if isinstance(event, Written))
    assert kinds["Synced"] > 100
    assert any(
        event.node is None and event.name.endswith(".parquet") for event in history.events if isinstance(event, Named)
    )
    logs = {event.node for event in history.events if isinstance(event, Named) and event.name.endswith("-wal")}
    assert max(starts[node, 0] for node in logs if node is not None) > 1, "no log was begun again"


def holders(history: History, ending: str) -> Iterator[tuple[int, int]]:
    """The directory and the file of each name that ends so and was made before the last acknowledgement."""
    acks = [n for n, event in enumerate(history.events) if isinstance(event, Said) and event.word == ACKED]
    for event in history.events[: acks[-1]]:
        if isinstance(event, Named) and event.node is not None and event.name.endswith(ending):
            yield event.parent, event.node


@pytest.mark.slow
@pytest.mark.usefixtures("often_written_back")
def test_a_forgotten_fsync_is_found(tmp_path: Path, rng: random.Random) -> None:
    while not any(holders(history := record(tmp_path / "recorded", rng, appends=12), ".parquet")):
        pass  # few appends may all be small, and a duty after them is acknowledged by nothing
    place = tmp_path / "disk"
    assert not finds(history, rng, place)
    folders = {parent for parent, _ in holders(history, ".parquet")}
    assert finds(forgetting(history, folders.__contains__), rng, place), "of the directory that parts are in"
    parts = {node for _, node in holders(history, ".parquet")}
    assert finds(forgetting(history, parts.__contains__), rng, place), "of parts"
    logs = {node for _, node in holders(history, "-wal")}
    assert finds(forgetting(history, logs.__contains__), rng, place), "of SQLite's log"


@pytest.mark.slow
@pytest.mark.usefixtures("often_written_back")
def test_so_is_a_log_that_sqlite_does_not_sync_at_each_commit(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite_file.connect

    def lazy(*args: Any) -> apsw.Connection:
        connection = connect(*args)
        connection.pragma("synchronous", "normal")
        return connection

    monkeypatch.setattr(sqlite_file, "connect", lazy)
    assert finds(record(tmp_path / "recorded", rng, appends=12), rng, tmp_path / "disk")


def _half_made_marker(folder: Path) -> None:
    directories.make_directories(folder)
    with (folder / ".persist.json.0").open("xb") as temporary:
        temporary.write(b'{"format": 1}\n')
        temporary.flush()
        os.fsync(temporary.fileno())
    os.link(folder / ".persist.json.0", folder / "persist.json")
    os.unlink(folder / ".persist.json.0")  # noqa: PTH108 - what is recorded


def _half_made_blobs(folder: Path) -> None:
    client_at(folder, ManualClock(), random.Random(0)).close()
    (folder / "blob").mkdir()


def _half_made_database(folder: Path) -> None:
    client_at(folder, ManualClock(), random.Random(0)).close()
    database = folder / "consensus.sqlite"
    os.link(database, folder / ".kept")
    os.unlink(database)  # noqa: PTH108
    directories.fsync_directory(folder)
    os.link(folder / ".kept", database)
    os.unlink(folder / ".kept")  # noqa: PTH108


HALF_MADE: dict[str, Callable[[Path], object]] = {
    "the location's directory": Path.mkdir,
    "its marker": _half_made_marker,
    "the blobs' directory": _half_made_blobs,
    "the database": _half_made_database,
}
"""What another process had made, without having come to the fsync of the directory that it is in."""


@pytest.mark.parametrize("what", [*HALF_MADE])
def test_nobody_relies_on_what_another_had_not_made_durable_yet(tmp_path: Path, rng: random.Random, what: str) -> None:
    """Whoever finds a directory or a file there may not take it for durable: its maker may never come to the fsync."""
    root = tmp_path / "recorded"
    root.mkdir()
    recorder, todo = Recorder(root), [Append(number, ((number, "a"),)) for number in range(3)]
    with recorder.recording():
        HALF_MADE[what](root / "data")
        location = open_location(f"file:{root}/data", create=True, clock=(clock := ManualClock()))
        config = persist.Config(inline_bytes=0)
        with persist.open(location, config=config, runtime=clock.runtime()) as client:
            write = client.open_writer(SHARD, SCHEMA)
            recorder.say(OPENED)
            for append in todo:
                recorder.say(TRIED, append.number)
                write.compare_and_append([row(append.number, "a", append.number)], append.number, append.number + 1)
                recorder.say(ACKED, append.number)
    history = History(todo, recorder.events, recorder.folders, judge_files)
    acks = [number + 1 for number, event in enumerate(history.events) if isinstance(event, Said)]
    assert look(history, {number: ["nothing"] for number in acks}, rng, tmp_path / "disk") == len(acks)


@pytest.mark.parametrize("found", ["", "blob", "blob/s", "blob/s/w"])
def test_a_blob_is_durable_in_directories_that_another_has_just_made(tmp_path: Path, found: str) -> None:
    root = tmp_path / "recorded"
    root.mkdir()
    recorder = Recorder(root)
    with recorder.recording():
        if found:  # whoever makes the blobs' directory has made the location's, durably
            directories.make_directories(root / "data")
        (root / "data" / found).mkdir(parents=True, exist_ok=True)
        blob = FileBlob(root / "data" / "blob")
        blob.set("s/w/part", b"acknowledged")
        recorder.say(ACKED)
        blob.close()
    disk = Disk()
    for event in recorder.events:
        if isinstance(event, Said):
            break
        disk.follow(event)
    disk.image(fates(random.Random(0))["nothing"](), recorder.folders, tmp_path / "disk")
    assert (tmp_path / "disk/data/blob/s/w/part").read_bytes() == b"acknowledged"
