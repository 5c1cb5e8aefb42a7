"""Collections in Dagster: tended where something is due, compared, rebuilt, and handed over only when told so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from orchestration import collection_reports
from orchestration.definitions import build_definitions
from orchestration.mount import Mount
from orchestration.settings import Settings
from persist_lib.timeline import Tables
from tests.orchestration.runs import defined, execute, materialized, ticked, why
from tests.orchestration.runs import metadata as recorded

pytestmark = pytest.mark.dagster
ON_DISK = True
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})
KEY = dg.AssetKey("collections")


@pytest.fixture
def controller(client: persist.Client) -> Iterator[Any]:
    with client.controller() as controller:
        controller.create("sales/orders", SCHEMA, shards=2, mode="compare_and_append")
        with controller.open_writer("sales/orders") as write:
            for cents in range(3):
                write.upsert([{"id": n, "cents": cents} for n in range(4)])
        yield controller


def run(folder: Path, instance: dg.DagsterInstance, job: str, **config: object) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, job, f"{job}_of_collections", config)


def metadata(result: dg.ExecuteInProcessResult, partition: str | None) -> dict[str, Any]:
    """What a run recorded for one collection, or for all of them."""
    return recorded(result, "collections", partition)


def test_tending_records_what_it_did_and_all_collections(
    controller: Any, folder: Path, instance: dg.DagsterInstance
) -> None:
    controller.alter("sales/orders", retention=0)
    dry = run(folder, instance, "collections", dry_run=True)
    assert dry.success
    assert controller.describe("sales/orders").since == persist.at(0)
    assert not instance.get_materialized_partitions(KEY)
    assert {row.data["step"] for row in metadata(dry, "sales/orders")["steps"].records} == {"move hold"}

    done = run(folder, instance, "collections")
    assert done.success
    assert controller.describe("sales/orders").since == persist.at(2)
    assert instance.get_materialized_partitions(KEY) == {"sales/orders"}
    assert instance.get_dynamic_partitions("persist_collections") == ["sales/orders"]
    one, every = metadata(done, "sales/orders"), metadata(done, None)
    assert (one["since"], one["since_time"], one["promised"], one["pending"]) == ("[2]", 2, "[3]", "nothing")
    assert [row.data["state"] for row in one["renditions"].records] == ["active"]
    (row,) = every["table"].records
    assert (row.data["collection"], row.data["shards"], row.data["upper"]) == ("sales/orders", 2, "[3]")

    again = run(folder, instance, "collections")
    assert [event for event in again.all_events if event.is_step_materialization] == [], "nothing was due"
    assert metadata(again, None)["steps"] == 0


def test_a_tick_starts_a_run_only_where_something_is_due(
    controller: Any, folder: Path, instance: dg.DagsterInstance
) -> None:
    assert "there is nothing to do" in skipped(folder, instance)
    controller.alter("sales/orders", retention=0)
    assert skipped(folder, instance) == ""
    assert run(folder, instance, "collections").success
    assert "there is nothing to do" in skipped(folder, instance)
    reader = controller.open_reader("sales/orders", owner="report")
    controller.drop("sales/orders")
    assert "wait for readers" in skipped(folder, instance)
    reader.close()
    assert skipped(folder, instance) == ""


def test_what_is_given_up_waits_for_a_person_where_that_is_chosen(
    controller: Any, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIST_APPLY", "by a person")
    plans, since = dg.AssetKey("plans"), lambda: controller.describe("sales/orders").since
    assert "there is nothing to do" in skipped(folder, instance)
    controller.alter("sales/orders", retention=0)
    asked = [ticked(folder, instance, "collections_schedule").run_requests[0].run_key for _ in range(2)]
    assert asked[0] == asked[1] is not None, "Dagster starts one run for a plan"
    found = run(folder, instance, "collections")
    assert found.success
    assert since() == persist.at(0)
    (made,) = [one for one in materialized(found) if one.asset_key == plans]
    assert [row.data["what"].partition(" ")[0] for row in made.metadata["what"].value.records] == ["move"]
    assert (made.metadata["collections"].value, made.metadata["shards"].value) == (1, 0)
    assert not [one for one in materialized(found) if one.asset_key == KEY], "nothing was done"

    applied = execute(folder, instance, "apply", "applying_of_plan", {"run_id": found.run_id})
    assert applied.success
    assert since() == persist.at(2)
    assert [one.partition for one in materialized(applied) if one.asset_key == KEY] == ["sales/orders"]
    again = execute(folder, instance, "apply", "applying_of_plan", {"run_id": found.run_id})
    assert "PlanMoved" in why(again)
    controller.alter("sales/orders", retention=1)
    controller.drop("sales/orders")
    assert run(folder, instance, "collections", apply="at once").success, "a person may act at once"
    assert controller.list() == []
    assert all(controller.client.inspect(name).state.is_finished() for name in controller.client.shards()[1:])


def test_a_location_without_collections_has_nothing_to_do(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    assert "there is nothing to do" in skipped(folder, instance)
    assert client.shards() == [], "looking makes no catalog"
    assert metadata(run(folder, instance, "collections"), None)["collections"] == 0


def test_a_rendition_is_rebuilt_compared_and_handed_over(
    controller: Any, folder: Path, instance: dg.DagsterInstance
) -> None:
    built = run(folder, instance, "rebuild", collection="sales/orders", shards=5, engine="local")
    assert built.success, why(built)
    assert (metadata(built, "sales/orders")["rendition"], metadata(built, "sales/orders")["rows"]) == (2, 4)

    judged = run(folder, instance, "compare", collection="sales/orders", rendition=2, keep=True, engine="local")
    found = metadata(judged, "sales/orders")
    assert any(shard.endswith(".r1.kept") for shard in controller.client.shards())
    assert (found["equal"], found["equal_keys"], found["changed"]) == (True, 4, 0)
    assert {row.data["column"]: row.data["changed"] for row in found["columns"].records} == {"cents": 0}

    dry = run(folder, instance, "handover", collection="sales/orders", rendition=2)
    assert metadata(dry, "sales/orders")["at"] == "3"
    assert controller.describe("sales/orders").active.number == 1, "a dry run by default"
    assert run(folder, instance, "handover", collection="sales/orders", rendition=2, dry_run=False).success
    assert controller.describe("sales/orders").active.number == 2
    assert run(folder, instance, "rebuild", collection="sales/orders", rendition=2).success
    with controller.open_reader("sales/orders") as reader:
        assert {row["id"]: row["cents"] for row in reader.snapshot().to_pylist()} == dict.fromkeys(range(4), 2)


def test_a_comparison_that_finds_a_change_says_in_which_column(
    controller: Any, folder: Path, instance: dg.DagsterInstance
) -> None:
    controller.make_rendition("sales/orders")
    with controller.open_writer("sales/orders", rendition=2) as write:
        write.compare_and_append([{"id": n, "cents": 2 if n else 9, "_time": 0} for n in range(3)], 0, 3)
    found = metadata(run(folder, instance, "compare", collection="sales/orders", rendition=2), "sales/orders")
    assert (found["equal"], found["vanished"], found["changed"], found["equal_keys"]) == (False, 1, 1, 2)
    assert "'cents': [2, 9]" in found["samples"]


def test_a_run_that_starts_again_hands_over_once(controller: Any, folder: Path, instance: dg.DagsterInstance) -> None:
    controller.make_rendition("sales/orders", copy=True)
    controller.copy_rendition("sales/orders", 2)
    job = defined(folder).resolve_job_def("handover")
    config = {"collection": "sales/orders", "rendition": 2, "dry_run": False}
    for _ in range(2):
        done = job.execute_in_process(
            instance=instance, raise_on_error=False, run_id="11111111-1111-4111-8111-111111111111",
            run_config={"ops": {"handover_of_collections": {"config": config}}},
        )  # fmt: skip
        assert done.success
        instance.delete_run("11111111-1111-4111-8111-111111111111")
    assert [one.number for one in controller.describe("sales/orders").renditions if one.start is not None] == [1, 2]


@pytest.mark.parametrize(
    ("job", "config", "says"),
    [
        ("handover", {"collection": "sales/order", "rendition": 2}, "there is no collection 'sales/order'"),
        ("handover", {"collection": "sales/orders", "rendition": 1}, "HandoverRefused"),
        ("compare", {"collection": "sales/orders", "rendition": 7}, "has no rendition 7"),
        ("compare", {"collection": "sales/orders", "rendition": 1, "as_of": "soon"}, "InvalidUsage"),
        ("compare", {"collection": "sales/orders", "rendition": 1, "engine": "abacus"}, "engine must be"),
        ("rebuild", {"collection": "sales/orders", "engine": "abacus"}, "engine must be"),
        ("rebuild", {"collection": "sales/orders", "rendition": 1}, "is written independently"),
        ("collections", {"collections": ["nowhere"]}, "there is no collection 'nowhere'"),
    ],
)
def test_what_is_refused_fails_the_run_in_a_sentence(
    controller: Any, folder: Path, instance: dg.DagsterInstance, job: str, config: dict[str, object], says: str
) -> None:
    result = run(folder, instance, job, **config)
    assert not result.success
    assert says in why(result)
    assert controller.describe("sales/orders").active.number == 1


def test_names_are_those_of_the_mount() -> None:
    definitions = build_definitions(Settings(location="memory:"), name="eu")
    assert {f"eu_{name}" for name in ("collections", "compare", "handover", "rebuild")} <= {
        job.name for job in definitions.get_repository_def().get_all_jobs()
    }
    assert Mount("eu", ("eu",)).key("collections") in {spec.key for spec in definitions.resolve_all_asset_specs()}


def skipped(folder: Path, instance: dg.DagsterInstance) -> str:
    """Why the schedule's tick requests nothing; empty if it requests a run."""
    data = ticked(folder, instance, "collections_schedule")
    return (data.skip_message or "") if not data.run_requests else ""


