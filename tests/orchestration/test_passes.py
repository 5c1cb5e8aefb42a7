"""Passes over many shards: only what happened is recorded, what failed is red, and nothing done is not a success."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.loader import LoadingContextForTest

import persist_lib as persist
from tests.orchestration.runs import defined, execute, observed, why
from tests.spark.collections import damage_a_part, parts_of, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]


def run(folder: Path, instance: dg.DagsterInstance, job: str, **config: Any) -> dg.ExecuteInProcessResult:
    """One run of a job over shards, in this process."""
    return execute(folder, instance, job, f"{job}_of_shards", {"engine": "local", **config})


def recorded(result: dg.ExecuteInProcessResult) -> list[tuple[str, str | None]]:
    """What was recorded: asset, partition."""
    found = []
    for event in result.all_events:
        if event.is_step_materialization:
            one: Any = event.step_materialization_data.materialization
        elif event.is_asset_observation:
            one = event.asset_observation_data.asset_observation
        else:
            continue
        found.append((one.asset_key.to_user_string(), one.partition))
    return found


def summary(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (one,) = observed(result)
    return {name: value.value for name, value in one.metadata.items()}


def events(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> int:
    return len(instance.all_logs(result.run_id))


def test_idle_shards_are_one_observation_whatever_their_number(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for n in range(30):
        write(client, f"s{n:02}", batches=1, rows=3)
    for job in ("compaction", "census", "orphans", "scrub", "garbage"):
        assert run(folder, instance, job).success
        run(folder, instance, job)
    for job in ("leases", "retention", "compaction", "rollups", "garbage", "orphans", "scrub", "census"):
        result = run(folder, instance, job)
        assert result.success
        assert recorded(result) == [(recorded(result)[0][0], None)], job
        assert {**summary(result), "seconds": 0} == {
            "shards": 30, "visited": 0, "idle": 30, "failed": 0, "left": 0, "paused": 0, "seconds": 0,
        }  # fmt: skip
        assert events(instance, result) <= 20, [entry.message for entry in instance.all_logs(result.run_id)]
        assert summary(result)["seconds"] < 1


def test_a_pass_visits_the_shards_on_which_something_is_due_and_no_other(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    models = {name: write(client, name, batches=1, rows=3) for name in ("a", "b", "c")}
    run(folder, instance, "census")
    for _ in range(2):
        run(folder, instance, "compaction")
    models["b"] = write(client, "b", batches=6, rows=3, seed=9)
    result = run(folder, instance, "compaction")
    assert result.success
    assert {partition for _, partition in recorded(result)} == {"b", None}
    assert ("compaction", "b") in recorded(result)
    assert summary(result)["visited"] == 1
    assert ("census", "b") in recorded(result), "the job counts what it changed"
    assert recorded(run(folder, instance, "census")) == [("census", None)]
    models["c"] = write(client, "c", batches=1, rows=3, seed=9)
    census = run(folder, instance, "census")
    assert (summary(census)["visited"], summary(census)["unrecorded"]) == (1, 1), "c was recorded within the hour"
    assert client.census("b").debt == 0
    assert set(models) == {"a", "b", "c"}


def shown(instance: dg.DagsterInstance, asset: str, check: str) -> tuple[str, str]:
    """What the asset's page and the graph show of a check: of which partition its newest verdict is, and its status."""
    key = dg.AssetCheckKey(dg.AssetKey(asset), check)
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    drawn = found.targets_latest_materialization(LoadingContextForTest(instance))
    assert asyncio.run(drawn), "else it is grey"
    return str((found.evaluation and found.evaluation.description) or "").partition(":")[0], found.status.value


