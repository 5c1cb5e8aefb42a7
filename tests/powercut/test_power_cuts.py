"""The power is cut at any moment of work on files and SQLite: what was acknowledged is there, and everything continues.

PERSIST_POWER_CUTS says how many disks are looked at, of all that a cut after any operation may leave.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.location import directories, open_location
from persist_lib.location.file.blob import FileBlob
from persist_lib.location.sqlite import file as sqlite_file
from persist_lib.testing import ManualClock
from tests.powercut.disk import Disk, Event, Named, Said, Synced, Written, fates, moments
from tests.powercut.recording import Recorder
from tests.powercut.work import ACKED, OPENED, SHARD, TRIED, Append, client_at, judge, plan, work
from tests.worlds import SCHEMA, row

CUTS = int(os.environ.get("PERSIST_POWER_CUTS", "120"))
PER_HISTORY = 60
"""Disks of one history before another one is recorded."""


class History(NamedTuple):
    """What was asked for, and what happened on disk."""

    todo: list[Append]
    events: list[Event]
    folders: set[int]


def record(folder: Path, rng: random.Random, appends: int = 40) -> History:
    folder.mkdir()
    recorder, todo = Recorder(folder), plan(rng, appends)
    with recorder.recording():
        work(folder / "data", recorder, todo, rng)
    shutil.rmtree(folder)
    return History(todo, recorder.events, recorder.folders)


def look(history: History, at: dict[int, list[str]], rng: random.Random, place: Path) -> int:
    """Cut the power after so many events, with each of these fates; answers how many disks were right."""
    disk, choices, right = Disk(), fates(rng), 0
    for number, event in enumerate([*history.events, None]):
        for name in at.get(number, ()):
            seed = rng.getrandbits(32)
            rng_of_cut = random.Random(seed)
            disk.image(choices[name](), history.folders, place)
            for left in place.glob("data/consensus.sqlite"):
                left.with_name(left.name + "-shm").write_bytes(rng_of_cut.randbytes(rng_of_cut.choice([0, 32768])))
            try:
                judge(place / "data", history.todo, disk.said, rng_of_cut)
            except Exception as error:
                error.add_note(f"cut after event {number} of {len(history.events)}, kept: {name}")
                raise
            shutil.rmtree(place)
            right += 1
        if event is not None:
            disk.follow(event)
    return right


def sample(history: History, rng: random.Random, cuts: int) -> dict[int, list[str]]:
    """The worst moments with the worst fates, and any with any."""
    worst, names = [*moments(history.events)], [*fates(rng)]
    chosen: dict[int, list[str]] = {}
    for _ in range(cuts):
        number = rng.choice(worst) if rng.random() < 0.8 else rng.randrange(len(history.events) + 1)
        chosen.setdefault(number, []).append(rng.choice(names))
    return chosen


@pytest.fixture
def often_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite writes its log back, and begins it again, every few appends instead of every few hundred."""
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 12)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


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


def forgetting(history: History, is_forgotten: Callable[[int], bool]) -> History:
    """The same without some fsyncs: what code that forgot them would have done."""
    events = [one for one in history.events if not (isinstance(one, Synced) and is_forgotten(one.node))]
    return history._replace(events=events)


def holders(history: History, ending: str) -> Iterator[tuple[int, int]]:
    """The directory and the file of each name that ends so."""
    for event in history.events:
        if isinstance(event, Named) and event.node is not None and event.name.endswith(ending):
            yield event.parent, event.node


def finds(history: History, rng: random.Random, place: Path, names: Sequence[str] = ("nothing",)) -> bool:
    """Whether some cut right after an acknowledgement is found to have harmed."""
    acks = [
        number + 1 for number, event in enumerate(history.events) if isinstance(event, Said) and event.word == ACKED
    ]
    try:
        look(history, {number: list(names) for number in acks}, rng, place)
    except (AssertionError, PersistError):
        shutil.rmtree(place)
        return True
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("often_written_back")
def test_a_forgotten_fsync_is_found(tmp_path: Path, rng: random.Random) -> None:
    while not any(holders(history := record(tmp_path / "recorded", rng, appends=12), ".parquet")):
        pass  # few appends may all be small
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
    history = History(todo, recorder.events, recorder.folders)
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
