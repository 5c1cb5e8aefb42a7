"""`persist source create` and `mend`: what a source reads, how it is decoded, and what its rows mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import RenderableType

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.rendition_commands import comparison_shown
from persist_lib.cli.schema_commands import build_schema
from persist_lib.cli.session import Session
from persist_lib.cli.source_commands import value_of
from persist_lib.errors import InvalidUsage, redacted

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.schema.schema import Schema


class Place(NamedTuple):
    """Where a source's messages are, and what is there."""

    place: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="A folder, s3://bucket/prefix/, kafka://broker:9092/topic, postgresql://…, or collection:NAME.",
        ),
    ]
    format_: Annotated[
        Literal["jsonl", "csv", "text", "parquet", "avro", "bytes"] | None,
        typer.Option("--format", help="What is in the files, or in the values of messages (jsonl)."),
    ] = None
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Of PostgreSQL: the table, as in public.orders.")
    ] = None
    publication: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of PostgreSQL: a publication that is there.")
    ] = None
    rotated: Annotated[
        bool, typer.Option("--rotated", help="Files are rotated: know them by their first line, not by their name.")
    ] = False
    no_header: Annotated[bool, typer.Option("--no-header", help="CSV without a header: the columns in order.")] = False


class Meant(NamedTuple):
    """What rows mean, and how their columns are filled; None for what was not given."""

    envelope: Annotated[
        Literal["none", "upsert", "debezium"] | None,
        typer.Option(
            help="What a row means: none (the default) adds it, upsert makes it the row of its key, debezium is a "
            "change."
        ),
    ] = None
    deletes: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With upsert: true in rows that take their key's row away.")
    ] = None
    include: Annotated[
        opt.Pairs,
        typer.Option(
            metavar="COLUMN=WHAT",
            help="Fill a column with partition, address or time; of Kafka also key, headers or timestamp. Repeatable.",
        ),
    ] = None
    column: Annotated[
        opt.Pairs, typer.Option(metavar="COLUMN=NAME", help="What a column is called in the files. Repeatable.")
    ] = None
    transform: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="A pure function of the rows, over Arrow.")
    ] = None

    def meaning(self) -> dict[str, Any]:
        """The fields of `Meaning` that were given."""
        fields = {what: getattr(self, what) for what in ("envelope", "deletes", "transform")}
        fields["include"] = None if self.include is None else opt.parse_pairs(self.include, "--include")
        return {field: value for field, value in fields.items() if value is not None}

    def decoding(self, extra: str | None) -> dict[str, Any]:
        """The fields of `Decoding` that were given."""
        fields = {"columns": None if self.column is None else opt.parse_pairs(self.column, "--column"), "extra": extra}
        return {field: value for field, value in fields.items() if value is not None}


class Kept(NamedTuple):
    """What else of messages is read, waited for and kept."""

    key_format: Annotated[
        Literal["json", "text", "bytes", "avro"] | None,
        typer.Option(help="Read the key columns from the keys of messages (Kafka)."),
    ] = None
    registry: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Avro's schemas: the URL of a registry, or a folder of ID.avsc.")
    ] = None
    transactions: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="With debezium: let changes wait until theirs is whole, as TOPIC says."),
    ] = None
    in_order: Annotated[
        bool, typer.Option("--in-order", help="With --transactions: also until all that began before are whole.")
    ] = False
    ignore_extra: Annotated[bool, typer.Option("--ignore-extra", help="Leave out fields without a column.")] = False
    keep_raw: Annotated[bool, typer.Option("--keep-raw", help="Keep all messages as they came, in NAME/raw.")] = False
    most_errors: Annotated[int | None, typer.Option(min=0, metavar="N", help="Stop when more messages are bad.")] = None


class Columns(NamedTuple):
    """The declared columns, and what the source's collection is made of."""

    key: opt.KeyColumns = None
    value: opt.ValueColumns = None
    shards: opt.ShardCount = 1
    retention: opt.Retention = None


