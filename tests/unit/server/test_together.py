"""Commits of several shards by a server: the rules of one shard hold for all of them together.

What reads the log finds each command of a row that has several.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persist_lib.cli.history import fetch_rows
from persist_lib.cli.watch import appended
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.errors import Indeterminate, NewerFormat
from persist_lib.frontier import at
from persist_lib.ids import SeqNo
from persist_lib.maintain.repair import repair
from persist_lib.shard import outcomes
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.log import fetch_at
from persist_lib.shard.multi_shard_commit import commit_together
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.unit.server.serving import SHARD, W2, Lost, Served, answer, append, error, hold
from tests.worlds import World

Parts = list[tuple[Funnel, Request]]


@pytest.fixture
def served() -> Iterator[Served]:
    """Two shards, `s` and `t`."""
    world = World()
    made = Served(world)
    made.create("t")
    yield made
    world.close()


def joint(served: Served, command: c.Command, token: bytes = b"j") -> Parts:
    return [(served.server(shard), served.request(command, token, shard=shard)) for shard in ("t", SHARD)]


def test_a_refusal_of_several_rests_on_a_linearizable_read(served: Served) -> None:
    """The server knows of a hold that stands in the way. It was released since."""
    parts = joint(served, hold("h", b"y"))
    served.direct_commit(hold("h", b"x"))
    for funnel, _ in parts:
        funnel.machine.fetch()
    served.direct_commit(c.ReleaseHold("h", b"x"))
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]
    refused = joint(served, hold("h", b"z"), b"k")
    commit_together(refused)
    assert answer(refused[1][1]).refusal == r.WrongOpaque("h", None, b"y")


@pytest.mark.parametrize("happened", [True, False], ids=["it happened", "it did not"])
def test_after_an_unknown_outcome_of_several_the_same_rows_are_sent_again(served: Served, happened: bool) -> None:
    parts, tries = joint(served, hold("h", b"x")), iter(range(100))

    def fate() -> None:
        assert not any(request.answer.done() for _, request in parts)
        if next(tries) < 3:
            raise Lost

    setattr(served.consensus, "after_many" if happened else "many", fate)
    commit_together(parts)
    assert [answer(request).is_committed for _, request in parts] == [True, True]
    assert len(set(served.consensus.sent)) == 2
    assert len(served.consensus.sent) >= 4
    for shard in ("t", SHARD):
        assert [step.token for row in served.rows(shard) for step in row.steps].count(b"j") == 1
        check_world(served.client, shard)


def test_after_an_unknown_outcome_of_several_a_place_that_another_took_means_all_again(served: Served) -> None:
    parts = joint(served, hold("h", b"x"))

    def lost() -> None:
        served.consensus.many = lambda: None
        served.direct_commit(hold("h", b"theirs"))
        raise Lost

    served.consensus.many = lost
    commit_together(parts)
    assert answer(parts[1][1]).refusal == r.WrongOpaque("h", None, b"theirs")
    assert not answer(parts[0][1]).is_committed
    assert not served.client.machine("t").fetch().state.holds


def test_several_whose_outcome_nobody_finds_out_any_more_are_unknown(served: Served) -> None:
    parts = joint(served, hold("h", b"x"))

    def gives_up() -> None:
        for funnel, _ in parts:
            funnel.give_up()
        raise Lost

    served.consensus.many = gives_up
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
    assert outcomes.judge(grouped.direct, token, at(lower), at(upper)).seqno == seqno
    monkeypatch.setattr(outcomes, "_by_state", lambda *_: None)  # as if the state had forgotten it
    assert outcomes.judge(grouped.direct, token, at(lower), at(upper)).seqno == seqno
    assert outcomes.judge(grouped.direct, b"x", at(lower), at(upper)).answer == "never"


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
