"""Looking at shards: all of them, one, its census, and what scrubs remember of damage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from persist_lib.cli import render
from persist_lib.cli.json_values import jsonable, messages, state_value
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import NamesOnly, Shard, Shards
from persist_lib.cli.table_layout import Fitted, Flow
from persist_lib.cli.watch import Watching, run
from persist_lib.core import units
from persist_lib.core.cost import storage_dollars
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.times import Unit, show_frontier, show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.core.cost import Prices
    from persist_lib.core.plan.garbage import GarbagePlan
    from persist_lib.core.plan.keepers import Keeper
    from persist_lib.core.state import Batch, State, Version
    from persist_lib.maintain import Census
    from persist_lib.maintain.scrub_memory import Remembered

SAID_ELSEWHERE = ("by level", "leases", "overdue", "retired", "holds", "garbage", "can go now")
"""Lines of the census that `persist shard show` has tables for."""


def list_(
    session: Session,
    names: Shards = None,
    names_only: NamesOnly = False,
    long: Annotated[bool, typer.Option("--long", help="All that can be counted: a block a shard.")] = False,
    holding: Annotated[
        bool, typer.Option("--holders", help="What each reader, hold and missing rollup keeps, most bytes first.")
    ] = False,
    watching: Watching = Watching(),  # noqa: B008 - it cannot be changed
) -> None:
    """List shards, one line each: frontiers, size, batches, debt, garbage, readers and holds; or watch them live.

    All shards, or those that are named. Yellow means work for [bold]persist maintain[/]; red means more batches than
    there should be. A shard that cannot be read is listed with the reason, and one that a scrub found damaged with
    that: then the exit code is 3.

    With --watch: what is appended in a second, too. A look costs one request for all shards together, and one for each
    that has moved. In a terminal the table is redrawn in place. Otherwise it prints a line for each shard that has
    moved, or with --json an object a look. Ctrl-C ends it, with exit code 130.

    \b
    persist shard list
    persist shard list --names | xargs -n 1 persist shard show
    persist shard list --json | jq '.shards[] | select(.debt > 1000000) | .shard'
    persist shard list orders --long
    persist shard list --holders
    persist shard list orders payments --watch --every 0.5
    persist shard list --watch --count 60 --json | jq '.shards[] | {shard, appended_per_s}'
    """
    if watching.checked() and (long or names_only or holding):
        raise InvalidUsage("--watch prints its own table: leave out --long, --names and --holders")
    with session.open() as client:
        if watching.watch:
            run(session, client, names or (), watching)
            return
        wanted = list(dict.fromkeys(names or ())) or client.shards()
        if names_only:
            session.answer({"shards": wanted}, *wanted)
            return
        if holding:
            _list_holders(session, client, wanted)
        else:
            _list(session, client, wanted, long=long)


def _list(session: Session, client: Client, wanted: Sequence[str], *, long: bool) -> None:
    found = session.each(wanted, client.census)
    of = whose(client, wanted)
    known = remembered(client, list(found.done))
    pauses = client.pauses()
    done, failed = found.done, messages(found.failed)
    values = [
        {**jsonable(one), "owner": of.get(name, ""), **damage_value(known.get(name))} for name, one in done.items()
    ]
    damaged = damaged_shards(known)
    shown: list[RenderableType] = [render.shards_table(done.values(), failed.items(), of), *damage_notes(damaged)]
    unread = {name: memory.unreadable for name, memory in known.items() if memory.unreadable}
    shown += [f"not known of {name}, as what scrubs remember cannot be read: {says}" for name, says in unread.items()]
    if long:
        lines = {name: damage_lines(name, known.get(name)) for name in done}
        shown = [render.census_table(one, lines[name], of.get(name, "")) for name, one in done.items()]
    total = sum(census.dollars_month for census in done.values())
    said = f"{units.of(len(wanted), 'shard')} in {client.url}, {units.dollars(total)} a month for storage"
    shown += [f"paused: {one.shown}, {one.says}" for one in pauses]
    value = {"location": client.url, "shards": values, "failed": failed, "pauses": jsonable(pauses)}
    session.answer(value, *shown, said)
    session.exit(found, 3 if damaged else 0)


def _list_holders(session: Session, client: Client, shards: Sequence[str]) -> None:
    """All that keeps something of these shards."""
    now = client.consensus.now()

    def one(shard: str) -> list[dict[str, Any]]:
        state = client.inspect(shard).state
        people = holders(client.keepers(shard), state.since, now, client.prices)
        return [{"shard": shard, "times": state.times, **who} for who in people]

    found = session.each(shards, one)
    people = [who for each in found.done.values() for who in each]
    people.sort(key=lambda who: -who["garbage_size"] - who["history_size"])
    total = sum(who["dollars_month"] for who in people)
    said = f"{units.of(len(people), 'holder')} of {units.of(len(shards), 'shard')}, {units.dollars(total)} a month"
    session.answer({"holders": people, "failed": messages(found.failed)}, holders_table(people), said)
    session.exit(found)


def whose(client: Client, shards: Sequence[str]) -> dict[str, str]:
    """Whose the shards are whose names are minted. None where the catalog cannot be read: this is about shards."""
    from persist_lib.catalog.describe import is_minted
    from persist_lib.sources.kinds import owners_of

    if not any(map(is_minted, shards)):
        return {}
    try:
        owners = owners_of(client)
    except PersistError:
        return {}
    return {shard: owner for shard in shards if (owner := owners.of(shard))}


def remembered(client: Client, shards: Sequence[str]) -> dict[str, Remembered]:
    """Return what scrubs remember of these shards, by one listing; a failure is in it, and stops nothing else."""
    from persist_lib.maintain.scrub_memory import Remembered, known_damage

    if not shards:
        return {}
    try:
        return dict(known_damage(client.blob, [ShardId(shard) for shard in shards]).items())
    except PersistError as error:
        return dict.fromkeys(shards, Remembered(unreadable=error.message))


def damaged_shards(known: Mapping[str, Remembered]) -> list[str]:
    """Those of which a scrub found something damaged, and none found it sound since."""
    return sorted(shard for shard, memory in known.items() if memory.damaged)


def damage_notes(shards: Sequence[str]) -> list[str]:
    """A line that says that these shards are damaged; none for none."""
    return [f"damaged, as a scrub found: {', '.join(shards)}; `persist health` says more"] if shards else []


def damage_lines(shard: str, memory: Remembered | None) -> list[str]:
    """A line that says what is known, and one for each damaged batch. The first one is never empty."""
    if memory is None:
        return ["not known: no scrub has looked yet"]
    marks = sorted(memory.damaged.values(), key=lambda mark: mark.id)
    told = [f"batch {mark.lo}..{mark.hi}: {mark.says} (known since {units.moment(mark.since)})" for mark in marks]
    if memory.unreadable:
        again = f"`persist shard scrub {shard}` reads everything again"
        return [f"not known: what scrubs remember cannot be read ({memory.unreadable}); {again}", *told]
    return [units.of(len(marks), "batch") if marks else "none that a scrub found", *told]


def damage_value(memory: Remembered | None) -> dict[str, Any]:
    """The same for machines. `damaged` is None where it is not known."""
    if memory is None or (memory.unreadable and not memory.damaged):
        return {"damaged": None, "damaged_batches": []}
    marks = sorted(memory.damaged.values(), key=lambda mark: mark.id)
    batches = [{"id": list(mark.id), "says": mark.says, "since": mark.since} for mark in marks]
    return {"damaged": len(marks), "damaged_batches": batches}


def show(
    session: Session,
    shard: Shard,
    batches: Annotated[bool, typer.Option("--batches", help="List every batch, not only the levels.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Only a sentence for each duty: what it would do, and why.")
    ] = False,
    key: Annotated[
        str | None, typer.Option("--object", metavar="KEY", help="Only a sentence: why this object is still there.")
    ] = None,
) -> None:
    """Show one shard: frontiers, batches, what each reader and hold keeps, garbage, rollups, schema.

    Why does history not advance? See which readers and holds hold back [bold]since[/]. Why is garbage not deleted?
    See which hold back [bold]objects[/], and below that what the garbage waits for. The exit code is 3 where a scrub
    found damage.

    \b
    persist shard show orders
    persist shard show orders --batches
    persist shard show orders --why
    persist shard show orders --object orders/w0123456789abcdef/fedcba9876543210.parquet
    persist shard show orders --json | jq '.state.readers'
    """
    from persist_lib.core.pauses import PAUSABLE
    from persist_lib.core.plan.garbage import plan_garbage
    from persist_lib.maintain import census_of
    from persist_lib.maintain.duties import paused_among

    if why and key is not None:
        raise InvalidUsage("--why is about the shard, and --object about one of its objects: give one of them")
    with session.open() as client:
        if why or key is not None:
            said = client.explain(shard, key=key)
            told = {"shard": shard, "location": client.url, "why": [one._asdict() for one in said]}
            session.answer(told, *(_measure(one.about, one.says) for one in said))
            return
        version, now = client.inspect(shard), client.consensus.now()
        known, owner = remembered(client, [shard]).get(shard), whose(client, [shard]).get(shard, "")
        paused = paused_among(client.machine(shard), PAUSABLE)
        people = holders(client.keepers(shard), version.state.since, now, client.prices)
    counted, collection = (
        census_of(shard, version, now, client.policy(name=shard)),
        plan_garbage(version.state, version.seqno),
    )
    value = {
        "shard": shard, "owner": owner, "location": client.url, "seqno": version.seqno, "now": now,
        "state": state_value(version.state), "census": jsonable(counted), "held": jsonable(collection.held),
        "holders": people, "paused": paused, **damage_value(known),
    }  # fmt: skip
    title = Text.assemble((shard, "bold"), f"  v{version.seqno}", f"   {owner}" if owner else "")
    stopped = [_measure("paused", f"{duty}: {says}") for duty, says in paused.items()]
    session.answer(
        value, title, *stopped, *_sections(version, counted, collection, people, damage_lines(shard, known), batches)
    )
    if known is not None and known.damaged:
        raise typer.Exit(3)


def _sections(
    version: Version,
    census: Census,
    collection: GarbagePlan,
    people: list[dict[str, Any]],
    damaged: list[str],
    every_batch: bool,
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
    if people:
        yield holders_table(people, state.times)
    else:
        yield "no readers, no writers, no holds\n"
    yield from garbage_lines(census.garbage, census.garbage_size, collection)
    if census.retired:
        yield f"retired     {units.of(census.retired, 'id')}; `persist maintain --only orphans` sweeps what they left"


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


def holders(keepers: Sequence[Keeper], since: Antichain, now: int, prices: Prices) -> list[dict[str, Any]]:
    """What each reader, writer and hold keeps, for machines: the fields of a keeper, and what follows of them.

    `lease_ms` is what is left (negative: overdue; None: no lease), `holds_since` whether it is one of those that keep
    the shard's since, and `dollars_month` what the bytes cost that it alone keeps.
    """
    return [
        {
            **jsonable(one), "purpose": one.owner, "garbage": len(one.garbage), "batches": len(one.batches),
            "garbage_keys": list(one.garbage), "batch_ids": [list(each) for each in one.batches],
            "lease_ms": None if one.lease_until is None else one.lease_until - now,
            "holds_since": one.since is not None and one.since <= since,
            "dollars_month": storage_dollars(one.size, prices),
        } for one in keepers
    ]  # fmt: skip


def holders_table(people: list[dict[str, Any]], times: Unit | None = None) -> Fitted:
    """What has a lease or a hold, since when, and what that keeps."""
    many = {who.get("shard", "") for who in people} != {""}
    table = render.plain_table(*["shard"] * many, "who", "what", "there since", "lease", "since", "reads from", "keeps")
    for who in people:
        left = who["lease_ms"]
        lease = Text("none", "dim") if left is None else Text(f"{units.duration(left)} left")
        if left is not None and left < 0:
            lease = Text(f"overdue by {units.duration(-left)}", "yellow")
        since = "" if who["since"] is None else show_frontier(Antichain(*who["since"]), who.get("times", times))
        reads = "" if who["seqno"] is None else f"v{who['seqno']}"
        there = "" if who["set_ms"] is None else f"{'before ' * who['is_older']}{units.moment(who['set_ms'])}"
        what = " ".join(filter(None, (who["kind"], who["owner"])))
        table.add_row(*[who.get("shard", "")] * many, who["name"], what, there, lease, since, reads, _kept(who))
    return table


def _kept(who: dict[str, Any]) -> str:
    found = ["since"] if who["holds_since"] else []
    if who["garbage"]:
        found.append(f"{units.of(who['garbage'], 'object')} of garbage ({units.size(who['garbage_size'])})")
    if who["batches"]:
        found.append(f"history in {units.of(who['batches'], 'batch')} ({units.size(who['history_size'])})")
    if who["shared_size"]:
        found.append(f"with others {units.size(who['shared_size'])}")
    return ", ".join(found) or "-"


def garbage_lines(count: int, size: int, collection: GarbagePlan) -> Iterator[str]:
    """How much garbage there is, how much can go, and what the rest waits for."""
    if not count:
        yield "garbage     none"
        return
    yield f"garbage     {units.of(count, 'object')}, {units.size(size)}"
    if collection.keys:
        free = f"{units.of(len(collection.keys), 'object')}, {units.size(collection.size)}"
        yield f"  can go    {free}: `persist maintain --only garbage` deletes them"
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
