"""A report as a page: lines, tables and a picture; and that page as Markdown and as one HTML file that needs no other.

What people named, or wrote as a reason, is text on it and never markup.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from persist_lib.core import units
from persist_lib.core.plan.keepers import Keeper
from persist_lib.location.scheme import with_extra
from persist_lib.report.fleet_report import Fleet, Row
from persist_lib.report.shard_page import ShardPage
from persist_lib.report.simulated import Comparison, rows_of
from persist_lib.times import show_frontier, show_time

MOST = 10
"""How many shards each table of a fleet has."""
Link = Callable[[str], str]
"""The address of a shard's page; empty where it has none."""
_MARKUP = re.compile(r"([\\`*_\[\]|~#])")
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1f2328 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } caption { text-align: left; font-weight: 600 }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #d8dee4; text-align: left; vertical-align: top }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums } img { max-width: 100% }
"""


class Table(NamedTuple):
    """A table of texts. Columns in `numbers` are right-aligned; with `of_shards` the first one has names of shards.

    `more` rows are left out, and `empty` is what is said where there are none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    of_shards: bool = True
    more: int = 0
    empty: str = "none"

    @property
    def left_out(self) -> str:
        """What is said of the rows that are left out."""
        return f"and {units.number(self.more)} more" if self.more else ""


class Document(NamedTuple):
    """A page. `picture` is a PNG; empty for none. `alt` says in words what is drawn."""

    title: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    picture: bytes = b""
    alt: str = ""


def shown(found: Fleet | ShardPage | Comparison, *, most: int = MOST, picture: bool = False) -> Document:
    """The page of a report. `most` is how many shards each table of a fleet has.

    With `picture` it has one, which needs matplotlib: InvalidUsage says how to install it where it is missing.
    """
    draw = with_extra("persist_lib.report.pictures", "a picture", "pictures").draw if picture else None
    if isinstance(found, Comparison):
        document = _of_comparison(found)
    else:
        document = _of_fleet(found, most) if isinstance(found, Fleet) else _of_shard(found)
    return document._replace(picture=draw(found) if draw is not None else b"")


def markdown(document: Document, link: Link = lambda _: "") -> str:
    """The page as Markdown, as Dagster shows it, with its picture in it."""

    def cells(table: Table, row: tuple[str, ...]) -> Iterator[str]:
        for place, text in enumerate(row):
            url = link(text) if table.of_shards and not place else ""
            yield f"[{_plain(text)}]({url})" if url else _plain(text)

    def parts() -> Iterator[str]:
        yield f"### {_plain(document.title)}"
        yield "\n".join(f"- {_plain(line)}" for line in document.lines)
        if document.picture:
            yield f"![{_plain(document.alt)}]({_data_uri(document.picture)})"
        for table in document.tables:
            yield f"#### {_plain(table.title)}"
            if not table.rows:
                yield table.empty
                continue
            rule = "|".join("---:" if name in table.numbers else "---" for name in table.columns)
            rows = "\n".join(f"| {' | '.join(cells(table, row))} |" for row in table.rows)
            yield f"| {' | '.join(table.columns)} |\n|{rule}|\n{rows}"
            if table.more:
                yield table.left_out

    return "\n\n".join(parts()) + "\n"


def html(document: Document, link: Link = lambda _: "") -> str:
    """The page as one file of HTML: no script, and nothing that is loaded from elsewhere."""

    def cell(table: Table, place: int, text: str) -> str:
        url = link(text) if table.of_shards and not place else ""
        inner = f'<a href="{escape(url)}">{escape(text)}</a>' if url else escape(text)
        return f'<td class="n">{inner}</td>' if table.columns[place] in table.numbers else f"<td>{inner}</td>"

    def parts() -> Iterator[str]:
        yield f"<h1>{escape(document.title)}</h1>\n<ul>"
        yield from (f"<li>{escape(line)}</li>" for line in document.lines)
        yield "</ul>"
        if document.picture:
            yield f'<p><img src="{_data_uri(document.picture)}" alt="{escape(document.alt)}"></p>'
        for table in document.tables:
            heads = (f'<th class="n">{escape(n)}</th>' if n in table.numbers else f"<th>{escape(n)}</th>"
                     for n in table.columns)  # fmt: skip
            yield f"<table><caption>{escape(table.title)}</caption><thead><tr>{''.join(heads)}</tr></thead><tbody>"
            for row in table.rows:
                yield f"<tr>{''.join(cell(table, place, text) for place, text in enumerate(row))}</tr>"
            note = table.left_out or ("" if table.rows else table.empty)
            yield f'<tr><td colspan="{len(table.columns)}">{escape(note)}</td></tr>' if note else ""
            yield "</tbody></table>"

    body = "\n".join(filter(None, parts()))
    head = f'<meta charset="utf-8"><title>{escape(document.title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _plain(text: str) -> str:
    """A text that Markdown shows as it is, on one line."""
    return _MARKUP.sub(r"\\\1", escape(" ".join(text.split()), quote=False))


