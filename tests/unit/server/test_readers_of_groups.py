"""What reads the log finds each command of a row that has several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persist_lib.cli.history import fetch_rows
from persist_lib.cli.watch import appended
from persist_lib.errors import NewerFormat
from persist_lib.frontier import at
from persist_lib.ids import SeqNo
from persist_lib.maintain.repair import repair
from persist_lib.shard import outcomes
from persist_lib.shard.log import fetch_at
from persist_lib.testing import check_world
from tests.unit.server.serving import SHARD, W2, Served, append, hold
from tests.worlds import World


@pytest.fixture
def served() -> Iterator[Served]:
    world = World()
    made = Served(world)
    made.put(append(0, 10, token=b"a"), b"a", client="loader")
    made.put(hold("h", b"x", expected=b"y"), b"b", client="dashboard")
    made.put(append(10, 20, W2, b"c"), b"c", client="other")
    made.put(hold("h", b"x"), b"d", client="dashboard")
    made.funnel.turn()
    yield made
    world.close()


def test_the_log_shows_each_command_who_sent_it_and_what_it_got(served: Served) -> None:
    *_, single, group = fetch_rows(served.client, SHARD, None, 10)
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
    served: Served, token: bytes, lower: int, upper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqno = served.direct.fetch().seqno
    assert outcomes.judge(served.direct, token, at(lower), at(upper)).seqno == seqno
    monkeypatch.setattr(outcomes, "_by_state", lambda *_: None)  # as if the state had forgotten it
    assert outcomes.judge(served.direct, token, at(lower), at(upper)).seqno == seqno
    assert outcomes.judge(served.direct, b"x", at(lower), at(upper)).answer == "never"


def test_versions_repairs_and_watchers_know_groups(served: Served) -> None:
    newest = served.direct.fetch()
    before = fetch_at(served.client.blob, served.client.consensus, SHARD, newest, SeqNo(newest.seqno - 1))
    assert before.state.upper == at(0)
    assert fetch_at(served.client.blob, served.client.consensus, SHARD, newest, newest.seqno).state == newest.state
    assert not repair(served.direct, dry_run=True).dropped
    assert appended(served.client, SHARD, before, newest) == 0
    served.client.roll_up(SHARD, force=True)
    served.client.maintain(SHARD)
    check_world(served.client, SHARD)


def test_a_program_of_the_release_before_refuses_a_group(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = served.world.bytes(SHARD)
    monkeypatch.setattr("persist_lib.format.log.NEWEST", 3)
    with pytest.raises(NewerFormat, match="format 4"):
        served.world.client().open_writer(SHARD, served.direct.state.schemas[0])
    assert served.world.bytes(SHARD) == before
