"""Arguments that several commands share, and how they are parsed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from persist_lib.cli.completion import shard_names
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import TOP, Antichain, at, parse_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client

T = TypeVar("T")
NUMBER = re.compile(r"[0-9]+(_[0-9]+)*")
"""A count or a time as people type it: 1000 or 1_000."""

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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done, and why.")]


def parse_frontier(text: str, what: str) -> Antichain:
    """Parse a frontier: `5`, `[5]`, or `[]` for the empty one. Raises InvalidUsage for anything else."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
        if not inner:
            return TOP
    if not NUMBER.fullmatch(inner):
        raise InvalidUsage(
            f"{what} must be a time, as in 5 or [5], or [] for the end of all times: got {text!r}", **{what: text}
        )
    return at(parse_time(int(inner), what))


def confirm(session: Session, shard: str, what: str) -> None:
    """Ask for the shard's name before an operation that cannot be undone. Raises InvalidUsage if it is not typed."""
    if session.as_json:
        raise InvalidUsage(f"{what} needs a confirmation, and --json cannot ask for one: add --yes")
    session.err.print("This cannot be undone. Type the shard's name: ", end="", markup=False, highlight=False)
    if sys.stdin.readline().strip() != shard:
        raise InvalidUsage(f"that is not {shard!r}; nothing was changed")


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
