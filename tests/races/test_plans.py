"""Plans: what is shown is what is done, or nothing is, also if another process acts just before the first commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.groups import apply_together
from persist_lib.core.plan.written import PLANNED, marks_of, parse_plan
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.errors import Busy, InvalidUsage, Paused, PlanMoved
from persist_lib.ids import SeqNo, format_writer_id
from persist_lib.maintain import Worker
from persist_lib.testing import Rival, check_world
from tests.served import ServedWorld
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, World, row

CONFIG = TINY.model_copy(update={"lease_ms": 60_000})


def append(client: persist.Client, shard: str = "s") -> None:
    with client.open_writer(shard, SCHEMA) as write:
        upper = client.inspect(shard).state.upper.time or 0
        write.compare_and_append([row(1, "rival", upper)], upper, upper + 1)


MOVES: dict[str, Callable[[persist.Client], Any]] = {
    "append": append,
    "compaction": lambda client: client.compact("s"),
    "retention": lambda client: client.set_retention("s", 3),
    "hold": lambda client: client.set_hold("s", "h", 5, expected=None, opaque=b"me"),
    "rollup": lambda client: client.roll_up("s", force=True),
    "all upkeep": lambda client: client.maintain("s"),
}


@pytest.fixture
def client(world: World) -> persist.Client:
    """A client of a shard on which every duty has work."""
    client = world.client(CONFIG)
    filled(client, 8)
    client.compact("s")
    client.roll_up("s", force=True)
    for _ in range(8):
        append(client)
    client.set_retention("s", 2)
    return client


def test_a_plan_says_what_why_and_how_much_and_a_dry_run_is_the_plan(client: persist.Client) -> None:
    before = client.inspect("s").seqno
    plan = client.plan("s")
    assert client.inspect("s").seqno == before
    one = plan.of("s")
    assert one.seqno == before
    assert {step.duty for step in one.steps} == {"retention", "compaction", "garbage", "orphans"}
    assert all(step.what and step.why and step.cost.requests for step in one.steps)
    rewritten = next(step for step in one.steps if step.duty == "compaction")
    assert rewritten.cost.bytes_read > 0
    assert rewritten.cost.dollars >= 0
    assert next(step for step in one.steps if step.duty == "garbage").freed > 0
    assert client.maintain("s", dry_run=True).plan == msgspec.structs.replace(one, made_ms=one.made_ms)
    only = client.plan("s", only=["garbage"]).of("s")
    assert (only.duties, {step.duty for step in only.steps}) == (("garbage",), {"garbage"})


def test_applied_it_does_exactly_that_and_a_second_time_nothing(world: World, client: persist.Client) -> None:
    plan = client.plan()
    text = plan.to_json()
    assert parse_plan(text) == plan
    one = plan.of("s")
    requests = client.maintain("s", dry_run=True).compacted.plan.requests
    done = world.client(CONFIG).apply(text)["s"]
    assert [applied.ids for applied in done.compacted.applied] == [request.ids for request in requests]
    assert done.done.keys() == {step.duty for step in one.steps}
    garbage = next(step for step in one.steps if step.duty == "garbage")
    assert set(done.collected.keys) == {key for key in garbage.exactly if "/" in key}
    check_world(client, "s")
    seqno = client.inspect("s").seqno
    with pytest.raises(PlanMoved, match=f"made at v{one.seqno}, and the shard is at v{seqno}: its data") as refused:
        client.apply(plan)
    assert (refused.value.shard, refused.value.made, refused.value.now) == ("s", one.seqno, seqno)
    assert client.inspect("s").seqno == seqno


@pytest.mark.parametrize("move", MOVES)
def test_what_moved_since_the_plan_is_refused(world: World, client: persist.Client, move: str) -> None:
    plan, other = client.plan("s"), world.client(CONFIG)
    MOVES[move](other)
    before = world.bytes("s")
    with pytest.raises(PlanMoved, match=r"moved.*plan again: `persist maintain s --plan FILE`"):
        client.apply(plan)
    assert world.bytes("s") == before, "nothing was changed"


@pytest.mark.parametrize("move", MOVES)
def test_a_rival_just_before_the_first_commit_is_seen(world: World, client: persist.Client, move: str) -> None:
    rival = Rival(world.inner.consensus)
    ours, other = world.client(CONFIG, rival=rival), world.client(CONFIG)
    plan = ours.plan("s")
    after: list[tuple[bytes, ...]] = []

    def act() -> None:
        MOVES[move](other)
        after.append(world.bytes("s"))

    rival.before_next(act)
    with pytest.raises(PlanMoved, match="moved"):
        ours.apply(plan)
    assert after, "the rival acted"
    assert world.bytes("s") == after[0], "nothing was changed"
    check_world(other, "s")


def test_leases_that_come_and_are_renewed_do_not_move_a_shard(world: World, client: persist.Client) -> None:
    other = world.client(CONFIG)
    plan = client.plan("s", only=["compaction", "rollups"])
    rival = Rival(world.inner.consensus)
    with other.open_reader("s"):
        world.clock.advance(30)
        other.heartbeat()
        ours = world.client(CONFIG, rival=rival)
        rival.before_next(lambda: other.open_reader("s"))
        assert ours.apply(plan)["s"].compacted.applied


def test_a_reader_that_changes_what_a_duty_would_do_is_told(world: World, client: persist.Client) -> None:
    reader = world.client(CONFIG).open_reader("s")
    plan = client.plan("s", only=["garbage"])
    client.compact("s")
    plan = client.plan("s", only=["garbage"])
    client.roll_up("s", force=True)
    plan = client.plan("s", only=["garbage"])
    reader.close()
    with pytest.raises(PlanMoved, match="garbage would do another thing now, as leases came or ended"):
        client.apply(plan)


def test_each_shard_of_a_plan_is_applied_or_refused_by_itself(world: World, client: persist.Client) -> None:
    for name in ("t", "u"):
        filled(client, 6, shard=name)
    plan = client.plan()
    append(world.client(CONFIG), "t")
    with pytest.raises(PlanMoved, match="apply: 1 of 3 shards failed") as refused:
        client.apply(plan)
    assert refused.value.done.keys() == {"s", "u"}
    assert refused.value.failed.keys() == {"t"}
    assert client.plan("u", only=["compaction"]).of("u").steps == ()


def test_nothing_begins_where_it_is_paused_or_another_is_at_work(world: World, client: persist.Client) -> None:
    plan = client.plan("s")
    client.pause("s", owner="ann", reason="why", only=["garbage"])
    before = world.bytes("s")
    with pytest.raises(Paused):
        client.apply(plan)
    assert world.bytes("s") == before
    client.resume("s")
    other = world.client(CONFIG)
    with Worker(other.machine("s"), other.leases) as worker:
        assert worker.id
        with pytest.raises(Busy):
            client.apply(plan)


def test_other_settings_than_those_of_the_plan_are_told(world: World, client: persist.Client) -> None:
    plan = client.plan("s")
    with pytest.raises(PlanMoved, match="the settings by which it was planned are other ones"):
        world.client(CONFIG).apply(plan, policy=persist.Policy(weight=0.25))


def test_a_plan_of_a_shard_at_rest_is_empty_and_applied(client: persist.Client) -> None:
    for _ in range(4):
        client.maintain("s")
    plan = client.plan("s", only=["compaction"])
    seqno = client.inspect("s").seqno
    assert plan.of("s").steps == ()
    assert client.apply(plan)["s"].done == {}
    assert client.inspect("s").seqno == seqno


def test_a_finished_shard_is_planned_too(client: persist.Client) -> None:
    client.set_retention("s", None)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], client.inspect("s").state.upper, persist.TOP)
    client.release_hold("s", "retention", expected=b"") if "retention" in client.inspect("s").state.holds else None
    client.finish("s")
    plan = client.plan("s")
    assert plan.of("s").steps
    client.apply(plan)
    assert client.apply(client.plan("s"))["s"].collected.keys


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "no JSON": lambda _: "{",
    "another kind": lambda plan: {**plan, "kind": "plan"},
    "another format": lambda plan: {**plan, "format": 4},
    "no shards": lambda plan: {key: plan[key] for key in ("kind", "format")},
    "an unknown field": lambda plan: {**plan, "also": 1},
    "a shard's name that leaves the folder": lambda plan: {**plan, "shards": [{**plan["shards"][0], "shard": "../x"}]},
    "a shard twice": lambda plan: {**plan, "shards": plan["shards"] * 2},
    "an unknown duty": lambda plan: {**plan, "shards": [{**plan["shards"][0], "duties": ["erase"]}]},
    "a list": lambda _: [],
    "nesting": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_plan_is_refused_before_anything_is_done(world: World, client: persist.Client, bad: str) -> None:
    made = BAD[bad](json.loads(client.plan("s").to_json()))
    before = world.bytes("s")
    with pytest.raises(InvalidUsage):
        client.apply(made if isinstance(made, str) else json.dumps(made))
    assert world.bytes("s") == before


def test_what_a_file_names_is_never_trusted(world: World, client: persist.Client) -> None:
    """A plan that names other batches and keys than upkeep would is refused, whatever its marks say."""
    made = json.loads(client.plan("s", only=["garbage"]).to_json())
    live = [key for batch in client.inspect("s").state.trace for key in batch.keys]
    made["shards"][0]["steps"][0]["exactly"] += live
    before = world.bytes("s")
    with pytest.raises(PlanMoved):
        client.apply(json.dumps(made))
    assert world.bytes("s") == before


@pytest.mark.parametrize("made_ms", [0, 1_700_000_000_000 + 10**12, 1_700_000_000_000 + 200_000, -(2**62)])
def test_a_wrong_moment_in_a_file_ends_no_lease(world: World, client: persist.Client, made_ms: int) -> None:
    """By the clock of that moment the reader's lease would have ended, or never have been meant."""
    reader = world.client(CONFIG).open_reader("s")
    made = json.loads(client.plan("s", only=["leases"]).to_json())
    found = made["shards"][0]
    found["made_ms"] = made_ms
    id_ = next(iter(client.inspect("s").state.readers))
    found["steps"] = [{"duty": "leases", "what": "", "why": "", "exactly": [id_]}]
    before = world.bytes("s")
    with pytest.raises(PlanMoved):
        client.apply(json.dumps(made))
    assert world.bytes("s") == before
    reader.close()


