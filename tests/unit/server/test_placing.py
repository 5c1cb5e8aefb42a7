"""Appends at the next time on servers: each is put where upper is when its turn comes, and none is put there twice.

Commits of several shards by a server: the rules of one shard hold for all of them together. What reads the log finds
each command of a row that has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from persist_lib.cli.history import fetch_rows
from persist_lib.cli.watch import appended
from persist_lib.core import commands as c
from persist_lib.core import outcomes
from persist_lib.core import refusals as r
from persist_lib.core.state import Batch, Outcome
from persist_lib.errors import Indeterminate, NewerFormat
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import SeqNo, WriterId
from persist_lib.location.commands import ROLL_UP, Answered
from persist_lib.maintain.repair import repair
from persist_lib.shard import outcomes as found_outcomes
from persist_lib.shard.dedup_index import Seen
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.log import fetch_at
from persist_lib.shard.multi_shard_commit import commit_together
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.unit.server.serving import LEASE_MS, SHARD, W1, W2, Lost, Served, answer, append, error, hold
from tests.worlds import World

SINCE = SeqNo(3)
"""The version after the two writers were registered."""


def now(token: bytes, writer: WriterId = W1, since: int = SINCE) -> c.AppendNow:
    """An append of no updates at the next time."""
    return c.AppendNow(writer, token, Batch(0, 1, MINIMUM, at(1), MINIMUM, 0, 0, 0), LEASE_MS, SeqNo(since))


def put(served, token, funnel=None, writer=W1, since=SINCE, **options):
    return served.put(now(token, writer, since), token, funnel, known=since, **options)


def placed(served) -> list[tuple[bytes, int | None]]:
    """The tokens of all appends in the log, and the uppers that they left."""
    steps = [step for row in served.rows() for step in row.steps]
    return [
        (one.token, one.upper.time)
        for step in steps if step.diff is not None and step.diff.outcomes is not None
        for one in step.diff.outcomes.added if one.token
    ]  # fmt: skip


def test_those_that_come_at_once_become_one_row_at_times_of_their_own(served):
    made = [put(served, bytes([number]), writer=[W1, W2][number % 2], client=str(number)) for number in range(5)]
    served.funnel.turn()
    assert [answer(one) for one in made] == [
        Answered(SeqNo(4), None, True, (), Outcome(bytes([number]), SeqNo(4), at(number + 1))) for number in range(5)
    ]
    assert placed(served) == [(bytes([number]), number + 1) for number in range(5)]


def test_it_is_put_where_upper_is_after_a_lost_race(served):
    made = put(served, b"a")

    def rival():
        served.consensus.before = lambda: None
        served.direct_commit(append(0, 40, W2))

    served.consensus.before = rival
    served.funnel.turn()
    assert answer(made).outcome == Outcome(b"a", SeqNo(5), at(41))


def test_with_explicit_times_in_one_row_the_one_that_comes_second_loses_politely(served):
    first, second = put(served, b"a", client="a"), served.put(append(0, 5, W2), b"b", client="b")
    third = put(served, b"c", client="c")
    served.funnel.turn()
    assert answer(first).outcome.upper == at(1)
    assert answer(second).refusal == r.WrongUpper(at(0), at(1))
    assert answer(third).outcome.upper == at(2)


def test_readers_of_older_releases_find_in_the_row_the_append_that_it_came_to(world):
    """The same bytes, whatever made them: neither the log's format nor its names of commands know of it."""
    rows = []
    for command in (now(b"t"), c.CompareAndAppend(W1, b"t", Batch(0, 1, at(0), at(1), MINIMUM, 0, 0, 0), LEASE_MS)):
        made = World()
        try:
            served = Served(made, 3)
            served.put(command, b"t")
            served.funnel.turn()
            rows.append(made.inner.consensus.scan("s", SeqNo(0), 99)[-1].data)
        finally:
            made.close()
    assert rows[0] == rows[1]


# *Committed at most once*: no frontier ever passes such a command, so that only its token and its writer keep it out.


