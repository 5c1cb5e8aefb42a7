"""`persist table`: what tables there are, how far each has come, and what is done to them. See `tables_rows`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from persist_lib.cli import units
from persist_lib.cli.arguments import Command, DryRun, each
from persist_lib.cli.collections import (
    RetentionOption,
    Shards,
    description_value,
    drop_named,
    renditions_table,
    retention_text,
)
from persist_lib.cli.completion import table_names
from persist_lib.cli.history import distance_of
from persist_lib.cli.layout import Fitted
from persist_lib.cli.render import plain_table
from persist_lib.cli.schemas import KeyColumns, Like, NonNegative, Unique, ValueColumns, build_schema, schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.values import jsonable, worst

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.storage import Description
    from persist_lib.storage.tables import Behind, Lag, Tables

Table = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table's name.", show_default=False, autocompletion=table_names)
]
NewTable = Annotated[
    str,
    typer.Argument(
        metavar="TABLE", help="The new name: letters, digits, _ - . and /, as in bank/accounts.", show_default=False
    ),
]
Timeline = Annotated[str, typer.Option("--timeline", metavar="NAME", help="The timeline.")]
Mode = Annotated[
    Literal["yolo", "wal"] | None,
    typer.Option(
        help="Of a new timeline. yolo (the default): each statement is one append to its table. wal: transactions over "
        "several tables, through a write-ahead log.",
        show_default=False,
    ),
]


@contextmanager
def tabling(session: Session, *, read_only: bool = True, create: bool = False) -> Iterator[Tables]:
    """The tables of the session's location, for the length of a command."""
    with (
        session.open(read_only=read_only, create=create) as client,
        client.controller() as controller,
        controller.tables() as tables,
    ):
        yield tables


def list_(
    session: Session,
    names_only: Annotated[
        bool, typer.Option("--names", help="Print only the names, one a line, and open nothing else.")
    ] = False,
) -> None:
    """List the tables of the location, one line each, and how far each is behind its timeline's WAL.

    \b
    persist table list
    persist table list --json | jq '.tables[] | {name, behind}'
    """
    with tabling(session) as tables:
        names = tables.list()
        if names_only:
            session.answer({"tables": names}, *names)
            return
        found, failed = each(session, names, tables.controller.describe)
        lags, placed = _lags(tables), {one.name: tables.timeline_of(one.name) for one in found}
    table = plain_table("table", "timeline", "mode", "shards", "since", "upper", "behind", right=("shards",))
    values = []
    for one in found:
        timeline, mode = placed[one.name]
        behind = _behind(lags, one)
        show = one.schema.show
        table.add_row(
            one.name, timeline, mode, str(len(one.active.shards)), show(one.since), show(one.upper),
            ", ".join(f"{units.of(b.commits, 'commit')}, {units.size(b.size)}" for b in behind) or "-",
        )  # fmt: skip
        values.append(_value(one, timeline, mode, behind))
    shown: list[RenderableType] = [table] if found else []
    failures = {name: str(error) for name, error in failed}
    session.answer({"tables": values, "failed": failures}, *shown, units.of(len(names), "table"))
    if failed:
        raise typer.Exit(worst([error for _, error in failed]))


def show(session: Session, name: Table) -> None:
    """Show one table: its timeline, how far it has come, and what it lacks of what was committed.

    Rows of a timeline with a WAL are in the WAL first. They can be read at once; `persist collection tend`, or
    Dagster's job `collections`, copies them to their tables and takes them out of the WAL.

    \b
    persist table show accounts
    persist table show accounts --json | jq .behind
    """
    with tabling(session) as tables:
        timeline, mode = tables.timeline_of(name)
        found = tables.controller.describe(name)
        lags = _lags(tables, timeline) if mode == "wal" else []
        now = tables.client.consensus.now()
    behind, show_time = _behind(lags, found), found.schema.show
    lines = Fitted(("", ""))
    for label, text in (
        ("id", found.id),
        ("schema", str(found.schema)),
        ("timeline", f"{timeline}, in {mode} mode"),
        ("readable", f"from {show_time(found.since)} on"),
        ("complete", f"before {show_time(found.upper)} in its own shards"),
        *(("WAL", _wal_text(lag, show_time)) for lag in lags),
        *((("behind", "nothing: it has all that was committed"),) if lags and not behind else ()),
        *(("behind", _behind_text(one, show_time, now)) for one in behind),
        ("retention", retention_text(found)),
        *(("to do", f"{pending}: `persist collection tend {name}` finishes it") for pending in found.pending),
    ):
        lines.add_row(label, text)
    value = _value(found, timeline, mode, behind)
    value |= {"wal": [{**jsonable(lag), "unapplied": lag.unapplied, "waits_ms": lag.waits_ms(now)} for lag in lags]}
    session.answer(value, lines, renditions_table(found))


