"""`persist changes` and `persist restore`: what happened between two times, and the way back to a time."""

from __future__ import annotations

from typing import Annotated

import typer

from persist_lib.cli import formats, units
from persist_lib.cli.arguments import DryRun, Shard, time_words
from persist_lib.cli.reading import AT_ONCE_S, Format, Limit, Output, Wait, kind_of, print_rows
from persist_lib.cli.session import Session
from persist_lib.cli.values import clock, jsonable

From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="T", help="Changes after this time. Default: from the beginning.", show_default=False
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="T", help="Up to and with this time. Default: the newest complete time.", show_default=False
    ),
]


def changes(
    session: Session,
    shard: Shard,
    from_: From = None,
    to: Until = None,
    limit: Limit = None,
    format_: Format = "table",
    output: Output = None,
    wait: Wait = 0.0,
) -> None:
    """Print what happened to a shard after one time, up to and with another.

    Each key, value and time is printed once, with its `_time`, and with its change in multiplicity as `_diff`. The
    contents at the first time and these changes add up to the contents at the second. It fails if history at the first
    time has been given up.

    \b
    persist changes orders --from 7
    persist changes orders --from 7 --to 9 --format jsonl
    """
    kind = kind_of(session, format_, output)
    first, last = (None if text is None else time_words(text, what) for text, what in ((from_, "from"), (to, "to")))
    with (
        session.open() as client,
        client.open_reader(shard) as reader,
        reader.changes(first, last, timeout=max(wait, AT_ONCE_S)) as found,
    ):
        head = {"shard": shard, "from": found.from_, "to": found.to, **clock(reader.schema.times)}
        count = print_rows(session, head, found, kind, output, limit)
    if kind == "table" or output is not None:
        show = reader.schema.show
        after = "from the beginning" if found.from_ is None else f"after {show(found.from_)}"
        session.note(f"{shard} {after} to {show(found.to)}: {units.of(count, 'change')}")


def restore(
    session: Session,
    shard: Shard,
    to: Annotated[str, typer.Option(metavar="T", help="The time whose contents come back.", show_default=False)] = ...,  # type: ignore[assignment]
    dry_run: DryRun = False,
) -> None:
    """Make a shard's contents what they were at a time, by an append of the difference.

    Nothing is lost: what was written since can still be read as of its times. Where the contents are the same already,
    nothing is appended, so it may be repeated. It fails if history at the time has been given up.

    \b
    persist restore orders --to 7 --dry-run     what would change, with the first hundred rows
    persist restore orders --to 7
    """
    time = time_words(to, "to")
    with session.open(read_only=dry_run) as client:
        done = client.restore(shard, time, dry_run=dry_run)
        schema = client.inspect(shard).state.schemas[-1]
    seqno = None if done.appended is None else done.appended.seqno
    value = {
        "shard": shard, "to": done.to, "upper": done.upper, "rows": done.rows, "added": done.added,
        "retracted": done.retracted, "seqno": seqno, "dry_run": dry_run, "cost": jsonable(done.cost),
        **clock(schema.times),
    }  # fmt: skip
    if session.as_json:
        sample = formats.encode([row for batch in formats.rows_of(done.sample) for row in batch.to_pylist()])
        text = formats.encode(value).decode()
        session.out.out(f'{text[:-1]},"sample":{sample.decode()}}}', highlight=False)
        return
    if dry_run and done.rows:
        formats.write_table(session, None, done.sample.schema, formats.Counted(iter([done.sample]), 0))
        if done.rows > done.sample.num_rows:
            session.note(f"only the first {done.sample.num_rows}")
    session.show(_said(shard, schema.show(done.to), done.rows, done.added, done.retracted, seqno, dry_run=dry_run))
    session.note(units.spent(done.cost))


def _said(shard: str, to: str, rows: int, added: int, retracted: int, seqno: int | None, *, dry_run: bool) -> str:
    if not rows:
        return f"{shard} has the contents of {to} already; nothing {'would be' if dry_run else 'was'} appended"
    counts = f"{units.number(rows)} distinct rows change, by +{units.number(added)} and -{units.number(retracted)}"
    return (
        f"{shard} would be restored to {to}: {counts}" if dry_run else f"{shard} v{seqno}: restored to {to}: {counts}"
    )
