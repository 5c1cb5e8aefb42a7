"""Contents of one run that was compacted with its history: row groups that threads add up, and where these meet."""

from __future__ import annotations

from unittest import mock

import pyarrow as pa
import pytest

from persist_lib.core.plan.requests import TaskInput
from persist_lib.errors import DiffOverflow
from persist_lib.format import parquet
from persist_lib.format.parts import encode_part
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, ShardId
from persist_lib.kernel.consolidate import consolidate
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.relation import contents
from persist_lib.relation.projection import Shown
from persist_lib.relation.projection import at_once as at_once_projected
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored

SCHEMA = Schema({"k": "int64"})


def one_run(
    updates: list[tuple[int, int, int]], parts: int = 1, group_rows: int = 100
) -> tuple[Stored, list[TaskInput]]:
    """Updates (key, time, diff) as one run, cut into parts evenly, and these into row groups."""
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*updates, strict=True), SCHEMA.updates, strict=True)
    ]
    return stored_run(SCHEMA, consolidate(SCHEMA, pa.table(columns, schema=SCHEMA.updates)), parts, group_rows)


def stored_run(schema: Schema, table: pa.Table, parts: int, group_rows: int) -> tuple[Stored, list[TaskInput]]:
    rows = -(-table.num_rows // parts)
    cut = [table.slice(start, rows) for start in range(0, table.num_rows, rows)]
    blob, shard = MemoryBlob(), ShardId("s")
    found = []
    with mock.patch.object(parquet, "GROUP_ROWS", group_rows):
        for place, piece in enumerate(cut):
            encoded, key = encode_part(schema, 0, piece), PartKey(f"n/{place}")
            blob.set(blob_key(shard, key), encoded.data)
            found.append(as_part(encoded, key, 0))
    return Stored(blob, shard, [schema], schema), [TaskInput(tuple(found), 0, None)]


def at_once(stored: Stored, inputs: list[TaskInput]) -> pa.Table:
    with Runtime().pool(2, "test") as pool:
        found = contents.at_once(stored, inputs, None, lambda table: table, 1 << 20, pool)
    return pa.concat_tables([SCHEMA.contents.empty_table(), *found])


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("group_rows", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("diffs", "left"),
    [
        ([1, 1, 1, 1, 1, 1], [(1, 1), (2, 6), (3, 1)]),
        ([1, -1, 1, -1, 1, -1], [(1, 1), (3, 1)]),
        ([1, 1, 1, -1, -1, 3], [(1, 1), (2, 4), (3, 1)]),
    ],
)
def test_data_that_goes_over_row_groups_and_parts_is_added_up_once(
    parts: int, group_rows: int, diffs: list[int], left: list[tuple[int, int]]
) -> None:
    updates = [(1, 0, 1), *[(2, time, diff) for time, diff in enumerate(diffs)], (3, 9, 1)]
    found = at_once(*one_run(updates, parts, group_rows))
    assert [(row["k"], row["_diff"]) for row in found.to_pylist()] == left


@pytest.mark.parametrize("group_rows", [1, 2, 100])
def test_a_sum_beyond_64_bits_that_only_a_seam_adds_up_is_an_error(group_rows: int) -> None:
    with pytest.raises(DiffOverflow, match="2"):
        at_once(*one_run([(2, 0, 2**62), (2, 1, 2**62 + 3)], 1, group_rows))


def test_nothing_is_left_where_all_of_a_run_was_retracted() -> None:
    found = at_once(*one_run([(1, 0, 1), (1, 1, -1)]))
    assert found.num_rows == 0
    assert found.schema.equals(SCHEMA.contents)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_key_that_goes_over_parts_is_one_row_of_a_projection(parts: int) -> None:
    schema, rows = Schema({"k": "int64"}, {"a": "int64"}), range(4)
    table = pa.table([[1] * 4, list(rows), [0] * 4, [1] * 4], schema=schema.updates)
    with Runtime().pool(2, "test") as pool:
        found = at_once_projected(*stored_run(schema, table, parts, 100), Shown(("k",), None, None), 1 << 20, pool)
    assert found.to_pylist() == [{"k": 1, "_diff": 4}]
