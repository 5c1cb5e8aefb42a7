"""Pauses: no duty begins where it is paused, by whatever door it comes; and what is paused is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import health, pending_area
from persist_lib.core.duties import LAYER_DUTIES, NAMES
from persist_lib.core.pauses import PAUSABLE, Pause
from persist_lib.errors import Corrupt, Determinate, InvalidUsage, NewerFormat, NotFound, Paused
from persist_lib.format.paths import numbered_key
from persist_lib.format.pause_list import EMPTY_SIZE, PREFIX, Wishes, decode_wishes, encode_wishes
from persist_lib.maintain.duties import carry_out
from persist_lib.maintain.pauses import AGE_S, pause_rest, resume_rest
from persist_lib.testing import Outcome
from tests.framing import framed
from tests.shards import TINY, filled
from tests.unit.maintain.surveys import Rival, asked, make, stored
from tests.unit.pending_area.areas import NAME, Area
from tests.worlds import Storm, World

WHO: dict[str, Any] = {"owner": "ann", "reason": "the bucket is copied"}
CLOCK = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")
PAUSES = (Pause(("orders*",), ("compaction",), "ann", "why", 5, 7), Pause(("a", "b"), (), "run", "", 6, None, True))
GOLDEN = (
    "5053547001fe665ed62be62a0288e92c2b356bd293929791a76f72646572732a91aa636f6d70616374696f6ea3616e6ea37768790507c297"
    "92a161a16290a372756ea006c0c3"
)
DOORS: dict[str, Callable[[persist.Client], Any]] = {
    "leases": lambda client: client.expire("s"),
    "retention": lambda client: client.retain("s"),
    "compaction": lambda client: client.compact("s"),
    "publication": lambda client: carry_out("publication", client.machine("s"), client.leases),
    "rollups": lambda client: client.roll_up("s", force=True),
    "garbage": lambda client: client.collect("s"),
    "orphans": lambda client: client.audit_orphans("s"),
    "scrub": lambda client: client.scrub("s"),
}


def test_every_duty_but_the_census_can_be_paused() -> None:
    assert set(PAUSABLE) == {*NAMES, *(duty.name for duty in LAYER_DUTIES)} - {"census"}
    assert DOORS.keys() == set(PAUSABLE) - {duty.name for duty in LAYER_DUTIES}


@pytest.mark.parametrize("duty", DOORS)
def test_a_paused_duty_begins_by_no_door_and_changes_nothing(world: World, duty: str) -> None:
    client = world.client(TINY)
    filled(client, 6)
    client.pause("s", **WHO, only=[duty])
    before, objects = client.inspect("s").seqno, {entry.key for entry in world.inner.blob.list("")}
    for door in (DOORS[duty], lambda client: carry_out(duty, client.machine("s"), client.leases)):
        with pytest.raises(Paused, match=f"s: {duty} is paused by ann since .*: the bucket is copied") as refused:
            door(client)
    assert (refused.value.shard, refused.value.duty, refused.value.owner) == ("s", duty, "ann")
    assert client.inspect("s").seqno == before
    assert {entry.key for entry in world.inner.blob.list("")} == objects
    for other, door in DOORS.items():
        if other != duty:
            door(client)
    with client.even_if_paused():
        DOORS[duty](client)
    assert client.census("s").batches


def test_a_pass_leaves_out_what_is_paused_and_says_so(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    client.pause("*", **WHO, only=["compaction", "garbage"])
    for done in (client.maintain("s"), client.maintain()["s"]):
        assert list(done.paused) == ["compaction", "garbage"]
        assert {"compaction", "garbage"}.isdisjoint(done.done)
        with pytest.raises(Paused, match="compaction is paused by ann"):
            _ = done.compacted
    planned = client.maintain("s", dry_run=True)
    assert planned.compacted.plan.requests, "a dry run says what would be done"
    assert list(planned.paused) == ["compaction", "garbage"]
    with client.even_if_paused():
        assert client.maintain("s").compacted.applied


def test_a_survey_asks_for_nothing_that_is_paused(world: World) -> None:
    client = world.client(TINY)
    make(client, "orders", "orders-eu", "payments", appends=8)
    due = {duty: client.survey().due(duty) for duty in NAMES}
    client.pause("orders*", **WHO, only=["compaction", "scrub"])
    for other in (client, world.client(TINY)):
        found = other.survey()
        assert found.due("compaction") == ["payments"] == found.due("scrub")
        assert found.paused("compaction").keys() == {"orders", "orders-eu"} == found.paused("scrub").keys()
        assert "paused by ann" in found.paused("scrub")["orders"]
        assert {duty: found.due(duty) for duty in NAMES if duty not in ("compaction", "scrub")} == {
            duty: names for duty, names in due.items() if duty not in ("compaction", "scrub")
        }
    make(client, "orders-new", appends=8)
    assert "orders-new" not in client.survey().due("compaction"), "the pattern holds for what is made later"
    assert client.resume("orders*")[0].owner == "ann"
    assert set(client.survey().due("compaction")) == {"orders", "orders-eu", "orders-new", "payments"}
    assert client.survey().paused("compaction") == {}


def test_an_idle_pass_over_many_shards_asks_for_one_listing_more(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(30)))
    client.survey()
    assert asked(world, client.survey) == {"list": 2, "heads": 1}
    client.pause("s1*", **WHO)
    client.survey()
    idle = asked(world, client.survey)
    assert idle["list"] == 2
    assert "get" not in idle, "the list of pauses is read once"
    client.resume("s1*")
    assert asked(world, world.client().survey) == {"list": 2, "get": 1, "heads": 1}, "the memory, and no empty list"


def test_a_pause_ends_by_itself(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    paused = client.pause("s", **WHO, until="1 hour")
    assert paused.until_ms == paused.set_ms + 3_600_000
    assert client.survey().due("compaction") == []
    world.clock.advance(3599)
    with pytest.raises(Paused):
        client.compact("s")
    world.clock.advance(1 + AGE_S)
    assert client.pauses() == ()
    assert client.survey().due("compaction") == ["s"]
    assert client.compact("s").applied
    client.pause("t", **WHO)
    assert [
        one.patterns for one in decode_wishes(world.inner.blob.get(stored(world, PREFIX)[-1]) or b"", "").pauses
    ] == [("t",)]


def test_another_program_finds_a_new_pause_within_ten_seconds(world: World) -> None:
    client, other = world.client(TINY), world.client(TINY)
    filled(client, 6)
    other.retain("s")
    client.pause("s", **WHO)
    with pytest.raises(Paused):
        client.retain("s")
    other.retain("s")
    world.clock.advance(AGE_S + 0.1)
    with pytest.raises(Paused):
        other.retain("s")


def test_a_pause_of_a_table_holds_for_its_shards_whatever_their_names(world: World) -> None:
    client = world.client()
    controller = client.controller()
    controller.create("orders", CLOCK, shards=2)
    controller.create("payments", CLOCK)
    shards = controller.describe("orders").active.shards
    client.pause("orders", **WHO)
    found = client.survey()
    assert {name for name in found.heads if found.pauses.get(name)} >= set(shards)
    assert all(name in shards or name.endswith("renditions") or "c" in name for name in found.pauses)
    assert not set(controller.describe("payments").active.shards) & found.pauses.keys()
    with pytest.raises(Paused, match=r"compaction is paused by ann"):
        client.compact(shards[1])
    done = controller.tend()
    [wait] = [step for step in done.waiting if step.collection == "orders"]
    assert "paused by ann" in wait.reason
    assert not [step for step in done.steps if step.collection == "orders" and step.action != "wait"]
    assert controller.tend(dry_run=True).waiting, "a schedule that asks starts no run for it"
    table = client.table("orders")
    table.writer().append([{"id": 1, "n": 1, "_time": 1}], 0, 5000)
    moved = table.set_retention(1000)
    assert moved.before < moved.after, "what a person asks for by name is no upkeep"


@pytest.mark.parametrize("duty", ["compaction", "rollups", "garbage", "orphans"])
def test_an_erasure_does_not_begin_where_it_would_have_to_do_what_is_paused(world: World, duty: str) -> None:
    client = world.client()
    table = client.table("people", CLOCK)
    table.append([{"id": 1, "n": 1}, {"id": 2, "n": 2}])
    client.pause("people", **WHO, only=[duty])
    with pytest.raises(Paused):
        table.erase([{"id": 1}])
    assert table.count() == 2, "nothing was changed"
    assert table.erase([{"id": 1}], dry_run=True).keys == 1
    with client.even_if_paused():
        table.erase([{"id": 1}])
    assert table.count() == 1


def test_a_policy_that_a_person_sets_counts_at_once_whatever_is_paused(world: World) -> None:
    client = world.client()
    table = client.table("people", CLOCK)
    for number in range(3):
        world.clock.advance(10)
        table.append([{"id": number, "n": number}])
    client.pause("*", **WHO)
    moved = table.set_retention("1 s")
    assert moved.before < moved.after


def test_absorbing_can_be_paused(world: World) -> None:
    area = Area(world)
    area.put("a", 0, 5)
    area.client.pause(NAME, **WHO, only=["pending"])
    assert not any(pending_area.due_collections(area.client).done.values())
    with pytest.raises(Paused):
        area.absorb()
    assert area.absorb(dry_run=True).batches
    area.client.resume(NAME)
    assert area.absorb().batches


@pytest.mark.parametrize(
    "wrong",
    [{"only": ["census"]}, {"only": ["compact"]}, {"only": 5}, {"owner": ""}, {"reason": ""}, {"until": "1 hour ago"},
     {"until": 5}, {"pattern": ""}, {"reason": "two\nlines"}],
    ids=str,
)  # fmt: skip
def test_a_wrong_pause_is_refused_and_none_is_set(world: World, wrong: dict[str, Any]) -> None:
    client = world.client()
    with pytest.raises(InvalidUsage):
        client.pause(**{"pattern": "s", **WHO, **wrong})
    assert stored(world, PREFIX) == []
    with pytest.raises(NotFound, match="nothing is paused as 'orders'"):
        client.resume("orders")


def test_a_read_only_client_heeds_pauses_and_sets_none(world: World) -> None:
    client = world.client()
    make(client, "s")
    client.pause("s", **WHO)
    looking = world.client(read_only=True)
    assert looking.pauses() == client.pauses()
    with pytest.raises(InvalidUsage):
        looking.pause("t", **WHO)
    with pytest.raises(InvalidUsage):
        looking.resume("s")


@pytest.mark.parametrize("rivals", [1, 2, 3])
def test_of_pauses_that_are_set_at_once_none_is_lost(world: World, rivals: int) -> None:
    """With more than one rival, the number that this one takes is free again, as older lists are deleted."""
    other = world.client()
    other.pause("first", **WHO)
    rival = Rival(world.inner.blob)
    client = persist.open(replace(world.inner, blob=rival))

    def act() -> None:
        for number in range(rivals):
            other.pause(f"rival{number}", **WHO)

    rival.act = act
    client.pause("mine", **WHO)
    names = ["first", "mine", *(f"rival{number}" for number in range(rivals))]
    assert sorted(one.patterns[0] for one in other.pauses()) == sorted(names)
    assert len(stored(world, PREFIX)) == 1
    rival.act = act
    client.resume("mine")
    assert "mine" not in {one.patterns[0] for one in other.pauses()}


def test_no_duty_begins_where_pauses_cannot_be_read(world: World) -> None:
    make(world.client(), "s")
    storm = Storm(Outcome.REFUSED, "list")
    client = world.client(TINY.model_copy(update={"timeout_s": 0.01}), plan=storm)
    storm.blows = True
    for call in (client.survey, lambda: client.retain("s")):
        with pytest.raises(Determinate):
            call()


def test_the_bytes_of_pauses_are_the_same_for_ever_and_damage_is_seen(world: World) -> None:
    assert encode_wishes(Wishes(PAUSES)).hex() == GOLDEN
    data = bytes.fromhex(GOLDEN)
    assert decode_wishes(data, "k").pauses == PAUSES
    for at in range(len(data)):
        with pytest.raises((Corrupt, NewerFormat)):
            decode_wishes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :], "k")
    with pytest.raises(NewerFormat):
        decode_wishes(framed(data[:4], 4, b""), "k")
    assert len(encode_wishes(Wishes(()))) == EMPTY_SIZE < min(len(encode_wishes(Wishes((one,)))) for one in PAUSES)
    client = world.client()
    make(client, "s")
    world.inner.blob.set(numbered_key(PREFIX, 1), b"x" * 50)
    with pytest.raises(Corrupt):
        client.retain("s")


def test_health_says_which_pauses_are_old_or_forgotten(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", appends=8)
    client.pause("s", **WHO)
    client.pause("gone*", **WHO, until="9 days")

    def told(**limits: Any) -> dict[str, str]:
        found = health.check(client, health.Limits(**limits))
        return {one.name: one.says for one in found.problems if one.check == "paused"}

    assert told() == {"gone*": told()["gone*"]}
    assert "nothing has such a name" in told()["gone*"]
    world.clock.advance(8 * 86_400)
    assert told().keys() == {"gone*", "s"}
    assert "all upkeep of s: paused by ann" in told()["s"]
    assert "8.0 days ago" in told()["s"]
    assert told(paused_s=10 * 86_400).keys() == {"gone*"}
    make(client, "s", appends=30)
    late = [one.says for one in health.check(client).problems if one.check == "upkeep"]
    assert late
    assert all("s, where it is paused" in says for says in late)


def test_what_a_cancelled_run_left_is_paused_until_the_next_schedule_or_a_person(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", "t", "u", appends=8)
    now = client.consensus.now()
    pause_rest(client, ["s", "t"], {now + 60_000: ["leases"], now + 3_600_000: ["compaction"]}, "Dagster run 7")
    client.pause("u", **WHO)
    assert client.survey().due("compaction") == []
    resume_rest(client, ["u"])
    assert client.survey().paused("compaction").keys() == {"s", "t", "u"}, "a person's own pause stays"
    resume_rest(client, ["s"])
    assert client.survey().due("compaction") == ["s"]
    world.clock.advance(3600 + AGE_S)
    assert set(client.survey().due("compaction")) == {"s", "t"}
    pause_rest(client, ["s", "t"], {client.consensus.now() + 60_000: ["compaction"]}, "Dagster run 8")
    resume_rest(client, [])
    assert [one.owner for one in client.pauses()] == ["ann"]


def test_pauses_outlive_the_process(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}") as client:
        client.pause("orders*", **WHO, only="compaction")
    with persist.open(f"file:{tmp_path}") as client:
        [pause] = client.pauses()
    assert (pause.patterns, pause.duties, pause.owner, pause.until_ms) == (("orders*",), ("compaction",), "ann", None)
