"""Plans in Dagster: written down by a run, done by another, refused once a shard has moved. And who may delete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from jobs.parallel import in_parallel
from orchestration import sweep
from orchestration.settings import Settings, resolved
from persist_lib.errors import InvalidUsage
from tests.orchestration.runs import execute, materialized, observed, why
from tests.orchestration.test_passes import recorded
from tests.spark.collections import write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
ON_DISK = True


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERSIST_MAY_DELETE", "PERSIST_APPLY", "PERSIST_RUNNING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shards(client: persist.Client) -> persist.Client:
    for name in ("a", "b"):
        write(client, name, batches=6, rows=5)
    return client


def launch(
    folder: Path, instance: dg.DagsterInstance, job: str, config: dict[str, Any], **settings: Any
) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, job, f"{job}_of_shards", config, **settings)


def applied(folder: Path, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, "apply", "applying_of_plan", {"engine": "local", **config})


def planned(folder: Path, instance: dg.DagsterInstance, job: str = "compaction") -> dg.ExecuteInProcessResult:
    return launch(folder, instance, job, {"engine": "local"}, apply="by a person", may_delete=True)


def checks(done: dg.ExecuteInProcessResult) -> list[dg.AssetCheckEvaluation]:
    data = (event.event_specific_data for event in done.all_events)
    return [one for one in data if isinstance(one, dg.AssetCheckEvaluation)]


def seqnos(client: persist.Client) -> list[int]:
    return [client.inspect(name).seqno for name in ("a", "b")]


def test_a_plan_is_made_and_carried_out_by_a_person(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    before = seqnos(shards)
    result = planned(folder, instance)
    assert result.success
    assert seqnos(shards) == before, "nothing was done"
    (plan,) = [one for one in materialized(result) if one.asset_key == dg.AssetKey("plans")]
    assert plan.metadata["shards"].value == 2
    assert plan.metadata["requests"].value > 0
    rows = plan.metadata["what"].value
    assert {(one.data["shard"], one.data["duty"]) for one in rows.records} >= {("a", "compaction"), ("b", "compaction")}
    assert result.run_id in (plan.description or "")
    done = applied(folder, instance, run_id=result.run_id)
    assert done.success, why(done)
    assert ("compaction", "a") in recorded(done)
    assert {shards.census(name).batches for name in ("a", "b")} == {1}
    again = applied(folder, instance, run_id=result.run_id)
    assert "PlanMoved" in why(again)


def test_a_shard_that_moved_is_refused_and_the_others_are_done(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    result = planned(folder, instance)
    write(shards, "a", batches=1, rows=5)
    moved = shards.inspect("a").seqno
    done = applied(folder, instance, run_id=result.run_id)
    assert not done.success
    assert "1 of 2 shards: a (PlanMoved: shard a: this plan was made at v" in why(done)
    assert shards.inspect("a").seqno == moved
    assert shards.census("b").batches == 1


def test_a_plan_may_be_given_as_text_and_no_other_text(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    text = shards.plan("a", only=["compaction"]).to_json()
    assert "this is no plan" in why(applied(folder, instance, plan="{}"))
    assert "no plan is given" in why(applied(folder, instance))
    assert "made no plan" in why(applied(folder, instance, run_id="unknown"))
    assert "the plan has no shard 'b'" in why(applied(folder, instance, plan=text, shards=["b"]))
    assert applied(folder, instance, plan=text).success
    assert shards.census("a").batches == 1


def test_a_person_may_act_at_once_all_the_same(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    config = {"engine": "local", "apply": "at once"}
    assert launch(folder, instance, "compaction", config, apply="by a person").success
    assert {shards.census(name).batches for name in ("a", "b")} == {1}
    assert "apply must be" in why(launch(folder, instance, "compaction", {"apply": "never"}))


def test_what_may_not_be_deleted_is_counted_and_said(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("a", "b"):
        shards.compact(name)
        shards.roll_up(name, force=True)
    objects = {str(path) for path in folder.rglob("*.parquet")}
    result = launch(folder, instance, "garbage", {"engine": "local"})
    assert result.success
    assert {str(path) for path in folder.rglob("*.parquet")} == objects
    seen = observed(result)
    assert [one.metadata["left"].value for one in seen if one.partition is None] == [2]
    withheld = [one for one in seen if one.partition == "a" and one.asset_key == dg.AssetKey("garbage")]
    assert [one.metadata["would_be_deleted"].value for one in withheld] == [6]
    assert withheld[0].metadata["would_be_deleted_bytes"].value > 0
    verdicts = {
        one.partition: one for one in result.get_asset_check_evaluations() if one.check_name == "no_overdue_garbage"
    }
    assert not verdicts["a"].passed
    assert "6 objects" in (verdicts["a"].description or "")
    assert "may not delete (PERSIST_MAY_DELETE" in (verdicts["a"].description or "")
    assert ("garbage", "a") not in [(one.asset_key.to_user_string(), one.partition) for one in materialized(result)]
    assert launch(folder, instance, "garbage", {"engine": "local"}, may_delete=True).success
    assert len({str(path) for path in folder.rglob("*.parquet")}) == len(objects) - 12


def test_a_plan_that_deletes_is_refused_where_nothing_may(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    shards.compact("a")
    shards.roll_up("a", force=True)
    text = shards.plan("a", only=["garbage"]).to_json()
    before = shards.inspect("a").seqno
    assert "garbage would free" in why(applied(folder, instance, plan=text))
    assert shards.inspect("a").seqno == before


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (False, False, "at once")),
        ({"PERSIST_RUNNING": "1", "PERSIST_MAY_DELETE": "true"}, (True, True, "at once")),
        ({"PERSIST_APPLY": "by a person", "PERSIST_MAY_DELETE": "0"}, (False, False, "by a person")),
    ],
)
def test_what_environments_may_choose(environ: dict[str, str], expected: tuple[bool, bool, str]) -> None:
    found = resolved(Settings(location="memory:"), environ)
    assert (found.is_running, found.may_delete, found.apply) == expected
    chosen = resolved(Settings(location="memory:", is_running=True, may_delete=True, apply="at once"), environ)
    assert (chosen.is_running, chosen.may_delete, chosen.apply) == (True, True, "at once")


@pytest.mark.parametrize(
    "environ",
    [
        {"PERSIST_APPLY": "never"}, {"PERSIST_MAY_DELETE": "maybe"}, {"PERSIST_RUNNING": "2"},
        {"PERSIST_IN_FLIGHT": "0"}, {"PERSIST_IN_FLIGHT": "many"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_wrong_choice_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match=next(iter(environ))):
        resolved(Settings(location="memory:"), environ)


def test_runs_obey_rules_and_the_census_says_which(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    shards.set_rules([{"pattern": "a", "compaction_weight": 0.001}])
    assert launch(folder, instance, "compaction", {"engine": "local"}).success
    assert [shards.census(name).batches for name in ("a", "b")] == [6, 1]
    shards.set_rules([{"pattern": "a", "retention": 2}, {"pattern": "*", "quiet": ["00:00-12:00", "12:00-00:00"]}])
    result = launch(folder, instance, "maintenance", {"engine": "local", "everything": True}, may_delete=True)
    assert result.success
    assert shards.census("a").batches == 6, "it is always quiet"
    counted = [one for one in materialized(result) if one.asset_key == dg.AssetKey("census") and one.partition == "a"]
    report = str(counted[0].metadata["report"].value)
    assert "| rule_retention | 2 (a) |" in report
    assert "| rule_quiet | 00:00-12:00, 12:00-00:00 (*) |" in report


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [({}, "", 4), ({}, "2", 2), ({"in_flight": 3}, "2", 3)],
)
def test_how_many_shards_a_run_works_on_at_once(
    config: dict[str, Any], environ: str, expected: int, shards: persist.Client, folder: Path,
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: list[int] = []
    monkeypatch.setenv("PERSIST_IN_FLIGHT", environ)

    def counted(one: Any, some: Any, most: int, stop: Any) -> Any:
        seen.append(most)
        return in_parallel(one, some, most, stop)

    monkeypatch.setattr(sweep, "in_parallel", counted)
    assert launch(folder, instance, "leases", {"shards": ["a", "b"], **config}).success
    assert seen == [expected]
    assert shards.shards() == ["a", "b"]


def test_runs_take_engines_checks_and_budgets_from_rules(
    shards: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    shards.set_rules([{"pattern": "a", "verify_reads": 0}, {"pattern": "*", "bytes_day": 1, "order": "coldest"}])
    result = launch(folder, instance, "compaction", {"engine": "local", "in_flight": 1})
    assert result.success
    verdicts = {one.partition: one.passed for one in checks(result) if one.check_name == "reads_identical"}
    (first,) = [one.partition for one in materialized(result) if one.asset_key == dg.AssetKey("compaction")]
    assert verdicts == ({} if first == "a" else {"b": True})
    (budget,) = shards.budgets()
    assert budget.spent > budget.limit
    again = launch(folder, instance, "compaction", {"engine": "local"})
    assert again.success
    assert not [one for one in materialized(again) if one.asset_key == dg.AssetKey("compaction")]
    shards.set_rules([{"pattern": "*", "verify_reads": 0}])
    last = launch(folder, instance, "compaction", {"engine": "local", "verify_reads": 2})
    assert [one.passed for one in checks(last) if one.check_name == "reads_identical"] == [True], "a run counts over it"
