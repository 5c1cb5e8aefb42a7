"""`persist diff`: what changed in a shard's state between two of its versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from persist_lib.cli import log, units
from persist_lib.cli.arguments import Shard
from persist_lib.cli.layout import Fitted
from persist_lib.cli.session import Session
from persist_lib.cli.values import batch_value, clock, jsonable
from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo, parse_shard_id
from persist_lib.times import Times, Unit

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.core.compare import Comparison
    from persist_lib.core.state import State, Version
    from persist_lib.frontier import Antichain

VERSION = re.compile(r"v?([0-9]{1,18})")


def diff(
    session: Session,
    shard: Shard,
    older: Annotated[
        str, typer.Argument(metavar="V1", help="A version, as 7 or v7; 0 is before the first.", show_default=False)
    ],
    newer: Annotated[
        str | None,
        typer.Argument(metavar="[V2]", help="A later version. Default: the newest.", show_default=False),
    ] = None,
) -> None:
    """Show what changed in a shard's state between two versions: frontiers, batches, leases, holds, schemas.

    It compares the two states, however many transitions lie between them; `persist log` tells each of these. It reads
    metadata only. Versions whose part of the log was truncated by `persist garbage` cannot be compared any more.

    \b
    persist diff orders 7 12
    persist diff orders v7              to the newest
    persist diff orders 7 12 --json | jq '.batches[] | {removed, added: [.added[].id]}'
    """
    from persist_lib.core.compare import compare
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
    lines, times = list(_changes(found, after.state.times)), Times(after.state.times, lambda: 0)
    measures = _measures(before.state, after.state)
    table = Fitted(("", f"v{first}", f"v{last}"), frozenset((f"v{first}", f"v{last}")))
    for name, (was, now) in measures.items():
        if was != now:
            table.add_row(name, _shown(was, times), _shown(now, times))
    said = f"{shard}: v{first} and v{last} have the same state" if not lines else f"{shard} from v{first} to v{last}"
    shown: list[RenderableType] = [*([table] if table.row_count else []), *lines]
    value = {"shard": shard, **clock(after.state.times), **_value(before, after, found, measures), "changes": lines}
    session.answer(value, said, *shown)


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


def _changes(found: Comparison, times: Unit | None) -> Iterator[str]:
    """What differs, a sentence each. `times` is the clock of the shard."""
    from persist_lib.core.diff import StateDiff

    for edit in found.edits:
        yield from log.changes(StateDiff(trace=edit), times)
    yield from log.changes(found.terms, times)


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
