"""Contents of one run that was compacted with its history: slices that threads add up, and where slices meet."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persist_lib.core.plan.compaction import TaskInput
from persist_lib.format.parts import encode_inline
from persist_lib.ids import ShardId
from persist_lib.kernel.consolidate import consolidate
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.relation import contents
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored

SCHEMA = Schema({"k": "int64"})


def one_run(updates: list[tuple[int, int, int]], parts: int = 1) -> tuple[Stored, list[TaskInput]]:
    """Updates (key, time, diff) as one run, cut into parts evenly."""
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*updates, strict=True), SCHEMA.updates, strict=True)
    ]
    table = consolidate(SCHEMA, pa.table(columns, schema=SCHEMA.updates))
    rows = -(-table.num_rows // parts)
    cut = [table.slice(start, rows) for start in range(0, table.num_rows, rows)]
    found = tuple(as_part(encode_inline(SCHEMA, 0, piece), None, 0) for piece in cut)
    return Stored(MemoryBlob(), ShardId("s"), [SCHEMA], SCHEMA), [TaskInput(found, 0, None)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("slice_rows", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("diffs", "left"),
    [
        ([1, 1, 1, 1, 1, 1], [(1, 1), (2, 6), (3, 1)]),
        ([1, -1, 1, -1, 1, -1], [(1, 1), (3, 1)]),
        ([1, 1, 1, -1, -1, 3], [(1, 1), (2, 4), (3, 1)]),
    ],
)
def test_data_that_goes_over_slices_and_parts_is_added_up_once(
    monkeypatch: pytest.MonkeyPatch, parts: int, slice_rows: int, diffs: list[int], left: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(contents, "SLICE_ROWS", slice_rows)
    stored, inputs = one_run([(1, 0, 1), *[(2, time, diff) for time, diff in enumerate(diffs)], (3, 9, 1)], parts)
    with Runtime().pool(2, "test") as pool:
        found = contents.at_once(stored, inputs, None, 1 << 20, pool)
    assert found is not None
    assert [(row["k"], row["_diff"]) for row in found.to_pylist()] == left


@pytest.mark.parametrize("slice_rows", [1, 2, 100])
def test_a_sum_beyond_64_bits_that_only_a_seam_adds_up_is_left_to_the_stream(
    monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    monkeypatch.setattr(contents, "SLICE_ROWS", slice_rows)
    stored, inputs = one_run([(2, 0, 2**62), (2, 1, 2**62 + 3)])
    with Runtime().pool(2, "test") as pool:
        assert contents.at_once(stored, inputs, None, 1 << 20, pool) is None


def test_nothing_is_left_where_all_of_a_run_was_retracted() -> None:
    stored, inputs = one_run([(1, 0, 1), (1, 1, -1)])
    with Runtime().pool(2, "test") as pool:
        found = contents.at_once(stored, inputs, None, 1 << 20, pool)
    assert found is not None
    assert found.num_rows == 0
    assert found.schema.equals(SCHEMA.contents)