def declare(
    session: Session, name: opt.NewCollection, place: Place, columns: Columns, meant: Meant, kept: Kept,
    command: opt.Command = None,
) -> None:  # fmt: skip
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
    from persist_lib.sources import Decoding, Meaning, Registry, Transactions
    from persist_lib.sources.kinds import check_options, kind_of_place
    from persist_lib.sources.records import Place as Declared

    kind = kind_of_place(place.place)
    check_options(kind, _given(place, meant, kept))
    if kept.in_order and kept.transactions is None:
        raise InvalidUsage("--in-order is about transactions: pass --transactions TOPIC")
    schema: Schema | None = None
    if columns.key or columns.value or not kind.brings_schema:
        schema = build_schema(columns.key or [], columns.value or [], None, times=None)
    reader, decoder = kind.of_place(
        Declared(place.place, place.format_, place.table, place.publication, place.rotated, not place.no_header)
    )
    held = None if kept.transactions is None else Transactions(topic=kept.transactions, in_order=kept.in_order)
    form: Any = decoder
    decoding = Decoding(
        decoder=form, key=kept.key_format, registry=None if kept.registry is None else Registry(place=kept.registry),
        **meant.decoding("ignore" if kept.ignore_extra else reader.default_decoding().extra),
    )  # fmt: skip
    terms = {"envelope": reader.default_meaning().envelope} if meant.envelope in (None, "none") else {}
    meaning = Meaning(
        most_errors=kept.most_errors, keep_raw=kept.keep_raw, transactions=held, **{**meant.meaning(), **terms}
    )
    with session.sources(create=True) as sources:
        found = sources.create(
            name, reader, schema, decoding=decoding, meaning=meaning, shards=columns.shards or 1,
            retention=opt.parse_distance(columns.retention), command=command,
        )  # fmt: skip
    said = f"created {name} from {place.table or redacted(place.place)}: {found.schema}"
    session.answer(value_of(found), said, f"start it: persist ingest {name}")


def _given(place: Place, meant: Meant, kept: Kept) -> list[str]:
    """The options that not all kinds of source have, and that were given."""
    options = {
        "format": place.format_, "rotated": place.rotated, "no-header": place.no_header, "table": place.table,
        "publication": place.publication, "envelope": meant.envelope not in (None, "none"), "deletes": meant.deletes,
        "transform": meant.transform, "keep-raw": kept.keep_raw, "key-format": kept.key_format,
        "registry": kept.registry, "transactions": kept.transactions,
    }  # fmt: skip
    return [option for option, what in options.items() if what]


def mend(
    session: Session,
    name: opt.Collection,
    meant: Meant,
    extra: Annotated[Literal["refuse", "ignore"] | None, typer.Option(help="Fields without a column.")] = None,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Make what was decoded again the collections, from now on.")
    ] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Drop what was decoded again.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="How long to try.")] = 600.0,
) -> None:
    """Decode a source's messages in another way, from NAME/raw, and say what would change. No reader gets that yet.

    What is not given stays as it is; given options take the place of those of its kind. Instances may run on. Judge
    what it says, then hand over, or give it up. Reads as of earlier times stay what they were.

    \b
    persist source mend orders --column cents=amount
    persist source mend orders --hand-over
    """
    if (hand_over or give_up) and any(one is not None for one in (*meant, extra)):
        raise InvalidUsage("--hand-over and --give-up are about what was decoded before: give no other options with it")
    if hand_over and give_up:
        raise InvalidUsage("say --hand-over or --give-up")
    with session.sources() as sources:
        if give_up:
            sources.give_up(name, timeout=timeout)
            session.answer({"source": name}, f"{name}: what was decoded again is dropped")
            return
        if hand_over:
            at = sources.hand_over(name, timeout=timeout)
            shown = sources.find(name).columns.show(at)
            session.answer({"source": name, "at": at}, f"{name} is decoded again from {shown} on")
            return
        record, fields, form = sources.find(name), meant.meaning(), meant.decoding(extra)
        meaning = msgspec.structs.replace(record.meaning, **fields) if fields else None
        decoding = msgspec.structs.replace(record.decoding, **form) if form else None
        found = sources.mend(name, decoding=decoding, meaning=meaning, timeout=timeout)
        described = sources.show(name)
    value = {what: jsonable(getattr(found, what)) for what in ("renditions", "time", "output", "errors")}
    judge = f"judge this, then: persist source mend {name} --hand-over, or --give-up"
    session.answer({"source": name, **value}, *_judged(found, described), judge)


def _judged(found: Any, described: Any) -> list[RenderableType]:
    """What was decoded again beside what is there, for people."""
    from persist_lib.sources.pipeline import ERRORS

    said: list[RenderableType] = []
    for role, judged, schema in (("output", found.output, described.schema), ("errors", found.errors, ERRORS)):
        said.append(described.collections[role])
        if judged is None:
            said.append("it has other keys, or nothing yet, so it is not compared")
        else:
            said += comparison_shown(judged, schema)
    return said
