"""The composition root: everything Dagster loads, wired together. Importing it opens nothing and reads nothing.

To mount the pipeline in a code location of your own:

    defs = dg.Definitions.merge(my_defs, build_definitions(Settings(location="s3://bucket/prefix", consensus="postgresql://…")))
"""

from __future__ import annotations

import dagster as dg

from orchestration.assets import shard_duties
from orchestration.io_manager import PersistIOManager
from orchestration.jobs import SWEEPS
from orchestration.resources import Persist, Spark, spark_config
from orchestration.schedules import schedules
from orchestration.sensors import sensors
from orchestration.settings import Settings


def build_definitions(settings: Settings | None = None) -> dg.Definitions:
    """Build the whole pipeline. Settings left out are read from the environment when a run or a tick begins."""
    settings = settings or Settings()
    persist = Persist(
        location=settings.location or "", consensus=settings.consensus or "", config=dict(settings.config),
        prices=settings.prices or "",
    )  # fmt: skip
    is_running = settings.is_running
    return dg.Definitions(
        assets=[shard_duties],
        jobs=list(SWEEPS.values()),
        schedules=schedules(dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED),
        sensors=sensors(dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED),
        resources={
            "persist": persist,
            "spark": Spark(spark_config=spark_config(settings.spark) if settings.spark else {}),
            "persist_io": PersistIOManager(persist=persist),
        },
    )


defs = build_definitions()
