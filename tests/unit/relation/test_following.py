"""Listeners and changes over every carrier: each update once, at its time, and progress never before data."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome
from tests.circles import by_day
from tests.unit.relation.carriers import (
    Carrier,
    Heard,
    over_all,
    over_handles,
    rows,
    time_of,
    updates_in,
)
from tests.worlds import DiesAt, Storm, World


@over_all
def test_at_each_progress_what_a_listener_heard_is_the_contents(world: World, carrier: Carrier) -> None:
    """Whatever is written, tended and handed over in between; and so do the changes between any two times."""
    rng = random.Random(carrier.name)
    relation, times = carrier.make(world.client()), []
    times.append(time_of(relation.now(rows(0))))
    start = relation.contents(times[0])
    looking = carrier.open(world.client(read_only=True))
    listeners = [Heard(one.listen(times[0]), times[0]) for one in (relation, looking)]
    for step in range(24):
        world.clock.advance(rng.choice([0, 0.1, 2]))
        match rng.randrange(6):
            case 0 | 1:
                times.append(time_of(relation.now(rows(*(rng.randrange(9) for _ in range(3)), word=rng.choice("ab")))))
            case 2:
                done = relation.upsert(rows(*rng.sample(range(9), 3), word=rng.choice("ab")))
                times += [done.time] if done.time else []
            case 3:
                done = relation.delete([rng.randrange(9)])
                times += [done.time] if done.time else []
            case 4:
                relation.tend()
            case _ if carrier.shards and step % 3 == 0:
                relation.hand_over(shards=rng.randrange(1, 4))
            case _:
                relation.client.heartbeat()
        for heard in listeners if step % 2 else listeners[:1]:
            heard.poll()
            assert start + Counter() == relation.contents(times[0])
            total = start.copy()
            total.update(heard.contents())
            frontier = heard.frontier.time or 0
            assert Counter({row: n for row, n in total.items() if n}) == relation.contents(frontier - 1)
    for heard in listeners:
        heard.poll()
        assert not heard.poll().listener.poll(), "nothing comes twice"
        heard.listener.close()
    for _ in range(5):
        first, last = sorted(rng.sample(times, 2))
        total = relation.contents(first).copy()
        for data, time, diff in updates_in(relation.changes(first, last)):
            assert first < time <= last
            total[data] += diff
        assert Counter({row: n for row, n in total.items() if n}) == relation.contents(last)


@over_all
def test_a_listener_keeps_the_history_that_it_has_not_delivered_yet(world: World, carrier: Carrier) -> None:
    """Also where the rows are copied to their shards, compacted and given up before its first look."""
    relation = carrier.make(world.client())
    first = time_of(relation.now(rows(0)))
    world.clock.advance(1)
    last = time_of(relation.now(rows(1)))
    relation.tend()
    heard = Heard(relation.listen(first), first)
    for _ in range(3):
        world.clock.advance(20)
        relation.client.heartbeat()
        relation.tend()
    assert set(heard.poll().updates) == {(row, time) for row, time, _ in updates_in(relation.changes(first, last))}
    heard.listener.close()


@over_all
def test_a_listener_waits_says_that_nothing_came_and_continues(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    time = time_of(relation.now(rows(1)))
    with relation.listen(time, timeout=1) as listener:
        for _ in range(2):
            started = world.clock()
            with pytest.raises(persist.TimedOut):
                next(listener)
            assert world.clock() - started >= 999_000_000
        assert listener.poll() == []
        done = relation.upsert(rows(2))
        heard = Heard(listener, time).take([next(listener), next(listener)])
        assert heard.updates == {((2, "w"), done.time): 1}
        assert listener.frontier == heard.frontier == persist.at(done.time + 1)
        with pytest.raises(persist.TimedOut):
            next(listener)
    for wrong in (-1, "x", float("nan"), True):
        with pytest.raises(persist.InvalidUsage, match="timeout"):
            relation.listen(time, timeout=wrong)


class InterruptsAt:
    """A plan under which the n-th request is interrupted."""

    def __init__(self, number: int) -> None:
        self.left, self.is_armed = number, False

    def decide(self, operation: Operation) -> Fate:
        if self.is_armed:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return Fate()


@over_all
def test_a_listener_that_is_interrupted_loses_and_doubles_nothing_or_says_that_it_cannot_continue(
    world: World, carrier: Carrier
) -> None:
    others = carrier.make(world.client(persist.Config(inline_bytes=0)))
    start = time_of(others.now(rows(1, word="a")))
    for n in range(3):
        others.upsert(rows(1, n + 2, word=str(n)))
    if carrier.shards:
        others.hand_over(shards=2)
        others.upsert(rows(1, word="last"))
    newest = others.snapshot().as_of
    expected = Heard(others.listen(start), start).poll()
    for number in by_day(range(1, 40), 5):
        plan = InterruptsAt(number)
        listener = carrier.open(world.client(plan=plan)).listen(start, timeout=1)
        heard, plan.is_armed = Heard(listener, start), True
        while heard.frontier <= persist.at(newest):
            try:
                heard.take([next(listener)])
            except KeyboardInterrupt:
                continue
            except persist.Determinate as error:
                assert "after a part of a step" in error.message  # noqa: PT017
                break
        else:
            assert heard.updates == expected.updates
        plan.is_armed = False
        listener.close()
        if plan.left > 0:
            break


@over_all
def test_a_failure_in_the_middle_is_told_and_loses_nothing(world: World, carrier: Carrier) -> None:
    others = carrier.make(world.client(persist.Config(inline_bytes=0)))
    start = time_of(others.now(rows(1)))
    for n in range(4):
        others.upsert(rows(1, word=str(n)))
    others.tend()
    storm = Storm(Outcome.REFUSED, "get", "get_range", "scan", "heads", "head")
    relation = carrier.open(world.client(persist.Config(timeout_s=0.1), plan=storm))
    for verb in (lambda listener: listener.poll(), next):
        with relation.listen(start, timeout=0.1) as listener:
            storm.blows = True
            with pytest.raises(persist.Determinate):
                verb(listener)
            storm.blows = False
            heard = Heard(relation.listen((listener.frontier.time or 0) - 1), start).poll()
            assert heard.updates == Heard(others.listen(start), start).poll().updates


@over_all
def test_a_listener_ends_at_until(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    first, second, _third = (time_of(relation.now(rows(n))) for n in (1, 2, 3))
    heard = Heard(relation.listen(first, until=second + 1), first)
    heard.take(heard.listener)
    assert heard.updates == {((2, "w"), second): 1}
    assert heard.frontier == persist.at(second + 1)
    assert not list(relation.listen(second, until=second + 1)), "nothing is between them"


@over_handles
def test_from_the_last_time_of_all_on_a_listener_is_over(world: World, carrier: Carrier) -> None:
    plan = DiesAt(60)
    relation = carrier.make(world.client(plan=plan))
    relation.now(rows(1))
    second, third = (time_of(relation.upsert(rows(n))) for n in (2, 3))
    relation.write.advance_upper(persist.TOP)
    heard = Heard(relation.listen(second, timeout=3), second)
    if carrier.shards:  # today: a handover may follow, so it waits, and asks no more often than for a writer
        plan.is_armed = True
        with pytest.raises(persist.TimedOut):
            heard.take(heard.listener)
        plan.is_armed = False
        assert heard.frontier == persist.at(third + 1)
    else:
        heard.take(heard.listener)
        assert heard.frontier == persist.TOP, "it ends where nothing can come any more"
    assert heard.updates == {((3, "w"), third): 1}


@over_all
def test_changes_are_lazy_and_begin_at_the_beginning_for_none(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    first, second = (time_of(relation.now(rows(n))) for n in (1, 2))
    whole = relation.lazy_changes(None)
    assert (whole.from_, whole.to) == (None, second)
    assert {(data[0], time) for data, time, _ in updates_in(whole.to_arrow())} == {(1, first), (2, second)}
    part: Any = relation.lazy_changes(first)
    assert (part.from_, part.to, part.to_pylist()[0]["id"]) == (first, second, 2)
    with pytest.raises(persist.TimedOut):
        relation.changes(first, second + 10_000, timeout=0.01)
