"""What is due by the clock. What is due by the state of shards is in `sensors`."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

from orchestration.jobs import SWEEPS

CRONS: Mapping[str, str] = {
    "lease_expiry": "* * * * *",
    "collection": "7 * * * *",
    "counting": "*/15 * * * *",
    "auditing": "23 2 * * *",
    "scrubbing": "41 3 * * 0",
}
"""Minutes are odd on purpose: not everything in the world has to start on the hour."""


def schedules(status: dg.DefaultScheduleStatus) -> list[dg.ScheduleDefinition]:
    """One schedule a job. Each run is one process for all shards."""
    return [
        dg.ScheduleDefinition(
            name=f"{name}_schedule",
            job=SWEEPS[name],
            cron_schedule=cron,
            execution_timezone="UTC",
            default_status=status,
            tags={"persist/duty": name},
        )
        for name, cron in CRONS.items()
    ]
