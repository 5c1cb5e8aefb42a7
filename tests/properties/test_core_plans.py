"""Laws of the plans: what compaction, flushing and expiry propose is right, bounded, and done when it is done."""

from __future__ import annotations

from itertools import count
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policy import AMPLIFICATION, CHANGES, HISTORIES, figures, life, run
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import Policy, batch_bound, bound_of, plan_compaction, plan_flush
from persist_lib.core.plan.requests import Request, task_inputs
from persist_lib.core.plan.simulate import MEETING, WRITER, Simulation
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.state import Batch, Part, State
from persist_lib.core.transitions import apply
from persist_lib.core.validate import check_state
from persist_lib.frontier import MAX_TIME, TOP, at
from persist_lib.ids import PartKey
from tests.properties.histories import history

SIZES = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 100_000), st.just(0)), min_size=1, max_size=60)


def appended(sizes, times=1):
    simulation = Simulation()
    for size in sizes:
        simulation.append(size, times)
    return simulation


@given(sizes=SIZES, every=st.integers(1, 9))
@settings(max_examples=60)
def test_after_maintenance_there_are_few_batches_and_nothing_left_to_do(sizes, every):
    simulation = Simulation()
    for number, size in enumerate(sizes, 1):
        simulation.append(size)
        if number % every == 0:
            passes = simulation.maintain()
            assert passes <= 2, "what was planned is carried out in one pass, and then there is nothing more"
            assert len(simulation.state.filled) <= batch_bound(simulation.state.count)
    simulation.maintain()
    assert plan_compaction(simulation.state).requests == ()
    assert plan_compaction(simulation.state).debt == 0


@given(sizes=SIZES, since=st.integers(0, 70), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_the_requests_of_a_plan_are_disjoint_slices_in_order_and_the_rest_is_explained(sizes, since, seed):
    simulation = appended(sizes, times=3)
    simulation.advance(since)
    plan = plan_compaction(simulation.state)
    trace = simulation.state.trace
    taken = [trace.index(batch) for request in plan.requests for batch in request.inputs]
    assert taken == sorted(set(taken))
    for request in plan.requests:
        indices = [trace.index(batch) for batch in request.inputs]
        assert indices == list(range(indices[0], indices[-1] + 1))
        assert request.since == simulation.state.since
    skipped = [id_ for skip in plan.skipped for id_ in skip.ids]
    asked = {id_ for request in plan.requests for id_ in request.ids}
    held = {batch.id for batch in trace if batch.count}
    assert set(skipped) == held - asked
    assert all(skip.why for skip in plan.skipped)
    assert plan.cost == sum((request.cost for request in plan.requests), Cost())
    assert plan.debt == sum(request.count for request in plan.requests)


@given(sizes=SIZES, order=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_requests_of_a_plan_can_be_carried_out_in_any_order(sizes, order):
    simulation = appended(sizes, times=3)
    simulation.advance(len(sizes))
    requests = list(plan_compaction(simulation.state).requests)
    order.shuffle(requests)
    for request in requests:
        simulation.carry_out(request)
    assert simulation.state.fingerprint == sum(sizes) % 2**64


@given(
    steps=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 4)), min_size=1, max_size=50),
    distinct=st.integers(1, 500),
)
@settings(max_examples=60)
def test_maintenance_comes_to_an_end_also_when_updates_meet_and_since_follows(steps, distinct):
    simulation = Simulation(left=lambda _, request: min(request.count, distinct))
    since = 0
    for size, ahead in steps:
        simulation.append(size, times=3)
        since += ahead
        simulation.advance(since)
        assert simulation.maintain() <= 6
        assert len(simulation.state.filled) <= batch_bound(simulation.state.count)


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("every", [1, 5])
def test_what_is_written_again_grows_with_the_logarithm_only(name, every):
    short, long = (figures(name, HISTORIES[name](n), every) for n in (60, 240))
    for figure in (short, long):
        assert figure.is_met, figure
        assert figure.amplification <= 1 + AMPLIFICATION * log2(figure.updates + 2)
    assert long.amplification <= short.amplification + 2 * AMPLIFICATION + 2, "four times the appends: two more levels"


def test_the_simulator_prints_figures_that_are_all_within_their_targets():
    found = run(quick=True)
    assert len(found) >= 20
    assert all(figure.is_met for figure in found)
    assert any(figure.amplification > 2 for figure in found)


