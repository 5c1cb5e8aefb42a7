"""`persist collection`: what collections there are and what is done to them; their renditions are in `renditions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli import units
from persist_lib.cli.json_values import clock, jsonable, messages
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.schema_commands import Declared, schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Fitted
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.catalog import Description, RenditionDescription
    from persist_lib.catalog.describe import Tended

Mode = Annotated[
    Literal["append", "compare_and_append"],
    typer.Option(
        help="append: any number of writers append identical data. compare_and_append: writers exclude one another, "
        "and can upsert and delete."
    ),
]


def list_(session: Session, names_only: opt.NamesOnly = False) -> None:
    """List the collections of the location, one line each.

    \b
    persist collection list
    persist collection list --json | jq '.collections[] | {name, promised}'
    """
    with session.controller() as controller:
        names = controller.list()
        if names_only:
            session.answer({"collections": names}, *names)
            return
        described = session.each(names, controller.describe)
        url = controller.client.url
    found = list(described.done.values())
    todo = [", ".join([*_following(one), *one.pending]) for one in found]
    columns = ["collection", "rendition", "shards", "mode", "since", "upper", "promised", *["to do"] * any(todo)]
    table = plain_table(*columns, right=columns[1:3])
    for one, rest in zip(found, todo, strict=True):
        show = one.schema.show
        table.add_row(
            one.name, str(one.active.number), str(len(one.active.shards)), one.mode, show(one.since), show(one.upper),
            show(one.promised), *([rest or "-"] if any(todo) else []),
        )  # fmt: skip
    value = {"location": url, "collections": [description_value(one) for one in found]}
    session.answer({**value, "failed": messages(described.failed)}, table, units.of(len(names), "collection"))
    session.exit(described)


def show(session: Session, name: opt.Collection) -> None:
    """Show one collection: how far it has come, its renditions, and what is under way.

    At each time exactly one rendition is the collection. Below the promised time no handover can ever be.

    \b
    persist collection show orders
    persist collection show orders --json | jq '.renditions[] | {number, state, upper}'
    """
    with session.controller() as controller:
        found = controller.describe(name)
        holders = controller.capabilities(name)
    readers, writers = (len([one for one in holders if one.kind == kind]) for kind in ("read", "write"))
    held = [one for one in holders if one.kind == "hold" and one.id != "collection"]
    lines = labelled(
        ("id", found.id),
        ("schema", str(found.schema)),
        ("mode", found.mode),
        ("readable", f"from {found.schema.show(found.since)}, before {found.schema.show(found.upper)}"),
        ("promised", f"{found.schema.show(found.promised)}: the earliest time of the next handover"),
        ("retention", retention_text(found)),
        ("used by", f"{units.of(readers, 'reader')}, {units.of(writers, 'writer')}, {units.of(len(held), 'hold')}"),
        *(("to do", f"{pending}: `persist collection tend {name}` finishes it") for pending in found.pending),
    )
    session.answer(description_value(found), lines, renditions_table(found))


def create(
    session: Session,
    name: opt.NewCollection,
    declared: Declared,
    times: opt.Clock = None,
    shards: opt.ShardCount = 1,
    mode: Mode = "append",
    hash_: opt.Hashed = None,
    retention: opt.Retention = None,
    command: opt.Command = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Create a collection, and its location if there is none.

    Columns are declared as for `persist create`. The number of shards, the schema and the mode are those of its first
    rendition; a later one may have other shards and columns. Whether times are a clock never changes.

    \b
    persist collection create orders --key id:int64 --value cents:int64 --shards 4
    persist collection create sales/orders --like monday.parquet --key id --mode compare_and_append --times ms
    """
    schema = declared.schema(times)
    kept = opt.parse_distance(retention)
    count = 1 if shards is None else shards
    if dry_run:
        from persist_lib.catalog.names import parse_collection_name

        parse_collection_name(name)
        said = f"would create {name} in {session.location}: {units.of(count, 'shard')}, {schema}"
        session.answer({"collection": name, "dry_run": True, "schema": schema_value(schema)}, said)
        return
    with session.controller(read_only=False, create=True) as controller:
        found = controller.create(
            name, schema, shards=count, mode=mode, hash_columns=opt.parse_names(hash_), retention=kept, command=command
        )
    said = f"created {name}: {units.of(count, 'shard')}, {mode}, {schema}"
    session.answer(description_value(found), said)


def drop_named(session: Session, name: str, kind: str, *, yes: bool, command: str | None, dry_run: bool) -> None:
    """Drop a collection or a table: say what would go, ask, do it, and say what has to wait."""
    with session.controller() as controller:
        plan = controller.drop(name, dry_run=True, command=command)
    done = plan
    if not dry_run:
        session.confirm(name, "dropping", kind, steps_table(plan, "would "), yes=yes)
        with session.controller(read_only=False) as controller:
            done = controller.drop(name, command=command)
    waits = (
        f"; {units.of(len(done.waiting), 'shard')} {'has' if len(done.waiting) == 1 else 'have'} to wait"
        if done.waiting
        else ""
    )
    said = f"{name} {'would be' if dry_run else 'is'} dropped{waits}"
    session.answer(
        {kind: name, "dry_run": dry_run, **jsonable(done)}, steps_table(done, "would " if dry_run else ""), said
    )


def tend(session: Session, name: opt.SomeCollection = None, dry_run: opt.DryRun = False) -> None:
    """Look after one collection, or after all: the upkeep of this layer, for a timer.

    It finishes commands that a killed process left, promises as far as the data is there, moves the holds by which
    history is kept, and takes away renditions and dropped collections that cannot be read any more. What is in the
    WAL of tables alone is applied to them, and (where all are looked after) taken out of the WAL. Doing it again finds
    nothing to do. `persist maintain` does what shards need.

    \b
    persist collection tend --dry-run
    persist collection tend orders
    """
    with session.controller(read_only=dry_run) as controller:
        done = controller.tend(name, dry_run=dry_run)
    if not done.steps:
        said = f"{name or 'collections'}: nothing to do"
    else:
        count = len(done.steps) - len(done.waiting)
        said = f"{units.of(count, 'step')} {'to take' if dry_run else 'taken'}, {len(done.waiting)} to wait"
    session.answer({"dry_run": dry_run, **jsonable(done)}, steps_table(done, ""), said)


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


def steps_table(done: Tended, what: str) -> Fitted:
    """The steps of a plan, or that were taken."""
    table = plain_table("collection", "step", "what", "why")
    for step in done.steps:
        table.add_row(
            step.collection, step.action if step.action == "wait" else f"{what}{step.action}", step.subject, step.reason
        )
    return table
