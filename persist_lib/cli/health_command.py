"""`persist health`: what is wrong in a location, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from persist_lib.cli import units
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Flow
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.health import Problem


class Source(NamedTuple):
    """From when on something is wrong with a source: the fields of `sources.Limits`."""

    instances: Annotated[int, typer.Option(min=0, help="Of a source: how many have to be at work.")] = 1
    behind_s: Annotated[
        int, typer.Option("--behind", min=0, metavar="SECONDS", help="How far a source may be behind.")
    ] = 300
    lag_messages: Annotated[int | None, typer.Option(min=0, help="How many a source may have left.")] = None
    lag_bytes: Annotated[int | None, typer.Option(min=0, help="How many a source may have left.")] = None
    errors: Annotated[int | None, typer.Option(min=0, help="How many bad messages a source may have.")] = None
    errors_share: Annotated[
        float, typer.Option(min=0, max=1, help="How many of the messages of instances at work may be bad.")
    ] = 0.01
    held_back_bytes: Annotated[
        int, typer.Option(min=0, help="How much the upstream may have to keep for a source.")
    ] = 10 << 30


class Place(NamedTuple):
    """The same for all else: the fields of `health.Limits`."""

    overdue_s: Annotated[
        float, typer.Option("--overdue", min=0, metavar="SECONDS", help="For how long upkeep may not have been done.")
    ] = 86_400
    garbage: Annotated[
        int, typer.Option(min=0, metavar="BYTES", help="How much of a table may wait to be deleted, beyond its size.")
    ] = 1 << 30
    holders: Annotated[int, typer.Option(min=0, help="How many readers, writers or holds a shard may have.")] = 1000
    slow_s: Annotated[
        float, typer.Option("--slow", min=0, metavar="SECONDS", help="How long a small request may take.")
    ] = 2.0
    seconds: Annotated[float, typer.Option(min=0, help="How long to look at shards that moved.")] = 60.0


def health(
    session: Session,
    of_sources: Source,
    of_places: Place,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Tables, shards and sources. Default: everything.")
    ] = None,
    still: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=SPAN", help="How far the upper of these tables may be behind. Repeat it."),
    ] = None,
) -> None:
    """Say what is wrong: damage, upkeep that is missing, lag, sources, streams, what keeps garbage, slow stores.

    One line a problem, with what helps and the manual's place. It ends with exit code 1 where something is wrong, and
    with 3 where stored data is damaged, for monitors. Changes nothing. Of a source on which no instance is at work, the
    upstream is asked from here; a paused one has no lag to speak of.

    \b
    persist health
    persist health orders --still 'orders=1 hour'
    persist health --behind 60 --errors 0 --json | jq -r '.problems[].do'
    """
    from persist_lib import health, sources

    spans = {}
    for one in still or ():
        pattern, sign, span = one.partition("=")
        if not (pattern and sign and span):
            raise InvalidUsage(f"--still takes PATTERN=SPAN, as in --still 'orders*=1 hour': got {one!r}")
        spans[pattern] = span
    limits = health.Limits(sources=sources.Limits(**of_sources._asdict()), still=spans, **of_places._asdict())
    with session.open() as client:
        found = health.check(client, limits, names or ())
        url = client.url
    looked = ", ".join(units.of(count, what.removesuffix("s")) for what, count in found.looked_at.items() if count)
    wrong = units.of(len(found.problems), "problem") if found.problems else "nothing is wrong"
    value = {
        "location": url, "sound": found.is_sound, "damaged": found.is_damaged, "now": found.now,
        "problems": [{"key": one.key, **jsonable(one)} for one in found.problems], "looked_at": dict(found.looked_at),
        "cost": jsonable(found.cost),
    }  # fmt: skip
    session.answer(value, *map(_told, found.problems), f"looked at {looked} in {url}", wrong)
    if found.problems:
        raise typer.Exit(3 if found.is_damaged else 1)


def _told(problem: Problem) -> Flow:
    style = "red" if problem.is_damage else "yellow"
    about = f"{problem.about} {problem.name}: {problem.says}"
    return Flow(
        Text.assemble((f"{problem.check:<10} ", style), about, f"\n{'':11}{problem.do}   {problem.page}"), hang=11
    )
