"""`persist source`: outside data as collections. What is declared, and how it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from persist_lib.cli import units
from persist_lib.cli.arguments import Collection, Command, confirm
from persist_lib.cli.collections import NewCollection, RetentionOption, Shards
from persist_lib.cli.history import distance_of
from persist_lib.cli.layout import Fitted
from persist_lib.cli.render import plain_table
from persist_lib.cli.schemas import KeyColumns, ValueColumns, build_schema, schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.values import jsonable
from persist_lib.errors import InvalidUsage, redacted

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.storage.sources import SourceDescription, Sources

Pairs = list[str] | None


@contextmanager
def sourcing(session: Session, *, read_only: bool = False, create: bool = False) -> Iterator[Sources]:
    """The sources of the session's location, for the length of a command."""

    with session.open(read_only=read_only, create=create) as client, client.controller() as controller:
        sources = controller.sources()
        try:
            yield sources
        finally:
            sources.close()


def create(
    session: Session,
    name: NewCollection,
    place: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="A folder, s3://bucket/prefix/, kafka://broker:9092/topic, postgresql://…, or collection:NAME.",
            show_default=False,
        ),
    ],
    format_: Annotated[
        Literal["jsonl", "csv", "text", "parquet", "avro", "bytes"] | None,
        typer.Option(
            "--format", help="What is in the files, or in the values of messages (jsonl).", show_default=False
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="Of PostgreSQL: the table, as in public.orders.", show_default=False),
    ] = None,
    publication: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of PostgreSQL: a publication that is there.", show_default=False),
    ] = None,
    key: KeyColumns = None,
    value: ValueColumns = None,
    envelope: Annotated[
        Literal["none", "upsert", "debezium"],
        typer.Option(help="What a row means: none adds it, upsert makes it the row of its key, debezium is a change."),
    ] = "none",
    deletes: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="With upsert: true in rows that take their key's row away.", show_default=False
        ),
    ] = None,
    key_format: Annotated[
        Literal["json", "text", "bytes", "avro"] | None,
        typer.Option(help="Read the key columns from the keys of messages (Kafka).", show_default=False),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help="Avro's schemas: the URL of a registry, or a folder of ID.avsc.", show_default=False
        ),
    ] = None,
    transactions: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="With debezium: let changes wait until theirs is whole, as TOPIC says.",
            show_default=False,
        ),
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="With --transactions: also until all that began before are whole.")
    ] = False,
    include: Annotated[
        Pairs,
        typer.Option(
            metavar="COLUMN=WHAT",
            help="Fill a column with partition, address or time; of Kafka also key, headers or timestamp. Repeatable.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        Pairs,
        typer.Option(
            metavar="COLUMN=NAME", help="What a column is called in the files. Repeatable.", show_default=False
        ),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A pure function of the rows, over Arrow.", show_default=False),
    ] = None,
    rotated: Annotated[
        bool, typer.Option("--rotated", help="Files are rotated: know them by their first line, not by their name.")
    ] = False,
    no_header: Annotated[bool, typer.Option("--no-header", help="CSV without a header: the columns in order.")] = False,
    ignore_extra: Annotated[bool, typer.Option("--ignore-extra", help="Leave out fields without a column.")] = False,
    keep_raw: Annotated[bool, typer.Option("--keep-raw", help="Keep all messages as they came, in NAME/raw.")] = False,
    most_errors: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Stop when more messages are bad.", show_default=False)
    ] = None,
    shards: Shards = 1,
    retention: RetentionOption = None,
    command: Command = None,
) -> None:
    """Declare a source: lines or rows of files, or messages of topics, become the collection NAME, at times of the
    store's clock.

    Or another collection, whose rows become those of NAME at the times that they have; or a table of PostgreSQL, which
    is followed, and whose columns are those of the table unless others are declared.

    Bad lines become rows of NAME/errors. Nothing is read yet: `persist ingest NAME` does that, anywhere, in any number.

    \b
    persist source create orders --from in --format jsonl --key id:int64 --value cents:int64 --envelope upsert
    persist source create logs --from /var/log/app --format text --rotated --key 'at:uint64 not null' \\
        --value line:string --include at=address
    persist source create users --from 'kafka://broker:9092/users?group=persist' --key-format json \\
        --key 'id:int64 not null' --value name:string --envelope upsert
    persist source create paid --from collection:orders --key id:int64 --value cents:int64 --ignore-extra
    persist source create orders --from postgresql://me@host/shop --table public.orders
    """
    from persist_lib.storage.sources import Decoding, Meaning, Registry, Transactions
    from persist_lib.storage.sources.kinds import check_options, kind_of_place
    from persist_lib.storage.sources.records import Place

    kind = kind_of_place(place)
    given = {
        "format": format_, "rotated": rotated, "no-header": no_header, "table": table, "publication": publication,
        "envelope": envelope != "none", "deletes": deletes, "transform": transform, "keep-raw": keep_raw,
        "key-format": key_format, "registry": registry, "transactions": transactions,
    }  # fmt: skip
    check_options(kind, [option for option, what in given.items() if what])
    if in_order and transactions is None:
        raise InvalidUsage("--in-order is about transactions: pass --transactions TOPIC")
    is_given = bool(key or value) or not kind.brings_schema
    schema = build_schema(key or [], value or [], None, times=None) if is_given else None
    decoder: Any
    reader, decoder = kind.of_place(Place(place, format_, table, publication, rotated, not no_header))
    held = None if transactions is None else Transactions(topic=transactions, in_order=in_order)
    kept = None if retention is None else distance_of(retention)
    decoding = Decoding(
        decoder=decoder, columns=pairs_of(column, "--column"), key=key_format,
        extra="ignore" if ignore_extra else reader.default_decoding().extra,
        registry=None if registry is None else Registry(place=registry),
    )  # fmt: skip
    about: Any = pairs_of(include, "--include")
    meaning = Meaning(
        envelope=reader.default_meaning().envelope if envelope == "none" else envelope, deletes=deletes, include=about,
        transform=transform, most_errors=most_errors, keep_raw=keep_raw, transactions=held,
    )  # fmt: skip
    with sourcing(session, create=True) as sources:
        found = sources.create(
            name,
            reader,
            schema,
            decoding=decoding,
            meaning=meaning,
            shards=shards or 1,
            retention=kept,
            command=command,
        )
    session.answer(
        value_of(found),
        f"created {name} from {table or redacted(place)}: {found.schema}",
        f"start it: persist ingest {name}",
    )


