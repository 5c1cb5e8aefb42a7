"""Tables and sources of a location as assets: what moves them is known to Dagster, and what they have can be loaded."""

# No `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import asyncio
import datetime as dt
import json
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pytest
from dagster._core.definitions.freshness_evaluator import TimeWindowFreshnessPolicyEvaluator
from dagster._core.loader import LoadingContextForTest
from dagster._core.test_utils import freeze_time

import persist_lib as persist
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist
from orchestration.tables import source_asset, table_sensor, table_spec
from persist_lib.errors import InvalidUsage, NotComplete
from persist_lib.sources import Files, Meaning

pytestmark = pytest.mark.dagster
SCHEMA = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms")
DAY = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)


def ms(day: float) -> int:
    return round((DAY + dt.timedelta(days=day)).timestamp() * 1000)


def resources(folder: Path) -> dict[str, Any]:
    opened = Persist(location=f"file:{folder}", create=True)
    return {"persist": opened, "io_manager": PersistIOManager(persist=opened)}


def write(folder: Path, table: str, id_: int, lower: int, upper: int) -> None:
    """An append of one row at a time of its own."""
    with persist.open(folder) as client, client.open_writer(table, SCHEMA) as handle:
        handle.compare_and_append([{"id": id_, "n": id_, "_time": lower}], lower, upper)


def ticked(sensor: dg.SensorDefinition, folder: Path, instance: dg.DagsterInstance, cursor: str | None) -> Any:
    opened = resources(folder)["persist"]
    with dg.build_sensor_context(cursor=cursor, resources={"persist": opened}, instance=instance) as context:
        return sensor.evaluate_tick(context)


