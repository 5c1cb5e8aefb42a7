"""Who completes the times of a quiet shard: a reader that may write, and only where no caller brings times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import persist_lib as persist
from persist_lib.catalog.effects import HOLD as COLLECTION
from persist_lib.core.holds import LAYER_HOLDS
from persist_lib.streams.lock import HOLD as STREAM
from tests.worlds import World

CLOCK = persist.Schema({"id": "int64"}, {"word": "string"}, times="ms")
ROW = [{"id": 1, "word": "a"}]


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


def quiet(world: World) -> tuple[persist.Client, int]:
    """A shard to which a row was appended an hour ago, and its upper."""
    client = world.client()
    with client.open_writer("s", CLOCK) as write:
        write.append_now(ROW)
        write.upsert([{"id": 2, "word": "b"}])
        upper = write.delete([{"id": 2}]).upper.time or 0
    world.clock.advance(3600)
    return client, upper


def test_a_reader_that_may_write_completes_all_times_up_to_the_stores_clock(world: World) -> None:
    client, _ = quiet(world)
    now = world.clock() // 1_000_000
    with client.open_reader("s") as read:
        assert read.snapshot("1 minute ago", timeout=0).as_of == now - 60_000
        assert read.upper == persist.at(now + 1)
        world.requests.clear()
        assert read.snapshot("30 minutes ago").to_pylist() == [{"id": 1, "word": "a"}]
        assert read.changes("59 minutes ago", "now").to_arrow().num_rows == 0
        assert world.count("compare_and_set") == 0, "one commit serves them all"
    world.clock.advance(60)
    assert client.open_reader("s").snapshot("1 s ago").as_of == now + 59_000, "again, as its own append brings no time"


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


def test_a_reader_of_a_time_to_come_or_one_that_may_only_read_waits(world: World) -> None:
    client, upper = quiet(world)
    later = world.clock() // 1_000_000 + 60_000
    for reader, as_of in ((client, later), (world.client(read_only=True), upper)):
        with reader.open_reader("s") as read, pytest.raises(persist.NotComplete):
            read.snapshot(as_of, timeout=2)
    assert client.inspect("s").state.upper == persist.at(upper)
    with client.open_reader("s") as read:
        assert read.snapshot(world.clock() // 1_000_000 + 500, timeout=2).to_pylist(), "it comes while it waits"


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
