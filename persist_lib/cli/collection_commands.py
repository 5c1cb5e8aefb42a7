"""A collection and its renditions as tables and as JSON, and how one is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persist_lib.cli import units
from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.render import plain_table
from persist_lib.cli.schema_commands import schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Fitted
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.catalog import Description, RenditionDescription
    from persist_lib.catalog.describe import Tended


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
