"""The whole maintenance in one process on a real location and a real Spark: figures, verdicts, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from jobs.session import SparkSettings
from orchestration.checks import CHECKS
from orchestration.duties import DUTIES
from orchestration.run import RunReport, run_maintenance
from persist_lib.core.sums import Sums
from persist_lib.location.file.blob import FileBlob
from tests.spark.collections import SMALL, check, damage_a_part, parts_of, referred, stored, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
SPARK = SparkSettings(master="local[2,4]", driver_memory="512m")


def run(folder: Path, instance: dg.DagsterInstance, **options: Any) -> RunReport:
    return run_maintenance(f"file:{folder}", config=SMALL, spark=SPARK, instance=instance, **options)


@pytest.mark.spark
def test_one_run_maintains_many_shards_with_spark_and_every_check_passes(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    models = {name: write(client, name, batches=4, seed=i) for i, name in enumerate(("a", "b"))}
    models["small"] = write(client, "small", batches=4, rows=10)
    report = run(folder, instance)
    assert report.success, report.failure
    assert set(report.figures) == set(models)
    assert {(v.shard, v.check) for v in report.verdicts} == {(shard, name) for shard in models for name in CHECKS}
    assert not report.failed_checks
    for name, model in models.items():
        duties = report.figures[name]
        assert set(duties) == set(DUTIES)
        compacted, census = duties["compaction"], duties["census"]
        assert (compacted["batches_before"], compacted["batches_after"]) == (4, 1)
        assert compacted["bytes_in"] > compacted["bytes_out"] > 0
        assert duties["garbage"]["deleted_bytes"] == compacted["bytes_in"]
        assert census["batches"] == 1
        assert f"| batches_before | {compacted['batches_before']} |" in compacted["report"]
        assert [record.data["batches"] for record in compacted["trace"].records] == [1]
        check(client, name, model)
        assert stored(client, name) == referred(client, name)
    assert instance.get_materialized_partitions(dg.AssetKey("compaction")) == set(models)
    version = instance.fetch_materializations(
        dg.AssetRecordsFilter(dg.AssetKey("census"), asset_partitions=["a"]), limit=1
    )
    materialization = version.records[0].asset_materialization
    assert materialization is not None
    assert materialization.tags is not None
    assert materialization.tags["dagster/data_version"] == str(report.figures["a"]["census"]["seqno"])


def test_a_second_run_finds_nothing_to_do(client: persist.Client, folder: Path, instance: dg.DagsterInstance) -> None:
    write(client, "s", rows=50)
    assert run(folder, instance, engine="local").success
    before = client.inspect("s").seqno
    report = run(folder, instance, engine="local")
    assert report.success
    figures = report.figures["s"]
    assert figures["compaction"]["requests"] == 0
    assert figures["garbage"]["deleted"] == 0
    assert figures["scrub"]["batches"] == 0, "the scrub continues from where the last one got to"
    assert client.inspect("s").seqno <= before + 1


def test_a_poisoned_shard_stops_no_other_and_fails_the_run_by_its_name(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    models = {name: write(client, name, batches=4, rows=200, seed=i) for i, name in enumerate(("a", "bad", "c"))}
    victim = damage_a_part(folder, "bad")
    report = run(folder, instance, engine="local")
    assert not report.success
    assert report.failure.startswith("Failed, 1 of 3 shards: bad (compaction: Corrupt: ")
    assert victim.name in report.failure
    assert report.failure.endswith("Done: 2.")
    assert instance.get_materialized_partitions(dg.AssetKey("compaction")) == {"a", "c"}
    assert "bad" in instance.get_materialized_partitions(dg.AssetKey("garbage"))
    for name in ("a", "c"):
        assert client.census(name).batches == 1
        check(client, name, models[name])


def test_too_many_batches_fail_the_census_s_check(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "s", batches=60, rows=1)
    report = run(folder, instance, job="census")
    assert [verdict.check for verdict in report.failed_checks] == ["batch_count_within_bound"]
    assert report.success, "debts are no failure"
    assert run(folder, instance, job="compaction", engine="local").failed_checks == []
    assert run(folder, instance, job="census").failed_checks == []


def test_an_orphan_that_cannot_be_deleted_fails_the_check_and_the_next_audit_removes_it(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "s", batches=1, rows=50)
    part = next(parts_of(folder, "s"))
    orphan = part.with_name("0" * len(part.stem) + part.suffix)
    orphan.write_bytes(part.read_bytes())
    dry = run(folder, instance, job="orphans", dry_run=True)
    assert (dry.figures["s"]["orphans"]["orphans"], dry.verdicts) == (1, ())
    assert orphan.exists()
    assert instance.get_materialized_partitions(dg.AssetKey("orphans")) == set()
    with monkeypatch.context() as refusing:
        refuse_deletions(refusing)
        refused = run(folder, instance, job="orphans")
    assert [verdict.check for verdict in refused.failed_checks] == ["no_orphan"]
    assert refused.figures["s"]["orphans"]["failed"] == 1
    assert orphan.exists()
    assert run(folder, instance, job="orphans").failed_checks == []
    assert not orphan.exists()


def refuse_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bucket without the right to delete."""
    refusal = persist.InvalidUsage("no right to delete")  # otherwise it would be tried again
    monkeypatch.setattr(FileBlob, "delete_many", lambda _self, keys: dict.fromkeys(keys, refusal))


def test_garbage_that_cannot_be_deleted_fails_the_check_and_the_next_collection_removes_it(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "s", batches=4, rows=50)
    client.compact("s")
    client.roll_up("s", force=True)
    dry = run(folder, instance, job="garbage", dry_run=True)
    assert dry.figures["s"]["garbage"]["deleted"] == 4
    assert not dry.verdicts
    with monkeypatch.context() as refusing:
        refuse_deletions(refusing)
        refused = run(folder, instance, job="garbage")
    assert [verdict.check for verdict in refused.failed_checks] == ["no_overdue_garbage"]
    assert run(folder, instance, job="garbage").failed_checks == []


def test_an_engine_that_loses_data_is_caught_before_anything_is_committed(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(client, "s", batches=4, rows=200)
    from persist_lib.maintain import merge_tasks  # noqa: PLC0415

    whole = merge_tasks.run_task

    def loses(one: Any, blob: Any, entropy: Any, *rest: Any) -> Any:
        cut = one.inputs[:-1]
        return whole(
            type(one)(*(cut if name == "inputs" else getattr(one, name) for name in one.__struct_fields__)),
            blob,
            entropy,
            *rest,
        )

    monkeypatch.setattr("persist_lib.maintain.merge_tasks.run_task", loses)
    report = run(folder, instance, engine="local")
    assert not report.success
    assert client.census("s").batches == 4
    check(client, "s", model)


def test_reads_that_changed_fail_the_check_and_the_run(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "s", batches=4, rows=50)
    from orchestration.reads import Piece, ReadProbe  # noqa: PLC0415

    measured: list[int] = []

    def drifting(self: ReadProbe) -> dict[Piece, Sums]:
        measured.append(1)
        return {Piece(point): Sums(len(measured), 0, self.expected + len(measured) - 1) for point in self.points}

    monkeypatch.setattr(ReadProbe, "measure", drifting)
    report = run(folder, instance, engine="local")
    assert {verdict.check for verdict in report.failed_checks} == {"reads_identical", "fingerprint_conserved"}
    assert not report.success
    assert "s" in report.failure
