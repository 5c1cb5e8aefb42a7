"""`persist collection capabilities` and `hold`: who may read a collection and from when on, and who writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import units
from persist_lib.cli.arguments import Collection, parse_frontier
from persist_lib.cli.collections import controlling
from persist_lib.cli.history import Hold
from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.frontier import Antichain
    from persist_lib.storage import Description


def set_hold(
    session: Session,
    name: Collection,
    hold: Hold,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Keep history from this time on. Default: all there is.", show_default=False),
    ] = None,
) -> None:
    """Keep a collection's history from a time on, durably, whatever its retention, across handovers.

    \b
    persist collection hold set orders audit --since 100
    """
    words = None if since is None else parse_frontier(since, "since")
    with controlling(session, read_only=False) as controller:
        found = controller.describe(name)
        at: Any = found.since if words is None else words
        controller.set_hold(name, hold, at)
        kept = next(one.since for one in controller.capabilities(name) if (one.kind, one.id) == ("hold", hold))
    said = f"{name}: hold {hold} keeps history from {_shown(found, kept)} on"
    session.answer({"collection": name, "hold": hold, "since": jsonable(kept), **clock(found.schema.times)}, said)


def release_hold(session: Session, name: Collection, hold: Hold) -> None:
    """Release a hold of a collection. History goes when the collection is tended next.

    \b
    persist collection hold release orders audit
    """
    with controlling(session, read_only=False) as controller:
        controller.release_hold(name, hold)
    session.answer({"collection": name, "hold": hold}, f"{name}: hold {hold} is released")


def list_holds(session: Session, name: Collection) -> None:
    """List a collection's holds. The one named `collection` is moved by its retention.

    \b
    persist collection hold list orders
    """
    with controlling(session) as controller:
        found = controller.describe(name)
        held = [one for one in controller.capabilities(name) if one.kind == "hold"]
    table = plain_table("hold", "since")
    for one in held:
        table.add_row(one.id, _shown(found, one.since))
    value = {"collection": name, "holds": {one.id: jsonable(one.since) for one in held}, **clock(found.schema.times)}
    session.answer(value, table)


def capabilities(session: Session, name: Collection) -> None:
    """List who may read a collection, and from when on, who holds its history, and who writes it.

    A hold is durable. A reader or writer has a lease, which ends soon after its process does.

    \b
    persist collection capabilities orders
    """
    with controlling(session) as controller:
        found = controller.describe(name)
        held = controller.capabilities(name)
    table = plain_table("may", "id", "owner", "since", "lease until", "shard")
    for one in held:
        until = "" if one.lease_until is None else units.moment(one.lease_until)
        table.add_row(one.kind, one.id, one.owner, _shown(found, one.since), until, one.shard)
    session.answer({"collection": name, "capabilities": jsonable(held), **clock(found.schema.times)}, table)


def _shown(found: Description, frontier: Antichain | None) -> str:
    return "" if frontier is None else found.schema.show(frontier)