def test_nothing_is_green_beside_known_damage(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("bad", "good"):
        write(client, name, batches=2, rows=400)
    damage_a_part(folder, "bad")
    assert not run(folder, instance, "scrub", in_flight=1).success
    assert shown(instance, "scrub", "parts_undamaged") == ("bad", "FAILED")
    write(client, "good", batches=1, rows=5, seed=1)
    assert run(folder, instance, "scrub", shards=["good"]).success
    assert shown(instance, "scrub", "parts_undamaged") == ("bad", "FAILED"), "it is still there"
    assert client.scrub("good", new_only=False).damaged == ()
    instance.delete_dynamic_partition("persist_shards", "bad")
    assert run(folder, instance, "scrub", shards=["good"], scrub_all=True).success
    assert shown(instance, "scrub", "parts_undamaged")[1] == "SUCCEEDED", "what is gone is not held against it"


def test_damage_fails_every_scrub_until_it_is_mended(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("bad", "good"):
        write(client, name, batches=2, rows=400)
    victim, named = damage_a_part(folder, "bad"), set[str]()
    for _ in range(2):
        result = run(folder, instance, "scrub")
        assert not result.success
        assert victim.name in why(result)
        named.update(re.findall(r"bad.*?batch (.+?): ", why(result), re.DOTALL))
        assert shown(instance, "scrub", "parts_undamaged")[1] == "FAILED"
    assert len(named) == 1, "the same batch"
    flip_a_bit([victim])
    assert run(folder, instance, "scrub").success
    assert shown(instance, "scrub", "parts_undamaged")[1] == "SUCCEEDED"


def test_a_shard_that_is_not_there_fails_at_once_and_nothing_is_done(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "orders", batches=6, rows=3)
    before = client.inspect("orders").seqno
    result = run(folder, instance, "compaction", shards=["orders", "odrers"])
    assert not result.success
    assert "'odrers'" in why(result)
    assert "Nothing was done" in why(result)
    assert "orders" in why(result)
    assert client.inspect("orders").seqno == before
    assert "odrers" not in instance.get_dynamic_partitions("persist_shards")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"engine": "sprak"}, "engine must be auto, spark or local"),
        ({"in_flight": 0}, "in_flight must be at least 1"),
        ({"verify_reads": -1}, "verify_reads must be at least 0"),
    ],
)
def test_configuration_that_cannot_be_is_refused_at_once(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, config: dict[str, Any], says: str
) -> None:
    write(client, "s", batches=6, rows=3)
    result = run(folder, instance, "compaction", **config)
    assert not result.success
    assert says in why(result)
    assert client.census("s").batches == 6


