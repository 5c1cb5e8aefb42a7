"""The power is cut at any moment of writing events to disk: what was acknowledged is there, and everything goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from persist_lib.errors import NotFound
from persist_lib.events import open_store
from persist_lib.events.stores import disk as disk_store
from tests.powercut.cuts import History, finds, forgetting, look, sample
from tests.powercut.disk import Named, Said
from tests.powercut.recording import Recorder
from tests.powercut.work import ACKED, OPENED, TRIED

CUTS = int(os.environ.get("PERSIST_POWER_CUTS", "120"))
PER_HISTORY = 120
NOTED = "noted"


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
    return History(payloads, recorder.events, recorder.folders, judge)


def judge(folder: Path, history: History, said: list[Said], _rng: random.Random) -> None:
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
        assert found[: len(found) - again] == history.todo[: len(found) - again]
        if noted is not None:
            assert snapshot is not None
            assert snapshot[0] >= noted
            assert snapshot[1] == b"state %d" % snapshot[0]
        if not again:
            with store.writer() as writer:
                assert writer.last == len(found)
                writer.write(writer.last + 1, b"afterwards").result(30)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("number", range(-(-CUTS // PER_HISTORY)))
def test_events_that_were_acknowledged_survive_a_power_cut_at_any_moment(
    tmp_path: Path, rng: random.Random, number: int
) -> None:
    history = record(tmp_path / "recorded", rng)
    cuts = min(PER_HISTORY, CUTS - number * PER_HISTORY)
    assert look(history, sample(history, rng, cuts), rng, tmp_path / "disk") == cuts


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

    assert finds(forgetting(history, segments.__contains__), rng, place), "of segments"
    assert finds(forgetting(history, folders.__contains__), rng, place), "of their directory"
