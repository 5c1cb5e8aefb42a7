"""A damaged log is mended as far as that needs no guess: the first events that verify stay, and the log continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from persist_lib.errors import Damage, HistoryRegressed, InvalidUsage
from persist_lib.events import Loop, check, open_store, repair
from tests.eventlogs import contents, store_of
from tests.unit.events.programs import Counter
from tests.unit.events.stored import MemoryStore

PAYLOADS = [b"event %d " % number * 20 for number in range(1, 13)]


def damaged(kind: str, folder: Path) -> str:
    """A log of 12 events, each of its own batch, with a snapshot after the tenth; a byte of the eighth is wrong."""
    place = f"{kind}:{folder / 'log'}"
    with open_store(place) as store, store.writer() as writer:
        for number, payload in enumerate(PAYLOADS, 1):
            writer.write(number, payload).result(60)
            if number == 10:
                writer.write_snapshot(10, b"state").result(60)
    (path,) = [path for path in folder.rglob("*") if path.is_file() and PAYLOADS[7] in path.read_bytes()]
    data = path.read_bytes()
    wrong = PAYLOADS[7][:30] + b"X" + PAYLOADS[7][31:]
    path.write_bytes(data.replace(PAYLOADS[7], wrong))  # also in pages that LMDB does not use any more
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
        assert contents(store) == PAYLOADS[:7]
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
