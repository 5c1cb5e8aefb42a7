"""`persist source create` and `mend`: what a source reads, how it is decoded, and what its rows mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import RenderableType

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.rendition_commands import comparison_shown
from persist_lib.cli.schema_commands import build_schema
from persist_lib.cli.session import Session
from persist_lib.cli.source_commands import columns_of, declared_value, value_of
from persist_lib.errors import InvalidUsage, NotFound, redacted

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.schema.schema import Schema
    from persist_lib.sources import Sources
    from persist_lib.sources.declaration_file import Given
    from persist_lib.sources.records import SourceRecord


File = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="A TOML file that declares the source, whole.")
]


class Place(NamedTuple):
    """Where a source's messages are, and what is there."""

    place: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="A folder, s3://bucket/prefix/, kafka://broker:9092/topic, postgresql://…, or collection:NAME.",
        ),
    ] = None
    format_: Annotated[
        Literal["jsonl", "csv", "text", "parquet", "avro", "bytes"] | None,
        typer.Option("--format", help="What is in the files, or in the values of messages (jsonl)."),
    ] = None
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE",
            help="Of PostgreSQL: the table, as in public.orders. Repeatable: several tables at the same times.",
        ),
    ] = None
    key: opt.KeyColumns = None
    value: opt.ValueColumns = None


class Meant(NamedTuple):
    """What becomes of messages; None for what was not given."""

    envelope: Annotated[
        Literal["none", "upsert", "debezium"] | None,
        typer.Option(
            help="What a row means: none (the default) adds it, upsert makes it the row of its key, debezium is a "
            "change."
        ),
    ] = None
    include: Annotated[
        opt.Pairs,
        typer.Option(
            metavar="COLUMN=WHAT",
            help="Fill a column with partition, address or time; of Kafka also key, headers or timestamp. Repeatable.",
        ),
    ] = None
    ignore_extra: Annotated[bool, typer.Option("--ignore-extra", help="Leave out fields without a column.")] = False
    add_columns: Annotated[
        bool, typer.Option("--add-columns", help="Of PostgreSQL and Avro: take the columns that come later, too.")
    ] = False
    keep_raw: Annotated[bool, typer.Option("--keep-raw", help="Keep all messages as they came, in NAME/raw.")] = False
    shards: opt.ShardCount = None
    retention: opt.Retention = None


def declare(
    session: Session, name: opt.NewTable, place: Place, meant: Meant, file: File = None,
    command: opt.Command = None, dry_run: opt.DryRun = False,
) -> None:  # fmt: skip
    """Declare a source: lines or rows of files, or messages of topics, become the collection NAME, at times of the
    store's clock.

    Or another collection, whose rows become those of NAME at the times that they have; or a table of PostgreSQL, which
    is followed, and whose columns are those of the table unless others are declared. Several tables become
    NAME/SCHEMA.TABLE each, and at each time all of them show the database as of one moment. So do topics of Kafka
    become NAME/TOPIC each, where a file says the columns of each ([tables.TOPIC]).

    A file can say all that there is to say, options only a part. `persist source show NAME --toml` prints such a file.

    Bad lines become rows of NAME/errors. Nothing is read yet: `persist ingest NAME` does that, anywhere, in any number.

    \b
    persist source create orders -f orders.toml
    persist source create orders -f orders.toml --dry-run    check all of it, and make nothing
    persist source create orders --from in --format jsonl --key id:int64 --value cents:int64 --envelope upsert
    persist source create logs --from /var/log/app --format text --key 'at:uint64 not null' --value line:string \\
        --include at=address
    persist source create paid --from collection:orders --key id:int64 --value cents:int64 --ignore-extra
    persist source create orders --from postgresql://me@host/shop --table public.orders --add-columns
    persist source create bank --from postgresql://me@host/bank --table public.accounts --table public.savings
    """
    from persist_lib.catalog.records import parse_collection_name

    given = _of_options(place, meant) if file is None else _of_file(file, *place, *meant)
    where = ", ".join(place.table or ()) or redacted(place.place or str(file))
    parse_collection_name(name)  # it is not the file that says it
    if dry_run:
        with _to_look_at(session) as sources, _named(file):
            found = sources.declaration(name, given.reader, given.schema, command=command, **given.terms)
        value = {"source": name, "dry_run": True, **declared_value(found)}
        session.answer(value, f"would create {name} from {where} in {session.location}: {columns_of(found)}")
        return
    with session.sources(create=True) as sources, _named(file):
        made = sources.create(name, given.reader, given.schema, command=command, **given.terms)
    session.answer(
        value_of(made), f"created {name} from {where}: {columns_of(made)}", f"start it: persist ingest {name}"
    )


def _of_file(file: Path, *options: object) -> Given:
    from persist_lib.sources.declaration_file import read

    if any(options):
        raise InvalidUsage(f"{file} has all that is declared: give no other options with -f than --command, --dry-run")
    return read(file)


