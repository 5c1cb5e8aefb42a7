"""Tables of shards and plans: one look for the `persist` command, the demo and other programs.

Functions here open nothing: they take values that the library returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.text import Text

from persist_lib.cli.table_layout import Fitted
from persist_lib.core import units
from persist_lib.times import Times, Unit, show_frontier, show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.core.plan.compaction import Plan
    from persist_lib.core.plan.requests import Request
    from persist_lib.core.trace import Level
    from persist_lib.frontier import Antichain
    from persist_lib.maintain import Census

LEVELS_SHOWN = 5
"""How many size classes a cell names; the others are summed up."""
BATCHES_NAMED = 4
"""How many batches of a request a cell names one by one."""


def plain_table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Fitted:
    """An empty table in the common style; the columns in `right` are numbers."""
    return Fitted(columns, frozenset(right), title)


def labelled(*lines: tuple[str, str]) -> Fitted:
    """A table of two columns without heads: what something is, and its text. Those without a text are left out."""
    table = plain_table("", "")
    for label, text in lines:
        if text:
            table.add_row(label, text)
    return table


def shards_table(
    censuses: Iterable[Census], failed: Iterable[tuple[str, str]] = (), owners: Mapping[str, str] = MappingProxyType({})
) -> Fitted:  # fmt: skip
    """One line a shard: frontiers, contents, batches by level, debt, garbage, and what holds history back.

    `failed` are pairs of a shard that could not be read and the reason, `owners` whose the shards are whose names are
    minted: a column of its own, if there are any.
    """
    table = plain_table(
        "shard", *["of"] * bool(owners), "since", "upper", "updates", "size", "batches", "by level", "debt", "garbage",
        "held by",
        right=("since", "upper", "updates", "size", "batches", "debt", "garbage"),
    )  # fmt: skip

    def of(shard: str) -> list[str]:
        return [owners.get(shard, "")] if owners else []

    for census in censuses:
        table.add_row(
            census.shard, *of(census.shard), _shown(census, census.since), _shown(census, census.upper),
            units.number(census.updates), units.size(census.size), _batches(census), by_level(census.levels),
            _debt(census), _garbage(census), _holders(census),
        )  # fmt: skip
    for name, why in failed:
        table.add_row(name, *of(name), "", "", "", "", "", Text(f"cannot be read: {why}", "red"), "", "", "")
    return table


def compare_table(before: Sequence[Census], after: Sequence[Census]) -> Fitted:
    """The same shards at two moments, measure by measure. A shard that is in only one of the two is left out."""
    table = plain_table("shard", "", "before", "after", right=("before", "after"))
    later = {census.shard: census for census in after}
    for first in before:
        second = later.get(first.shard)
        if second is not None:
            _compare(table, first, second)
    return table


def plan_table(plan: Plan, times: Unit | None = None) -> Fitted:
    """What a compaction would replace, why, and at what price; then what it leaves alone, and why.

    `times` is the clock that the shard's times are.
    """
    table = plain_table(
        "what", "batches", "times", "as of", "updates", "bytes", "requests", "price", "why",
        right=("updates", "bytes", "requests", "price"),
    )  # fmt: skip
    for request in plan.requests:
        table.add_row(*_request_cells(request, times))
    if len(plan.requests) > 1:
        table.add_section()
        cost = plan.cost
        table.add_row(
            "all", units.of(sum(len(request.inputs) for request in plan.requests), "batch"), "", "",
            units.number(plan.debt), units.size(cost.bytes_read), units.number(cost.gets + cost.puts),
            units.dollars(cost.dollars), "", style="bold",
        )  # fmt: skip
    for skipped in plan.skipped:
        table.add_row("leave", batch_ids(skipped.ids), "", "", "", "", "", "", skipped.why, style="dim")
    return table


def census_table(census: Census, damaged: Sequence[str] = (), owner: str = "") -> Fitted:
    """Everything that a census counts, a line each, what is known of damage, and whose the shard is."""
    table = plain_table("", f"{census.shard} ({owner})" if owner else census.shard)
    for name, value in census_lines(census):
        table.add_row(name, value)
    for place, text in enumerate(damaged):
        table.add_row("" if place else "damaged", text)
    return table


def census_lines(census: Census) -> list[tuple[str, str]]:
    """Everything that a census counts, as pairs of a name and a text."""
    n, size, distance = units.number, units.size, Times(census.times, lambda: 0).show_distance
    newest = census.seqno - census.rollup_lag
    return [
        ("version", f"v{census.seqno}" + (", finished for good" if census.finished else "")),
        ("times", f"since {_shown(census, census.since)}, upper {_shown(census, census.upper)}"),
        ("updates", f"{n(census.updates)} in {size(census.size)}, of which {size(census.inline_size)} inline"),
        ("batches", f"{n(census.batches)}, at rest at most {n(census.batch_bound)}; {n(census.empty_batches)} empty"),
        *([("ahead", f"{size(census.ahead)} of contents beside them, for reads")] if census.ahead else []),
        ("by level", by_level(census.levels, shown=64)),
        ("objects", f"{units.of(census.parts, 'part')} in {units.of(census.runs, 'sorted run')}, inline ones included"),
        ("debt", f"{units.of(census.debt, 'update')} in {units.of(census.debt_requests, 'request')}"),
        ("garbage", f"{units.of(census.garbage, 'object')}, {size(census.garbage_size)}"),
        ("can go now", f"{units.of(census.collectable, 'object')}, {size(census.collectable_size)}"),
        ("leases", f"{units.of(census.writers, 'writer')}, {units.of(census.readers, 'reader')}"),
        ("overdue", n(census.overdue)),
        ("retired", f"{units.of(census.retired, 'id')}, not yet swept"),
        ("holds", n(census.holds)),
        *([("producers", n(census.producers))] if census.producers else []),
        ("retention", "none" if census.retention is None else f"{distance(census.retention)} behind upper"),
        ("rollups", "none yet" if not census.rollups else
                    f"{n(census.rollups)}, the newest at v{newest}, {units.of(census.rollup_lag, 'transition')} ago"),
        ("oldest state read", f"{units.of(census.seqno_held, 'transition')} ago" if census.seqno_held else "this one"),
        ("written", _written(census)),
        ("fingerprint", f"{census.fingerprint:016x}"),
        ("storage", f"{units.dollars(census.dollars_month)} a month"),
    ]  # fmt: skip


def _written(census: Census) -> str:
    """The bytes ever written, and the write amplification."""
    text = f"{units.size(census.appended_bytes)} appended, {units.size(census.maintained_bytes)} by compactions"
    amplification = census.write_amplification
    return text if amplification is None else f"{text}: {amplification:.2f} times as much"


def by_level(levels: Sequence[Level], shown: int = LEVELS_SHOWN) -> str:
    """The trace by size class in one cell: `1·2¹⁸ 3·2¹² 40·2⁰`."""
    filled = [level for level in levels if level.level >= 0]
    cells = [f"{level.batches}·{units.size_class(level.level)}" for level in filled[:shown]]
    rest = sum(level.batches for level in filled[shown:])
    return " ".join([*cells, f"+{rest} smaller"] if rest else cells)


def batch_ids(ids: Sequence[tuple[int, int]]) -> str:
    """Batches by their id ranges; of many, which are contiguous, only the first and the last id."""
    if len(ids) <= BATCHES_NAMED:
        return " ".join(f"{lo}..{hi}" for lo, hi in ids)
    return f"{ids[0][0]}..{ids[-1][1]} ({len(ids)})"


def _request_cells(request: Request, times: Unit | None) -> list[str]:
    from persist_lib.core.plan.requests import REASONS

    cost = request.cost
    return [
        request.reason, batch_ids(request.ids), f"[{_time(request.lower, times)}, {_time(request.upper, times)})",
        show_frontier(request.since, times), units.number(request.count), units.size(request.size),
        units.number(cost.gets + cost.puts),
        units.dollars(cost.dollars), REASONS[request.reason],
    ]  # fmt: skip


def _time(frontier: Antichain, times: Unit | None) -> str:
    return "∞" if frontier.time is None else show_time(frontier.time, times)


def _shown(census: Census, frontier: Antichain) -> str:
    return show_frontier(frontier, census.times)


def _batches(census: Census) -> Text:
    text = f"{units.number(census.batches)} of {units.number(census.batch_bound)}"
    return Text(text, "red" if census.batches > census.batch_bound else "")


def _debt(census: Census) -> Text:
    return Text(units.number(census.debt) if census.debt else "-", "yellow" if census.debt else "dim")


def _garbage(census: Census) -> Text:
    if not census.garbage:
        return Text("-", "dim")
    return Text(
        f"{units.number(census.garbage)}, {units.size(census.garbage_size)}", "yellow" if census.collectable else ""
    )


def _holders(census: Census) -> Text:
    if census.finished:
        return Text("finished", "dim")
    found = [units.of(count, noun) for count, noun in ((census.readers, "reader"), (census.holds, "hold")) if count]
    text = Text(", ".join(found) or "nothing", "" if found else "dim")
    if census.overdue:
        text.append(f", {census.overdue} overdue", "yellow")
    return text


def _compare(table: Fitted, first: Census, second: Census) -> None:
    """Add a line for each measure; lines whose values are equal are dimmed."""
    name = first.shard
    for what, was, now in (
        ("since", _shown(first, first.since), _shown(second, second.since)),
        ("upper", _shown(first, first.upper), _shown(second, second.upper)),
        ("batches", units.number(first.batches), units.number(second.batches)),
        ("by level", by_level(first.levels), by_level(second.levels)),
        ("updates", units.number(first.updates), units.number(second.updates)),
        ("size", units.size(first.size), units.size(second.size)),
        ("debt", units.number(first.debt), units.number(second.debt)),
        ("garbage", _garbage(first).plain, _garbage(second).plain),
        ("rollup lag", units.number(first.rollup_lag), units.number(second.rollup_lag)),
        ("overdue", units.number(first.overdue), units.number(second.overdue)),
        ("storage a month", units.dollars(first.dollars_month), units.dollars(second.dollars_month)),
    ):
        table.add_row(name, what, was, now, style="dim" if was == now else None)
        name = ""
    table.add_section()
