"""One name, whatever carries the table: batches, streams and writes of Spark have what `Table` has, without a JVM."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as t

import persist_lib as persist
from persist_lib.client import timelines_of
from persist_lib.spark import timeline_rows
from persist_lib.timeline.tables import Tables
from tests.carriers import CARRIERS, SCHEMA
from tests.unit.spark.test_writes import Driver, _fresh
from tests.unit.spark.worlds import Stream, load, read, source

__all__ = ["_fresh"]
FRAME = t.StructType([
    t.StructField("id", t.LongType(), False), t.StructField("seq", t.LongType()), t.StructField("word", t.StringType()),
])  # fmt: skip
GONE = t.StructType([*FRAME, t.StructField("gone", t.BooleanType(), False)])
TIMELINES = ["direct", "wal"]
Rows = Counter[Any]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(params=CARRIERS)
def table(request: pytest.FixtureRequest, client: persist.Client) -> persist.Table:
    CARRIERS[request.param](client)
    return client.table("t")


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "data", table="t", times="ms")


def row(id_: int, seq: int = 1, word: str | None = "w") -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": word}


def counted(found: Any) -> Rows:
    return Counter(tuple(row.values()) for row in (found.to_pylist() if found is not None else []))


def loaded(client: persist.Client, **options: Any) -> Rows:
    return counted(load(client, table="t", **options))


def test_a_batch_reads_what_the_table_has(client: persist.Client, table: persist.Table) -> None:
    assert loaded(client) == loaded(client, changes="true") == Counter()
    first, second = table.append([row(1), row(2)]), table.upsert([row(2, 2), row(3)])
    assert first.time is not None
    assert second.time is not None
    assert loaded(client) == loaded(client, as_of="now") == counted(table.read())
    assert loaded(client, as_of=str(first.time)) == counted(table.read(first.time))
    assert loaded(client, as_of=str(first.time - 1)) == Counter()
    between: dict[str, Any] = {"from": str(first.time), "to": "now"}
    moved = load(client, table="t", **between)
    assert moved is not None
    assert counted(moved.drop_columns(["_time"])) == counted(
        table.changes(first.time).to_arrow().drop_columns(["_time"])
    )
    assert loaded(client, columns="seq,id", filter="id >= 2") == Counter([(2, 2), (1, 3)])
    assert loaded(client, diff="true", filter="id = 1") == Counter([(1, 1, "w", 1)])
    with pytest.raises(persist.NotComplete):
        loaded(client, as_of="2400-01-01")
    assert loaded(client, as_of="2400-01-01", newest="true", timeout="0.1") == counted(table.read())


def test_a_stream_has_what_comes_once(client: persist.Client, table: persist.Table) -> None:
    seen: Rows = Counter()

    def take(_: int, found: pa.Table | None) -> None:
        for (*data, diff), count in counted(None if found is None else found.drop_columns(["_time"])).items():
            seen[tuple(data)] += diff * count

    query = Stream(client, take, table="t", changes="true", hold="etl")
    query.start()
    for number in range(3):
        table.upsert([row(1, number), row(10 + number)])
        while query.step():
            pass
        assert +seen == counted(table.read()), number
        query.start()
    assert "etl" in table.describe().holds


def test_batches_write_what_the_table_then_has(driver: Driver, table: persist.Table) -> None:
    driver.batch([[row(1), row(2)], [], [row(3)]], FRAME, times=2)
    assert counted(table.read()) == counted(pa.Table.from_pylist([row(1), row(2), row(3)]))
    driver.batch([[row(2, 5) | {"gone": False}], [row(3) | {"gone": True}]], GONE, upsert="true", deletes="gone")
    assert counted(table.read()) == counted(pa.Table.from_pylist([row(1), row(2, 5)]))
    with pytest.raises(persist.ConstraintViolated):
        driver.batch([[row(1, 9)]], FRAME)
    with pytest.raises(persist.InvalidUsage):
        driver.batch([[row(7, 1)], [row(7, 2)]], FRAME, upsert="true")
    driver.batch([[row(2, 5)], [row(8, 1, None)]], FRAME, overwrite=True)
    assert counted(table.read()) == counted(pa.Table.from_pylist([row(2, 5), row(8, 1, None)]))
    before = table.history()
    driver.batch([[row(8, 1, None), row(2, 5)]], FRAME, overwrite=True)
    assert loaded(table._carrier.client, as_of="now") == counted(table.read("now"))
    assert table.history() == before, "it is the same already"
    driver.batch([[]], FRAME, overwrite=True)
    assert table.count() == 0


@pytest.mark.parametrize("carrier", TIMELINES)
@pytest.mark.parametrize("options", [{"query": "q", "epoch": "1"}, {"at": "7"}, {"shards": "2"}], ids=str)
def test_what_a_timeline_cannot_do_on_spark_is_one_refusal(
    driver: Driver, client: persist.Client, carrier: str, options: dict[str, Any]
) -> None:
    CARRIERS[carrier](client)
    changes = t.StructType([*FRAME, t.StructField("_diff", t.LongType(), False)])
    for refused in (
        lambda: driver.batch([[row(1)]], FRAME, **options),
        lambda: driver.batch([[row(1) | {"_diff": 1}]], changes),
        lambda: driver.epoch(0, [[row(1)]], FRAME),
    ):
        with pytest.raises(persist.InvalidUsage, match=r"on a timeline, .*Nothing was written.*foreachBatch"):
            refused()
    assert client.table("t").count() == 0


def test_a_table_that_keeps_deleted_keys_leaves_late_rows_out(driver: Driver, client: persist.Client) -> None:
    CARRIERS["wal"](client)
    table = client.table("t")
    table.set_keep_deletes("seq", "1 day")
    options: dict[str, Any] = {"upsert": "true", "deletes": "gone"}
    driver.batch([[row(1, 5) | {"gone": False}], [row(2, 9) | {"gone": True}]], GONE, **options)
    driver.batch([[row(1, 4, "late") | {"gone": True}], [row(2, 8, "late") | {"gone": False}]], GONE, **options)
    driver.batch([[row(2, 9, "late")]], FRAME, upsert="true")
    assert table.read().to_pylist() == [row(1, 5)]
    with pytest.raises(persist.InvalidUsage, match="some have none"):
        driver.batch([[{"id": 1, "seq": None, "word": None, "gone": True}]], GONE, **options)
    driver.batch([[row(3, 1)]], FRAME, overwrite=True)
    assert table.apply([row(1, 5)]).unchanged == 1, "what an overwrite takes away is deleted at the value of its row"


def test_a_write_too_large_for_one_statement_is_refused(
    driver: Driver, client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    CARRIERS["wal"](client)
    monkeypatch.setattr(timeline_rows, "MOST_BYTES", 2_000)
    driver.batch([[row(1)]], FRAME)
    with pytest.raises(persist.InvalidUsage, match="Write them as several DataFrames"):
        driver.batch([[row(id_) for id_ in range(10, 400)]], FRAME)
    with pytest.raises(persist.InvalidUsage, match="Write them as several DataFrames"):
        driver.batch([[row(id_)] for id_ in range(10, 20)], FRAME)
    assert client.table("t").count() == 1


def test_who_may_only_read_is_told_what_the_shards_lack(client: persist.Client) -> None:
    CARRIERS["wal"](client)
    client.table("t").append([row(1)])
    with pytest.raises(persist.NotComplete, match="leave out read_only"):
        loaded(client, read_only="true")
    client.maintain()
    assert loaded(client, read_only="true") == Counter([(1, 1, "w")])


def test_a_name_that_was_dropped_is_made_again(driver: Driver, client: persist.Client) -> None:
    CARRIERS["shard"](client)
    client.table("t").append([row(1)])
    client.table("t").drop()
    driver.batch([[row(2)]], FRAME)
    assert client.table("t").carrier == "collection"
    assert loaded(client) == Counter([(2, 1, "w")])
    made = client.table("t").schema
    assert (made.names, made.times) == (SCHEMA.names, "ms")


@pytest.mark.parametrize("mode", TIMELINES)
@pytest.mark.parametrize("step", ["read", "apply", "lag"])
def test_what_is_committed_while_a_frame_is_planned_is_in_it_as_of_its_time_or_not(
    client: persist.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, step: str
) -> None:
    CARRIERS[mode](client)
    client.controller().tables().create("other", SCHEMA)
    original, rival = getattr(Tables, step), persist.open(tmp_path / "data")
    numbers, is_within = itertools.count(), list[None]()

    def with_rival(tables: Tables, *given: Any, **more: Any) -> Any:
        if is_within or tables.client is rival:
            return original(tables, *given, **more)
        is_within.append(None)
        rival.table("t").upsert([row(1, next(numbers)), row(10 + next(numbers))])
        answer = original(tables, *given, **more)
        rival.table("other").upsert([row(next(numbers))])
        rival.table("t").upsert([row(1, next(numbers))])
        is_within.pop()
        return answer

    with rival:
        monkeypatch.setattr(Tables, step, with_rival)
        for _ in range(3):
            before = client.table("t").upsert([row(50, next(numbers))]).time
            made = source(client, "t")
            reader: Any = made.reader(made.schema())
            as_of = made._table.section.as_of
            assert before is not None
            assert before <= as_of, "what was acknowledged is in it"
            with_rival(timelines_of(client), "t") if step == "read" else None
            found = counted(read(reader, reader.partitions()))
            with rival.table("t").read(as_of) as then:
                assert found == counted(then)
