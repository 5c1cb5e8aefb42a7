"""The report of what has a name: of a shard, or of the shards of a table."""

from __future__ import annotations

from persist_lib.arguments import did_you_mean
from persist_lib.client import Client
from persist_lib.errors import InvalidName, NotFound
from persist_lib.health import Limits
from persist_lib.report.fleet_report import Fleet, fleet
from persist_lib.report.shard_page import DAYS, ShardPage, shard


def look(
    client: Client, name: str | None = None, *, days: int = DAYS, limits: Limits | None = None
) -> Fleet | ShardPage:
    """Report on a whole location, or on what has this name. Changes nothing.

    A shard, and a table with one, is a page of `days` days; a table, source, stream or timeline with several is a fleet
    of its shards. Raises NotFound for a name that nothing has, and what `fleet` and `shard` raise.
    """
    if name is None:
        return fleet(client, limits)
    try:
        return shard(client, name, days)
    except (NotFound, InvalidName):
        found = fleet(client, limits)
    if not (own := found.only(name)).rows:
        known = sorted({row.table for row in found.rows})
        raise NotFound(
            f"there is no shard, table or source {name!r} in {client.url}. {did_you_mean(name, known)}`persist tables` "
            "lists tables, `persist shard list --names` shards",
            name=name,
        )
    return own if len(own.rows) > 1 else shard(client, own.rows[0].shard, days)
