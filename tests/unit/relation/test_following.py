"""Listeners and changes over every carrier: each update once, at its time, and progress never before data.

History that somebody needs is never given up: compaction advances times to the shard's since, and no further.

Its since is that of the reader or hold furthest behind. Each time from there on is read exactly, each update after it
is heard at its exact time, and a time before it is refused, never answered wrongly.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.errors import SinceViolation
from persist_lib.frontier import at
from persist_lib.location.wrap.around import Operation
from persist_lib.maintain import local_engine
from persist_lib.maintain.compaction import carry_out
from persist_lib.testing import Fate, Model, Outcome, check_world, contents_of, updates_of
from tests.circles import by_day
from tests.shards import EAGER
from tests.unit.relation.carriers import (
    Carrier,
    Heard,
    over_all,
    over_handles,
    rows,
    time_of,
    updates_in,
)
from tests.worlds import SCHEMA, SMALL, DiesAt, Storm, World, row, updates


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
            if not carrier.shards:  # today: that of a shard says so again, and another one continues
                with pytest.raises(persist.Determinate):
                    verb(listener)
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


TIMES = 10


def filled(client: persist.Client) -> Model:
    """At each time one row more, and the row of the time before is taken back: so every two times differ."""
    model = Model()
    with client.open_writer("s", SCHEMA) as write:
        for time in range(TIMES):
            rows = [row(time, "w", time), *([row(time - 1, "w", time, -1)] if time else [])]
            write.compare_and_append(rows, time, time + 1)
            model.append(updates(rows), at(time), at(time + 1))
    return model


def heard(read: persist.ReadHandle, after: int) -> Counter[Any]:
    """The sums of all that a listener tells, by data and time."""
    found: Counter[Any] = Counter()
    for event in read.listen(after, until=TIMES):
        if isinstance(event, persist.Updates):
            for data, time, diff in updates_of(event.table):
                found[data, time] += diff
    return found


def check(read: persist.ReadHandle, model: Model, since: int) -> None:
    for as_of in range(since, TIMES):
        assert contents_of(read.snapshot(as_of, diff=True).to_arrow()) == model.contents(as_of), f"as of {as_of}"
        assert heard(read, as_of) == model.between(as_of + 1, at(TIMES)), f"after {as_of}"


@pytest.mark.parametrize("since", range(TIMES))
def test_what_a_reader_needs_is_exact_after_a_compaction_to_its_since(world, since):
    client = world.client(SMALL)
    model = filled(client)
    with client.open_reader("s") as read:
        read.downgrade_since(since)
        assert client.compact("s", policy=EAGER).applied
        assert {batch.since for batch in client.inspect("s").state.trace} == {at(since)}
        check(read, model, since)
        with client.open_reader("s") as later:
            assert later.since == at(since)
            check(later, model, since)
    check_world(client, "s")


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("ahead", [4, 9])
def test_a_reader_that_is_ahead_takes_no_history_from_one_that_is_behind(world, behind, ahead):
    client = world.client(SMALL)
    model = filled(client)
    with client.open_reader("s") as slow, client.open_reader("s") as fast:
        slow.downgrade_since(behind)
        fast.downgrade_since(ahead)
        client.compact("s", policy=EAGER)
        assert client.inspect("s").state.since == at(behind)
        check(slow, model, behind)
        check(fast, model, ahead)
        for as_of in range(ahead):
            with pytest.raises(SinceViolation) as caught:
                fast.snapshot(as_of, diff=True)
            assert caught.value.fields["since"] == at(ahead), (
                "what it gave up it does not read, though it is there still"
            )
            with pytest.raises(SinceViolation):
                fast.listen(as_of)


def test_a_hold_that_is_behind_keeps_history_for_readers_to_come(world):
    client = world.client(SMALL)
    model = filled(client)
    client.downgrade_hold("s", "report", since=2)
    with pytest.raises(SinceViolation):
        client.set_hold("s", "late", 1)
    with client.open_reader("s") as fast:
        fast.downgrade_since(8)
        client.compact("s", policy=EAGER)
    with client.open_reader("s") as read:
        assert read.since == at(2)
        check(read, model, 2)


def test_a_compaction_beyond_the_shards_since_is_refused(world):
    """By a compactor that takes the since of the foremost reader for the shard's."""
    client = world.client(SMALL)
    model = filled(client)
    with client.open_reader("s") as slow, client.open_reader("s") as fast, client.worker("s") as worker:
        slow.downgrade_since(3)
        fast.downgrade_since(8)
        machine = client.machine("s")
        (request,) = plan_compaction(machine.state, EAGER).requests
        assert request.since == at(3)
        with pytest.raises(persist.CompactionRefused, match="beyond the shard's"):
            carry_out(machine, worker, msgspec.structs.replace(request, since=at(8)), local_engine(machine))
        check(slow, model, 3)


def test_a_read_only_client_is_refused_times_that_a_batch_no_longer_tells(world):
    """It holds nothing, so history continues without it: a batch's since may be beyond what it asks for."""
    client = world.client(SMALL)
    model = filled(client)
    looking = world.client(SMALL, read_only=True)
    with looking.open_reader("s") as read:
        check(read, model, 0)
        with client.open_reader("s") as other:
            other.downgrade_since(6)
        client.compact("s", policy=EAGER)
        assert {batch.since for batch in client.inspect("s").state.trace} == {at(6)}
        for as_of in range(6):
            with pytest.raises(SinceViolation):
                read.snapshot(as_of, diff=True)
        check(read, model, 6)


def test_since_does_not_follow_readers_that_expire(world):
    """The next reader needs what they have kept; a compaction after their end advances no further."""
    client = world.client(SMALL)
    model = filled(client)
    with world.client(SMALL).open_reader("s") as gone:
        gone.downgrade_since(2)
        world.clock.advance(10_000)
        client.expire("s")
    assert not client.inspect("s").state.readers
    client.compact("s", policy=EAGER)
    with client.open_reader("s") as read:
        assert read.since == at(2)
        check(read, model, 2)


def test_the_since_of_a_reader_registering_meanwhile_is_that_of_its_own_transition(world):
    """Another reader gives up history just before it registers: it is told so, and reads nothing that is gone."""
    client = world.client(SMALL)
    model = filled(client)
    other = client.open_reader("s")
    racing = world.client(SMALL, rival=world.rival)
    machine = racing.machine("s")
    machine.fetch()

    def give_up() -> None:
        other.downgrade_since(7)
        client.compact("s", policy=EAGER)

    world.rival.before_next(give_up)
    with racing.open_reader("s") as read:
        assert world.rival.waiting == 0
        assert read.since == at(7)
        check(read, model, 7)
        with pytest.raises(SinceViolation):
            read.snapshot(6, diff=True)
