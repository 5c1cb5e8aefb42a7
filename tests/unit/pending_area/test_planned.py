"""Plans of pending areas: what would be absorbed is shown, written down, and done exactly, or refused."""

from __future__ import annotations

import random

import msgspec
import pytest

from persist_lib import pending_area
from persist_lib.core.plan.written import Plan, ShardPlan, parse_plan
from persist_lib.errors import InvalidUsage, NotFound, Paused, PlanMoved
from persist_lib.frontier import at
from persist_lib.ids import PartKey
from persist_lib.pending_area import area as area_plans
from persist_lib.pending_area.absorption import absorb_shard
from tests.unit.pending_area.areas import NAME, Area, plain, said


def planned(area: Area) -> ShardPlan:
    return pending_area.plan(area.client, NAME)


def test_a_plan_says_what_is_absorbed_why_and_for_what_and_changes_nothing(area: Area) -> None:
    keys = [area.put("a", 0, 3), area.put("a", 3, 6), area.put("b", 0, 3)]
    before, now = area.client.inspect(NAME), area.client.consensus.now()
    plan = planned(area)
    (step,) = plan.steps
    assert step.exactly == ("0..6", *sorted(keys))
    assert step.what.startswith("absorb 2 batches, ")
    assert step.what.endswith("up to [6] and discard 1 batch that nothing needs")
    assert step.why == "they continue from what is there, and who put them agree"
    assert (step.cost.gets, step.cost.puts) == (2, 1)
    assert step.cost.bytes_read == step.cost.bytes_written > 0
    assert (plan.seqno, plan.duties) == (before.seqno, ("pending",))
    assert plan.made_ms >= now
    assert area.client.inspect(NAME).seqno == before.seqno
    assert set(area.pending()) == set(keys)
    done = pending_area.apply(area.client, plan)
    assert (done.batches, done.upper, done.left) == (2, at(6), 0)
    assert area.merged() == plain(said(0, 6), 5)
    assert planned(area).steps == ()


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_takes_exactly_what_it_names(area: Area, seed: int) -> None:
    """Whatever overlaps, is late, in dispute or behind a gap."""
    rng = random.Random(seed)
    for _ in range(12):
        lower = rng.randrange(20)
        area.put(rng.choice("abc"), lower, lower + rng.randint(1, 6), rng.choice(["w"] * 8 + ["x"]))
        if rng.random() < 0.2:
            area.absorb()
    before, plan = known(area), planned(area)
    looked = area.absorb(dry_run=True)
    named = {key for step in plan.steps for key in step.exactly[1:]}
    done = pending_area.apply(area.client, plan)
    assert known(area) - before == named, "no more, and no less"
    assert (done.upper, done.batches, done.discarded) == (looked.upper, looked.batches, looked.discarded)


def known(area: Area) -> set[PartKey]:
    """The pending batches that the shard has, or that are garbage."""
    state = area.client.inspect(NAME).state
    there = {key for batch in state.trace for key in batch.keys} | state.garbage.keys()
    return {key for key in there if str(key) in area.pending()}


def test_what_is_put_while_a_plan_is_carried_out_stays_where_it_is(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    area.put("a", 0, 3)
    plan = planned(area)
    real = absorb_shard

    def rival(*given: object, **options: object) -> object:
        if "planned" in options:
            area.put("a", 3, 6)
        return real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(area_plans, "absorb_shard", rival)
    done = pending_area.apply(area.client, plan)
    assert (done.batches, done.upper) == (1, at(3)), "a rival's batch is no part of it"
    assert planned(area).steps[0].exactly[0] == "3..6"


def test_a_plan_is_refused_where_anything_else_would_be_done_now(area: Area) -> None:
    area.put("a", 0, 3)
    plan = planned(area)
    area.put("b", 3, 5)
    with pytest.raises(PlanMoved, match="other batches are pending than were then"):
        pending_area.apply(area.client, plan)
    assert area.client.inspect(NAME).state.upper == at(0)
    plan = planned(area)
    area.absorb()
    with pytest.raises(PlanMoved, match="its data or columns moved"):
        pending_area.apply(area.client, plan)
    area.put("a", 5, 7)
    plan = planned(area)
    area.put("b", 5, 7, "other")
    with pytest.raises(PlanMoved, match="other batches"):
        pending_area.apply(area.client, plan)
    assert area.client.inspect(NAME).state.upper == at(5), "a dispute is for a person"
    assert "writers disagree" not in str(planned(area).steps)


def test_a_file_can_make_it_absorb_nothing_that_is_not_due(area: Area) -> None:
    key = area.put("a", 0, 3)
    gap = area.put("a", 9, 12)
    plan = planned(area)
    (step,) = plan.steps
    assert step.exactly[1:] == (key,)
    assert step.why.endswith("1 others wait for a gap to be filled")
    wrong = msgspec.structs.replace(plan, steps=(msgspec.structs.replace(step, exactly=(*step.exactly, gap)),))
    with pytest.raises(PlanMoved):
        pending_area.apply(area.client, wrong)
    with pytest.raises(InvalidUsage, match="no plan of a pending area"):
        pending_area.apply(area.client, area.client.plan(NAME).of(NAME))
    with pytest.raises(NotFound):
        pending_area.plan(area.client, "missing")


def test_a_deleted_collection_is_planned_too_and_a_pause_counts(area: Area) -> None:
    area.put("a", 0, 3)
    area.client.pause(NAME, owner="ann", reason="why")
    with pytest.raises(Paused):
        pending_area.apply(area.client, planned(area))
    area.client.resume(NAME)
    area.absorb()
    area.reader.close()
    pending_area.delete(area.client, NAME)
    key = area.put("a", 3, 6)
    plan = planned(area)
    assert (plan.steps[0].exactly[1:], plan.steps[0].why) == ((key,), "the collection is deleted")
    assert pending_area.apply(area.client, plan).deleted == 1
    assert area.pending() == []


def test_it_is_in_a_file_of_a_format_that_older_releases_refuse(area: Area) -> None:
    area.put("a", 0, 3)
    plan = Plan(()).with_pending([planned(area)])
    assert plan.format == 3
    assert parse_plan(plan.to_json()) == plan
    assert plan.only([NAME]) == plan
    assert plan.cost.dollars == plan.pending[0].cost.dollars
    with pytest.raises(InvalidUsage, match=r"pending_area\.apply"):
        area.client.apply(plan)
    wrong = plan.to_json().replace('"duty": "pending"', '"duty": "garbage"')
    with pytest.raises(InvalidUsage, match="of the duty pending"):
        parse_plan(wrong)
