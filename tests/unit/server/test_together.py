"""Commits of several shards by a server: the rules of one shard hold for all of them together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.errors import Indeterminate
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.multi_shard_commit import commit_together
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.unit.server.serving import SHARD, Lost, Served, answer, error, hold
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
