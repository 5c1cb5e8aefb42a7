"""The library's own calls where Consensus applies commands itself: what they make of answers, and of none.

`append_now` and staged appends through a server: it chooses the time, and the call does all that it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import outcomes
from persist_lib.errors import (
    AlreadyProduced,
    Busy,
    Determinate,
    HoldConflict,
    Indeterminate,
    InvalidUsage,
    ShardFinished,
    UpperMismatch,
)
from persist_lib.format.log import GROUP
from persist_lib.frontier import TOP, at
from persist_lib.ids import ShardId, format_writer_id
from persist_lib.location import open_location
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.relation.registration import since_of
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world, contents_of
from tests.unit.server.serving import SHARD, W1, W2, Served, Told, append, hold
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
def sending() -> Iterator[Place]:
    world = World()
    made = Place(world)
    yield made
    made.client.close()
    world.close()


def test_an_append_is_told_the_upper_that_it_left_itself_though_others_of_its_row_went_on(sending: Place) -> None:
    write = sending.client.open_writer(SHARD, SCHEMA)
    assert write.id
    sending.taking.meanwhile = lambda: sending.served.put(append(1, 2, W2, b"b"), b"b")
    done = write.compare_and_append([row(1)], 0, 1)
    assert sending.served.rows()[-1].command == GROUP
    assert done.upper.time == 1, "its time was upper - 1"
    assert write.upper.time == 2
    check_world(sending.client, SHARD)


def test_of_two_workers_that_register_in_one_row_the_second_sees_the_first(sending: Place) -> None:
    """As with rows of their own: exactly one of them is alone."""
    first = c.RegisterWriter(format_writer_id(77), "maintenance", 60_000)
    flood = sending.served.request(first, b"first", client="a")
    worker = sending.client.worker(SHARD)
    worker.alone = True
    funnel = sending.served.funnel
    sending.taking.meanwhile = lambda: funnel.queue.put_back([flood])  # before ours
    with pytest.raises(Busy), worker:
        assert worker.id
    assert flood.answer.result(0).is_committed


def test_a_command_that_is_refused_by_a_newer_state_is_made_anew(sending: Place) -> None:
    machine = sending.client.machine(SHARD)
    machine.fetch()
    sending.served.direct_commit(hold("h", b"theirs"))
    sending.client.set_hold(SHARD, "h", since=0, opaque=b"ours")  # whatever value it has
    assert sending.served.direct.fetch().state.holds["h"].opaque == b"ours"
    with pytest.raises(HoldConflict):
        sending.client.set_hold(SHARD, "h", since=0, opaque=b"x", expected=b"theirs")
    write = sending.client.open_writer(SHARD, SCHEMA)
    sending.served.direct_commit(append(0, 5, W2))
    with pytest.raises(UpperMismatch) as told:
        write.compare_and_append([row(1)], 0, 1)
    assert told.value.actual.time == 5
    assert write.append_now([row(1)]).upper.time == 6


def test_a_refusal_costs_no_read_where_the_rows_come_along(sending: Place) -> None:
    write = sending.client.open_writer(SHARD, SCHEMA)
    assert write.id
    sending.served.put(append(0, 5, W2), b"b")
    sending.served.funnel.turn()
    sending.taking.asked.clear()
    with pytest.raises(UpperMismatch):
        write.compare_and_append([row(1)], 0, 1)
    assert write.upper.time == 5
    assert sending.taking.asked.count("scan") <= 1, "that of the handle, which looks for its token"


@pytest.mark.parametrize("lost", [1, 3])
def test_an_answer_that_was_lost_is_asked_for_with_the_same_command(sending: Place, lost: int) -> None:
    write = sending.client.open_writer(SHARD, SCHEMA)
    assert write.id
    sending.taking.lost = lost
    assert write.compare_and_append([row(1)], 0, 1).upper.time == 1
    sending.taking.lost = lost
    sending.client.set_hold(SHARD, "h", since=0, opaque=b"x", expected=None)
    sending.taking.lost = lost
    sending.client.set_retention(SHARD, 5)
    found = [step.command for one in sending.served.rows() for step in one.steps if step.diff is not None]
    assert [found.count(name) for name in ("CompareAndAppend", "SetHold", "SetRetention")] == [1, 1, 1]


def test_without_any_answer_a_call_is_in_doubt_and_with_its_token_it_is_decided(sending: Place) -> None:
    write = sending.client.open_writer(SHARD, SCHEMA)
    assert write.id
    sending.taking.lost = 10_000
    with pytest.raises(Indeterminate) as told:
        write.compare_and_append([row(1)], 0, 1, timeout=2)
    sending.taking.lost = 0
    done = write.compare_and_append([row(1)], 0, 1, token=told.value.token)
    assert done.upper.time == 1
    assert len([1 for one in sending.served.rows() if one.command == "CompareAndAppend"]) == 1


def test_a_server_that_is_full_is_asked_again_until_the_timeout(sending: Place) -> None:
    sending.served.funnel.stop()
    with pytest.raises(Determinate, match="stopping"):
        sending.client.set_retention(SHARD, 5)
    assert sending.served.direct.fetch().state.retention is None


def test_a_client_that_failed_over_gets_no_refusal_that_the_first_server_may_still_make_untrue(sending: Place) -> None:
    sending.served.direct_commit(hold("h", b"theirs"))
    paused = sending.taking.paused = sending.served.server()
    with pytest.raises(Indeterminate):
        sending.client.set_hold(SHARD, "h", 0, opaque=b"ours", expected=b"later")
    sending.served.direct_commit(hold("h", b"later", expected=b"theirs"))
    paused.turn()
    assert sending.served.direct.fetch().state.holds["h"].opaque == b"ours", "so a refusal would have been a lie"


def plain(number: int) -> dict[str, object]:
    """A row without its time."""
    return {name: value for name, value in row(number).items() if name != "_time"}


class Noting(Taking):
    """Notes the commands that were sent."""

    sent_commands: list[c.Command]

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        self.sent_commands.append(proposed[0].command)
        return super().commit_commands(proposed, token, timeout_s, is_repeated=is_repeated, heart=heart)


@pytest.fixture
def place() -> Iterator[Place]:
    world = World()
    made = Place(world)
    made.taking.__class__ = Noting
    made.taking.sent_commands = []  # type: ignore[attr-defined]
    yield made
    made.client.close()
    world.close()


def kinds(place: Place) -> list[str]:
    return [type(one).__name__ for one in place.taking.sent_commands]  # type: ignore[attr-defined]


@pytest.fixture
def write(place: Place) -> persist.WriteHandle:
    made = place.client.open_writer(SHARD, SCHEMA)
    assert made.id
    place.taking.sent_commands.clear()  # type: ignore[attr-defined]
    return made


def contents(place: Place) -> dict[int, int]:
    """The numbers of rows, and at which times they came."""
    with place.served.client.open_reader(SHARD) as read:
        return {one["id"]: one["_time"] for one in read.changes(None).to_pylist()}


def test_it_is_sent_once_and_put_where_upper_is(place: Place, write: persist.WriteHandle) -> None:
    assert write.append_now([plain(1)]).upper == at(1)
    place.served.direct_commit(append(1, 40, W2))
    place.taking.meanwhile = lambda: place.served.direct_commit(append(40, 50, W2, b"b"))
    done = write.append_now([plain(2)])
    assert (done.upper, done.count, done.attempts) == (at(51), 1, 1)
    assert write.upper == at(51)
    assert kinds(place) == ["AppendNow", "AppendNow"]
    assert contents(place) == {1: 0, 2: 50}
    check_world(place.client, SHARD)


def test_nothing_is_read_back(place: Place, write: persist.WriteHandle) -> None:
    known = write.machine.version.seqno
    place.taking.asked.clear()
    for number in range(200):
        done = write.append_now([plain(number)])
        assert done.upper == write.upper == at(number + 1)
    assert write.machine.version.seqno > known, "it had to roll up once, and read the log for that"
    assert place.taking.asked.count("scan") <= 3
    assert len(write.machine.fetch().state.rollups) == 1
    done = write.compare_and_append([row(7) | {"_time": 200}], 200, 201)
    assert done.upper == at(201)


def test_after_no_answer_the_token_tells_and_what_it_names_is_there_once(
    place: Place, write: persist.WriteHandle
) -> None:
    place.taking.lost = 10_000
    with pytest.raises(Indeterminate) as told:
        write.append_now([plain(1)], timeout=2)
    place.taking.lost = 0
    place.served.direct_commit(append(1, 9, W2))
    again = write.append_now([plain(1)], token=told.value.token)
    assert (again.upper, again.attempts, again.token) == (at(1), 0, told.value.token)
    with place.served.client.open_writer(SHARD, SCHEMA) as direct:  # any process, with a server or without one
        assert direct.append_now([plain(1)], token=told.value.token).seqno == again.seqno
    assert contents(place) == {1: 0}


@pytest.mark.parametrize("served", [True, False])
def test_what_was_not_committed_is_with_its_token(place: Place, write: persist.WriteHandle, served: bool) -> None:
    token = b"past" + (5).to_bytes(8, "big") + bytes(16)
    assert since_of(token) == 5
    if served:
        done = write.append_now([plain(1)], token=token)
    else:
        with place.served.client.open_writer(SHARD, SCHEMA) as direct:
            done = direct.append_now([plain(1)], token=token)
    assert (done.token, done.attempts) == (token, 1)
    assert done.upper == at(1)
    assert contents(place) == {1: 0}


def test_a_repeated_call_that_nobody_can_decide_is_in_doubt(
    place: Place, write: persist.WriteHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "OUTCOMES_KEPT", 3)
    write.machine.fetch()
    for time in range(8):
        place.served.direct_commit(append(time, time + 1, W2))
    place.served.funnel.machine.fetch()
    place.served.world.inner.consensus.truncate(SHARD, write.machine.fetch().seqno)
    with pytest.raises(Indeterminate, match="not known any more"):
        write.append_now([plain(1)], token=b"past" + (5).to_bytes(8, "big") + bytes(16))
    assert write.fetch_upper() == at(8), "nothing was written"


def test_a_client_that_was_idle_for_long_makes_its_append_anew(
    place: Place, write: persist.WriteHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "OUTCOMES_KEPT", 3)
    for time in range(8):
        place.served.direct_commit(append(time, time + 1, W2))
    place.served.funnel = place.served.server()
    place.taking.asked.clear()
    assert write.append_now([plain(1)]).upper == at(9)
    assert kinds(place) == ["AppendNow", "AppendNow"]
    first, second = place.taking.sent_commands  # type: ignore[attr-defined]
    assert first.since < second.since
    assert place.taking.asked.count("scan") <= 1, "the rows in between are not read for that"


def test_where_its_writer_was_retired_it_is_made_anew_by_another(place: Place, write: persist.WriteHandle) -> None:
    gone = write.id
    place.served.direct_commit(c.Retire(gone))
    assert write.append_now([plain(1)]).upper == at(1)
    assert write.id != gone
    assert contents(place) == {1: 0}


def test_errors_are_those_of_before(place: Place, write: persist.WriteHandle) -> None:
    done = write.append_now([])
    assert (done.count, done.token, done.upper) == (0, b"", at(0))
    assert write.append_now([plain(1)], producer=("p", 4)).upper == at(1)
    with pytest.raises(AlreadyProduced):
        write.append_now([plain(1)], producer=("p", 4))
    with pytest.raises(InvalidUsage, match="only a token"):
        write.append_now([plain(1)], token=b"mine")
    other = place.client.open_writer(SHARD, SCHEMA)
    with pytest.raises(UpperMismatch) as told:
        other.compare_and_append([row(5)], 0, 9)
    assert told.value.actual == at(1)
    place.served.direct_commit(append(1, 2, W2))
    place.served.client.open_writer(SHARD, SCHEMA).finish()
    for updates in ([plain(2)], []):
        with pytest.raises(UpperMismatch, match="closed for writing"):
            write.append_now(updates)
    other.close()
    write.close()
    for id_ in (W1, W2):
        place.served.direct_commit(c.Retire(id_))
    place.served.client.finish(SHARD)
    with pytest.raises(ShardFinished), place.client.open_writer(SHARD, SCHEMA) as late:
        late.append_now([plain(3)])


def test_times_of_a_clock_are_by_the_clock_of_the_store(place: Place) -> None:
    schema = persist.Schema(key={"id": "int64"}, value={"word": "string"}, times="ms")
    place.served.funnel = place.served.server("c")
    location = place.client.location
    runtime = place.served.world.clock.runtime(9)
    ahead = replace(runtime, clock_ms=lambda: runtime.clock_ms() + 3_600_000)
    place.served.client.open_writer("c", schema).close()
    with persist.open(location, runtime=ahead) as client, client.open_writer("c", schema) as write:
        assert write.id
        now = place.served.consensus.now()
        done = write.append_now([{"id": 1, "word": "a"}])
        assert (done.upper.time or 0) - 1 == now
        place.served.world.clock.advance(-500)
        assert write.append_now([{"id": 2, "word": "b"}]).upper.time == now + 2, "never before upper"
        assert contents_of(client.open_reader("c").snapshot(diff=True).to_arrow()) == {(1, "a"): 1, (2, "b"): 1}


def test_staged_parts_are_put_where_upper_is(place: Place, write: persist.WriteHandle) -> None:
    with write.stage() as stage:
        staged = stage.local.write([plain(number) for number in range(9)])
        place.taking.meanwhile = lambda: place.served.direct_commit(append(0, 30, W2, b"b"))
        done = write.append_staged([staged])
    assert (done.upper, done.count) == (at(31), 9)
    assert kinds(place).count("AppendNow") == 1
    assert "CompareAndAppend" not in kinds(place)


def test_constraints_are_checked_at_one_upper(place: Place) -> None:
    schema = persist.Schema(key={"id": "int64"}, value={"word": "string"}, unique=True)
    place.served.funnel = place.served.server("u")
    with place.client.open_writer("u", schema) as write:
        write.append_now([{"id": 1, "word": "a"}])
        with pytest.raises(persist.ConstraintViolated):
            write.append_now([{"id": 1, "word": "b"}])
    assert "AppendNow" not in kinds(place)


def test_where_the_state_is_full_it_is_uploaded_and_the_one_that_fills_it_flushes(
    place: Place, write: persist.WriteHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("core.transitions", "core.plan.compaction", "relation.commit"):
        monkeypatch.setattr(f"persist_lib.{name}.INLINE_TOTAL_BYTES", 20_000)
    for number in range(60):
        write.append_now([plain(number)])
    state = write.machine.fetch().state
    assert state.inline_size < 20_000
    found = [step.command for one in place.served.rows() for step in one.steps if step.diff is not None]
    assert found.count("ApplyCompaction") >= 1, "it flushed before the state was full"
    assert found.count("CompareAndAppend") == 60
    assert state.inline_size > 0
    monkeypatch.setattr("persist_lib.core.transitions.INLINE_TOTAL_BYTES", state.inline_size + 5)
    assert write.append_now([plain(99)]).upper == at(61)
    assert write.machine.fetch().state.trace[-1].inline_size == 0
    check_world(place.client, SHARD)


def test_who_is_refused_and_told_to_makes_room(
    place: Place, write: persist.WriteHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write.append_now([plain(number)])
    full = write.machine.fetch().state.inline_size
    for name in ("core.transitions", "core.plan.compaction", "core.validate", "relation.commit"):
        monkeypatch.setattr(f"persist_lib.{name}.INLINE_TOTAL_BYTES", full)
    assert write.append_now([plain(20)]).upper == at(21)
    state = write.machine.fetch().state
    assert 0 < state.inline_size < full, "inline, as there is room again"
    assert [step.command for one in place.served.rows()[-2:] for step in one.steps] == [
        "ApplyCompaction",
        "CompareAndAppend",
    ]
    check_world(place.client, SHARD)


def test_the_shard_is_named_in_what_is_not_known(place: Place, write: persist.WriteHandle) -> None:
    place.taking.lost = 10_000
    with pytest.raises(Indeterminate) as told:
        write.append_now([plain(1)], timeout=1)
    place.taking.lost = 0
    assert ShardId(SHARD) in told.value.message
    assert since_of(told.value.token or b"") is not None
    assert write.upper != TOP
