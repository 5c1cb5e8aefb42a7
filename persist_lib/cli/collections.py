"""`persist collection`: what collections there are and what is done to them; their renditions are in `renditions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from persist_lib.cli import units
from persist_lib.cli.arguments import Collection, Command, DryRun, confirm, each
from persist_lib.cli.history import distance_of
from persist_lib.cli.layout import Fitted
from persist_lib.cli.render import plain_table
from persist_lib.cli.schemas import (
    Added,
    Clock,
    KeyColumns,
    Like,
    NonNegative,
    Unique,
    ValueColumns,
    build_schema,
    new_columns,
    parse_columns,
    schema_value,
    with_columns,
)
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable, worst
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.storage import Controller, Description, RenditionDescription
    from persist_lib.storage.describe import Tended

NewCollection = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The new name: letters, digits, _ - . and /, as in sales/orders.", show_default=False
    ),
]
Shards = Annotated[
    int | None, typer.Option("--shards", min=1, metavar="N", help="How many shards.", show_default=False)
]
Hashed = Annotated[
    str | None,
    typer.Option(
        "--hash", metavar="A,B", show_default=False,
        help="Key columns by whose hash rows go to shards. Default: the whole key.",
    ),
]  # fmt: skip
Mode = Annotated[
    Literal["append", "compare_and_append"],
    typer.Option(
        help="append: any number of writers append identical data. compare_and_append: writers exclude one another, "
        "and can upsert and delete."
    ),
]
RetentionOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|DURATION|none", show_default=False,
        help="Keep this many times behind upper or, of a clock, as in '7 days'. none: all history.",
    ),
]  # fmt: skip


@contextmanager
def controlling(session: Session, *, read_only: bool = True, create: bool = False) -> Iterator[Controller]:
    """The controller of the session's location, for the length of a command."""
    with session.open(read_only=read_only, create=create) as client, client.controller() as controller:
        yield controller


def list_(
    session: Session,
    names_only: Annotated[
        bool, typer.Option("--names", help="Print only the names, one a line, and open nothing else.")
    ] = False,
) -> None:
    """List the collections of the location, one line each.

    \b
    persist collection list
    persist collection list --json | jq '.collections[] | {name, promised}'
    """
    with controlling(session) as controller:
        names = controller.list()
        if names_only:
            session.answer({"collections": names}, *names)
            return
        found, failed = each(session, names, controller.describe)
        url = controller.client.url
    columns = ["collection", "rendition", "shards", "mode", "since", "upper", "promised"]
    todo = [", ".join([*_following(one), *one.pending]) for one in found]
    columns += ["to do"] if any(todo) else []
    table = plain_table(*columns, right=columns[1:3])
    for one, rest in zip(found, todo, strict=True):
        show = one.schema.show
        table.add_row(
            one.name, str(one.active.number), str(len(one.active.shards)), one.mode, show(one.since), show(one.upper),
            show(one.promised), *([rest or "-"] if any(todo) else []),
        )  # fmt: skip
    shown: list[RenderableType] = [table] if found else []
    value = {"location": url, "collections": [description_value(one) for one in found]}
    failures = {name: str(error) for name, error in failed}
    session.answer({**value, "failed": failures}, *shown, units.of(len(names), "collection"))
    if failed:
        raise typer.Exit(worst([error for _, error in failed]))


def show(session: Session, name: Collection) -> None:
    """Show one collection: how far it has come, its renditions, and what is under way.

    At each time exactly one rendition is the collection. Below the promised time no handover can ever be.

    \b
    persist collection show orders
    persist collection show orders --json | jq '.renditions[] | {number, state, upper}'
    """
    with controlling(session) as controller:
        found = controller.describe(name)
        holders = controller.capabilities(name)
    readers, writers = (len([one for one in holders if one.kind == kind]) for kind in ("read", "write"))
    held = [one for one in holders if one.kind == "hold" and one.id != "collection"]
    lines = Fitted(("", ""))
    for label, text in (
        ("id", found.id),
        ("schema", str(found.schema)),
        ("mode", found.mode),
        ("readable", f"from {found.schema.show(found.since)}, before {found.schema.show(found.upper)}"),
        ("promised", f"{found.schema.show(found.promised)}: the earliest time of the next handover"),
        ("retention", retention_text(found)),
        ("used by", f"{units.of(readers, 'reader')}, {units.of(writers, 'writer')}, {units.of(len(held), 'hold')}"),
        *(("to do", f"{pending}: `persist collection tend {name}` finishes it") for pending in found.pending),
    ):
        lines.add_row(label, text)
    session.answer(description_value(found), lines, renditions_table(found))


