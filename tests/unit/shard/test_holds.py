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


@pytest.mark.parametrize("since", [10, 2**60, []])
def test_a_hold_beyond_the_newest_time_is_refused(client: persist.Client, since: object) -> None:
    before: int = client.inspect("s").seqno
    for _ in range(2):
        with pytest.raises(persist.GivesUpHistory, match="Nothing was changed") as told:
            client.set_hold("s", "audit", since)
        assert (told.value.since, told.value.newest, client.inspect("s").seqno) == (at(0), at(9), before)
        before += 1
        client.set_hold("s", "audit", 0)


@pytest.mark.parametrize("first", [None, 0, 1])
def test_a_hold_gives_up_nothing_where_no_policy_says_how_much_is_kept(
    client: persist.Client, first: int | None
) -> None:
    """What nothing else keeps, the retention's hold does: also after others have come and gone."""
    if first is not None:
        client.set_hold("s", "audit", first)
    client.set_hold("s", "audit", 4)
    assert client.inspect("s").state.holds["audit"].since == at(4)
    with client.open_reader("s") as read:
        read.downgrade_since(9)
        assert read.snapshot(9).to_arrow().num_rows == 10
    assert client.downgrade_hold("s", "audit", 5).kept_by == ("hold retention",)
    client.release_hold("s", "audit")
    with client.open_reader("s") as read:
        assert read.snapshot(0).to_arrow().num_rows == 1
    client.set_hold("s", "audit", 6)
    client.set_retention("s", 0)
    assert client.retain("s").after == at(6), "a policy and the hold say what is kept from now on"


def test_a_hold_after_a_policy_gives_up_what_the_policy_does(client: persist.Client) -> None:
    client.set_hold("s", "old", 2)
    client.set_retention("s", 3)
    client.retain("s")
    client.release_hold("s", "old")  # since follows with the next write
    client.set_hold("s", "audit", 8)
    assert {name: hold.since for name, hold in client.inspect("s").state.holds.items()} == {
        "audit": at(8), "retention": at(6),
    }  # fmt: skip
    assert client.inspect("s").state.since == at(2)


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