def test_a_table_that_moved_is_reported_once_and_wakes_what_is_downstream(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    @dg.asset(deps=[dg.AssetKey(["raw", "orders"])], automation_condition=dg.AutomationCondition.eager())
    def report() -> None: ...

    spec = table_spec("raw.orders", freshness_policy=dg.FreshnessPolicy.time_window(fail_window=dt.timedelta(hours=1)))
    sensor = table_sensor("moved", [spec, "gone"])
    defs = dg.Definitions(assets=[spec, report], sensors=[sensor], resources=resources(tmp_path))
    dg.Definitions.validate_loadable(defs)
    write(tmp_path, "raw.orders", 1, 0, 6)
    asked = dg.evaluate_automation_conditions(defs=defs, instance=instance)
    assert asked.total_requested == 0

    first = ticked(sensor, tmp_path, instance, None)
    (event,) = first.asset_events
    assert (event.asset_key, event.metadata["upper"].value) == (dg.AssetKey(["raw", "orders"]), 6)
    assert "not there: gone" in str(first.skip_message)
    assert ticked(sensor, tmp_path, instance, first.cursor).asset_events == [], "it has not moved since"
    instance.report_runless_asset_event(event)
    asked = dg.evaluate_automation_conditions(defs=defs, instance=instance, cursor=asked.cursor)
    assert asked.total_requested == 1

    write(tmp_path, "raw.orders", 2, 6, 8)
    again = ticked(sensor, tmp_path, instance, first.cursor)
    assert json.loads(again.cursor) == {"raw.orders": 8}
    assert again.asset_events[0].tags["dagster/data_version"] == "raw.orders@8"


def test_a_freshness_policy_judges_a_table_by_when_it_moved(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    policy = dg.FreshnessPolicy.time_window(fail_window=dt.timedelta(hours=2))
    spec = table_spec("orders", freshness_policy=policy)
    node: Any = dg.Definitions(assets=[spec]).resolve_asset_graph().get(spec.key)

    def state() -> str:
        found = TimeWindowFreshnessPolicyEvaluator().evaluate_freshness(LoadingContextForTest(instance), node)
        return asyncio.run(found).value

    assert state() == "UNKNOWN"
    write(tmp_path, "orders", 1, 0, 6)
    (event,) = ticked(table_sensor("moved", [spec]), tmp_path, instance, None).asset_events
    instance.report_runless_asset_event(event)
    assert state() == "PASS"
    with freeze_time(dt.datetime.now(dt.UTC) + dt.timedelta(hours=3)):
        assert state() == "FAIL"


def test_a_declared_source_is_an_asset_that_ingests_what_is_new_once(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"id": 1, "n": 2}\n{"id": 2, "n": 3}\n')
    with persist.open(tmp_path / "data") as client:
        reader = Files(place=str(folder), format="jsonl")
        client.sources().create("orders", reader, SCHEMA, meaning=Meaning(envelope="upsert"))
    seen: list[int] = []

    @dg.asset
    def report(orders: list[dict[str, Any]]) -> None:
        seen.append(len(orders))

    assets: list[Any] = [source_asset("orders"), report]
    for _ in range(2):
        done = dg.materialize(assets, resources=resources(tmp_path / "data"), instance=instance)
        assert done.success
    (made,) = done.asset_materializations_for_node("ingest_orders")
    assert int(str(made.metadata["location_requests"].value)) > 0
    assert seen == [2, 2]
    (folder / "b.jsonl").write_text('{"id": 3, "n": 2}\n')
    assert dg.materialize(assets, resources=resources(tmp_path / "data"), instance=instance).success
    assert seen[-1] == 3
    with pytest.raises(InvalidUsage, match="seconds must be positive"):
        source_asset("orders", seconds=0)


def test_the_resource_gives_tables(tmp_path: Path) -> None:
    @dg.asset
    def direct(persist: Persist) -> None:
        persist.table("direct", SCHEMA).append([{"id": 1, "n": 1}])

    assert dg.materialize([direct], resources=resources(tmp_path)).success
    with persist.open(tmp_path) as client, client.table("direct") as table:
        assert table.count() == 1


def test_a_table_may_have_an_asset_of_another_name(tmp_path: Path) -> None:
    write(tmp_path, "raw.orders", 7, 0, 6)
    seen = []

    @dg.asset
    def report(mine: list[dict[str, Any]]) -> None:
        seen.append([row["id"] for row in mine])

    spec = table_spec("raw.orders", key=dg.AssetKey("mine"))
    assert dg.materialize([spec, report], selection=[report], resources=resources(tmp_path)).success
    assert seen == [[7]]


def test_an_input_is_a_relation_of_duckdb_where_it_is_annotated_so(tmp_path: Path) -> None:
    seen = []

    @dg.asset(metadata={"persist/key": "id"})
    def orders() -> list[dict[str, Any]]:
        return [{"id": 1, "n": 2}, {"id": 2, "n": 5}]

    @dg.asset
    def total(orders: duckdb.DuckDBPyRelation) -> None:
        seen.append(orders.aggregate("sum(n)").fetchall())

    assert dg.materialize([orders, total], resources=resources(tmp_path)).success
    assert seen == [[(7,)]]


def test_a_partition_of_time_loads_what_happened_in_its_window_and_waits_until_it_is_over(tmp_path: Path) -> None:
    """Each update is in one window: the first moment of a day is in it, and that of the next day is not."""
    write(tmp_path, "visits", 9, 0, ms(0))
    for id_, (lower, upper) in enumerate([(ms(0), ms(1) - 1), (ms(1) - 1, ms(1)), (ms(1), ms(1.5)), (ms(1.5), ms(2))]):
        write(tmp_path, "visits", id_, lower, upper)
    days = dg.DailyPartitionsDefinition(start_date=DAY)
    seen: dict[str, list[tuple[int, int]]] = {}

    @dg.asset(partitions_def=days, ins={"visits": dg.AssetIn(metadata={"persist/window": True})})
    def daily(context: dg.AssetExecutionContext, visits: list[dict[str, Any]]) -> None:
        seen[context.partition_key] = sorted((row["id"], row["_diff"]) for row in visits)

    assets: list[Any] = [table_spec("visits"), daily]

    def run(key: str, *, check: bool = True) -> dg.ExecuteInProcessResult:
        return dg.materialize(
            assets, selection=[daily], partition_key=key, resources=resources(tmp_path), raise_on_error=check
        )

    run("2026-11-20")
    run("2026-11-21")
    assert seen == {"2026-11-20": [(0, 1), (1, 1)], "2026-11-21": [(2, 1), (3, 1)]}
    with pytest.raises(NotComplete):
        run("2026-11-22")

    @dg.asset(ins={"visits": dg.AssetIn(metadata={"persist/window": True})})
    def whole(visits: list[dict[str, Any]]) -> None: ...

    with pytest.raises(InvalidUsage, match="partitions of time"):
        dg.materialize([table_spec("visits"), whole], selection=[whole], resources=resources(tmp_path))
