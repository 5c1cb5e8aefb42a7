"""Rows as often as they are there, through every door of every reader; with `diff` each distinct row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pydantic
import pytest

import persist_lib as persist
from persist_lib.kernel import multiplicity
from persist_lib.relation.snapshot import SnapshotOf
from persist_lib.sources.envelopes import upserted
from persist_lib.sources.targets import Target
from tests.unit.pending_area.areas import Area
from tests.worlds import World

Rows = SnapshotOf[Any]

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})
BAG = [(1, 100), (1, 100), (1, 100), (2, 100), (3, 7)]
"""Five rows, three of them equal; two keys have the same value."""


class Order(pydantic.BaseModel):
    id: int
    cents: int


def rows(*bag: tuple[int, int], **more: int) -> list[dict[str, int]]:
    return [{"id": id_, "cents": cents, **more} for id_, cents in bag]


def shard(client: persist.Client, **asked: Any) -> Iterator[Rows]:
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append(rows(*BAG[:2], (9, 9)), 0, 1)
        write.compare_and_append([*rows(*BAG[2:]), *rows((9, 9), _diff=-1)], 1, 2)
    with client.open_reader("s") as read, read.snapshot(**asked) as snapshot:
        yield snapshot


def collection(client: persist.Client, **asked: Any) -> Iterator[Rows]:
    controller = client.controller()
    controller.create("c", SCHEMA, shards=3, mode="compare_and_append")
    with controller.open_writer("c") as write:
        write.append_now(rows(*BAG))
    with controller.open_reader("c") as read, read.snapshot(**asked) as snapshot:
        yield snapshot


def table_of(mode: str, *, in_transaction: bool = False) -> Callable[..., Iterator[Rows]]:
    def made(client: persist.Client, **asked: Any) -> Iterator[Rows]:
        tables = client.controller().tables()
        tables.create("t", SCHEMA, mode=mode)  # type: ignore[arg-type]
        tables.insert("t", rows(*BAG[:1]))
        if not in_transaction:
            tables.insert("t", rows(*BAG[1:]))
            yield tables.read("t", **asked)
        else:
            with tables.transaction() as t:
                t.insert("t", rows(*BAG[1:]))
                yield t.read("t", **asked)
                t.rollback()
        tables.close()

    return made


READERS: dict[str, Callable[..., Iterator[Rows]]] = {
    "shard": shard, "collection": collection, "table, direct": table_of("yolo"), "table, wal": table_of("wal"),
    "transaction": table_of("wal", in_transaction=True),
}  # fmt: skip

DOORS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "to_arrow": lambda found: found.to_arrow().to_pylist(),
    "to_pylist": lambda found: found.to_pylist(),
    "batches": lambda found: [row for table in found.batches() for row in table.to_pylist()],
    "to_reader": lambda found: found.to_reader().read_all().to_pylist(),
    "C stream": lambda found: pa.table(found).to_pylist(),
    "to_pandas": lambda found: found.to_pandas().to_dict("records"),
    "to_polars": lambda found: found.to_polars().to_dicts(),
    "pl.DataFrame": lambda found: pl.DataFrame(found).to_dicts(),
    "scan_polars": lambda found: found.scan_polars().collect().to_dicts(),
    "to_duckdb": lambda found: found.to_duckdb(duckdb.connect()).to_arrow_table().to_pylist(),
    "to_models": lambda found: [dict(one) for one in found.to_models(Order)],
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, client: persist.Client) -> Callable[..., Rows]:
    """Reads the bag, once a test."""
    kept = []

    def read(**asked: Any) -> Rows:
        kept.append(READERS[request.param](client, **asked))
        return next(kept[-1])

    return read


def test_every_door_of_every_reader_gives_each_row_as_often_as_it_is_there(reader: Callable[..., Rows]) -> None:
    found = reader()
    assert found.schema.names == ["id", "cents"]
    assert (found.count(), len(found.to_arrow())) == (5, 5)
    for door, read in DOORS.items():
        assert Counter((row["id"], row["cents"]) for row in read(found)) == Counter(BAG), door


def test_values_that_are_equal_in_the_chosen_columns_are_not_added_up(reader: Callable[..., Rows]) -> None:
    found = reader(columns=["cents"])
    for door, read in DOORS.items():
        if door != "to_models":
            assert mean(row["cents"] for row in read(found)) == mean(cents for _, cents in BAG), door


def test_with_diff_each_distinct_row_is_there_once_with_its_multiplicity(reader: Callable[..., Rows]) -> None:
    found = reader(diff=True)
    expected = {(row[0], row[1], count) for row, count in Counter(BAG).items()}
    for door, read in DOORS.items():
        if door != "to_models":
            assert {tuple(row.values()) for row in read(found)} == expected, door
            assert len(read(found)) == len(expected), door
    assert found.count() == len(found.to_models(Order)) == 5


def test_filters_of_engines_and_of_the_call_keep_multiplicities(reader: Callable[..., Rows]) -> None:
    found = reader(filter=pc.field("cents") > 50)
    sql = found.to_duckdb(duckdb.connect())
    assert sql.aggregate("count(*), avg(cents)").fetchall() == [(4, 100.0)]
    assert sql.filter("id = 1").aggregate("count(*)").fetchall() == [(3,)]
    assert found.scan_polars().filter(pl.col("id") < 2).select(pl.len()).collect().item() == 3
    assert found.scan_polars().head(2).collect().height == 2


def test_no_columns_are_as_many_rows(reader: Callable[..., Rows]) -> None:
    found = reader(columns=[])
    assert (found.to_arrow().shape, found.count()) == ((5, 0), 5)
    assert sum(table.num_rows for table in found.batches()) == 5


def test_no_columns_with_diff_are_one_row_with_the_number_of_rows(reader: Callable[..., Rows]) -> None:
    assert reader(columns=[], diff=True).to_pylist() == [{"_diff": 5}]


def test_splits_repeat_rows_and_so_do_keys_that_are_looked_up(client: persist.Client) -> None:
    (found,) = list(zip(shard(client, keys=[1, 3]), [0], strict=False))
    assert [row["id"] for row in found[0].to_pylist()] == [1, 1, 1, 3]
    with client.open_reader("s") as read, read.snapshot(key=(1,)) as one, read.snapshot() as snapshot:
        assert one.to_pylist() == rows((1, 100)) * 3
        (split,) = snapshot.splits(1)
        assert split.to_arrow(client.blob).num_rows == 5
        assert sum(table.num_rows for table in split.batches(client.blob)) == 5
    several: Any
    for several in collection(client):
        assert sum(split.to_arrow(client.blob).num_rows for split in several.splits(3)) == 5
    for several in collection_again(client, columns=["cents"], diff=True):
        (whole,) = several.splits(1)
        assert whole.to_arrow(client.blob).to_pylist() == [{"cents": 7, "_diff": 1}, {"cents": 100, "_diff": 4}]


def collection_again(client: persist.Client, **asked: Any) -> Iterator[Rows]:
    with client.controller().open_reader("c") as read, read.snapshot(**asked) as snapshot:
        yield snapshot


def test_a_negative_sum_refuses_rows_and_names_one(client: persist.Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([*rows((1, 5)), *rows((2, 6), _diff=-2)], 0, 1)
    with client.open_reader("s") as read, read.snapshot() as found:
        for door, way in {**DOORS, "count": lambda found: found.count()}.items():
            with pytest.raises(Exception, match=r"-2 times|there -2") as told:
                way(found)
            if "duckdb" not in door and "polars" not in door and "stream" not in door and "pl." not in door:
                assert isinstance(told.value, persist.InvalidUsage), door
        with pytest.raises(persist.InvalidUsage, match="diff=True"):
            found.to_arrow()
        assert read.snapshot(diff=True).to_arrow().column("_diff").to_pylist() == [1, -2]
        assert read.snapshot(key=(1,)).to_pylist() == rows((1, 5)), "rows that are not asked for do not matter"


def test_a_thousand_million_equal_rows_stream_by_index_and_a_limit_ends_it(client: persist.Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([*rows((1, 5), _diff=10**9), *rows((2, 6))], 0, 1)
    with client.open_reader("s") as read, read.snapshot() as found:
        assert found.count() == 10**9 + 1
        first = next(found.batches())
        assert (first.num_rows, first.nbytes < 1 << 22) == (1 << 16, True)
        assert found.scan_polars().head(70_000).collect().height == 70_000
        assert found.to_duckdb(duckdb.connect()).limit(100_000).aggregate("sum(cents)").fetchall() == [(500_000,)]


def test_what_is_built_in_memory_is_counted_first(client: persist.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplicity.MOST_ROWS == 10**8
    monkeypatch.setattr(multiplicity, "MOST_ROWS", 1000)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([*rows((1, 5), _diff=1000), *rows((2, 6))], 0, 1)
    with client.open_reader("s") as read, read.snapshot() as found:
        for build in (
            found.to_arrow,
            found.to_pandas,
            found.to_polars,
            found.to_pylist,
            lambda: found.to_models(Order),
        ):
            with pytest.raises(persist.InvalidUsage, match=r"1,001 rows, and at most 1,000 .* diff=True"):
                build()
        (split,) = found.splits(1)
        with pytest.raises(persist.InvalidUsage, match="diff=True"):
            split.to_arrow(client.blob)
        assert len(found.to_reader().read_all()) == 1001, "a stream has no limit"
        assert read.snapshot(key=(1,)).to_arrow().num_rows == 1000


def test_sums_beyond_64_bits_stream_too() -> None:
    table = pa.table({"id": [1, 2, 3], "_diff": [2**63 - 1, 2**63 - 1, 5]})
    first = next(multiplicity.repeated([table], "it"))
    assert set(first.column("id").to_pylist()) == {1}
    with pytest.raises(persist.InvalidUsage, match=f"{2**64 + 3:,} rows"):
        multiplicity.built(table, "it")


@pytest.mark.parametrize("diffs", [[], [1, 1, 1], [3], [70_000, 1, 200_000], [1] * 5 + [2] + [1] * 5])
def test_rows_come_in_order_in_tables_of_at_most_64k(diffs: list[int]) -> None:
    table = pa.table({"id": pa.array(range(len(diffs)), pa.int64()), "_diff": pa.array(diffs, pa.int64())})
    expected = [row for row, diff in enumerate(diffs) for _ in range(diff)]
    found = list(multiplicity.repeated([table], "it"))
    assert [row for one in found for row in one.column("id").to_pylist()] == expected
    assert all(one.num_rows <= 1 << 16 for one in found)
    assert multiplicity.built(table, "it").column("id").to_pylist() == expected
    assert multiplicity.built(table.select(["_diff"]), "it").num_rows == len(expected)


def test_a_filter_on_diff_is_one_on_what_diff_gives(client: persist.Client) -> None:
    for found in shard(client):
        with pytest.raises(persist.InvalidUsage, match="diff=True"):
            client.open_reader("s").snapshot(filter=pc.field("_diff") > 1)
        with pytest.raises(Exception, match="_diff"):
            found.to_duckdb(duckdb.connect()).filter("_diff > 1").fetchall()
    with client.open_reader("s") as read, read.snapshot(diff=True) as found:
        assert found.to_duckdb(duckdb.connect()).filter("_diff > 1").fetchall() == [(1, 100, 3)]
        assert found.scan_polars().filter(pl.col("_diff") > 1).collect().rows() == [(1, 100, 3)]


def test_the_contents_of_a_pending_area_are_rows_too() -> None:
    area = Area(World(), schema=SCHEMA)
    area.writer("w").put(rows(*BAG, _time=0), 0, 1)
    assert Counter(tuple(row.values()) for row in area.reader.contents(0).to_pylist()) == Counter(BAG)
    assert area.reader.contents(0, diff=True).column("_diff").to_pylist() == [3, 1, 1]
    area.world.close()


def test_an_upsert_of_a_source_takes_every_one_of_equal_rows_away(client: persist.Client) -> None:
    for _ in collection(client):
        controller = client.controller()
        target = Target(controller, controller.catalog.fetch().find("c").id, "test")
        new = pa.Table.from_pylist(
            [{"id": 1, "cents": 5, "_time": 9}], SCHEMA.data.append(SCHEMA.updates.field("_time"))
        )
        changes = upserted(SCHEMA, new, np.zeros(1, np.bool_), partial(target.lookup, as_of=0))
        assert [(row["cents"], row["_diff"]) for row in changes.to_pylist()] == [(5, 1), (100, -3)]
        assert target.snapshot(0).to_arrow().num_rows == 5
        target.close()
