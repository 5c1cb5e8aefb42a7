"""The arguments and options that several commands share, each declared once, and how what was typed is parsed.

A shell completes the names of shards and collections: quickly, and silent about whatever goes wrong.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import typer

from persist_lib.errors import InvalidUsage
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.frontier import parse_time as check_time
from persist_lib.times import END_S, Times, Unit, is_time_text

NUMBER = re.compile(r"(?!.{41})[0-9]+(_[0-9]+)*")
"""A count or a time as people type it: 1000 or 1_000. Of up to 40 characters: Python reads no thousands of digits."""
DURATION = re.compile(r"\d+(\.\d+)? *[a-zA-Zµ]")
LAST = Times("us", lambda: END_S * 1_000 - 1)
"""Refuses what is no time whatever the clock says, before anything is opened."""
Pairs = list[str] | None
SECONDS = 2.0
"""How long the shell waits for names, at most. A location that is far away gives none then."""
CATALOG_SECONDS = 6.0
"""The same for collections: their catalog is data, for which Arrow is loaded."""
Options = dict[str, str | None]


def shard_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's shards that begin so, without those on the command line. Empty after any failure."""
    typed = ctx.params.get("names") or ()
    return [name for name in _asked(_ask, ctx, SECONDS, incomplete) if name not in typed]


def collection_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the location's collections that begin so. Empty after any failure."""
    return _asked(_ask_catalog, ctx, CATALOG_SECONDS, incomplete)


