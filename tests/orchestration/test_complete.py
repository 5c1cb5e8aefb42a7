"""Sensors of users over tables: a partition is asked for once, when it is complete, and not before."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.complete import complete_sensor, is_complete, lag_check
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist
from persist_lib.errors import InvalidUsage
from tests.worlds import World

pytestmark = pytest.mark.dagster
SCHEMA = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms")
TODAY = dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAYS = dg.DailyPartitionsDefinition(start_date=TODAY - dt.timedelta(days=5), end_date=TODAY)  # though it gets midnight


def day(back: int) -> str:
    return f"{TODAY - dt.timedelta(days=back):%Y-%m-%d}"


def ms(back: float) -> int:
    return round((TODAY - dt.timedelta(days=back)).timestamp() * 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with persist.open(tmp_path) as client:
        client.open_writer("orders", SCHEMA).close()
    return tmp_path


def write(folder: Path, id_: int, lower: int, upper: int) -> None:
    """An append with a time of its own, as of events: such a table is never completed by its clock."""
    with persist.open(folder) as client, client.open_writer("orders", SCHEMA) as handle:
        handle.compare_and_append([{"id": id_, "n": id_, "_time": lower}], lower, upper)


@dg.asset(partitions_def=DAYS)
def report() -> None: ...


def tick(folder: Path, cursor: str | None = None, **more: Any) -> Any:
    target = more.pop("target", report)
    assets = [target] if target is report else [dg.AssetSpec("orders"), target]
    sensor = complete_sensor("days", "orders", target, **{"partitions": DAYS, **more})
    persist_ = Persist(location=f"file:{folder}")
    definitions = dg.Definitions(assets=assets, sensors=[sensor], resources={"persist": persist_})
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(
            cursor=cursor, resources={"persist": persist_}, instance=instance, definitions=definitions
        ) as context,
    ):
        return sensor.evaluate_tick(context)


def asked(found: Any) -> list[str]:
    return [one.tags["dagster/partition"] for one in found.run_requests or ()]


def test_a_day_is_asked_for_once_it_is_complete_and_never_before(folder: Path) -> None:
    write(folder, 1, 0, ms(2) - 1)
    first = tick(folder)
    assert asked(first) == [day(4)], "the newest that is complete; earlier ones are for a backfill"
    waits = tick(folder, first.cursor)
    assert asked(waits) == []
    assert f"{day(3)} is not complete" in str(waits.skip_message)
    write(folder, 2, ms(2) - 1, ms(2))
    assert asked(tick(folder, first.cursor)) == [day(3)], "upper is its end"
    write(folder, 3, ms(2), ms(0) + 5)
    rest = tick(folder, str(ms(2)))
    assert asked(rest) == [day(2), day(1)]
    assert [one.run_key for one in rest.run_requests] == [f"orders@{day(2)}", f"orders@{day(1)}"]
    assert json.loads(rest.run_requests[0].tags["persist/as_of"]) == {"orders": ms(1) - 1}
    again = tick(folder, rest.cursor)
    assert asked(again) == []
    assert "no later partition has ended" in str(again.skip_message)


def test_so_many_at_a_time(folder: Path) -> None:
    write(folder, 1, 0, ms(0))
    found = tick(folder, str(ms(4)), most=2)
    assert asked(found) == [day(4), day(3)]
    assert asked(tick(folder, found.cursor, most=2)) == [day(2), day(1)]


def test_a_quiet_table_is_completed_by_the_stores_clock_and_no_further() -> None:
    world = World()
    table = world.client().table("orders", SCHEMA)
    table.append([{"id": 1, "n": 1}])
    upper = table.describe().upper.time or 0
    assert not is_complete(table, upper + 60_000), "the clock has not passed it"
    world.clock.sleep(61)
    assert is_complete(table, upper + 60_000)
    assert (table.describe().upper.time or 0) >= upper + 60_000
    world.close()


def test_without_partitions_each_move_of_upper_asks_for_one_run_that_reads_it(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    io = PersistIOManager(persist=Persist(location=f"file:{folder}"))
    seen: list[list[int]] = []

    @dg.asset
    def total(orders: list[dict]) -> None:  # type: ignore[type-arg]
        seen.append([one["id"] for one in orders])

    write(folder, 1, 0, 5)
    found = tick(folder, partitions=None, target=total)
    (request,) = found.run_requests
    assert not tick(folder, found.cursor, partitions=None, target=total).run_requests
    write(folder, 2, 5, 9)
    orders = dg.AssetSpec("orders").with_io_manager_key("io_manager")
    done = dg.materialize([orders, total], resources={"io_manager": io}, tags=request.tags, instance=instance)
    assert done.success
    assert seen == [[1]], "what was complete when it was asked for"
    assert tick(folder, found.cursor, partitions=None, target=total).cursor == "9"


def test_days_of_integers_are_refused_with_words(tmp_path: Path) -> None:
    with persist.open(tmp_path) as client:
        client.open_writer("orders", persist.Schema({"id": "int64 not null"})).close()
    with pytest.raises(InvalidUsage, match="plain integers"):
        tick(tmp_path)
    with pytest.raises(InvalidUsage, match="most"):
        complete_sensor("days", "orders", report, most=0)


@pytest.mark.parametrize(("back", "passed"), [(0.0, True), (2.0, False)])
def test_a_table_that_stands_still_is_red(
    folder: Path, instance: dg.DagsterInstance, back: float, passed: bool
) -> None:
    write(folder, 1, 0, ms(back))
    check = lag_check(dg.AssetKey("report"), "orders", "25 hours")
    job = dg.Definitions(
        assets=[dg.AssetSpec("report")], asset_checks=[check],
        resources={"persist": Persist(location=f"file:{folder}")},
        jobs=[dg.define_asset_job("check", dg.AssetSelection.all_asset_checks())],
    ).resolve_job_def("check")  # fmt: skip
    (verdict,) = job.execute_in_process(instance=instance).get_asset_check_evaluations()
    assert verdict.passed is passed
    with pytest.raises(InvalidUsage, match="within"):
        lag_check(dg.AssetKey("report"), "orders", "soon")
