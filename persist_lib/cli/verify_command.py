"""`persist verify`: whether all that is stored in a location is what it is said to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from persist_lib.cli import shared_options as opt
from persist_lib.cli.duty_commands import passed_by
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Flow
from persist_lib.core import units
from persist_lib.core.duties import BY_NAME

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.verify import Report


def verify(
    session: Session,
    names: opt.AnyTables = None,
    full: Annotated[bool, typer.Option("--full", help="Everything again, not only what was added since.")] = False,
    even_if_paused: opt.EvenIfPaused = False,
) -> None:
    """Say whether all that is stored is what it is said to be: logs, rollups, objects, batches, and the catalog.

    It walks the log of each shard and replays it, compares the rollups, looks for objects that are missing or that
    nothing refers to, reads batches as `persist shard scrub` does, and checks what records promise: renditions, WALs,
    bindings, streams, pending areas and event logs. Only what was added since all was found sound, unless --full; the
    location remembers that.

    One line for each thing that is wrong, with the command that helps; then what was checked, and what was not. The
    exit code is 3 where data is damaged or missing, 1 where something else is wrong or was not verified. Changes no
    data. For large shards, `jobs/scrub.py` does it on Spark.

    \b
    persist verify
    persist verify orders --full
    persist verify --json | jq -r '.findings[] | select(.is_damage) | .do'
    """
    from persist_lib import verify as verification

    with session.open(remembers=True, maintains=True) as client, passed_by(client, is_asked=even_if_paused):
        with session.progress("verify") as advance:
            found = verification.check(client, names or (), full=full, progress=advance)
        url = client.url
    session.answer(_value(found, url), *_lines(found, url))
    session.note(units.spent(found.cost))
    if not found.is_sound:
        raise typer.Exit(3 if found.is_damaged else 1)


verify.__doc__ = (
    verify.__doc__ or ""
).rstrip() + f"\n\n    Of shards alone it is the duty `scrub`: {BY_NAME['scrub'].does}"


def _value(found: Report, url: str) -> dict[str, Any]:
    findings = [{"shard": shard, **jsonable(one), "says": one.says} for shard, one in found.findings]
    return {
        "location": url, "sound": found.is_sound, "damaged": found.is_damaged, "findings": findings,
        "failed": dict(found.failed), "not_checked": list(found.not_checked), "looked_at": dict(found.looked_at),
        "shards": [{"shard": shard, **jsonable(one)} for shard, one in found.shards.items()],
        "cost": jsonable(found.cost),
    }  # fmt: skip


def _lines(found: Report, url: str) -> Iterator[RenderableType]:
    for shard, one in found.findings:
        about = f"{shard}: {one.says}" if shard and not one.about.startswith(f"{shard}/") else one.says
        kind = f"{one.kind:<9} ", "red" if one.is_damage else "yellow"
        yield Flow(Text.assemble(kind, about, f"\n{'':10}{one.do}"), hang=10)
    for shard, why in found.failed.items():
        yield Flow(Text(f"{'not read':<9} {shard}: {why}", "yellow"), hang=10)
    yield f"{found.says} in {url}"
    if found.not_checked:
        yield Flow(Text(f"not checked: {'; '.join(found.not_checked)}"), hang=13)
    failed = f"; {units.of(len(found.failed), 'shard')} could not be verified" if found.failed else ""
    yield "nothing is wrong" if found.is_sound else f"{units.of(len(found.findings), 'finding')}{failed}"