@pytest.fixture
def tables(client: persist.Client) -> Iterator[Tables]:
    with client.controller() as controller, controller.tables() as tables:
        tables.create("bank/accounts", SCHEMA, mode="wal")
        tables.create("bank/entries", SCHEMA)
        for cents in range(3):
            tables.insert("bank/accounts", [{"id": cents, "cents": cents}])
        yield tables


def test_a_run_applies_and_tidies_the_wals_of_tables(
    tables: Tables, folder: Path, instance: dg.DagsterInstance
) -> None:
    dry = run(folder, instance, "collections", dry_run=True)
    one, every = metadata(dry, "bank/accounts"), metadata(dry, None)
    assert [(row.data["step"], row.data["what"].split(" up to")[0]) for row in one["steps"].records] == [
        ("apply", "3 commits")
    ]
    assert (one["unapplied_commits"], one["unapplied_bytes"] == every["unapplied_bytes"]) == (3, True)
    assert one["behind_ms"] >= 3
    assert every["waits_ms"] >= 0
    assert [row.data["tables behind"] for row in every["timelines"].records] == [1]
    assert verdicts(dry) == [], "nothing was done, so nothing is judged"

    assert skipped(folder, instance) == ""
    done = run(folder, instance, "collections")
    assert done.success
    assert tables.lag().tables == ()
    assert not tables.lag().is_due()
    assert metadata(done, None)["unapplied_bytes"] == 0
    assert "unapplied_bytes" not in metadata(done, "bank/accounts")
    assert verdicts(done) == [("tables_applied", True)]
    assert "there is nothing to do" in skipped(folder, instance)
    assert instance.get_materialized_partitions(KEY) == {"bank/accounts"}


