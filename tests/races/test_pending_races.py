"""Between a reader's listing and its reading, others absorb, discard, roll up and collect. It still reads its plan.

The rules that make this so were found by an exhaustive model; each test here fails without one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.location.wrap.around import Operation
from persist_lib.pending_area import objects
from persist_lib.testing import check_world, contents_of
from tests.unit.pending_area.areas import NAME, Area, plain, said
from tests.worlds import SMALL, World


@pytest.fixture
def area() -> Iterator[Area]:
    world = World()
    yield Area(world)
    world.close()


def before_the_next(area: Area, client: persist.Client, kind: str, act: Callable[[], object], monkeypatch: Any) -> None:
    """Have `act` happen once, just before the next operation of this kind of the client."""
    blob = client.blob
    around, met = type(blob).around, list[None]()

    def racing(self: Any, operation: Operation, call: Any) -> Any:
        if self is blob and operation.kind == kind and "-pending" in operation.key and not met:
            met.append(None)
            act()
        return around(self, operation, call)

    monkeypatch.setattr(type(blob), "around", racing)


def everything(area: Area, client: persist.Client) -> Callable[[], None]:
    """Absorb, discard, move holds that may move, roll up and collect, until nothing changes."""

    def act() -> None:
        for _ in range(4):
            pending_area.absorb(client, NAME)
            for other in area.world.clients:
                other.heartbeat()
            client.roll_up(NAME, force=True)
            client.collect(NAME)

    return act


@pytest.mark.parametrize("adopt_bytes", [1, 1 << 30])
@pytest.mark.parametrize("kind", ["get", "list"])
def test_what_a_reader_planned_to_read_is_not_deleted_before_it_was_read(area, kind, adopt_bytes, monkeypatch):
    monkeypatch.setattr(objects, "ADOPT_BYTES", adopt_bytes)
    for lower in range(0, 9, 3):
        area.put("a", lower, lower + 3)
        area.put("b", lower, lower + 3)
    reading = area.world.client(SMALL)
    reader = pending_area.acquire_read_handle(reading, NAME)
    area.reader.close()
    before_the_next(area, reading, kind, everything(area, area.client), monkeypatch)
    assert contents_of(reader.contents(8, diff=True)) == plain(said(0, 9), 8)
    reader.close()
    area.rest()
    check_world(area.client, NAME)


def test_a_reader_that_follows_a_late_writer_is_not_left_without_its_batches(area, monkeypatch):
    """Its batches are late for the shard at once, and discarded, but not for a reader at an older version."""
    area.put("b", 0, 9)
    reading = area.world.client(SMALL)
    reader = pending_area.acquire_read_handle(reading, NAME)
    area.reader.close()

    def act() -> None:
        with area.client.open_writer(NAME, area.schema, layer="pending") as write:
            write.compare_and_append(said(0, 9), 0, 9)
        everything(area, area.client)()

    before_the_next(area, reading, "get", act, monkeypatch)
    assert contents_of(reader.contents(8, diff=True)) == plain(said(0, 9), 8)


def test_once_everything_was_read_the_hold_moves_and_it_is_deleted(area):
    area.put("a", 0, 9)
    assert area.reader.contents(8, diff=True).num_rows
    area.absorb()
    assert area.reader.contents(8, diff=True).num_rows
    for _ in range(3):
        area.client.heartbeat()
        area.client.maintain(NAME)
    assert area.pending() == []


def test_two_absorbers_of_one_piece_take_it_once(area, monkeypatch):
    for lower in range(0, 9, 3):
        area.put("a", lower, lower + 3)
    other = area.world.client(SMALL)
    before_the_next(area, area.client, "get", lambda: pending_area.absorb(other, NAME), monkeypatch)
    area.absorb()
    assert area.merged() == plain(said(0, 9), 8)
    check_world(area.client, NAME)
    assert area.client.inspect(NAME).state.count == 9