def list_(session: Session) -> None:
    """List the sources of the location, one line each.

    \b
    persist source list
    """
    with sourcing(session, read_only=True) as sources:
        found = [sources.show(name) for name in sources.list()]
    table = plain_table("source", "state", "up to", "instances", "errors", right=["errors"])
    for one in found:
        table.add_row(one.name, one.state, up_to(one), _instances(one) or "-", f"{one.errors:,}")
    shown = [table] if found else []
    session.answer({"sources": [value_of(one) for one in found]}, *shown, units.of(len(found), "source"))


def show(session: Session, name: Collection) -> None:
    """Show one source: what is declared, how far it has come, and how its instances are.

    \b
    persist source show orders
    persist source show orders --json | jq .durable
    """
    with sourcing(session, read_only=True) as sources:
        found = sources.show(name)
    lines = Fitted(("", ""))
    for label, text in (
        ("state", f"{found.state}{': ' if found.why else ''}{found.why}"),
        ("from", msgspec.json.encode(found.reader).decode()),
        ("decoding", msgspec.json.encode(found.decoding).decode()),
        ("meaning", msgspec.json.encode(found.meaning).decode()),
        ("schema", str(found.schema)),
        ("collections", ", ".join(found.collections.values())),
        ("up to", f"{up_to(found)}, {units.duration(found.behind_ms)} behind"),
        ("errors", f"{found.errors:,}"),
    ):
        lines.add_row(label, text)
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
    tables = [table for table in (partitions, instances) if table.row_count]
    session.answer(value_of(found), lines, *tables)


