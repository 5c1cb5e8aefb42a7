"""The history of a shard's state: a line for each transition, and what changed between two versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import render
from persist_lib.cli.json_values import batch_value, clock, jsonable
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Shard
from persist_lib.cli.table_layout import Fitted
from persist_lib.core import units
from persist_lib.errors import InvalidUsage, NotFound, PersistError
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, parse_shard_id
from persist_lib.times import Times, Unit

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.core.diff import Comparison, StateDiff, TraceEdit
    from persist_lib.core.state import Batch, State, Version
    from persist_lib.format.log import LogRow, Step
    from persist_lib.frontier import Antichain
    from persist_lib.location.api import Row

VERSION = re.compile(r"v?([0-9]{1,18})")
ROWS = 20
KEYS_NAMED = 3
"""How many changed entries of a kind are named one by one."""


def log(
    session: Session,
    shard: Shard,
    older: Annotated[
        str | None, typer.Argument(metavar="[V1]", help="A version, as 7 or v7; 0 is before the first.")
    ] = None,
    newer: Annotated[str | None, typer.Argument(metavar="[V2]", help="A later version. Default: the newest.")] = None,
    start: Annotated[int | None, typer.Option("--from", min=1, metavar="N", help="Start at this version.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="At most this many; without --from, the newest. Default: 20."),
    ] = None,
) -> None:
    """Show what happened to a shard: version, when, which command, and what it changed; or, from V1 to V2, all at once.

    Times are those of the store's clock. It reads only the log, one row a transition, so it also works for a shard
    that cannot be loaded. Rows that no reader needs any more are truncated by [bold]persist maintain[/]. A row that a
    shard server committed for several clients shows each of their commands, who sent it, and what it got.

    With versions, it compares the two states, however many transitions lie between them: frontiers, batches, leases,
    holds, schemas. It reads metadata only. Versions whose part of the log was truncated cannot be compared any more.

    \b
    persist shard log orders
    persist shard log orders --from 100 --limit 50
    persist shard log orders --json | jq -r '.rows[] | select(.command == "ApplyCompaction") | .seqno'
    persist shard log orders v7              from v7 to the newest
    persist shard log orders 7 12 --json | jq '.batches[] | {removed, added: [.added[].id]}'
    """
    if older is not None:
        if start is not None or limit is not None:
            raise InvalidUsage("--from and --limit are for the log: two versions are compared as they are")
        _compare(session, shard, older, newer)
        return
    with session.open() as client:
        rows = fetch_rows(client, shard, start, limit or ROWS)
    table = render.plain_table("version", "when", "command", "what changed")
    for row in rows:
        table.add_row(row["version"], row["when"], row["command"], "\n".join(row["changes"]))
    first = rows[0]["seqno"] if rows else 0
    if start is not None and first > start:
        session.note(f"rows below v{first} are truncated")
    session.answer({"shard": shard, "rows": rows}, table)


def fetch_rows(client: Client, shard: str, start: int | None, limit: int) -> list[dict[str, Any]]:
    """At most `limit` rows from `start` on, or the newest; NotFound when there is no such shard."""
    from persist_lib.format.log import decode_row
    from persist_lib.shard.log import row_name

    id_ = parse_shard_id(shard)
    head = client.consensus.head(id_)
    if head is None:
        raise NotFound(f"there is no shard {shard!r} in {client.url}", shard=shard)
    first = max(1, head.seqno - limit + 1) if start is None else start
    rows = client.consensus.scan(id_, SeqNo(first), limit)
    times = _times(client, shard) if rows else None
    return [row_value(decode_row(row.data, row_name(id_, row.seqno)), row, times) for row in rows]


def _times(client: Client, shard: str) -> Unit | None:
    """The clock of the shard, which is in its first row and in its state; None also where the state cannot be read."""
    try:
        return client.inspect(shard).state.times
    except PersistError:
        return None


def row_value(row: LogRow, stored: Row, times: Unit | None = None) -> dict[str, Any]:
    """One transition, for people and machines. `times` is the clock of the shard."""
    steps = [step_value(step, times) for step in row.steps]
    told = [line for step in steps for line in step["changes"]] if not row.group else list(map(_line, steps))
    return {
        "seqno": row.seqno, "version": f"v{row.seqno}", "now": row.now, "when": units.moment(row.now),
        "command": row.command, "token": row.token.hex(), "bytes": len(stored.data),
        "rollup": row.rollup[0] if row.rollup else None, "changes": told, "commands": steps,
    }  # fmt: skip


def step_value(step: Step, times: Unit | None = None) -> dict[str, Any]:
    """One command of a transition: who sent it, and what it changed or, if it was refused, why."""
    return {
        "command": step.command, "token": step.token.hex(), "sender": step.sender, "refusal": step.refusal,
        "changes": [] if step.diff is None else list(changes(step.diff, times)),
    }  # fmt: skip


def _line(step: dict[str, Any]) -> str:
    """A command of a group, on one line."""
    sender = f" by {step['sender']}" if step["sender"] else ""
    got = f"refused: {step['refusal']}" if step["refusal"] else "; ".join(step["changes"]) or "nothing new"
    return f"{step['command']}{sender}: {got}"


def changes(diff: StateDiff, times: Unit | None = None) -> Iterator[str]:
    """What a transition changed, a sentence each."""
    clock = Times(times, lambda: 0)
    if diff.trace is not None:
        yield from _trace(diff.trace, clock)
    if diff.contents is not None:
        before, after = ("none" if one is None else _batch(one, clock) for one in diff.contents)
        yield f"contents ahead: {before} → {after}"
    if diff.since is not None:
        yield f"since {clock.show(diff.since[0])} → {clock.show(diff.since[1])}"
    for schema in diff.schemas:
        yield f"schema {schema}"
    if diff.format is not None:
        yield f"format {diff.format[0]} → {diff.format[1]}"
    if diff.retention is not None:
        before, after = ("none" if one is None else clock.show_distance(one) for one in diff.retention)
        yield f"retention {before} → {after}"
    if diff.member is not None:
        yield f"member {diff.member[0] or 'of nothing'} → {diff.member[1]}"
    yield from _leases("writer", diff.writers, clock)
    yield from _leases("reader", diff.readers, clock)
    for name, old, new in diff.holds:
        before, after = clock.show(old.since) if old else "none", clock.show(new.since) if new else "released"
        yield f"hold {name}: {before} → {after}"
    for name, _, pin in diff.pins:
        says = "gone" if pin is None else units.of(len(pin.keys), "object")
        yield f"pin {name}: {says}{'' if pin is None or pin.as_of is None else f', as of {clock.show(at(pin.as_of))}'}"
    for column, first, end in diff.identities:
        yield f"numbers of column {column} from {first or 1} up to {(end or 1) - 1}"
    yield from _entries("retired", "swept", [(id_, new) for id_, _, new in diff.retired])
    yield from _entries("garbage", "deleted", [(key, new) for key, _, new in diff.garbage])
    yield from _entries(
        "rollup", "rollup dropped", [(new.key if new else f"v{at}", new) for at, _, new in diff.rollups]
    )


def _trace(edit: TraceEdit, clock: Times) -> Iterator[str]:
    if edit.removed:
        came = "; ".join(_batch(batch, clock) for batch in edit.added)
        yield f"batches {render.batch_ids(edit.removed)} → {came}"
        return
    for batch in edit.added:
        yield f"+ {_batch(batch, clock)}"


def _batch(batch: Batch, clock: Times) -> str:
    contents = "empty"
    if batch.count:
        objects = len(batch.keys)
        place = units.of(objects, "object") if objects else "inline"
        contents = f"{units.of(batch.count, 'update')}, {units.size(batch.size)} {place}"
    return f"batch {batch.lo}..{batch.hi}, times {clock.show(batch.lower)} to {clock.show(batch.upper)}: {contents}"


def _leases(kind: str, entries: tuple[tuple[str, Any, Any], ...], clock: Times) -> Iterator[str]:
    for id_, old, new in entries:
        if new is None:
            yield f"{kind} {id_} gone"
        elif old is None:
            owner = f" by {new.owner!r}" if getattr(new, "owner", "") else ""
            yield f"{kind} {id_} registered{f' for {new.purpose}' if new.purpose else ''}{owner}"
        else:
            yield f"{kind} {id_}: {', '.join(_moves(old, new, clock)) or 'nothing new'}"


def _moves(old: Any, new: Any, clock: Times) -> Iterator[str]:
    """What changed in the entry of a writer or reader."""
    if getattr(old, "since", None) != getattr(new, "since", None):
        yield f"since {clock.show(old.since)} → {clock.show(new.since)}"
    if getattr(old, "seqno", None) != getattr(new, "seqno", None):
        yield f"reads from v{old.seqno} → v{new.seqno}"
    if old.lease_until != new.lease_until:
        yield f"lease +{units.duration(new.lease_until - old.lease_until)}"


def _entries(came: str, went: str, entries: list[tuple[str, Any]]) -> Iterator[str]:
    for verb, names in (
        (came, [k for k, new in entries if new is not None]),
        (went, [k for k, new in entries if new is None]),
    ):
        if names:
            rest = f" and {len(names) - KEYS_NAMED} more" if len(names) > KEYS_NAMED else ""
            yield f"{verb} {', '.join(names[:KEYS_NAMED])}{rest}"


def _compare(session: Session, shard: str, older: str, newer: str | None) -> None:
    """Show what changed in a shard's state between two versions."""
    from persist_lib.core.diff import compare
    from persist_lib.shard.log import fetch_at

    first, id_ = _version(older, "V1"), parse_shard_id(shard)
    last = None if newer is None else _version(newer, "V2")
    with session.open() as client:
        newest = client.inspect(shard)
        last = newest.seqno if last is None else last
        if not first <= last <= newest.seqno:
            raise InvalidUsage(
                f"the versions must be in order, and none above the newest, v{newest.seqno}: got v{first} and v{last}",
                shard=shard, newest=newest.seqno,
            )  # fmt: skip
        before, after = (
            newest if seqno == newest.seqno else fetch_at(client.blob, client.consensus, id_, newest, SeqNo(seqno))
            for seqno in (first, last)
        )
    found = compare(before.state, after.state)
    lines, times = list(_differences(found, after.state.times)), Times(after.state.times, lambda: 0)
    measures = _measures(before.state, after.state)
    table = Fitted(("", f"v{first}", f"v{last}"), frozenset((f"v{first}", f"v{last}")))
    for name, (was, now) in measures.items():
        if was != now:
            table.add_row(name, _shown(was, times), _shown(now, times))
    said = f"{shard}: v{first} and v{last} have the same state" if not lines else f"{shard} from v{first} to v{last}"
    value = {"shard": shard, **clock(after.state.times), **_value(before, after, found, measures), "changes": lines}
    session.answer(value, said, table, *lines)


