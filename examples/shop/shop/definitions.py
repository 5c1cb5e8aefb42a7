"""What Dagster loads: the shop's assets, and the upkeep of its tables beside them."""

# No `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import dagster as dg
import polars as pl
import pyarrow as pa

from orchestration.definitions import build_definitions
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist, Spark
from orchestration.settings import Settings
from orchestration.tables import source_asset
from persist_lib.spark import register
from shop.orders import PAID, per_day

GROUP = "shop"


@dg.asset(group_name=GROUP, metadata={"persist/key": "day"})
def revenue(orders: pl.DataFrame) -> pl.DataFrame:
    """The revenue of each day, by polars. Only the difference to what the table has is stored."""
    return per_day(orders)


@dg.asset(group_name=GROUP, deps=["orders"], metadata={"persist/key": "customer"})
def customers(persist: Persist, spark: Spark) -> pa.Table:
    """What each customer has paid, by Spark, which reads the table itself."""
    session = spark.spark_session
    register(session)
    place = {"location": persist.client.url, "consensus": persist.client.consensus_url}
    orders = session.read.format("persist").options(**place).load("orders")
    paid = orders.where(orders.state == PAID).groupBy("customer").sum("cents")
    return paid.withColumnRenamed("sum(cents)", "cents").toArrow()


@dg.asset_check(
    asset=revenue, additional_ins={"orders": dg.AssetIn("orders")},
    description="Each paid order is in the revenue of one day.",
)  # fmt: skip
def nothing_is_lost(orders: pl.DataFrame, revenue: pl.DataFrame) -> dg.AssetCheckResult:
    """Compare the sums."""
    paid, counted = orders.filter(pl.col("state") == PAID)["cents"].sum(), revenue["cents"].sum()
    return dg.AssetCheckResult(passed=paid == counted, metadata={"paid": int(paid), "counted": int(counted)})


shop_job = dg.define_asset_job("shop", selection=dg.AssetSelection.groups(GROUP))
opened = Persist(create=True)
defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[source_asset("orders", group_name=GROUP), revenue, customers],
        asset_checks=[nothing_is_lost],
        jobs=[shop_job],
        schedules=[dg.ScheduleDefinition(job=shop_job, cron_schedule="*/5 * * * *")],
        resources={"persist": opened, "spark": Spark(), "io_manager": PersistIOManager(persist=opened)},
    ),
    build_definitions(Settings(is_running=True, may_delete=True), name="upkeep"),
)