def test_a_paused_server_that_goes_on_does_not_put_it_there_again(served):
    """The client sent it to A, which was paused, and then to B, which committed it. Then A continues."""
    a, b = served.funnel, served.server()
    held = put(served, b"a", a)
    sent = put(served, b"a", b, is_repeated=True)
    b.turn()
    served.direct_commit(append(1, 9, W2))
    a.turn()
    assert answer(sent).outcome == Outcome(b"a", SeqNo(4), at(1))
    assert answer(held).refusal == r.AlreadyDone(Outcome(b"a", SeqNo(4), at(1)))
    assert [token for token, _ in placed(served)] == [b"a", b"t"]


def test_a_first_sending_that_comes_late_is_not_taken_for_new(served):
    """It was on its way for so long that the server that gets it has seen the row of the repetition already."""
    a, b = served.funnel, served.server()
    sent = put(served, b"a", b, is_repeated=True)
    b.turn()
    served.put(append(1, 9, W2), b"x", a)
    a.turn()
    late = put(served, b"a", a)
    a.turn()
    assert answer(sent).is_committed
    assert answer(late).refusal == r.AlreadyDone(Outcome(b"a", SeqNo(4), at(1)))
    assert [token for token, _ in placed(served)] == [b"a", b"t"]


def test_twice_in_one_row_it_is_committed_once(served):
    made = [put(served, b"a", client=client) for client in "ab"]
    served.funnel.turn()
    assert answer(made[0]).is_committed
    assert answer(made[1]).refusal.outcome == Outcome(b"a", SeqNo(4), at(1))


def test_its_row_is_found_in_a_group_after_an_unknown_outcome(served):
    made = [put(served, token, client=str(token)) for token in (b"a", b"b")]

    def lost():
        served.consensus.after = lambda: None
        raise Lost

    served.consensus.after = lost
    served.funnel.turn()
    assert [answer(one).outcome.upper for one in made] == [at(1), at(2)]
    assert len(placed(served)) == 2


@pytest.fixture
def few(monkeypatch):
    """A shard remembers its last three appends only."""
    monkeypatch.setattr(outcomes, "OUTCOMES_KEPT", 3)


def many(served, funnel, count=5):
    for number in range(count):
        served.put(append(10 + number, 11 + number, W2), bytes([number]), funnel)
        funnel.turn()


def forgotten(served, a, b):
    """It is sent to both, B commits it, and so many others that the state forgets it."""
    a.machine.fetch()
    a.seen.follow(a.machine.version.seqno)
    held = put(served, b"a", a)
    put(served, b"a", b, is_repeated=True)
    b.turn()
    served.put(append(1, 10, W2), b"x", b)
    b.turn()
    many(served, b)
    state = b.machine.version.state
    assert not outcomes.remembers_since(state, SINCE)
    return held


def test_what_the_state_has_forgotten_is_found_in_the_rows(served, few):
    a, b = served.funnel, served.server()
    held = forgotten(served, a, b)
    a.turn()
    assert answer(held)[:3] == (SeqNo(4), None, True)
    assert [token for token, _ in placed(served)].count(b"a") == 1


def test_what_neither_the_state_nor_the_rows_tell_is_unknown_and_not_committed(served, few):
    a, b = served.funnel, served.server()
    forgotten(served, a, b)
    c_ = served.server()
    newest = c_.machine.fetch().seqno
    served.world.inner.consensus.truncate("s", SeqNo(7))
    repeated, fresh = put(served, b"a", c_, is_repeated=True), put(served, b"a", c_, client="other")
    c_.turn()
    assert isinstance(error(repeated), Indeterminate)
    assert answer(fresh).refusal == r.Forgotten(SINCE, b.machine.version.state.outcomes[0].seqno)
    assert [token for token, _ in placed(served)].count(b"a") == 0, "its row is truncated, and there is no other"
    assert c_.machine.fetch().seqno == newest


def test_an_old_one_that_the_rows_do_not_have_is_put_there(served, few):
    funnel = served.funnel
    served.put(append(0, 10, W2), b"x")
    funnel.turn()
    funnel.seen.begins = SINCE  # as if it had served the shard since then
    many(served, funnel)
    made = put(served, b"a")
    served.consensus.asked.clear()
    funnel.turn()
    assert answer(made).outcome.upper == at(16)
    assert served.consensus.asked == ["compare_and_set"], "from memory"