def test_a_policy_that_never_merges_is_seen_to_miss_its_bound():
    simulation = Simulation(policy=Policy(weight=0.0))
    for _ in range(60):
        simulation.append(1)
        simulation.maintain()
    assert len(simulation.state.filled) > batch_bound(60)


def test_a_policy_that_always_merges_is_seen_to_write_too_much():
    simulation = Simulation(policy=Policy(weight=1e9))
    for _ in range(200):
        simulation.append(1)
        simulation.maintain()
    assert simulation.rewritten / simulation.appended > 1 + AMPLIFICATION * log2(200)


@given(sizes=SIZES, since=st.one_of(st.integers(0, 500), st.just(MAX_TIME)))
@settings(max_examples=60)
def test_times_are_never_advanced_beyond_the_slice_they_are_in(sizes, since):
    simulation = appended(sizes, times=5)
    simulation.advance(since)
    for request in plan_compaction(simulation.state).requests:
        assert request.upper.has_passed(request.advance_to)
        assert request.advance_to <= since
        assert request.upper.has_passed(since) is (request.advance_to == since)


def test_a_slice_that_ends_at_the_empty_frontier_is_advanced_to_since_or_to_the_last_time_of_all():
    batch = Batch(0, 1, at(5), TOP, at(0), 0, 0, 0)
    for since, expected in ((at(9), 9), (TOP, MAX_TIME)):
        assert Request((batch,), since, 0, "merge", Cost(), 1).advance_to == expected


def inline(rows, lower, size=1000):
    part = Part(PartKey(""), size, rows, bytes(16), b"", b"", lower, lower, 0, bytes(size))
    return Batch(0, 1, at(lower), at(lower + 1), at(0), rows, rows, rows, (part,), (0,))


def test_a_flush_takes_the_newest_inline_batches_and_what_is_empty_between_them():
    simulation = Simulation()
    simulation.append(5)
    for number, kind in enumerate("ieii", 1):
        if kind == "e":
            simulation.append(0)
        else:
            simulation.do(c.CompareAndAppend(WRITER, bytes([number]), inline(2, number), 0))
    request = plan_flush(simulation.state)
    assert request is not None
    assert request.ids == ((1, 2), (2, 3), (3, 4), (4, 5))
    assert (request.reason, request.count) == ("flush", 6)
    simulation.carry_out(request)
    assert simulation.state.inline_size == 0
    assert plan_flush(simulation.state) is None


@pytest.mark.parametrize(("kinds", "ids"), [("iiioi", ((0, 1), (1, 2), (2, 3))), ("ioiii", ((2, 3), (3, 4), (4, 5)))])
def test_a_flush_takes_the_slice_with_the_most_inline_bytes_where_others_lie_in_between(kinds: str, ids: object):
    simulation = Simulation()
    for number, kind in enumerate(kinds):
        if kind == "o":
            simulation.append(7)
        else:
            simulation.do(c.CompareAndAppend(WRITER, bytes([number]), inline(2, simulation.state.upper.time), 0))
    request = plan_flush(simulation.state)
    assert request is not None
    assert request.ids == ids


def test_inline_batches_are_flushed_when_they_fill_half_of_what_a_state_may_carry():
    simulation = Simulation()
    for number, rows in enumerate((64, 32, 16)):
        simulation.do(c.CompareAndAppend(WRITER, bytes([number]), inline(rows, number, 170_000), 0))
    assert plan_compaction(simulation.state).requests == ()
    simulation.do(c.CompareAndAppend(WRITER, b"x", inline(8, 3, 170_000), 0))
    assert [request.reason for request in plan_compaction(simulation.state).requests] == ["flush"] * 4
    simulation.maintain()
    assert simulation.state.inline_size == 0


@pytest.mark.parametrize(("since", "reason"), [(0, None), (3, None), (4, "advance"), (10, "advance"), (99, "advance")])
def test_a_batch_is_rewritten_alone_when_since_has_passed_a_third_of_its_updates(since, reason):
    simulation = appended([100], times=11)
    simulation.advance(since)
    assert [request.reason for request in plan_compaction(simulation.state).requests] == ([reason] if reason else [])


