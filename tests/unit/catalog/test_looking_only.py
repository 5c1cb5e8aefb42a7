"""A client that may not write: it reads what is promised, and never waits for what only a writer can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two independent renditions, of which the second has data beyond what is promised."""
    url = f"file:{tmp_path}/data"
    with persist.open(url) as client, client.controller() as controller:
        controller.create("orders", SCHEMA)
        with controller.open_writer("orders") as write:
            write.append([{"id": 1, "cents": 5}], 0, 1)
        controller.make_rendition("orders")
        with controller.open_writer("orders", rendition=2) as write:
            write.append([{"id": 1, "cents": 6, "_time": 0}], 0, 5)
        assert controller.hand_over("orders", 2) == 1
    return url


@pytest.fixture
def looking(url: str) -> Iterator[persist.Client]:
    with persist.open(url, read_only=True) as client:
        yield client


def test_the_newest_time_is_one_that_is_promised(url: str, looking: persist.Client) -> None:
    with looking.controller().open_reader("orders") as reader:
        promised = looking.controller().describe("orders").promised
        assert promised < reader.fetch_upper(), "as nobody has read since the handover"
        assert reader.snapshot(timeout=0.001).as_of == (promised.time or 0) - 1
        with persist.open(url) as client:
            client.controller().tend("orders")
        assert reader.snapshot(timeout=0.001).as_of == 4


def test_a_dry_run_of_a_handover_needs_no_right_to_write(looking: persist.Client) -> None:
    with looking.controller() as controller:
        assert controller.hand_over("orders", 1, dry_run=True, force=True) >= 2
        with pytest.raises(persist.InvalidUsage, match="read_only"):
            controller.hand_over("orders", 1, force=True)


def test_comparing_tells_how_far_it_is(looking: persist.Client) -> None:
    told: list[int] = []
    found = looking.controller().compare("orders", 2, to=1, as_of=0, progress=told.append)
    assert (found.changed, told[-1]) == (1, 2)
