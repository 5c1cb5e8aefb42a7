"""History that somebody needs is never given up: compaction advances times to the shard's since, and no further.

Its since is that of the reader or hold furthest behind. Each time from there on is read exactly, each update after it
is heard at its exact time, and a time before it is refused, never answered wrongly.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.errors import SinceViolation
from persist_lib.frontier import at
from persist_lib.maintain import local_engine
from persist_lib.maintain.compaction import carry_out
from persist_lib.testing import Model, check_world, contents_of, updates_of
from tests.shards import EAGER
from tests.worlds import SCHEMA, SMALL, row, updates

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
