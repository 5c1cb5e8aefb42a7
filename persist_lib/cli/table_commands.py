"""`persist table`: what tables there are, how far each has come, and what is done to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli import units
from persist_lib.cli.collection_commands import description_value, renditions_table, retention_text
from persist_lib.cli.json_values import jsonable, messages
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.schema_commands import Declared, schema_value
from persist_lib.cli.session import Session

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.catalog import Description
    from persist_lib.timeline import Behind, Lag, Tables

Mode = Annotated[
    Literal["yolo", "wal"] | None,
    typer.Option(
        help="Of a new timeline. yolo (the default): each statement is one append to its table. wal: transactions over "
        "several tables, through a write-ahead log."
    ),
]


def list_(session: Session, names_only: opt.NamesOnly = False) -> None:
    """List the tables of the location, one line each, and how far each is behind its timeline's WAL.

    \b
    persist table list
    persist table list --json | jq '.tables[] | {name, behind}'
    """
    with session.tables() as tables:
        names = tables.list()
        if names_only:
            session.answer({"tables": names}, *names)
            return
        described = session.each(names, tables.controller.describe)
        found = list(described.done.values())
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
    session.answer({"tables": values, "failed": messages(described.failed)}, table, units.of(len(names), "table"))
    session.exit(described)


def show(session: Session, name: opt.Table) -> None:
    """Show one table: its timeline, how far it has come, and what it lacks of what was committed.

    Rows of a timeline with a WAL are in the WAL first. They can be read at once; `persist collection tend`, or
    Dagster's job `collections`, copies them to their tables and takes them out of the WAL.

    \b
    persist table show accounts
    persist table show accounts --json | jq .behind
    """
    with session.tables() as tables:
        timeline, mode = tables.timeline_of(name)
        found = tables.controller.describe(name)
        lags = _lags(tables, timeline) if mode == "wal" else []
        now = tables.client.consensus.now()
    behind, show_time = _behind(lags, found), found.schema.show
    lines = labelled(
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
    )
    value = _value(found, timeline, mode, behind)
    value |= {"wal": [{**jsonable(lag), "unapplied": lag.unapplied, "waits_ms": lag.waits_ms(now)} for lag in lags]}
    session.answer(value, lines, renditions_table(found))


def create(
    session: Session,
    name: opt.NewTable,
    declared: Declared,
    shards: opt.ShardCount = 1,
    timeline: opt.Timeline = "default",
    mode: Mode = None,
    retention: opt.Retention = None,
    command: opt.Command = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Create a table on a timeline, and the timeline and the location if there are none.

    Columns are declared as for `persist create`. Times are milliseconds of the store's clock. Tables on one timeline
    are read together; transactions over several tables need one with --mode wal.

    \b
    persist table create accounts --key 'id:int64 not null' --value cents:int64 --unique --mode wal
    persist table create entries --like entries.parquet --key entry --shards 4
    """
    schema = declared.schema("ms")
    kept, count = opt.parse_distance(retention), 1 if shards is None else shards
    if dry_run:
        from persist_lib.catalog.names import parse_collection_name

        parse_collection_name(name)
        said = f"would create {name} in {session.location} on timeline {timeline}: {units.of(count, 'shard')}, {schema}"
        session.answer({"table": name, "dry_run": True, "schema": schema_value(schema)}, said)
        return
    with session.tables(read_only=False, create=True) as tables:
        found = tables.create(name, schema, shards=count, timeline=timeline, mode=mode, retention=kept, command=command)
        timeline, made = tables.timeline_of(name)
    said = f"created {name} on timeline {timeline} ({made}): {units.of(count, 'shard')}, {schema}"
    session.answer(_value(found, timeline, made, []), said)


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
