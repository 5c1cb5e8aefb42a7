"""`append_now` and staged appends through a server: it chooses the time, and the call does all that it did before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import outcomes
from persist_lib.errors import AlreadyProduced, Indeterminate, InvalidUsage, ShardFinished, UpperMismatch
from persist_lib.frontier import TOP, at
from persist_lib.ids import ShardId
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.relation.next_time import since_of
from persist_lib.testing import check_world, contents_of
from tests.unit.server.serving import SHARD, W1, W2, append
from tests.unit.server.test_sending import Place, Taking
from tests.worlds import SCHEMA, World, row


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
