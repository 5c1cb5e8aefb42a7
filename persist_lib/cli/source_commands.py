"""`persist source`: outside data as collections. What is declared, and how it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from persist_lib.cli import units
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.schema_commands import schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Collection, SomeCollection, Yes
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.sources import SourceDescription
    from persist_lib.sources.records import Declaration


def show(
    session: Session,
    name: SomeCollection = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the file that declares it, for `create -f`.")] = False,
) -> None:
    """Show one source: what is declared, how far it has come, and how its instances are; without a name, list all.

    \b
    persist source show
    persist source show orders
    persist source show orders --json | jq .durable
    persist source show orders --toml > orders.toml
    """
    if name is None:
        if toml:
            raise InvalidUsage("--toml prints the file of one source: name it")
        _list(session)
        return
    with session.sources(read_only=True) as sources:
        found = sources.show(name)
    if toml:
        from persist_lib.sources.declaration_file import written

        session.out.out(written(found), end="", highlight=False)
        return
    lines = labelled(
        ("state", f"{found.state}{': ' if found.why else ''}{found.why}"),
        ("from", msgspec.json.encode(found.reader).decode()),
        ("decoding", msgspec.json.encode(found.decoding).decode()),
        ("meaning", msgspec.json.encode(found.meaning).decode()),
        ("schema", str(found.schema)),
        ("collections", ", ".join(found.collections.values())),
        ("up to", f"{up_to(found)}, {units.duration(found.behind_ms)} behind"),
        ("errors", f"{found.errors:,}"),
    )
    figures = ("bound to", "durable to", "messages left", "bytes left", "seconds behind")
    partitions = plain_table("partition", *figures, right=figures)
    for partition, mark in sorted(found.bound.items()):
        durable = found.durable.get(partition)
        left = found.left.get(partition, {})
        known = ("" if left.get(what) is None else f"{left[what]:,}" for what in ("messages", "bytes", "seconds"))
        partitions.add_row(partition, str(mark.address), str(durable.address if durable else 0), *known)
    labels = ["instance", "state", "messages", "errors", "why"]
    if any(one.get("held_back_bytes") is not None for one in found.instances):
        labels.insert(4, "held back")
    instances = plain_table(*labels, right=["messages", "errors", "held back"])
    for one in found.instances:
        row = {**one, "held back": units.size(int(str(one.get("held_back_bytes") or 0)))}
        instances.add_row(*(str(row[label]) for label in labels))
    session.answer(value_of(found), lines, partitions, instances)


def _list(session: Session) -> None:
    """List the sources of the location, one line each."""
    with session.sources(read_only=True) as sources:
        found = [sources.show(name) for name in sources.list()]
    table = plain_table("source", "state", "up to", "instances", "errors", right=["errors"])
    for one in found:
        table.add_row(one.name, one.state, up_to(one), _instances(one) or "-", f"{one.errors:,}")
    session.answer({"sources": [value_of(one) for one in found]}, table, units.of(len(found), "source"))


def pause(
    session: Session,
    name: Collection,
    why: Annotated[str, typer.Option(metavar="TEXT", help="What `persist source show` says of it.")] = "",
) -> None:
    """Let all instances of a source stand still, wherever they run, after the step that they are at.

    \b
    persist source pause orders --why 'the disk is full'
    """
    with session.sources() as sources:
        sources.pause(name, why=why)
    session.answer({"source": name, "state": "paused"}, f"{name} is paused")


def resume(session: Session, name: Collection) -> None:
    """Let a paused source continue.

    \b
    persist source resume orders
    """
    with session.sources() as sources:
        sources.resume(name)
    session.answer({"source": name, "state": "running"}, f"{name} continues")


def reset(session: Session, name: Collection, yes: Yes = False) -> None:
    """Begin a source again with what is there now. Its collections are dropped, and made again, empty.

    This cannot be undone. It is for a source that can never continue: files that are gone, or were changed.

    \b
    persist source reset orders
    """
    with session.sources() as sources:
        sources.find(name)
        session.confirm(name, "resetting", "source", yes=yes)
        found = sources.reset(name)
    session.answer(value_of(found), f"{name} begins again: persist ingest {name}")


def drop(session: Session, name: Collection, yes: Yes = False) -> None:
    """Drop a source with all of its collections. Instances of it end.

    Of PostgreSQL the slot goes too, and the publication that the source made; what cannot be reached is said. This
    cannot be undone.

    \b
    persist source drop orders
    """
    with session.sources() as sources:
        session.confirm(name, "dropping", "source", yes=yes)
        left = sources.drop(name)
    session.answer({"source": name, "left": list(left)}, f"{name} is dropped", *left)


def up_to(found: SourceDescription) -> str:
    """How far a source has come, for people."""
    return found.schema.show(found.time)


def _instances(found: SourceDescription) -> str:
    states = [str(one["state"]) for one in found.instances]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def declared_value(found: Declaration) -> dict[str, Any]:
    """What is declared, as JSON."""
    declared = {what: msgspec.to_builtins(getattr(found, what)) for what in ("reader", "decoding", "meaning")}
    return {**declared, "schema": schema_value(found.schema)}


def value_of(found: SourceDescription) -> dict[str, Any]:
    """A source as JSON."""
    marks = {
        what: {partition: mark.address for partition, mark in sorted(getattr(found, what).items())}
        for what in ("bound", "durable")
    }
    return {
        "source": found.name, "state": found.state, **declared_value(found),
        "collections": dict(found.collections), "time": found.time,
        "behind_ms": found.behind_ms, "errors": found.errors, "why": found.why, "left": jsonable(found.left), **marks,
        "instances": [jsonable({k: v for k, v in one.items() if k != "_diff"}) for one in found.instances],
    }  # fmt: skip
