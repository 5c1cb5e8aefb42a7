"""Laws of comparisons: they say what a plain comparison of two multisets by key says, however runs are cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.catalog.comparing import Comparison, compare
from persist_lib.kernel import pairs
from persist_lib.kernel.order import sort_updates

SCHEMA = persist.Schema(key={"k": "int8"}, value={"v": "string", "w": "double"})
NARROW = persist.Schema(key={"k": "int8"}, value={"w": "double", "x": "int8"})
Row = tuple[Any, ...]
"""Values, floats as text: 0.0 and -0.0 are different values."""

rows = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 6)), st.sampled_from(["a", "b", "", None]),
        st.sampled_from(["0.0", "-0.0", "1.5", None]),
    ),
    max_size=14,
)  # fmt: skip


def runs(schema: persist.Schema, contents: Counter[Row], shards: int, cut: int) -> list[list[pa.Table]]:
    """The contents in `shards` runs by key, each in order, in tables of at most `cut` rows."""
    found = []
    for shard in range(shards):
        mine = [(row, n) for row, n in contents.items() if hash(row[0]) % shards == shard]
        columns = list(zip(*[(*row, n) for row, n in mine], strict=True)) or [()] * (len(schema.names) + 1)
        arrays = [
            pa.array([float(v) if f.type == pa.float64() and v is not None else v for v in column], f.type)
            for column, f in zip(columns, schema.contents, strict=True)
        ]
        table = sort_updates(schema, pa.table(arrays, schema=schema.contents))
        found.append([table.slice(start, cut) for start in range(0, table.num_rows, cut)])
    return found


def by_key(contents: Counter[Row], columns: list[int]) -> dict[object, Counter[tuple[str, ...]]]:
    found: dict[object, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for row, n in contents.items():
        found[row[0]][tuple(repr(row[index]) for index in columns)] += n
    return found


def compared(
    old: Counter[Row], new: Counter[Row], other: persist.Schema, shards: tuple[int, int],
    cut: int, pair_bytes: int,
) -> Comparison:  # fmt: skip
    sides = [[iter(run) for run in runs(schema, contents, n, cut)]
             for schema, contents, n in ((SCHEMA, old, shards[0]), (other, new, shards[1]))]  # fmt: skip
    with patch.object(pairs, "PAIR_BYTES", pair_bytes):
        return compare(SCHEMA, other, sides[0], sides[1], 1 << 20)


@given(
    rows, rows, st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(1, 5), st.sampled_from([1, 60, 1 << 20])
)
def test_counts_are_those_of_a_plain_comparison(
    old: list[Row], new: list[Row], shards: tuple[int, int], cut: int, pair_bytes: int
) -> None:
    was, is_ = Counter(old), Counter(new)
    found = compared(was, is_, SCHEMA, shards, cut, pair_bytes)
    left, right = by_key(was, [1, 2]), by_key(is_, [1, 2])
    both = left.keys() & right.keys()
    changed = {key for key in both if left[key] != right[key]}
    assert (found.old_rows, found.new_rows) == (len(old), len(new))
    assert (found.appeared, found.vanished) == (len(right.keys() - both), len(left.keys() - both))
    assert (found.changed, found.equal_keys) == (len(changed), len(both) - len(changed))
    assert found.is_equal == (left == right)
    singles = [key for key in changed if len(left[key]) == len(right[key]) == 1]
    for index, name in enumerate(["v", "w"]):
        differing = [key for key in singles if next(iter(left[key]))[index] != next(iter(right[key]))[index]]
        assert found.columns[name] == len(differing)
    assert {row["k"] for row in found.samples["appeared"]} <= right.keys() - both
    assert {row["k"] for row in found.samples["changed"]} <= set(singles)
    for row in found.samples["changed"]:
        for name, index in (("v", 0), ("w", 1)):
            if name in row:
                expected = [next(iter(side[row["k"]]))[index] for side in (left, right)]
                assert [
                    repr(str(value) if name == "w" and value is not None else value) for value in row[name]
                ] == expected


@given(rows, rows, st.integers(1, 5), st.sampled_from([1, 1 << 20]))
def test_only_columns_that_both_have_are_compared(old: list[Row], new: list[Row], cut: int, pair_bytes: int) -> None:
    was = Counter(old)
    is_: Counter[Row] = Counter((k, w, 7) for k, _, w in new)
    found = compared(was, is_, NARROW, (2, 1), cut, pair_bytes)
    left, right = by_key(was, [2]), by_key(is_, [1])
    both = left.keys() & right.keys()
    assert found.changed == sum(left[key] != right[key] for key in both)
    assert (found.appeared, found.vanished) == (len(right.keys() - both), len(left.keys() - both))
    assert (found.only_old, found.only_new) == (("v",), ("x",))


def test_other_keys_are_refused() -> None:
    other = persist.Schema(key={"k": "string"}, value={"v": "string"})
    with pytest.raises(persist.InvalidUsage, match="the keys differ"):
        compare(SCHEMA, other, [], [], 1 << 20)
