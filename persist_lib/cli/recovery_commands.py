"""When something went wrong: what became of an append or a commit, the way back to a time, a log that is damaged.

And the producers, which number their appends so that none is committed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from persist_lib.cli import row_formats
from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.render import plain_table
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.errors import InvalidUsage
from persist_lib.ids import parse_producer_name
from persist_lib.times import Times, show_frontier

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.maintain import Repaired
    from persist_lib.relation.statements import Done
    from persist_lib.table.table import Table


def outcome(
    session: Session,
    name: opt.AnyTable,
    token: opt.Token,
    lower: Annotated[str | None, typer.Option(metavar="FRONTIER", help="Of a shard: where it starts, as 5.")] = None,
    upper: Annotated[
        str | None, typer.Option(metavar="FRONTIER", help="Of a shard: where it ends, as 10, or [].")
    ] = None,
) -> None:
    """Say what became of an append or a commit: committed, never, open (it may still come), or unknown.

    Use it where the outcome could not be found out. It works from any machine and at any later time. The answers
    committed and never are certain. An append to a shard also needs its --lower and --upper; to settle an open one,
    repeat it with its token. Of a transaction, name any of its tables: its outcome is made certain.

    \b
    persist outcome orders 5f2c…e1 --lower 5 --upper 10
    persist outcome accounts 5f2c…e1        of a table on a timeline
    """
    raw = opt.parse_token(token)
    if lower is not None and upper is not None:
        bounds = opt.parse_frontier(lower, "lower"), opt.parse_frontier(upper, "upper")
        with session.open() as client:
            verdict = client.judge_append(name, raw, *bounds)
        value = {"shard": name, "token": raw.hex(), **jsonable(verdict)}
        session.answer(value, f"{name}: {verdict.answer}: {verdict.why}")
        return
    with session.open() as client:
        carrier = table_of(client, name).carrier
    if not carrier.startswith("timeline"):
        raise InvalidUsage(f"{name} is carried by a {carrier}: say --lower and --upper of the append to a shard")
    with session.tables(read_only=False) as tables:
        timeline, _ = tables.timeline_of(name)
        time = tables.outcome(raw, timeline=timeline, table=name)
    committed = "" if time is None else f"committed at {Times('ms', lambda: 0).show(time)}"
    session.answer(
        {"timeline": timeline, "token": raw.hex(), "time": time, **clock("ms")},
        committed or "never: it is not there, and will not be",
    )


def restore(
    session: Session,
    name: opt.AnyTable,
    to: Annotated[str, typer.Option(metavar="T", help="The time whose contents come back.")] = ...,  # type: ignore[assignment]
    dry_run: opt.DryRun = False,
) -> None:
    """Make a table's rows what they were at a time, in one commit.

    Nothing is lost: what was written since can still be read as of its times. Where the contents are the same already,
    nothing is written, so it may be repeated. It fails if history at the time has been given up.

    \b
    persist restore orders --to 7 --dry-run     what would change, with the first hundred rows
    persist restore orders --to 7
    """
    time = opt.parse_time(to, "to")
    with session.open(read_only=dry_run) as client:
        if client.table(name).carrier != "shard":
            with session.open(read_only=False) as writing:  # a dry run, too, looks through a writer
                table = writing.table(name)
                _answer_restored(session, table, time, table.restore(time, dry_run=dry_run), dry_run=dry_run)
            return
        done = client.restore(name, time, dry_run=dry_run)
        schema = client.inspect(name).state.schemas[-1].shown
    seqno = None if done.appended is None else done.appended.seqno
    value = {
        "table": name, "to": done.to, "upper": done.upper, "rows": done.rows, "added": done.added,
        "retracted": done.retracted, "seqno": seqno, "dry_run": dry_run, "cost": jsonable(done.cost),
        **clock(schema.times),
    }  # fmt: skip
    if dry_run and done.rows and not session.as_json:
        row_formats.write_table(session, None, done.sample.schema, row_formats.Counted(iter([done.sample]), 0))
        if done.rows > done.sample.num_rows:
            session.note(f"only the first {done.sample.num_rows}")
    sample = [row for batch in row_formats.rows_of(done.sample) for row in row_formats.python_rows(batch)]
    said = _restored(name, schema.show(done.to), done.rows, done.added, done.retracted, seqno, dry_run=dry_run)
    session.answer({**value, "sample": sample}, said)
    session.note(units.spent(done.cost))


def _answer_restored(session: Session, table: Table, to: int | str, done: Done, *, dry_run: bool) -> None:
    """Say what a restore of what is no shard alone did, or would do."""
    times = Times(table.schema.times, lambda: 0)
    shown = times.show(times.as_of(to)) if isinstance(to, int) else to
    value = {"table": table.name, "to": to, "rows": done.count, "time": done.time, "dry_run": dry_run}
    if not done.count:
        said = f"{table.name} has the rows of {shown} already; nothing {'would be' if dry_run else 'was'} written"
    else:
        would = "would be" if dry_run else f"was at time {times.show(done.time)}"
        said = f"{table.name} {would} restored to {shown}: {units.of(done.count, 'distinct row')} change"
    session.answer({**value, "cost": jsonable(done.cost), **clock(table.schema.times)}, said)
    session.note(units.spent(done.cost))


def _restored(name: str, to: str, rows: int, added: int, retracted: int, seqno: int | None, *, dry_run: bool) -> str:
    if not rows:
        return f"{name} has the contents of {to} already; nothing {'would be' if dry_run else 'was'} appended"
    counts = f"{units.number(rows)} distinct rows change, by +{units.number(added)} and -{units.number(retracted)}"
    return f"{name} would be restored to {to}: {counts}" if dry_run else f"{name} v{seqno}: restored to {to}: {counts}"


def repair(session: Session, shard: opt.Shard, yes: opt.Yes = False, dry_run: opt.DryRun = False) -> None:
    """Mend what needs no guess, and drop the newest versions that no release can read, so that a shard opens again.

    A rollup that is gone or damaged is written again where the log leads to exactly the bytes that it had. What was
    appended in dropped versions is lost, and that cannot be undone. It says first what it would do, and asks; with
    --yes it does not ask, and without a terminal it does nothing unless that is given.

    Versions are dropped if the log is damaged, or holds a row that no program can decode (NewerFormat is no damage:
    upgrade). First stop all programs that use the shard: a program that has seen a dropped version is refused until it
    is restarted.

    \b
    persist shard repair orders --dry-run     what would be mended and dropped, and why
    persist shard repair orders               asks for the name
    """
    with session.open() as client:
        plan = client.repair(shard, dry_run=True)
        url = client.url
    value = {"shard": shard, "dry_run": dry_run, **jsonable(plan)}
    if dry_run or not (plan.dropped or plan.mended):
        session.answer(value, *_said(shard, url, plan))
        return
    session.show(*_said(shard, url, plan))
    session.confirm(shard, "repairing", "shard", yes=yes)
    with session.open(read_only=False) as client:
        done = client.repair(shard)
    text = f"{shard} is at v{done.kept}" if done.kept else f"there is no shard {shard} any more"
    mended = f"{units.of(len(done.mended), 'object')} written again" if done.mended else ""
    dropped = f"{units.of(len(done.dropped), 'version')} dropped" if done.dropped else ""
    session.answer({**value, **jsonable(done)}, "; ".join(filter(None, [text, mended, dropped])))


def _said(shard: str, url: str, plan: Repaired) -> list[RenderableType]:
    mended: list[RenderableType] = [
        f"{shard} in {url}: {one.key} would be written again: {one.found}; {one.proof}" for one in plan.mended
    ]
    if not plan.dropped:
        return mended or [f"{shard} in {url}: nothing to repair, {plan.why}"]
    last = (
        f"the last good one is v{plan.kept}"
        if plan.kept
        else "there is no good one before it: the whole shard would be dropped"
    )
    lines: list[RenderableType] = [*mended, f"{shard} in {url}: {plan.why}", f"{last}; these would be dropped:"]
    table = plain_table("version", "when", "command", "bytes", right=("bytes",))
    for row in plan.dropped:
        when = "?" if row.now is None else units.moment(row.now)
        table.add_row(f"v{row.seqno}", when, row.command or "unreadable", units.number(row.size))
    lines.append(table)
    if plan.missing:
        lines.append(
            f"not possible: v{plan.kept} needs {units.of(len(plan.missing), 'object')} that were deleted since"
        )
    return lines


def producers(
    session: Session,
    shard: opt.Shard,
    forget: Annotated[
        str | None, typer.Option(metavar="NAME", help="Forget this one, which will never append again.")
    ] = None,
    expected: Annotated[
        int | None, typer.Option(metavar="N", help="Only if this is the number of its last append.")
    ] = None,
    dry_run: opt.DryRun = False,
) -> None:
    """List a shard's producers: streaming queries, ingestion runs and others that number their appends; or forget one.

    No number of a producer is ever committed twice. `last` is the number of its last append, `upper` where that left
    the shard. A shard remembers 1,000 of them.

    With --forget, all numbers of that one are new again: an append of it that is repeated after this is committed a
    second time. It is refused if the producer has appended since this command looked.

    \b
    persist shard producers orders
    persist shard producers orders --forget nightly-2024 --dry-run
    persist shard producers orders --forget nightly-2024 --expected 7
    """
    if forget is not None:
        _forget(session, shard, forget, expected, dry_run=dry_run)
        return
    if expected is not None or dry_run:
        raise InvalidUsage("--expected and --dry-run go with --forget")
    with session.open() as client:
        found, times = client.producers(shard), client.inspect(shard).state.times
    table = plain_table("producer", "last", "version", "upper", "when", right=("last", "version"))
    for name, last in found.items():
        upper, when = show_frontier(last.upper, times), units.moment(last.now)
        table.add_row(name, units.number(last.sequence), f"v{last.seqno}", upper, when)
    value = {"shard": shard, "producers": jsonable(found), **clock(times)}
    session.answer(value, table if found else f"{shard} has no producers")


def _forget(session: Session, shard: str, name: str, expected: int | None, *, dry_run: bool) -> None:
    parse_producer_name(name)
    with session.open(read_only=dry_run) as client:
        state = client.inspect(shard).state
        if (last := state.producers.get(name)) is None:
            known = ", ".join(sorted(state.producers)[:10]) or "it has none"
            raise InvalidUsage(f"shard {shard} has no producer {name!r}; its producers: {known}", name=name)
        if expected is not None and expected != last.sequence:
            raise InvalidUsage(
                f"shard {shard}: the producer {name!r} is at {last.sequence}, not at {expected}. It was not forgotten",
                name=name, expected=expected, actual=last.sequence,
            )  # fmt: skip
        if not dry_run:
            client.forget_producer(shard, name, expected=last.sequence)
    what = f"the producer {name}, whose last append was number {units.number(last.sequence)} as v{last.seqno}"
    value = {"shard": shard, "producer": name, "dry_run": dry_run, **jsonable(last), **clock(state.times)}
    session.answer(value, f"{shard} would forget {what}" if dry_run else f"{shard} has forgotten {what}")
