"""`persist source` and `persist ingest`: outside data as collections. What is declared, how it is, and one instance."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
from persist_lib.errors import InvalidUsage, PersistError, redacted

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.storage.sources import Progress, SourceDescription, Sources
    from persist_lib.storage.sources.declared import From

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
            help="A folder, s3://bucket/prefix/, or kafka://broker:9092/topic.",
            show_default=False,
        ),
    ],
    format_: Annotated[
        Literal["jsonl", "csv", "text", "parquet", "avro", "bytes"],
        typer.Option("--format", help="What is in the files, or in the values of messages."),
    ] = "jsonl",
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

    Bad lines become rows of NAME/errors. Nothing is read yet: `persist ingest NAME` does that, anywhere, in any number.

    \b
    persist source create orders --from in --format jsonl --key id:int64 --value cents:int64 --envelope upsert
    persist source create logs --from /var/log/app --format text --rotated --key 'at:uint64 not null' \\
        --value line:string --include at=address
    persist source create users --from 'kafka://broker:9092/users?group=persist' --key-format json \\
        --key 'id:int64 not null' --value name:string --envelope upsert
    """
    from persist_lib.storage.sources import Decoding, Meaning, Registry, Transactions

    schema = build_schema(key or [], value or [], None, times="ms")
    reader, decoder = _reader_of(place, format_, is_rotated=rotated, header=not no_header)
    decoding = Decoding(
        decoder=decoder, columns=_pairs(column, "--column"), extra="ignore" if ignore_extra else "refuse",
        key=key_format, registry=None if registry is None else Registry(place=registry),
    )  # fmt: skip
    if in_order and transactions is None:
        raise InvalidUsage("--in-order is about transactions: pass --transactions TOPIC")
    held = None if transactions is None else Transactions(topic=transactions, in_order=in_order)
    about: Any = _pairs(include, "--include")
    meaning = Meaning(
        envelope=envelope, deletes=deletes, include=about, transform=transform, most_errors=most_errors,
        keep_raw=keep_raw, transactions=held,
    )  # fmt: skip
    kept = None if retention is None else distance_of(retention)
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
        _value(found), f"created {name} from {redacted(place)}: {schema}", f"start it: persist ingest {name}"
    )


def _reader_of(place: str, format_: str, *, is_rotated: bool, header: bool) -> tuple[From, Any]:
    """The reader of a place, and the decoder of what is there."""
    from persist_lib.storage.sources import Files
    from persist_lib.storage.sources.kafka import parse_kafka_url
    from persist_lib.storage.sources.sources import DECODERS

    decoder = DECODERS.get(format_, format_)
    if not place.startswith("kafka:"):
        how: Any = format_
        return Files(place=place, format=how, header=header, identity="first line" if is_rotated else "path"), decoder
    if is_rotated or not header or format_ == "parquet":
        raise InvalidUsage("--rotated, --no-header and --format parquet are about files, not about topics")
    return parse_kafka_url(place), decoder


def list_(session: Session) -> None:
    """List the sources of the location, one line each.

    \b
    persist source list
    """
    with sourcing(session, read_only=True) as sources:
        found = [sources.show(name) for name in sources.list()]
    table = plain_table("source", "state", "up to", "instances", "errors", right=["errors"])
    for one in found:
        errors = sum(int(str(instance["errors"])) for instance in one.instances)
        table.add_row(one.name, one.state, _up_to(one), _instances(one) or "-", str(errors))
    shown = [table] if found else []
    session.answer({"sources": [_value(one) for one in found]}, *shown, units.of(len(found), "source"))


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
        ("state", found.state),
        ("from", msgspec.json.encode(found.reader).decode()),
        ("decoding", msgspec.json.encode(found.decoding).decode()),
        ("meaning", msgspec.json.encode(found.meaning).decode()),
        ("schema", str(found.schema)),
        ("collections", ", ".join(found.collections.values())),
        ("up to", _up_to(found)),
    ):
        lines.add_row(label, text)
    partitions = plain_table("partition", "bound to", "durable to", right=["bound to", "durable to"])
    for partition, mark in sorted(found.bound.items()):
        durable = found.durable.get(partition)
        partitions.add_row(partition, str(mark.address), str(durable.address if durable else 0))
    instances = plain_table("instance", "state", "messages", "errors", "why", right=["messages", "errors"])
    for one in found.instances:
        instances.add_row(*(str(one[label]) for label in ("instance", "state", "messages", "errors", "why")))
    tables = [table for table in (partitions, instances) if table.row_count]
    session.answer(_value(found), lines, *tables)


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
    """Let a paused source go on.

    \b
    persist source resume orders
    """
    with sourcing(session) as sources:
        sources.resume(name)
    session.answer({"source": name, "state": "running"}, f"{name} goes on")


