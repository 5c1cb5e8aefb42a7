"""The library's own calls where Consensus applies commands itself: what they make of answers, and of none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Busy, Determinate, HoldConflict, Indeterminate, UpperMismatch
from persist_lib.format.log import GROUP
from persist_lib.ids import format_writer_id
from persist_lib.location import open_location
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.unit.server.serving import SHARD, W2, Served, Told, append, hold
from tests.worlds import SCHEMA, World, row


class Taking(Told):
    """A Consensus that a funnel stands behind. `meanwhile` runs once, when a command has come and before its turn.

    The first command goes to `paused`, if there is one: a server that does not answer.
    """

    served: Served
    meanwhile: Callable[[], object] = staticmethod(lambda: None)
    lost: int = 0
    paused: Funnel | None = None

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        (one,) = proposed
        deadline = self.served.runtime().deadline(timeout_s)
        request = Request(
            self.served.funnel.machine.shard, one.command, token, "us", deadline, one.known, is_repeated=is_repeated
        )
        paused, self.paused = self.paused, None
        if paused is not None:
            request.deadline = self.served.runtime().deadline(10_000)
            paused.put(request)
            raise Indeterminate("planned: the server is paused", token=token)
        self.served.funnel.put(request)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        while not request.answer.done():
            self.served.funnel.turn()
        if self.lost:
            self.lost -= 1
            raise Indeterminate("planned: the answer was lost")
        return [request.answer.result(0)]


class Place:
    def __init__(self, world: World) -> None:
        self.served = Served(world)
        location = open_location(world.inner.url, clock=world.clock)
        self.taking = Taking(location.consensus)
        self.taking.served = self.served
        self.client = persist.open(replace(location, consensus=self.taking), runtime=world.clock.runtime(5))


@pytest.fixture
def place() -> Iterator[Place]:
    world = World()
    made = Place(world)
    yield made
    made.client.close()
    world.close()


def test_an_append_is_told_the_upper_that_it_left_itself_though_others_of_its_row_went_on(place: Place) -> None:
    write = place.client.open_writer(SHARD, SCHEMA)
    assert write.id
    place.taking.meanwhile = lambda: place.served.put(append(1, 2, W2, b"b"), b"b")
    done = write.compare_and_append([row(1)], 0, 1)
    assert place.served.rows()[-1].command == GROUP
    assert done.upper.time == 1, "its time was upper - 1"
    assert write.upper.time == 2
    check_world(place.client, SHARD)


def test_of_two_workers_that_register_in_one_row_the_second_sees_the_first(place: Place) -> None:
    """As with rows of their own: exactly one of them is alone."""
    first = c.RegisterWriter(format_writer_id(77), "maintenance", 60_000)
    flood = place.served.request(first, b"first", client="a")
    worker = place.client.worker(SHARD)
    worker.alone = True
    funnel = place.served.funnel
    place.taking.meanwhile = lambda: funnel.queue.put_back([flood])  # before ours
    with pytest.raises(Busy), worker:
        assert worker.id
    assert flood.answer.result(0).is_committed


def test_a_command_that_is_refused_by_a_newer_state_is_made_anew(place: Place) -> None:
    machine = place.client.machine(SHARD)
    machine.fetch()
    place.served.direct_commit(hold("h", b"theirs"))
    place.client.set_hold(SHARD, "h", since=0, opaque=b"ours")  # whatever value it has
    assert place.served.direct.fetch().state.holds["h"].opaque == b"ours"
    with pytest.raises(HoldConflict):
        place.client.set_hold(SHARD, "h", since=0, opaque=b"x", expected=b"theirs")
    write = place.client.open_writer(SHARD, SCHEMA)
    place.served.direct_commit(append(0, 5, W2))
    with pytest.raises(UpperMismatch) as told:
        write.compare_and_append([row(1)], 0, 1)
    assert told.value.actual.time == 5
    assert write.append_now([row(1)]).upper.time == 6


def test_a_refusal_costs_no_read_where_the_rows_come_along(place: Place) -> None:
    write = place.client.open_writer(SHARD, SCHEMA)
    assert write.id
    place.served.put(append(0, 5, W2), b"b")
    place.served.funnel.turn()
    place.taking.asked.clear()
    with pytest.raises(UpperMismatch):
        write.compare_and_append([row(1)], 0, 1)
    assert write.upper.time == 5
    assert place.taking.asked.count("scan") <= 1, "that of the handle, which looks for its token"


@pytest.mark.parametrize("lost", [1, 3])
def test_an_answer_that_was_lost_is_asked_for_with_the_same_command(place: Place, lost: int) -> None:
    write = place.client.open_writer(SHARD, SCHEMA)
    assert write.id
    place.taking.lost = lost
    assert write.compare_and_append([row(1)], 0, 1).upper.time == 1
    place.taking.lost = lost
    place.client.set_hold(SHARD, "h", since=0, opaque=b"x", expected=None)
    place.taking.lost = lost
    place.client.set_retention(SHARD, 5)
    found = [step.command for one in place.served.rows() for step in one.steps if step.diff is not None]
    assert [found.count(name) for name in ("CompareAndAppend", "SetHold", "SetRetention")] == [1, 1, 1]


def test_without_any_answer_a_call_is_in_doubt_and_with_its_token_it_is_decided(place: Place) -> None:
    write = place.client.open_writer(SHARD, SCHEMA)
    assert write.id
    place.taking.lost = 10_000
    with pytest.raises(Indeterminate) as told:
        write.compare_and_append([row(1)], 0, 1, timeout=2)
    place.taking.lost = 0
    done = write.compare_and_append([row(1)], 0, 1, token=told.value.token)
    assert done.upper.time == 1
    assert len([1 for one in place.served.rows() if one.command == "CompareAndAppend"]) == 1


def test_a_server_that_is_full_is_asked_again_until_the_timeout(place: Place) -> None:
    place.served.funnel.stop()
    with pytest.raises(Determinate, match="stopping"):
        place.client.set_retention(SHARD, 5)
    assert place.served.direct.fetch().state.retention is None


def test_a_client_that_failed_over_gets_no_refusal_that_the_first_server_may_still_make_untrue(place: Place) -> None:
    place.served.direct_commit(hold("h", b"theirs"))
    paused = place.taking.paused = place.served.server()
    with pytest.raises(Indeterminate):
        place.client.set_hold(SHARD, "h", 0, opaque=b"ours", expected=b"later")
    place.served.direct_commit(hold("h", b"later", expected=b"theirs"))
    paused.turn()
    assert place.served.direct.fetch().state.holds["h"].opaque == b"ours", "so a refusal would have been a lie"
