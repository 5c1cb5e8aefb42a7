"""`persist events`: what is in an event log, whether it is whole, copies of it, how far effects are released."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from persist_lib.cli.json_values import Json, jsonable
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import DryRun, Yes
from persist_lib.core import units
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load what it does not need
    from persist_lib.events import Event

SHOWN = 100
"""Characters of an event on a line of a terminal."""
Where = Annotated[str, typer.Argument(metavar="STORE", help="kind[:options], as in disk:./ledger; \\: is a colon.")]
SomeStore = Annotated[
    str | None, typer.Argument(metavar="[STORE]", help="kind[:options], as in disk:./ledger; \\: is a colon.")
]


def show(session: Session, store: SomeStore = None) -> None:
    """Show a log: its last event, how far effects are released, its newest snapshot, and whether it was moved.

    Without a store: the kinds of stores that a log can be in, and the options of each.

    \b
    persist events show
    persist events show disk:./ledger
    persist events show disk:./ledger --json | jq .released
    """
    from persist_lib import events

    if store is None:
        kinds = events.known_kinds()
        table = plain_table("kind", "options")
        for kind, options in kinds.items():
            table.add_row(kind, options)
        session.answer({"kinds": kinds}, table)
        return
    with events.open_store(store) as log:
        found, name = events.look(log), events.name_of(log)
    behind = found.last - found.released
    released = f"up to event {found.released:,}"
    if behind > 0:
        released += f"; {units.of(behind, 'event')} behind it: the next start releases their effects (again)"
    if behind < 0:
        released += ", which is beyond the log: it has lost events, and no loop starts on it"
    lines = labelled(
        ("last event", f"{found.last:,}"), ("released", released),
        ("snapshot", f"of the state after event {found.snapshot:,}" if found.snapshot else "none"),
        ("continues in", found.elsewhere.store),
    )  # fmt: skip
    session.answer({"store": name, **jsonable(found)}, lines)


def cat(
    session: Session,
    store: Where,
    first: Annotated[int | None, typer.Option("--from", metavar="ID", min=1, help="From this event on.")] = None,
    through: Annotated[
        int | None, typer.Option("--through", metavar="ID", min=1, help="Up to and with this one.")
    ] = None,
    head: Annotated[int | None, typer.Option("--first", metavar="N", min=0, help="The first N of these.")] = None,
    tail: Annotated[int | None, typer.Option("--last", metavar="N", min=0, help="The last N of these.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bytes as they are, and nothing else.")] = False,
) -> None:
    """Print events: a line each with its id, its size and its text (of what is no text: base64). Checks each of them.

    With --json each line is an object, with `text` or `base64`.

    \b
    persist events cat disk:./ledger --from 17
    persist events cat disk:./ledger --last 3
    persist events cat disk:./ledger --json | jq -r .text
    persist events cat disk:./ledger --from 17 --through 17 --raw > event
    """
    if raw and session.as_json:
        raise InvalidUsage("--raw writes the bytes as they are, and --json does not: give one of them")
    if head is not None and tail is not None:
        raise InvalidUsage("say --first or --last, not both")
    from persist_lib import events

    with events.open_store(store) as log, log.reader() as reader:
        start, end = first or 1, through
        if head is not None or tail is not None:
            end = reader.last if through is None else through
            start = start if tail is None else max(start, end - tail + 1)
            end = end if head is None else min(end, start + head - 1)
        _print(session, reader.replay(start, end), raw=raw)


def check(
    session: Session,
    store: Where,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Another log, to compare it with.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend a damaged log. This cannot be undone.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Read every event and check that it is what was written; with OTHER, that it is the same there, byte for byte.

    Exit codes: 1 for two logs that differ, 3 for a damaged one. The message names the event or the record.

    With --repair, what cannot be read goes, and all that lies behind it: the first events, up to the first that is not
    as it was written, stay, and snapshots, which only shorten a start, go. Copy the files first: what is dropped is
    gone. It ends a program that runs on the log.

    \b
    persist events check disk:./ledger
    persist events check disk:./ledger lmdb:./copy
    persist events check disk:./ledger --repair --dry-run     what is wrong, and what would go
    persist events check disk:./ledger --repair               asks for the store's name
    """
    if repair:
        if other is not None:
            raise InvalidUsage("--repair mends one log: leave out the other one")
        _repair(session, store, yes=yes, dry_run=dry_run)
        return
    if yes or dry_run:
        raise InvalidUsage("--yes and --dry-run go with --repair: a check changes nothing")
    from persist_lib import events

    with events.open_store(store) as log, session.progress("check") as advance:
        name, found = events.name_of(log), events.check(log, progress=advance)
        said = f"{name}: {units.of(found.events, 'event')}, {units.size(found.bytes)}, all as they were written"
        if not found.events:
            said = f"{name}: the log is empty, so there was nothing to check"
        value: Json = {"store": name, **jsonable(found)}
        if other is not None:
            with events.open_store(other) as second:
                compared = events.compare(log, second, progress=advance)
                same = min(compared.first, compared.second)
                value |= {"other": events.name_of(second), "same": same, "other_events": compared.second}
                said += f"; the first {units.of(same, 'event')} are the same in {events.name_of(second)}"
                if compared.first != compared.second:
                    said += f", which has {units.of(compared.second, 'event')}"
    session.answer(value, said)