def reset(
    session: Session, name: Collection, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Begin a source anew with what is there now. Its collections are dropped, and made again, empty.

    This cannot be undone. It is for what can never go on: files that are gone, or were changed.

    \b
    persist source reset orders
    """
    with sourcing(session) as sources:
        sources.find(name)
        if not yes:
            confirm(session, name, "resetting", "source")
        found = sources.reset(name)
    session.answer(_value(found), f"{name} begins anew: persist ingest {name}")


def drop(
    session: Session, name: Collection, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Drop a source with all of its collections. Instances of it end.

    This cannot be undone.

    \b
    persist source drop orders
    """
    with sourcing(session) as sources:
        if not yes:
            confirm(session, name, "dropping", "source")
        sources.drop(name)
    session.answer({"source": name}, f"{name} is dropped")


def ingest(
    session: Session,
    name: Collection,
    every: Annotated[
        float, typer.Option("--every", min=0.01, metavar="SECONDS", help="How often to look for what is new.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="End when nothing new is there.")] = False,
) -> None:
    """Run an instance of a source until Ctrl-C or a SIGTERM, or with --once until all that is there is durable.

    Any number may run, anywhere; all of them make the same collection. One that is killed loses nothing. It ends by
    itself, with exit code 1, where messages are gone or have changed, or too many are bad.

    \b
    persist ingest orders
    persist ingest orders --once
    """
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(number, signal.default_int_handler)  # the second one does not wait for the step

    messages = errors = 0

    def told(what: Progress | PersistError) -> None:
        nonlocal messages, errors
        if isinstance(what, PersistError):
            session.note(f"{name}: {what}; trying again")
            return
        messages, errors = messages + what.messages, errors + what.errors
        if what.messages:
            lag = f", {sum(what.lag.values()):,} left" if what.lag else ""
            session.note(f"{name}: {units.of(what.messages, 'message')}, {units.of(what.errors, 'error')}{lag}")

    with sourcing(session) as sources:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            last = sources.run(name, stop=lambda: bool(stopped), told=told, interval_s=every, until_idle=once)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        found = sources.show(name)
    said = f"{name}: {units.of(messages, 'message')}, {units.of(errors, 'error')}, durable up to {_up_to(found)}"
    if last is None and found.state == "paused":
        said = f"{name} is paused: persist source resume {name}"
    session.answer({"messages": messages, "errors": errors, **_value(found)}, said)


def _pairs(given: Pairs, option: str) -> dict[str, str]:
    found = {}
    for text in given or []:
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip():
            raise InvalidUsage(f"{option} takes a column and a value, as in at=address: got {text!r}")
        found[name.strip()] = what.strip()
    return found


def _up_to(found: SourceDescription) -> str:
    return found.schema.show(found.time)


def _instances(found: SourceDescription) -> str:
    states = [str(one["state"]) for one in found.instances]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def _value(found: SourceDescription) -> dict[str, Any]:
    marks = {
        what: {partition: mark.address for partition, mark in sorted(getattr(found, what).items())}
        for what in ("bound", "durable")
    }
    declared = {what: msgspec.to_builtins(getattr(found, what)) for what in ("reader", "decoding", "meaning")}
    return {
        "source": found.name, "state": found.state, **declared, "schema": schema_value(found.schema),
        "collections": dict(found.collections), "time": found.time, **marks,
        "instances": [jsonable({k: v for k, v in one.items() if k != "_diff"}) for one in found.instances],
    }  # fmt: skip
