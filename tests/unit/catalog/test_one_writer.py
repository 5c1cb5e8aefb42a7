"""What only a shard's writer did, before one class wrote shards and collections: held on a collection of three.

Appends to a collection that are accepted and sent later: as if they were made one by one, in the order of calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter
from persist_lib.frontier import at
from persist_lib.relation.registration import Registration
from tests.renditions import Told, check, create, write
from tests.worlds import World, row, updates

ROW = {"id": 1, "word": "a"}


@pytest.fixture
def writer() -> Iterator[CollectionWriter]:
    world = World()
    controller = create(world.client(), shards=3)
    with controller.open_writer("c") as writer:
        yield writer
    world.close()


def test_a_call_waits_for_its_turn_until_its_deadline_and_no_longer(writer: CollectionWriter) -> None:
    calls = (
        lambda: writer.append_now([ROW], timeout=0.05),
        lambda: writer.upsert([ROW], timeout=0.05),
        lambda: writer.compare_and_append([], 0, 1, timeout=0.05),
        lambda: writer.advance_upper(1, timeout=0.05),
    )
    with ThreadPoolExecutor(1) as pool, writer._lock:
        for call in calls:
            with pytest.raises(persist.TimedOut, match="other appends of this handle took that long"):
                pool.submit(call).result(20)
    assert writer.fetch_upper() == persist.at(0)


def test_nothing_is_appended_after_a_registration_that_is_in_doubt(
    writer: CollectionWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise persist.Indeterminate("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Registration, "_commit", lost)
        with pytest.raises(persist.Determinate, match=r"appended nothing.*the answer was lost"):
            writer.upsert([ROW])
    assert writer.upsert([ROW]).inserted == 1


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data") as client:
        yield client


def test_appends_on_both_sides_of_a_handover_are_sent_apart(client: persist.Client) -> None:
    told, controller = Told(), create(client)
    write(controller, told, range(2))
    made = controller.make_rendition("c", copy=True, shards=2).number
    controller.copy_rendition("c", made)
    assert controller.hand_over("c", made, at=4) == 4
    with controller.open_writer("c") as writer:
        batch = [row(i, "b", time) for i in range(3) for time in (2, 3, 4, 5)]
        waiting = [
            writer._accepted(
                [one for one in batch if one["_time"] == time], time, time + 1, None, None, None, copies=False
            )
            for time in (2, 3, 4, 5)
        ]
        stops = threading.Event()

        def copy() -> None:
            while not stops.is_set():
                controller.copy_rendition("c", made)

        copying = threading.Thread(target=copy)
        copying.start()
        try:
            answers = writer._send(waiting)
        finally:
            stops.set()
            copying.join()
    assert [getattr(one, "upper", one) for one in answers] == [at(3), at(4), at(5), at(6)]
    told.last.append(updates([one for one in batch if one["_time"] < 4]), at(2), at(4))
    told.copy(made, 1)
    told.hand_over(made, 4)
    told.last.append(updates([one for one in batch if one["_time"] >= 4]), at(4), at(6))
    check(controller, told, 0, 5)
