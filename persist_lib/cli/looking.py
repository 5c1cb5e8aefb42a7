"""`persist shards`, `census` and `plan`: which shards there are, and what there is to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from persist_lib.cli import damage, render, units
from persist_lib.cli.arguments import AllShards, Shard, Shards, chosen, each
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable, plan_value, worst
from persist_lib.errors import PersistError

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client


def shards(
    session: Session,
    names_only: Annotated[
        bool, typer.Option("--names", help="Print only the names, one a line, and open no shard.")
    ] = False,
) -> None:
    """List all shards, one line each: frontiers, size, batches, debt, garbage, readers and holds.

    Yellow means work for [bold]persist maintain[/]; red means more batches than there should be. A shard that cannot be
    read is listed with the reason.

    \b
    persist shards
    persist shards --location s3://bucket/prefix --consensus postgresql://…
    persist shards --names | xargs -n 1 persist show
    persist shards --json | jq '.shards[] | select(.debt > 1000000) | .shard'
    """
    with session.open() as client:
        names = client.shards()
        if names_only:
            session.answer({"shards": names}, *names)
            return
        found, failed = each(session, names, client.census)
        of = whose(client, names)
    total = sum(census.dollars_month for census in found)
    summary = f"{units.of(len(names), 'shard')} in {client.url}, {units.dollars(total)} a month for storage"
    session.answer(
        {
            "location": client.url,
            "shards": [{**jsonable(one), "owner": of.get(one.shard, "")} for one in found],
            "failed": dict(_reasons(failed)),
        },
        render.shards_table(found, _reasons(failed), of),
        summary,
    )
    if failed:
        raise typer.Exit(worst([error for _, error in failed]))


def census(session: Session, names: Shards = None, is_all: AllShards = False) -> None:
    """The duty `census`; its help is in the table of duties."""
    with session.open() as client:
        found, failed = each(session, chosen(client, names, is_all or not names), client.census)
        there = [census.shard for census in found]
        known, of = damage.look(client, there), whose(client, there)
    tables = [
        render.census_table(one, damage.lines(one.shard, known.get(one.shard)), of.get(one.shard, "")) for one in found
    ]
    values = [{**jsonable(one), "owner": of.get(one.shard, ""), **damage.value(known.get(one.shard))} for one in found]
    session.answer({"shards": values, "failed": dict(_reasons(failed))}, *tables)
    if failed:
        raise typer.Exit(worst([error for _, error in failed]))


def plan(session: Session, shard: Shard) -> None:
    """Show what compaction would do now, why, and at what price; and what it leaves alone.

    \b
    persist plan orders
    persist compaction orders         carry it out
    """
    from persist_lib.core.plan.compaction import plan_compaction

    with session.open() as client:
        version = client.inspect(shard)
        found = plan_compaction(version.state, client.policy())
    if found.requests:
        summary = f"{shard} at v{version.seqno}: {units.of(found.debt, 'update')} to rewrite"
    else:
        summary = f"{shard} at v{version.seqno}: nothing to do"
    shown: list[RenderableType] = (
        [render.plan_table(found, version.state.times)] if found.requests or found.skipped else []
    )
    session.answer(
        {"shard": shard, "seqno": version.seqno, **clock(version.state.times), **plan_value(found)}, *shown, summary
    )


def whose(client: Client, shards: Sequence[str]) -> dict[str, str]:
    """Whose the shards are whose names are minted. None where the catalog cannot be read: this is about shards."""
    from persist_lib.storage.describe import is_minted
    from persist_lib.storage.sources.kinds import owners_of

    if not any(map(is_minted, shards)):
        return {}
    try:
        owners = owners_of(client)
    except PersistError:
        return {}
    return {shard: owner for shard in shards if (owner := owners.of(shard))}


def _reasons(failed: Sequence[tuple[str, Exception]]) -> list[tuple[str, str]]:
    return [(name, str(error)) for name, error in failed]