def copy(
    session: Session,
    source: Where,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where it is copied to.")],
    dry_run: DryRun = False,
) -> None:
    """Copy a log to another store: its events, how far effects are released, and its newest snapshot.

    What the target has already is compared, byte for byte, and the rest is written and compared. Killed and started
    again, it continues. A target that holds another log is refused. A program may use the source at the same time.

    \b
    persist events copy disk:./ledger lmdb:./copy --dry-run
    persist events copy disk:./ledger 's3:s3\\://bucket/ledger'
    """
    from persist_lib import events

    with events.open_store(source) as log, events.open_store(target) as other, session.progress("copy") as advance:
        done = events.copy(log, other, dry_run=dry_run, progress=advance)
        names = events.name_of(log), events.name_of(other)
    would = "would write" if dry_run else "wrote"
    said = f"{would} {units.of(done.written, 'event')} to {names[1]}, up to event {done.last:,}; "
    said += f"compared {units.of(done.checked, 'event')} that were there"
    session.answer({"source": names[0], "target": names[1], **jsonable(done), "dry_run": dry_run}, said)


def mark(
    session: Session,
    store: Where,
    through: Annotated[int, typer.Option("--through", metavar="ID", min=0, help="Up to and with this event.")],
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Say up to which event effects count as released. It ends a program that runs on the log.

    For an effect that can never be released: the next start continues after it. And for a log that has lost events. If
    the mark goes back, effects behind it are released again. If it goes forward, those that it passes never are.

    \b
    persist events mark disk:./ledger --through 17 --dry-run
    persist events mark disk:./ledger --through 17
    """
    from persist_lib import events

    with events.open_store(store) as log:
        found, name = events.look(log), events.name_of(log)
        if through > found.last:
            raise InvalidUsage(f"{name} ends at event {found.last}: there is no event {through}", last=found.last)
        if not dry_run:
            session.confirm(name, _passed(found.released, min(through, found.last)), "store", yes=yes)
            events.set_released(log, through)
    said = f"effects count as released up to event {through:,}; before: {found.released:,}"
    said = f"{name}: {_passed(found.released, through)}: {said}" if not dry_run else f"{name}: would be so: {said}"
    session.answer({"store": name, "before": found.released, "released": through, "dry_run": dry_run}, said)


def _repair(session: Session, store: str, *, yes: bool, dry_run: bool) -> None:
    from persist_lib import events

    def said(found: events.Repaired, are: str) -> str:
        if not found.findings:
            return f"{name}: nothing is wrong; {units.of(found.events, 'event')}"
        snapshots = f", and {units.of(found.snapshots, 'snapshot')}" if found.snapshots else ""
        gone = f"{units.of(found.dropped, 'event')} behind them {are} dropped{snapshots}"
        return "\n".join([*found.findings, f"{name}: {units.of(found.events, 'event')} stay, {gone}"])

    with events.open_store(store) as log:
        found, name = events.repair(log), events.name_of(log)
        applied = bool(found.findings) and not dry_run
        if applied:
            session.confirm(name, "repairing", "store", said(found, "would be"), yes=yes)
            found = events.repair(log, apply=True)
    session.answer(
        {"store": name, **jsonable(found), "applied": applied}, said(found, "are" if applied else "would be")
    )


def _passed(before: int, through: int) -> str:
    if through > before:
        return f"never releasing the effects of events {before + 1:,} to {through:,}"
    return f"releasing again the effects of events {through + 1:,} to {before:,}" if through < before else "no change"


def _print(session: Session, found: Iterator[Event], *, raw: bool = False) -> None:
    for id_, payload in found:
        if raw:
            sys.stdout.flush()
            sys.stdout.buffer.write(payload)
            continue
        data = bytes(payload)
        text = _text(data)
        value = {"text": text} if text is not None else {"base64": base64.b64encode(data).decode()}
        shown = next(iter(value.values()))
        if session.out.is_terminal and len(shown) > SHOWN:
            shown = shown[:SHOWN] + " …"
        line = f"{id_}  {units.size(len(data))}  {shown}"
        if session.as_json:
            session.answer({"id": id_, "bytes": len(data), **value})
        else:
            session.out.out(line, highlight=False)


def _text(data: bytes) -> str | None:
    """The event as text on one line, if it is that."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None