def create(
    session: Session,
    name: NewTable,
    key: KeyColumns = None,
    value: ValueColumns = None,
    like: Like = None,
    unique: Unique = False,
    non_negative: NonNegative = False,
    shards: Shards = 1,
    timeline: Timeline = "default",
    mode: Mode = None,
    retention: RetentionOption = None,
    command: Command = None,
    dry_run: DryRun = False,
) -> None:
    """Create a table on a timeline, and the timeline and the location if there are none.

    Columns are declared as for `persist create`. Times are milliseconds of the store's clock. Tables on one timeline
    are read together; transactions over several tables need one with --mode wal.

    \b
    persist table create accounts --key 'id:int64 not null' --value cents:int64 --unique --mode wal
    persist table create entries --like entries.parquet --key entry --shards 4
    """
    schema = build_schema(key or [], value or [], like, times="ms", unique=unique, non_negative=non_negative)
    kept, count = None if retention is None else distance_of(retention), 1 if shards is None else shards
    if dry_run:
        from persist_lib.storage.names import parse_collection_name

        parse_collection_name(name)
        said = f"would create {name} in {session.location} on timeline {timeline}: {units.of(count, 'shard')}, {schema}"
        session.answer({"table": name, "dry_run": True, "schema": schema_value(schema)}, said)
        return
    with tabling(session, read_only=False, create=True) as tables:
        found = tables.create(name, schema, shards=count, timeline=timeline, mode=mode, retention=kept, command=command)
        timeline, made = tables.timeline_of(name)
    said = f"created {name} on timeline {timeline} ({made}): {units.of(count, 'shard')}, {schema}"
    session.answer(_value(found, timeline, made, []), said)


def drop(
    session: Session,
    name: Table,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    command: Command = None,
    dry_run: DryRun = False,
) -> None:
    """Drop a table, with what is in the WAL for it. Transactions that would change it are refused from then on.

    This cannot be undone. Open readers go on until they are closed. What has to wait is done by a later
    `persist collection tend`.

    \b
    persist table drop accounts --dry-run    what would go, and who is in the way
    persist table drop accounts              asks for the name
    """
    with tabling(session) as tables:
        if command is None:
            tables.timeline_of(name)  # a collection is not dropped by a slip
    drop_named(session, name, "table", yes=yes, command=command, dry_run=dry_run)


def _lags(tables: Tables, timeline: str | None = None) -> list[Lag]:
    names = [name for name, mode in tables.timelines().items() if mode == "wal" and timeline in (None, name)]
    return [tables.lag(name) for name in names]


def _behind(lags: list[Lag], found: Description) -> list[Behind]:
    return [one for lag in lags for one in lag.tables if one.id == found.id]


def _value(found: Description, timeline: str, mode: str, behind: list[Behind]) -> dict[str, Any]:
    value = {**description_value(found), "timeline": timeline, "timeline_mode": mode}
    return {**value, "behind": [jsonable(one) for one in behind]}


def _wal_text(lag: Lag, show: Any) -> str:
    return f"before {show(lag.upper)}; {units.of(lag.rows, 'row')} in it, {units.size(lag.size)}"


def _behind_text(one: Behind, show: Any, now: int) -> str:
    waits = "" if one.is_ready else "; its newest rendition is still being copied"
    since = f"since {show(one.first)}, {units.duration(max(0, now - one.first))} ago"
    return f"{units.of(one.commits, 'commit')}, {units.size(one.size)}, in the WAL alone {since}{waits}"
