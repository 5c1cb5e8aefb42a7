"""`persist producers`: who numbers its appends to a shard, and forgetting those that will never append again."""

from __future__ import annotations

from typing import Annotated

import typer

from persist_lib.cli import units
from persist_lib.cli.arguments import DryRun, Shard
from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable
from persist_lib.errors import InvalidUsage
from persist_lib.ids import parse_producer_name
from persist_lib.times import show_frontier

Producer = Annotated[str, typer.Argument(metavar="NAME", help="The producer's name.", show_default=False)]


def list_producers(session: Session, shard: Shard) -> None:
    """List a shard's producers: streaming queries, ingestion runs and others that number their appends.

    No number of a producer is ever committed twice. `last` is the number of its last append, `upper` where that left
    the shard.

    \b
    persist producers list orders
    """
    with session.open() as client:
        found, times = client.producers(shard), client.inspect(shard).state.times
    table = plain_table("producer", "last", "version", "upper", "when", right=("last", "version"))
    for name, last in found.items():
        upper, when = show_frontier(last.upper, times), units.moment(last.now)
        table.add_row(name, units.number(last.sequence), f"v{last.seqno}", upper, when)
    value = {"shard": shard, "producers": jsonable(found), **clock(times)}
    session.answer(value, table if found else f"{shard} has no producers")


def forget_producer(
    session: Session,
    shard: Shard,
    name: Producer,
    expected: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only if this is the number of its last append.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Forget a producer that will never append again. A shard remembers 1,000 of them.

    All of its numbers are new again then: an append of it that is repeated after this is committed a second time. It is
    refused if the producer has appended since this command looked.

    \b
    persist producers forget orders nightly-2024 --dry-run
    persist producers forget orders nightly-2024 --expected 7
    """
    parse_producer_name(name)
    with session.open(read_only=dry_run) as client:
        state = client.inspect(shard).state
        if (last := state.producers.get(name)) is None:
            known = ", ".join(sorted(state.producers)[:10]) or "it has none"
            raise InvalidUsage(f"shard {shard} has no producer {name!r}; its producers: {known}", name=name)
        if expected is not None and expected != last.sequence:
            raise InvalidUsage(
                f"shard {shard}: the producer {name!r} is at {last.sequence}, not at {expected}. It was not forgotten",
                name=name, expected=expected, actual=last.sequence,
            )  # fmt: skip
        if not dry_run:
            client.forget_producer(shard, name, expected=last.sequence)
    what = f"the producer {name}, whose last append was number {units.number(last.sequence)} as v{last.seqno}"
    value = {"shard": shard, "producer": name, "dry_run": dry_run, **jsonable(last), **clock(state.times)}
    session.answer(value, f"{shard} would forget {what}" if dry_run else f"{shard} has forgotten {what}")
