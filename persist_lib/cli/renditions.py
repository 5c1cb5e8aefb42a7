"""`persist collection rendition`, `compare` and `hand-over`: other shards, columns or contents for a collection."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from persist_lib.cli import formats, units
from persist_lib.cli.arguments import Collection, Command, DryRun, time_words
from persist_lib.cli.collections import Hashed, Shards, columns_of, controlling, rendition_value, steps_table
from persist_lib.cli.render import plain_table
from persist_lib.cli.schemas import KeyColumns, Like, NonNegative, Unique, ValueColumns, build_schema
from persist_lib.cli.session import Advance, Session
from persist_lib.cli.values import clock, jsonable
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import pyarrow as pa

    from persist_lib.schema.schema import Schema
    from persist_lib.storage.comparing import Comparison

Transform = Callable[["pa.Table"], "pa.Table"]
Rendition = Annotated[int, typer.Argument(metavar="N", help="The rendition's number.", show_default=False)]


def make(
    session: Session,
    name: Collection,
    shards: Shards = None,
    key: KeyColumns = None,
    value: ValueColumns = None,
    like: Like = None,
    unique: Unique = False,
    non_negative: NonNegative = False,
    hash_: Hashed = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="It is to become a copy of the active one: see `rendition copy`.")
    ] = False,
    command: Command = None,
) -> None:
    """Make a rendition of a collection: other shards, other columns, or a place for corrected contents.

    What is not given is as in the active rendition. Nobody reads the new one before it is handed over to. With --copy
    it is filled by `persist collection rendition copy`; without, by writers that open it by its number.

    \b
    persist collection rendition make orders --shards 8 --copy
    persist collection rendition make orders --key id:int64 --value dollars:double --copy
    """
    has_columns = bool(key or value or like)
    if (unique or non_negative) and not has_columns:
        raise InvalidUsage(
            "--unique and --non-negative go with the columns of the new rendition: --key, --value, --like"
        )
    with controlling(session, read_only=False) as controller:
        schema = None
        if has_columns:
            times = controller.describe(name).schema.times
            terms = {"times": times, "unique": unique, "non_negative": non_negative}
            schema = build_schema(key or [], value or [], like, **terms)
        made = controller.make_rendition(
            name, shards=shards, schema=schema, copy=copy, hash_columns=columns_of(hash_), command=command
        )
    said = f"made rendition {made.number} of {name}: {units.of(len(made.shards), 'shard')}, {made.schema}"
    session.answer({"collection": name, **rendition_value(made)}, said)
    fill = (
        f"persist collection rendition copy {name} {made.number}" if copy else "by writers that open it by its number"
    )
    session.note(f"fill it: {fill}; then: persist collection compare {name} {made.number}")


def copy(
    session: Session,
    name: Collection,
    number: Rendition,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            show_default=False,
            help="Makes of each pyarrow.Table of old rows one of new rows; also module:function.",
        ),
    ] = None,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Go on until it was handed over to and has all that was before.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Give up after this long; what is copied stays.")
    ] = 3600.0,
) -> None:
    """Bring a rendition up to where the one is that it copies. Again and again, while that is written.

    It goes on where it is, also after a kill, and from several processes at once. A transformation is a pure function
    of each row; it passes `_time` and `_diff` on. Use the same one for all of a rendition.

    \b
    persist collection rendition copy orders 2
    persist collection rendition copy orders 2 --transform fixes.py:in_dollars
    persist collection hand-over orders 2 && persist collection rendition copy orders 2 --to-end
    """
    function = None if transform is None else load_function(transform)
    with controlling(session, read_only=False) as controller, session.progress(f"copy {name}") as advance:
        counted = _Counted(function, advance)
        done = controller.copy_rendition(name, number, transform=counted, to_end=to_end, timeout=timeout)
        schema = controller.describe(name).schema
    said = f"rendition {number} of {name} is copied up to {schema.show(done.upper)}"
    if done.is_complete:
        said += ", where it became the collection: the copy is complete"
    value = {"collection": name, "rendition": number, **jsonable(done), "rows": counted.rows, **clock(schema.times)}
    session.answer(value, said)
    session.note(f"{units.of(counted.rows, 'update')} read")


def drop(
    session: Session, name: Collection, number: Rendition, command: Command = None, dry_run: DryRun = False
) -> None:
    """Give up a rendition that is not the collection at any time that can still be read.

    One that was the collection goes by itself, once the history before its end is given up.

    \b
    persist collection rendition drop orders 3 --dry-run
    """
    with controlling(session, read_only=dry_run) as controller:
        if dry_run:
            found = next((one for one in controller.describe(name).renditions if one.number == number), None)
            steps: list[RenderableType] = (
                [] if found is None else [f"{shard} would be finished" for shard in found.shards]
            )
            if found is None or found.start is not None:
                why = (
                    "the collection has no such rendition"
                    if found is None
                    else "it is the collection at times that can be read"
                )
                raise InvalidUsage(f"rendition {number} of {name} cannot be dropped: {why}")
            session.answer(
                {"collection": name, "rendition": number, "dry_run": True, "shards": list(found.shards)}, *steps
            )
            return
        done = controller.drop_rendition(name, number, command=command)
    value = {"collection": name, "rendition": number, "dry_run": False, **jsonable(done)}
    session.answer(value, *steps_table(done, ""), f"rendition {number} of {name} is dropped")


def compare(
    session: Session,
    name: Collection,
    number: Rendition,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="M", help="Compare to this one. Default: the active one.", show_default=False),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="TIME", help="As of this time. Default: the newest that both have.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Wait this long for both to have the time.")
    ] = 60.0,
) -> None:
    """Show what a rendition would change: rows that appear, vanish and change, by column, with samples.

    It changes nothing, and takes bounded memory. Rows are told apart by their key. Columns that only one side has are
    named, and not compared.

    \b
    persist collection compare orders 2
    persist collection compare orders 3 --to 2 --as-of 1000 --json | jq .columns
    """
    time = None if as_of is None else time_words(as_of, "--as-of")
    with controlling(session) as controller, session.progress(f"compare {name}") as advance:
        found = controller.compare(
            name, number, to=to, as_of=time, timeout=timeout, progress=lambda rows: advance(rows, 0)
        )
        schema = controller.describe(name).schema
    if session.as_json:
        head = {"collection": name, "equal": found.is_equal, **jsonable(found), **clock(schema.times)}
        head.pop("samples")
        text, samples = formats.encode(head).decode(), formats.encode(found.samples).decode()
        session.out.out(f'{text[:-1]},"samples":{samples}}}', highlight=False)
        return
    session.show(*comparison_shown(found, schema))


def hand_over(
    session: Session,
    name: Collection,
    number: Rendition,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="At this time. Default: the earliest possible.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if its data does not reach the time: readers then wait for it.")
    ] = False,
    command: Command = None,
    dry_run: DryRun = False,
) -> None:
    """Make a rendition the collection from a time on. Nothing before that time changes.

    Readers and listeners that are open go on: a listener gets the difference of both renditions at that time. To go
    back, hand over to the old rendition again, while it is there and is kept up to date.

    \b
    persist collection hand-over orders 2 --dry-run     at which time it would be
    persist collection hand-over orders 2
    """
    time = None if at is None else time_words(at, "--at")
    with controlling(session, read_only=dry_run) as controller:
        found = controller.describe(name)
        when = controller.hand_over(name, number, at=time, force=force, dry_run=dry_run, command=command)
        new = next(one for one in found.renditions if one.number == number)
    value = {"collection": name, "rendition": number, "at": when, "dry_run": dry_run, **clock(found.schema.times)}
    said = f"{'would be' if dry_run else 'is'} the collection from {found.schema.show(when)} on"
    session.answer(value, f"rendition {number} of {name} {said}")
    if new.copies is not None and not dry_run:
        session.note(
            f"finish the copy, writers wait for it: persist collection rendition copy {name} {number} --to-end"
        )


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
        f"{name}: {formats.cell(value[0])} → {formats.cell(value[1])}" if isinstance(value, list) and len(value) == 2
        else f"{name}={formats.cell(value)}" for name, value in row.items()
    )  # fmt: skip


def load_function(text: str) -> Transform:
    """The function that `FILE.py:NAME` or `module:NAME` names. Modules are looked for in this folder, too."""
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


class _Counted:
    """A transformation, or none, that tells how many rows have come by."""

    def __init__(self, transform: Transform | None, advance: Advance) -> None:
        self._transform, self._advance, self.rows = transform, advance, 0

    def __call__(self, table: pa.Table) -> pa.Table:
        self.rows += table.num_rows
        self._advance(self.rows, 0)
        return table if self._transform is None else self._transform(table)
