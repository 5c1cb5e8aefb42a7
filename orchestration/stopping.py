"""What the cancel of a run leaves: its duties are paused on the shards it did not finish, until each is next scheduled.

The pause is in the location, so `persist maintain` heeds it as Dagster does. A run that a person starts ends it. Where
the process was killed before it could pause anything, `runs.held_back` still keeps the sensors from asking again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import dagster as dg
from dagster._core.storage.tags import (
    AUTO_MATERIALIZE_TAG,
    AUTOMATION_CONDITION_TAG,
    RETRY_NUMBER_TAG,
    SCHEDULE_NAME_TAG,
    SENSOR_NAME_TAG,
)
from dagster._utils.schedules import cron_string_iterator

from orchestration.duties import Duty
from orchestration.mount import Mount
from persist_lib.client import Client
from persist_lib.core.duties import DUTIES
from persist_lib.core.pauses import PAUSABLE
from persist_lib.errors import PersistError
from persist_lib.maintain.pauses import pause_rest, resume_rest

CANCELS = (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)
BY_ITSELF = (SCHEDULE_NAME_TAG, SENSOR_NAME_TAG, AUTO_MATERIALIZE_TAG, AUTOMATION_CONDITION_TAG, RETRY_NUMBER_TAG)
"""Tags of runs that no person started."""


def next_ticks(now_s: float, duties: Sequence[Duty], mount: Mount) -> Mapping[int, list[Duty]]:
    """When the duties that can be paused are next due by a schedule (ms), their own or that of a job with them."""
    found: dict[int, list[Duty]] = {}
    for duty in (duty for duty in duties if duty in PAUSABLE):
        crons = [mount.cron(one.schedule) for one in DUTIES if one.schedule and duty in (one.job or (one.name,))]
        ticks = [next(cron_string_iterator(now_s + 1, cron, "UTC")).timestamp() for cron in crons]
        found.setdefault(int(min(ticks) * 1000), []).append(duty)
    return found


def pause_cancelled(
    context: dg.OpExecutionContext, client: Client, shards: Sequence[str], duties: Sequence[Duty], mount: Mount
) -> None:  # fmt: skip
    """Pause what a cancelled run did not finish. A failure is logged, and stops nothing: the run ends anyway."""
    if not shards:
        return
    try:
        pause_rest(client, shards, next_ticks(time.time(), duties, mount), f"Dagster run {context.run_id}")
    except PersistError as error:
        context.log.warning("what is unfinished could not be paused: %s", error)


def resume_cancelled(context: dg.OpExecutionContext, client: Client, shards: Sequence[str]) -> None:
    """End what cancelled runs left paused on these shards (none: on all), if a person started this run."""
    if not any(tag in context.run.tags for tag in BY_ITSELF):
        resume_rest(client, shards)
