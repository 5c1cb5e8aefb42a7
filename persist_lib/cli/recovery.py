"""When something went wrong: `persist outcome` judges an append, `persist repair` makes a shard load again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import render, units
from persist_lib.cli.arguments import DryRun, Shard, confirm, parse_frontier
from persist_lib.cli.session import Session
from persist_lib.cli.values import jsonable
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.maintain import Repaired


def outcome(
    session: Session,
    shard: Shard,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The append's token, in hex, from its error message.")],
    lower: Annotated[str, typer.Option(metavar="FRONTIER", help="Where it starts, as 5.")],
    upper: Annotated[str, typer.Option(metavar="FRONTIER", help="Where it ends, as 10, or [].")],
) -> None:
    """Say what became of an append: committed, never, open (it may still come), or unknown.

    Use it for an append whose writer could not find out the outcome. It works from any machine and at any later time.
    The answers committed and never are certain. To settle an open append, repeat it with its token.

    \b
    persist outcome orders 5f2c…e1 --lower 5 --upper 10
    """
    try:
        raw = bytes.fromhex(token)
    except ValueError as error:
        raise InvalidUsage(f"the token must be in hex, as in the error message: got {token!r}") from error
    bounds = parse_frontier(lower, "lower"), parse_frontier(upper, "upper")
    with session.open() as client:
        verdict = client.judge_append(shard, raw, *bounds)
    value = {"shard": shard, "token": raw.hex(), **jsonable(verdict)}
    session.answer(value, f"{shard}: {verdict.answer}: {verdict.why}")


def repair(
    session: Session,
    shard: Shard,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Drop the newest versions of a shard that no release can read, so that it opens again.

    What was appended in these versions is lost. This cannot be undone.

    Use it if the log is damaged, or holds a row that no program can decode (NewerFormat is no damage: upgrade). First
    stop all programs that use the shard: a program that has seen a dropped version is refused until it is restarted.

    \b
    persist repair orders --dry-run     what would be dropped, and why
    persist repair orders               asks for the name
    """
    with session.open() as client:
        plan = client.repair(shard, dry_run=True)
        url = client.url
    value = {"shard": shard, "dry_run": dry_run, **jsonable(plan)}
    if dry_run or not plan.dropped:
        session.answer(value, *_said(shard, url, plan))
        return
    session.show(*_said(shard, url, plan))
    if not yes:
        confirm(session, shard, "repairing")
    with session.open(read_only=False) as client:
        done = client.repair(shard)
    text = f"{shard} is at v{done.kept} again" if done.kept else f"there is no shard {shard} any more"
    session.answer({**value, **jsonable(done)}, f"{text}; {units.of(len(done.dropped), 'version')} dropped")


def _said(shard: str, url: str, plan: Repaired) -> list[Any]:
    if not plan.dropped:
        return [f"{shard} in {url}: nothing to repair, {plan.why}"]
    last = (
        f"the last good one is v{plan.kept}"
        if plan.kept
        else "there is no good one before it: the whole shard would be dropped"
    )
    lines: list[Any] = [f"{shard} in {url}: {plan.why}", f"{last}; these would be dropped:"]
    table = render.plain_table("version", "when", "command", "bytes", right=("bytes",))
    for row in plan.dropped:
        when = "?" if row.now is None else units.moment(row.now)
        table.add_row(f"v{row.seqno}", when, row.command or "unreadable", units.number(row.size))
    lines.append(table)
    if plan.missing:
        lines.append(
            f"not possible: v{plan.kept} needs {units.of(len(plan.missing), 'object')} that were deleted since"
        )
    return lines
