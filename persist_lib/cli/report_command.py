"""`persist report`: a location or a shard on one page, at the shell, as JSON, or as a file of HTML with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from persist_lib.cli.json_values import jsonable
from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import names_of_tables
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.report import Comparison, Document


def report(
    session: Session,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A shard or a table. Default: all.", autocompletion=names_of_tables),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one HTML file with a picture; it needs no other."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="Of a shard: how many days it goes back.")] = 30,
    most: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Of all: how many shards each table has.")] = 10,
    seconds: Annotated[float, typer.Option(min=0, help="How long to look at shards that moved.")] = 60.0,
    policy: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Of a shard: its appends once more under this policy; more than once."),
    ] = None,
    reads: Annotated[
        float, typer.Option(min=0, metavar="A-DAY", help="With --policy: how often its newest contents are read.")
    ] = 0,
) -> None:
    """Report on all shards: damage, duties overdue, debt, dollars, garbage and who holds it; or on one, day by day.

    Of a shard: its batches, bytes, writes and dollars of each day, what each duty did last and why the next is not due,
    holds and leases. The days are those of its log, whose older rows upkeep truncates; how much is missing is said.
    With --policy: what its batches, reads, bytes and dollars would have been under other policies, beside its own. A
    file has fields of a rule: compaction_weight, compaction_advance, compaction_ahead, retention.

    Changes nothing. Pictures need matplotlib: pip install 'persist-lib\\[pictures]'. The exit code is 3 where a scrub
    found damage, or a shard cannot be read.

    \b
    persist report
    persist report orders --days 7
    persist report orders --policy eager.toml --policy lazy.toml --reads 100 --html policies.html
    persist report --html fleet.html
    persist report --json | jq '.rows[] | select(.debt > 1000000) | .shard'
    """
    from persist_lib import report
    from persist_lib.health import Limits

    with session.open() as client:
        if policy:
            found: report.Fleet | report.ShardPage | report.Comparison = _simulated(client, name, policy, reads)
        else:
            found = report.look(client, name, days=days, limits=Limits(seconds=seconds))
    document = report.shown(found, most=most, picture=to is not None)
    if to is None:
        session.answer(jsonable(found), *_printed(document))
    else:
        to.write_text(report.html(document), encoding="utf-8")
        session.answer({"file": str(to), **jsonable(found)}, f"{to}: {document.title}", *document.lines)
    if isinstance(found, report.Comparison):
        return
    if found.damaged if isinstance(found, report.Fleet) else found.damage:
        raise typer.Exit(3)


def _simulated(client: Client, name: str | None, files: list[Path], reads: float) -> Comparison:
    from persist_lib import report

    if name is None:
        raise InvalidUsage("policies are compared for one shard: name it, as in persist report orders --policy a.toml")
    policies: dict[str, object] = {}
    for path in files:
        try:
            policies[path.stem if path.stem not in policies else str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"{path} cannot be read: {error}", path=str(path)) from error
    found = report.look(client, name)
    shard = found.shard if isinstance(found, report.ShardPage) else name
    return report.simulate(client, shard, policies, reads_a_day=reads)


def _printed(document: Document) -> Iterator[RenderableType]:
    """The page as text: the tables that have rows."""
    yield Text(document.title, style="bold")
    yield from document.lines
    for table in document.tables:
        if table.rows:
            printed = plain_table(*table.columns, right=table.numbers, title=table.title)
            for row in table.rows:
                printed.add_row(*row)
            yield Text("")
            yield printed
            yield from filter(None, [table.left_out])