def test_a_batch_with_several_runs_or_tighter_bounds_than_its_file_is_sorted_once():
    for runs, exact in (((0, 1), True), ((0,), False)):
        simulation = Simulation()
        parts = (*simulation.parts(3, 0, 0), *simulation.parts(3, 1, 1))
        rows = 6 if exact else 5
        batch = Batch(0, 1, at(0), at(2), at(0), rows, rows, rows, parts, runs, exact)
        simulation.do(c.CompareAndAppend(WRITER, b"t", batch, 0))
        plan = plan_compaction(simulation.state)
        assert [request.reason for request in plan.requests] == ["sort"]
        assert len(task_inputs(plan.requests[0])) == len(runs)
        assert {(run.lower, run.upper) for run in task_inputs(plan.requests[0])} == {(0, 2)}
        simulation.maintain()
        assert plan_compaction(simulation.state).requests == ()


@given(seed=st.integers(0, 2**32), now=st.integers(0, 2500))
@settings(max_examples=40)
def test_expiry_plans_exactly_whom_the_transition_retires(seed, now):
    shard = history(seed, 40, 0.95)
    planned = {overdue.id for overdue in plan_expiry(shard.state, now)}
    assert all(overdue.overdue_ms > 0 for overdue in plan_expiry(shard.state, now))
    after = apply(shard.state, shard.next_seqno, c.Expire(now))
    if isinstance(after, State):
        assert after.retired.keys() - shard.state.retired.keys() == planned
        assert (after.since, after.upper, after.trace) == (shard.state.since, shard.state.upper, shard.state.trace)
    else:
        assert not planned or after == r.Finished()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_every_compaction_planned_for_any_state_is_accepted_once_carried_out(seed):
    shard = history(seed, 60, 0.95)
    if shard.state.is_finished():
        return
    simulation = Simulation()
    shard.run(c.RegisterWriter(WRITER, "maintenance", 2**60))
    simulation.state, simulation.seqno = shard.state, shard.version.seqno
    simulation.keys = count(10**9)
    simulation.maintain()
    assert simulation.state.fingerprint == shard.state.fingerprint
    assert len(simulation.state.filled) <= batch_bound(simulation.state.count)


@pytest.mark.parametrize("lag", [None, 20])
@pytest.mark.parametrize("history", CHANGES)
def test_contents_ahead_bound_what_reads_do_and_what_is_written(history, lag):
    """Each update of rows that are there takes one back. Before: up to 16 times the work of a fresh batch."""
    ahead = 1 / 16
    without, found = life(history, 0, lag, steps=200), life(history, ahead, lag, steps=200)
    if history == "rows are only added":
        assert found.rewritten == without.rewritten, "they would be the same bytes twice"
        return
    assert found.mean <= 1.35
    assert found.worst <= 1 + (1 + MEETING) * (ahead * 5 / 4 + 0.01)
    assert found.rewritten <= without.rewritten + 1.5 / ahead + 2
    assert found.stored <= without.stored + 1.1
    assert without.worst > 2 * found.worst, "that is what they are for"


@given(
    steps=st.lists(st.tuples(st.integers(0, 400), st.integers(-400, 400), st.integers(0, 9)), min_size=1, max_size=40),
    follows=st.booleans(),
)
@settings(max_examples=40)
def test_contents_ahead_come_to_rest_whatever_changes(steps, follows):
    simulation = Simulation(policy=Policy(part_bytes=1))
    simulation.append(1000)
    since = 0
    for size, net, ahead in steps:
        there = sum(batch.diff_sum for batch in simulation.state.trace)
        simulation.append(size, rows=max(-size, 1 - there, min(size, net)))
        since += ahead
        if follows:
            simulation.advance(min(since, (simulation.state.upper.time or 1) - 1))
        assert simulation.maintain() <= 6
        state, kept = simulation.state, simulation.state.contents
        assert len(state.filled) <= bound_of(state)
        newer = state.trace if kept is None else state.batches_at()[1:]
        dead = sum(batch.count - batch.diff_sum for batch in newer)
        rows = sum(batch.diff_sum for batch in state.trace)
        caught_up = state.since.time is not None and state.since.time >= (state.upper.time or 0) - 1
        assert caught_up or dead <= max(rows, 1) / 16
        check_state(state, simulation.seqno)