def _data_uri(picture: bytes) -> str:
    return f"data:image/png;base64,{b64encode(picture).decode()}"


def _of_fleet(found: Fleet, most: int) -> Document:
    damaged, overdue = found.damaged, found.overdue
    counted = {
        f"{units.of(found.waiting, 'shard')} moved and were not looked at, for lack of time": found.waiting,
        f"{units.of(found.gone, 'shard')} of what was dropped are left out": found.gone,
        "overdue: " + ", ".join(f"{duty} on {units.of(len(rows), 'shard')}" for duty, rows in overdue.items()): overdue,
    }  # fmt: skip
    stored, dollars = units.size(found.total("stored")), units.dollars(found.total("dollars_month"))
    debt, held, free = (
        units.number(found.total("debt")),
        *(units.size(found.total(of)) for of in ("held", "collectable")),
    )
    shards = units.of(len(found.rows), "shard")
    lines = (
        f"{shards}, {stored}, {dollars} a month for storage, as of {units.moment(found.now)}",
        f"{debt} updates of debt, {held} of garbage wait, {free} can go now",
        f"{units.of(len(damaged), 'shard')} damaged or not readable" if damaged else "no damage is known",
        *(line for line, is_said in counted.items() if is_said),
    )
    late = [(row, duty, row.overdue[duty]) for duty, rows in overdue.items() for row in rows[:most]]
    paused = found.most(lambda row: len(row.paused))
    tables = (
        _ranked(
            "Damage, oldest first", damaged, most,
            ("batches", lambda row: units.number(row.damaged)),
            ("known since", lambda row: "" if row.damaged_ms is None else units.moment(row.damaged_ms)),
            ("what", lambda row: row.damage or row.unread),
        ),
        Table("Duties overdue", ("shard", "whose", "duty", "what tells so"),
              tuple((row.shard, row.owner, duty, says) for row, duty, says in late),
              more=sum(map(len, overdue.values())) - len(late)),
        _ranked(
            "Debt", found.most(lambda row: row.debt), most,
            ("debt", lambda row: units.number(row.debt)), ("of updates", lambda row: units.number(row.updates)),
            ("batches", lambda row: units.number(row.batches)), ("at rest", lambda row: units.number(row.bound)),
        ),
        _ranked(
            "Dollars a month", found.most(lambda row: row.dollars_month), most,
            ("dollars", lambda row: units.dollars(row.dollars_month)),
            ("stored", lambda row: units.size(row.stored)), ("updates", lambda row: units.number(row.updates)),
            empty="storage costs nothing here",
        ),
        _ranked(
            "Garbage that waits", found.most(lambda row: row.held), most,
            ("held", lambda row: units.size(row.held)), ("for", lambda row: row.held_by),
        ),
        _ranked("Paused", paused, most, ("pauses", lambda row: "; ".join(row.paused))),
        _rules(found),
    )  # fmt: skip
    alt = "Bars of the shards with most debt, dollars a month, garbage that waits, and what is damaged or overdue"
    return Document(f"Shards of {found.location}", lines, tables, alt=alt)


def _of_comparison(found: Comparison) -> Document:
    names = ("", *(one.policy for one in found.found))
    days = found.span_ms / 86_400_000
    lines = (
        f"{units.of(found.appends, 'append')} over {days:.1f} days, once more under each policy, without data",
        *found.assumed,
        f"a read of 1x decodes each row once; dollars are of 30 days like these, with {found.reads_a_day:g} reads each",
    )  # fmt: skip
    table = Table("Policies", names, tuple(rows_of(found)), frozenset(names[1:]), of_shards=False)
    alt = "Batches after each append, and what a read of the newest contents does, under each policy"
    return Document(f"Policies for shard {found.shard} of {found.location}", lines, (table,), alt=alt)


RIGHT = frozenset({"batches", "debt", "of updates", "at rest", "dollars", "stored", "updates", "held"})


def _ranked(
    title: str, rows: list[Row], most: int, *columns: tuple[str, Callable[[Row], str]], empty: str = "none"
) -> Table:
    """The first rows, each with the shard's name, whose it is, and these columns."""
    names = ("shard", "whose", *(name for name, _ in columns))
    texts = tuple((row.shard, row.owner, *(show(row) for _, show in columns)) for row in rows[:most])
    return Table(title, names, texts, RIGHT, more=max(0, len(rows) - most), empty=empty)


