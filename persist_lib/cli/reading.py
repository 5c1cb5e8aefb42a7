"""`persist snapshot` and `persist listen`: a shard's contents at a time, and what happens after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from persist_lib.cli import formats, units, values
from persist_lib.cli.arguments import Shard, parse_frontier, time_words
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.relation.conversions import Doors as Rows
    from persist_lib.relation.listen import Event
    from persist_lib.schema.schema import Schema

Start = Annotated[
    str,
    typer.Option("--as-of", metavar="TIME", help="Start just after this time: 9, or '1 hour ago'.", show_default=False),
]
End = Annotated[str, typer.Option("--until", metavar="FRONTIER", help="End there: 20, or [] for the end of all times.")]
Idle = Annotated[
    float | None,
    typer.Option(
        "--timeout", min=0, metavar="SECONDS", help="Fail if nothing comes for this long.", show_default=False
    ),
]
Waits = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for more updates, or print those that are there and end.")
]
Time = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read as of this time, from since on and before upper: 9; of a clock also 2026-11-22T12:00Z, now or "
        "'1 hour ago'. Default: the newest complete time.",
        show_default=False,
    ),
]
Columns = Annotated[str | None, typer.Option(metavar="A,B", help="Only these columns.", show_default=False)]
Key = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VALUE",
        help="Only this key. Repeat it for each further key column; fewer values select all keys that start with them.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="COUNT",
        help="At most this many; 0: all. Default: 50 for tables, all otherwise.",
        show_default=False,
    ),
]
Format = Annotated[
    Literal["table", "json", "jsonl", "csv", "parquet"],
    typer.Option("--format", "-f", help="json: one object. jsonl: one object a line."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write to this file, which appears once it is complete.",
        dir_okay=False,
        show_default=False,
    ),
]
Diff = Annotated[
    bool, typer.Option("--diff", help="Each distinct row once, with its multiplicity as the column _diff.")
]
Wait = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Wait this long for upper to pass the time.")]

TABLE_ROWS = 50
AT_ONCE_S = 0.001
"""The shortest timeout that is allowed, in seconds: it looks once."""


def snapshot(
    session: Session,
    shard: Shard,
    as_of: Time = None,
    columns: Columns = None,
    key: Key = None,
    key_from: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Keys from this one on.", show_default=False)
    ] = None,
    key_to: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Keys before this one.", show_default=False)
    ] = None,
    diff: Diff = False,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
) -> None:
    """Print the contents of a shard as of a time.

    Each row is printed as often as it is there; with --diff once, with its multiplicity. Every reader gets the same
    contents for a time, always, until since passes it. Memory stays small however large the shard is. In JSON, bytes
    are base64, moments are ISO 8601, durations are counts of their unit, and floats that are not finite are null;
    Parquet keeps everything exactly.

    \b
    persist snapshot orders
    persist snapshot orders --as-of '1 hour ago'        if its times are a clock
    persist snapshot orders --as-of 9 --columns state,cents --key 4711
    persist snapshot orders --as-of 9 --format csv | head
    persist snapshot orders --as-of 9 --format parquet -o orders.parquet
    """
    kind = kind_of(session, format_, output)
    at = None if as_of is None else time_words(as_of, "--as-of")
    with session.open() as client, client.open_reader(shard) as reader:
        keys = [key_values(reader.schema, given) for given in (key, key_from, key_to)]
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        found = reader.snapshot(
            at, columns=names, key=keys[0], key_from=keys[1], key_to=keys[2], diff=diff, timeout=max(wait, AT_ONCE_S)
        )
        with found:
            head = {"shard": shard, "as_of": found.as_of, **values.clock(reader.schema.times)}
            count = print_rows(session, head, found, kind, output, limit)
    if kind == "table" or output is not None:
        session.note(f"{shard} as of {reader.schema.show_as_of(found.as_of)}: {rows_shown(count, diff)}")


def rows_shown(count: int, diff: bool) -> str:
    """The number of rows that were printed, in words."""
    return f"{units.number(count)} distinct" if diff else units.of(count, "row")


def kind_of(session: Session, format_: str, output: Path | None) -> str:
    """The format to print rows in. Raises InvalidUsage for one that only a file can have."""
    kind = "json" if session.as_json and format_ == "table" else format_
    if kind == "parquet" and output is None:
        raise InvalidUsage("Parquet can only be written to a file: name it with -o FILE")
    return kind


def print_rows(
    session: Session, head: dict[str, Any], found: Rows, kind: str, output: Path | None, limit: int | None
) -> int:
    """Print rows in one of the formats, and return their number. JSON begins with the fields of `head`."""
    rows = (TABLE_ROWS if kind == "table" else 0) if limit is None else limit
    counted = formats.Counted(found.batches(), rows)
    with formats.target(output) as stream:
        if kind == "table":
            formats.write_table(session, stream if output else None, found.schema, counted)
        else:
            formats.WRITERS[kind](stream, found.schema, counted, head)
    if counted.is_cut:
        session.note(f"only the first {units.number(rows)}; --limit 0 prints all")
    return counted.rows


def key_values(schema: Schema, given: Sequence[str] | None) -> list[object] | None:
    """The texts as values of the leading key columns. Raises InvalidUsage for a text that is not such a value."""
    import pyarrow as pa

    if not given:
        return None
    if len(given) > len(schema.key):
        raise InvalidUsage(
            f"the key has {len(schema.key)} columns ({', '.join(schema.key_names)}), got {len(given)} values"
        )
    found = []
    for text, column in zip(given, schema.key, strict=False):
        try:
            found.append(pa.scalar(text).cast(column.field.type).as_py())
        except (pa.ArrowException, ValueError) as error:
            raise InvalidUsage(f"{text!r} is not a value of the key column {column}: {error}", value=text) from error
    return found


def listen(
    session: Session,
    shard: Shard,
    as_of: Start,
    until: End = "[]",
    timeout: Idle = None,
    wait: Waits = True,
) -> None:
    """Follow a shard: every update after a time, once, at its exact time.

    It prints updates as lines, and `progress [t]` when everything before t was printed. With --json each line is an
    object, {"updates": [...]} or {"progress": [t]}. It runs until the shard is complete; you can interrupt it at
    any time. It does not hold history: it fails with a message if since passes the time that it has come to.

    \b
    persist listen orders --as-of 9
    persist listen orders --as-of 9 --no-wait --json
    """
    start, end = time_words(as_of, "--as-of"), parse_frontier(until, "until")
    with session.open() as client, client.open_reader(shard) as reader:
        events = reader.listen(start, until=end, timeout=None if timeout is None else max(timeout, AT_ONCE_S))
        with events:
            for event in events if wait else events.poll():
                tell(session, reader.schema, event)


def tell(session: Session, schema: Schema, event: Event) -> None:
    """Print one event of a listener."""
    from persist_lib.relation.listen import Progress

    if isinstance(event, Progress):
        session.answer({"progress": values.jsonable(event.frontier)}, f"progress {schema.show(event.frontier)}")
        return
    for batch in formats.rows_of(event.table):
        rows = batch.to_pylist()
        if session.as_json:
            session.out.out(formats.encode({"updates": rows}).decode(), highlight=False)
        else:
            session.show("\n".join(_lines(schema, rows)))


def _lines(schema: Schema, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Updates as lines for people: `[12] +1  order_id=4 state=placed`."""
    times = Times(schema.times, lambda: 0)
    for row in rows:
        time, diff = times.show(times.parse(row.pop("_time"), "_time")), row.pop("_diff")
        yield f"[{time}] {diff:+}  " + " ".join(f"{name}={formats.cell(value)}" for name, value in row.items())
