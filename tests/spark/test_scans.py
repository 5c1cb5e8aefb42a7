"""`persist_lib.spark.scan` on a real Spark, beside the library's own reads and beside `format("persist")`."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession

import persist_lib as persist
import persist_lib.spark
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.spark.options import as_texts
from tests.unit.spark.worlds import World

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


@pytest.fixture
def spark(spark: SparkSession) -> SparkSession:
    persist_lib.spark.register(spark)
    return spark


def scanned(spark: SparkSession, client: persist.Client, shard: str = "orders", **options: object) -> DataFrame:
    return persist_lib.spark.scan(spark, shard, location=client.url, **options)


def loaded(spark: SparkSession, client: persist.Client, shard: str = "orders", **options: object) -> DataFrame:
    return spark.read.format("persist").options(location=client.url, **as_texts({"table": shard, **options})).load()


def multiset(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in frame.collect())


@pytest.mark.parametrize("seed", range(3))
def test_any_history_is_scanned_as_the_account_says(spark: SparkSession, client: persist.Client, seed: int) -> None:
    rng, world = random.Random(seed), World(client)
    for _ in range(rng.randrange(2, 6)):
        world.append(rng, rng.randrange(1, 4000), times=rng.randrange(1, 4))
        if rng.random() < 0.5:
            client.compact("orders")
    at = rng.randrange(world.upper)
    cut: dict[str, Any] = {"partition_bytes": 65536} if seed % 2 else {}
    found = multiset(scanned(spark, client, diff=True, as_of=at, **cut))
    assert found == Counter({(*data, n): 1 for data, n in world.contents(at).items()})
    some = multiset(scanned(spark, client, diff=True, columns=["v", "a"], filter="a > 10 AND b = 'x'", **cut))
    whole = world.contents(world.upper - 1).items()
    assert some == Counter((v, a, n) for (a, b, v), n in whole if a > 10 and b == "x")
    updates = multiset(scanned(spark, client, **{**cut, "from": at}))
    assert updates == Counter({(*data, t, n): 1 for (data, t), n in world.changes(at, world.upper - 1).items()})


def test_rows_come_as_often_as_they_are_there(spark: SparkSession, client: persist.Client) -> None:
    with client.open_writer("rows", persist.Schema({"a": "int64"})) as writer:
        writer.compare_and_append([{"a": i, "_diff": 1 + i % 3} for i in range(10)], 0, 1)
    frame = scanned(spark, client, "rows")
    assert multiset(frame) == Counter({(i,): 1 + i % 3 for i in range(10)})
    assert frame.count() == sum(1 + i % 3 for i in range(10)), "again, and without any column"


VALUES: dict[str, Any] = {
    "bool": True, "int8": -8, "int16": 16, "int32": -32, "int64": 64, "uint8": 255, "uint16": 65535,
    "uint32": 2**32 - 1, "uint64": 2**64 - 1, "float32": 0.5, "float64": -2.5, "string": "é", "binary": b"\x00\xff",
    "fixed_size_binary[4]": b"abcd", "date32": dt.date(1969, 12, 31), "time64[us]": dt.time(23, 59, 59, 999999),
    "timestamp[us, UTC]": dt.datetime(1969, 12, 31, 23, 59, 59, 1, dt.UTC),
    "timestamp[ns, UTC]": dt.datetime(2026, 1, 1, 0, 0, 0, 1, dt.UTC),
    "timestamp[us]": dt.datetime(2026, 3, 29, 2, 30),  # noqa: DTZ001 - of no zone
    "duration[us]": dt.timedelta(days=-3, microseconds=1),
    "decimal128(38, 9)": Decimal("-123456789012345678901234567.123456789"),
    "list<uint8>": [1, None, 255], "list<float32>[2]": [0.5, None], "list<timestamp[us, Europe/Berlin]>":
    [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)], "struct<a: int64, b: list<struct<c: decimal128(5, 2)>>>":
    {"a": 1, "b": [{"c": Decimal("1.50")}, None]}, "map<string, list<uint64>>": {"x": [2**64 - 1], "y": None},
}  # fmt: skip


def test_every_type_is_scanned_as_the_source_reads_it(spark: SparkSession, client: persist.Client) -> None:
    names = {kind: f"c{number}" for number, kind in enumerate(VALUES)}
    schema = persist.Schema({"k": "int64"}, {name: kind for kind, name in names.items()})
    with client.open_writer("types", schema) as writer:
        full = {name: VALUES[kind] for kind, name in names.items()}
        writer.compare_and_append([{"k": 1, **full}, {"k": 2, **dict.fromkeys(full)}], 0, 1)
    ours, theirs = scanned(spark, client, "types"), loaded(spark, client, "types")
    assert ours.schema == theirs.schema
    assert ours.orderBy("k").collect() == theirs.orderBy("k").collect()
    [one, two] = ours.orderBy("k").collect()
    assert one.c0 is True
    assert one[f"{names['uint64']}"] == 2**64 - 1
    assert set(two[1:]) == {None}
    assert one[names["list<uint8>"]] == [1, None, 255]
    assert one[names["map<string, list<uint64>>"]] == {"x": [2**64 - 1], "y": None}
    nested = names["struct<a: int64, b: list<struct<c: decimal128(5, 2)>>>"]
    assert one[nested].asDict(recursive=True) == {"a": 1, "b": [{"c": Decimal("1.50")}, None]}


def test_nested_rows_are_written_and_read_again(spark: SparkSession, client: persist.Client) -> None:
    """As a DataFrame makes them, by its own types."""
    made = spark.sql(
        "SELECT id, CASE WHEN id % 3 > 0 THEN sequence(0, id) END AS l, named_struct('a', id, 'b', map('k', id)) AS s, "
        "array(map(id, array(CAST(id AS DECIMAL(10, 2))))) AS d FROM range(50)"
    )
    made.write.format("persist").options(location=client.url, table="nested", key="id").mode("append").save()
    assert sorted(map(str, loaded(spark, client, "nested").collect())) == sorted(map(str, made.collect()))
    assert client.table("nested").read(filter=pc.field("id") == 4).to_pylist() == [
        {"id": 4, "l": [0, 1, 2, 3, 4], "s": {"a": 4, "b": {"k": 4}}, "d": [{4: [Decimal("4.00")]}]}
    ]


def test_spark_knows_how_large_it_is(spark: SparkSession, client: persist.Client) -> None:
    """A shard that is not small is not broadcast, and one that is, is. Each of many slices is read once."""
    schema = persist.Schema({"k": "int64"}, {"v": "int64"})
    for name, rows in (("small", 1000), ("large", 300_000)):
        with client.open_writer(name, schema) as writer:
            table = pa.table({"k": range(rows), "v": [0] * rows})
            writer.compare_and_append(table, 0, 1)
    small, large = scanned(spark, client, "small"), scanned(spark, client, "large", partition_bytes=65536)
    assert large.rdd.getNumPartitions() > 2
    assert tuple(large.selectExpr("count(*)", "sum(k)", "count(DISTINCT k)").collect()[0]) == (
        300_000,
        44_999_850_000,
        300_000,
    )
    assert sizes(small) == 1000 * (8 + 16)
    assert 300_000 * 24 <= sizes(large) <= 1.01 * 300_000 * 24
    text = persist.Schema({"k": "int64"}, {"v": "string"})
    with client.open_writer("long", text) as writer:
        rows_of = [{"k": k, "v": "".join(random.Random(k).choices("abcdefghijkl", k=20_000))} for k in range(100)]
        writer.compare_and_append(rows_of, 0, 1)
    assert sizes(scanned(spark, client, "long")) >= client.inspect("long").state.trace[0].parts[0].size
    assert small.join(large, "k").count() == 1000


def sizes(frame: DataFrame) -> int:
    """How large Spark takes it to be, in bytes."""
    return int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def test_it_is_of_one_time_and_goes_on_when_its_parts_are_gone(spark: SparkSession, client: persist.Client) -> None:
    rng, world = random.Random(5), World(client)
    for _ in range(4):
        world.append(rng, 2000)
    frame = scanned(spark, client, diff=True, read_only=True)
    expected = Counter({(*data, n): 1 for data, n in world.contents(3).items()})
    before = {key for batch in client.inspect("orders").state.trace for key in batch.keys}
    world.append(rng, 10)
    client.compact("orders", policy=persist.Policy(weight=1e9))
    client.maintain("orders")
    after = {key for batch in client.inspect("orders").state.trace for key in batch.keys}
    assert not before & after
    assert multiset(frame) == expected


def test_what_cannot_be_scanned_is_refused_at_once(spark: SparkSession, client: persist.Client) -> None:
    with client.open_writer("empty", persist.Schema({"a": "int64"})):
        pass
    assert scanned(spark, client, "empty").collect() == []
    assert scanned(spark, client, "empty").schema == loaded(spark, client, "empty").schema
    for options, said in (
        ({"pushdown": True}, "no option pushdown"), ({"PushDown": False}, "no option pushdown"),
        ({"as_off": 1}, "Did you mean as_of"), ({"columns": []}, "a list of names"), ({"columns": "b"}, "no column"),
        ({"filter": ""}, "is empty"), ({"max_bytes": 1}, "no option 'max_bytes'"),
    ):  # fmt: skip
        with pytest.raises((InvalidUsage, SchemaMismatch), match=said):
            scanned(spark, client, "empty", **options)
    with pytest.raises(InvalidUsage, match="table"):
        persist_lib.spark.scan(spark, 7, location=client.url)  # type: ignore[arg-type]
