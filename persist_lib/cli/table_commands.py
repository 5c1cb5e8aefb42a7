"""What tables there are, what each is and how far it has come, and how one is made, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli.hold_commands import kept_text
from persist_lib.cli.json_values import clock, jsonable, messages
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.rendition_commands import description_value, renditions_table, retention_text, state_text
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.schema_commands import Declared, make_shard, schema_value
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.core.pauses import InForce
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.catalog import Description
    from persist_lib.catalog.describe import Capability
    from persist_lib.client import Client
    from persist_lib.core.state import State
    from persist_lib.schema.schema import Schema
    from persist_lib.table.carrier import TableDescription
    from persist_lib.table.table import Table
    from persist_lib.timeline import Behind, Lag

OF_A_SHARD = "shard"


class Listed(NamedTuple):
    """What the catalog says of a table that is a collection; `timeline` and what follows, if it is on one."""

    found: Description
    timeline: str = ""
    timeline_mode: str = ""
    lag: Lag | None = None

    @property
    def behind(self) -> list[Behind]:
        """What it lacks of what was committed."""
        return [] if self.lag is None else [one for one in self.lag.tables if one.id == self.found.id]

    def cells(self) -> dict[str, str]:
        """What `persist tables` shows of it beside what all tables have; empty where there is nothing to say."""
        found = self.found
        lacks = (f"{units.of(one.commits, 'commit')}, {units.size(one.size)}" for one in self.behind)
        new = ((one.number, state_text(one)) for one in found.renditions)
        todo = [f"rendition {number} {state}" for number, state in new if state.startswith("new")]
        return {
            "mode": self.timeline_mode or found.mode, "rendition": str(found.active.number),
            "promised": found.schema.show(found.promised), "behind": ", ".join(lacks),
            "to do": ", ".join([*todo, *found.pending]),
        }  # fmt: skip

    def value(self, now: int) -> dict[str, Any]:
        """The same for machines."""
        value = description_value(self.found)
        if self.timeline:
            wal = [] if self.lag is None else [
                {**jsonable(self.lag), "unapplied": self.lag.unapplied, "waits_ms": self.lag.waits_ms(now)}
            ]  # fmt: skip
            value |= {"timeline": self.timeline, "timeline_mode": self.timeline_mode, "wal": wal}
            value["behind"] = jsonable(self.behind)
        return value


@contextmanager
def looking_up(client: Client) -> Iterator[Callable[[TableDescription], Listed | None]]:
    """What says of a table what the catalog does; None for a shard alone. Each timeline is looked at once."""
    lags: dict[str, Lag] = {}
    with client.controller() as controller, controller.tables() as tables:

        def one(described: TableDescription) -> Listed | None:
            found = described.collection
            if found is None or found.kind != "table":
                return None if found is None else Listed(found)
            timeline, mode = tables.timeline_of(described.name)
            if mode == "wal" and timeline not in lags:
                lags[timeline] = tables.lag(timeline)
            return Listed(found, timeline, mode, lags.get(timeline))

        yield one


def tables(session: Session, names_only: opt.NamesOnly = False) -> None:
    """List all tables of the location, whatever carries them, one line each.

    \b
    persist tables
    persist tables --names | xargs -n 1 persist describe
    persist tables --json | jq '.tables[] | {table, upper, behind}'
    """
    with session.open() as client:
        names = client.tables()
        if names_only:
            session.answer({"tables": names}, *names)
            return
        with looking_up(client) as look:

            def one(name: str) -> tuple[TableDescription, Listed | None]:
                described = client.table(name).describe()
                return described, look(described)

            found, now, pauses = session.each(names, one), client.consensus.now(), client.pauses()
    rows = [
        {
            "table": one.name, "carried by": one.carrier, "shards": str(len(one.shards)),
            "columns": str(len(one.schema.names)), "since": one.schema.show(one.since),
            "upper": one.schema.show(one.upper), **(its.cells() if its else {}),
        }
        for one, its in found.done.values()
    ]  # fmt: skip
    heads = dict.fromkeys(head for row in rows for head, cell in row.items() if cell)
    shown = plain_table(*(heads or ("table",)), right=["shards", "columns", "rendition"])
    for row in rows:
        shown.add_row(*(row.get(head) or "-" for head in heads))
    values = [(its.value(now) if its else {}) | _value(one) for one, its in found.done.values()]
    value = {
        "location": client.url, "tables": values, "failed": messages(found.failed), "pauses": jsonable(pauses),
    }  # fmt: skip
    shown_pauses = [f"paused: {one.shown}, {one.says}" for one in pauses]
    session.answer(value, shown, *shown_pauses, units.of(len(names), "table"))
    session.exit(found)


def describe(
    session: Session,
    name: opt.AnyTable,
    who: Annotated[
        bool,
        typer.Option("--who", help="List who may read it, and from when on, who holds its history, who writes it."),
    ] = False,
) -> None:
    """Show what a table is, and how far it has come: what carries it, its columns, since, upper, retention and holds.

    Of a collection also its renditions, and what is under way: at each time exactly one rendition is the collection,
    and below the promised time no handover can ever be. Of a table on a timeline also what it lacks of what was
    committed: rows are in the WAL first, and can be read at once; `persist maintain` copies them to their tables.

    Holds named `retention` and `collection` are moved by its retention. With --who: a hold is durable; a reader or
    writer has a lease, which ends soon after its process does.

    \b
    persist describe orders
    persist describe orders --who
    persist describe orders --json | jq '.renditions[] | {number, state, upper}'
    """
    with session.open() as client, table_of(client, name) as table, looking_up(client) as look:
        found, state = table.describe(), client.inspect(table.kept_by()).state
        its, now = look(found), client.consensus.now()
        people = people_of(client, table, state)
        in_force = InForce(client.pauses(), lambda: str).of((name, *found.shards))
        pauses = list(dict.fromkeys(one for each in in_force.values() for one in each))
    if who:
        shown = plain_table("may", "id", "owner", "since", "lease until", "shard")
        for one in people:
            until = "" if one.lease_until is None else units.moment(one.lease_until)
            since = "" if one.since is None else found.schema.show(one.since)
            shown.add_row(one.kind, one.id, one.owner, since, until, one.shard)
        value = {"table": name, "capabilities": jsonable(people), **clock(found.schema.times)}
        session.answer(value, shown if people else f"{name} has no reader, no writer and no hold")
        return
    times = Times(found.schema.times, lambda: 0)
    show, kept = times.show, "no policy" if found.retention is None else times.show_distance(found.retention)
    kept = retention_text(its.found) if its else kept
    readers, writers = (len([one for one in people if one.kind == kind]) for kind in ("read", "write"))
    holds = plain_table("hold", "since", "fencing value", "holds since back")
    for hold, entry in sorted(state.holds.items()):
        back = "yes" if entry.since <= state.since else "no"
        holds.add_row(hold, show(entry.since), entry.opaque.decode(errors="backslashreplace"), back)
    lines = labelled(
        ("carried by", f"{found.carrier} ({units.of(len(found.shards), 'shard')})"), ("columns", str(found.schema)),
        ("since", show(found.since)), ("upper", show(found.upper)), ("retention", kept),
        ("holds", ", ".join(f"{hold} at {show(since)}" for hold, since in found.holds.items()) or "none"),
        ("used by", f"{units.of(readers, 'reader')}, {units.of(writers, 'writer')}"),
        *((("deletes", kept_text(found.keep_deletes)),) if found.keep_deletes else ()),
        *(_lines(its, found.schema, now) if its else ()), *(("paused", f"{one.shown}, {one.says}") for one in pauses),
    )  # fmt: skip
    value = {
        "all_holds": jsonable(state.holds),
        "pauses": jsonable(pauses),
        **(its.value(now) if its else {}),
        **_value(found),
    }
    session.answer(value, lines, *([renditions_table(its.found)] if its else []), holds)


def people_of(client: Client, table: Table, state: State) -> list[Capability]:
    """Who reads a table, holds its history, and writes it."""
    from persist_lib.catalog.describe import Capability

    if table.carrier != OF_A_SHARD:
        with client.controller() as controller:
            return list(controller.capabilities(table.name))
    return [
        *(Capability("hold", id_, "", table.name, one.since) for id_, one in sorted(state.holds.items())),
        *(Capability("read", id_, one.purpose, table.name, one.since, one.lease_until)
          for id_, one in sorted(state.readers.items())),
        *(Capability("write", id_, one.owner or one.purpose, table.name, None, one.lease_until)
          for id_, one in sorted(state.writers.items())),
    ]  # fmt: skip


def _value(found: TableDescription) -> dict[str, Any]:
    value = {
        "table": found.name, "carrier": found.carrier, "schema": schema_value(found.schema), "since": found.since,
        "upper": found.upper, "retention": found.retention, "holds": found.holds, "shards": found.shards,
        "keep_deletes": found.keep_deletes,
    }  # fmt: skip
    return {name: jsonable(each) for name, each in value.items()} | clock(found.schema.times)


def _lines(its: Listed, schema: Schema, now: int) -> list[tuple[str, str]]:
    """What the catalog says of a table, for people."""
    found, show, lag = its.found, schema.show, its.lag
    lines = [("id", found.id), ("mode", found.mode)]
    if its.timeline:
        lines += [("timeline", f"{its.timeline}, in {its.timeline_mode} mode")]
        lines += [("complete", f"before {show(found.upper)} in its own shards")]
    if lag is not None:
        lines += [("WAL", f"before {show(lag.upper)}; {units.of(lag.rows, 'row')} in it, {units.size(lag.size)}")]
        lacks = [_behind_text(one, show, now) for one in its.behind] or ["nothing: it has all that was committed"]
        lines += [("behind", one) for one in lacks]
    lines += [("promised", f"{show(found.promised)}: the earliest time of the next handover")]
    return lines + [("to do", f"{one}: `persist maintain {found.name}` finishes it") for one in found.pending]


def _behind_text(one: Behind, show: Any, now: int) -> str:
    waits = "" if one.is_ready else "; its newest rendition is still being copied"
    since = f"since {show(one.first)}, {units.duration(max(0, now - one.first))} ago"
    return f"{units.of(one.commits, 'commit')}, {units.size(one.size)}, in the WAL alone {since}{waits}"


class Carried(NamedTuple):
    """What carries a new table: one shard, unless one of these is given."""

    shards: opt.ShardCount = None
    timeline: Annotated[
        str | None, typer.Option(metavar="TIMELINE", help="It is on this timeline, which is made if it is not there.")
    ] = None
    mode: Annotated[
        Literal["append", "compare_and_append", "yolo", "wal"] | None,
        typer.Option(
            help="Of a collection: append (the default; any number of writers append identical data) or "
            "compare_and_append (writers exclude one another, and can upsert and delete). Of a new timeline: yolo (the "
            "default; each statement is one append to its table) or wal (transactions over several tables, through a "
            "write-ahead log)."
        ),
    ] = None
    hash_: opt.Hashed = None
    retention: opt.Retention = None
    keep_deletes: opt.KeepDeletes = None
    command: opt.Command = None

    def terms(self) -> dict[str, Any]:
        """What a collection and a table of a timeline have alike."""
        retention = opt.parse_distance(self.retention)
        return {"shards": self.shards or 1, "retention": retention, "command": self.command}

    def kind(self, times: str | None) -> str:
        """What carries it. Raises InvalidUsage for options that do not go together."""
        if self.timeline is None and self.mode not in {"yolo", "wal"}:
            if self.keep_deletes is not None:
                raise InvalidUsage("--keep-deletes takes a timeline with a WAL: add --mode wal, or --timeline")
            return "collection" if any(one is not None for one in self) else OF_A_SHARD
        if self.hash_ is not None or self.mode in {"append", "compare_and_append"}:
            raise InvalidUsage(
                "on a timeline, --mode is yolo or wal, and rows go to shards by the whole key: leave out --hash, or "
                "--timeline"
            )
        if times not in {None, "ms"}:
            raise InvalidUsage("times of a timeline are milliseconds of the store's clock: leave out --times")
        return "timeline"


def create(
    session: Session,
    name: opt.NewTable,
    declared: Declared,
    carried: Carried,
    times: opt.Clock = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Create a table with declared columns, and its location if there is none.

    One shard carries it. With --shards, --mode, --hash, --retention or --command it is a collection, which can get
    other shards and columns later; with --timeline, or --mode yolo or wal, it is on a timeline: such tables are read
    together, at times of the store's clock, and changed in transactions where the timeline has a WAL.

    Doing it again changes nothing; for what is more than a shard, give it the same --command. If the table has other
    columns, it is refused. Whether its times are a clock, and what constraints it has, cannot be changed later.

    Types, as pyarrow names them: bool, int8 to int64, uint8 to uint64, float32, float64, string, binary, date32,
    time64\\[us], timestamp\\[us] (no zone), timestamp\\[us, UTC] (instants), duration\\[us], decimal128(18, 2), uuid,
    fixed_size_binary\\[16]; s, ms and ns are units too. Values may be json, list<string>, list<float32>\\[3],
    struct<a: int64> and map<string, int64>. As in Python, null is allowed (`?` says so aloud) unless a type ends in
    `not null`.

    \b
    persist create orders --key order_id:int64 --value state:string --value 'price:decimal128(10, 2)'
    persist create orders --key 'order_id:int64 not null' --value 'at:timestamp\\[us, UTC]' --dry-run
    persist create orders --like monday.parquet --key order_id
    persist create customers --key id:int64 --value name:string --unique
    persist create ticks --key id:int64 --value word:string --times none
    persist create sales/orders --like monday.parquet --key id --shards 4 --mode compare_and_append
    persist create accounts --key 'id:int64 not null' --value cents:int64 --unique --mode wal
    """
    kind = carried.kind(times)
    schema = declared.schema(opt.parse_clock(times))
    if kind == OF_A_SHARD:
        make_shard(session, name, schema, may_be_plain=times is None, dry_run=dry_run)
        return
    timeline, of = carried.timeline or "default", units.of(carried.shards or 1, "shard")
    terms = carried.terms()
    if dry_run:
        from persist_lib.catalog.records import parse_collection_name

        parse_collection_name(name)
        on = f" on timeline {timeline}" if kind == "timeline" else ""
        value = {"table": name, "dry_run": True, "schema": schema_value(schema)}
        session.answer(value, f"would create {name} in {session.location}{on}: {of}, {schema}")
        return
    mode: Any = carried.mode
    if kind == "collection":
        hashed = opt.parse_names(carried.hash_)
        with session.controller(read_only=False, create=True) as controller:
            made = Listed(controller.create(name, schema, mode=mode or "append", hash_columns=hashed, **terms))
        said = f"created {name}: {of}, {made.found.mode}, {schema}"
    else:
        kept = opt.parse_kept(carried.keep_deletes)
        with session.tables(read_only=False, create=True) as its:
            found = its.create(name, schema, timeline=timeline, mode=mode, keep_deletes=kept, **terms)
            made = Listed(found, *its.timeline_of(name))
        said = f"created {name} on timeline {timeline} ({made.timeline_mode}): {of}, {schema}"
    session.answer({"table": name, **made.value(0)}, said)
