"""The power is cut while chunks are stored in a cache on disk: whatever is left there, reads give what was written.

A cache syncs nothing, so after a cut its files may have their names and other bytes. Nothing of it counts but a digest.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.config import CacheConfig
from persist_lib.location.wrap import chunk_cache
from persist_lib.testing import contents_of
from tests.powercut.cuts import History, finds, look, sample
from tests.powercut.disk import Said
from tests.powercut.recording import Recorder
from tests.powercut.work import ACKED
from tests.worlds import SCHEMA

CUTS = int(os.environ.get("PERSIST_POWER_CUTS", "120"))
PER_HISTORY = 120
APPENDS = 12
NUMBERS = count()


class Cached:
    """A location that no cut harms, and clients that keep what they read of it on a disk that one does."""

    def __init__(self) -> None:
        self.url = f"memory:powercut-{os.getpid()}-{next(NUMBERS)}"
        self._keeps = persist.open(self.url, config=persist.Config(inline_bytes=0))
        write, self._read = self._keeps.open_shard("s", SCHEMA)
        for n in range(APPENDS):
            rows = [{"id": n * 1000 + i, "word": f"{n} {i}" * 5, "_time": n} for i in range(40)]
            write.compare_and_append(rows, n, n + 1)

    def read(self, cache: Path, at: int) -> tuple[Counter[tuple[object, ...]], int]:
        """The contents as of a time by a client with this cache, and how many damaged chunks it found there."""
        config = persist.Config(cache=CacheConfig(path=str(cache), disk_bytes=20_000, memory_bytes=0))
        with persist.open(self.url, config=config) as client:
            with client.open_reader("s") as read:
                found = contents_of(read.snapshot(at, diff=True).to_arrow())
            counts = client.metrics().cache
            assert counts is not None
            return found, counts.damaged

    def expected(self, at: int) -> Counter[tuple[object, ...]]:
        return Counter({(n * 1000 + i, f"{n} {i}" * 5): 1 for n in range(at + 1) for i in range(40)})

    def judge(self, place: Path, history: History, said: list[Said], rng: random.Random) -> None:
        """Whatever is left: reads are right, and what was damaged is stored again, so it is found once."""
        at = rng.randrange(APPENDS)
        for attempt in range(2):
            found, damaged = self.read(place / "cache", at)
            assert found == self.expected(at), f"after {len(said)} reads of {history.todo}"
            assert not (attempt and damaged), "what was found damaged is still there"

    def record(self, folder: Path, rng: random.Random) -> History:
        folder.mkdir()
        recorder, todo = Recorder(folder), [rng.randrange(APPENDS) for _ in range(10)]
        with recorder.recording():
            for at in todo:
                self.read(folder / "cache", at)
                recorder.say(ACKED)
        shutil.rmtree(folder)
        return History(todo, recorder.events, recorder.folders, self.judge)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(-(-CUTS // PER_HISTORY)))
def test_whatever_a_power_cut_leaves_of_a_cache_reads_are_right(
    tmp_path: Path, rng: random.Random, number: int
) -> None:
    history = Cached().record(tmp_path / "recorded", rng)
    cuts = min(PER_HISTORY, CUTS - number * PER_HISTORY)
    assert look(history, sample(history, rng, cuts), rng, tmp_path / "disk") == cuts


@pytest.mark.slow
def test_a_cache_that_does_not_verify_what_it_finds_is_found(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = Cached().record(tmp_path / "recorded", rng)
    fates = ("names and lengths", "names and lengths with old bytes in them", "names without data")
    assert not finds(history, rng, tmp_path / "disk", fates)
    monkeypatch.setattr(chunk_cache, "_is", lambda *_: True)
    assert finds(history, rng, tmp_path / "disk", fates)
