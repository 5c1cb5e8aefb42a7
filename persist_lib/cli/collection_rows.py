"""`persist collection snapshot`, `changes`, `listen`, `append`, `upsert` and `delete`: the rows of a collection."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import units, values
from persist_lib.cli.arguments import Collection, DryRun, parse_frontier, time_words
from persist_lib.cli.by_key import COUNTS, Keys, Rows
from persist_lib.cli.changing import From, Until
from persist_lib.cli.collections import columns_of, controlling
from persist_lib.cli.reading import (
    AT_ONCE_S,
    Columns,
    Diff,
    End,
    Format,
    Idle,
    Key,
    Limit,
    Output,
    Start,
    Time,
    Wait,
    Waits,
    key_values,
    kind_of,
    print_rows,
    rows_shown,
    tell,
)
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.schema.schema import Schema
    from persist_lib.storage.writer import Written

Bound = Annotated[str | None, typer.Option(metavar="FRONTIER", show_default=False)]
Input = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A .parquet, .csv or .jsonl file; - reads JSON lines from standard input.",
        show_default=False,
    ),
]  # fmt: skip
STDIN = "-"


def snapshot(
    session: Session,
    name: Collection,
    as_of: Time = None,
    columns: Columns = None,
    key: Key = None,
    diff: Diff = False,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
) -> None:
    """Print the contents of a collection as of a time, from the rendition that is the collection then.

    Rows come shard by shard, in key order within a shard. Otherwise as `persist snapshot`.

    \b
    persist collection snapshot orders --as-of 9 --columns state,cents --key 4711
    persist collection snapshot orders --format parquet -o orders.parquet
    """
    kind, at = kind_of(session, format_, output), None if as_of is None else time_words(as_of, "--as-of")
    with controlling(session) as controller, controller.open_reader(name, owner="persist collection") as reader:
        schema = reader.schema
        keys = key_values(schema, key)
        found = reader.snapshot(at, columns=columns_of(columns), key=keys, diff=diff, timeout=max(wait, AT_ONCE_S))
        with found:
            head = {
                "collection": name,
                "rendition": found.rendition,
                "as_of": found.as_of,
                **values.clock(schema.times),
            }
            count = print_rows(session, head, found, kind, output, limit)
    if kind == "table" or output is not None:
        where = f"{name} as of {schema.show_as_of(found.as_of)}"
        session.note(f"{where}, rendition {found.rendition}: {rows_shown(count, diff)}")


def changes(
    session: Session,
    name: Collection,
    from_: From = None,
    to: Until = None,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
) -> None:
    """Print what happened to a collection after one time, up to and with another, across handovers.

    At a handover it is the difference of both renditions. The contents at the first time and these changes add up to
    the contents at the second.

    \b
    persist collection changes orders --from 7 --to 9 --format jsonl
    """
    kind = kind_of(session, format_, output)
    first, last = (None if text is None else time_words(text, what) for text, what in ((from_, "from"), (to, "to")))
    with controlling(session) as controller, controller.open_reader(name, owner="persist collection") as reader:
        since = reader.since.time or 0
        start: Any = (since if reader.fetch_upper().has_passed(since) else None) if first is None else first
        if last is not None:
            reader.adopt_at(last)
        with reader.changes(start, last, timeout=max(wait, AT_ONCE_S)) as found:
            head = {"collection": name, "from": found.from_, "to": found.to, **values.clock(reader.schema.times)}
            count = print_rows(session, head, found, kind, output, limit)
    if kind == "table" or output is not None:
        show = reader.schema.show
        after = "from the beginning" if found.from_ is None else f"after {show(found.from_)}"
        session.note(f"{name} {after} to {show(found.to)}: {units.of(count, 'change')}")


def listen(
    session: Session,
    name: Collection,
    as_of: Start,
    until: End = "[]",
    timeout: Idle = None,
    wait: Waits = True,
    replace: Annotated[
        bool, typer.Option("--replace", help="At a handover to other columns: all old rows out, all new rows in.")
    ] = False,
) -> None:
    """Follow a collection: every update after a time, once, at its exact time, across handovers.

    What it prints is that of `persist listen`. It holds no history.

    \b
    persist collection listen orders --as-of 9 --no-wait --json
    """
    start, end = time_words(as_of, "--as-of"), parse_frontier(until, "until")
    seconds = None if timeout is None else max(timeout, AT_ONCE_S)
    with (
        controlling(session) as controller,
        controller.open_reader(name, owner="persist collection") as reader,
        reader.listen(start, until=end, timeout=seconds, replace=replace) as events,
    ):
        for event in events if wait else events.poll():
            schema: Any = events.schema
            tell(session, schema, event)


def append(
    session: Session,
    name: Collection,
    file: Input,
    lower: Bound = None,
    upper: Bound = None,
) -> None:
    """Append a file's updates to a collection, or those of standard input.

    With --lower and --upper, its times are in \\[lower, upper): where writers exclude one another, lower must be the
    collection's upper; where they append identical data, what it has already is skipped. Without them, where writers
    exclude one another, all rows are appended at the next time.

    \b
    persist collection append orders monday.parquet --lower 0 --upper 10
    echo '{"id": 1, "cents": 5}' | persist collection append orders -
    """
    if (lower is None) != (upper is None):
        raise InvalidUsage("--lower and --upper go together: the times of the file are in [lower, upper)")
    bounds = [
        None if text is None else parse_frontier(text, what) for text, what in ((lower, "lower"), (upper, "upper"))
    ]
    with controlling(session, read_only=False) as controller, controller.open_writer(name) as write:
        if bounds[0] is None and write.mode == "append":
            raise InvalidUsage(
                f"collection {name} is written by appends of identical data, whose times are given: add --lower and "
                "--upper"
            )
        from persist_lib.cli.inputs import read_file

        with input_of(file) as path:
            updates = iter(()) if path is None else read_file(path, write.schema)
            if bounds[0] is None:
                done = write.append_now(updates)
            elif write.mode == "append":
                done = write.append(updates, *bounds)
            else:
                done = write.compare_and_append(updates, *bounds)
        _answer(session, name, write.schema, done, dry_run=False)


def upsert(session: Session, name: Collection, file: Rows, dry_run: DryRun = False) -> None:
    """Make each row of a file the one row of its key, at the next time. Rows of other keys stay as they are.

    For collections whose writers exclude one another. It may be run again: then all rows are unchanged.

    \b
    persist collection upsert customers today.csv --dry-run
    """
    from persist_lib.cli.inputs import read_file

    with controlling(session, read_only=False) as controller, controller.open_writer(name) as write:
        done = write.upsert(read_file(file, write.schema), dry_run=dry_run)
        _answer(session, name, write.schema, done, dry_run=dry_run)


def delete(session: Session, name: Collection, file: Keys, dry_run: DryRun = False) -> None:
    """Retract all rows of the keys in a file, at the next time. History before it stays readable as ever.

    \b
    persist collection delete customers forgotten.csv --dry-run
    """
    from persist_lib.cli.inputs import read_file
    from persist_lib.schema.schema import Schema

    with controlling(session, read_only=False) as controller, controller.open_writer(name) as write:
        done = write.delete(read_file(file, Schema(write.schema.key)), dry_run=dry_run)
        _answer(session, name, write.schema, done, dry_run=dry_run)


@contextmanager
def input_of(file: str) -> Iterator[Path | None]:
    """The file, or one with the JSON lines of standard input, which may be read twice. None where nothing came."""
    if file != STDIN:
        path = Path(file)
        if not path.is_file():
            raise InvalidUsage(f"there is no file {file}; - reads JSON lines from standard input")
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        with path.open("wb") as lines:
            shutil.copyfileobj(sys.stdin.buffer, lines)
        yield path if path.stat().st_size else None


def _answer(session: Session, name: str, schema: Schema, done: Written, *, dry_run: bool) -> None:
    times = Times(schema.times, lambda: 0)
    counts = {kind: getattr(done, kind) for kind in COUNTS}
    by_key = ", ".join(f"{units.number(count)} {kind}" for kind, count in counts.items() if count)
    what = f"{by_key} ({units.of(done.count, 'update')})" if by_key else units.of(done.count, "update")
    if dry_run:
        said = f"{name}: would be {what}; nothing was changed"
    else:
        when = "" if done.time is None else f" at time {times.show(done.time)}"
        said = f"{name}: {what}{when}, upper is {times.show(done.upper)}"
    value = {
        "collection": name,
        "upper": values.jsonable(done.upper),
        "time": done.time,
        "updates": done.count,
        **counts,
    }
    value |= {"dry_run": dry_run, "token": done.token.hex(), **values.clock(schema.times)}
    session.answer({**value, "cost": values.jsonable(done.cost)}, said)
    session.note(units.spent(done.cost))
