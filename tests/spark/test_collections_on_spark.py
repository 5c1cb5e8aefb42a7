"""Collections in Spark itself: frames, scans, SQL and streams, across a handover, with the tasks in other processes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

import persist_lib as persist
from persist_lib.spark import create_view, register, scan
from persist_lib.testing import contents_of
from tests.spark.ending import ended
from tests.unit.spark.test_collections import Told

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def source(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


@pytest.fixture
def world(client: persist.Client) -> Told:
    made, rng = Told(client), random.Random(3)
    made.append(rng, 50, times=2, negative=False)
    made.hand_over(2, drop=7)
    made.append(rng, 50, negative=False)
    return made


def multiset(frame: DataFrame) -> Counter[Any]:
    return Counter(tuple(row) for row in frame.collect())


def load(spark: SparkSession, client: persist.Client, **options: Any) -> DataFrame:
    given = {"location": client.url, "table": "orders", **options}
    return spark.read.format("persist").options(**given).load()


def test_frames_scans_views_and_functions_have_what_the_account_says(
    source: SparkSession, client: persist.Client, world: Told
) -> None:
    last = world.upper - 1
    for as_of in range(world.upper):
        assert multiset(load(source, client, as_of=as_of)) == world.contents(as_of)
        frame = scan(source, "orders", location=client.url, as_of=as_of)
        assert multiset(frame) == world.contents(as_of)
    moved = multiset(load(source, client, changes="true").select("a", "b", "v", "_time", "_diff"))
    assert moved == Counter({(*data, at, n): 1 for (data, at), n in world.changes(None, last).items()})
    some = load(source, client, columns="b,a", filter="a > 20").filter(col("b") == "x")
    assert multiset(some) == Counter({
        (b, a): sum(n for (c, d, _), n in world.contents(last).items() if (c, d) == (a, b))
        for a, b, _ in world.contents(last) if b == "x" and a > 20
    })  # fmt: skip
    view = create_view(source, "orders_then", "orders", location=client.url, as_of=1)
    world.append(random.Random(1), 10, negative=False)
    assert multiset(source.sql("SELECT * FROM orders_then")) == world.contents(1) == multiset(view)
    joined = source.sql("SELECT count(*) AS n FROM orders_then JOIN orders_then AS other USING (a, b, v)").collect()
    assert joined[0].n == sum(n * n for data, n in world.contents(1).items() if None not in data)
    source.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW orders_now USING persist OPTIONS (location '{client.url}', table 'orders')"
    )
    assert multiset(source.sql("SELECT * FROM orders_now")) == world.contents(world.upper - 1)
    asked = f"persist_as_of(table => 'orders', as_of => '1', location => '{client.url}')"
    assert multiset(source.sql(f"SELECT * FROM {asked}")) == world.contents(1)


def test_a_stream_goes_on_from_its_checkpoint_after_handovers(
    source: SparkSession, client: persist.Client, world: Told, tmp_path: Path
) -> None:
    """A query reads until it has all, is stopped, and is started again after a handover and a retention of nothing."""
    seen: dict[int, Counter[Any]] = {}

    def sink(frame: DataFrame, epoch: int) -> None:
        found = multiset(frame.select("a", "b", "v", "_diff"))
        assert seen.setdefault(epoch, found) == found, "an epoch is another when it is repeated"

    def run() -> None:
        options: dict[str, Any] = {
            "location": client.url,
            "table": "orders",
            "changes": "true",
            "hold": "sums",
            "max_updates": 40,
        }
        frame = source.readStream.format("persist").options(**options).load()
        ended(
            frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )  # fmt: skip

    def total() -> Counter[Any]:
        found: Counter[Any] = Counter()
        for batch in seen.values():
            for (*data, diff), count in batch.items():
                found[tuple(data)] += diff * count
        return Counter({data: n for data, n in found.items() if n})

    run()
    assert total() == world.contents(world.upper - 1)
    rng = random.Random(9)
    world.controller.alter("orders", retention=0)
    world.append(rng, 60, times=2)
    world.hand_over(4, drop=11)
    world.append(rng, 60)
    world.controller.tend("orders")
    run()
    assert total() == world.contents(world.upper - 1)
    count = len(seen)
    run()
    assert len(seen) == count, "nothing is new"
    world.append(rng, 5)
    run()  # Spark says that a batch is done when it plans the next one
    assert total() == world.contents(world.upper - 1)
    world.controller.tend("orders")
    assert [one.number for one in world.controller.describe("orders").renditions] == [3], "nobody needs the others"


def test_batches_are_written_in_all_modes_by_many_tasks(source: SparkSession, client: persist.Client) -> None:
    given = {"location": client.url, "table": "sums", "key": "id", "shards": "3", "times": "none"}

    def save(frame: DataFrame, mode: str = "append", **options: str) -> None:
        frame.repartition(4).write.format("persist").options(**given, **options).mode(mode).save()

    def now() -> dict[int, int]:
        frame = source.read.format("persist").options(location=client.url, table="sums").load()
        return {row.id: row.n for row in frame.collect()}

    save(source.range(1_000).selectExpr("id", "id % 7 AS n"))
    assert now() == {i: i % 7 for i in range(1_000)}
    save(source.range(500, 1_500).selectExpr("id", "CAST(-1 AS BIGINT) AS n"), upsert="true")
    assert now() == {i: i % 7 if i < 500 else -1 for i in range(1_500)}
    save(source.range(10).selectExpr("id", "id AS n"), "overwrite")
    assert now() == {i: i for i in range(10)}
    with client.controller() as controller:
        assert len(controller.describe("sums").active.shards) == 3
        assert controller.describe("sums").upper == persist.at(3)
    with pytest.raises(PySparkException, match=r"table sums has no column 'm'"):
        save(source.range(3).selectExpr("id", "id AS m"))


def test_a_stream_into_a_collection_is_exactly_once_across_its_handovers(
    source: SparkSession, client: persist.Client, world: Told, tmp_path: Path
) -> None:
    """From one collection into another, while both are handed over."""

    def run() -> None:
        frame = (
            source.readStream.format("persist")
            .options(location=client.url, table="orders", changes="true", hold="copy", max_updates="40").load()
        )  # fmt: skip
        ended(
            frame.select("a", "b", "v", "_diff").writeStream.format("persist")
            .options(location=client.url, table="copy", key="a,b", shards="2", query="copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        )  # fmt: skip

    def copied() -> Counter[Any]:
        with client.controller() as controller, controller.open_reader("copy") as reader:
            return contents_of(reader.snapshot(diff=True).to_arrow())

    run()
    assert copied() == world.contents(world.upper - 1)
    rng = random.Random(4)
    world.append(rng, 60, times=2, negative=False)
    world.hand_over(3, drop=5)
    with client.controller() as controller:
        made = controller.make_rendition("copy", shards=4, copy=True).number
        controller.copy_rendition("copy", made)
        controller.hand_over("copy", made, advance=True)
        run()
        controller.copy_rendition("copy", made, to_end=True)
    assert copied() == world.contents(world.upper - 1)
    run()
    assert copied() == world.contents(world.upper - 1), "nothing is new, and nothing is written twice"