def test_a_location_that_is_not_there_is_not_created(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    folder = tmp_path / "typing-error"
    result = run(folder, instance, "compaction")
    assert not result.success
    assert str(folder) in why(result)
    assert not folder.exists()


def test_a_partition_on_which_a_job_failed_is_red_until_a_job_succeeds_on_it(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("a", "bad"):
        write(client, name, batches=4, rows=200)
    assert run(folder, instance, "compaction").success
    assert statuses(instance) == {"a": "MATERIALIZED", "bad": "MATERIALIZED"}
    for name in ("a", "bad"):
        write(client, name, batches=4, rows=200, seed=5)
    victims = list(parts_of(folder, "bad"))
    flip_a_bit(victims)
    assert not run(folder, instance, "compaction").success
    assert statuses(instance) == {"a": "MATERIALIZED", "bad": "FAILED"}
    assert not run(folder, instance, "compaction").success
    assert statuses(instance)["bad"] == "FAILED"
    flip_a_bit(victims)  # once more: they are mended
    assert run(folder, instance, "compaction").success
    assert statuses(instance) == {"a": "MATERIALIZED", "bad": "MATERIALIZED"}


def flip_a_bit(victims: list[Path]) -> None:
    for victim in victims:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)


def statuses(instance: dg.DagsterInstance) -> dict[str, str]:
    """What the UI shows for the partitions of the asset `compaction`."""
    partitions = dg.DynamicPartitionsDefinition(name="persist_shards")
    found = instance.get_status_by_partition(
        dg.AssetKey("compaction"), instance.get_dynamic_partitions("persist_shards"), partitions
    )
    return {name: status.value for name, status in (found or {}).items() if status is not None}


def test_a_check_that_could_not_be_evaluated_says_so_and_does_not_say_failed(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "bad", batches=4, rows=200)
    victim = damage_a_part(folder, "bad")
    result = run(folder, instance, "compaction")
    verdicts = {one.check_name: one for one in result.get_asset_check_evaluations()}
    for name in ("reads_identical", "fingerprint_conserved"):
        assert verdicts[name].severity == dg.AssetCheckSeverity.WARN
        assert str(verdicts[name].description).startswith("not evaluated: Corrupt")
        assert victim.name in str(verdicts[name].description)


def test_a_dry_run_materializes_nothing_and_records_no_verdict(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "s", batches=6, rows=30)
    before = client.inspect("s").seqno
    result = run(folder, instance, "maintenance", dry_run=True, everything=True)
    assert result.success
    assert not result.get_asset_check_evaluations()
    assert not [event for event in result.all_events if event.is_step_materialization]
    assert ("compaction", "s") in recorded(result), "it says what would be done"
    assert client.inspect("s").seqno == before
    assert instance.get_materialized_partitions(dg.AssetKey("compaction")) == set()
    assert run(folder, instance, "compaction").success, "what a dry run saw is still due"
    assert client.census("s").batches == 1


def test_a_shard_that_another_worker_has_is_left_to_it_and_the_log_says_so(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "mine", batches=6, rows=3)
    write(client, "theirs", batches=6, rows=3)
    with client.worker("theirs") as worker:
        assert worker.id
        result = run(folder, instance, "compaction")
        assert result.success
        assert (client.census("mine").batches, client.census("theirs").batches) == (1, 6)
        assert summary(result)["left"] == 1
        said = "\n".join(entry.user_message for entry in instance.all_logs(result.run_id))
        assert "theirs is left: " in said
        assert worker.id in said
    assert run(folder, instance, "compaction").success
    assert client.census("theirs").batches == 1


def test_a_failure_that_passes_is_tried_again_in_the_same_run(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "s", batches=6, rows=3)
    tries: list[int] = []
    whole = persist.Client.compact

    def fails_once(self: persist.Client, *args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise persist.Determinate("the store was away for a moment")
        return whole(self, *args, **options)

    monkeypatch.setattr(persist.Client, "compact", fails_once)
    monkeypatch.setattr("orchestration.sweep.AGAIN_AFTER_S", 0.01)
    assert run(folder, instance, "compaction").success
    assert client.census("s").batches == 1


def test_a_run_of_checks_alone_judges_and_changes_nothing(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "s", batches=1, rows=30)
    part = next(parts_of(folder, "s"))
    part.with_name("0" * len(part.stem) + part.suffix).write_bytes(part.read_bytes())
    before = client.inspect("s").seqno
    instance.add_dynamic_partitions("persist_shards", ["s"])
    definitions = defined(folder)
    check = dg.AssetCheckKey(dg.AssetKey("orphans"), "no_orphan")
    job = definitions.get_repository_def().get_job("__ASSET_JOB")
    alone = job.get_subset(asset_selection=set(), asset_check_selection={check})
    result = alone.execute_in_process(instance=instance, partition_key="s", raise_on_error=False)
    (verdict,) = result.get_asset_check_evaluations()
    assert (verdict.check_name, verdict.passed, verdict.partition) == ("no_orphan", False, "s")
    assert instance.get_materialized_partitions(dg.AssetKey("orphans")) == set()
    assert client.inspect("s").seqno == before
    assert len(list(parts_of(folder, "s"))) == 2


def test_the_verdict_on_one_shard_does_not_hide_that_on_another(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("a", "bad", "z"):
        write(client, name, batches=3, rows=200)
    assert run(folder, instance, "scrub").success
    damage_a_part(folder, "bad")
    run(folder, instance, "scrub", scrub_all=True)
    write(client, "z", batches=1, rows=200, seed=5)
    run(folder, instance, "scrub")
    assert run(folder, instance, "scrub", shards=["a", "z"], everything=True).success, "the newest verdicts are green"
    check = dg.AssetCheckKey(dg.AssetKey("scrub"), "parts_undamaged")
    infos = [one for one in instance.event_log_storage.get_asset_check_partition_info([check]) if one.partition_key]
    assert {info.partition_key: info.latest_execution_status.value for info in infos if info.is_current} == {
        "a": "SUCCEEDED", "bad": "FAILED", "z": "SUCCEEDED",
    }  # fmt: skip
