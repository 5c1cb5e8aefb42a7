"""Arguments that several commands share, and how they are parsed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from persist_lib.cli.completion import collection_names, shard_names
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.frontier import parse_time as check_time
from persist_lib.times import END_S, Times, is_time_text

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client

T = TypeVar("T")
NUMBER = re.compile(r"[0-9]+(_[0-9]+)*")
"""A count or a time as people type it: 1000 or 1_000."""

LAST = Times("us", lambda: END_S * 1_000 - 1)
"""Refuses what is no time whatever the clock says, before anything is opened."""

Shard = Annotated[
    str,
    typer.Argument(metavar="SHARD", help="The shard's name.", show_default=False, autocompletion=shard_names),
]
NewShard = Annotated[str, typer.Argument(metavar="SHARD", help="The new shard's name.", show_default=False)]
Shards = Annotated[
    list[str] | None,
    typer.Argument(metavar="SHARD...", help="Names of shards.", show_default=False, autocompletion=shard_names),
]
AllShards = Annotated[bool, typer.Option("--all", help="All shards of the location.")]
Create = Annotated[
    bool, typer.Option("--create", help="Create the shard, and the location, if there is none. Needs --key.")
]
CreateKey = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="A,B", help="With --create: the key columns; the others are the value.", show_default=False
    ),
]
Collection = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The collection's name.", show_default=False, autocompletion=collection_names),
]
Collections = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Their names.", show_default=False, autocompletion=collection_names),
]
Command = Annotated[
    str | None,
    typer.Option(
        "--command",
        metavar="ID",
        help="The command's id: sent again with it, it is the same command. Default: a fresh one.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done, and why.")]


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


def time_words(text: str, what: str) -> int | str:
    """A time as it was typed: a number, or words, which are a time of a clock. Raises InvalidUsage for others."""
    return _words(text.strip(), text, what, "")


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


def check_create(create: bool, key: str | None) -> None:
    """Raise InvalidUsage unless --create and --key are both there or both missing."""
    if create != (key is not None):
        raise InvalidUsage("--create needs --key with the key columns, and --key is only for --create")


def confirm(session: Session, name: str, what: str, kind: str = "shard") -> None:
    """Ask for a name before an operation that cannot be undone. Raises InvalidUsage if it is not typed."""
    if session.as_json:
        raise InvalidUsage(f"{what} needs a confirmation, and --json cannot ask for one: add --yes")
    session.err.print(f"This cannot be undone. Type the {kind}'s name: ", end="", markup=False, highlight=False)
    if sys.stdin.readline().strip() != name:
        raise InvalidUsage(f"that is not {name!r}; nothing was changed")


def chosen(client: Client, names: list[str] | None, is_all: bool) -> list[str]:
    """Return the shards to work on: those named, or all with --all. Raises InvalidUsage for both or neither."""
    if bool(names) == is_all:
        raise InvalidUsage(
            "name one or more shards, or use --all" if not names else "name shards or use --all, not both"
        )
    return client.shards() if is_all else list(dict.fromkeys(names or ()))


def each(
    session: Session, names: Iterable[str], do: Callable[[str], T]
) -> tuple[list[T], list[tuple[str, PersistError]]]:
    """Call `do` for each shard, and return the answers and the failures. A failure is printed, and the others go on."""
    done: list[T] = []
    failed: list[tuple[str, PersistError]] = []
    for name in names:
        try:
            done.append(do(name))
        except PersistError as raised:
            error = session.at_a_shell(raised)
            failed.append((name, error))
            session.complain(error)
    return done, failed
