"""The commit loop: races, refusals and unknown outcomes, each exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Produced
from persist_lib.errors import (
    AlreadyProduced,
    CompactionRefused,
    Determinate,
    HistoryRegressed,
    HoldConflict,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    NotFound,
    Refused,
    SchemaMismatch,
    ShardFinished,
    SinceViolation,
    StillRead,
    TimedOut,
    UpperMismatch,
)
from persist_lib.frontier import TOP, at
from persist_lib.ids import ReaderId, SeqNo
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.shard.refusals import refused
from persist_lib.testing.faults import FaultyConsensus, Outcome, RecordingConsensus, Rival, Script
from tests.unit.core.core_shard import CREATE, SCHEMA, SHARD, WRITER, Store, always, append_next, appending, roll_up


def rows(store):
    return store.consensus.scan(SHARD, SeqNo(1), 1000)


def test_an_undisputed_commit_costs_one_compare_and_set_and_nothing_else(store):
    seen: list[Operation] = []
    store.created()
    machine = store.machine(consensus=RecordingConsensus(store.consensus, seen))
    append_next(machine)
    seen.clear()
    append_next(machine, 3)
    assert [request.kind for request in seen if request.kind != "now"] == ["compare_and_set"] * 3


def test_a_rival_that_is_first_makes_the_command_built_anew_from_what_it_left(store):
    store.created()
    rival = Rival(store.consensus)
    machine, other = store.machine(consensus=rival), store.machine()
    for _ in range(3):
        rival.before_next(lambda: append_next(other))
    answer = append_next(machine)
    assert rival.waiting == 0
    assert (answer.attempts, answer.seqno) == (4, 6)
    assert machine.state.upper == at(4)
    assert store.machine().fetch().state == machine.state


def test_a_refusal_is_told_only_of_a_state_read_afresh(store, machine):
    """This process thinks that upper is 1; it is 3 already, and the append at 3 is right."""
    append_next(machine)
    append_next(store.machine(), 2)
    assert machine.commit(appending(3, 4, b"t")).seqno == 6
    append_next(store.machine())
    with pytest.raises(UpperMismatch) as caught:
        machine.commit(appending(4, 5, b"u"))
    assert (caught.value.expected, caught.value.actual) == (at(4), at(5))


def test_nothing_to_do_is_told_only_of_a_state_read_afresh(store, machine):
    """Retention was 5 when this process looked, and is none now: to set it to 5 is not done already."""
    machine.commit(always(c.SetRetention(5)))
    store.machine().commit(always(c.SetRetention(None)))
    machine.commit(always(c.SetRetention(5)))
    assert store.machine().fetch().state.retention == 5
    assert machine.commit(always(c.SetRetention(5))).attempts == 0


def test_a_commit_on_a_shard_that_is_not_there_says_so_and_makes_none(store):
    with pytest.raises(NotFound, match="orders"):
        append_next(store.machine())
    with pytest.raises(NotFound):
        store.machine().fetch()
    assert rows(store) == []


def test_two_that_create_at_once_agree_on_one_shard(store):
    rival = Rival(store.consensus)
    rival.before_next(lambda: store.machine().commit(always(CREATE)))
    answer = store.machine(consensus=rival).try_commit(always(CREATE))
    assert answer == r.Exists("shard")
    assert len(rows(store)) == 1


class Disturbed(AroundConsensus):
    """Of the rows that are sent, `act` gets the `number`-th call before it is made."""

    def __init__(self, inner, act, number=1):
        super().__init__(inner)
        self.act, self.number, self.sent = act, number, 0

    def around(self, operation, call):
        if operation.kind == "compare_and_set":
            self.sent += 1
            if self.sent == self.number:
                self.act(call)
        return call()


def faulty(store, *fates):
    plan = Script({("compare_and_set", at_): fate for at_, fate in fates})
    return store.machine(consensus=FaultyConsensus(store.consensus, plan))


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_unknown_outcome_is_found_out_and_the_append_is_there_exactly_once(store, outcome, times):
    store.created()
    machine = faulty(store, *((number, outcome) for number in range(1, times + 1)))
    answer = machine.commit(appending(0, 1, b"t"), token=b"t")
    assert (answer.seqno, answer.token, answer.attempts) == (3, b"t", 1)
    assert len(rows(store)) == 3
    assert store.machine().fetch().state.count == 1
    # The same token again answers the same, from this process and from another.
    for again in (machine, store.machine()):
        repeated = again.commit(appending(0, 1, b"t"), token=b"t")
        assert (repeated.seqno, repeated.token, repeated.attempts) == (3, b"t", 0)
    assert len(rows(store)) == 3


def test_an_unknown_outcome_that_a_rival_decided_is_a_lost_race_like_any_other(store):
    """The request was lost; before it is sent again somebody else takes its place."""
    store.created()
    other = store.machine()

    def lost_then_rival(_call):
        append_next(other)
        raise Indeterminate("no answer")

    machine = store.machine(consensus=Disturbed(store.consensus, lost_then_rival))
    assert append_next(machine).seqno == 4
    assert store.machine().fetch().state.count == 2
    with pytest.raises(UpperMismatch):
        machine.commit(appending(0, 1, b"t"))


def test_a_request_that_arrives_late_changes_nothing_more(store):
    """It timed out, was sent again and won; then the first copy arrives, and once more after others have moved on."""
    store.created()
    late: list[Callable[[], object]] = []

    class Late(AroundConsensus):
        def around(self, operation, call):
            if operation.kind == "compare_and_set" and not late:
                late.append(call)
                raise Indeterminate("no answer yet")
            return call()

    machine = store.machine(consensus=Late(store.consensus))
    machine.commit(appending(0, 1, b"t"), token=b"t")
    assert late[0]() is False
    append_next(machine, 2)
    assert late[0]() is False
    assert store.machine().fetch().state.count == 3


def test_a_request_that_arrives_between_two_attempts_counts_once(store):
    store.created()

    class Delayed(AroundConsensus):
        waiting = None
        sent = 0

        def around(self, operation, call):
            if operation.kind != "compare_and_set":
                return call()
            self.sent += 1
            if self.sent == 1:
                self.waiting = call
                raise Indeterminate("no answer")
            if self.waiting:
                assert self.waiting() is True
                self.waiting = None
            return call()

    machine = store.machine(consensus=Delayed(store.consensus))
    assert machine.commit(appending(0, 1, b"t"), token=b"t").seqno == 3
    assert store.machine().fetch().state.count == 1


@pytest.mark.parametrize("applied", [True, False])
def test_what_stays_unknown_until_the_timeout_is_indeterminate_and_names_its_token(store, applied):
    store.created()
    outcome = Outcome.HAPPENED_UNKNOWN if applied else Outcome.LOST_UNKNOWN
    machine = faulty(store, *((number, outcome) for number in range(1, 10_000)))
    if applied:  # Then the log cannot be read either, or it would tell.
        machine.consensus.plan._fates.update({("scan", number): Outcome.LOST_UNKNOWN for number in range(2, 10_000)})
    machine.fetch()
    with pytest.raises(Indeterminate, match=b"token".hex()) as caught:
        machine.commit(appending(0, 1, b"token"), timeout_s=1.0, token=b"token")
    assert caught.value.token == b"token"
    assert not isinstance(caught.value, Determinate)
    # Once the store works again, the same token tells, and it is there once.
    machine.consensus.plan._fates.clear()
    assert machine.commit(appending(0, 1, b"token"), token=b"token").seqno == 3
    assert store.machine().fetch().state.count == 1


def test_a_commit_that_loses_for_ever_times_out_with_nothing_changed(store):
    store.created()
    other = store.machine()

    class Unlucky(AroundConsensus):
        def around(self, operation, call):
            if operation.kind == "compare_and_set":
                append_next(other)
            return call()

    machine = store.machine(consensus=Unlucky(store.consensus))
    with pytest.raises(TimedOut, match="lost races") as caught:
        append_next_with_timeout(machine, 0.5)
    assert caught.value.timeout_s == 0.5
    assert isinstance(caught.value, Determinate)
    assert all(batch.count == 1 for batch in store.machine().fetch().state.trace)


def append_next_with_timeout(machine, timeout_s):
    def build(state, _now):
        lower = state.upper.time or 0
        return appending(lower, lower + 1, b"mine")(state, 0)

    return machine.commit(build, timeout_s=timeout_s)


def test_no_time_at_all_means_one_attempt(store):
    store.created()
    rival = Rival(store.consensus)
    machine = store.machine(consensus=rival)
    rival.before_next(lambda: append_next(store.machine()))
    with pytest.raises(TimedOut):
        append_next_with_timeout(machine, 0.0)
    assert append_next_with_timeout(machine, 0.0).seqno == 4


@pytest.mark.parametrize("happened", [True, False])
def test_an_interrupt_in_mid_commit_leaves_a_machine_that_works_and_tells(store, happened):
    store.created()

    def interrupted(call):
        if happened:
            call()
        raise KeyboardInterrupt

    machine = store.machine(consensus=Disturbed(store.consensus, interrupted))
    with pytest.raises(KeyboardInterrupt):
        machine.commit(appending(0, 1, b"t"), token=b"t")
    answer = machine.commit(appending(0, 1, b"t"), token=b"t")
    assert answer.seqno == 3
    assert append_next(machine).seqno == 4
    assert store.machine().fetch().state == machine.state
    assert machine.state.count == 2


def test_an_unknown_outcome_whose_row_was_truncated_since_is_told_by_the_token_in_the_state(store):
    """The row was written, then rolled up and truncated by others, before this process could look at it."""
    store.created()
    other = store.machine()

    def slow(call):
        call()
        append_next(other)
        store.consensus.truncate(SHARD, roll_up(other))
        raise Indeterminate("no answer")

    machine = store.machine(consensus=Disturbed(store.consensus, slow))
    answer = machine.commit(appending(0, 1, b"t"), token=b"t")
    assert (answer.seqno, answer.token) == (3, b"t")
    assert machine.version == store.machine().fetch(), "it looked at newer states meanwhile, and does not go back"
    assert machine.state.count == 2
    assert append_next(machine).after.count == 3
    assert machine.state == store.machine().fetch().state


def test_an_unknown_outcome_that_has_left_no_trace_stays_unknown(store):
    """A retention policy, set or not, changed and truncated by others since: nothing tells, so nothing is guessed."""
    store.created()
    other = store.machine()

    def slow(call):
        call()
        other.commit(always(c.SetRetention(None)))
        store.consensus.truncate(SHARD, roll_up(other))
        raise Indeterminate("no answer")

    machine = store.machine(consensus=Disturbed(store.consensus, slow))
    with pytest.raises(Indeterminate, match="not known"):
        machine.commit(always(c.SetRetention(5)))
    assert store.machine().fetch().state.retention is None


@pytest.mark.parametrize("meanwhile", [1, 2, 3])
def test_an_unknown_outcome_on_a_history_that_was_replaced_is_told_as_neither(store, meanwhile):
    """Before the request is sent again an older copy is restored, and others append as much, or more, or less."""
    store.created()
    older = store.consensus.scan(SHARD, SeqNo(1), 99)

    def restored(_call):
        store.consensus._logs[SHARD] = list(older)
        append_next(store.machine(), meanwhile)
        raise Indeterminate("no answer")

    consensus = Disturbed(store.consensus, restored, 3)
    machine = store.machine(consensus=consensus)
    machine.commit(always(c.SetRetention(7)))
    machine.commit(always(c.SetRetention(8)))
    with pytest.raises(HistoryRegressed):
        append_next(machine)
    assert consensus.sent == 4
    assert store.machine().fetch().state.count == meanwhile


def test_the_version_of_a_machine_never_goes_back(store, machine):
    seen = [machine.version.seqno]
    for _ in range(5):
        append_next(store.machine())
        seen += [machine.version.seqno, machine.fetch().seqno]
    assert seen == sorted(seen)


R = ReaderId("r0000000000000001")


@pytest.mark.parametrize(
    ("refusal", "error", "fields"),
    [
        (r.Finished(), ShardFinished, {"shard": SHARD}),
        (r.NotLive((WRITER, R)), LeaseExpired, {"id": WRITER}),
        (r.WrongUpper(at(1), at(2)), UpperMismatch, {"expected": at(1), "actual": at(2)}),
        (r.BelowSince(at(1), at(2)), SinceViolation, {"as_of": at(1), "since": at(2)}),
        (r.WrongOpaque("h", None, b"x"), HoldConflict, {"name": "h", "expected": None, "actual": b"x"}),
        (r.NotEquivalent("why"), CompactionRefused, {"reason": "why"}),
        (r.InputsGone(((0, 1),)), CompactionRefused, {"reason": "inputs gone"}),
        (r.WrongSchema(2, "why"), SchemaMismatch, {"newest": 2}),
        (r.Held(("r1", "hold h")), StillRead, {"by": ("r1", "hold h")}),
        (r.InvalidBounds("why"), InvalidUsage, {}),
        (r.Unknown(("shard",)), NotFound, {"shard": SHARD}),
        (r.Exists("w1"), InvalidUsage, {"refusal": r.Exists("w1")}),
        (r.Malformed("why"), InvalidUsage, {"refusal": r.Malformed("why")}),
        (
            r.AlreadyProduced("q", 1, Produced(2, SeqNo(7), at(3), 0)),
            AlreadyProduced,
            {"producer": "q", "sequence": 1, "last": 2, "seqno": 7, "upper": at(3)},
        ),
        (r.NeedsFormat("it", 3, 2), InvalidUsage, {"refusal": r.NeedsFormat("it", 3, 2)}),
        (r.InlineFull(5), InvalidUsage, {"refusal": r.InlineFull(5)}),
        (r.NothingDue(), InvalidUsage, {"refusal": r.NothingDue()}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, r.Refusal) else None,
)
def test_a_refusal_becomes_an_exception_that_names_the_shard_and_carries_the_values(refusal, error, fields):
    raised = refused(SHARD, refusal)
    assert type(raised) is error
    assert SHARD in str(raised)
    assert {name: getattr(raised, name) for name in fields} == fields
    assert not isinstance(raised, Refused) or len(str(raised)) > 40


def test_a_refused_command_leaves_no_row(store, machine):
    for command in (c.Create(SCHEMA), c.Expire(2**62), c.Retire("w9"), c.ReleaseHold("h", b"")):
        with pytest.raises((InvalidUsage, Refused)):
            machine.commit(always(command))
    assert len(rows(store)) == 2


REFUSALS: list[r.Refusal] = [
    r.Finished(), r.Exists("shard"), r.Exists("w1"), r.Malformed("why"), r.NotLive((WRITER,)), r.NotLive((R,)),
    r.InvalidBounds("why"), r.WrongUpper(at(1), at(2)), r.WrongUpper(at(1), TOP), r.AlreadyDone(), r.InlineFull(5),
    r.BelowSince(at(1), at(2)), r.WrongOpaque("h", None, b"x"), r.WrongOpaque("h", b"x", None), r.NotEquivalent("why"),
    r.InputsGone(((0, 1),)), r.TooOld(SeqNo(1), SeqNo(2)), r.Unknown(("shard",)), r.Unknown(("w1/1",)), r.Unknown(()),
    r.WrongSchema(2, "the newest schema is number 2"), r.Held(("r1",)), r.NothingDue(), r.OlderFormat(1, 2),
    r.StillPending("-pending/w/b", at(9), at(3)),
    r.AlreadyProduced("q", 1, Produced(2, SeqNo(7), at(3), 0)), r.TooManyProducers("q", 1000),
    r.WrongSequence("q", 1, None), r.WrongSequence("q", 1, 2), r.NeedsFormat("the producer 'q'", 3, 2),
    r.Forgotten(SeqNo(3), SeqNo(7)), r.GivesUpHistory("h", at(5), at(0), at(9)),
    r.GivesUpHistory("h", at(10), at(0), at(9)), r.OfLayer("stream"), r.OfLayer("catalog"),
    r.OfMember("c1/1"), r.Overtaken(SeqNo(3), SeqNo(4)),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=repr)
def test_no_refusal_is_shown_as_it_is_inside(refusal: r.Refusal) -> None:
    """A sentence for each: no struct, no placeholder, and what to make of it."""
    message = refused(SHARD, refusal).message
    assert type(refusal).__name__ + "(" not in message
    assert "refused: " not in message
    assert len(message) > len(f"shard {SHARD}: ") + 20


def test_every_kind_of_refusal_is_among_them() -> None:
    assert {type(refusal) for refusal in REFUSALS} == set(get_args(r.Refusal))


def test_what_to_do_after_a_lease_ended_depends_on_whose_it_was() -> None:
    assert "registers again by itself" in refused(SHARD, r.NotLive((WRITER,))).message
    assert "open a new reader" in refused(SHARD, r.NotLive((R,))).message


def test_a_closed_shard_is_not_decided_from_the_empty_frontier_on() -> None:
    message = refused(SHARD, r.WrongUpper(at(3), TOP)).message
    assert "closed for writing" in message
    assert "decide from" not in message


@pytest.mark.parametrize(("format_", "is_server", "places"), [(2, True, False), (3, True, True), (3, False, False)])
def test_a_server_places_appends_in_shards_of_a_format_that_can_be_placed(format_, is_server, places):
    machine = Store().created()
    machine.taker = object() if is_server else None  # type: ignore[assignment]
    state = msgspec.structs.replace(machine.version.state, format=format_)
    machine._version = msgspec.structs.replace(machine.version, state=state)
    assert machine.places_appends is places
