"""The other programs on many shards, and what executors elsewhere are sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs import audit, scrub
from jobs.engine import EngineName
from jobs.parallel import Outcome
from jobs.session import SparkSettings, ship, spark_conf
from persist_lib.maintain import Verified
from tests.spark.collections import SCHEMA, check, damage_a_part, parts_of, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


def damaged(outcomes: Iterable[Outcome[Verified]]) -> dict[str, tuple[tuple[tuple[int, int], str], ...]]:
    """What was found, by shard."""
    found = {}
    for outcome in outcomes:
        assert outcome.done is not None, outcome.error
        assert outcome.done.scrubbed is not None
        found[outcome.shard] = outcome.done.scrubbed.damaged
    return found


def test_the_scrub_reads_all_shards_on_spark_and_names_the_damaged_one(
    client: persist.Client, spark: SparkSession, folder: Path
) -> None:
    for i, name in enumerate(("a", "b", "c")):
        write(client, name, batches=2, rows=500, seed=i)
    assert damaged(scrub.scrub_shards(client, ["a", "b", "c"], lambda: spark, engine="spark")) == dict.fromkeys(
        "abc", ()
    )
    victim = damage_a_part(folder, "b")
    min(parts_of(folder, "c")).unlink()
    found = damaged(scrub.scrub_shards(client, ["a", "b", "c"], lambda: spark, engine="spark"))
    assert found["a"] == ()
    for name in ("b", "c"):
        assert found[name] == client.scrub(name).damaged, "wherever it is read, it is judged the same"
    ((_, said),) = found["b"]
    assert victim.name in said
    assert len(found["c"]) == 1, "a part that is gone"


def test_only_large_shards_are_scrubbed_on_spark_unless_the_engine_says_otherwise(client: persist.Client) -> None:
    write(client, "large", batches=4, rows=4000)
    write(client, "small", batches=1, rows=10)
    asked: list[str] = []

    def sessions() -> SparkSession:
        asked.append("started")
        return cast("SparkSession", Here(lambda: None))

    for shard, engine, is_asked in (
        ("small", "auto", False), ("large", "auto", True), ("small", "spark", True), ("large", "local", False),
    ):  # fmt: skip
        asked.clear()
        found = damaged(scrub.scrub_shards(client, [shard], sessions, engine=cast("EngineName", engine)))
        assert found == {shard: ()}
        assert bool(asked) is is_asked, (shard, engine)


class Here:
    """A session that runs its tasks in this process, after `first`."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._first, self._tasks = first, 0

    def addTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        pass

    def range(self, start: int, end: int, step: int, parts: int) -> Here:
        self._tasks = end
        return self

    def mapInArrow(self, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], ddl: str) -> Here:  # noqa: N802
        self._first()
        self._found = pa.Table.from_batches(work(iter([pa.record_batch({"id": range(self._tasks)})])))
        return self

    def toArrow(self) -> pa.Table:  # noqa: N802
        return self._found


def test_a_batch_that_was_rewritten_and_collected_while_it_was_scrubbed_is_not_damaged(client: persist.Client) -> None:
    """It keeps its id, and has other parts."""
    with client.open_writer("a", SCHEMA) as write:
        write.compare_and_append([{"k": 1, "v": "x", "_time": time} for time in range(10)], 0, 10)
    with client.open_reader("a") as read:
        read.downgrade_since(9)
    before = client.inspect("a").state.trace

    def rewrite() -> None:
        client.compact("a", policy=persist.Policy(weight=1e9, advance=0.01))
        client.roll_up("a", force=True)
        assert client.collect("a").keys

    found = damaged(scrub.scrub_shards(client, ["a"], lambda: cast("SparkSession", Here(rewrite)), engine="spark"))
    after = client.inspect("a").state.trace
    assert [batch.id for batch in before] == [batch.id for batch in after]
    assert before[0].keys != after[0].keys
    assert found == {"a": ()}


def test_the_audit_program_deletes_orphans_of_many_shards_and_nothing_else(
    client: persist.Client, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {name: write(client, name, batches=2, rows=50) for name in ("a", "b")}
    for name in models:
        part = min(parts_of(folder, name))
        part.with_name("0" * len(part.stem) + part.suffix).write_bytes(b"never linked")
    before = {name: len(list(parts_of(folder, name))) for name in models}
    assert audit.main(["--location", f"file:{folder}", "--dry-run"]) == 0
    assert {name: len(list(parts_of(folder, name))) for name in models} == before
    assert audit.main(["--location", f"file:{folder}"]) == 0
    assert {name: len(list(parts_of(folder, name))) for name in models} == {name: n - 1 for name, n in before.items()}
    assert "orphans=1" in capsys.readouterr().out
    for name, model in models.items():
        check(client, name, model)


def test_what_is_shipped_is_enough_to_run_a_task(spark: SparkSession, tmp_path: Path) -> None:
    name = ship(spark)
    assert ship(spark) == name, "the same code has the same name"
    shipped = next(Path(spark.sparkContext._temp_dir).parent.rglob(name))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import jobs.tasks as t; print(t.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(shipped)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert name in done.stdout


def test_settings_for_a_cluster_do_not_bind_its_driver_to_this_machine() -> None:
    local = spark_conf(SparkSettings())
    assert local["spark.master"] == "local[*,4]"
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    cluster = spark_conf(SparkSettings(master="spark://h:7077"))
    assert "spark.driver.bindAddress" not in cluster
    remote = spark_conf(SparkSettings(remote="sc://h:15002"))
    assert remote["spark.remote"] == "sc://h:15002"
    assert "spark.master" not in remote
    fair = "spark.scheduler.mode"
    assert local[fair] == cluster[fair] == "FAIR"
    assert fair not in remote, "its server has decided that, and would warn"
    assert "spark.master" not in spark_conf(SparkSettings(), submitted=True), "spark-submit has said it"
