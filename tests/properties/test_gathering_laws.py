"""Laws of reading at once: whatever is gathered, in whatever slices, it is what the merge of the same runs comes to.

Laws of comparisons: they say what a plain comparison of two multisets by key says, however runs are cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any
from unittest import mock
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.catalog.comparing import Comparison, compare
from persist_lib.core.plan.requests import MergeTask, TaskInput
from persist_lib.core.state import Part
from persist_lib.errors import Corrupt, DiffOverflow
from persist_lib.format import parquet
from persist_lib.format.parts import decode_part, encode_inline, encode_part
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, ShardId, WriterId
from persist_lib.kernel import merge
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keys import encode_row
from persist_lib.kernel.merge import merge_contents, merge_runs
from persist_lib.kernel.order import is_sorted, sort_updates
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.maintain.merge_tasks import run_task
from persist_lib.relation import contents, projection
from persist_lib.relation.projection import Shown, projected_rows
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard import runs as stored_runs
from persist_lib.shard import small_runs
from persist_lib.shard.batches import as_part
from persist_lib.shard.runs import Stored
from persist_lib.shard.small_runs import gather
from tests.properties.kernel_updates import TYPES, Update, build, in_order, read, schemas, totals, updates_of
from tests.properties.runs import HUGE, dealt

SHARD = ShardId("s")
LIMITS = st.sampled_from([0, 40, 400, 1 << 28])
THREADS = st.sampled_from([1, 2, 3])
NUMBERS = count()


def store(data: st.DataObject, blob: MemoryBlob, schema: Schema, run: pa.Table) -> TaskInput:
    """A run as some parts, inline or not; only some times of it count, as in a batch that was trimmed."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, run.num_rows - 1)), max_size=2))) if run.num_rows > 1 else []
    parts = [part_of(data, blob, schema, run.slice(a, b - a)) for a, b in pairwise([0, *cuts, run.num_rows])]
    return TaskInput(tuple(parts), data.draw(st.sampled_from([0, 0, 1])), data.draw(st.sampled_from([None, None, 3])))


def part_of(data: st.DataObject, blob: MemoryBlob, schema: Schema, table: pa.Table) -> Part:
    """A part; if all its updates have one time, perhaps one that was written before that time was known."""
    times = set(table.column("_time").to_pylist())
    if len(times) == 1 and data.draw(st.booleans()):
        return stored_part(data, blob, schema, at_time(table.drop_columns(["_time"]), 0)).counted_at(times.pop())
    return stored_part(data, blob, schema, table)


def stored_part(data: st.DataObject, blob: MemoryBlob, schema: Schema, table: pa.Table) -> Part:
    if data.draw(st.booleans()):
        return as_part(encode_inline(schema, 0, table), None, 0)
    with mock.patch.object(parquet, "GROUP_ROWS", data.draw(st.sampled_from([1, 2, 100]))):
        key, encoded = PartKey(f"n/{next(NUMBERS)}"), encode_part(schema, 0, table)
    blob.set(blob_key(SHARD, key), encoded.data)
    return as_part(encoded, key, 0)


def world(
    data: st.DataObject, schema: Schema, updates: list[Update], *, wide: bool = True
) -> tuple[Stored, list[TaskInput]]:
    """Runs that are stored, some keys of which are wanted."""
    blob = MemoryBlob()
    runs = [store(data, blob, schema, run) for run in dealt(data, schema, updates) if run.num_rows]
    keys = sorted({encode_row(schema, build(schema, [update]), 0) for update in updates})
    bound = st.sampled_from([None, *keys]) if wide and keys else st.none()
    newer = Schema(schema.key, (*schema.value, *Schema({"k": "bool"}, {"added": "string"}).value))
    chosen = data.draw(st.sampled_from([schema, newer]))
    return Stored(blob, SHARD, [schema, newer], chosen, data.draw(bound), data.draw(bound)), runs


