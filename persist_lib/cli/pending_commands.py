"""`persist pending`: what uncoordinated writers put, how far it is absorbed, and what an operator decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Collection, DryRun, SomeCollection, Yes, parse_time
from persist_lib.core import units
from persist_lib.errors import NotFound
from persist_lib.times import show_frontier, show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from rich.console import RenderableType

    from persist_lib.core.state import State
    from persist_lib.pending_area import Absorbed
    from persist_lib.times import Unit

NAMED = 10
WriterName = Annotated[str, typer.Argument(metavar="WRITER", help="The writer's name.")]


def show(session: Session, name: SomeCollection = None) -> None:
    """Show what lies in a collection's pending area: for each writer its batches, their times, and what is late.

    Without a name: the collections in whose pending area something lies, and how far they are absorbed. Reads the
    listing only, a thousand batches a request. Whether writers agree is found out by `persist maintain NAME --only
    pending --dry-run`, which reads the batches.

    \b
    persist pending show
    persist pending show readings
    """
    if name is None:
        _list(session)
        return
    from persist_lib.pending_area import census

    with session.open() as client:
        found = census(client, name)
        times = client.inspect(name).state.times
    table = plain_table(
        "writer", "batches", "late", "updates", "size", "from", "to", right=("batches", "late", "updates")
    )
    for one in found.writers:
        table.add_row(
            one.writer, units.number(one.batches), units.number(one.late), units.number(one.updates),
            units.size(one.size), show_time(one.lower, times), show_time(one.upper, times),
        )  # fmt: skip
    said = (
        f"{name} has absorbed up to {show_frontier(found.upper, times)}; {units.of(found.batches, 'batch')} of "
        f"{units.of(len(found.writers), 'writer')} lie there, {units.size(found.size)}, and reach without a gap to "
        f"{show_frontier(found.reaches, times)}"
    )
    strange = [
        f"{units.of(others.count, 'object')} {why}: {', '.join(others.names[:NAMED])}"
        for others, why in ((found.endless, "without an end"), (found.foreign, "that are no batches"))
        if others.count
    ]
    session.answer({**jsonable(found), **clock(times)}, table, said, *strange)


def _list(session: Session) -> None:
    from persist_lib.pending_area import pending_collections

    with session.open() as client:

        def fetched(name: str) -> State | None:
            try:
                return client.inspect(name).state
            except NotFound:
                return None

        names = list(pending_collections(client))
        read = session.each(names, fetched)
    table, found = plain_table("collection", "state", "upper"), []
    for name in names:
        state = read.done.get(name)
        status = "unread" if name in read.failed else "no shard"
        if state is not None:
            status = "deleted" if state.is_finished() else "closed" if state.upper.is_top() else "open"
        table.add_row(name, status, "" if state is None else show_frontier(state.upper, state.times))
        found.append({"collection": name, "state": status, "upper": None if state is None else jsonable(state.upper)})
    session.answer({"collections": found}, table if names else "nothing is pending")
    session.exit(read)


def choose(
    session: Session,
    name: Collection,
    writer: WriterName,
    through: Annotated[
        str | None,
        typer.Option(metavar="T", help="For batches that begin before this time. Default: those in dispute now."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Absorb what WRITER says where writers disagree. What others say about these times becomes garbage.

    It is for an operator who knows which writer is right. What is in the collection already stays as it is.

    \b
    persist pending choose readings edge-7 --dry-run
    persist pending choose readings edge-7 --through 2026-11-23T12:00Z
    """
    from persist_lib import pending_area

    end = parse_time(through, "through")
    with session.open(read_only=dry_run, maintains=not dry_run) as client:
        done = pending_area.choose(client, name, writer, end, dry_run=dry_run)
        times = client.inspect(name).state.times
    session.answer({**jsonable(done), "dry_run": dry_run}, *sentences(done, times, dry_run=dry_run))
    if done.is_blocked:
        raise typer.Exit(3)


def delete(
    session: Session,
    name: Collection,
    writer: Annotated[str | None, typer.Option(metavar="WRITER", help="Only the late batches of this writer.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete a collection and everything that is pending; or with --writer only that writer's late batches.

    Late batches that say something else than the collection stay until this is said. Nothing that is still needed is
    ever deleted. A collection that is read, or held, is refused.

    \b
    persist pending delete readings --dry-run
    persist pending delete readings --writer edge-9     what it put too late
    """
    from persist_lib import pending_area

    with session.open(read_only=dry_run, maintains=not dry_run) as client:
        if writer is not None:
            count = pending_area.discard(client, name, writer, dry_run=dry_run)
            said = f"{units.of(count, 'late batch')} of {writer}"
            session.answer(
                {"collection": name, "writer": writer, "discarded": count, "dry_run": dry_run},
                f"{name} would discard {said}" if dry_run else f"{name} has discarded {said}",
            )  # fmt: skip
            return
        found = pending_area.census(client, name)
        if not dry_run:
            session.confirm(name, f"deleting the collection {name}", "collection", yes=yes)
            pending_area.delete(client, name)
    said = f"with {units.of(found.batches, 'pending batch')}, {units.size(found.size)}"
    session.answer(
        {"collection": name, "batches": found.batches, "size": found.size, "dry_run": dry_run},
        f"{name} would be deleted, {said}" if dry_run else f"{name} was deleted, {said}",
    )


def sentences(done: Absorbed, times: Unit | None, *, dry_run: bool) -> list[RenderableType]:
    """What became of a pending area, or would, for people."""
    would = "would absorb" if dry_run else "has absorbed"
    if done.deleted:
        were = "would be" if dry_run else "were"
        return [f"{done.shard} is deleted: {units.of(done.deleted, 'pending batch')} {were} deleted"]
    adopted = f", {units.number(done.adopted)} of them without rewriting" if done.adopted else ""
    said = (
        f"{done.shard} {would} {units.of(done.batches, 'batch')}, {units.of(done.updates, 'update')}{adopted}, up to "
        f"{show_frontier(done.upper, times)}; {units.number(done.discarded)} discarded, {units.number(done.left)} left"
    )
    lines: list[RenderableType] = [said]
    for one in done.disagreements:
        sides = " and ".join(", ".join(side[:NAMED]) or "the collection itself" for side in one.writers)
        what = "came late, and stays there" if one.is_late else "so nothing from there on is absorbed"
        lines.append(f"  at {show_time(one.time, times)} {sides} disagree, {what}: {', '.join(one.keys)}")
    lines += [f"  damaged: {why}" for why in list(done.damaged.values())[:NAMED]]
    if done.gap is not None:
        lines.append(f"  nothing continues from {show_time(done.gap, times)}, though there are later batches")
    if done.ahead:
        lines.append(f"  {units.of(done.ahead, 'batch')} end too far ahead of the store's clock")
    for others, why in ((done.endless, "have no end"), (done.foreign, "are no batches")):
        if others.count:
            lines.append(f"  {units.of(others.count, 'object')} {why}: {', '.join(others.names[:NAMED])}")
    if done.waits:
        lines.append(f"  stopped: {done.waits}")
    return lines
