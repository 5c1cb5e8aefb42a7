"""Clocks that are wrong: none puts the times of a table where all that follows has to wait, and none is asked in place
of the store's.

Who completes the times of what is quiet: a reader that may write, and only where the library chose all times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

import persist_lib as persist
from persist_lib.catalog.records import HOLD as COLLECTION
from persist_lib.client import Client
from persist_lib.core.holds import LAYER_HOLDS
from persist_lib.relation.registration import FAR_MS
from persist_lib.streams.lock import HOLD as STREAM
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


CLOCK = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
HOUR_S = 3600
KINDS = {"shard": 0, "collection of 1": 1, "collection of 3": 3}


class Quiet(NamedTuple):
    """A shard, or a collection of `shards` shards, to which a row was written an hour ago."""

    client: persist.Client
    shards: int

    def write(self) -> Any:
        return self.client.controller().open_writer("c") if self.shards else self.client.open_writer("s", CLOCK)

    def read(self, client: persist.Client | None = None) -> Any:
        client = client or self.client
        return client.controller().open_reader("c") if self.shards else client.open_reader("s")


def quiet(world: World, shards: int = 0, mode: Any = "compare_and_append") -> Quiet:
    made = Quiet(world.client(), shards)
    if shards:
        made.client.controller().create("c", CLOCK, shards=shards, mode=mode)
    with made.write() as write:
        if mode == "append":
            now = world.clock() // 1_000_000
            write.append([{**ROW[0], "_time": now}], 0, now + 1)
        else:
            write.append_now(ROW)
            write.upsert([{"id": 2, "word": "b"}])
            write.delete([{"id": 2}])
    world.clock.advance(HOUR_S)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_one_empty_append_completes_all_times_up_to_the_stores_clock(world: World, kind: str) -> None:
    made = quiet(world, KINDS[kind])
    now = world.clock() // 1_000_000
    with made.read() as read:
        assert read.snapshot("1 minute ago", timeout=0).as_of == now - 60_000
        assert read.fetch_upper() == persist.at(now + 1)
        world.requests.clear()
        assert read.snapshot("30 minutes ago", timeout=0).to_pylist() == ROW
        assert read.changes("59 minutes ago", "now", timeout=0).to_arrow().num_rows == 0
        assert world.count("compare_and_set", "compare_and_set_many") == 0, "one commit serves them all"
    world.clock.advance(60)
    with made.read() as read:
        assert read.snapshot("1 s ago", timeout=0).as_of == now + 59_000, "again, as its own append brings no time"
    with made.write() as write:
        write.append_now([{"id": 3, "word": "c"}])
        assert write.fetch_upper() > persist.at(now + 1)


def brings_times(made: Quiet) -> None:
    with made.write() as write:
        upper = write.fetch_upper().time or 0
        write.compare_and_append([{**ROW[0], "_time": upper}], upper, upper + 1)


def copies(made: Quiet) -> None:
    """Hand over to a rendition that has what its copy brought: no time of it was chosen there."""
    controller = made.client.controller()
    new = controller.make_rendition("c", copy=True, shards=2).number
    controller.copy_rendition("c", new)
    controller.hand_over("c", new, advance=True)


ELSEWHERE: dict[str, tuple[int, Callable[[Quiet], object]]] = {
    "callers bring times": (0, brings_times), "callers bring times to a collection": (1, brings_times),
    "of a collection": (0, lambda made: made.client.set_hold("s", COLLECTION, 0)),
    "of a stream": (0, lambda made: made.client.set_hold("s", STREAM, 0)),
    "definite appends": (1, lambda _: None), "copied": (1, copies),
    "read only": (0, lambda _: None), "collection, read only": (1, lambda _: None),
    "a time to come": (0, lambda _: None), "a time to come of a collection": (1, lambda _: None),
}  # fmt: skip


@pytest.mark.parametrize("why", ELSEWHERE)
def test_elsewhere_a_reader_waits_and_gets_no_answer(world: World, why: str) -> None:
    shards, change = ELSEWHERE[why]
    made = quiet(world, shards, mode="append" if why == "definite appends" else "compare_and_append")
    change(made)
    with made.read(world.client(read_only=True) if "read only" in why else None) as read:
        before, since = read.fetch_upper(), world.clock()
        as_of = since // 1_000_000 + 60_000 if "to come" in why else "1 minute ago"
        with pytest.raises(persist.NotComplete) as told:
            read.snapshot(as_of, timeout=7)
        assert world.clock() - since > 6_999_000_000, "handles of shards and collections wait, as they promise"
        assert told.value.upper == read.fetch_upper() == before


def test_a_time_that_comes_while_a_reader_waits_is_completed(world: World) -> None:
    with quiet(world).read() as read:
        assert read.snapshot(world.clock() // 1_000_000 + 500, timeout=2).to_pylist()


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
