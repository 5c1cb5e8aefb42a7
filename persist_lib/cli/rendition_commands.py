"""`persist collection rendition`, `compare` and `hand-over`: other shards, columns or contents for a collection.

And a collection and its renditions as tables and as JSON, and how one is dropped.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.render import plain_table
from persist_lib.cli.row_formats import cell
from persist_lib.cli.schema_commands import Declared, schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Fitted
from persist_lib.core import units
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import at as frontier
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import pyarrow as pa

    from persist_lib.catalog import Description, RenditionDescription
    from persist_lib.catalog.comparing import Comparison
    from persist_lib.catalog.describe import HandoverPlan, Tended
    from persist_lib.schema.schema import Schema


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


def steps_table(done: Tended, what: str) -> Fitted:
    """The steps of a plan, or that were taken."""
    table = plain_table("collection", "step", "what", "why")
    for step in done.steps:
        table.add_row(
            step.collection, step.action if step.action == "wait" else f"{what}{step.action}", step.subject, step.reason
        )
    return table


def steps_said(done: Tended, *, dry_run: bool) -> str:
    """How many steps there are, and how many wait."""
    count = len(done.steps) - len(done.waiting)
    return f"{units.of(count, 'step')} {'to take' if dry_run else 'taken'}, {len(done.waiting)} to wait"


Transform = Callable[["pa.Table"], "pa.Table"]
Rendition = Annotated[int, typer.Argument(metavar="N", help="The rendition's number.")]
Function = Annotated[
    str | None,
    typer.Option(
        "--transform",
        metavar="FILE.py:FUNCTION",
        show_default=False,
        help="Makes of each pyarrow.Table of old rows one of new rows; also module:function.",
    ),
]


def make(
    session: Session,
    name: opt.Collection,
    declared: Declared,
    shards: opt.ShardCount = None,
    hash_: opt.Hashed = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="It is to become a copy of the active one: see `rendition copy`.")
    ] = False,
    command: opt.Command = None,
) -> None:
    """Make a rendition of a collection: other shards, other columns, or a place for corrected contents.

    What is not given is as in the active rendition. Readers get the new one only once it is handed over to. With --copy
    it is filled by `persist collection rendition copy`; without, by writers that open it by its number.

    \b
    persist collection rendition make orders --shards 8 --copy
    persist collection rendition make orders --key id:int64 --value dollars:double --copy
    """
    has_columns = bool(declared.key or declared.value or declared.like)
    if (declared.unique or declared.non_negative) and not has_columns:
        raise InvalidUsage(
            "--unique and --non-negative go with the columns of the new rendition: --key, --value, --like"
        )
    with session.controller(read_only=False) as controller:
        schema = None
        if has_columns:
            schema = declared.schema(controller.describe(name).schema.times)
        made = controller.make_rendition(
            name, shards=shards, schema=schema, copy=copy, hash_columns=opt.parse_names(hash_), command=command
        )
    said = f"made rendition {made.number} of {name}: {units.of(len(made.shards), 'shard')}, {made.schema}"
    session.answer({"collection": name, **rendition_value(made)}, said)
    fill = (
        f"persist collection rendition copy {name} {made.number}" if copy else "by writers that open it by its number"
    )
    session.note(f"fill it: {fill}; then: persist collection compare {name} {made.number}")


def copy(
    session: Session,
    name: opt.Collection,
    number: Rendition,
    transform: Function = None,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Continue until it was handed over to and has all that came before.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Give up after this long; what is copied stays.")
    ] = 3600.0,
) -> None:
    """Bring a rendition up to where the one is that it copies. Again and again, while that is written.

    It continues where it is, also after a kill, and from several processes at once. A transformation is a pure function
    of each row; it passes `_time` and `_diff` on. Use the same one for all of a rendition.

    \b
    persist collection rendition copy orders 2
    persist collection rendition copy orders 2 --transform fixes.py:in_dollars
    persist collection hand-over orders 2 && persist collection rendition copy orders 2 --to-end
    """
    function = load_function(transform)
    with session.controller(read_only=False) as controller, session.progress(f"copy {name}") as advance:
        rows = 0

        def progress(read: int, total: int) -> None:
            nonlocal rows
            rows = read
            advance(read, total)

        done = controller.copy_rendition(
            name, number, transform=function, to_end=to_end, progress=progress, timeout=timeout
        )
        schema = controller.describe(name).schema
    said = f"rendition {number} of {name} is copied up to {schema.show(done.upper)}"
    if done.is_complete:
        said += ", where it became the collection: the copy is complete"
    value = {"collection": name, "rendition": number, **jsonable(done), "rows": rows, **clock(schema.times)}
    session.answer(value, said)
    session.note(f"{units.of(rows, 'update')} read")


def drop(
    session: Session, name: opt.Collection, number: Rendition, command: opt.Command = None, dry_run: opt.DryRun = False
) -> None:
    """Give up a rendition that is not the collection at any time that can still be read.

    One that was the collection goes by itself, once the history before its end is given up.

    \b
    persist collection rendition drop orders 3 --dry-run    what would go, and who is in the way
    persist collection rendition drop orders 3
    """
    with session.controller(read_only=dry_run) as controller:
        done = controller.drop_rendition(name, number, dry_run=dry_run, command=command)
    value = {"collection": name, "rendition": number, "dry_run": dry_run, **jsonable(done)}
    said = f"rendition {number} of {name} {'would be' if dry_run else 'is'} dropped"
    session.answer(value, steps_table(done, "would " if dry_run else ""), said)


def compare(
    session: Session,
    name: opt.Collection,
    number: Rendition,
    to: Annotated[
        int | None, typer.Option("--to", metavar="M", help="Compare to this one. Default: the active one.")
    ] = None,
    as_of: Annotated[
        str | None, typer.Option("--as-of", metavar="TIME", help="As of this time. Default: the newest that both have.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Wait this long for both to have the time.")
    ] = 60.0,
) -> None:
    """Show what a rendition would change: rows that appear, vanish and change, by column, with samples.

    It changes nothing, and takes bounded memory. Rows are distinguished by their key. Columns that only one side has
    are named, and not compared.

    \b
    persist collection compare orders 2
    persist collection compare orders 3 --to 2 --as-of 1000 --json | jq .columns
    """
    time = opt.parse_time(as_of, "--as-of")
    with session.controller() as controller, session.progress(f"compare {name}") as advance:
        found = controller.compare(
            name, number, to=to, as_of=time, timeout=timeout, progress=lambda rows: advance(rows, 0)
        )
        schema = controller.describe(name).schema
    value = {"collection": name, "equal": found.is_equal, **jsonable(found), **clock(schema.times)}
    session.answer({**value, "samples": found.samples}, *comparison_shown(found, schema))


class Handing(NamedTuple):
    """When and how a rendition becomes the collection."""

    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="At this time. Default: the earliest possible.")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Also if its data does not reach the time: readers then wait for it.")
    ] = False
    advance: Annotated[
        bool,
        typer.Option("--advance", help="See to it that readers see it: finish the copy, and move upper past the time."),
    ] = False
    transform: Function = None
    wait: Annotated[bool, typer.Option("--wait", help="Return once readers see it.")] = False
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long --advance and --wait may take.")
    ] = 3600.0


def hand_over(
    session: Session,
    name: opt.Collection,
    number: Rendition,
    handing: Handing = Handing(),  # noqa: B008 - it cannot be changed
    command: opt.Command = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Make a rendition the collection from a time on. Nothing before that time changes.

    Readers and listeners that are open continue: a listener gets the difference of both renditions at that time. They
    see it once upper has passed the time: with --advance at once, else when writers come there. To go back, hand over
    to the old rendition again, while it is there and is kept up to date.

    \b
    persist collection hand-over orders 2 --dry-run     when it would be, what is left to copy, why it is refused
    persist collection hand-over orders 2 --advance     with all that it takes, in one call
    """
    time = opt.parse_time(handing.at, "--at")
    function = load_function(handing.transform)
    if dry_run:
        with session.controller() as controller:
            plan = controller.plan_handover(name, number, at=time, force=handing.force)
        value = {"collection": name, **jsonable(plan), "dry_run": True, **clock(plan.schema.times)}
        value["schema"] = schema_value(plan.schema)
        session.answer(value, *_planned(name, plan, advance=handing.advance))
        if plan.refused:
            raise typer.Exit(1)
        return
    with session.controller(read_only=False) as controller:
        found = controller.describe(name)
        when = controller.hand_over(
            name, number, at=time, force=handing.force, advance=handing.advance, transform=function,
            wait=handing.wait, command=command, timeout=handing.timeout,
        )  # fmt: skip
        new = next(one for one in found.renditions if one.number == number)
    value = {"collection": name, "rendition": number, "at": when, "dry_run": False, **clock(found.schema.times)}
    session.answer(value, f"rendition {number} of {name} is the collection from {found.schema.show(when)} on")
    if new.copies is not None and not handing.advance:
        session.note(
            f"finish the copy, writers wait for it: persist collection rendition copy {name} {number} --to-end"
        )