def test_a_first_sending_from_an_old_version_does_not_make_a_server_read_old_rows(served, few):
    served.put(append(0, 10, W2), b"x")
    served.funnel.turn()
    many(served, served.funnel)
    other = served.server()
    made = put(served, b"a", other)
    other.machine.fetch()
    served.consensus.asked.clear()
    other.turn()
    assert isinstance(answer(made).refusal, r.Forgotten)
    assert served.consensus.asked == ["scan"], "the read that a refusal needs"


def test_that_it_is_not_committed_is_told_once_its_writer_is_retired(served):
    served.direct_commit(c.Retire(W1))
    gone = put(served, b"a", is_repeated=True)
    served.funnel.turn()
    assert answer(gone).refusal == r.NotLive((W1,))
    served.direct_commit(c.CompareAndAppend(W2, b"z", Batch(0, 1, at(0), at(7), MINIMUM, 0, 0, 0), LEASE_MS))
    passed = put(served, b"b", writer=W2, is_repeated=True)
    served.funnel.turn()
    assert answer(passed).is_committed, "no frontier passes it"


# *A client gets what it needs, and no more*: in a row of many commands, all of it for each would be their square.


def test_no_row_goes_to_clients_that_need_none(served):
    served.funnel.machine.fetch()
    made = [put(served, bytes([number]), writer=[W1, W2][number % 2], client=str(number)) for number in range(100)]
    served.funnel.turn()
    assert len(served.rows()[-1].steps) == 100
    assert not any(one.answer.result(0).rows for one in made)


def test_one_client_of_a_row_has_to_roll_up(served):
    every = served.until_a_rollup_is_due()
    made = [put(served, bytes([number]), client=str(number)) for number in range(50)]
    served.funnel.turn()
    assert answer(made[0]).seqno == every
    assert [answer(one).due for one in made] == [(ROLL_UP,)] + 49 * [()]


def test_what_a_server_knows_of_tokens_is_by_the_names_of_the_log(served):
    put(served, b"a")
    served.funnel.turn()
    fresh = Seen(served.funnel.machine.shard, served.consensus)
    fresh.begins = fresh.ends = SINCE
    fresh.follow(SeqNo(4))
    look = partial(fresh.look_up, since=SINCE)
    assert look(served.request(now(b"a"), b"a")) == 4
    assert look(served.request(now(b"b"), b"b")) == "not there"


def test_the_row_at_which_a_server_begins_to_know_tokens_is_looked_at_too(served):
    put(served, b"a")
    served.funnel.turn()
    fresh = Seen(served.funnel.machine.shard, served.consensus)
    fresh.follow(SeqNo(4))
    assert fresh.begins == 4
    assert fresh.look_up(served.request(now(b"a"), b"a"), SINCE) == 4


Parts = list[tuple[Funnel, Request]]


@pytest.fixture
def pair() -> Iterator[Served]:
    """Two shards, `s` and `t`."""
    world = World()
    made = Served(world)
    made.create("t")
    yield made
    world.close()


def joint(pair: Served, command: c.Command, token: bytes = b"j") -> Parts:
    return [(pair.server(shard), pair.request(command, token, shard=shard)) for shard in ("t", SHARD)]


def test_a_refusal_of_several_rests_on_a_linearizable_read(pair: Served) -> None:
    """The server knows of a hold that stands in the way. It was released since."""
    parts = joint(pair, hold("h", b"y"))
    pair.direct_commit(hold("h", b"x"))
    for funnel, _ in parts:
        funnel.machine.fetch()
    pair.direct_commit(c.ReleaseHold("h", b"x"))
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]
    refused = joint(pair, hold("h", b"z"), b"k")
    commit_together(refused)
    assert answer(refused[1][1]).refusal == r.WrongOpaque("h", None, b"y")


@pytest.mark.parametrize("happened", [True, False], ids=["it happened", "it did not"])
def test_after_an_unknown_outcome_of_several_the_same_rows_are_sent_again(pair: Served, happened: bool) -> None:
    parts, tries = joint(pair, hold("h", b"x")), iter(range(100))

    def fate() -> None:
        assert not any(request.answer.done() for _, request in parts)
        if next(tries) < 3:
            raise Lost

    setattr(pair.consensus, "after_many" if happened else "many", fate)
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]
    assert len(set(pair.consensus.sent)) == 2
    assert len(pair.consensus.sent) >= 4
    for shard in ("t", SHARD):
        assert [step.token for row in pair.rows(shard) for step in row.steps].count(b"j") == 1
        check_world(pair.client, shard)


