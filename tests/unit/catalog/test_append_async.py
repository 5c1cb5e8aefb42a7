"""Appends to a collection that are accepted and sent later: as if they were made one by one, in the order of calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.frontier import at
from tests.renditions import Told, check, create, write
from tests.worlds import row, updates


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
