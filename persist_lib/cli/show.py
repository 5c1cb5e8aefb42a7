"""`persist show`: everything about one shard: its frontiers, batches, and what each reader and hold keeps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from persist_lib.cli import damage, render, units
from persist_lib.cli.arguments import Shard
from persist_lib.cli.layout import Fitted, Flow
from persist_lib.cli.looking import whose
from persist_lib.cli.session import Session
from persist_lib.cli.values import jsonable, state_value
from persist_lib.frontier import Antichain
from persist_lib.times import Unit, show_frontier, show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.core.plan.garbage import GarbagePlan
    from persist_lib.core.state import Batch, State, Version
    from persist_lib.maintain import Census


SAID_ELSEWHERE = ("by level", "leases", "overdue", "retired", "holds", "garbage", "can go now")
"""Lines of the census that this command has tables for."""


def show(
    session: Session,
    shard: Shard,
    batches: Annotated[bool, typer.Option("--batches", help="List every batch, not only the levels.")] = False,
) -> None:
    """Show one shard: frontiers, batches, what each reader and hold keeps, garbage, rollups, schema.

    Why does history not advance? See which readers and holds hold back [bold]since[/]. Why is garbage not deleted?
    See which hold back [bold]objects[/], and below that what the garbage waits for.

    \b
    persist show orders
    persist show orders --batches
    persist show orders --json | jq '.state.readers'
    """
    from persist_lib.core.plan.garbage import plan_garbage
    from persist_lib.maintain import census_of

    with session.open() as client:
        version, now = client.inspect(shard), client.consensus.now()
        known, owner = damage.look(client, [shard]).get(shard), whose(client, [shard]).get(shard, "")
    counted, collection = (
        census_of(shard, version, now, client.policy()),
        plan_garbage(version.state, version.seqno),
    )
    value = {
        "shard": shard, "owner": owner, "location": client.url, "seqno": version.seqno, "now": now,
        "state": state_value(version.state), "census": jsonable(counted), "held": jsonable(collection.held),
        "holders": holders(version, now), **damage.value(known),
    }  # fmt: skip
    title = Text.assemble((shard, "bold"), f"  v{version.seqno}", f"   {owner}" if owner else "")
    session.answer(value, title, *_sections(version, counted, collection, now, damage.lines(shard, known), batches))


def _sections(
    version: Version, census: Census, collection: GarbagePlan, now: int, damaged: list[str], every_batch: bool
) -> Iterator[RenderableType]:
    state = version.state
    show = partial(show_frontier, unit=state.times)
    yield f"since {show(state.since)}   upper {show(state.upper)}   {readable(state)}"
    yield Text("")
    for name, text in render.census_lines(census)[2:]:
        if name not in SAID_ELSEWHERE:
            yield _measure(name, text)
    yield _measure("damaged", damaged[0])
    yield from (f"  {line}" for line in damaged[1:])
    for number, schema in enumerate(state.schemas):
        yield _measure(f"schema {number}", str(schema))
    yield Text("")
    yield (batches_table if every_batch else levels_table)(state.trace, state.times)
    if people := holders(version, now):
        yield holders_table(people, state.times)
    else:
        yield "no readers, no writers, no holds\n"
    yield from garbage_lines(census.garbage, census.garbage_size, collection)
    if census.retired:
        yield f"retired     {units.of(census.retired, 'id')}; `persist orphans` sweeps what they left"


def _measure(name: str, text: str) -> Flow:
    return Flow(Text(f"{name:<18} {text}"), hang=19)


def readable(state: State) -> str:
    """Which times can be read, in words."""
    if state.is_finished():
        return "(finished for good: nothing can be read or written)"
    first, end, show = state.since.time, state.upper.time, partial(show_time, unit=state.times)
    if first is None:
        return "(all history is given up)"
    if end is None:
        return f"(complete: can be read as of {show(first)} and any time after)"
    if first >= end:
        return f"(nothing can be read before upper passes {show(first)})"
    return f"(can be read as of {show(first)} to {show(end - 1)})"


def levels_table(trace: tuple[Batch, ...], times: Unit | None = None) -> Fitted:
    """The trace by size class, with the times that the batches of each cover."""
    from persist_lib.core.trace import level_of, levels

    numbers = ("batches", "updates", "bytes", "inline")
    table = render.plain_table("level", "batches", "updates", "bytes", "inline", "parts", "from", "to", right=numbers)
    for level in levels(trace):
        found = [batch for batch in trace if level_of(batch.count) == level.level]
        table.add_row(
            units.size_class(level.level), units.number(level.batches), units.number(level.updates),
            units.size(level.size), units.size(sum(batch.inline_size for batch in found)),
            units.number(sum(len(batch.parts) for batch in found)),
            show_frontier(found[0].lower, times), show_frontier(found[-1].upper, times),
        )  # fmt: skip
    return table


def batches_table(trace: tuple[Batch, ...], times: Unit | None = None) -> Fitted:
    """Every batch, oldest first."""
    numbers = ("updates", "diff sum", "bytes")
    table = render.plain_table(
        "batch", "lower", "upper", "since", "updates", "diff sum", "bytes", "parts", "fingerprint", right=numbers
    )
    for batch in trace:
        table.add_row(
            f"{batch.lo}..{batch.hi}", *(show_frontier(at, times) for at in (batch.lower, batch.upper, batch.since)),
            units.number(batch.count),
            units.number(batch.diff_sum), units.size(batch.size), _parts(batch), f"{batch.fingerprint:016x}",
        )  # fmt: skip
    return table


def holders(version: Version, now: int) -> list[dict[str, Any]]:
    """All readers, writers and holds, and what each keeps: the shard's since, and how much garbage.

    Keys: name, kind, purpose, lease_ms (left; negative: overdue; None: no lease), since, seqno, holds_since, garbage,
    garbage_size.
    """
    state = version.state
    found = [
        _holder(id_, "writer", writer.owner or writer.purpose, writer.lease_until - now)
        for id_, writer in sorted(state.writers.items())
    ]
    for id_, reader in sorted(state.readers.items()):
        kept = [entry.size for entry in state.garbage.values() if entry.seqno >= reader.seqno]
        entry = _holder(id_, "reader", reader.purpose, reader.lease_until - now)
        found.append({**entry, **_since(reader.since, state), "seqno": reader.seqno, **_kept(kept)})
    for name, hold in sorted(state.holds.items()):
        found.append({**_holder(name, "hold", "", None), **_since(hold.since, state)})
    return found


def _holder(name: str, kind: str, purpose: str, lease_ms: int | None) -> dict[str, Any]:
    nothing = {"since": None, "seqno": None, "holds_since": False, **_kept([])}
    return {"name": name, "kind": kind, "purpose": purpose, "lease_ms": lease_ms, **nothing}


def _since(since: Antichain, state: State) -> dict[str, Any]:
    return {"since": jsonable(since), "holds_since": since <= state.since}


def _kept(sizes: list[int]) -> dict[str, Any]:
    return {"garbage": len(sizes), "garbage_size": sum(sizes)}


def holders_table(people: list[dict[str, Any]], times: Unit | None = None) -> Fitted:
    """What has a lease or a hold, and what that keeps."""
    table = render.plain_table("who", "what", "lease", "since", "reads from", "holds back")
    for who in people:
        left = who["lease_ms"]
        lease = Text("none", "dim") if left is None else Text(f"{units.duration(left)} left")
        if left is not None and left < 0:
            lease = Text(f"overdue by {units.duration(-left)}", "yellow")
        since = "" if who["since"] is None else show_frontier(Antichain(*who["since"]), times)
        reads = "" if who["seqno"] is None else f"v{who['seqno']}"
        table.add_row(
            who["name"], " ".join(filter(None, (who["kind"], who["purpose"]))), lease, since, reads, _held_back(who)
        )
    return table


def _held_back(who: dict[str, Any]) -> str:
    found = ["since"] if who["holds_since"] else []
    if who["garbage"]:
        found.append(f"{units.of(who['garbage'], 'object')} ({units.size(who['garbage_size'])})")
    return ", ".join(found) or "-"


def garbage_lines(count: int, size: int, collection: GarbagePlan) -> Iterator[str]:
    """How much garbage there is, how much can go, and what the rest waits for."""
    if not count:
        yield "garbage     none"
        return
    yield f"garbage     {units.of(count, 'object')}, {units.size(size)}"
    if collection.keys:
        free = f"{units.of(len(collection.keys), 'object')}, {units.size(collection.size)}"
        yield f"  can go    {free}: `persist garbage` deletes them"
    for held in collection.held:
        yield f"  waits     {units.of(held.keys, 'object')}, {units.size(held.size)}: {held.why}"


def _parts(batch: Batch) -> str:
    inline = sum(1 for part in batch.parts if part.inline is not None)
    objects = len(batch.parts) - inline
    found = [units.of(objects, "object")] if objects else []
    if inline:
        found.append("inline")
    if len(batch.runs) > 1:
        found.append(f"{len(batch.runs)} runs")
    return ", ".join(found) if batch.exact else f"{', '.join(found)}, filtered"