def _of_shard(page: ShardPage) -> Document:
    census, times = page.census, page.census.times
    since, upper = show_frontier(census.since, times), show_frontier(census.upper, times)
    begins = "from its first transition on"
    if page.missing or page.unread:
        lost = Counter({"truncated from the log": page.missing, "in the log and were not read": page.unread})
        told = " and ".join(f"{units.of(count, 'transition')} before that are {how}" for how, count in (+lost).items())
        begins = f"from {units.moment(page.known_ms)} on: {told}, so what happened in them is not known"
    batches = f"{units.of(census.batches, 'batch')} (at rest at most {census.batch_bound})"
    cost = f"{units.size(census.size)}, {units.dollars(census.dollars_month)} a month for storage"
    garbage = f"{units.size(census.garbage_size)}, of which {units.size(census.collectable_size)} can go now"
    damaged = [f"damaged: {one}" for one in page.damage]
    if page.damaged_ms is not None:
        damaged.append(f"the damage is known since {units.moment(page.damaged_ms)}")
    if page.unknown_damage:
        damaged.append(f"what scrubs found is not known: {page.unknown_damage}")
    lines = (
        *([page.owner] if page.owner else []),
        f"v{census.seqno} as of {units.moment(page.now)}; history from {since} to {upper}",
        f"{units.of(census.updates, 'update')} in {batches}, {cost}",
        f"debt {units.of(census.debt, 'update')}; garbage {garbage}", *damaged,
        f"the days are {begins}; what was only read is in no log, and in no figure",
    )  # fmt: skip
    alt = "Batches by level, bytes, writes and dollars of each day"
    tables = _duties(page), _days(page), _levels(page), _holders(page), _policy(page)
    return Document(f"Shard {page.shard} of {page.location}", lines, tables, alt=alt)


def _rules(found: Fleet) -> Table:
    rows = (
        (one.rule.pattern, one.rule.shown, units.number(one.shards), ", ".join(each.shown for each in one.budgets))
        for one in found.rules
    )
    names = ("names", "says", "shards", "spent today")
    empty = "none: persist config --rules FILE sets them"
    return Table("Rules", names, tuple(rows), frozenset({"shards"}), of_shards=False, empty=empty)


def _policy(page: ShardPage) -> Table:
    said = (one for one in page.policy if one.value is not None)
    rows = tuple((one.field, f"{one.shown}; {one.spent} today" if one.spent else one.shown, one.source) for one in said)
    return Table("How it is looked after", ("what", "value", "from"), rows, of_shards=False)


def _duties(page: ShardPage) -> Table:
    rows = (
        (one.duty, "not as far as is known" if one.last_ms is None else f"{units.moment(one.last_ms)}, v{one.seqno}",
         f"{one.paused}; else {one.why}" if one.paused else one.why)
        for one in page.actions
    )  # fmt: skip
    return Table("Duties", ("duty", "did something last", "next, and why"), tuple(rows), of_shards=False)


def _days(page: ShardPage) -> Table:
    names = (
        "day",
        "batches",
        "debt",
        "stored",
        "garbage",
        "appended",
        "rewritten",
        "puts",
        "deletes",
        "commits",
        "dollars",
    )
    rows = (
        (
            one.day if one.is_whole else f"{one.day}, in part", units.number(one.batches), units.number(one.debt),
            units.size(one.stored), units.size(one.garbage), units.size(one.appended), units.size(one.rewritten),
            *map(units.number, (one.puts, one.deletes, one.commits)), units.dollars(one.dollars),
        )
        for one in reversed(page.days)
    )  # fmt: skip
    return Table("Days, by the store's clock, UTC", names, tuple(rows), frozenset(names[1:]), of_shards=False)


def _levels(page: ShardPage) -> Table:
    names = ("level", "batches", "updates", "bytes")
    rows = (
        (units.size_class(one.level), units.number(one.batches), units.number(one.updates), units.size(one.size))
        for one in page.census.levels
    )
    return Table("Batches by level", names, tuple(rows), frozenset(names[1:]), of_shards=False)


def _holders(page: ShardPage) -> Table:
    times = page.census.times

    def row(one: Keeper) -> tuple[str, ...]:
        there = "" if one.set_ms is None else f"{'before ' * one.is_older}{units.moment(one.set_ms)}"
        lease = "" if one.lease_until is None else units.moment(one.lease_until)
        since = "" if one.since is None or one.since.time is None else show_time(one.since.time, times)
        return (one.name, " ".join(filter(None, (one.kind, one.owner))), since, there, lease, units.size(one.size))

    names = ("who", "what", "keeps from", "there since", "lease until", "keeps alone")
    return Table("Holds and leases", names, tuple(map(row, page.holders)), frozenset({"keeps alone"}), of_shards=False)
