"""Listening: each update once, at its exact time, never progress before data, whatever maintenance does meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

import persist_lib as persist
from persist_lib.errors import ShardFinished, SinceViolation
from persist_lib.ids import SeqNo
from persist_lib.location.wrap.around import AroundConsensus
from tests.shards import filled
from tests.unit.relation.carriers import Heard
from tests.worlds import SCHEMA, WIDER, World, row


def test_a_snapshot_that_waits_is_woken_by_a_store_that_wakes_waiters(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    waited: list[SeqNo] = []

    class Wakes(AroundConsensus):
        def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
            assert key == "s"
            waited.append(seqno)
            write.compare_and_append([row(2, time=1)], 1, 2)
            return True

    location = world.reach()
    with persist.open(replace(location, consensus=Wakes(location.consensus)), runtime=world.runtime(7)) as client:
        read = client.open_reader("s")
        known, began = read.machine.fetch().seqno, world.clock.monotonic()
        assert read.snapshot(1, timeout=60).to_arrow().num_rows == 2
    assert waited == [known]
    assert world.clock.monotonic() == began, "it did not pause before it looked again"


def test_a_listener_waits_for_news_and_backs_off(world: World) -> None:
    client, other = world.client(), world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    pauses: list[float] = []
    ends = other.open_writer("s", SCHEMA)

    def sleep(seconds: float) -> None:
        world.clock.advance(seconds)
        pauses.append(seconds)
        if len(pauses) == 60:
            ends.compare_and_append([row(2, time=3)], 1, 9)
        if len(pauses) == 70:
            ends.finish()

    client.machine("s").runtime = replace(client.runtime, sleep=sleep)
    heard = Heard(None, 0).take(read.listen(0))
    assert heard.updates == {((2, "w"), 3): 1}
    assert heard.frontier == persist.TOP, "it ends where the shard is closed for writing"
    assert pauses[0] <= 0.015
    assert 0.015 < max(pauses) <= 0.03, "and is never long in hearing of news"
    assert pauses[61] <= 0.018, "news make it quick again"


def test_listening_from_before_since_is_refused_and_leaves_no_lease(world: World) -> None:
    client = world.client()
    filled(client)
    read = client.open_reader("s")
    read.downgrade_since(20)
    with pytest.raises(SinceViolation):
        read.listen(19)
    with pytest.raises(SinceViolation):
        world.client(read_only=True).open_reader("s").listen(19)
    assert len(client.inspect("s").state.readers) == 1
    read.listen(20).close()
    assert len(client.inspect("s").state.readers) == 1


def test_listening_at_the_last_time_of_all_is_over_at_once(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1, time=2**64 - 1)], 0, [])
    assert list(read.listen(2**64 - 1)) == []
    assert Heard(None, 5).take(read.listen(5)).updates == {((1, "w"), 2**64 - 1): 1}


def test_a_tombstone_ends_a_read_only_listener_with_an_error(world: World) -> None:
    client = world.client()
    filled(client, 3)
    listener = world.client(read_only=True).open_reader("s").listen(0)
    next(listener)
    client.finish("s")
    with pytest.raises((ShardFinished, SinceViolation)):
        list(listener)


def test_an_older_schema_hears_the_columns_that_it_has(world: World) -> None:
    client = world.client()
    filled(client, 3)
    old = client.open_reader("s")
    client.evolve_schema("s", WIDER)
    rows = [row(1, "n", 3) | {"more": 5}, row(1, "n", 3) | {"more": 6}]
    client.open_writer("s", WIDER).compare_and_append(rows, 3, 4)
    assert Heard(None, 2).take(old.listen(2, until=4)).updates == {((1, "n"), 3): 2}
    new = client.open_reader("s")
    assert Heard(None, 2).take(new.listen(2, until=4)).updates == {((1, "n", 5), 3): 1, ((1, "n", 6), 3): 1}