def _version(text: str, what: str) -> int:
    if not (found := VERSION.fullmatch(text.strip())):
        raise InvalidUsage(f"{what} must be a version of the shard, as 7 or v7: got {text!r}")
    return int(found[1])


def _measures(before: State, after: State) -> dict[str, tuple[Any, Any]]:
    """What a state counts, before and after."""
    values = ((state.since, state.upper, len(state.trace), state.count, state.size) for state in (before, after))
    return dict(zip(("since", "upper", "batches", "updates", "bytes"), zip(*values, strict=True), strict=True))


def _shown(value: int | Antichain, times: Times) -> str:
    return units.number(value) if isinstance(value, int) else times.show(value)


def _differences(found: Comparison, times: Unit | None) -> Iterator[str]:
    """What differs, a sentence each. `times` is the clock of the shard."""
    from persist_lib.core.diff import StateDiff

    for edit in found.edits:
        yield from changes(StateDiff(trace=edit), times)
    yield from changes(found.terms, times)


def _value(before: Version, after: Version, found: Comparison, measures: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    terms = found.terms
    entries = {
        name: {key: jsonable([old, new]) for key, old, new in getattr(terms, name)}
        for name in ("writers", "readers", "holds", "retired", "garbage", "rollups")
    }
    return {
        "from": before.seqno, "to": after.seqno, **{name: jsonable(both) for name, both in measures.items()},
        "batches": [{"removed": jsonable(edit.removed), "added": [batch_value(one) for one in edit.added]}
                    for edit in found.edits],
        "batch_counts": jsonable(measures["batches"]), "schemas": [str(schema) for schema in terms.schemas],
        "retention": jsonable(terms.retention), "format": jsonable(terms.format), **entries,
    }  # fmt: skip
