"""Runs are cut into ranges of about equal bytes, wherever their parts start."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.core.plan.cutting import Stretch, cut_evenly


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def detailed(lower: int, upper: int, size: int, pieces: int) -> list[Stretch]:
    edges = [lower + (upper - lower) * n // pieces for n in range(pieces + 1)]
    return [Stretch(key(a), key(b), size // pieces) for a, b in itertools.pairwise(edges)]


def shares(cuts: list[bytes], keys: list[int]) -> list[float]:
    counts = [0] * (len(cuts) + 1)
    for number in keys:
        counts[bisect_right(cuts, key(number))] += 1
    return [count * len(counts) / len(keys) for count in counts]


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_a_dozen_runs_over_the_same_keys_are_cut_evenly(n: int) -> None:
    runs = [piece for run in range(12) for piece in detailed(run, 100_000 - run, 1_000_000, 160)]
    cuts = cut_evenly(runs, n)
    assert len(cuts) == n - 1
    assert all(abs(share - 1) < 0.1 for share in shares(cuts, list(range(0, 100_000, 7))))


def test_runs_known_by_their_bounds_only_are_taken_to_be_like_the_one_that_is_known_in_detail() -> None:
    # Nine tenths of the keys of the known run are in the first tenth of the numbers.
    known = [*detailed(0, 10_000, 900_000, 90), *detailed(10_000, 100_000, 100_000, 10)]
    cuts = cut_evenly([*known, *(Stretch(key(run), key(99_000), 1_000_000) for run in range(5))], 4)
    assert [int.from_bytes(cut, "big") for cut in cuts] == pytest.approx([2778, 5556, 8333], abs=250)


def test_what_lies_at_one_key_is_not_cut() -> None:
    assert cut_evenly([Stretch(key(5), key(5), 1000)] * 3, 4) == []
    heavy = [Stretch(key(5), key(5), 1_000_000), *detailed(0, 10, 10, 10)]
    assert len(cut_evenly(heavy, 4)) <= 3


def test_nothing_and_one_range_need_no_cut() -> None:
    assert cut_evenly([], 4) == []
    assert cut_evenly(detailed(0, 100, 100, 10), 1) == []


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000)), max_size=40), st.integers(1, 12)
)
def test_cuts_ascend_are_few_enough_and_leave_something_below_each(found: list[tuple[int, int, int]], n: int) -> None:
    stretches = [Stretch(key(min(a, b)), key(max(a, b)), size) for a, b, size in found]
    cuts = cut_evenly(stretches, n)
    assert cuts == sorted(set(cuts))
    assert len(cuts) <= n - 1
    lowers = {stretch.lower for stretch in stretches}
    assert all(cut in lowers and cut > min(lowers) for cut in cuts)
