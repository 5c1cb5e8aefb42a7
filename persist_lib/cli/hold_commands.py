"""How much history of a table is kept: by holds, by a retention policy, or none once it is dropped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.rendition_commands import drop_named
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.errors import InvalidUsage, NotFound, ShardFinished, StillRead
from persist_lib.ids import NAME as SHARD_NAME
from persist_lib.times import Times, show_frontier

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.core.state import State
    from persist_lib.table.carrier import KeptDeletes

Expected = Annotated[str | None, typer.Option(metavar="TEXT", help="Only if this is its fencing value now.")]


class Moving(NamedTuple):
    """Where a hold moves to, under which fencing value, and on which condition."""

    since: Annotated[
        str | None, typer.Option(metavar="FRONTIER", help="Keep history from this time on, as 5. Default: all history.")
    ] = None
    fence: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its fencing value from now on; without it: an empty one.")
    ] = None
    expected: Expected = None
    new: Annotated[bool, typer.Option("--new", help="Only if there is no such hold yet.")] = False
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Give up the history before --since, as far as nothing else keeps it.")
    ] = False


def set_(
    session: Session,
    table: opt.AnyTable,
    name: opt.Hold,
    moving: Moving = Moving(),  # noqa: B008 - it cannot be changed
    yes: opt.Yes = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Create or move a hold: history from its since on is kept, durably, whatever other readers do.

    A hold has no lease: it stays until it is moved or released. With the fencing value, an owner notices that another
    one has taken the hold over. A hold never gives history up: without a retention, what is before it stays as well. A
    time beyond the newest is refused. Without --since, it keeps all.

    With --give-up it does: since moves there, as far as no reader and no other hold keeps it, and nothing can be read
    as of a time before that any more. This cannot be undone. The hold keeps its fencing value.

    \b
    persist hold set orders audit-2026
    persist hold set orders dashboard --since 120 --expected epoch-1 --fence epoch-2
    persist hold set orders audit-2026 --since 100 --give-up --dry-run
    persist hold set orders audit-2026 --since 100 --give-up      asks for the table's name
    """
    since, fence, expected, new, give_up = moving
    if new and expected is not None:
        raise InvalidUsage(
            "--new is for a hold that does not exist yet, --expected for one that does: use only one of them"
        )
    if give_up:
        if since is None or new or fence is not None:
            raise InvalidUsage("--give-up needs --since, and goes without --new and --fence")
        _give_up(session, table, name, since, _fence(expected), yes=yes, dry_run=dry_run)
        return
    if yes or dry_run:
        raise InvalidUsage("--yes and --dry-run go with --give-up: a hold alone gives nothing up")
    words = None if since is None else opt.parse_frontier(since, "since")
    with session.open(read_only=False) as client:
        shard, name = table_of(client, table).hold_of(name)
        at = client.inspect(shard).state.since if words is None else words
        fencing: bytes | Literal["any"] | None = None if new else _fence(expected)
        client.set_hold(shard, name, at, opaque=(fence or "").encode(), expected=fencing)
        state = client.inspect(shard).state
    kept, show = state.holds[name].since, partial(show_frontier, unit=state.times)
    text = f"{table}: hold {name} keeps history from {show(kept)} on; since is {show(state.since)}"
    value = {"table": table, "hold": name, "since": jsonable(kept), "table_since": jsonable(state.since)}
    session.answer({**value, **clock(state.times)}, text)


def _give_up(
    session: Session, table: str, name: str, since: str, fencing: bytes | Literal["any"], *, yes: bool, dry_run: bool
) -> None:
    """Move a hold, and since with it, as far as nothing else keeps it."""
    words = opt.parse_frontier(since, "since")
    with session.open(read_only=dry_run) as client:
        shard, name = table_of(client, table).hold_of(name)
        unit = client.inspect(shard).state.times
        found = client.downgrade_hold(shard, name, words, expected=fencing, dry_run=True)
        show = partial(show_frontier, unit=unit)

        def said(verb: str) -> str:
            kept = f", kept by {', '.join(found.kept_by)}" if found.kept_by else ""
            if found.before == found.after:
                return f"{table}: since stays at {show(found.before)}{kept}"
            moved = f"since {verb} from {show(found.before)} to {show(found.after)}{kept}"
            return f"{table}: {moved}; nothing can be read as of a time before that"

        if not dry_run:
            if found.before < found.after:
                session.confirm(table, "giving up history", "table", said("moves"), yes=yes)
            found = client.downgrade_hold(shard, name, words, expected=fencing)
    value = {"table": table, "hold": name, "dry_run": dry_run, **jsonable(found), **clock(unit)}
    session.answer(value, said("would move" if dry_run else "moved"))


def release(session: Session, table: opt.AnyTable, name: opt.Hold, expected: Expected = None) -> None:
    """Release a hold. since moves on as soon as a reader or another hold does; nothing is deleted by this alone.

    \b
    persist hold release orders audit-2026
    """
    with session.open(read_only=False) as client:
        shard, name = table_of(client, table).hold_of(name)
        client.release_hold(shard, name, expected=_fence(expected))
        state = client.inspect(shard).state
    since = show_frontier(state.since, state.times)
    text = f"{table}: hold {name} is released; since is {since}, kept by {_keepers(state)}"
    value = {"table": table, "hold": name, "table_since": jsonable(state.since)}
    session.answer({**value, **clock(state.times)}, text)


