"""Listening: each update once, at its exact time, never progress before data, whatever maintenance does meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, LeaseExpired, ShardFinished, SinceViolation, TimedOut
from persist_lib.testing import Model, Outcome, check_world, contents_of, updates_of
from persist_lib.testing.model import summed
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, WIDER, Storm, World, row, updates


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


class Heard:
    """What a listener has delivered, checked as it comes: no time before what progress said, progress only forward."""

    def __init__(self, as_of: int) -> None:
        self.frontier = persist.at(as_of + 1)
        self.found: Counter[Any] = Counter()

    def take(self, events: Any) -> Heard:
        for event in events:
            if isinstance(event, persist.Progress):
                assert self.frontier < event.frontier
                self.frontier = event.frontier
            else:
                news = updates_of(event.table)
                assert news
                assert all(self.frontier.is_before(time) for _, time, _ in news), "nothing of what was complete"
                self.found.update(news)
        return self

    def summed(self) -> Counter[Any]:
        return summed(((data, time), diff * n) for (data, time, diff), n in self.found.items())


@pytest.mark.parametrize("config", [persist.Config(), TINY])
@pytest.mark.parametrize("as_of", [0, 7, 38, 39])
def test_a_listener_hears_exactly_what_happened_after_its_start(
    world: World, config: persist.Config, as_of: int
) -> None:
    client = world.client(config)
    model = filled(client)
    for _ in range(2):
        with client.open_reader("s") as read:
            heard = Heard(as_of).take(read.listen(as_of, until=40))
            assert heard.frontier == persist.at(40)
            assert heard.summed() == model.between(as_of + 1, persist.at(40))
            together = contents_of(read.snapshot(as_of, diff=True).to_arrow())
            for (data, _), diff in heard.summed().items():
                together[data] += diff
            assert {k: v for k, v in together.items() if v} == model.contents(39)
            assert Heard(as_of).take(read.listen(as_of, until=20)).summed() == model.between(as_of + 1, persist.at(20))
        client.maintain("s", policy=persist.Policy(weight=1e9))


@pytest.mark.parametrize("seed", range(6))
def test_updates_come_once_at_their_time_across_appends_compactions_and_collections(world: World, seed: int) -> None:
    rng = random.Random(seed)
    config = rng.choice([persist.Config(), TINY]).model_copy(update={"lease_ms": 4000})
    client, other = world.client(config), world.client(config)
    write, read = client.open_shard("s", SCHEMA)
    model, heard, upper = Model(), Heard(0), 1
    write.advance_upper(1)
    model.append([], persist.at(0), persist.at(1))
    listener = read.listen(0)
    keeper = other.open_reader("s")
    for _ in range(60):
        match rng.randrange(6):
            case 0 | 1:
                new = upper + rng.randrange(1, 5)
                rows = [row(rng.randrange(9), "x", rng.randrange(upper, new)) for _ in range(rng.randrange(8))]
                write.compare_and_append(rows, upper, new)
                model.append(updates(rows), persist.at(upper), persist.at(new))
                upper = new
            case 2:
                heard.take(listener.poll())
                assert heard.frontier == persist.at(upper) == listener.frontier
            case 3:
                if listener.frontier < persist.at(upper):
                    heard.take(
                        [next(listener) for _ in range(rng.randrange(1, 3))] if rng.random() < 0.3 else [next(listener)]
                    )
            case 4:
                keeper.downgrade_since(max(0, upper - rng.randrange(4)))
                other.maintain("s", policy=persist.Policy(weight=rng.choice([0.5, 1e9]), advance=0.01))
            case _:
                world.clock.advance(rng.random())
                client.heartbeat()
                other.heartbeat()
        check_world(client, "s")
    heard.take(listener.poll())
    assert heard.summed() == model.between(1, persist.at(upper))
    read.close()
    for _ in range(2):
        world.clock.advance(1)
        client.heartbeat()
        other.heartbeat()
    keeper.downgrade_since(max(0, upper - 1))
    assert client.inspect("s").state.since > persist.at(0), "a listener gives history up as it goes"
    listener.close()


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
    heard = Heard(0).take(read.listen(0))
    assert heard.summed() == {((2, "w"), 3): 1}
    assert heard.frontier == persist.TOP, "it ends where the shard is closed for writing"
    assert pauses[0] <= 0.015
    assert 0.015 < max(pauses) <= 0.03, "and is never long in hearing of news"
    assert pauses[61] <= 0.018, "news make it quick again"


def test_after_a_timeout_the_listener_can_be_iterated_on(world: World) -> None:
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    listener = read.listen(0, timeout=1)
    for _ in range(2):
        with pytest.raises(TimedOut):
            next(listener)
    write.compare_and_append([row(2, time=1)], 1, 2)
    heard = Heard(0).take([next(listener), next(listener)])
    assert heard.summed() == {((2, "w"), 1): 1}
    with pytest.raises(TimedOut):
        next(listener)
    assert listener.poll() == []


def test_a_failure_is_told_again_and_loses_nothing(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "get", "get_range")
    writing, client = world.client(TINY), world.client(TINY.model_copy(update={"timeout_s": 0.1}), plan=storm)
    filled(writing, 10)
    read = client.open_reader("s")
    for verb in (lambda listener: listener.poll(), next):
        listener = read.listen(0)
        first = [next(listener), next(listener)]
        assert listener.frontier == persist.at(2)
        storm.blows = True
        for _ in range(2):
            with pytest.raises(Determinate):
                verb(listener)
        storm.blows = False
        with pytest.raises(Determinate):
            verb(listener)
        assert listener.frontier == persist.at(2), "continue from here"
        again = Heard(0).take(first).take(read.listen(1, until=10)).summed()
        assert again == Heard(0).take(read.listen(0, until=10)).summed()


def test_a_poll_that_fails_half_way_has_delivered_nothing(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "get", "get_range")
    writing, client = world.client(TINY), world.client(TINY.model_copy(update={"timeout_s": 0.1}), plan=storm)
    filled(writing, 10)
    listener = client.open_reader("s").listen(0)
    gets: list[int] = []
    decide = storm.decide

    def after_three(operation: Any) -> Any:
        gets.append(operation.kind == "get")
        storm.blows = sum(gets) > 3
        return decide(operation)

    storm.decide = after_three  # type: ignore[method-assign]
    with pytest.raises(Determinate):
        listener.poll()
    assert listener.frontier == persist.at(1)


def test_an_expired_listener_is_told_and_hears_nothing_wrong(world: World) -> None:
    client = world.client(TINY.model_copy(update={"lease_ms": 1000}))
    filled(client)
    listener = client.open_reader("s").listen(3)
    some = [next(listener)]
    other = world.client(TINY)
    keeper = other.open_reader("s")
    keeper.downgrade_since(39)
    world.clock.advance(10)
    for _ in range(4):
        other.maintain("s", policy=persist.Policy(weight=1e9))
        keeper.move_hold()
    with pytest.raises(LeaseExpired):
        some += list(listener)
    with pytest.raises(LeaseExpired):
        next(listener)
    with pytest.raises(LeaseExpired):
        listener.poll()
    Heard(3).take(some)


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
    assert Heard(5).take(read.listen(5)).summed() == {((1, "w"), 2**64 - 1): 1}


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
    assert Heard(2).take(old.listen(2, until=4)).summed() == {((1, "n"), 3): 2}
    new = client.open_reader("s")
    assert Heard(2).take(new.listen(2, until=4)).summed() == {((1, "n", 5), 3): 1, ((1, "n", 6), 3): 1}