def test_after_an_unknown_outcome_of_several_a_place_that_another_took_means_all_again(pair: Served) -> None:
    parts = joint(pair, hold("h", b"x"))

    def lost() -> None:
        pair.consensus.many = lambda: None
        pair.direct_commit(hold("h", b"theirs"))
        raise Lost

    pair.consensus.many = lost
    commit_together(parts)
    assert answer(parts[1][1]).refusal == r.WrongOpaque("h", None, b"theirs")
    assert not answer(parts[0][1]).is_committed
    assert not pair.client.machine("t").fetch().state.holds


def test_several_whose_outcome_nobody_finds_out_any_more_are_unknown(pair: Served) -> None:
    parts = joint(pair, hold("h", b"x"))

    def gives_up() -> None:
        for funnel, _ in parts:
            funnel.give_up()
        raise Lost

    pair.consensus.many = gives_up
    commit_together(parts)
    assert all(isinstance(error(request), Indeterminate) for _, request in parts)


@pytest.fixture
def grouped() -> Iterator[Served]:
    world = World()
    made = Served(world)
    made.put(append(0, 10, token=b"a"), b"a", client="loader")
    made.put(hold("h", b"x", expected=b"y"), b"b", client="dashboard")
    made.put(append(10, 20, W2, b"c"), b"c", client="other")
    made.put(hold("h", b"x"), b"d", client="dashboard")
    made.funnel.turn()
    yield made
    world.close()


def test_the_log_shows_each_command_who_sent_it_and_what_it_got(grouped: Served) -> None:
    *_, single, group = fetch_rows(grouped.client, SHARD, None, 10)
    assert (group["command"], group["token"]) == ("Group", "")
    told = [(one["command"], one["sender"], one["token"], bool(one["refusal"])) for one in group["commands"]]
    assert told == [
        ("CompareAndAppend", "loader", "61", False), ("SetHold", "dashboard", "62", True),
        ("CompareAndAppend", "other", "63", False), ("SetHold", "dashboard", "64", False),
    ]  # fmt: skip
    assert group["changes"][0].startswith("CompareAndAppend by loader: + batch 0..1, times [0] to [10]")
    assert "refused: WrongOpaque" in group["changes"][1]
    assert "hold h: none" in group["changes"][3]
    assert [one["command"] for one in single["commands"]] == ["RegisterWriter"]
    assert single["changes"] == single["commands"][0]["changes"]


@pytest.mark.parametrize(("token", "lower", "upper"), [(b"a", 0, 10), (b"c", 10, 20)])
def test_tokens_are_searched_in_groups(
    grouped: Served, token: bytes, lower: int, upper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqno = grouped.direct.fetch().seqno
    assert found_outcomes.judge(grouped.direct, token, at(lower), at(upper)).seqno == seqno
    monkeypatch.setattr(found_outcomes, "_by_state", lambda *_: None)  # as if the state had forgotten it
    assert found_outcomes.judge(grouped.direct, token, at(lower), at(upper)).seqno == seqno
    assert found_outcomes.judge(grouped.direct, b"x", at(lower), at(upper)).answer == "never"


def test_versions_repairs_and_watchers_know_groups(grouped: Served) -> None:
    newest = grouped.direct.fetch()
    before = fetch_at(grouped.client.blob, grouped.client.consensus, SHARD, newest, SeqNo(newest.seqno - 1))
    assert before.state.upper == at(0)
    assert fetch_at(grouped.client.blob, grouped.client.consensus, SHARD, newest, newest.seqno).state == newest.state
    assert not repair(grouped.direct, dry_run=True).dropped
    assert appended(grouped.client, SHARD, before, newest) == 0
    grouped.client.roll_up(SHARD, force=True)
    grouped.client.maintain(SHARD)
    check_world(grouped.client, SHARD)


def test_a_program_of_the_release_before_refuses_a_group(grouped: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = grouped.world.bytes(SHARD)
    monkeypatch.setattr("persist_lib.format.log.NEWEST", 3)
    with pytest.raises(NewerFormat, match="format 4"):
        grouped.world.client().open_writer(SHARD, grouped.direct.state.schemas[0])
    assert grouped.world.bytes(SHARD) == before
