"""The composition root: everything Dagster loads, wired together. Importing it opens nothing.

To mount the pipeline in a code location of your own:

    import dagster as dg
    from orchestration.definitions import build_definitions
    from orchestration.settings import Settings

    @dg.asset
    def report() -> None: ...

    defs = dg.Definitions.merge(
        dg.Definitions(assets=[report]),
        build_definitions(Settings(location="s3://bucket/prefix", consensus="postgresql://…")),
    )

Dagster takes one `Definitions` of a module. Two locations in one, or names that are taken: `name` is the start of each
name in Dagster.

    import dagster as dg
    from orchestration.definitions import build_definitions
    from orchestration.settings import Settings

    defs = dg.Definitions.merge(
        build_definitions(Settings(location="s3://bucket/eu", consensus="postgresql://…"), name="eu"),
        build_definitions(Settings(location="s3://bucket/us", consensus="postgresql://…"), name="us"),
    )
"""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from orchestration.applied_plans import plan_jobs
from orchestration.assets import duties_asset
from orchestration.collections import (
    COLLECTIONS,
    collection_jobs,
    collection_schedule,
    collections_asset,
    collections_check,
)
from orchestration.data import data_assets, data_checks, data_specs
from orchestration.erasures import ERASURES, erasure_jobs, erasures_asset
from orchestration.fleet import FLEET, PAGE, fleet_assets, fleet_jobs, fleet_schedule
from orchestration.health import HEALTH, alert_sensor, health_asset, health_check
from orchestration.io_manager import PersistIOManager
from orchestration.jobs import sweeps
from orchestration.mount import Mount, parse_mount, placed
from orchestration.pending import PENDING, pending_asset, pending_jobs, pending_schedule
from orchestration.plans import PLANS, plans_asset
from orchestration.pruning import prune_job, prune_schedule
from orchestration.resources import Persist, Spark, spark_config
from orchestration.schedules import schedules
from orchestration.sensors import sensors
from orchestration.settings import Data, Settings, check
from orchestration.source_reports import SOURCES
from orchestration.sources import source_jobs, source_sensor, source_watch, sources_asset, sources_check
from persist_lib.core.duties import DUTIES


def build_definitions(
    settings: Settings | None = None,
    *,
    name: str = "",
    key_prefix: Sequence[str] | str | None = None,
    group: str | None = None,
) -> dg.Definitions:
    """Build the whole pipeline. Settings left out are read from the environment when a run or a tick begins.

    With `name`, jobs, schedules, sensors, resources and the partitions of shards are called `<name>_…`, and assets
    `<key_prefix>/<duty>`, by default with `name` as the prefix, in the group `group`, by default `name`.

    Raises InvalidUsage for a setting that cannot be right, also for one in the environment, before anything is opened.
    """
    settings, mount = settings or Settings(), parse_mount(name, key_prefix, group)
    checked = check(settings)
    mount = placed(mount, checked)
    data, is_running = checked.data or Data(), checked.is_running
    jobs = sweeps(mount)
    kept = {
        **collection_jobs(mount), **source_jobs(mount), **pending_jobs(mount), **erasure_jobs(mount),
        **plan_jobs(mount), **fleet_jobs(mount, data),
    }  # fmt: skip
    assets = [
        *(mount.key(duty.name) for duty in DUTIES),
        *map(mount.key, (COLLECTIONS, SOURCES, PENDING, ERASURES, PLANS, HEALTH, FLEET, PAGE)),
    ]
    shown, declared = data_specs(mount, data, assets), data_assets(mount, data)
    names = [job.name for job in (*jobs.values(), *kept.values())]
    prune = prune_job(mount, names, [*assets, *(one.key for one in declared)])
    schedule_status = dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED
    sensor_status = dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED
    return dg.Definitions(
        assets=[
            duties_asset(mount),
            collections_asset(mount),
            sources_asset(mount),
            pending_asset(mount),
            erasures_asset(mount),
            plans_asset(mount),
            health_asset(mount),
            *fleet_assets(mount),
            *shown,
        ],
        asset_checks=[collections_check(mount), sources_check(mount), health_check(mount), *data_checks(mount, data)],
        jobs=[*jobs.values(), *kept.values(), prune],
        schedules=[
            *schedules(mount, jobs, schedule_status),
            collection_schedule(mount, kept[COLLECTIONS], schedule_status),
            pending_schedule(mount, kept[PENDING], schedule_status),
            fleet_schedule(mount, kept[FLEET], schedule_status),
            prune_schedule(mount, prune, settings, schedule_status),
        ],
        sensors=[
            *sensors(mount, sensor_status, [one.partitions for one in declared if one.partitions]),
            source_sensor(mount),
            source_watch(mount, sensor_status),
            alert_sensor(mount, settings, names, sensor_status),
        ],
        resources=_resources(mount, settings),
    )


def _resources(mount: Mount, settings: Settings) -> dict[str, object]:
    persist = Persist(
        location=settings.location or "", consensus=settings.consensus or "", config=dict(settings.config),
        prices=settings.prices or "", apply=settings.apply or "", in_flight=settings.in_flight or 0,
        may_delete="" if settings.may_delete is None else str(int(settings.may_delete)),
    )  # fmt: skip
    return {
        mount.persist: persist,
        mount.spark: Spark(spark_config=spark_config(settings.spark) if settings.spark else {}),
        mount.io: PersistIOManager(persist=persist),
    }


defs = build_definitions()
