"""The location on one page: the asset `fleet`, and a page of each shard that it names, by a job each hour.

    persist report              says the same at a shell, and `persist report NAME` what a shard's page does

The same run reports to the assets of tables and sources (`data`), as all of it is of one survey.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import dagster as dg
from dagster._core.events import DagsterEventType
from pydantic import Field

from orchestration.collection_reports import table
from orchestration.data import data_events, keep_tables
from orchestration.factories import Tick, op_of, schedule_of
from orchestration.mount import Mount
from orchestration.partitions import SHARDS, add_missing
from orchestration.reports import DATA_VERSION, Event, figure
from orchestration.resources import Persist
from orchestration.settings import Data
from persist_lib import report
from persist_lib.client import Client
from persist_lib.core.units import size
from persist_lib.errors import PersistError
from persist_lib.location.wrap.spending import Spending
from persist_lib.report import Document, Fleet, Row, ShardPage
from persist_lib.runtime.each import why

FLEET, PAGE = "fleet", "shard_page"
CRON = "37 * * * *"
PAGES_EACH_S = 20 * 3600.0
"""How often the page of a shard is made again by itself: each is some 40 kB in Dagster's storage."""
TOTALS = ("debt", "dollars_month", "stored", "held", "collectable", "updates")
clock: Callable[[], float] = time.time


class FleetConfig(dg.Config):
    """What is on the page, and which shards get one."""

    shards: list[str] = Field(
        default=[], description="make the pages of these now; empty: of those that the fleet names"
    )
    most: int = Field(default=report.MOST, ge=1, description="how many shards each table of the fleet has")
    days: int = Field(default=30, ge=1, le=366, description="how many days the page of a shard goes back")


def fleet_schedule(mount: Mount, job: dg.JobDefinition, status: dg.DefaultScheduleStatus) -> dg.ScheduleDefinition:
    """Report each hour, where there is a shard."""

    def each_hour(persist: Persist) -> Tick:
        return dg.RunRequest() if persist.client.consensus.heads() else dg.SkipReason("there are no shards")

    return schedule_of(mount, job, CRON, status, "Puts all shards on one page, each hour.", each_hour)


def fleet_op(mount: Mount, data: Data) -> dg.OpDefinition:
    """Look at all shards once, and report to the fleet, to the pages, and to the assets of tables and sources."""

    def of_shards(context: dg.OpExecutionContext, config: FleetConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        client, began = persist.client, clock()
        try:
            with Spending() as spent:
                found = report.fleet(client)
                named = partial(link, mount)
                document = report.shown(found, most=config.most, picture=True)
                keep_tables(context.instance, mount, data, found)
                yield from data_events(context.instance, mount, data, found)
                wanted = config.shards or stale(context.instance, mount, on_page(document, found))
                yield from pages(context, mount, client, wanted, config.days)
        except PersistError as error:
            raise dg.Failure(why(error), allow_retries=False) from error
        seconds = {"location_requests": figure(spent.cost.requests), "seconds": figure(round(clock() - began, 3))}
        yield dg.AssetMaterialization(
            mount.key(FLEET), description=document.lines[0],
            metadata={"page": dg.MetadataValue.md(report.markdown(document, named)), **figures(found), **seconds},
        )  # fmt: skip

    says = "Put all shards on one page, and each that it names on one of its own, as `persist report` does."
    return op_of(mount, "reporting_of_shards", says, of_shards)


def link(mount: Mount, shard: str) -> str:
    """The page of a shard in Dagster: its partition of the asset of pages."""
    key = "/".join(quote(part, safe="") for part in mount.key(PAGE).path)
    return f"/assets/{key}?view=partitions&partition={quote(shard, safe='')}"


def figures(found: Fleet) -> dict[str, Any]:
    """The sums over all shards, which draw timelines, and the shards with something to look at, as a table."""
    wrong = {"shards": len(found.rows), "damaged": len(found.damaged), "not_looked_at": found.waiting,
             "overdue": sum(1 for row in found.rows if row.overdue),
             "paused": sum(1 for row in found.rows if row.paused)}  # fmt: skip
    totals = {name: found.total(name) for name in TOTALS}
    first = [
        *found.damaged,
        *(row for rows in found.overdue.values() for row in rows),
        *found.most(lambda row: row.debt),
    ]
    rows = list({row.shard: row for row in first}.values())[: report.MOST]
    return {name: figure(value) for name, value in (wrong | totals).items()} | {"first": table(list(map(_line, rows)))}


def _line(row: Row) -> dict[str, Any]:
    return {
        "shard": row.shard, "whose": row.owner, "damaged": row.damaged, "overdue": ", ".join(row.overdue),
        "debt": row.debt, "held": size(row.held), "by": row.held_by,
    }  # fmt: skip


def on_page(document: Document, found: Fleet) -> list[str]:
    """The shards that a page of the fleet names, and whose state can be read."""
    unread = {row.shard for row in found.rows if row.unread and not row.damaged}
    named = (row[0] for one in document.tables if one.of_shards for row in one.rows)
    return [shard for shard in dict.fromkeys(named) if shard not in unread]


def stale(instance: dg.DagsterInstance, mount: Mount, shards: Sequence[str]) -> list[str]:
    """Those whose page is not there, or was made long ago."""
    latest = instance.event_log_storage.get_latest_storage_id_by_partition(
        mount.key(PAGE), DagsterEventType.ASSET_MATERIALIZATION, set(shards)
    )
    wanted = dg.AssetRecordsFilter(asset_key=mount.key(PAGE), storage_ids=sorted(latest.values()))
    there = instance.fetch_materializations(wanted, limit=max(1, len(latest))).records if latest else ()
    fresh = {one.partition_key for one in there if clock() - one.timestamp < PAGES_EACH_S}
    return [shard for shard in shards if shard not in fresh]


def pages(
    context: dg.OpExecutionContext, mount: Mount, client: Client, shards: Sequence[str], days: int
) -> Iterator[dg.AssetMaterialization]:  # fmt: skip
    """The pages of these shards. One that fails stops none of the others, and is said in the log."""
    there: dict[str, ShardPage] = {}
    for shard in shards:
        try:
            there[shard] = report.shard(client, shard, days)
        except PersistError as error:
            context.log.warning("no page of %s: %s", shard, why(error))
    add_missing(context.instance, mount, SHARDS, there)
    for shard, page in there.items():
        document = report.shown(page, picture=True)
        numbers: Mapping[str, float] = {
            "batches": page.census.batches, "debt": page.census.debt, "dollars_month": page.census.dollars_month,
            "damaged": len(page.damage), "days_known": len(page.days), "transitions_missing": page.missing,
        }  # fmt: skip
        yield dg.AssetMaterialization(
            mount.key(PAGE), partition=shard, description=page.owner or None,
            metadata={"page": dg.MetadataValue.md(report.markdown(document)),
                      **{name: figure(value) for name, value in numbers.items()}},
            tags={DATA_VERSION: str(page.census.seqno)},
        )  # fmt: skip
