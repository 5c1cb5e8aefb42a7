"""The rules by which a server commits a shard. Each of them has a counterexample, which is the test."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.outcomes import find_outcome
from persist_lib.errors import Determinate, Indeterminate, Overloaded, TimedOut
from persist_lib.format.log import GROUP
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, format_writer_id
from persist_lib.location.commands import Answered
from persist_lib.shard.dedup_index import RECENT_BYTES, RECENT_ROWS
from persist_lib.shard.group_commit import OF_A_WRITER_MOST
from persist_lib.shard.multi_shard_commit import commit_together
from persist_lib.shard.requests import OF_A_CLIENT_MOST, WAITING_MOST
from persist_lib.testing import check_world
from tests.unit.server.serving import LEASE_MS, SHARD, W1, W2, Lost, Served, answer, append, error, hold


def test_what_waits_becomes_one_row_in_which_each_has_its_answer(served):
    first = served.put(append(0, 10, token=b"a"), b"a", client="loader")
    second = served.put(append(10, 20, W2, token=b"b"), b"b", client="other")
    refused = served.put(hold("h", b"x", expected=b"y"), client="third")
    again = served.put(append(0, 10, token=b"a"), b"a", client="loader")
    served.funnel.turn()
    seqno = answer(first).seqno
    assert answer(first) == answer(second) == Answered(seqno, None, True)
    assert answer(refused).refusal == r.WrongOpaque("h", b"y", None)
    assert isinstance(answer(again).refusal, r.AlreadyDone)
    assert answer(again).refusal.outcome.seqno == seqno
    row = served.rows()[-1]
    assert (row.seqno, row.command) == (seqno, GROUP)
    assert [(step.sender, step.token) for step in row.steps] == [
        ("loader", b"a"), ("other", b"b"), ("third", refused.token), ("loader", b"a"),
    ]  # fmt: skip
    assert "WrongOpaque" in row.steps[2].refusal
    check_world(served.client, SHARD)


@pytest.mark.parametrize("format_", [1, 2, 3])
def test_in_older_formats_each_change_has_a_row_of_its_own(world, format_):
    served = Served(world, format_)
    made = [served.put(append(at_, at_ + 1, token=bytes([at_])), bytes([at_]), client=str(at_)) for at_ in range(4)]
    for _ in range(4):
        served.funnel.turn()
    assert [answer(one).seqno for one in made] == [4, 5, 6, 7]
    assert {row.command for row in served.rows()[3:]} == {"CompareAndAppend"}
    check_world(served.client, SHARD)


# *Nothing is answered, neither success nor refusal nor "already done", before the row that it rests on is committed.*


def test_nothing_is_answered_before_its_row_is_committed(served):
    lot = [
        served.put(append(0, 10, token=b"a"), b"a"), served.put(append(0, 10, token=b"a"), b"a"),
        served.put(append(0, 5, W2), b"b"), served.put(c.RegisterWriter(W1, "ingest", 5)),
    ]  # fmt: skip
    seen: list[bool] = []
    served.consensus.before = lambda: seen.append(any(one.answer.done() for one in lot))
    served.consensus.after = lambda: seen.append(any(one.answer.done() for one in lot))
    served.funnel.turn()
    assert seen == [False, False]
    assert all(one.answer.done() for one in lot)


def test_after_a_lost_race_all_of_the_group_is_computed_again(served):
    """The second append is refused because of the first. Then the first writer is retired, and the second one fits."""
    first, second = served.put(append(0, 10), b"a"), served.put(append(0, 5, W2), b"b")

    def rival():
        served.consensus.before = lambda: None
        served.direct_commit(c.Retire(W1))

    served.consensus.before = rival
    served.funnel.turn()
    assert answer(first).refusal == r.NotLive((W1,))
    assert answer(second) == Answered(SeqNo(5), None, True)
    assert served.rows()[-1].steps[1].token == b"b"
    check_world(served.client, SHARD)


def test_where_only_refusals_remain_a_linearizable_read_comes_first(served):
    served.put(hold("h", b"x"))
    served.funnel.turn()
    served.direct_commit(c.ReleaseHold("h", b"x"))
    known = served.funnel.machine.version
    made = served.put(hold("h", b"y"))
    served.funnel.turn()
    assert answer(made) == Answered(SeqNo(known.seqno + 2), None, True)
    refused = served.put(hold("h", b"z"), known=served.direct.fetch().seqno)
    served.consensus.asked.clear()
    served.funnel.turn()
    assert answer(refused).refusal == r.WrongOpaque("h", None, b"y")
    assert served.consensus.asked == ["scan"], "one read, and no row"


def test_a_read_from_before_a_request_came_does_not_prove_its_refusal(served):
    """It comes while another group is under way; the state changes after the group was committed."""
    late: list[Any] = []

    def comes():
        late.append(served.put(hold("h", b"y")))
        served.consensus.after = lambda: None

    served.put(hold("h", b"x"))
    served.consensus.after = comes
    served.funnel.turn()
    served.direct_commit(c.ReleaseHold("h", b"x"))
    served.funnel.turn()
    assert answer(late[0]).is_committed


# *An unknown outcome of a group: send the same bytes until the place is taken; nothing else of that shard meanwhile.*


@pytest.mark.parametrize("happened", [True, False], ids=["it happened", "it did not"])
def test_after_an_unknown_outcome_the_same_bytes_are_sent_and_nothing_else(served, happened):
    first, later = served.put(append(0, 10), b"a"), list[Any]()
    tries = iter(range(100))

    def fate():
        if (number := next(tries)) == 0:
            later.append(served.put(hold("h", b"x")))
        assert not first.answer.done()
        if number < 4:
            raise Lost

    setattr(served.consensus, "after" if happened else "before", fate)
    served.funnel.turn()
    assert answer(first).is_committed
    assert len(set(served.consensus.sent)) == 1
    assert len(served.consensus.sent) >= 2
    assert not later[0].answer.done()
    served.consensus.before = served.consensus.after = lambda: None
    served.funnel.turn()
    assert answer(later[0]).seqno == answer(first).seqno + 1
    assert len([row for row in served.rows() if row.command == "CompareAndAppend"]) == 1


def test_after_an_unknown_outcome_a_place_that_another_took_means_all_again(served):
    first, second = served.put(append(0, 10), b"a"), served.put(append(0, 5, W2), b"b")

    def lost():
        served.consensus.before = lambda: None
        served.direct_commit(c.Retire(W1))
        raise Lost

    served.consensus.before = lost
    served.funnel.turn()
    assert answer(first).refusal == r.NotLive((W1,))
    assert answer(second).is_committed
    check_world(served.client, SHARD)


def test_whoever_waits_no_longer_for_an_unknown_outcome_is_told_that_it_is_unknown(served):
    """And whoever waited behind it, that nothing of theirs was sent."""
    short = served.put(append(0, 10), b"a", seconds=1)
    long, behind = served.put(append(10, 20), b"b"), list[Any]()
    tries = iter(range(1000))

    def fate():
        if (number := next(tries)) == 0:
            behind.append(served.put(hold("h", b"x"), seconds=1))
        if number < 20:
            raise Lost

    served.consensus.before = fate
    served.funnel.turn()
    assert isinstance(error(short), Indeterminate)
    assert error(short).fields["token"] == b"a"
    assert answer(long).is_committed
    assert isinstance(error(behind[0]), TimedOut)
    served.funnel.turn()
    assert "SetHold" not in {step.command for row in served.rows() for step in row.steps}
    assert find_outcome(served.direct.fetch().state, b"t", at(0), at(10)) is not None, "it was committed all the same"


def test_a_server_that_gives_up_says_what_is_unknown_and_what_was_never_sent(served):
    sent, behind = served.put(append(0, 10), b"a"), list[Any]()

    def fate():
        if not behind:
            behind.append(served.put(hold("h", b"x")))
        served.funnel.give_up()
        raise Lost

    served.consensus.before = fate
    served.funnel.turn()
    assert isinstance(error(sent), Indeterminate)
    served.funnel.turn()
    assert isinstance(error(behind[0]), Overloaded)
    assert isinstance(error(served.put(hold("h", b"x"))), Overloaded)


def test_a_group_that_was_truncated_while_nobody_knew_is_unknown_though_a_token_of_it_is_there(served):
    """Another server got the same append, and its row has the place: it holds only that one."""
    served.funnel.machine.fetch()
    first, second = served.put(append(0, 10, token=b"a"), b"a"), served.put(hold("h", b"x"), b"b")

    def lost():
        served.consensus.before = lambda: None
        other = served.server(consensus=served.world.inner.consensus)
        served.put(append(0, 10, token=b"a"), b"a", other)
        other.turn()
        for upper in range(11, 300):
            served.direct_commit(append(upper - 1, upper, token=b"x"))
        served.client.roll_up(SHARD, force=True)
        served.client.collect(SHARD)
        raise Lost

    served.consensus.before = lost
    served.funnel.turn()
    assert served.rows()[0].seqno > 4
    assert isinstance(error(first), Indeterminate)
    assert isinstance(error(second), Indeterminate)
    assert "h" not in served.direct.fetch().state.holds


# *"Not committed" is said to a client that failed over only once its writer is retired or a later row has decided.*


def test_a_refusal_of_a_repeated_command_is_unknown_while_a_paused_server_may_still_commit_it(served):
    paused, other = served.funnel, served.server()
    served.direct_commit(hold("h", b"theirs"))
    first = served.put(hold("h", b"ours", expected=b"later"), b"t", paused)
    second = served.put(hold("h", b"ours", expected=b"later"), b"t", other, is_repeated=True)
    other.turn()
    assert isinstance(error(second), Indeterminate)
    served.direct_commit(hold("h", b"later", expected=b"theirs"))
    paused.turn()
    assert answer(first).is_committed, "so a refusal would have been a lie"


def test_a_refusal_of_a_repeated_append_is_told_once_its_times_have_passed_or_its_writer_is_retired(
    served,
):
    gap = served.put(append(10, 20), b"a", is_repeated=True)
    served.funnel.turn()
    assert isinstance(error(gap), Indeterminate), "upper may come to 10 some day"
    served.direct_commit(append(0, 15, W2))
    passed = served.put(append(10, 20), b"a", is_repeated=True)
    retired = served.put(append(50, 60), b"b", is_repeated=True)
    served.funnel.turn()
    assert answer(passed).refusal == r.WrongUpper(at(10), at(15))
    assert isinstance(error(retired), Indeterminate)
    served.direct_commit(c.Retire(W1))
    retired = served.put(append(50, 60), b"b", is_repeated=True)
    served.funnel.turn()
    assert answer(retired).refusal == r.NotLive((W1,))


def test_that_nothing_is_due_is_told_though_the_command_was_sent_before(served):
    """It may be applied twice, so that it matters to nobody whether a paused server does so later."""
    served.put(c.Expire(0), b"s")  # leases that are longer than any can be
    served.funnel.turn()
    made = served.put(c.Expire(0), b"t", is_repeated=True)
    served.funnel.turn()
    assert answer(made).refusal == r.NothingDue()


@pytest.mark.parametrize("why", ["too many", "too late", "dropped", "unreadable"])
def test_no_failure_of_a_repeated_command_says_that_it_was_not_committed(served, why):
    request = served.request(hold("h", b"x"), b"t", is_repeated=True, seconds=1)
    if why == "too many":
        served.funnel.stop()
    served.funnel.put(request)
    if why == "too late":
        served.world.clock.advance(2)
    if why == "dropped":
        request.is_dropped = True
    if why == "unreadable":
        served.funnel.machine.close("closed")
    served.funnel.turn()
    assert isinstance(error(request), Indeterminate)
    assert error(request).fields["token"] == b"t"


def test_a_command_that_was_sent_to_two_servers_is_committed_once(served):
    """The first is paused with the command; the second commits it; then the hold comes back to where it was."""
    served.direct_commit(hold("h", b"a"))
    paused, other = served.funnel, served.server()
    known = paused.machine.fetch().seqno
    first = served.put(hold("h", b"b", expected=b"a"), b"t", paused, known=known)
    second = served.put(hold("h", b"b", expected=b"a"), b"t", other, known=known, is_repeated=True)
    other.turn()
    assert answer(second).is_committed
    served.direct_commit(hold("h", b"a", expected=b"b"))
    paused.turn()
    assert answer(first) == answer(second), "as the log says"
    assert served.direct.fetch().state.holds["h"].opaque == b"a"


@pytest.mark.parametrize("when", ["while it waits", "during its compare-and-set"])
def test_a_server_that_forgot_the_shard_looks_for_commands_in_the_log(served, when):
    """It began with the shard only after the other server had committed the command, in a group."""
    served.direct_commit(hold("h", b"a"))
    known = served.direct.fetch().seqno
    late, other = served.funnel, served.server()
    first = served.put(hold("h", b"b", expected=b"a"), b"t", late, known=known)

    def overtake():
        served.consensus.before = lambda: None
        second = served.put(hold("h", b"b", expected=b"a"), b"t", other, known=known, is_repeated=True)
        served.put(hold("other", b"x"), funnel=other)
        other.turn()
        assert answer(second).is_committed
        served.direct_commit(hold("h", b"a", expected=b"b"))

    if when == "while it waits":
        overtake()
    else:
        served.consensus.before = overtake
    late.turn()
    assert answer(first).is_committed
    assert served.direct.fetch().state.holds["h"].opaque == b"a"
    assert [step.token for row in served.rows() for step in row.steps].count(b"t") == 1


def test_where_the_rows_that_would_tell_are_truncated_a_command_is_not_committed_and_unknown(served):
    known = served.direct.fetch().seqno
    for upper in range(1, 300):
        served.direct_commit(append(upper - 1, upper, token=b"x"))
    served.client.roll_up(SHARD, force=True)
    served.client.collect(SHARD)
    assert served.rows()[0].seqno > known + 1
    made = served.put(hold("h", b"x"), b"t", known=known, is_repeated=True)
    served.funnel.turn()
    assert isinstance(error(made), Indeterminate)
    assert not served.direct.fetch().state.holds
    fresh = served.put(hold("h", b"x"), b"u", known=known)
    served.funnel.turn()
    assert answer(fresh).refusal == r.Forgotten(known, served.funnel.seen.begins), "it may be a message that comes late"
    again = served.put(hold("h", b"x"), b"u", known=answer(fresh).seqno)
    served.funnel.turn()
    assert answer(again).is_committed


def test_a_first_message_that_comes_after_its_own_repetition_is_not_applied_again(served):
    """It says that it was not sent before. Another server has committed its repetition, and somebody undid that."""
    late, other = served.funnel, served.server()
    served.direct_commit(hold("h", b"a"))
    known = served.direct.fetch().seqno
    moves = hold("h", b"b", expected=b"a")
    again = served.put(moves, b"t", other, known=known, is_repeated=True)
    other.turn()
    assert answer(again).is_committed
    served.direct_commit(hold("h", b"a", expected=b"b"))
    for _ in range(2):
        first = served.put(moves, b"t", late, known=known)
        late.turn()
        assert answer(first).is_committed or isinstance(answer(first).refusal, r.Forgotten)
        assert served.direct.fetch().state.holds["h"].opaque == b"a", "it was moved twice"


# *At most as many commands of one writer in flight as a writer's tokens are remembered.*


def test_no_more_appends_of_a_writer_are_unanswered_than_its_tokens_are_remembered(world):
    """In format 1 these are four. A fifth would push out the first, whose outcome could then not be told any more."""
    served = Served(world, 1)
    made = [served.put(append(n, n + 1, token=bytes([n])), bytes([n])) for n in range(4)]
    fifth = served.put(append(4, 5, token=b"\x04"), b"\x04")
    other = served.put(append(0, 1, W2, token=b"o"), b"o")
    for _ in range(6):
        served.funnel.turn()
    assert isinstance(error(fifth), Overloaded)
    assert other.answer.done()
    served.client.roll_up(SHARD, force=True)
    served.client.collect(SHARD)
    state = served.direct.fetch().state
    for number, one in enumerate(made):
        outcome = find_outcome(state, bytes([number]), at(number), at(number + 1))
        assert outcome is not None
        assert outcome.seqno == answer(one).seqno


def test_a_writer_may_send_more_once_it_is_answered(served):
    served.funnel.machine.fetch()
    made = [served.put(append(n, n + 1), bytes([n])) for n in range(OF_A_WRITER_MOST + 1)]
    assert isinstance(error(made[-1]), Overloaded)
    served.funnel.turn()
    assert all(answer(one).is_committed for one in made[:-1])
    more = served.put(append(OF_A_WRITER_MOST, 100), b"more")
    served.funnel.turn()
    assert answer(more).is_committed


# Bounds, fairness, deadlines.


def test_heartbeats_come_first_and_bypass_bounds(served):
    for number in range(WAITING_MOST // OF_A_CLIENT_MOST):
        for _ in range(OF_A_CLIENT_MOST):
            served.put(hold("h", b"x", expected=b"never"), client=f"client {number}")
    assert isinstance(error(served.put(hold("h", b"x"), client="one more")), Overloaded)
    beat = served.put(c.Heartbeat((W1,), 2**51), client="client 0")
    served.funnel.turn()
    assert answer(beat).is_committed


def test_clients_get_turns_however_much_one_of_them_sends(served):
    flood = [served.put(hold("h", b"x", expected=b"never"), client="flood") for _ in range(OF_A_CLIENT_MOST)]
    assert isinstance(error(served.put(hold("h", b"x"), client="flood")), Overloaded)
    few = [served.put(hold(str(n), b"x"), client=f"few {n}") for n in range(5)]
    taken = served.funnel.queue.take(10)
    assert {one.client for one in taken} == {"flood", *(f"few {n}" for n in range(5))}
    assert set(few) <= set(taken)
    assert [one for one in taken if one.client == "flood"] == flood[:5], "what one client sends stays in its order"


def test_who_is_gone_or_out_of_time_is_dropped_before_the_commit(served):
    gone, late, kept = (served.put(append(0, 10), bytes([n]), seconds=s) for n, s in enumerate((60, 1, 60)))
    gone.is_dropped = True
    served.world.clock.advance(2)
    served.funnel.turn()
    assert isinstance(error(gone), Determinate)
    assert isinstance(error(late), TimedOut)
    assert answer(kept).is_committed


def test_who_goes_while_a_race_is_lost_is_dropped_before_the_next_attempt(served):
    goes, stays = served.put(append(0, 10), b"a"), served.put(hold("h", b"x"))

    def rival():
        served.consensus.before = lambda: None
        goes.is_dropped = True
        served.direct_commit(c.SetRetention(5))

    served.consensus.before = rival
    served.funnel.turn()
    assert isinstance(error(goes), Determinate)
    assert answer(stays).is_committed
    assert "CompareAndAppend" not in {step.command for row in served.rows() for step in row.steps}


def test_a_command_that_nobody_could_read_again_hurts_none_of_the_others(served):
    poisoned = served.put(c.SetHold("\ud800", at(0), None, b"x"))
    odd = served.put(hold("h", "a text"))
    sound = [served.put(append(0, 10), b"a"), served.put(hold("k", b"x"), client="b")]
    served.funnel.turn()
    assert "no reader could make" in str(error(poisoned))
    assert "no reader could make" in str(error(odd))
    assert all(answer(one).is_committed for one in sound)
    check_world(served.client, SHARD)


def test_durations_are_moments_of_the_stores_clock_when_a_command_is_applied(served):
    fresh = format_writer_id(7)
    made = served.put(c.RegisterWriter(fresh, "ingest", LEASE_MS))
    served.world.clock.advance(30)
    now = served.consensus.now()
    served.funnel.turn()
    assert answer(made).is_committed
    assert served.direct.fetch().state.writers[fresh].lease_until == now + LEASE_MS


def test_a_shard_that_cannot_be_read_is_told_as_it_is_and_nothing_was_done(served):
    served.funnel.machine.close("the store is gone")
    made = served.put(hold("h", b"x"))
    served.funnel.turn()
    assert "the store is gone" in str(error(made))


# *Multi-shard commits are served: the shards' turns are taken in the order of their names.*


def joint(served, *shards, token: bytes = b"j", **options):
    return [(served.server(shard), served.request(hold("h", b"x"), token, shard=shard, **options)) for shard in shards]


def test_several_shards_are_committed_together_or_not_at_all(served):
    served.create("t")
    parts = joint(served, "t", SHARD)
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]
    served.direct_commit(c.ReleaseHold("h", b"x"), "t")
    refused = joint(served, "t", SHARD, token=b"k")
    commit_together(refused)
    assert answer(refused[0][1]) == Answered(SeqNo(5)), "it would apply, and was not committed"
    assert answer(refused[1][1]).refusal == r.WrongOpaque("h", None, b"x")
    assert not served.client.machine("t").fetch().state.holds
    again = joint(served, "t", SHARD, is_repeated=True)
    commit_together(again)
    assert all(isinstance(answer(one).refusal, r.AlreadyDone) for _, one in again), "found by its token, in the log"


def test_commits_of_several_shards_never_wait_for_each_other_for_ever(served):
    served.create("t")
    funnels = {shard: served.server(shard) for shard in ("t", SHARD)}

    def run(order, number):
        for step in range(20):
            name = f"{number}-{step}"
            asked = {shard: served.request(hold(name, b"x"), name.encode(), shard=shard) for shard in order}
            commit_together([(funnels[shard], request) for shard, request in asked.items()])

    threads = [threading.Thread(target=run, args=((SHARD, "t")[:: 1 - 2 * (n % 2)], n), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(served.direct.fetch().state.holds) == 80


def test_a_repeated_commit_of_several_shards_is_unknown_while_a_paused_server_may_still_make_it(served):
    served.create("t")
    served.direct_commit(hold("h", b"y"), "t")
    open_ = joint(served, SHARD, "t", is_repeated=True)
    commit_together(open_)
    assert all(isinstance(error(request), Indeterminate) for _, request in open_)


def test_the_turn_of_a_shard_is_taken_while_several_are_committed(served):
    served.create("t")
    parts = joint(served, SHARD, "t")
    taken: list[bool] = []

    def look():
        def try_turn():
            taken.extend(funnel.machine.turn.acquire(blocking=False) for funnel, _ in parts)

        thread = threading.Thread(target=try_turn)
        thread.start()
        thread.join()

    served.consensus.many = look
    commit_together(parts)
    assert taken == [False, False]


def test_the_rows_that_a_client_does_not_know_go_along_with_its_answer(served):
    known = served.funnel.machine.fetch().seqno
    made = [served.put(hold(str(n), b"x"), known=known) for n in range(3)]
    old = served.put(hold("old", b"x"), known=SeqNo(1))
    served.funnel.turn()
    later = served.put(hold("later", b"x"), known=known)
    served.funnel.turn()
    rows = served.world.inner.consensus.scan(SHARD, SeqNo(known + 1), 10)
    assert [list(one.answer.result(0).rows) for one in made] == [rows[:1]] * 3
    assert list(later.answer.result(0).rows) == rows
    assert old.answer.result(0).rows == (), "it knows less than what is in memory"


def test_what_is_in_memory_of_a_long_log_is_bounded(served):
    for n in range(300):
        served.put(hold(f"{n}", b"x" * 2000), client=str(n))
        served.funnel.turn()
    seen = served.funnel.seen
    assert sum(len(row.data) for row in seen._recent) <= RECENT_BYTES
    assert len(seen._recent) <= RECENT_ROWS
    assert seen.rows(SeqNo(seen.ends - 1), seen.ends)[0].seqno == seen.ends
    assert seen.rows(SeqNo(3), seen.ends) == ()


def test_a_commit_of_several_shards_by_a_client_that_was_away_for_long_is_made(served):
    """The rows since what it knew are truncated, so it makes its commands again from where the server is."""
    served.create("t")
    known = served.direct.fetch().seqno
    served.funnel.machine.fetch()
    for upper in range(1, 300):
        served.direct_commit(append(upper - 1, upper, token=b"x"))
    served.client.roll_up(SHARD, force=True)
    served.client.collect(SHARD)
    served.funnel.machine.fetch()
    parts = [(served.funnel, served.request(hold("h", b"x"), b"j", known=known)), *joint(served, "t", known=SeqNo(3))]
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [False, False]
    assert isinstance(answer(parts[0][1]).refusal, r.Forgotten)
    newest = answer(parts[0][1]).seqno
    parts = [(served.funnel, served.request(hold("h", b"x"), b"j", known=newest)), *joint(served, "t", known=SeqNo(3))]
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]


def test_who_cancels_its_wait_breaks_no_turn(served):
    """As the event loop does, when a client goes while its row is on its way."""
    goes, stays = served.put(append(0, 10), b"a"), served.put(hold("h", b"x"))
    served.consensus.before = goes.answer.cancel
    served.funnel.turn()
    assert answer(stays).is_committed
    assert not goes.answer.cancelled()