def check(
    session: Session,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all sources.")] = None,
    instances: Annotated[int, typer.Option(min=0, help="How many have to be at work.")] = 1,
    behind: Annotated[int, typer.Option(min=0, metavar="SECONDS", help="How far it may be behind.")] = 300,
    lag_messages: Annotated[int | None, typer.Option(min=0, help="How many may be left.", show_default=False)] = None,
    lag_bytes: Annotated[int | None, typer.Option(min=0, help="How many may be left.", show_default=False)] = None,
    errors: Annotated[int | None, typer.Option(min=0, help="How many there may be.", show_default=False)] = None,
    errors_share: Annotated[float, typer.Option(min=0, max=1, help="Of the messages of instances at work.")] = 0.01,
    held_back_bytes: Annotated[int, typer.Option(min=0, help="How much the upstream may have to keep.")] = 10 << 30,
) -> None:
    """Say what is wrong with sources: none at work, lag, bad messages, a log that is held back, what is not read.

    Changes nothing. Where no instance is at work, the upstream is asked from here. It ends with exit code 1 where
    something is wrong, for monitors. A paused source has no lag to speak of.

    \b
    persist source check
    persist source check orders --behind 60 --errors 0 --json
    """
    from persist_lib.storage.sources import Limits
    from persist_lib.storage.sources import check as checked

    limits = Limits(
        instances=instances, behind_s=behind, lag_messages=lag_messages, lag_bytes=lag_bytes, errors=errors,
        errors_share=errors_share, held_back_bytes=held_back_bytes,
    )  # fmt: skip
    with sourcing(session, read_only=True) as sources:
        found = checked(sources, limits, names or ())
    table = plain_table("source", "check", "", "says")
    for name, alerts in found.items():
        for one in alerts:
            table.add_row(name, one.check, "ok" if one.passed else "WRONG", one.says)
    wrong = sorted({name for name, alerts in found.items() if not all(one.passed for one in alerts)})
    value = {"wrong": wrong, "sources": {name: [jsonable(one) for one in alerts] for name, alerts in found.items()}}
    said = f"something is wrong with {', '.join(wrong)}" if wrong else "nothing is wrong"
    session.answer(value, *([table] if found else []), said)
    if wrong:
        raise typer.Exit(1)


def pause(
    session: Session,
    name: Collection,
    why: Annotated[str, typer.Option(metavar="TEXT", help="What `persist source show` says of it.")] = "",
) -> None:
    """Let all instances of a source stand still, wherever they run, after the step that they are at.

    \b
    persist source pause orders --why 'the disk is full'
    """
    with sourcing(session) as sources:
        sources.pause(name, why=why)
    session.answer({"source": name, "state": "paused"}, f"{name} is paused")


def resume(session: Session, name: Collection) -> None:
    """Let a paused source continue.

    \b
    persist source resume orders
    """
    with sourcing(session) as sources:
        sources.resume(name)
    session.answer({"source": name, "state": "running"}, f"{name} continues")


def reset(
    session: Session, name: Collection, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Begin a source again with what is there now. Its collections are dropped, and made again, empty.

    This cannot be undone. It is for a source that can never continue: files that are gone, or were changed.

    \b
    persist source reset orders
    """
    with sourcing(session) as sources:
        sources.find(name)
        if not yes:
            confirm(session, name, "resetting", "source")
        found = sources.reset(name)
    session.answer(value_of(found), f"{name} begins again: persist ingest {name}")


def drop(
    session: Session, name: Collection, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Drop a source with all of its collections. Instances of it end.

    Of PostgreSQL the slot goes too, and the publication that the source made; what cannot be reached is said. This
    cannot be undone.

    \b
    persist source drop orders
    """
    with sourcing(session) as sources:
        if not yes:
            confirm(session, name, "dropping", "source")
        left = sources.drop(name)
    session.answer({"source": name, "left": list(left)}, f"{name} is dropped", *left)


def pairs_of(given: Pairs, option: str) -> dict[str, str]:
    """What was given as NAME=VALUE. Raises InvalidUsage."""
    found = {}
    for text in given or []:
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip():
            raise InvalidUsage(f"{option} takes a column and a value, as in at=address: got {text!r}")
        found[name.strip()] = what.strip()
    return found


def up_to(found: SourceDescription) -> str:
    """How far a source has come, for people."""
    return found.schema.show(found.time)


def _instances(found: SourceDescription) -> str:
    states = [str(one["state"]) for one in found.instances]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def value_of(found: SourceDescription) -> dict[str, Any]:
    """A source as JSON."""
    marks = {
        what: {partition: mark.address for partition, mark in sorted(getattr(found, what).items())}
        for what in ("bound", "durable")
    }
    declared = {what: msgspec.to_builtins(getattr(found, what)) for what in ("reader", "decoding", "meaning")}
    return {
        "source": found.name, "state": found.state, **declared, "schema": schema_value(found.schema),
        "collections": dict(found.collections), "time": found.time,
        "behind_ms": found.behind_ms, "errors": found.errors, "why": found.why, "left": jsonable(found.left), **marks,
        "instances": [jsonable({k: v for k, v in one.items() if k != "_diff"}) for one in found.instances],
    }  # fmt: skip
