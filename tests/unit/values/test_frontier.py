"""Frontiers: a total order with the empty one on top, and never a truth value."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME, MINIMUM, TOP, Antichain, at, meet_all, parse_time
from persist_lib.times import PLAIN

TIMES = st.one_of(st.integers(0, 3), st.integers(0, MAX_TIME), st.sampled_from([MAX_TIME, MAX_TIME - 1]))
FRONTIERS = st.one_of(st.just(TOP), TIMES.map(at))


@given(a=FRONTIERS, b=FRONTIERS)
def test_any_two_frontiers_compare_in_exactly_one_way(a, b):
    assert (a < b) + (a == b) + (b < a) == 1
    assert (a <= b) == (a < b or a == b)
    assert (a >= b) == (b <= a)
    assert (a > b) == (b < a)
    assert (hash(a) == hash(b)) or a != b


@given(a=FRONTIERS, b=FRONTIERS, c=FRONTIERS)
def test_meet_and_join_are_those_of_a_lattice_with_top_and_minimum(a, b, c):
    assert a.meet(b) == b.meet(a) == meet_all([a, b])
    assert a.join(b) == b.join(a)
    assert a.meet(b.meet(c)) == a.meet(b).meet(c) == meet_all([c, a, b])
    assert a.join(b.join(c)) == a.join(b).join(c)
    assert a.meet(a.join(b)) == a == a.join(a.meet(b))
    assert a.join(TOP) == TOP
    assert a.meet(TOP) == a
    assert a.meet(MINIMUM) == MINIMUM
    assert a.meet(b) <= a <= a.join(b)


@given(frontier=FRONTIERS, time=TIMES)
def test_a_time_is_either_complete_or_still_open(frontier, time):
    assert frontier.has_passed(time) is not frontier.is_before(time)
    assert frontier.has_passed(time) == (at(time) < frontier)


def test_the_meet_of_none_is_the_empty_frontier():
    assert meet_all([]) == TOP


def test_nothing_is_open_at_the_empty_frontier_and_everything_at_the_minimum():
    assert TOP.has_passed(MAX_TIME)
    assert MINIMUM.is_before(0)
    assert TOP.is_top()
    assert not at(MAX_TIME).is_top()


@pytest.mark.parametrize("frontier", [TOP, MINIMUM, at(5)])
def test_a_frontier_has_no_truth_value(frontier):
    """`if since:` would take the empty frontier, the greatest of all, for nothing."""
    with pytest.raises(TypeError, match="truth value"):
        bool(frontier)
    with pytest.raises(TypeError):
        _ = frontier or MINIMUM


@pytest.mark.parametrize(("frontier", "text"), [(TOP, "[]"), (MINIMUM, "[0]"), (at(MAX_TIME), f"[{MAX_TIME}]")])
def test_a_frontier_prints_as_the_antichain_it_is(frontier, text):
    assert str(frontier) == text
    assert pickle.loads(pickle.dumps(frontier)) == frontier


@pytest.mark.parametrize(
    ("written", "frontier"),
    [(0, MINIMUM), (5, at(5)), ([], TOP), ((), TOP), ([7], at(7)), ((7,), at(7)), (TOP, TOP), (MAX_TIME, at(MAX_TIME))],
)
def test_users_write_times_and_lists(written, frontier):
    assert PLAIN.frontier(written, "upper") == frontier


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.0, "5", None, True, [1, 2], [None], {}, [True], [-1], np.float64(3)])
def test_what_is_no_frontier_is_refused_with_its_name_and_value(wrong):
    with pytest.raises(InvalidUsage, match="expected_upper") as caught:
        PLAIN.frontier(wrong, "expected_upper")
    assert "expected_upper" in caught.value.fields


def test_a_time_is_an_integer_of_64_bits():
    assert parse_time(MAX_TIME, "as_of") == MAX_TIME
    for wrong in (-1, MAX_TIME + 1, True, 1.5, None, "1", Antichain(1)):
        with pytest.raises(InvalidUsage, match="as_of"):
            parse_time(wrong, "as_of")
