"""For definitions of your own: tables and sources of a location as assets.

    import dagster as dg
    from orchestration.io_manager import PersistIOManager
    from orchestration.resources import Persist
    from orchestration.tables import source_asset, table_sensor, table_spec

    persist = Persist(location="s3://bucket/prefix", consensus="postgresql://…")

    @dg.asset(deps=["payments"], automation_condition=dg.AutomationCondition.eager())
    def open_payments(persist: Persist) -> int:
        return persist.table("payments").count(filter=[("state", "=", "open")])

    defs = dg.Definitions(
        assets=[table_spec("payments"), source_asset("orders_files", ["orders"]), open_payments],
        sensors=[table_sensor("tables_moved", ["payments"])],
        resources={"persist": persist, "io_manager": PersistIOManager(persist=persist)},
    )

A table that a program outside of Dagster writes is an external asset. The sensor reports that it has moved, so that
automation conditions, freshness policies and the page of the asset know of it.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG

from jobs import program
from jobs.stop import stopping
from orchestration.complete import time_shown, upper_of
from orchestration.io.names import TABLE
from orchestration.resources import Persist, traced
from persist_lib.arguments import parse_number
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.location.wrap.spending import Spending
from persist_lib.table.table import Table


def key_of(table: str) -> dg.AssetKey:
    """The key of the asset of a table: `raw.orders` is raw/orders, and so is `raw/orders`."""
    return dg.AssetKey(re.split(r"[./]", table))


def table_spec(table: str, *, io_manager: str = "io_manager", **options: Any) -> dg.AssetSpec:
    """A table that something outside of these definitions writes, as an external asset.

    `io_manager` is the key of the `PersistIOManager` by which assets downstream load it. `options` are those of
    `dg.AssetSpec`, such as `freshness_policy`, `group_name` or `owners`; `key`, if it is not the table's name.
    """
    metadata = {TABLE: table, **options.pop("metadata", {})}
    kinds = {"persist", *options.pop("kinds", ())}
    key = options.pop("key", key_of(table))
    return dg.AssetSpec(key, metadata=metadata, kinds=kinds, **options).with_io_manager_key(io_manager)


def table_sensor(
    name: str,
    tables: Sequence[str | dg.AssetSpec],
    *,
    resource: str = "persist",
    interval_s: int = 60,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that reports each of these tables as materialized whenever its upper has moved. It starts no run.

    `tables` are names, or specs made by `table_spec`. The data version is the upper, so that what is downstream shows
    as unsynced; the metadata says up to when the table is complete. A table that is not there is left out, and named.
    """
    keys = {
        str(one.metadata[TABLE]) if isinstance(one, dg.AssetSpec) else one: (
            one.key if isinstance(one, dg.AssetSpec) else key_of(one)
        )
        for one in tables
    }

    @dg.sensor(
        name=name, minimum_interval_seconds=interval_s, default_status=status, required_resource_keys={resource},
        description=f"Reports that {', '.join(keys)} moved.",
    )  # fmt: skip
    def moved(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        persist: Persist = getattr(context.resources, resource)
        seen: dict[str, int] = json.loads(context.cursor or "{}")
        events, found, missing = [], dict(seen), []
        for table, key in keys.items():
            try:
                with persist.table(table) as on:
                    found[table] = upper_of(on)
                    if found[table] > seen.get(table, 0):
                        tags = {DATA_VERSION_TAG: f"{on.name}@{found[table]}"}
                        events.append(dg.AssetMaterialization(key, metadata=_figures(on, found[table]), tags=tags))
            except NotFound:
                missing.append(table)
        says = f"{len(events)} of {len(keys)} tables moved" + (f"; not there: {', '.join(missing)}" if missing else "")
        return dg.SensorResult(asset_events=events, cursor=json.dumps(found), skip_reason=says)

    return moved


def _figures(on: Table, upper: int) -> dict[str, Any]:
    return {"table": on.name, "upper": upper, "complete_up_to": time_shown(on, upper)}


def source_asset(
    source: str, tables: Sequence[str] = (), *, seconds: float = 600.0, resource: str = "persist", **options: Any
) -> dg.AssetsDefinition:
    """An asset for each table that a declared source feeds: a run ingests what is new, until nothing is or time is up.

    Without `tables` there is one, of the source's name. What is not ingested after `seconds` is for the next run.
    Running it again, or twice at once, ingests nothing twice. `options` are those of `table_spec`, for each.
    Raises InvalidUsage where `seconds` is not a positive number.
    """
    if parse_number(seconds, "seconds") <= 0:
        raise InvalidUsage(f"seconds must be positive, as in seconds=600: got {seconds}")
    specs = [table_spec(table, **options) for table in tables or [source]]
    keys = {str(spec.metadata[TABLE]): spec.key for spec in specs}

    @dg.multi_asset(
        name=f"ingest_{program.letters(source)}", specs=specs, required_resource_keys={resource},
        retry_policy=dg.RetryPolicy(max_retries=2, delay=5.0, backoff=dg.Backoff.EXPONENTIAL),
    )  # fmt: skip
    @traced
    def ingested(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        persist: Persist = getattr(context.resources, resource)
        runtime = persist.client.runtime
        ends = runtime.monotonic() + seconds
        with Spending() as spent, stopping() as stop, closing(persist.client.sources()) as sources:
            sources.run(
                source, until_idle=True, stop=lambda: stop.is_set or runtime.monotonic() >= ends
            )  # fmt: skip
        costs = program.spent(spent.cost)
        for table, key in keys.items():
            with persist.table(table) as on:
                upper = upper_of(on)
                figures = _figures(on, upper) | costs
            yield dg.MaterializeResult(
                asset_key=key, metadata=figures, data_version=dg.DataVersion(f"{table}@{upper}")
            )  # fmt: skip
            costs = {}  # they are the run's, and so are counted once

    return ingested
