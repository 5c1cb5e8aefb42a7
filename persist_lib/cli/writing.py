"""`persist append`: append a file's updates to a shard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from persist_lib.cli import units
from persist_lib.cli.arguments import Create, CreateKey, Shard, check_create, parse_frontier
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable
from persist_lib.errors import InvalidUsage, NotFound

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.schema.schema import Schema
    from persist_lib.times import Unit

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="A .parquet, .csv or .jsonl file. Without one, the append only moves upper.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]


def append(
    session: Session,
    shard: Shard,
    file: File = None,
    lower: Annotated[
        str, typer.Option(metavar="FRONTIER", help="What upper must be now, as 5 or [5].", show_default=False)
    ] = ...,  # type: ignore[assignment]
    upper: Annotated[
        str,
        typer.Option(
            metavar="FRONTIER", help="What upper becomes; [] closes the shard for writing.", show_default=False
        ),
    ] = ...,  # type: ignore[assignment]
    skip_covered: Annotated[
        bool,
        typer.Option(
            "--skip-covered",
            help="Skip times that the shard already has, instead of refusing: for several writers of the same data.",
        ),
    ] = False,
    create: Create = False,
    key: CreateKey = None,
    times: Annotated[
        Literal["ms", "us"] | None,
        typer.Option(
            help="With --create: times are a clock, and count milliseconds or microseconds since 1970, in UTC.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Append a file's updates with times in \\[lower, upper), if the shard's upper is exactly lower.

    The file has the shard's columns, `_time` (may be left out if upper is lower + 1) and `_diff` (+1 if left out).
    Either all updates become visible at once, or none. If another writer was first, the append is refused with exit
    code 1: look at the upper in the message, and decide again what to append.

    \b
    persist append orders monday.parquet --lower 0 --upper 10 --create --key order_id
    persist append orders tuesday.csv --lower 10 --upper 20
    persist append orders --lower 20 --upper 30      nothing happened before 30
    persist append visits day.csv --lower 0 --upper 2026-11-23 --create --key visitor --times ms
    persist append orders --lower 30 --upper '[]'    nothing will ever happen again
    """
    low, high = parse_frontier(lower, "lower"), parse_frontier(upper, "upper")
    check_create(create, key)
    if times is not None and not create:
        raise InvalidUsage(
            "--times is only for --create: a shard's times cannot become a clock later, or stop being one"
        )
    with session.open(read_only=False, create=create) as client:
        schema = schema_for(client, shard, file, key, times)
        with client.open_writer(shard, schema) as writer:
            updates = iter(()) if file is None else _read(file, schema)
            write = writer.append if skip_covered else writer.compare_and_append
            done = write(updates, low, high)
        cost = client.metrics().cost
    said = f"{shard} v{done.seqno}: {units.of(done.count, 'update')}, upper is {schema.show(done.upper)}"
    value: dict[str, Any] = {"shard": shard, "seqno": done.seqno, "upper": jsonable(done.upper), "updates": done.count}
    value |= clock(schema.times)
    session.answer({**value, "token": done.token.hex(), "attempts": done.attempts, "cost": jsonable(cost)}, said)
    session.note(units.spent(cost))


def schema_for(
    client: Client, shard: str, file: Path | None, key: str | None, times: Unit | None = None, *, unique: bool = False
) -> Schema:
    """The shard's newest schema, or the schema of the file if the shard is to be created."""
    from persist_lib.cli.inputs import infer_schema

    try:
        return client.inspect(shard).state.schemas[-1]
    except NotFound:
        if key is None:
            raise
        if file is None:
            raise InvalidUsage("to create a shard, give a file: its columns are the schema") from None
        return infer_schema(file, [name.strip() for name in key.split(",")], times, unique=unique)


def _read(file: Path, schema: Schema) -> object:
    from persist_lib.cli.inputs import read_file

    return read_file(file, schema)
