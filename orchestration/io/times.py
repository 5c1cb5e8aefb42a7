"""Which `as_of` a load reads: the newest complete time, or an earlier one that was asked for.

    AssetIn(metadata={"persist/as_of": 17})        this input (also MetadataValue.timestamp, where times are a clock)
    run tag persist/as_of: 17                      all inputs of the run
    run tag persist/as_of: {"orders": 17, "customers": {"eu": 3}}       these
    run tag persist/inputs_of: <run id>            what that run read

Of a shard whose times are a clock, a time may also be a datetime or a text, like "2026-11-22T12:00Z" or "1 hour ago":
an hour before the run was created, so that all its steps and retries read the same. What was read is recorded as
integers, which `persist/inputs_of` reads again exactly.

The input's own metadata comes first, then `persist/as_of`, then `persist/inputs_of`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from orchestration.io.names import Place
from persist_lib.arguments import native, shown
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.frontier import MAX_TIME
from persist_lib.times import is_moment, is_time_text, once

AS_OF, INPUTS_OF = "persist/as_of", "persist/inputs_of"
AS_OF_TIME = "as_of_time"
"""Metadata of materializations and loads, beside the integer `as_of`: the time for people, where times are a clock."""
PAGE = 1000


class Asked:
    """The times that were asked for, of one input. Dagster's event log is read at most once."""

    def __init__(
        self, instance: Callable[[], dg.DagsterInstance], tags: Mapping[str, str], metadata: Mapping[str, Any]
    ) -> None:
        self._input = metadata.get(AS_OF)
        self._run = _parsed(tags[AS_OF]) if AS_OF in tags else None
        self._earlier = None if INPUTS_OF not in tags else _inputs_of(instance(), tags[INPUTS_OF])
        self._earlier_run = tags.get(INPUTS_OF)

    def of(self, place: Place) -> object:
        """The time at which to read this, as it was written; None for the newest."""
        for given in (self._input, self._run):
            if (time := _chosen(given, place)) is not None:
                return time
        if self._earlier is None:
            return None
        if (time := self._earlier.get(place.table)) is None:
            raise NotFound(
                f"run {self._earlier_run} did not read {place}, so its as_of is not known. Say it by the run tag "
                f"{AS_OF}, or leave out the tag {INPUTS_OF}"
            )
        return time


def _parsed(text: str) -> Any:
    if is_time_text(text):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise _no_time(text) from error


def _chosen(given: Any, place: Place) -> object:
    if isinstance(given, Mapping):
        key = "/".join(place.asset)
        inner = given.get(key)
        if isinstance(inner, Mapping):
            return None if place.partition is None else _chosen(inner.get(place.partition), place)
        return None if inner is None else _chosen(inner, place)
    if given is None:
        return None
    if isinstance(given, dg.TimestampMetadataValue):  # seconds as a float, from which this makes whole microseconds
        given = dt.datetime.fromtimestamp(given.value, dt.UTC)
    if isinstance(given, str):
        given = _parsed(given)
    if is_moment(given) and not (isinstance(given, str) and not is_time_text(given)):
        return given  # what it means depends on the shard
    found = native(given)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_TIME:
        raise _no_time(given)
    return found


def clock_of(context: dg.InputContext, client: Client) -> Callable[[], int]:
    """By what texts like "1 hour ago" are meant: when the run was created, or now where there is no run."""

    def ask() -> int:
        if context.has_input_name:
            record = context.instance.get_run_record_by_id(context.step_context.run_id)
            if record is not None:
                return int(record.create_timestamp.timestamp() * 1_000)
        return client.consensus.now()

    return once(ask)


def _no_time(given: object) -> InvalidUsage:
    return InvalidUsage(
        f"{AS_OF} is a time, like 17, of a clock also a text like '2026-11-22T12:00Z' or '1 hour ago', or for a run "
        f'also times by asset and partition, like {{"orders": 17, "customers": {{"eu": 3}}}}; got {shown(given)}',
        as_of=given,
    )


def _inputs_of(instance: dg.DagsterInstance, run_id: str) -> dict[str, int]:
    """The time at which that run first read each shard."""
    if instance.get_run_by_id(run_id) is None:
        raise NotFound(f"{INPUTS_OF} names the run {run_id}, and this instance has no such run", run=run_id)
    found: dict[str, int] = {}
    for read in _observed(instance, run_id):
        for shard, time in read.items():
            found.setdefault(shard, time)
    return found


def _observed(instance: dg.DagsterInstance, run_id: str) -> Iterator[dict[str, int]]:
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(
            run_id, cursor=cursor, of_type=dg.DagsterEventType.ASSET_OBSERVATION, limit=PAGE
        )
        for record in page.records:
            observation = record.event_log_entry.asset_observation
            if observation is not None and (read := observation.metadata.get(READ)) is not None:
                yield read.value  # type: ignore[misc]
        if not page.has_more:
            return
        cursor = page.cursor


READ = "read"
"""The metadata of a load: the time by shard."""