@contextmanager
def threads_of(count: int) -> Iterator[Executor]:
    """A pool, in which as many threads as it has add up a share of few keys each, and of few rows."""
    shares = mock.patch.multiple(small_runs, SHARE_ROWS=1, LONG_ROWS=0)
    with shares, Runtime(background=count > 1).pool(count, "test") as pool:
        yield pool


def at_once(stored: Stored, runs: list[TaskInput], limit: int, threads: int) -> pa.Table:
    with threads_of(threads) as pool:
        return together(stored.schema, contents.at_once(stored, runs, None, lambda table: table, limit, pool))


def streamed(stored: Stored, runs: list[TaskInput], limit: int) -> Iterator[pa.Table]:
    with Runtime(background=False).pool(1, "test") as pool:
        return contents.stream(stored, runs, limit, pool)


def together(schema: Schema, tables: Iterable[pa.Table]) -> pa.Table:
    return pa.concat_tables([schema.contents.empty_table(), *tables])


@settings(max_examples=40)
@given(st.data())
def test_contents_at_once_and_streamed_are_those_of_the_merge(data):
    schema = data.draw(schemas())
    stored, runs = world(data, schema, data.draw(updates_of(schema)))
    expected = read(stored.schema, together(stored.schema, merge_contents(stored.streams(runs), stored.schema)))
    limit = data.draw(LIMITS)
    with (
        mock.patch.object(contents, "GROUP_ROWS", data.draw(st.sampled_from([0, 100]))),
        mock.patch.object(contents, "LIGHT", light := data.draw(st.sampled_from([0, 2]))),
        mock.patch.object(stored_runs, "TOGETHER", data.draw(st.sampled_from([1, 2, 64]))),
    ):
        found = at_once(stored, runs, limit, data.draw(THREADS))
    assert read(stored.schema, found) == expected
    assert found.schema.equals(stored.schema.contents)
    with mock.patch.object(contents, "LIGHT", light):
        assert read(stored.schema, together(stored.schema, streamed(stored, runs, limit))) == expected


@settings(max_examples=60)
@given(st.data())
def test_a_projection_with_all_keys_is_added_up_over_row_groups_and_runs(data):
    schema = data.draw(st.one_of(schemas(), st.just(Schema({"k": "bool"}, {"a": "bool", "b": "bool"}))))
    stored, runs = world(data, schema, data.draw(updates_of(schema)))
    others = [name for name in stored.schema.names if name not in schema.key_names]
    columns = (*schema.key_names, *(name for name in others if data.draw(st.booleans())))
    shown = Shown(columns, None, None)
    whole = together(stored.schema, merge_contents(stored.streams(runs), stored.schema))
    expected = projected_rows(stored.schema, columns, whole)
    light = mock.patch.object(contents, "LIGHT", data.draw(st.sampled_from([0, 2])))
    with light, threads_of(data.draw(THREADS)) as pool:
        found = projection.at_once(stored, runs, shown, data.draw(LIMITS), pool)
    assert found.schema.equals(shown.schema(stored.schema))
    seen = Schema(schema.key, tuple(column for column in stored.schema.value if column.name in columns))
    assert read(seen, found) == read(seen, expected)


@pytest.mark.parametrize("kind", sorted(TYPES))
@settings(max_examples=15)
@given(st.data())
def test_each_type_is_gathered_and_added_up_by_its_bits(kind, data):
    schema = Schema({"k": kind}, {"v": kind})
    updates = data.draw(updates_of(schema))
    blob = MemoryBlob()
    runs = [store(data, blob, schema, run) for run in dealt(data, schema, updates) if run.num_rows]
    runs = [TaskInput(run.parts, 0, None) for run in runs]
    found = at_once(Stored(blob, SHARD, [schema], schema), runs, 1 << 28, data.draw(THREADS))
    expected = totals((row, 0, diff) for row, _, diff in updates)
    assert read(schema, found) == in_order(schema, [(row, 0, diff) for (row, _), diff in expected.items()])


