"""Quiet collections: a reader that may write completes what the store's clock has passed, where times are chosen."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from tests.worlds import World

CLOCK = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
ROW = [{"id": 1, "word": "a"}]
HOUR_S = 3600


def quiet(world: World, shards: int = 1, mode: Any = "compare_and_append") -> Controller:
    """A collection to which a row was written an hour ago."""
    controller = world.client().controller()
    controller.create("c", CLOCK, shards=shards, mode=mode)
    with controller.open_writer("c") as write:
        if mode == "append":
            now = world.clock() // 1_000_000
            write.append([{**ROW[0], "_time": now}], 0, now + 1)
        else:
            write.append_now(ROW)
            write.upsert([{"id": 2, "word": "b"}])
            write.delete([{"id": 2}])
    world.clock.advance(HOUR_S)
    return controller


@pytest.mark.parametrize("why", ["definite appends", "callers bring times", "read only", "a time to come", "copied"])
def test_elsewhere_a_reader_waits_and_gets_no_answer(world: World, why: str) -> None:
    controller = quiet(world, mode="append" if why == "definite appends" else "compare_and_append")
    if why == "callers bring times":
        with controller.open_writer("c") as write:
            upper = write.fetch_upper().time or 0
            write.compare_and_append([{"id": 5, "word": "c", "_time": upper}], upper, upper + 1)
    if why == "copied":  # the new rendition has what its copy brought: no time of it was chosen there
        new = controller.make_rendition("c", copy=True, shards=2).number
        controller.copy_rendition("c", new)
        controller.hand_over("c", new, advance=True)
    reads = world.client(read_only=why == "read only").controller()
    with reads.open_reader("c") as read:
        before, since = read.fetch_upper(), world.clock()
        as_of = since // 1_000_000 + 60_000 if why == "a time to come" else "1 minute ago"
        with pytest.raises(persist.NotComplete):
            read.snapshot(as_of, timeout=7)
        assert world.clock() - since >= 7_000_000_000, "handles of shards and collections wait, as they promise"
        assert read.fetch_upper() == before