def names_of_tables(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of all tables that begin so, whatever carries them. Empty after any failure."""
    found = {*_asked(_ask, ctx, SECONDS, incomplete), *collection_names(ctx, incomplete)}
    return sorted(found.difference(ctx.params.get("names") or ()))


def _asked(ask: Callable[[Options, list[str]], None], ctx: typer.Context, seconds: float, begin: str) -> list[str]:
    own, before = ctx.params, ctx.find_root().params
    options = {name: own.get(name) or before.get(name) for name in ("location", "consensus")}
    found: list[str] = []
    # A thread of its own that is not waited for: connecting to a host that does not answer takes long.
    asking = threading.Thread(target=ask, args=(options, found), daemon=True)
    asking.start()
    asking.join(seconds)
    return [name for name in found if name.startswith(begin)]


def _ask(options: Options, found: list[str]) -> None:
    with suppress(BaseException):  # a shell shows what is printed in the middle of what is typed
        from persist_lib.location.open import open_location

        with open_location(*_urls(options), read_only=True) as location:
            found.extend(sorted(location.consensus.list_keys()))


def _ask_catalog(options: Options, found: list[str]) -> None:
    with suppress(BaseException):
        from persist_lib.client import open as open_client

        with open_client(*_urls(options), read_only=True) as client, client.controller() as controller:
            found.extend(controller.list())


def _urls(options: Options) -> tuple[str, str | None]:
    from persist_lib.cli.session import DEFAULT_LOCATION
    from persist_lib.settings import resolve

    settings = resolve(options, os.environ)
    return settings.text("location") or DEFAULT_LOCATION, settings.text("consensus")


# What a command is about.
Shard = Annotated[str, typer.Argument(metavar="SHARD", help="The shard's name.", autocompletion=shard_names)]
Shards = Annotated[
    list[str] | None, typer.Argument(metavar="SHARD...", help="Names of shards.", autocompletion=shard_names)
]
AllShards = Annotated[bool, typer.Option("--all", help="All shards of the location.")]
Collection = Annotated[
    str, typer.Argument(metavar="NAME", help="The collection's name.", autocompletion=collection_names)
]
Collections = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Their names.", autocompletion=collection_names)
]
SomeCollection = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Default: all.", autocompletion=collection_names)
]
NewTable = Annotated[
    str, typer.Argument(metavar="NAME", help="The new name: letters, digits, _ - . and /, as in sales/orders.")
]
AnyTable = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The table's name, whatever carries it: a shard, a collection or a timeline.",
        autocompletion=names_of_tables,
    ),
]
AnyTables = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME...", help="Names of tables, whatever carries them, or of shards.", autocompletion=names_of_tables
    ),
]
Hold = Annotated[str, typer.Argument(metavar="HOLD", help="The hold's name.")]
Token = Annotated[str, typer.Argument(metavar="TOKEN", help="The append's token, in hex, from its error message.")]
NamesOnly = Annotated[bool, typer.Option("--names", help="Print only the names, one a line, and open nothing else.")]

# How it is done.
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done, and why.")]
EvenIfPaused = Annotated[bool, typer.Option("--even-if-paused", help="Also where this is paused.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Command = Annotated[
    str | None,
    typer.Option(
        metavar="ID", help="The command's id: sent again with it, it is the same command. Default: a fresh one."
    ),
]

# Which columns and shards something new has.
Create = Annotated[
    bool, typer.Option("--create", help="Create the shard, and the location, if there is none. Needs --key.")
]
CreateKey = Annotated[
    str | None, typer.Option("--key", metavar="A,B", help="With --create: the key columns; the others are the value.")
]
KeyColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--key", metavar="NAME:TYPE", help="A key column; repeat it for more. With --like, names are enough: A,B."
    ),
]
ValueColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        metavar="NAME:TYPE",
        help="A value column; repeat it for more. With --like: only these columns of the file.",
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Columns and types of a .parquet, .csv or .jsonl file. Its rows are not appended.",
        exists=True,
        dir_okay=False,
    ),
]
Clock = Annotated[
    Literal["ms", "us", "none"] | None,
    typer.Option(
        "--times",
        help="Times are a clock: milliseconds (the default) or microseconds since 1970, in UTC. none: plain integers.",
    ),
]
Unique = Annotated[bool, typer.Option("--unique", help="Each key has at most one row, by all writers.")]
NonNegative = Annotated[bool, typer.Option("--non-negative", help="No row's multiplicity falls below 0.")]
Added = Annotated[
    list[str] | None, typer.Option("--add", metavar="NAME:TYPE", help="A new value column; repeat it for more.")
]
Defaults = Annotated[
    list[str] | None, typer.Option("--default", metavar="NAME=VALUE", help="What rows have that lack a new column.")
]
Renamed = Annotated[list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="Another name for a column.")]
Widened = Annotated[
    list[str] | None,
    typer.Option(
        "--widen", metavar="NAME:TYPE", help="A type that holds all values of the present one, or a struct with more."
    ),
]
DroppedColumns = Annotated[list[str] | None, typer.Option("--drop", metavar="NAME", help="Take a value column away.")]
Reordered = Annotated[
    list[str] | None,
    typer.Option("--reorder", metavar="NAME", help="Show a value column first; repeat it for those that follow."),
]
ReorderedAfter = Annotated[
    str | None, typer.Option("--after", metavar="NAME", help="Show those of --reorder right behind this one instead.")
]
Relaxed = Annotated[list[str] | None, typer.Option("--allow-null", metavar="NAME", help="Allow null in a column.")]
ShardCount = Annotated[int | None, typer.Option("--shards", min=1, metavar="N", help="How many shards.")]
Hashed = Annotated[
    str | None,
    typer.Option("--hash", metavar="A,B", help="Key columns by whose hash rows go to shards. Default: the whole key."),
]
Retention = Annotated[
    str | None,
    typer.Option(
        metavar="N|DURATION|none",
        help="Keep this many times behind upper or, of a clock, as in '7 days'. none: all history.",
    ),
]
KeepDeletes = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN:DURATION|none",
        help="On a timeline with a WAL: remember deleted keys for this long, as in 'seq:7 days', so that late changes "
        "by this column do not bring them back. none: remember none.",
    ),
]

# Which rows are read, and how they are printed.
Time = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Read as of this time, from since on and before upper: 9; of a clock also 2026-11-22T12:00Z, now or "
        "'1 hour ago'. Default: the newest complete time.",
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar="T", help="Changes after this time. Default: from the beginning.")
]
Until = Annotated[
    str | None, typer.Option("--to", metavar="T", help="Up to and with this time. Default: the newest complete time.")
]
Start = Annotated[
    str | None,
    typer.Option(
        "--as-of", metavar="TIME", help="Start just after this time: 9, or '1 hour ago'. Default: at the beginning."
    ),
]
End = Annotated[str, typer.Option("--until", metavar="FRONTIER", help="End there: 20, or [] for the end of all times.")]
Idle = Annotated[
    float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="Fail if nothing comes for this long.")
]
Waits = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for more updates, or print those that are there and end.")
]
Wait = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Wait this long for upper to pass the time.")]
Columns = Annotated[str | None, typer.Option(metavar="A,B", help="Only these columns.")]
Key = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VALUE",
        help="Only this key. Repeat it for each further key column; fewer values select all keys that start with them.",
    ),
]
KeyFrom = Annotated[list[str] | None, typer.Option(metavar="VALUE", help="Keys from this one on.")]
KeyTo = Annotated[list[str] | None, typer.Option(metavar="VALUE", help="Keys before this one.")]
Diff = Annotated[
    bool, typer.Option("--diff", help="Each distinct row once, with its multiplicity as the column _diff.")
]
Newest = Annotated[
    bool, typer.Option("--newest", help="If the time is not complete yet, the newest complete contents.")
]
Limit = Annotated[
    int | None,
    typer.Option(min=0, metavar="COUNT", help="At most this many; 0: all. Default: 50 for tables, all otherwise."),
]
Format = Annotated[
    Literal["table", "json", "jsonl", "csv", "parquet"],
    typer.Option("--format", "-f", help="json: one object. jsonl: one object a line."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write to this file, which appears once it is complete.", dir_okay=False
    ),
]
Input = Annotated[
    str, typer.Argument(metavar="FILE", help="A .parquet, .csv or .jsonl file; - reads JSON lines from standard input.")
]


def parse_clock(times: Literal["ms", "us", "none"] | None) -> Unit | None:
    """The times that a new table has, which are those of `db.table` if nothing is said."""
    return None if times == "none" else times or "ms"


def parse_frontier(text: str, what: str) -> Antichain | str:
    """A frontier as it was typed: `5`, `[5]`, a time in words, or `[]` for the empty one. InvalidUsage for others.

    Words such as `1 hour ago` mean a time only to a shard whose times are a clock. The library asks its schema.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
        if not inner:
            return TOP
    found = _words(inner, text, what, ", or [] for the end of all times")
    return at(found) if isinstance(found, int) else found


@overload
def parse_time(text: str, what: str) -> int | str: ...
@overload
def parse_time(text: str | None, what: str) -> int | str | None: ...
def parse_time(text: str | None, what: str) -> int | str | None:
    """A time as it was typed: a number, or words, which are a time of a clock; None stays. InvalidUsage for others."""
    return None if text is None else _words(text.strip(), text, what, "")


def parse_start(text: str | None, what: str) -> int | str | None:
    """The same; None for -1, the time that an empty table answers, as both are before all times."""
    return None if text == "-1" else parse_time(text, what)


def _words(inner: str, text: str, what: str, more: str) -> int | str:
    if NUMBER.fullmatch(inner):
        return check_time(int(inner), what)
    if not is_time_text(inner):
        raise InvalidUsage(
            f"{what} must be a time, as in 5 or [5]{more}; of a clock also 2026-11-22T12:00Z, 2026-11-22, now or "
            f"'1 hour ago': got {text!r}",
            **{what: text},
        )
    LAST.as_of(inner, what)
    return inner


def parse_kept(text: str | None) -> tuple[str, int | str] | None:
    """The column and the span of `COLUMN:DURATION`; None for `none`."""
    if text is None or text == "none":
        return None
    column, colon, span = text.rpartition(":")
    if not colon:
        raise InvalidUsage(f"--keep-deletes is a column and a duration, as in 'seq:7 days': got {text!r}")
    return column, int(span) if NUMBER.fullmatch(span) else span


def parse_distance(text: str | None) -> int | str | None:
    """The number that was typed, or the text of a duration, which the library reads by the clock; None for `none`."""
    if text is None or text == "none":
        return None
    if NUMBER.fullmatch(text):
        return int(text)
    if not DURATION.match(text):
        raise InvalidUsage(
            f"retention is a number of times behind upper, of a clock also a duration as in '7 days', or none: got "
            f"{text!r}. The last N appends are kept by a rule: `persist config --rules`",
            distance=text,
        )
    return text


def parse_token(text: str) -> bytes:
    """A token as error messages show it. Raises InvalidUsage if it is not hex."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidUsage(f"the token must be in hex, as in the error message: got {text!r}") from error


def parse_names(text: str | None) -> list[str] | None:
    """Names that were typed with commas in between."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_pairs(given: Pairs, option: str) -> dict[str, Any]:
    """What was given as NAME=VALUE. Raises InvalidUsage."""
    found = {}
    for text in given or []:
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip():
            raise InvalidUsage(f"{option} takes a column and a value, as in at=address: got {text!r}")
        found[name.strip()] = what.strip()
    return found