def _planned(name: str, plan: HandoverPlan, *, advance: bool) -> Iterator[str]:
    """A plan for people."""
    show = plan.schema.show
    if plan.refused:
        yield f"would be refused: {plan.refused}"
        return
    yield f"rendition {plan.rendition} of {name} would be the collection from {show(plan.at)} on, after {plan.follows}"
    if plan.is_copy:
        rest = "" if frontier(plan.at) <= plan.reached else f"; the rest up to {show(plan.at)} is copied then"
        yield f"it is copied up to {show(plan.reached)}{rest}"
    seen = "at once" if advance else f"once upper, now {show(plan.upper)}, has passed {show(plan.at)}"
    yield f"readers would see it {seen}"


def comparison_shown(found: Comparison, schema: Schema) -> Iterator[RenderableType]:
    """A comparison for people: the counts, the columns, and a few rows of each kind."""
    counts = plain_table("", "keys", right=("keys",))
    for kind in ("appeared", "vanished", "changed"):
        counts.add_row(kind, units.number(getattr(found, kind)))
    counts.add_row("equal", units.number(found.equal_keys))
    yield (
        f"rendition {found.new} ({units.of(found.new_rows, 'row')}) beside rendition {found.old} "
        f"({units.of(found.old_rows, 'row')}), as of {schema.show(found.as_of)}"
    )
    yield counts
    if any(found.columns.values()):
        columns = plain_table("column", "changed", right=("changed",))
        for column, count in found.columns.items():
            columns.add_row(column, units.number(count))
        yield columns
    for kind, rows in found.samples.items():
        yield from (f"{kind}: {_sample(row)}" for row in rows)
    for side, names in ((found.old, found.only_old), (found.new, found.only_new)):
        if names:
            yield f"only rendition {side} has {', '.join(names)}: not compared"
    if found.is_equal:
        yield "no row differs"


def _sample(row: dict[str, Any]) -> str:
    """A row for people: `id=4 cents: 7 → 9`."""
    return " ".join(
        f"{name}: {cell(value[0])} → {cell(value[1])}" if isinstance(value, list) and len(value) == 2
        else f"{name}={cell(value)}" for name, value in row.items()
    )  # fmt: skip


def load_function(text: str | None) -> Transform | None:
    """The function that `FILE.py:NAME` or `module:NAME` names. Modules are looked for in this folder, too."""
    if text is None:
        return None
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise InvalidUsage(f"--transform names a function as FILE.py:FUNCTION or module:function: got {text!r}")
    path = Path(place)
    try:
        if path.suffix == ".py":
            sys.path.insert(0, str(path.resolve().parent))
            found = importlib.import_module(path.stem)
        else:
            sys.path.insert(0, str(Path.cwd()))
            found = importlib.import_module(place)
    except ImportError as error:
        raise InvalidUsage(f"--transform {text}: {error}") from error
    finally:
        sys.path.pop(0)
    function = getattr(found, name, None)
    if not callable(function):
        raise InvalidUsage(f"--transform {text}: {place} has no function {name!r}")
    return function
