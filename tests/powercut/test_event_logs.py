"""The power is cut at any moment of writing events to disk: what was acknowledged is there, and everything goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from persist_lib.errors import NotFound, PersistError
from persist_lib.events import open_store
from persist_lib.events.stores import disk as disk_store
from tests.powercut.disk import Disk, Event, Named, Said, Synced, fates, moments
from tests.powercut.recording import Recorder

CUTS = int(os.environ.get("PERSIST_POWER_CUTS", "120"))
PER_HISTORY = 120
TRIED, ACKED, NOTED, OPENED = "tried", "acked", "noted", "opened"


class History(NamedTuple):
    """What was written, and what happened on disk."""

    payloads: list[bytes]
    events: list[Event]
    folders: set[int]


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "SEGMENT_BYTES", 3000)


def record(folder: Path, rng: random.Random, events: int = 40) -> History:
    """Several writers, one after the other: some are closed, and some only stop."""
    folder.mkdir()
    recorder = Recorder(folder)
    payloads = [rng.randbytes(rng.choice([0, 5, 100, 700, 2500])) for _ in range(events)]
    with recorder.recording():
        store = open_store(f"disk:{folder}/log{rng.choice(['', ':limit=300'])}")
        left = []
        while True:
            writer = store.writer()
            recorder.say(OPENED)
            for _ in range(rng.randrange(1, 8)):
                futures = []
                for _ in range(min(rng.choice([1, 1, 4]), events - writer.accepted)):
                    recorder.say(TRIED)
                    futures.append(writer.write(writer.accepted + 1, payloads[writer.accepted]))
                    futures[-1].add_done_callback(lambda _: recorder.say(ACKED))
                for future in futures:
                    future.result(30)
                if rng.random() < 0.3:
                    writer.write_snapshot(writer.last, b"state %d" % writer.last).result(30)
                    recorder.say(NOTED, writer.last)
            left.append(writer)
            if rng.random() < 0.5:
                left.pop().close()
            if writer.last == events:
                break
        for writer in left:
            writer.close()
    shutil.rmtree(folder)
    return History(payloads, recorder.events, recorder.folders)


def judge(folder: Path, history: History, said: list[Said]) -> None:
    """What was acknowledged is there, nothing else is, and a writer continues."""
    words = Counter(one.word for one in said)
    noted = max((one.number for one in said if one.word == NOTED), default=None)
    store = open_store(f"disk:{folder}/log")
    for again in range(2):
        try:
            with store.reader() as reader:
                found = [bytes(event.payload) for event in reader.replay()]
                snapshot = reader.newest_snapshot()
        except NotFound:
            assert not words[OPENED]
            found, snapshot = [], None
        assert words[ACKED] <= len(found) - again <= words[TRIED], f"{len(found)} events after {dict(words)}"
        assert found[: len(found) - again] == history.payloads[: len(found) - again]
        if noted is not None:
            assert snapshot is not None
            assert snapshot[0] >= noted
            assert snapshot[1] == b"state %d" % snapshot[0]
        if not again:
            with store.writer() as writer:
                assert writer.last == len(found)
                writer.write(writer.last + 1, b"afterwards").result(30)


def look(history: History, at: dict[int, list[str]], rng: random.Random, place: Path) -> int:
    """Cut the power after so many events, with each of these fates. Returns how many disks were right."""
    disk, choices, right = Disk(), fates(rng), 0
    for number, event in enumerate([*history.events, None]):
        for name in at.get(number, ()):
            disk.image(choices[name](), history.folders, place)
            try:
                judge(place, history, disk.said)
            except Exception as error:
                error.add_note(f"cut after event {number} of {len(history.events)}, kept: {name}")
                raise
            shutil.rmtree(place)
            right += 1
        if event is not None:
            disk.follow(event)
    return right


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("number", range(-(-CUTS // PER_HISTORY)))
def test_events_that_were_acknowledged_survive_a_power_cut_at_any_moment(
    tmp_path: Path, rng: random.Random, number: int
) -> None:
    history = record(tmp_path / "recorded", rng)
    worst, names, chosen = [*moments(history.events)], [*fates(rng)], dict[int, list[str]]()
    cuts = min(PER_HISTORY, CUTS - number * PER_HISTORY)
    for _ in range(cuts):
        moment = rng.choice(worst) if rng.random() < 0.7 else rng.randrange(len(history.events) + 1)
        chosen.setdefault(moment, []).append(rng.choice(names))
    assert look(history, chosen, rng, tmp_path / "disk") == cuts


def finds(history: History, rng: random.Random, place: Path) -> bool:
    """Whether a cut right after an acknowledgement is found to have harmed."""
    acks = [n + 1 for n, event in enumerate(history.events) if isinstance(event, Said) and event.word == ACKED]
    try:
        look(history, {number: ["nothing"] for number in acks}, rng, place)
    except (AssertionError, PersistError):
        shutil.rmtree(place)
        return True
    return False


@pytest.mark.usefixtures("small_segments")
def test_a_forgotten_fsync_of_a_log_is_found(tmp_path: Path, rng: random.Random) -> None:
    history = record(tmp_path / "recorded", rng)
    place = tmp_path / "disk"
    assert not finds(history, rng, place)
    segments = {
        event.node
        for event in history.events
        if isinstance(event, Named) and len(event.name) == 31 and event.name[10] == "-"
    }
    folders = {event.parent for event in history.events if isinstance(event, Named) and event.node in segments}
    assert len(segments) > 3

    def forgetting(is_forgotten: Callable[[int | None], bool]) -> History:
        events = [one for one in history.events if not (isinstance(one, Synced) and is_forgotten(one.node))]
        return history._replace(events=events)

    assert finds(forgetting(segments.__contains__), rng, place), "of segments"
    assert finds(forgetting(folders.__contains__), rng, place), "of their directory"