def test_the_check_warns_where_tables_are_far_behind(
    tables: Tables, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions = defined(folder)
    checks = dg.AssetSelection.checks(dg.AssetCheckKey(KEY, "tables_applied"))
    job = dg.define_asset_job("judge", selection=checks)
    judge = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("judge")

    assert verdicts(judge.execute_in_process(instance=instance)) == [("tables_applied", True)]
    monkeypatch.setattr(collection_reports, "LATE_BYTES", tables.lag().unapplied - 1)
    judged = judge.execute_in_process(instance=instance)
    assert judged.success, "a warning fails no run"
    assert verdicts(judged) == [("tables_applied", False)]
    (one,) = judged.get_asset_check_evaluations()
    assert one.severity == dg.AssetCheckSeverity.WARN
    assert "timeline default: bank/accounts lack " in (one.description or "")
    monkeypatch.setattr(collection_reports, "LATE_BYTES", 1 << 40)
    monkeypatch.setattr(collection_reports, "LATE_MS", -1)
    assert verdicts(judge.execute_in_process(instance=instance)) == [("tables_applied", False)]


def verdicts(result: dg.ExecuteInProcessResult) -> list[tuple[str, bool]]:
    return [(one.check_name, one.passed) for one in result.get_asset_check_evaluations()]
