"""The other programs on many shards, and what executors elsewhere are sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs import audit, scrub
from jobs.session import SparkSettings, ship, spark_conf
from tests.spark.collections import check, damage_a_part, parts_of, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


def test_the_scrub_reads_all_shards_on_spark_and_names_the_damaged_one(
    client: persist.Client, spark: SparkSession, folder: Path
) -> None:
    for i, name in enumerate(("a", "b", "c")):
        write(client, name, batches=2, rows=500, seed=i)
    assert [one.damaged for one in scrub.scrub_shards(client, ["a", "b", "c"], lambda: spark)] == [{}, {}, {}]
    victim = damage_a_part(folder, "b")
    found = {one.shard: one.damaged for one in scrub.scrub_shards(client, ["a", "b", "c"], lambda: spark)}
    assert [name for name, damaged in found.items() if damaged] == ["b"]
    (said,) = found["b"].values()
    assert victim.name in said


def test_the_scrub_notices_a_part_that_is_gone(client: persist.Client, spark: SparkSession, folder: Path) -> None:
    write(client, "a", batches=2, rows=100)
    min(parts_of(folder, "a")).unlink()
    (one,) = scrub.scrub_shards(client, ["a"], lambda: spark)
    assert len(one.damaged) == 1


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
    assert "spark.master" not in spark_conf(SparkSettings(), submitted=True), "spark-submit has said it"
