"""The kernel at its edges: memory, many runs, poisoned keys, parts of the asked size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persist_lib.errors import DiffOverflow
from persist_lib.format.parts import decode_part, parts_of
from persist_lib.kernel.consolidate import I64_MAX, consolidate
from persist_lib.kernel.merge import merge_contents, merge_runs
from persist_lib.schema.schema import Schema

SCHEMA = Schema({"k": "int64"})


def updates(keys: list[int] | np.ndarray, times: Any = 0, diffs: Any = 1) -> pa.Table:
    keys = np.asarray(keys, "i8")
    columns = [keys, np.broadcast_to(times, keys.shape).astype("u8"), np.broadcast_to(diffs, keys.shape).astype("i8")]
    return pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates)


def merged(runs: list[pa.Table], **options: object) -> pa.Table:
    windows = merge_runs([iter([run]) for run in runs], SCHEMA, **options)  # type: ignore[arg-type]
    return pa.concat_tables([SCHEMA.updates.empty_table(), *windows])


def test_nothing_merges_to_nothing():
    assert merged([]).num_rows == 0
    assert merged([updates([]), updates([])]).num_rows == 0
    windows = merge_runs([iter([updates([1])]), iter([updates([1], diffs=-1)])], SCHEMA)
    assert list(parts_of(windows, SCHEMA, 0, 1 << 20)) == []


def one_at_a_time(*tables: pa.Table) -> dict[int, int]:
    """The contents of one run, with a window for each of its tables."""
    windows = list(merge_contents([iter(tables)], SCHEMA, window_rows=1))
    return {key: diff for window in windows for key, diff in zip(*window.to_pydict().values(), strict=True)}


def test_what_a_window_carried_and_the_next_cancels_leaves_nothing_behind():
    retracted = [updates([2], times=0), updates([2], times=1, diffs=-1), updates([3], times=0)]
    assert one_at_a_time(*retracted) == {3: 1}


def test_what_a_window_carried_is_added_to_the_next_ones_of_its_run():
    assert one_at_a_time(updates([1, 2]), updates([2, 3], times=1), updates([3, 3], times=[2, 3])) == {1: 1, 2: 2, 3: 3}


def test_advancing_times_adds_up_what_they_kept_apart():
    found = merged([updates([1, 1], times=[1, 5]), updates([1], times=3, diffs=-1)], advance_to=4)
    assert found.to_pydict() == {"k": [1], "_time": [5], "_diff": [1]}


def test_runs_are_read_ahead_by_a_bounded_amount():
    taken = [0, 0]

    def run(index: int) -> Iterator[pa.Table]:
        for start in range(0, 100_000, 100):
            taken[index] += 100
            yield updates(np.arange(start, start + 100) * 2 + index)

    given = 0
    for window in merge_runs([run(0), run(1)], SCHEMA, window_rows=2000):
        given += window.num_rows
        assert sum(taken) - given <= 2300
    assert given == 200_000


def test_hundreds_of_tiny_runs_are_one_window():
    windows = list(merge_runs([iter([updates([i % 50])]) for i in range(500)], SCHEMA))
    assert [window.num_rows for window in windows] == [50]
    assert windows[0].column("_diff").to_pylist() == [10] * 50


def test_a_sum_beyond_64_bits_names_its_data_or_stays_as_few_updates_that_amount_to_it():
    poisoned = [updates([1, 2], diffs=[1, I64_MAX]), updates([2, 3], diffs=[I64_MAX, 1]), updates([2], diffs=5)]
    with pytest.raises(DiffOverflow, match="'k': 2"):
        merged(poisoned)
    found = merged(poisoned, on_overflow="split")
    assert found.to_pydict()["k"] == [1, 2, 2, 2, 3]
    assert sum(
        diff for key, diff in zip(*found.drop_columns(["_time"]).to_pydict().values(), strict=True) if key == 2
    ) == (2 * I64_MAX + 5)


def test_an_overflow_on_the_way_to_a_sum_that_fits_is_no_overflow():
    there = [updates([2], times=0, diffs=I64_MAX), updates([2], times=1, diffs=I64_MAX)]
    back = [updates([2], times=2, diffs=-I64_MAX), updates([3])]
    assert one_at_a_time(*there, *back) == {2: I64_MAX, 3: 1}
    with pytest.raises(DiffOverflow, match="'k': 2"):
        one_at_a_time(*there, updates([3]))


def test_a_poisoned_run_survives_being_merged_again():
    split = merged([updates([2], diffs=I64_MAX)] * 3, on_overflow="split")
    again = merged([split, updates([2], diffs=-I64_MAX), updates([2], diffs=-I64_MAX)])
    assert again.to_pydict() == {"k": [2], "_time": [0], "_diff": [I64_MAX]}


def test_parts_have_about_the_asked_size_and_follow_each_other():
    rng = np.random.default_rng(1)
    runs = [consolidate(SCHEMA, updates(rng.integers(0, 2**60, 400_000))) for _ in range(2)]
    parts = list(parts_of(merge_runs([iter([run]) for run in runs], SCHEMA), SCHEMA, 0, 1 << 20))
    assert len(parts) > 2
    assert all(part.size < 3 << 20 for part in parts)
    assert all(before.said.key_upper < after.said.key_lower for before, after in pairwise(parts))
    tables = [decode_part("k", part.data, part.digests, SCHEMA) for part in parts]
    assert pa.concat_tables(tables).equals(merged(runs))


def test_a_key_with_more_updates_than_a_window_is_merged_all_the_same():
    runs = [updates([7] * 5000, times=np.arange(5000) * 3 + index) for index in range(3)]
    kept = merged(runs, window_rows=10)
    assert kept.num_rows == 15_000
    assert merged(runs, window_rows=10, advance_to=2**40).to_pydict() == {"k": [7], "_time": [2**40], "_diff": [15_000]}


@pytest.mark.parametrize("kind", ["string", "binary"])
@pytest.mark.parametrize("value", ["", "word", "w" * 1000])
def test_contents_that_are_one_text_and_nothing_else_are_added_up(kind, value):
    """All runs have the same bytes in their only column, so there is nothing to compare: the rows were lost once."""
    schema = Schema({"word": kind})
    cell = value if kind == "string" else value.encode()
    runs = [iter([pa.table([[cell], [0], [1]], schema=schema.updates)]) for _ in range(3)]
    assert [table.to_pylist() for table in merge_contents(runs, schema)] == [[{"word": cell, "_diff": 3}]]
