"""A hold keeps history; only its owner's downgrade gives some up; a retention holds from the call on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.frontier import at
from tests.worlds import SCHEMA, World, row


@pytest.fixture
def client() -> Iterator[persist.Client]:
    world = World()
    made = world.client()
    with made.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(time, time=time) for time in range(10)], 0, 10)
    yield made
    world.close()


@pytest.mark.parametrize("since", [1, 9, 10, 2**60, []])
def test_a_hold_that_would_give_up_what_is_kept_is_refused(client: persist.Client, since: object) -> None:
    before = client.inspect("s").seqno
    with pytest.raises(persist.GivesUpHistory, match="Nothing was changed") as told:
        client.set_hold("s", "audit", since)
    assert (told.value.since, told.value.newest, client.inspect("s").seqno) == (at(0), at(9), before)
    client.set_hold("s", "audit", 0)
    with pytest.raises(persist.GivesUpHistory):
        client.set_hold("s", "audit", since)
    client.set_hold("s", "other", 0)
    if since in (1, 9):
        client.set_hold("s", "audit", since)  # the other one keeps what it does not
        assert client.inspect("s").state.since == at(0)
    with client.open_reader("s") as read:
        assert read.snapshot(0).to_arrow().num_rows == 1


def test_a_downgrade_gives_up_what_nothing_else_keeps_and_says_so_before(client: persist.Client) -> None:
    planned = client.downgrade_hold("s", "audit", 4, dry_run=True)
    assert (planned.before, planned.after, planned.kept_by) == (at(0), at(4), ("hold audit",))
    assert "audit" not in client.inspect("s").state.holds
    assert client.downgrade_hold("s", "audit", 4, opaque=b"x") == planned
    with client.open_reader("s"):
        found = client.downgrade_hold("s", "audit", 7)
        assert (found.before, found.after) == (at(4), at(4))
        assert found.kept_by[0].startswith("reader r")
    assert client.downgrade_hold("s", "audit", 7).after == at(7), "since follows where nothing is behind any more"
    assert client.downgrade_hold("s", "audit", 7, dry_run=True).after == at(7)
    assert client.inspect("s").state.holds["audit"].opaque == b"x"
    unreadable: tuple[Any, ...] = (10, persist.TOP)
    for beyond in unreadable:
        with pytest.raises(persist.GivesUpHistory, match="beyond the newest time"):
            client.downgrade_hold("s", "audit", beyond, dry_run=True)
    with pytest.raises(persist.HoldConflict):
        client.downgrade_hold("s", "audit", 8, expected=b"y", dry_run=True)


def test_a_retention_keeps_history_from_the_call_on_and_ends_with_its_shard(client: persist.Client) -> None:
    client.set_retention("s", 5)
    with client.open_reader("s") as read:
        read.downgrade_since(9)
    before = client.inspect("s")
    assert before.state.since == at(0)
    assert client.retain("s", dry_run=True).after == at(4)
    assert client.inspect("s").seqno == before.seqno, "a dry run moves nothing"
    assert client.retain("s").after == at(4)
    with client.open_reader("s") as read:
        read.downgrade_since(9)
    assert client.inspect("s").state.since == at(4)
    client.finish("s")
    assert client.inspect("s").state.is_finished()