def _of_options(place: Place, meant: Meant) -> Given:
    """The same of options."""
    from persist_lib.sources import Decoding, Meaning
    from persist_lib.sources.declaration_file import Given
    from persist_lib.sources.kinds import check_options, kind_of_place
    from persist_lib.sources.records import Place as Url
    from persist_lib.sources.records import Terms

    if place.place is None:
        raise InvalidUsage("say what the source reads: -f FILE, or --from PLACE")
    kind = kind_of_place(place.place)
    changes = meant.envelope not in {None, "none"}
    options = {
        "format": place.format_, "table": place.table, "envelope": changes, "keep-raw": meant.keep_raw,
        "add-columns": meant.add_columns,
    }  # fmt: skip
    check_options(kind, [option for option, what in options.items() if what])
    schema: Schema | None = None
    if place.key or place.value or not kind.brings_schema:
        if len(place.table or ()) > 1:
            raise InvalidUsage("--key and --value are for one table: say the columns of several in a file, by -f FILE")
        schema = build_schema(place.key or [], place.value or [], None, times=None)
    reader, decoder = kind.of_place(Url(place.place, place.format_, tuple(place.table or ())))
    form: Any = decoder
    if meant.ignore_extra and meant.add_columns:
        raise InvalidUsage("--ignore-extra leaves out what --add-columns takes: give one of them")
    extra = "ignore" if meant.ignore_extra else "add" if meant.add_columns else reader.default_decoding().extra
    decoding = Decoding(decoder=form, extra=extra)
    envelope = meant.envelope if changes and meant.envelope else reader.default_meaning().envelope
    include = opt.parse_pairs(meant.include, "--include")
    meaning = Meaning(envelope=envelope, include=include, keep_raw=meant.keep_raw)
    retention = opt.parse_distance(meant.retention)
    terms = Terms(decoding=decoding, meaning=meaning, shards=meant.shards or 1, retention=retention)
    return Given(reader, schema, terms)


def _named(file: Path | None) -> AbstractContextManager[None]:
    """Let what is refused name the file that says it."""
    from persist_lib.arguments import within

    return nullcontext() if file is None else within(file, path=str(file))


@contextmanager
def _to_look_at(session: Session) -> Iterator[Sources]:
    """The sources of the location; of one that is not there, none."""
    from persist_lib.client import open as open_client

    with ExitStack() as opened:
        try:
            sources = opened.enter_context(session.sources(read_only=True))
        except NotFound:
            controller = opened.enter_context(opened.enter_context(open_client("memory:")).controller())
            sources = opened.enter_context(closing(controller.sources()))
        yield sources


def mend(
    session: Session,
    name: opt.Collection,
    file: File = None,
    column: Annotated[
        opt.Pairs, typer.Option(metavar="COLUMN=NAME", help="What a column is called in the messages. Repeatable.")
    ] = None,
    extra: Annotated[Literal["refuse", "ignore"] | None, typer.Option(help="Fields without a column.")] = None,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Make what was decoded again the collections, from now on.")
    ] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Drop what was decoded again.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="How long to try.")] = 600.0,
) -> None:
    """Decode a source's messages in another way, from NAME/raw, and say what would change. No reader gets that yet.

    Everything about it can be said in the file that `persist source show NAME --toml` prints, but where messages are.
    Without a file, what is not given stays as it is; given options take the place of those of its kind. Instances may
    run on. Judge what it says, then hand over, or give it up. Reads as of earlier times stay what they were.

    \b
    persist source mend orders --column cents=amount
    persist source mend orders -f orders.toml
    persist source mend orders --hand-over
    """
    if (hand_over or give_up) and any(one is not None for one in (file, column, extra)):
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
            shown = sources.find(name).schema.show(at)
            session.answer({"source": name, "at": at}, f"{name} is decoded again from {shown} on")
            return
        terms = _mending(sources.find(name), file, column, extra)
        with _named(file):
            found = sources.mend(name, timeout=timeout, **terms)
        described = sources.show(name)
    value = {what: jsonable(getattr(found, what)) for what in ("renditions", "time", "output", "errors")}
    judge = f"judge this, then: persist source mend {name} --hand-over, or --give-up"
    session.answer({"source": name, **value}, *_judged(found, described), judge)


def _mending(record: SourceRecord, file: Path | None, column: opt.Pairs, extra: str | None) -> dict[str, Any]:
    """How messages are to be decoded, as `Sources.mend` takes it."""
    given = {"columns": None if column is None else opt.parse_pairs(column, "--column"), "extra": extra}
    fields = {field: value for field, value in given.items() if value is not None}
    if file is None:
        return {"decoding": msgspec.structs.replace(record.decoding, **fields)} if fields else {}
    said = _of_file(file, column, extra)
    if said.reader != record.reader or said.terms.get("shards") != record.shards:
        raise InvalidUsage(
            f"{file}: `mend` changes decoding, meaning, schema and decoded. The reader and the shards have to be those "
            f"of {record.name!r}: persist source show {record.name} --toml"
        )
    return {"schema": said.schema, **{what: said.terms.get(what) for what in ("decoding", "meaning", "decoded")}}


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