def test_overdue_leases_are_retired_by_a_plan(world: World, client: persist.Client) -> None:
    other = world.client(CONFIG)
    reader = other.open_reader("s")
    world.clock.advance(70)
    plan = client.plan("s", only=["leases"])
    (step,) = plan.of("s").steps
    world.clock.advance(600)
    assert [one.id for one in client.apply(plan)["s"].expired.overdue] == list(step.exactly)
    assert not client.inspect("s").state.readers
    reader.close()


def test_marks_name_everything_but_leases(client: persist.Client) -> None:
    state = client.inspect("s").state
    left_out = {"writers", "readers", "retired", "outcomes", "producers", "fingerprint", "count", "size", "inline_size",
                "appended_bytes", "maintained_bytes", "identities"}  # fmt: skip
    assert set(marks_of(state)) == {"data", "history", "garbage", "rollups", "columns"}
    marked = {"since", "trace", "contents", "schemas", "holds", "garbage", "rollups", "retention", "format", "member"}
    marked.add("pins")  # which have a mark of their own where there are some
    assert set(state.__struct_fields__) == left_out | marked, "a new field is one or the other"
    assert PLANNED == ("leases", "retention", "compaction", "publication", "rollups", "garbage", "orphans")


@pytest.mark.parametrize("move", ["append", "hold"])
def test_a_shard_server_judges_the_claim_by_its_own_state(move: str) -> None:
    """The command says for which transition it is: what another did before it comes is no part of that."""
    world = ServedWorld()
    try:
        client, other = world.client(CONFIG), persist.open(World.reach(world), config=CONFIG)
        filled(client, 6)
        plan = client.plan("s")
        after: list[tuple[bytes, ...]] = []

        def act() -> None:
            MOVES[move](other)
            after.append(world.bytes("s"))

        world.slots[0].store.before = act
        with pytest.raises(PlanMoved, match="moved"):
            client.apply(plan)
        assert after == [world.bytes("s")], "nothing was changed"
        assert client.apply(client.plan("s"))["s"].compacted.applied
    finally:
        world.close()


def test_a_claim_is_for_one_transition_and_never_one_of_a_group() -> None:
    fresh = format_writer_id(9)
    claim = c.RegisterWriter(fresh, "maintenance", 99, at=SeqNo(3))
    state = apply(State(), SeqNo(1), c.Create(SCHEMA))
    assert isinstance(state, State)
    assert apply(state, SeqNo(2), claim) == r.Overtaken(SeqNo(3), SeqNo(2))
    assert apply(state, SeqNo(4), claim) == r.Overtaken(SeqNo(3), SeqNo(4))
    assert isinstance(apply(state, SeqNo(3), claim), State)
    other = c.RegisterWriter(format_writer_id(8), "ingest", 99)
    for commands in ([other, claim], [claim, other]):
        assert len(apply_together(state, SeqNo(3), commands).answers) == 1