@settings(max_examples=40)
@given(st.data())
def test_sums_beyond_64_bits_are_an_error_however_they_are_read(data):
    """Unless what else there is makes them fit."""
    schema = Schema({"k": "int8"})
    stored, runs = world(data, schema, data.draw(updates_of(schema, diffs=HUGE)), wide=False)
    try:
        expected = read(stored.schema, together(stored.schema, merge_contents(stored.streams(runs), stored.schema)))
    except DiffOverflow:
        expected = None
    light = data.draw(st.sampled_from([0, 2]))
    for read_it in (
        lambda: at_once(stored, runs, data.draw(LIMITS), data.draw(THREADS)),
        lambda: together(stored.schema, streamed(stored, runs, data.draw(LIMITS))),
    ):
        try:
            with mock.patch.object(contents, "LIGHT", light):
                found = read_it()
        except DiffOverflow:
            assert expected is None
        else:
            assert read(stored.schema, found) == expected


@settings(max_examples=40)
@given(st.data())
def test_what_is_gathered_and_the_rest_are_the_merge_of_all(data):
    schema = data.draw(schemas())
    stored, runs = world(data, schema, data.draw(updates_of(schema)))
    since = data.draw(st.sampled_from([None, 0, 2, 9]))
    with threads_of(data.draw(THREADS)) as pool:
        found = gather(stored, runs, since, data.draw(LIMITS), pool)
    if found.table is not None:
        assert is_sorted(stored.schema, found.table)
        again = consolidate(stored.schema, found.table, "split")
        assert read(stored.schema, found.table) == read(stored.schema, again)
    both = [merge_runs(one, stored.schema, advance_to=since) for one in (found.streams(stored), stored.streams(runs))]
    mine, expected = ([update for window in windows for update in read(stored.schema, window)] for windows in both)
    assert mine == expected


@settings(max_examples=40)
@given(st.data())
def test_a_compaction_of_gathered_runs_writes_what_a_merge_would(data):
    schema = data.draw(schemas())
    stored, runs = world(data, schema, data.draw(updates_of(schema, diffs=st.sampled_from([1, -1, 2**62]))), wide=False)
    since = data.draw(st.sampled_from([0, 2, 9]))
    written = list(stored.schemas).index(stored.schema)
    task = MergeTask(
        SHARD, WriterId("w"), tuple(runs), tuple(stored.schemas), written, since, None, None,
        data.draw(st.sampled_from([1, 1 << 20])), data.draw(LIMITS),
    )  # fmt: skip
    with threads_of(data.draw(THREADS)) as pool:
        result = run_task(task, stored.blob, NUMBERS.__next__, pool)
    decoded = [
        decode_part(part.key, stored.blob.get(blob_key(SHARD, part.key)) or b"", part.digests, stored.schema)
        for part in result.parts
    ]
    merged = merge_runs(stored.streams(runs), stored.schema, advance_to=since, on_overflow="split")
    assert [u for table in decoded for u in read(stored.schema, table)] == [
        u for window in merged for u in read(stored.schema, window)
    ]


@settings(max_examples=40)
@given(st.data())
def test_a_flipped_byte_is_found_before_a_value_is_used(data):
    schema = Schema({"k": "int64"}, {"v": "string"})
    blob = MemoryBlob()
    tables = [build(schema, [((n, b"x" * n), n, 1)]) for n in range(3)]
    encoded = [encode_part(schema, 0, table) for table in tables]
    broken = data.draw(st.integers(0, 2))
    runs = []
    for place, part in enumerate(encoded):
        stored, key = bytearray(part.data), PartKey(f"n/{place}")
        if place == broken:
            stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        blob.set(blob_key(SHARD, key), bytes(stored))
        runs.append(TaskInput((as_part(part, key, 0),), 0, None))
    for some in (runs, runs[broken : broken + 1]):
        with pytest.raises(Corrupt, match=f"n/{broken}"):
            at_once(Stored(blob, SHARD, [schema], schema), some, 1 << 28, 1)
        with pytest.raises(Corrupt, match=f"n/{broken}"):
            list(streamed(Stored(blob, SHARD, [schema], schema), some, 1 << 28))


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
    with patch.object(merge, "PAIR_BYTES", pair_bytes):
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
