"""Laws of sums near the end of 64 bits, against integers of Python: groups of three and more diffs of 2**61 to 2**63.

Two such diffs at most meet or leave the limit. Three and more are where an estimate that is too low wraps, and where a
sum comes back from beyond the limit.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist_lib.errors import DiffOverflow
from persist_lib.kernel.consolidate import consolidate, exact_sums
from persist_lib.kernel.merge import merge_contents, merge_runs
from persist_lib.schema.schema import Schema
from tests.properties.kernel_updates import Update, build, read, totals

SCHEMA = Schema({"k": "int64"})
LIMIT = 2**63
POWERS = [sign * (2**power + more) for sign in (1, -1) for power in (61, 62) for more in (-1, 0, 1)]
LARGE = st.one_of(
    st.sampled_from([*POWERS, LIMIT - 1, 1 - LIMIT, -LIMIT, LIMIT // 3, -(LIMIT // 3) - 1, 3 * 2**61]),
    st.integers(2**61, LIMIT - 1), st.integers(-LIMIT, -(2**61)),
)  # fmt: skip
GROUPS = st.lists(st.lists(LARGE, min_size=3, max_size=6), min_size=1, max_size=4)
JUST_BEYOND = [[2**61] * 4, [3 * 2**60] * 3, [2**62, 2**62 - 1, 1], [-(2**61)] * 5, [LIMIT - 1, LIMIT - 1, -LIMIT]]


def fits(total: int) -> bool:
    return -LIMIT <= total < LIMIT


def updates_of(groups: list[list[int]], order: st.DataObject) -> list[Update]:
    """The diffs of each group as updates of one row at one time, all of them mixed."""
    flat: list[Update] = [((key,), 0, diff) for key, diffs in enumerate(groups) for diff in diffs]
    return order.draw(st.permutations(flat))


def pieces_of(found: list[Update]) -> dict[int, list[int]]:
    """The diffs by key."""
    pieces: dict[int, list[int]] = defaultdict(list)
    for (key,), _, diff in found:
        assert isinstance(key, int)
        pieces[key].append(diff)
    return pieces


@given(groups=GROUPS)
@example(groups=JUST_BEYOND)
@example(groups=[[2**61] * 3])
@example(groups=[[-(2**61)] * 4])
def test_sums_of_groups_are_exactly_those_of_python(groups):
    diffs = np.array([diff for group in groups for diff in group], np.int64)
    starts = np.cumsum([0, *map(len, groups[:-1])])
    sums, over = exact_sums(diffs, starts)
    for index, group in enumerate(groups):
        assert over.get(index, int(sums[index])) == sum(group)
        assert (index in over) is not fits(sum(group))


@given(groups=GROUPS, order=st.data())
def test_consolidated_updates_add_up_exactly_or_raise_and_never_wrap(groups, order):
    table = build(SCHEMA, updates_of(groups, order))
    expected = {key: sum(group) for key, group in enumerate(groups) if sum(group)}
    pieces = pieces_of(read(SCHEMA, consolidate(SCHEMA, table, "split")))
    assert {key: sum(diffs) for key, diffs in pieces.items()} == expected
    assert all(len(diffs) == 1 for key, diffs in pieces.items() if fits(expected[key])), "split where it need not be"
    if all(map(fits, expected.values())):
        assert totals(read(SCHEMA, consolidate(SCHEMA, table, "raise"))) == {((k,), 0): v for k, v in expected.items()}
    else:
        with pytest.raises(DiffOverflow):
            consolidate(SCHEMA, table, "raise")


@given(groups=GROUPS, order=st.data(), window_rows=st.sampled_from([None, 1, 5]), runs=st.integers(1, 6))
def test_merged_runs_add_up_exactly_or_raise_and_never_wrap(groups, order, window_rows, runs):
    """Each group dealt to so many runs, at times that a merge advances to one; or to contents, which have no times."""
    updates = [(row, place % 3, diff) for place, (row, _, diff) in enumerate(updates_of(groups, order))]
    dealt = [consolidate(SCHEMA, build(SCHEMA, updates[place::runs]), "split") for place in range(runs)]
    expected = {key: sum(group) for key, group in enumerate(groups) if sum(group)}

    def merged(on_overflow: str) -> list[Update]:
        tables = merge_runs(
            [iter([run]) for run in dealt], SCHEMA, advance_to=9, window_rows=window_rows,
            on_overflow=on_overflow,  # type: ignore[arg-type]
        )  # fmt: skip
        return [update for table in tables for update in read(SCHEMA, table)]

    def contents() -> list[Update]:
        tables = merge_contents([iter([run]) for run in dealt], SCHEMA, window_rows=window_rows)
        return [update for table in tables for update in read(SCHEMA, table)]

    assert {key: sum(diffs) for key, diffs in pieces_of(merged("split")).items()} == expected
    if all(map(fits, expected.values())):
        assert pieces_of(merged("raise")) == {key: [total] for key, total in expected.items()}
        assert pieces_of(contents()) == {key: [total] for key, total in expected.items()}
    else:
        for call in (lambda: merged("raise"), contents):
            with pytest.raises(DiffOverflow):
                call()
