"""For definitions of your own: a sensor that asks for runs once a time of a table is complete, and a check of its lag.

    import dagster as dg
    from orchestration.complete import complete_sensor, lag_check
    from orchestration.io_manager import PersistIOManager
    from orchestration.resources import Persist

    days = dg.DailyPartitionsDefinition(start_date="2026-11-01")
    persist = Persist(location="s3://bucket/prefix", consensus="postgresql://…")

    @dg.asset(partitions_def=days)
    def daily_report(context: dg.AssetExecutionContext, orders: list[dict]) -> None:
        context.log.info("%s: %d orders", context.partition_key, len(orders))

    defs = dg.Definitions(
        assets=[dg.AssetSpec("orders").with_io_manager_key("io_manager"), daily_report],
        sensors=[complete_sensor("report_days", "orders", daily_report, partitions=days)],
        asset_checks=[lag_check(dg.AssetKey("daily_report"), "orders", within="1 hour")],
        resources={"persist": persist, "io_manager": PersistIOManager(persist=persist)},
    )

What is complete is what upper has passed: nothing can be added to it any more, by any program. A table whose times are
a clock, and that is only quiet, is completed up to the store's clock by an empty commit, as when it is read.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import json
from collections.abc import Iterator
from typing import Any

import dagster as dg

from jobs.program import letters
from orchestration.io.times import AS_OF
from orchestration.resources import Persist
from persist_lib.arguments import parse_integer
from persist_lib.errors import InvalidUsage, NotComplete
from persist_lib.table.table import Table
from persist_lib.times import PER_SECOND, Times

MOST = 25
"""How many partitions a tick asks for."""


def complete_sensor(
    name: str,
    table: str,
    target: Any,
    *,
    partitions: dg.TimeWindowPartitionsDefinition | None = None,
    resource: str = "persist",
    most: int = MOST,
    interval_s: int = 60,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that asks for a run of `target` (assets or a job) whenever more of `table` is complete.

    With `partitions`, for a run of each partition once upper has passed its end, in order, at most `most` a tick; the
    first is the newest that is complete, and earlier ones are for a backfill. Without, for one run whenever upper has
    moved. Each is asked for once. The run's tag `persist/as_of` has the last complete time for the input of the table's
    name, which the IO manager reads: so it is the same rows in each retry. `resource` is the key of a `Persist`.
    Raises InvalidUsage, in a tick, where the times of the table are not a clock and `partitions` are given.
    """
    most = parse_integer(most, "most", 1)

    @dg.sensor(
        name=name, target=target, minimum_interval_seconds=interval_s, default_status=status,
        required_resource_keys={resource}, description=f"Asks for runs once a time of the table {table} is complete.",
    )  # fmt: skip
    def complete(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        persist: Persist = getattr(context.resources, resource)
        with persist.client.table(table) as on:
            seen = int(context.cursor) if context.cursor else None
            if partitions is not None:
                return _asked_for(on, list(_windows(on, partitions, seen, most)))
            upper = upper_of(on)
        if upper <= (seen or 0):
            return dg.SensorResult(skip_reason=f"{table} is complete up to {time_shown(on, upper)}, as before")
        return dg.SensorResult(run_requests=[_request(table, f"{table}@{upper}", upper)], cursor=str(upper))

    return complete


def lag_check(asset: dg.AssetKey, table: str, within: object, *, resource: str = "persist") -> dg.AssetChecksDefinition:
    """A check of `asset` that is red while `table` is complete only up to longer ago than `within`, as "1 hour".

    It completes nothing: of a quiet table it says when that was written last. Raises InvalidUsage for a wrong length.
    """
    Times("ms", lambda: 0).distance(within, "within")

    @dg.asset_check(
        asset=asset, name=f"{letters(table)}_is_recent", required_resource_keys={resource},
        description=f"The table {table} is complete up to {within} ago, or later.",
    )  # fmt: skip
    def is_recent(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        persist: Persist = getattr(context.resources, resource)
        with persist.client.table(table) as on:
            unit = _unit(on, "lag_check")
            upper, now_s = upper_of(on), persist.client.consensus.now() / 1000
        behind_s = now_s - upper / PER_SECOND[unit]
        return dg.AssetCheckResult(
            passed=behind_s * PER_SECOND[unit] <= Times(unit, lambda: 0).distance(within, "within"),
            description=f"{table} is complete up to {time_shown(on, upper)}",
            metadata={"behind_s": round(behind_s, 3), "upper": upper},
        )

    return is_recent


def _windows(
    on: Table, partitions: dg.TimeWindowPartitionsDefinition, seen: int | None, most: int
) -> Iterator[tuple[str, int, bool]]:
    """The partitions after the one that ended at `seen`, each with its end and whether it is complete.

    None after the first that is not. Without `seen`, from the newest on that upper has passed.
    """
    tick = PER_SECOND[_unit(on, "complete_sensor with partitions")]
    ends = [
        (key, round(partitions.time_window_for_partition_key(key).end.timestamp() * tick))
        for key in partitions.get_partition_keys()  # those that have ended by now
    ]
    upper = upper_of(on)
    if seen is None:
        passed = [end for _, end in ends if end <= upper]
        seen = passed[-1] - 1 if passed else 0
    for key, end in [one for one in ends if one[1] > seen][:most]:
        yield key, end, (found := end <= upper or is_complete(on, end))
        if not found:
            return


def is_complete(on: Table, end: int) -> bool:
    """Whether nothing can come before `end` any more. Completes a quiet time that the store's clock has passed."""
    if upper_of(on) >= end:
        return True
    try:
        on.read(end - 1, columns=[]).release()
    except NotComplete:
        return False
    return True


def _asked_for(on: Table, found: list[tuple[str, int, bool]]) -> dg.SensorResult:
    complete = [(key, end) for key, end, is_there in found if is_there]
    waits = next((key for key, _, is_there in found if not is_there), None)
    left = "no later partition has ended" if waits is None else f"{waits} is not complete"
    says = f"{on.name} is complete up to {time_shown(on, upper_of(on))}; {left}"
    if not complete:
        return dg.SensorResult(skip_reason=says)
    requests = [_request(on.name, f"{on.name}@{key}", end, key) for key, end in complete]
    return dg.SensorResult(run_requests=requests, cursor=str(complete[-1][1]))


def _request(table: str, run_key: str, end: int, partition: str | None = None) -> dg.RunRequest:
    as_of = dict.fromkeys((table, table.replace(".", "/")), end - 1)  # by the table's name, and by its asset's key
    return dg.RunRequest(run_key, partition_key=partition, tags={AS_OF: json.dumps(as_of)})


def upper_of(on: Table) -> int:
    """Up to which time the table is complete; 2^63 - 1 where it is closed."""
    upper = on.describe().upper.time
    return (1 << 63) - 1 if upper is None else upper


def _unit(on: Table, what: str) -> Any:
    if on.schema.times is None:
        raise InvalidUsage(
            f"{what} needs times that are a clock, and those of table {on.name!r} are plain integers, which have no "
            "days. Create the table with times=ms",
            table=on.name,
        )
    return on.schema.times


def time_shown(on: Table, time: int) -> str:
    """A time as people read it, where times are a clock."""
    return Times(on.schema.times, lambda: 0).show(time)