def set_retention(
    session: Session,
    name: opt.AnyTable,
    distance: Annotated[
        str | None,
        typer.Argument(
            metavar="[N|DURATION|none]",
            help="Keep this many times behind upper, or of a clock as in '7 days'; none: no policy.",
        ),
    ] = None,
    keep_deletes: opt.KeepDeletes = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Show how much history behind the newest time is kept, or set it: then what is older is given up at once.

    What is given up can never be read again. Readers and holds keep history whatever the retention; later,
    `persist maintain` moves since on. The last N appends are kept by a rule (`persist config --help`).

    With --keep-deletes a table on a timeline with a WAL remembers deleted keys for so long: `persist apply` orders the
    changes of each key by the column then, in whatever order they come, and counts those that are late. `persist
    maintain` forgets what was kept for so long; after that, a row that may be older than a forgotten delete is refused
    (DeletesForgotten). Programs of the release before cannot read the location's catalog from then on.

    \b
    persist set-retention orders        show both
    persist set-retention orders 1000   as of any of the last 1,000 times
    persist set-retention orders '7 days' --dry-run     if its times are a clock
    persist set-retention orders none   no policy
    persist set-retention orders --keep-deletes 'seq:7 days'
    persist set-retention orders --keep-deletes none    remember none, and forget all
    """
    wanted = None if distance is None else opt.parse_distance(distance)
    column, span = opt.parse_kept(keep_deletes) or (None, None)
    with session.open(read_only=(distance is None and keep_deletes is None) or dry_run) as client:
        table = table_of(client, name)
        if keep_deletes is not None:
            table.set_keep_deletes(column, span, dry_run=dry_run)
        moved = None if distance is None else table.set_retention(wanted, dry_run=dry_run)
        found = table.describe()
    times = Times(found.schema.times, lambda: 0)
    value: dict[str, Any] = {"table": name, "retention": found.retention, "dry_run": dry_run, **clock(times.unit)}
    value["keep_deletes"] = jsonable(found.keep_deletes)
    said = (
        f"{name} has no retention policy" if found.retention is None
        else f"{name} keeps history for {times.show_distance(found.retention)} behind upper"
    )  # fmt: skip
    if moved is not None:
        value |= jsonable(moved)
        kept = f", kept by {', '.join(moved.kept_by)}" if moved.kept_by else ""
        what = "would be" if dry_run else "is"
        said += f"; since {what} {times.show(moved.after)}{kept}"
    if keep_deletes is not None and dry_run:
        said += "; deleted keys could be kept so, and nothing was changed"
    elif keep_deletes is not None or found.keep_deletes is not None:
        said += f"; {kept_text(found.keep_deletes)}"
    session.answer(value, said)


def kept_text(kept: KeptDeletes | None) -> str:
    """How a table keeps deleted keys."""
    if kept is None:
        return "deleted keys are not remembered"
    span = Times("ms", lambda: 0).show_distance(kept.span_ms)
    return f"deleted keys are remembered for {span}, by {kept.column} (in {kept.table})"


def drop(
    session: Session, name: opt.AnyTable, yes: opt.Yes = False, command: opt.Command = None, dry_run: opt.DryRun = False
) -> None:
    """Drop a table, with all of its history. Its name is free at once. This cannot be undone.

    Refused while a hold keeps its history. What is carried by one shard is refused while a live reader needs it, too;
    its data becomes garbage, which `persist maintain` deletes. Of a collection or timeline, open readers continue until
    they are closed, and what has to wait is done by a later `persist maintain`. To end writing only, and keep the rows:
    `persist append NAME --lower T --upper '[]'`.

    \b
    persist drop orders --dry-run     what would go, and who is in the way
    persist drop orders               asks for the name
    """
    with session.open() as client:
        try:
            is_shard = command is None and table_of(client, name).carrier == "shard"
        except NotFound:  # a shard that is finished already says so
            if not SHARD_NAME.fullmatch(name) or client.machine(name).try_fetch() is None:
                raise
            is_shard = not client.controller().catalog.fetch().named(name) and command is None
    if is_shard:
        _finish(session, name, yes=yes, dry_run=dry_run)
    else:
        drop_named(session, name, "table", yes=yes, command=command, dry_run=dry_run)


def rename(session: Session, name: opt.AnyTable, to: opt.NewTable, command: opt.Command = None) -> None:
    """Give a table another name. Readers, writers and transactions that are open continue.

    What is carried by one shard cannot be renamed, as other programs know that by its name.

    \b
    persist rename orders archive/orders-2025
    """
    with session.open(read_only=False) as client:
        if command is None:
            client.table(name).rename(to)
        else:
            with client.controller() as controller:
                controller.rename(name, to, command=command)
    session.answer({"table": to, "was": name}, f"{name} is now {to}")


def promote(
    session: Session,
    name: opt.AnyTable,
    shards: Annotated[
        int | None, typer.Option(metavar="N", help="Then copy its rows to N shards, and hand over.")
    ] = None,
    timeline: Annotated[str | None, typer.Option(metavar="T", help="Join this timeline, which has a WAL.")] = None,
    make_timeline: Annotated[
        bool, typer.Option("--make-timeline", help="Make the timeline if it is not there.")
    ] = False,
    losing: Annotated[
        list[str] | None, typer.Option(metavar="CLIENT", help="This client of the shard server may lose access.")
    ] = None,
    yes: opt.Yes = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Make a table that one shard carries a collection, in place: nothing is copied. There is no way back.

    A collection can have another name, corrected contents, and more shards. Programs that opened the shard by its name
    are refused from then on, unless they use tables. Older programs cannot read the location's collections
    afterwards; a shard of a format below 5 needs `persist shard upgrade` first.

    \b
    persist promote orders --dry-run
    persist promote orders               asks for the name
    persist promote orders --shards 8    and spread its rows over 8 shards
    persist promote orders --timeline shop
    persist promote orders --timeline shop --make-timeline --dry-run
    """
    with session.open(read_only=dry_run) as client:
        table = client.table(name)
        was, lines = table.carrier, client.controller().catalog.fetch().timelines.values()
        is_new = timeline is not None and timeline not in {one.name for one in lines}
        how: dict[str, Any] = {"timeline": timeline, "make_timeline": make_timeline, "losing": losing or ()}
        if (was == "shard" or timeline is not None) and not dry_run:
            table.promote(**how, dry_run=True)
            session.confirm(name, "promoting", "table", yes=yes)
        found = table.promote(shards=shards, **how, dry_run=dry_run)
    value = {"table": name, "was": was, "carrier": found.carrier, "shards": list(found.shards), "dry_run": dry_run}
    value |= {"timeline_made": timeline} if is_new else {}
    said = f"{name} is on a {found.carrier} now, in {units.of(len(found.shards), 'shard')}"
    can = "be promoted" if timeline is None else f"join the timeline {timeline}"
    makes = f"; the timeline {timeline} {'would be' if dry_run else 'was'} made" if is_new else ""
    session.answer(value, (f"{name} is on a {was}, and can {can}" if dry_run else said) + makes)


def _finish(session: Session, shard: str, *, yes: bool, dry_run: bool) -> None:
    """Finish a shard for good."""
    with session.open() as client:
        version = client.inspect(shard)
        url = client.url
    value = {"table": shard, "dry_run": dry_run, **_at_stake(version.state)}
    if dry_run:
        session.answer(value, *_warning(value, url))
        return
    _check_finishable(shard, version.state, value["in_the_way"])
    session.show(*_warning(value, url))
    session.confirm(shard, "dropping", "table", yes=yes)
    with session.open(read_only=False) as client:
        client.finish(shard)
        seqno = client.inspect(shard).seqno
    done = f"{shard} is dropped; `persist maintain {shard}` deletes its {units.of(value['garbage'], 'object')}"
    session.answer({**value, "seqno": seqno}, done)


def _fence(expected: str | None) -> bytes | Literal["any"]:
    return "any" if expected is None else expected.encode()


def _at_stake(state: State) -> dict[str, Any]:
    """What finishing a shard makes garbage, and which readers prevent it."""
    from persist_lib.core.leases import needed_by

    garbage = sum(len(batch.keys) for batch in state.stored) + len(state.garbage)
    size = state.stored_size - state.inline_size + sum(entry.size for entry in state.garbage.values())
    blocking = [f"reader {one}" if one in state.readers else one for one in needed_by(state)]
    return {
        "updates": state.count, "garbage": garbage, "garbage_size": size, "writers": len(state.writers),
        "in_the_way": blocking, "finished": state.is_finished(),
    }  # fmt: skip


def _warning(value: dict[str, Any], url: str) -> list[str]:
    objects = f"{units.of(value['garbage'], 'object')} ({units.size(value['garbage_size'])})"
    gone = f"{units.of(value['updates'], 'update')} and all history gone, {objects} garbage"
    lines = [f"{value['table']} in {url}: {gone}"]
    if value["writers"]:
        lines.append(f"{units.of(value['writers'], 'writer')} could no longer write to the shard")
    if value["in_the_way"]:
        lines.append(f"in the way: {', '.join(value['in_the_way'])}")
    return lines


def _check_finishable(shard: str, state: State, blocking: list[str]) -> None:
    if state.is_finished():
        raise ShardFinished(f"shard {shard} is finished for good already", shard=shard)
    if blocking:
        raise StillRead(
            f"shard {shard} is still read by {', '.join(blocking)}; close the readers (`persist maintain` retires "
            "those that died), release the holds (`persist hold release`)",
            shard=shard, by=blocking,
        )  # fmt: skip


def _keepers(state: State) -> str:
    from persist_lib.core.leases import keepers

    return ", ".join(keepers(state)) or "no reader and no hold; it moves when a hold is set or a reader moves on"
