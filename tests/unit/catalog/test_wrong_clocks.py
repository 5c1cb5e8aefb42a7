"""Clocks that are wrong: none puts the times of a table where all that follows has to wait, and none is asked in place
of the store's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.client import Client
from persist_lib.relation.next_time import FAR_MS
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string"}, times="ms")
DAY_S = 86_400
ROW = [{"id": 1, "word": "a"}]


def skewed(world: World, seconds: float, *, read_only: bool = False) -> Client:
    """A client whose machine's clock is off by so much, while the store's is right."""
    location = world.reach(read_only=read_only)
    world.seed += 1
    runtime = world.runtime(world.seed)
    off = replace(runtime, clock_ms=lambda: runtime.clock_ms() + round(seconds * 1_000))
    client = persist.open(location, runtime=off)
    world.clients.append(client)
    return client


def on_a_shard(client: Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.append_now(ROW)


def by_key(client: Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.upsert(ROW)


def staged(client: Client) -> None:
    with client.open_writer("s", SCHEMA) as write, write.stage() as stage:
        write.append_staged([stage.local.write(ROW)])


def restored(client: Client) -> None:
    client.restore("s", "1 hour ago")


def on_a_collection(client: Client) -> None:
    with client.controller() as controller, controller.open_writer("c") as write:
        write.append_now(ROW)


WRITES = [on_a_shard, by_key, staged, restored, on_a_collection]


def ready(world: World) -> Client:
    client = world.client()
    client.open_writer("s", SCHEMA).append_now([{"id": 7, "word": "z"}])
    world.clock.advance(7_200)
    client.open_writer("s", SCHEMA).append_now([{"id": 8, "word": "z"}])
    client.controller().create("c", SCHEMA, shards=2, mode="compare_and_append")
    return client


@pytest.mark.parametrize("write", WRITES)
def test_a_machine_whose_clock_is_days_ahead_writes_nothing(world: World, write: Callable[[Client], None]) -> None:
    client = ready(world)
    before = {name: client.inspect(name).state.upper for name in client.shards()}
    with pytest.raises(persist.ClockAhead, match=r"2 days ahead of the store's clock .*Nothing was written") as told:
        write(skewed(world, 2 * DAY_S))
    assert told.value.found - told.value.clock == 2 * FAR_MS
    assert {name: client.inspect(name).state.upper for name in client.shards()} == before
    write(skewed(world, 3_600))
    write(skewed(world, -400 * DAY_S))


@pytest.mark.parametrize("mode", ["yolo", "wal"])
def test_tables_follow_the_stores_clock_and_refuse_one_that_is_or_was_far_ahead(world: World, mode: Any) -> None:
    tables = world.client().controller().tables()
    tables.create("t", SCHEMA, mode=mode)
    done = tables.insert("t", ROW)
    mine = skewed(world, 2 * DAY_S).controller().tables()
    assert (mine.upsert("t", ROW).time or 0) <= (done.time or 0) + 1, "the store's clock, whatever that of the machine"
    behind = skewed(world, -2 * DAY_S).controller().tables()
    with pytest.raises(persist.ClockAhead, match=r"the store's clock is at .* 2 days ahead of this machine's clock"):
        behind.insert("t", [{"id": 2, "word": "b"}])
    world.clock.advance(1)
    with pytest.raises(persist.ClockAhead, match="the store's clock"):
        behind.read("t", world.clock() // 1_000_000)
    assert len(behind.read("t").to_pylist()) == 1
    world.clock.advance(2 * DAY_S)
    tables.insert("t", [{"id": 3, "word": "c"}])
    world.clock.advance(-2 * DAY_S)
    with pytest.raises(persist.ClockAhead, match=r"its upper is at .* 2 days ahead of the store's clock"):
        tables.insert("t", [{"id": 4, "word": "d"}])
    assert sorted(row["id"] for row in tables.read("t").to_pylist()) == [1, 3]
    world.clock.advance(DAY_S + 1)
    tables.insert("t", [{"id": 4, "word": "d"}])


def as_of(answer: Any) -> int:
    return int(answer.as_of)


DOORS: dict[str, Callable[[Client, str], int]] = {
    "snapshot": lambda client, ago: as_of(client.open_reader("s").snapshot(ago)),
    "changes": lambda client, ago: int(client.open_reader("s").changes(None, ago).to),
    "restore": lambda client, ago: client.restore("s", ago, dry_run=True).to,
    "collection": lambda client, ago: as_of(client.controller().open_reader("c").snapshot(ago)),
    "table": lambda client, ago: as_of(client.controller().tables().read("t", ago)),
    "wal table": lambda client, ago: as_of(client.controller().tables().read("w", ago)),
}


@pytest.mark.parametrize("door", list(DOORS))
@pytest.mark.parametrize("skew", [-3_600, 3_600])
def test_relative_times_count_from_the_stores_clock(world: World, door: str, skew: int) -> None:
    client = world.client()
    tables = client.controller().tables()
    client.controller().create("c", SCHEMA, mode="compare_and_append")
    tables.create("t", SCHEMA)
    tables.create("w", SCHEMA, timeline="wal", mode="wal")
    for hour in range(3):
        world.clock.advance(7_200 * (hour > 0))
        row = [{"id": hour, "word": "w"}]
        on = client.open_writer("s", SCHEMA)
        on.append_now(row)
        client.controller().open_writer("c").append_now(row)
        tables.insert("t", row)
        tables.insert("w", row)
    now = world.clock() // 1_000_000
    assert DOORS[door](skewed(world, skew), "90 minutes ago") == now - 5_400_000