def create(
    session: Session,
    name: NewCollection,
    key: KeyColumns = None,
    value: ValueColumns = None,
    like: Like = None,
    times: Clock = None,
    unique: Unique = False,
    non_negative: NonNegative = False,
    shards: Shards = 1,
    mode: Mode = "append",
    hash_: Hashed = None,
    retention: RetentionOption = None,
    command: Command = None,
    dry_run: DryRun = False,
) -> None:
    """Create a collection, and its location if there is none.

    Columns are declared as for `persist create`. The number of shards, the schema and the mode are those of its first
    rendition; a later one may have other shards and columns. Whether times are a clock never changes.

    \b
    persist collection create orders --key id:int64 --value cents:int64 --shards 4
    persist collection create sales/orders --like monday.parquet --key id --mode compare_and_append --times ms
    """
    schema = build_schema(key or [], value or [], like, times=times, unique=unique, non_negative=non_negative)
    kept = None if retention is None else distance_of(retention)
    count = 1 if shards is None else shards
    if dry_run:
        from persist_lib.storage.names import parse_collection_name

        parse_collection_name(name)
        said = f"would create {name} in {session.location}: {units.of(count, 'shard')}, {schema}"
        session.answer({"collection": name, "dry_run": True, "schema": schema_value(schema)}, said)
        return
    with controlling(session, read_only=False, create=True) as controller:
        found = controller.create(
            name, schema, shards=count, mode=mode, hash_columns=columns_of(hash_), retention=kept, command=command
        )
    said = f"created {name}: {units.of(count, 'shard')}, {mode}, {schema}"
    session.answer(description_value(found), said)


def alter(session: Session, name: Collection, retention: RetentionOption = None, command: Command = None) -> None:
    """Change how much history a collection keeps. `persist collection tend` then gives the rest up.

    \b
    persist collection alter orders --retention 1000
    persist collection alter orders --retention '7 days'
    persist collection alter orders --retention none
    """
    if retention is None:
        raise InvalidUsage("say what to change, as in --retention 1000 or --retention none")
    with controlling(session, read_only=False) as controller:
        found = controller.alter(name, retention=distance_of(retention), command=command)
    session.answer(description_value(found), f"{name} keeps {retention_text(found)}")


def rename(session: Session, name: Collection, to: NewCollection, command: Command = None) -> None:
    """Give a collection another name. Readers and writers that are open go on.

    \b
    persist collection rename orders archive/orders-2025
    """
    with controlling(session, read_only=False) as controller:
        found = controller.rename(name, to, command=command)
    session.answer(description_value(found), f"{name} is now {to}")


def evolve(
    session: Session, name: Collection, add: Added = None, command: Command = None, dry_run: DryRun = False
) -> None:
    """Add value columns to a collection. Rows from before have null in them.

    Columns are added at the end, and may be null; types are written as for `persist evolve`. Doing it again changes
    nothing. Readers, listeners and writers that are open go on in their columns. A copy that is under way has to be
    handed over to and finished first, or dropped.

    \b
    persist collection evolve orders --add note:string --dry-run
    persist collection evolve orders --add note:string --add 'seen:timestamp\\[us, UTC]'
    """
    if not add:
        raise InvalidUsage("name a column to add, as in --add note:string")
    with controlling(session, read_only=dry_run) as controller:
        newest = controller.describe(name).schema
        schema = with_columns(newest, new_columns(name, newest, parse_columns(add)))
        found = controller.evolve(name, schema, dry_run=dry_run, command=command)
    value = {"collection": name, "dry_run": dry_run, **jsonable(found), "schema": schema_value(found.schema)}
    columns = ", ".join(str(column) for column in found.schema.value if column.name in found.added)
    said = f"{'would add' if dry_run else 'added'} {columns}" if found.added else "has these columns already"
    is_now = "would be" if dry_run and found.added else "is"
    session.answer(value, f"{name}: {said}; the schema {is_now} {found.schema}")


def drop(
    session: Session,
    name: Collection,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    command: Command = None,
    dry_run: DryRun = False,
) -> None:
    """Drop a collection. Its name is free at once; its shards go when nobody reads or holds them.

    This cannot be undone. Open readers go on until they are closed, writers are refused. What has to wait is done by a
    later `persist collection tend`.

    \b
    persist collection drop orders --dry-run    what would go, and who is in the way
    persist collection drop orders              asks for the name
    """
    drop_named(session, name, "collection", yes=yes, command=command, dry_run=dry_run)


