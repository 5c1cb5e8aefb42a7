"""Schedules for duties that are due by the clock. Duties that are due by the state of shards are in `sensors`."""

from __future__ import annotations

import dagster as dg

from orchestration.jobs import SWEEPS
from persist_lib.core.duties import DUTIES


def schedules(status: dg.DefaultScheduleStatus) -> list[dg.ScheduleDefinition]:
    """One schedule for each duty that is due by the clock. Each run is one process for all shards."""
    return [
        dg.ScheduleDefinition(
            name=f"{duty.name}_schedule",
            job=SWEEPS[duty.name],
            cron_schedule=duty.schedule,
            execution_timezone="UTC",
            default_status=status,
            tags={"persist/duty": duty.name},
        )
        for duty in DUTIES
        if duty.schedule
    ]
