"""Who completes the times of a quiet shard: a reader that may write, and only where no caller brings times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import persist_lib as persist
from persist_lib.catalog.effects import HOLD as COLLECTION
from persist_lib.core.holds import LAYER_HOLDS
from persist_lib.streams.lock import HOLD as STREAM
from tests.worlds import World

CLOCK = persist.Schema({"id": "int64"}, {"word": "string"}, times="ms")
ROW = [{"id": 1, "word": "a"}]


def quiet(world: World) -> tuple[persist.Client, int]:
    """A shard to which a row was appended an hour ago, and its upper."""
    client = world.client()
    with client.open_writer("s", CLOCK) as write:
        write.append_now(ROW)
        write.upsert([{"id": 2, "word": "b"}])
        upper = write.delete([{"id": 2}]).upper.time or 0
    world.clock.advance(3600)
    return client, upper


def brings_times(client: persist.Client) -> None:
    with client.open_writer("s", CLOCK) as write:
        upper = write.fetch_upper().time or 0
        write.compare_and_append([{**ROW[0], "_time": upper}], upper, upper + 1)


def of_a_collection(client: persist.Client) -> None:
    client.set_hold("s", COLLECTION, 0)


def of_a_stream(client: persist.Client) -> None:
    client.set_hold("s", STREAM, 0)


@pytest.mark.parametrize("change", [brings_times, of_a_collection, of_a_stream])
def test_no_reader_moves_an_upper_that_others_move(world: World, change: Callable[[persist.Client], None]) -> None:
    client, _ = quiet(world)
    change(client)
    before = client.inspect("s").state.upper
    with client.open_reader("s") as read, pytest.raises(persist.NotComplete) as told:
        read.snapshot("1 minute ago", timeout=1)
    assert told.value.upper == client.inspect("s").state.upper == before


def test_the_shards_of_a_collection_keep_one_upper(world: World) -> None:
    controller = world.client().controller()
    controller.create("c", CLOCK, shards=2, mode="compare_and_append")
    with controller.open_writer("c") as write:
        write.append_now(ROW)
        world.clock.advance(60)
        for shard in controller.describe("c").renditions[0].shards:
            with controller.client.open_reader(shard) as read, pytest.raises(persist.NotComplete):
                read.snapshot("now", timeout=0)
        write.append_now([{"id": 5, "word": "c"}])


def test_the_holds_that_own_an_upper_are_known_by_name() -> None:
    assert {COLLECTION, STREAM} < LAYER_HOLDS.keys()
