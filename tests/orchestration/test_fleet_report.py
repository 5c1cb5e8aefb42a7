"""The fleet, the pages of its shards, and tables and sources as assets: real runs, on Dagster's storage on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import persist_lib as persist
from orchestration import fleet
from orchestration.data import CHECK, data_assets
from orchestration.definitions import build_definitions
from orchestration.mount import Mount
from orchestration.partitions import NONE_YET
from orchestration.settings import Data, Settings, resolved
from persist_lib.errors import InvalidUsage
from tests.orchestration.runs import execute, materialized, ticked, why
from tests.orchestration.test_passes import run as run_duty
from tests.orchestration.test_sources import Fed
from tests.spark.collections import SMALL, damage_a_part, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
ON_DISK = True
ROWS = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")
SHOP = Data(tables=("orders", "events_*", "*"), sources=("orders",))


def run(
    folder: Path, instance: dg.DagsterInstance, data: Data | None = None, **config: Any
) -> dg.ExecuteInProcessResult:
    return execute(folder, instance, "fleet", "reporting_of_shards", config, data=data)


def made(done: dg.ExecuteInProcessResult) -> dict[tuple[str, str | None], Any]:
    return {(one.asset_key.to_user_string(), one.partition): one for one in materialized(done)}


def verdicts(done: dg.ExecuteInProcessResult) -> dict[str, Any]:
    return {one.asset_key.to_user_string(): one for one in done.get_asset_check_evaluations()}


def table(client: persist.Client, name: str, *ids: int) -> None:
    client.table(name, ROWS).append([{"id": one, "n": one} for one in ids])


def test_the_fleet_is_a_page_with_a_picture_and_links_to_pages_that_are_there(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "busy", batches=40, rows=5)
    write(client, "calm", batches=1, rows=5)
    damage_a_part(folder, "calm")
    assert not run_duty(folder, instance, "scrub").success
    done = run(folder, instance)
    assert done.success
    found = made(done)
    assert set(found) == {
        ("fleet", None),
        ("shard_page", "busy"),
        ("shard_page", "calm"),
        ("tables", "busy"),
        ("tables", "calm"),
    }
    one = found["fleet", None].metadata
    assert {name: one[name].value for name in ("shards", "damaged", "overdue", "paused", "not_looked_at")} == {
        "shards": 2, "damaged": 1, "overdue": 1, "paused": 0, "not_looked_at": 0,
    }  # fmt: skip
    assert one["debt"].value == client.census("busy").debt
    page = str(one["page"].value)
    assert "](data:image/png;base64," in page
    for shard in ("busy", "calm"):
        assert f"[{shard}](/assets/shard_page?view=partitions&partition={shard})" in page
        assert "](data:image/png;base64," in str(found["shard_page", shard].metadata["page"].value)
    assert [row.data["shard"] for row in one["first"].records] == ["calm", "busy"]
    assert instance.get_materialized_partitions(dg.AssetKey("shard_page")) == {"busy", "calm"}
    assert len(page) < 60_000


def test_pages_are_made_once_a_day_or_when_they_are_asked_for(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "busy", batches=40, rows=5)
    write(client, "calm", batches=1, rows=5)

    def pages(**config: Any) -> set[str | None]:
        return {partition for asset, partition in made(run(folder, instance, **config)) if asset == "shard_page"}

    assert pages() == {"busy"}, "calm is on no list"
    assert pages() == set()
    assert pages(shards=["calm", "busy", "lost"]) == {"calm", "busy"}
    now = fleet.clock()
    monkeypatch.setattr(fleet, "clock", lambda: now + fleet.PAGES_EACH_S + 5)
    assert pages() == {"busy"}


def test_of_an_unreadable_shard_the_fleet_says_why_and_the_others_have_pages(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "busy", batches=40, rows=5)
    write(client, "lost", batches=40, rows=5)
    real = persist.Client.inspect

    def inspect(self: persist.Client, name: str) -> Any:
        if name == "lost":
            raise persist.Corrupt("planted", key=name)
        return real(self, name)

    monkeypatch.setattr(persist.Client, "inspect", inspect)
    done = run(folder, instance)
    assert done.success
    assert [place for place in made(done) if place[0] == "shard_page"] == [("shard_page", "busy")]
    assert [one for one in instance.all_logs(done.run_id) if "no page of lost: Corrupt: planted" in one.user_message]


def test_a_location_that_is_not_there_fails_with_words(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    done = run(tmp_path / "nothing", instance)
    assert not done.success
    assert "no location at" in why(done)


def test_tables_are_partitions_of_the_first_pattern_that_fits_and_are_recorded_when_they_move(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("orders", "events_eu", "events_us", "other"):
        table(client, name, 1, 2)
    first = made(run(folder, instance, SHOP))
    data = {place for place in first if place[0] not in {"fleet", "shard_page"}}
    assert data == {("orders", None), ("events", "events_eu"), ("events", "events_us"), ("tables", "other")}
    assert first["orders", None].metadata["updates"].value == 2
    assert str(first["orders", None].metadata["upper"].value).startswith("20")
    assert set(instance.get_dynamic_partitions("persist_tables_events")) == {"events_eu", "events_us"}
    assert {place for place in made(run(folder, instance, SHOP)) if place[0] not in {"fleet", "shard_page"}} == set()
    client.maintain("orders")
    client.table("events_us").append([{"id": 3, "n": 3}])
    client.table("other").drop()
    again = {place for place in made(run(folder, instance, SHOP)) if place[0] not in {"fleet", "shard_page"}}
    assert again == {("events", "events_us")}, "upkeep is no news of the data"
    assert instance.get_dynamic_partitions("persist_tables") == [NONE_YET]


def test_a_table_of_several_shards_is_one_asset(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    with client.controller() as controller:
        controller.create("orders", ROWS, shards=3, mode="compare_and_append")
    client.table("orders").append([{"id": one, "n": one} for one in range(30)])
    found = made(run(folder, instance, SHOP))["orders", None].metadata
    assert found["shards"].value >= 3
    assert found["updates"].value >= 30
    assert "upper" not in found


def test_a_verdict_says_what_is_wrong_with_a_table_and_whether_lineage_is_so(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    table(client, "orders", 1)
    found = verdicts(run(folder, instance, SHOP))
    assert {name: one.passed for name, one in found.items()} == {
        "orders": True, "events": True, "tables": True, "source/orders": False,
    }  # fmt: skip
    assert found["source/orders"].description == "there is no source 'orders'"
    write(client, "events_x", batches=6, rows=5)
    damage_a_part(folder, "events_x")
    assert not run_duty(folder, instance, "scrub").success
    bad = verdicts(run(folder, instance, SHOP))["events"]
    assert (bad.passed, bad.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert bad.description.startswith("events_x: 1 damaged batch: ")
    missing = verdicts(run(folder, instance, Data(tables=("absent",))))["absent"]
    assert (missing.passed, missing.description) == (False, "there is no table 'absent'")


def test_a_source_is_upstream_of_the_table_of_its_name_and_is_recorded_when_it_moves(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    fed = Fed(client, tmp_path / "in")
    fed.create("orders")
    done = run(folder, instance, SHOP)
    assert {asset for asset, _ in made(done)} >= {"source/orders", "orders", "tables"}
    assert verdicts(done)["source/orders"].passed
    assert ("source/orders", None) not in made(run(folder, instance, SHOP))
    fed.write("orders", {"id": 1, "word": "a"})
    fed.sources.run("orders", until_idle=True)
    again = made(run(folder, instance, SHOP))
    assert {("source/orders", None), ("orders", None)} <= set(again)
    fed.sources.close()
    fed.controller.close()
    definitions = build_definitions(Settings(location=f"file:{folder}", data=SHOP))
    graph = definitions.resolve_asset_graph()
    assert graph.get(dg.AssetKey("orders")).parent_keys == {dg.AssetKey(["source", "orders"])}
    assert graph.get(dg.AssetKey("events")).parent_keys == set()


def test_the_button_of_the_check_looks_at_what_it_is_asked_for(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    table(client, "orders", 1)
    definitions = build_definitions(Settings(location=f"file:{folder}", config=SMALL, data=SHOP))
    key = dg.AssetCheckKey(dg.AssetKey("orders"), CHECK)
    job = dg.define_asset_job("looked", selection=dg.AssetSelection.checks(key))
    merged = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    done = merged.resolve_job_def("looked").execute_in_process(instance=instance)
    assert {one.asset_key.to_user_string(): one.passed for one in done.get_asset_check_evaluations()} == {
        "orders": True
    }


def test_a_users_asset_is_downstream_of_a_table_and_reads_it(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    table(client, "sales.orders", 1, 2, 3)
    settings = Settings(location=f"file:{folder}", config=SMALL, data=Data(tables=("sales.orders",)))
    seen: list[int] = []

    @dg.asset(ins={"orders": dg.AssetIn(key=["sales", "orders"])}, io_manager_key="persist_io")
    def doubled(orders: pa.Table) -> pa.Table:
        seen.extend(orders["id"].to_pylist())
        return orders

    job = dg.define_asset_job("reads", selection=["doubled"])
    merged = dg.Definitions.merge(build_definitions(settings), dg.Definitions(assets=[doubled], jobs=[job]))
    deps = merged.resolve_assets_def("doubled").asset_deps
    assert deps[dg.AssetKey("doubled")] == {dg.AssetKey(["sales", "orders"])}
    assert merged.resolve_job_def("reads").execute_in_process(instance=instance).success
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Data(tables=("a.b", "a/b")), "would be the same asset, a/b"),
        (Data(tables=("census",)), "the asset census, which there is: give key_prefix"),
        (Data(tables=("",)), "no asset can be called ''"),
        (Data(group="a b"), "group must be letters"),
    ],
)
def test_what_cannot_be_declared_is_an_error_when_the_code_is_loaded(data: Data, says: str) -> None:
    with pytest.raises(InvalidUsage, match=says):
        build_definitions(Settings(location="memory:", data=data))


def test_data_is_declared_by_the_environment_too_and_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(text: str) -> list[str]:
        monkeypatch.setenv("PERSIST_DATA", text)
        found = build_definitions(Settings(location="memory:")).resolve_all_asset_specs()
        return sorted(one.key.to_user_string() for one in found if one.group_name == "data")

    assert keys("") == ["tables"]
    assert keys("off") == []
    assert keys('{"tables": ["orders", "events_*"]}') == ["events", "orders"]
    for wrong in ("{", "[]", '{"table": []}', "orders"):
        with pytest.raises(InvalidUsage, match="PERSIST_DATA must be 'off' or a JSON object of tables, sources"):
            resolved(Settings(location="memory:"), {"PERSIST_DATA": wrong})


def test_two_pipelines_have_assets_of_their_own(tmp_path: Path) -> None:
    eu, us = (build_definitions(Settings(location="memory:"), name=name) for name in ("eu", "us"))
    merged = dg.Definitions.merge(eu, us)
    dg.Definitions.validate_loadable(merged)
    keys = {one.key.to_user_string() for one in merged.resolve_all_asset_specs()}
    assert {"eu/tables", "us/tables", "eu/fleet", "us/shard_page"} <= keys
    assert fleet.link(Mount("eu", ("eu",)), "a b") == "/assets/eu/shard_page?view=partitions&partition=a%20b"
    assert [one.key.to_user_string() for one in data_assets(Mount("eu", ("eu",)), Data(key_prefix=("x",)))] == [
        "eu/x/tables"
    ]


def test_the_schedule_asks_where_there_is_a_shard(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    assert ticked(folder, instance, "fleet_schedule").skip_message == "there are no shards"
    write(client, "a", batches=1, rows=1)
    assert len(ticked(folder, instance, "fleet_schedule").run_requests) == 1
