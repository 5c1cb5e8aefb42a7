"""Splits of a collection: whatever its columns, shards, renditions and projection, their union is the snapshot."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.catalog.answers import CollectionSplit
from persist_lib.catalog.reader import inner_of
from tests.properties.kernel_updates import Row, build, read, schemas, totals, updates_of
from tests.worlds import SMALL, World

TIMES = 3


def counted(schema: persist.Schema, table: pa.Table) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for data, _, diff in read(schema, table):
        found[data] += diff
    return found


def united(world: World, schema: persist.Schema, splits: list[CollectionSplit]) -> Counter[Row]:
    """All rows of all splits, as another process reads them; no row is in two of them."""
    union: Counter[Row] = Counter()
    for split in pickle.loads(pickle.dumps(splits)):
        found = counted(schema, split.to_arrow(world.inner.blob))
        assert not found.keys() & union.keys()
        union.update(found)
    return union


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_splits_of_any_collection_are_its_contents(data: st.DataObject) -> None:
    world = World()
    schema = data.draw(schemas())
    updates = data.draw(updates_of(schema, times=TIMES - 1))
    shards = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    controller = world.client(SMALL).controller()
    try:
        controller.create("c", schema, shards=shards[0], mode="compare_and_append")
        with controller.open_writer("c") as write:
            for time in range(TIMES):
                some = [update for update in updates if update[1] == time]
                write.compare_and_append(build(schema, some), time, time + 1)
        if data.draw(st.booleans()):
            made = controller.make_rendition("c", shards=shards[1], copy=True).number
            controller.copy_rendition("c", made)
            controller.hand_over("c", made)
            controller.copy_rendition("c", made, to_end=True)
            with controller.open_writer("c") as write:
                write.compare_and_append(build(schema, updates)[:0], TIMES, TIMES + 1)
        with controller.open_reader("c") as reader:
            for as_of in (0, 1, inner_of(reader).newest()):
                sums: Counter[Row] = Counter()
                for (row, _), diff in totals(u for u in updates if u[1] <= as_of).items():
                    sums[row] += diff
                expected = {row: diff for row, diff in sums.items() if diff}
                with reader.snapshot(as_of, diff=True) as snapshot:
                    n = data.draw(st.integers(1, 9))
                    splits = snapshot.splits(n)
                    assert len(splits) <= n
                    assert sum(split.size for split in splits) >= snapshot.size or not expected
                    assert {split.as_of for split in splits} <= {as_of}
                    assert united(world, schema, splits) == expected == counted(schema, snapshot.to_arrow())
    finally:
        world.close()


OLD = persist.Schema({"id": "int64 not null"}, {"word": "string"})
WIDE = persist.Schema({"id": "int64 not null"}, {"word": "string", "more": "int64"})
ROWS = 6000


def wider(table: pa.Table) -> pa.Table:
    return table.append_column("more", pa.nulls(table.num_rows, pa.int64()))


def handed_over(world: World) -> Any:
    """A collection of 3 shards, whose rendition from time 1 on has 5 and a column more."""
    client = world.client(persist.Config(part_bytes=64 * 1024, inline_bytes=0))
    controller = client.controller()
    controller.create("c", OLD, shards=3, mode="compare_and_append")
    with controller.open_writer("c") as write:
        write.compare_and_append([{"id": i, "word": f"{i % 7}" * 40, "_time": 0} for i in range(ROWS)], 0, 1)
    made = controller.make_rendition("c", shards=5, schema=WIDE, copy=True).number
    controller.copy_rendition("c", made, transform=wider)
    controller.hand_over("c", made)
    controller.copy_rendition("c", made, transform=wider, to_end=True)
    with controller.open_writer("c") as write:
        write.upsert([{"id": 1, "word": "new", "more": 5}])
    return controller


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 1000])
def test_splits_of_old_and_new_renditions_have_the_columns_of_the_reader(world: World, n: int) -> None:
    controller = handed_over(world)
    old = {(i, f"{i % 7}" * 40): 1 for i in range(ROWS)}
    with controller.open_reader("c") as reader:
        for as_of, expected in [
            (0, {(*data, None): 1 for data in old}),
            (1, {((i, "new", 5) if i == 1 else (i, f"{i % 7}" * 40, None)): 1 for i in range(ROWS)}),
        ]:
            with reader.snapshot(as_of, diff=True) as snapshot:
                tables = [split.to_arrow(world.inner.blob) for split in snapshot.splits(n)]
                assert {table.schema for table in tables} == {WIDE.contents}
                rows = [row for table in tables for row in table.to_pylist()]
                assert {(row["id"], row["word"], row["more"]): row["_diff"] for row in rows} == expected
                assert len(rows) == ROWS
                sizes = [table.num_rows for table in tables]
                assert len(sizes) == n if n <= 4 else n >= len(sizes) > 4
                assert n > 4 or max(sizes) < 2 * min(sizes), f"about equal: {sizes}"
    with controller.open_reader("c", OLD) as reader, reader.snapshot(1, diff=True) as snapshot:
        rows = [row for split in snapshot.splits(n) for row in split.to_arrow(world.inner.blob).to_pylist()]
        new = {data: 1 for data in old if data[0] != 1} | {(1, "new"): 1}
        assert {(row["id"], row["word"]): row["_diff"] for row in rows} == new


@pytest.mark.parametrize("columns", [["word"], ["more"], ["word", "more"], ["more", "id"], []])
def test_a_projection_adds_up_within_each_split_and_new_columns_are_null_before(
    world: World, columns: list[str]
) -> None:
    controller = handed_over(world)
    with controller.open_reader("c") as reader:
        for as_of in (0, 1):
            whole: Counter[Any] = Counter()
            for row in reader.snapshot(as_of, diff=True).to_pylist():
                whole[tuple(row[name] for name in columns)] += row["_diff"]
            with reader.snapshot(as_of, columns=columns, diff=True) as snapshot:
                assert counts(snapshot.to_arrow(), columns) == whole
                total: Counter[Any] = Counter()
                for split in snapshot.splits(4):
                    table = split.to_arrow(world.inner.blob)
                    found = counts(table, columns)
                    assert len(found) == table.num_rows, "each is there once in a split"
                    total.update(found)
                assert total == whole


def counts(table: pa.Table, columns: list[str]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in table.to_pylist():
        found[tuple(row[name] for name in columns)] += row["_diff"]
    return found


def test_what_is_asked_wrongly_names_the_collection(world: World) -> None:
    controller = handed_over(world)
    with controller.open_reader("c") as reader:
        with pytest.raises(persist.InvalidUsage, match=r"collection 'c' has no columns \['wrd'\].*word"):
            reader.snapshot(columns=["wrd"], diff=True)
        with pytest.raises(persist.InvalidUsage, match="columns must be a list"):
            reader.snapshot(columns="word", diff=True)
        for n in (0, -1, True, 1.5, "2", None):
            with pytest.raises(persist.InvalidUsage, match="number of splits"):
                reader.snapshot(diff=True).splits(n)


def test_a_reader_in_the_old_columns_reads_old_times_after_a_change_that_is_not_additive(world: World) -> None:
    controller = world.client().controller()
    controller.create("c", OLD, shards=2, mode="compare_and_append")
    with controller.open_writer("c") as write:
        write.compare_and_append([{"id": 1, "word": "a", "_time": 0}], 0, 1)
    other = persist.Schema({"id": "int64 not null"}, {"letters": "int64"})
    made = controller.make_rendition("c", schema=other).number
    with controller.open_writer("c", rendition=made) as write:
        write.compare_and_append([{"id": 1, "letters": 1, "_time": 1}], 0, 2)
    controller.hand_over("c", made)
    with controller.open_reader("c", OLD) as reader:
        assert reader.snapshot(0, diff=True).to_pylist() == [{"id": 1, "word": "a", "_diff": 1}]
        with pytest.raises(persist.SchemaChanged):
            reader.snapshot(1, diff=True)
    with controller.open_reader("c") as reader:  # opened without columns: those that the collection had then
        assert reader.snapshot(0, diff=True).to_pylist() == [{"id": 1, "word": "a", "_diff": 1}]
        assert reader.snapshot(1, diff=True).to_pylist() == [{"id": 1, "letters": 1, "_diff": 1}]
    with pytest.raises(persist.SchemaChanged):
        controller.open_reader("c", persist.Schema({"id": "int64 not null"}, {"none": "int64"}))
