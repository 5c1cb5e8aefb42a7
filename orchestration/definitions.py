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

from collections.abc import Mapping, Sequence

import dagster as dg

from orchestration import partitions
from orchestration.applied_plans import apply_op
from orchestration.assets import duties_asset
from orchestration.collections import (
    COLLECTIONS,
    collection_schedule,
    collections_check,
    compare_op,
    handover_op,
    rebuild_op,
    tend_op,
)
from orchestration.data import data_assets, data_checks, data_specs
from orchestration.erasures import ERASE, ERASURES, erase_op
from orchestration.factories import asset_of, job_of
from orchestration.fleet import FLEET, PAGE, fleet_op, fleet_schedule
from orchestration.health import HEALTH, alert_sensor, health_check
from orchestration.io_manager import PersistIOManager
from orchestration.jobs import schedules, sweeps
from orchestration.mount import Mount, parse_mount, placed
from orchestration.pending import PENDING, absorb_op, pending_schedule
from orchestration.plans import APPLY, PLANS
from orchestration.pruning import prune_job, prune_schedule
from orchestration.resources import Persist, Spark, spark_config
from orchestration.sensors import sensors
from orchestration.settings import Data, Settings, check
from orchestration.source_reports import SOURCES
from orchestration.sources import INGEST, ingest_op, source_sensor, source_watch, sources_check
from persist_lib.core.duties import BY_NAME, DUTIES

ASSETS: Mapping[str, tuple[str, str]] = {
    COLLECTIONS: (f"The collections of the location. {BY_NAME[COLLECTIONS].does}", partitions.COLLECTIONS),
    SOURCES: ("Outside data that becomes collections, one partition a source.", partitions.SOURCES),
    PENDING: (BY_NAME[PENDING].does, partitions.PENDING),
    ERASURES: (
        "Rows of some keys, taken away for ever: launch the job `erase`, with a table and a file of keys.", "",
    ),
    PLANS: ("What upkeep would do: launch the job `apply` with the run that made a plan, to do exactly that.", ""),
    HEALTH: ("What is wrong in the location: `persist health`, each five minutes.", ""),
    FLEET: ("All shards on one page: damage, duties overdue, debt, dollars, garbage and who holds it.", ""),
    PAGE: ((
        "Shards day by day. The job `fleet` makes the pages of those that the fleet names, once a day; launch it with "
        "`shards` for others."
    ), partitions.SHARDS),
}  # fmt: skip
"""What jobs and sensors report to, beside the duties: what each shows, and its partitions."""


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
    ops = {
        COLLECTIONS: tend_op(mount), "compare": compare_op(mount), "handover": handover_op(mount),
        "rebuild": rebuild_op(mount), INGEST: ingest_op(mount), PENDING: absorb_op(mount), ERASE: erase_op(mount),
        APPLY: apply_op(mount), FLEET: fleet_op(mount, data),
    }  # fmt: skip
    kept = {name: job_of(mount, name, op) for name, op in ops.items()}
    assets = [*(mount.key(duty.name) for duty in DUTIES), *map(mount.key, ASSETS)]
    shown, declared = data_specs(mount, data, assets), data_assets(mount, data)
    names = [job.name for job in (*jobs.values(), *kept.values())]
    prune = prune_job(mount, names, [*assets, *(one.key for one in declared)])
    schedule_status = dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED
    sensor_status = dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED
    return dg.Definitions(
        assets=[duties_asset(mount), *(asset_of(mount, name, *about) for name, about in ASSETS.items()), *shown],
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
