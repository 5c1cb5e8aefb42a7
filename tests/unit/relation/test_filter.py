"""Filters on any column: what is pruned is not fetched, what is left is exact, and what is no filter is refused."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.errors import DiffOverflow, DiskFull, InvalidUsage
from persist_lib.testing import contents_of
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, WIDER, World, row

ROWS = 900_000
EVENTS = persist.Schema(key={"id": "int64"}, value={"day": "int32", "kind": "string", "noise": "binary"})


def events() -> pa.Table:
    """About 48 MB that do not compress, of which `day` grows with the key."""
    noise = pa.Array.from_buffers(
        pa.binary(48), ROWS, [None, pa.py_buffer(random.Random(1).randbytes(48 * ROWS))]
    ).cast(pa.binary())  # fmt: skip
    ids = pa.array(range(ROWS))
    kinds = pa.array(["a", "b", "c"] * (ROWS // 3))
    return pa.table({"id": ids, "day": pc.divide(ids, 10_000).cast(pa.int32()), "kind": kinds, "noise": noise})


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
def test_a_filter_reads_the_row_groups_that_can_hold_its_rows(
    world: World, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    if older:  # as releases before wrote parts
        monkeypatch.setattr("persist_lib.format.parquet.statistics_columns", lambda _: [])
    client = world.client()
    table = events()
    write, read = client.open_shard("s", EVENTS)
    write.compare_and_append(table, 0, 1)
    (part,) = [part for batch in client.inspect("s").state.trace for part in batch.parts]
    assert part.size > 40 << 20
    for expression in (
        pc.field("day") == 33,
        (pc.field("day") > 32) & (pc.field("day") < 34),
        pc.field("day").isin([33]),
    ):
        found = read.snapshot(0, filter=expression, diff=True)
        assert found.to_arrow().column("id").to_pylist() == list(range(330_000, 340_000))
        at_once = found.cost
        streamed = read.snapshot(0, filter=expression, diff=True)
        assert sum(piece.num_rows for piece in streamed.batches()) == 10_000
        narrow = read.snapshot(0, filter=expression, columns=["kind"], diff=True)
        assert [r["kind"] for r in narrow.to_pylist()] == ["a", "b", "c"]
        for cost in (at_once, streamed.cost, narrow.cost):
            if older:
                assert cost.bytes_read >= 8 << 20
            else:
                assert 0 < cost.bytes_read <= part.size * 0.65, "the last chunk, and those of one row group"
                assert cost.gets <= 4
    if not older:
        none = read.snapshot(0, filter=pc.field("day") > 1_000, diff=True)
        assert none.to_arrow().num_rows == 0
        assert none.cost.gets == 0, "the state says that there is nothing"
    whole = read.snapshot(0, diff=True)
    whole.to_arrow()
    assert whole.cost.bytes_read >= part.size
    relation = read.snapshot(0, diff=True).to_duckdb()
    assert relation.filter("day = 33").aggregate("count(*)").fetchall() == [(10_000,)]


def test_a_filter_goes_along_with_splits_and_columns(world: World) -> None:
    client = world.client(TINY)
    model = filled(client)
    read = client.open_reader("s")
    expression = (pc.field("word") == "a") & (pc.field("id") > 3)
    want = {key: n for key, n in model.contents(39).items() if key[1] == "a" and key[0] > 3}
    for _ in range(2):
        snapshot = read.snapshot(39, filter=expression, diff=True)
        assert contents_of(snapshot.to_arrow()) == want
        splits = pickle.loads(pickle.dumps(snapshot.splits(4)))
        assert contents_of(pa.concat_tables([split.to_arrow(world.inner.blob) for split in splits])) == want
        words = read.snapshot(39, filter=expression, columns=["word"], diff=True)
        assert words.to_pylist() == ([{"word": "a", "_diff": sum(want.values())}] if sum(want.values()) else [])
        client.maintain("s")


def test_rows_that_are_gone_from_the_contents_do_not_fail_a_filter(world: World) -> None:
    write, read = world.client(TINY).open_shard("s", SCHEMA)
    write.compare_and_append([row(0, "w", 0), row(5, "w", 0)], 0, 1)
    expression = pc.divide(pc.scalar(10), pc.field("id")) > 1
    with pytest.raises(InvalidUsage, match=r"cannot be evaluated.*divide by zero"):
        read.snapshot(0, filter=expression, diff=True).to_arrow()
    write.compare_and_append([row(0, "w", 1, -1)], 1, 2)
    assert [r["id"] for r in read.snapshot(1, filter=expression, diff=True).to_pylist()] == [5]


def test_a_column_that_older_parts_lack_is_null_to_a_filter(world: World) -> None:
    client = world.client(TINY)
    write, old = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1, "w", 0)], 0, 1)
    client.evolve_schema("s", WIDER)
    with client.open_writer("s", WIDER) as newer:
        newer.compare_and_append([{"id": 2, "word": "w", "more": 7}], 1, 2)
    read = client.open_reader("s")
    for _ in range(2):
        ids = [[r["id"] for r in read.snapshot(1, filter=each, diff=True).to_pylist()]
               for each in (pc.field("more").is_null(), pc.field("more") == 7, pc.field("more") != 7)]  # fmt: skip
        assert ids == [[1], [2], []]
        assert [r["id"] for r in old.snapshot(1, filter=pc.field("id") == 2, diff=True).to_pylist()] == [2]
        client.maintain("s")
    with pytest.raises(InvalidUsage, match="more"):
        old.snapshot(1, filter=pc.field("more") == 7, diff=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (pc.field("nope") == 1, "nope"), (pc.field("id") == "x", "filter"), (pc.field("id") + 1, "not true or false"),
        (pc.field(0) == 1, "by its place"), ((pc.field(0) == 1) & (pc.field("word") == "x"), "by its place"),
        (pc.field("_diff") > 1, "_diff and _time"), (pc.field("_time") > 1, "_diff and _time"),
        ("id > 5", "pyarrow expression"), (5, "pyarrow expression"), (True, "pyarrow expression"), ([], "pyarrow"),
        ([("id", "=", 5)], "pyarrow expression"), (pc.field(("id", "x")) == 1, "filter"), (lambda: 1, "pyarrow"),
    ],
)  # fmt: skip
def test_what_is_no_filter_on_the_columns_is_refused_at_once(world: World, wrong: Any, says: str) -> None:
    client = world.client()
    filled(client, 1)
    read = client.open_reader("s")
    world.requests.clear()
    with pytest.raises(InvalidUsage, match=says):
        read.snapshot(0, filter=wrong, diff=True)
    assert world.count("get", "get_range") == 0


@pytest.mark.parametrize("wrong", [pc.field("price") > 5000, pc.field("due") == "2026-01-01", pc.field("id") == "x"])
def test_a_comparison_with_another_type_says_to_use_the_columns_own(world: World, wrong: Any) -> None:
    schema = persist.Schema({"id": "int64"}, {"price": "decimal128(12, 2)", "due": "date32"})
    _, read = world.client().open_shard("typed", schema)
    with pytest.raises(InvalidUsage, match=r"Compare a column with a value of its own type, as in .*Decimal"):
        read.snapshot(0, filter=wrong, diff=True)


def test_constant_filters_are_filters(world: World) -> None:
    client = world.client(TINY)
    model = filled(client)
    read = client.open_reader("s")
    assert contents_of(read.snapshot(39, filter=pc.scalar(True), diff=True).to_arrow()) == model.contents(39)
    assert read.snapshot(39, filter=pc.scalar(False), diff=True).to_arrow().num_rows == 0
    assert read.snapshot(39, filter=pc.scalar(pa.scalar(None, pa.bool_())), diff=True).to_arrow().num_rows == 0


# --- projections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [persist.Config(), TINY])
@pytest.mark.parametrize("columns", [[], ["id"], ["word"], ["word", "id"], ["word", "word"]])
def test_columns_add_up_what_becomes_equal(world: World, config: persist.Config, columns: list[str]) -> None:
    client = world.client(config)
    model = filled(client)
    read = client.open_reader("s")
    order = [name for name in SCHEMA.names if name in columns]
    for _ in range(2):
        sums: dict[tuple[Any, ...], int] = {}
        for (id_, word), n in model.contents(39).items():
            key = tuple({"id": id_, "word": word}[name] for name in order)
            sums[key] = sums.get(key, 0) + n
        want = {key: n for key, n in sums.items() if n}
        snapshot = read.snapshot(39, columns=columns, diff=True)
        assert snapshot.schema.names == [*order, "_diff"]
        for table in (snapshot.to_arrow(), pa.concat_tables([snapshot.schema.empty_table(), *snapshot.batches()])):
            assert table.num_rows == len(want)
            assert {tuple(r[name] for name in order): r["_diff"] for r in table.to_pylist()} == want
        client.maintain("s")


def test_a_projection_beyond_memory_goes_through_files_and_says_when_they_are_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(persist.Config(merge_bytes=1 << 20))
    rows = 50_000
    words = [f"{n * 7919 % rows:040}" for n in range(rows)]
    table = pa.table({"id": range(rows), "word": words})
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append(table, 0, 1)
    write.compare_and_append(table.slice(0, 10), 1, 2)
    found = read.snapshot(1, columns=["word"], diff=True).to_arrow()
    assert found.column("word").to_pylist() == sorted(words)
    assert sum(found.column("_diff").to_pylist()) == rows + 10

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.ipc.new_stream", full)
    with pytest.raises(DiskFull, match="TMPDIR"):
        read.snapshot(1, columns=["word"], diff=True).to_arrow()


def test_a_projection_whose_sum_does_not_fit_says_so(world: World) -> None:
    write, read = world.client().open_shard("s", SCHEMA)
    write.compare_and_append([row(1, "w", 0, 2**62), row(2, "w", 0, 2**62), row(3, "x", 0, -(2**62))], 0, 1)
    assert read.snapshot(0, columns=[], diff=True).to_pylist() == [{"_diff": 2**62}]
    for columns in (["word"],):
        with pytest.raises(DiffOverflow):
            read.snapshot(0, columns=columns, diff=True).to_arrow()
        with pytest.raises(DiffOverflow):
            list(read.snapshot(0, columns=columns, diff=True).batches())
    write.compare_and_append([row(3, "x", 1, 2**63 - 1)], 1, 2)
    with pytest.raises(DiffOverflow):
        read.snapshot(1, columns=[], diff=True).to_arrow()


@pytest.mark.parametrize("kind", ["timestamp[s]", "timestamp[s, UTC]"])
def test_seconds_that_parquet_stores_in_milliseconds_come_back(world: World, kind: str) -> None:
    schema = persist.Schema(key={"id": "int64"}, value={"at": kind})
    write, read = world.client(TINY).open_shard("s", schema)
    times = pa.array([0, None, -5, 2**37], pa.int64()).cast(schema.data.field("at").type)
    write.compare_and_append(pa.table({"id": range(4), "at": times}), 0, 1)
    assert read.snapshot(0, diff=True).to_arrow().column("at").combine_chunks() == times
    late = pc.field("at") > pa.scalar(0, pa.int64()).cast(times.type)
    assert read.snapshot(0, filter=late, diff=True).to_arrow().column("id").to_pylist() == [3]


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_nan_and_negative_zero_are_not_pruned_by_statistics_that_leave_them_out(world: World, kind: str) -> None:
    schema = persist.Schema(key={"id": "int64"}, value={"x": kind})
    write, read = world.client(TINY).open_shard("s", schema)
    values = [0.0, -0.0, float("nan"), 0.0]
    write.compare_and_append([{"id": n, "x": x} for n, x in enumerate(values)], 0, 1)
    cases = [(pc.field("x") != 0.0, [2]), (~(pc.field("x") <= 0.0), [2]), (pc.field("x").is_nan(), [2]),
             (pc.field("x") == -0.0, [0, 1, 3]), (pc.field("x").is_null(nan_is_null=True), [2])]  # fmt: skip
    for expression, ids in cases:
        assert read.snapshot(0, filter=expression, diff=True).to_arrow().column("id").to_pylist() == ids
