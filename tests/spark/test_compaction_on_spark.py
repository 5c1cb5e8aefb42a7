"""Compaction on a real Spark: the same contents, whoever fails, races or is damaged."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

import persist_lib as persist
import persist_lib.spark
from jobs.compact import compact_shards
from jobs.engine import SparkEngine, engine_for
from jobs.stop import Stop
from persist_lib.core.plan.clusters import are_apart, by_name
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.location.api import Blob
from persist_lib.maintain.merge_tasks import run_task
from tests.spark.collections import SMALL, check, damage_a_part, referred, stored, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


def on_spark(client: persist.Client, shards: list[str], engine: SparkEngine) -> dict[str, Exception | None]:
    """Compact by this engine; answers each shard's error."""
    return {one.shard: one.error for one in compact_shards(client, shards, engine="spark", spark=engine)}


def test_spark_and_local_compaction_leave_what_the_model_says(client: persist.Client, spark: SparkSession) -> None:
    model = write(client, "by_spark", seed=1)
    write(client, "by_hand", seed=1)
    engine = SparkEngine(client, lambda: spark)
    assert on_spark(client, ["by_spark"], engine) == {"by_spark": None}
    client.compact("by_hand")
    assert engine.tasks_run > 2
    check(client, "by_spark", model)
    check(client, "by_hand", model)
    states = [client.inspect(name).state for name in ("by_spark", "by_hand")]
    assert states[0].fingerprint == states[1].fingerprint
    assert [len(state.trace) for state in states] == [1, 1]
    parts = states[0].trace[0].parts
    assert all(one.key_upper < other.key_lower for one, other in pairwise(parts))


def test_contents_are_kept_ahead_by_spark_and_read_there(tmp_path: Path, spark: SparkSession) -> None:
    config = persist.Config(**{**SMALL, "compaction_ahead": 0.05})
    with persist.open(f"file:{tmp_path}/ahead", config=config) as client:
        model = write(client, "s", batches=6, seed=4)
        engine = SparkEngine(client, lambda: spark)
        assert on_spark(client, ["s"], engine) == {"s": None}
        kept = client.inspect("s").state.contents
        assert kept is not None
        assert (kept.since, len(kept.parts) > 1) == (persist.at(5), True)
        check(client, "s", model)
        persist_lib.spark.register(spark)
        for as_of in (3, 5):
            options = {"location": client.url, "table": "s", "as_of": as_of, "diff": "true"}
            rows = spark.read.format("persist").options(**options).load().collect()
            assert {(row.k, row.v): row["_diff"] for row in rows} == model.contents(as_of)


def test_what_spark_compacts_is_in_clusters_where_a_rule_says_so(client: persist.Client, spark: SparkSession) -> None:
    rng, schema = np.random.default_rng(3), persist.Schema({"k": "int64"}, {"made": "date32", "v": "string"})
    client.set_rules([{"pattern": "s", "cluster": "made"}])
    write, read = client.open_shard("s", schema)
    for at in range(8):
        if at == 4:
            assert on_spark(client, ["s"], SparkEngine(client, lambda: spark)) == {"s": None}
        made = pa.array(rng.integers(0, 500, 4000), pa.int32()).cast(pa.date32())
        rows = {
            "k": rng.integers(0, 10**9, 4000),
            "made": made,
            "v": [f"{one:x}" for one in rng.integers(0, 10**9, 4000)],
        }
        write.compare_and_append(pa.table(rows), at, at + 1)
    before = read.snapshot(7).to_arrow()
    engine = SparkEngine(client, lambda: spark)
    errors = compact_shards(client, ["s"], engine="spark", spark=engine, policy=Policy(cluster="made", weight=1e9))
    assert [one.error for one in errors] == [None]
    state = client.inspect("s").state
    assert engine.tasks_run > 1
    assert are_apart(state.trace[0], state.schemas, by_name([schema], "made"))
    assert read.snapshot(7).to_arrow() == before
    day = dt.date(1970, 3, 1)
    with read.snapshot(7, filter=pc.field("made") == day) as found:
        assert found.to_arrow() == before.filter(pc.equal(before["made"], day))
    persist_lib.spark.register(spark)
    frame = spark.read.format("persist").options(location=client.url, table="s").load()
    assert frame.where(frame.made == day).count() == found.to_arrow().num_rows
    assert not client.scrub("s").damaged


