"""Which `as_of` a load reads: the newest complete time, or an earlier one that was asked for.

    AssetIn(metadata={"persist/as_of": 17})        this input
    run tag persist/as_of: 17                      all inputs of the run
    run tag persist/as_of: {"orders": 17, "customers": {"eu": 3}}       these
    run tag persist/inputs_of: <run id>            what that run read

The input's own metadata comes first, then `persist/as_of`, then `persist/inputs_of`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from orchestration.io.names import Place
from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.frontier import MAX_TIME

AS_OF, INPUTS_OF = "persist/as_of", "persist/inputs_of"
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

    def of(self, place: Place) -> int | None:
        """The time at which to read this; None for the newest."""
        for given in (self._input, self._run):
            if (time := _chosen(given, place)) is not None:
                return time
        if self._earlier is None:
            return None
        if (time := self._earlier.get(place.shard)) is None:
            raise NotFound(
                f"run {self._earlier_run} did not read {place}, so its as_of is not known. Say it by the run tag "
                f"{AS_OF}, or leave out the tag {INPUTS_OF}"
            )
        return time


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _no_time(text) from error


def _chosen(given: Any, place: Place) -> int | None:
    if isinstance(given, Mapping):
        key = "/".join(place.asset)
        inner = given.get(key)
        if isinstance(inner, Mapping):
            return None if place.partition is None else _chosen(inner.get(place.partition), place)
        return None if inner is None else _chosen(inner, place)
    if given is None:
        return None
    if isinstance(given, str):
        given = _parsed(given)
    if type(given) is not int or not 0 <= given <= MAX_TIME:
        raise _no_time(given)
    return given


def _no_time(given: object) -> InvalidUsage:
    return InvalidUsage(
        f"{AS_OF} is a time, like 17, or for a run also times by asset and partition, like "
        f'{{"orders": 17, "customers": {{"eu": 3}}}}; got {shown(given)}',
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