def drop_named(session: Session, name: str, kind: str, *, yes: bool, command: str | None, dry_run: bool) -> None:
    """Drop a collection or a table: say what would go, ask, do it, and say what has to wait."""
    with controlling(session) as controller:
        plan = controller.drop(name, dry_run=True, command=command)
    if not dry_run and not yes:
        session.show(*steps_table(plan, "would "))
        confirm(session, name, "dropping", kind)
    done = plan
    if not dry_run:
        with controlling(session, read_only=False) as controller:
            done = controller.drop(name, command=command)
    waits = (
        f"; {units.of(len(done.waiting), 'shard')} {'has' if len(done.waiting) == 1 else 'have'} to wait"
        if done.waiting
        else ""
    )
    said = f"{name} {'would be' if dry_run else 'is'} dropped{waits}"
    session.answer(
        {kind: name, "dry_run": dry_run, **jsonable(done)},
        *steps_table(done, "would " if dry_run else ""),
        said,
    )


def tend(
    session: Session,
    name: Annotated[Collection | None, typer.Argument(metavar="[NAME]")] = None,
    dry_run: DryRun = False,
) -> None:
    """Look after one collection, or after all: the upkeep of this layer, for a timer.

    It finishes commands that a killed process left, promises as far as the data is there, moves the holds by which
    history is kept, and takes away renditions and dropped collections that nobody can read any more. What is in the
    WAL of tables alone is applied to them, and (where all are looked after) taken out of the WAL. Doing it again finds
    nothing to do. `persist maintain` does what shards need.

    \b
    persist collection tend --dry-run
    persist collection tend orders
    """
    with controlling(session, read_only=dry_run) as controller:
        done = controller.tend(name, dry_run=dry_run)
    if not done.steps:
        said = f"{name or 'collections'}: nothing to do"
    else:
        count = len(done.steps) - len(done.waiting)
        said = f"{units.of(count, 'step')} {'to take' if dry_run else 'taken'}, {len(done.waiting)} to wait"
    session.answer({"dry_run": dry_run, **jsonable(done)}, *steps_table(done, ""), said)


def description_value(found: Description) -> dict[str, Any]:
    """A collection for machines."""
    value = {**jsonable(found), "schema": schema_value(found.schema), "shards": list(found.active.shards)}
    value["renditions"] = [rendition_value(one) for one in found.renditions]
    return value | clock(found.schema.times)


def rendition_value(one: RenditionDescription) -> dict[str, Any]:
    """A rendition for machines."""
    return {**jsonable(one), "schema": schema_value(one.schema)}


def retention_text(found: Description) -> str:
    """How much history is kept, for people."""
    if found.retention is None:
        return "all history"
    return f"history for {Times(found.schema.times, lambda: 0).show_distance(found.retention)} behind upper"


def renditions_table(found: Description) -> Fitted:
    """A collection's renditions, oldest first."""
    table = plain_table(
        "rendition", "is", "at times", "shards", "since", "upper", "schema", right=("rendition", "shards")
    )
    for one in found.renditions:
        times = "-"
        if one.start is not None:
            end = "" if one.end is None else found.schema.show(one.end)
            times = f"{found.schema.show(one.start)} to {end}" if end else f"from {found.schema.show(one.start)} on"
        schema = "the same" if one.schema == found.schema and not one.active else str(one.schema)
        table.add_row(
            str(one.number), state_text(one), times, str(len(one.shards)), found.schema.show(one.since),
            found.schema.show(one.upper), schema, style="bold" if one.active else "",
        )  # fmt: skip
    return table


def state_text(one: RenditionDescription) -> str:
    """What a rendition is now, in words."""
    if one.state != "live":
        return one.state
    if one.active:
        return "active"
    if one.start is not None:
        return "past"
    return "new" if one.copies is None else f"new, copies {one.copies}"


def _following(found: Description) -> list[str]:
    """The renditions that may follow the active one."""
    return [
        f"rendition {one.number} {state_text(one)}" for one in found.renditions if state_text(one).startswith("new")
    ]


def steps_table(done: Tended, what: str) -> list[RenderableType]:
    """The steps of a plan, or that were taken."""
    if not done.steps:
        return []
    table = plain_table("collection", "step", "what", "why")
    for step in done.steps:
        table.add_row(
            step.collection, step.action if step.action == "wait" else f"{what}{step.action}", step.subject, step.reason
        )
    return [table]


def columns_of(text: str | None) -> list[str] | None:
    """Names that were typed with commas in between."""
    return None if text is None else [name.strip() for name in text.split(",")]