def test_a_task_that_dies_after_writing_is_tried_again_and_leaves_only_orphans(
    client: persist.Client, spark: SparkSession
) -> None:
    model = write(client, "s", seed=3)

    def dies_once(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        result = run_task(task, blob, entropy)
        context = TaskContext.get()
        if context is None or context.attemptNumber() == 0:
            raise OSError("the disk of this executor is gone")
        return result

    assert on_spark(client, ["s"], SparkEngine(client, lambda: spark, dies_once)) == {"s": None}
    check(client, "s", model)
    orphans = client.audit_orphans("s", dry_run=True).orphans
    assert orphans
    client.maintain("s")
    assert stored(client, "s") == referred(client, "s")
    check(client, "s", model)


def test_one_application_compacts_many_shards_and_a_poisoned_one_stops_no_other(
    client: persist.Client, spark: SparkSession, folder: Path
) -> None:
    names = [f"s{i}" for i in range(6)]
    models = {name: write(client, name, batches=4, seed=i) for i, name in enumerate(names)}
    victim, before = damage_a_part(folder, "s3"), client.inspect("s3").state.trace
    errors = on_spark(client, names, SparkEngine(client, lambda: spark))
    assert [name for name in names if errors[name]] == ["s3"]
    assert isinstance(errors["s3"], persist.Corrupt)
    assert victim.name in str(errors["s3"])
    assert client.inspect("s3").state.trace == before
    for name in names:
        if name != "s3":
            assert client.census(name).batches == 1
            check(client, name, models[name])


def test_small_debts_never_start_spark(client: persist.Client) -> None:
    model = write(client, "small", rows=20)

    def no_session() -> SparkSession:
        raise AssertionError("Spark was asked for")

    outcomes = list(compact_shards(client, ["small"], no_session, engine="auto"))
    assert [one.error for one in outcomes] == [None]
    assert client.census("small").batches == 1
    check(client, "small", model)


def test_a_location_in_memory_is_refused_at_once() -> None:
    with persist.open("memory:") as client, pytest.raises(persist.InvalidUsage, match="Spark cannot reach"):
        SparkEngine(client, lambda: pytest.fail("Spark was asked for"))


def test_a_consumer_that_stops_cancels_what_runs(client: persist.Client, spark: SparkSession) -> None:
    models = {name: write(client, name, batches=4, rows=20) for name in ("quick", "slow")}

    def slow(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        import time  # noqa: PLC0415 - runs in another process

        time.sleep(0 if task.shard == "quick" else 100)
        return run_task(task, blob, entropy)

    engine = SparkEngine(client, lambda: spark, slow)
    outcomes = compact_shards(client, ["quick", "slow"], engine="spark", spark=engine, in_flight=2)
    assert next(outcomes).shard == "quick"
    started = time.monotonic()
    outcomes.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 50
    assert [client.census(name).batches for name in models] == [1, 4]
    assert client.census("slow").writers == 0
    for name, model in models.items():
        check(client, name, model)


def test_a_stop_ends_the_python_workers_too_and_the_session_stays_usable(
    client: persist.Client, spark: SparkSession, tmp_path: Path
) -> None:
    model = write(client, "s")
    mark = str(tmp_path / "mark")

    def beats(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        import pathlib  # noqa: PLC0415 - runs in another process
        import time  # noqa: PLC0415 - runs in another process

        for _ in range(1000):
            pathlib.Path(mark).touch()
            time.sleep(0.1)
        raise AssertionError("it was not stopped")

    stop = Stop()
    engine = SparkEngine(client, lambda: spark, beats, stop=stop)

    def stop_when_it_beats() -> None:
        while not Path(mark).exists():
            time.sleep(0.05)
        stop.set()

    threading.Thread(target=stop_when_it_beats, daemon=True).start()
    with pytest.raises(persist.Determinate, match="stopped"):
        list(compact_shards(client, ["s"], engine="spark", spark=engine, stop=stop))
    stopped = time.time()
    while time.time() - Path(mark).stat().st_mtime < 1.0:
        time.sleep(0.1)
    assert Path(mark).stat().st_mtime - stopped < 5
    assert client.census("s").writers == 0
    assert on_spark(client, ["s"], SparkEngine(client, lambda: spark)) == {"s": None}
    check(client, "s", model)


def test_progress_is_told_as_tasks_finish_and_the_job_is_named_by_its_shard(
    client: persist.Client, spark: SparkSession
) -> None:
    write(client, "s", rows=8000)

    def slow(task: MergeTask, blob: Blob, entropy: Callable[[], int]) -> TaskResult:
        import time  # noqa: PLC0415 - runs in another process

        time.sleep(1.0)
        return run_task(task, blob, entropy)

    told: list[tuple[str, int, int]] = []
    engine = SparkEngine(client, lambda: spark, slow)
    client.compact("s", engine=engine_for(client, "s", "spark", engine, lambda *said: told.append(said)))
    total = told[0][2]
    assert total >= 4
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert (told[0][1], told[-1][1]) == (0, total)
    assert any(0 < done < total for _, done, _ in told), told
    assert "compacting" in told[0][0]
    assert told[0][0].endswith("on Spark")
    assert engine.slots() == 2


def test_evolved_columns_are_read_written_and_compacted_on_spark(
    client: persist.Client, spark: SparkSession, folder: Path
) -> None:
    """What was renamed, widened, dropped or has a default is the same through Spark and after its compaction."""
    first = persist.Schema(
        {"id": "int64"},
        {"state": "string", "cents": "int32", "seen": "date32", "at": "struct<a: int32, b: list<struct<c: string>>>"},
        times="ms",
    )
    at = "struct<a: int64, b: list<struct<c: string, d: float64>>, e: string>"
    now = (
        first.rename({"state": "status"}).widen({"cents": "int64", "at": at}).drop("seen")
        .add({"via": "string"}, {"via": "web"})
    )  # fmt: skip
    table = client.table("evolved", first)
    old = client.open_writer("evolved", first)
    there = {"a": 1, "b": [{"c": "x"}, None]}
    for n in range(3):
        some = range(n, 3_000, 3)
        table.append([{"id": id_, "state": str(id_ % 7), "cents": id_, "seen": None, "at": there} for id_ in some])
    table.evolve(now)
    more: dict[str, Any] = {"a": 2**40, "b": [{"c": None, "d": 0.1}], "e": ""}
    table.upsert([{"id": 7, "cents": 2**40, "via": "shop", "at": more}])
    old.apply([{"id": 9, "state": "old", "cents": 1, "seen": dt.date(2026, 1, 1), "at": there}])
    persist_lib.spark.register(spark)
    place = {"location": client.url, "table": "evolved"}
    kind = "struct<a: long, b: array<struct<c: string, d: double>>, e: string>"
    columns = f"id long, status string, cents long, at {kind}, via string"
    frame = spark.createDataFrame([(8, "spark", 5, more, "tv")], columns)
    frame.write.format("persist").options(**place, upsert="true").mode("append").save()
    want = table.read().to_pylist()
    there = {"a": 1, "b": [{"c": "x", "d": None}, None], "e": None}
    assert want[7] == {"id": 7, "status": "0", "cents": 2**40, "at": more, "via": "shop"}
    assert want[8] == {"id": 8, "status": "spark", "cents": 5, "at": more, "via": "tv"}
    assert want[9] == {"id": 9, "status": "old", "cents": 1, "at": there, "via": "web"}

    def on_spark_now() -> list[dict[str, Any]]:
        read = spark.read.format("persist").options(**place)
        found = sorted((row.asDict(recursive=True) for row in read.load().collect()), key=lambda row: row["id"])
        assert [row.id for row in read.load().filter("at.e = ''").orderBy("id").collect()] == [7, 8]
        assert [row.id for row in read.load().filter("cents > 1000000").collect()] == [7]
        assert read.load().filter("via = 'web'").count() == len(want) - 2
        return found

    assert on_spark_now() == want
    before = client.inspect("evolved").state.fingerprint
    assert on_spark(client, ["evolved"], SparkEngine(client, lambda: spark)) == {"evolved": None}
    assert client.census("evolved").batches == 1
    assert client.inspect("evolved").state.fingerprint == before
    assert on_spark_now() == table.read().to_pylist() == want
    assert not client.scrub("evolved").damaged
    with client.controller() as controller:
        controller.create("many", first, shards=2, mode="compare_and_append")
        controller.evolve("many", now)
    frame.write.format("persist").options(location=client.url, table="many", upsert="true").mode("append").save()
    assert client.table("many").read().to_pylist() == [want[8]]
