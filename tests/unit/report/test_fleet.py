"""The report of all shards: exact figures of known shards, for a few requests; nothing that is known is left out."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import msgspec
import pytest

import persist_lib as persist
from persist_lib import report
from persist_lib.core.budgets import Budget
from persist_lib.core.rules import Rule
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.health import Limits
from persist_lib.maintain.scrub_memory import Remembered
from persist_lib.report.fleet_report import Fleet, Row, Ruled
from tests.shards import TINY
from tests.unit.maintain import test_scrub, test_survey
from tests.unit.maintain.surveys import append, asked, make
from tests.worlds import SCHEMA, World

CLOCK = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")
DAY_S = 86_400
VOID = {"meta", "img"}


class Checked(HTMLParser):
    """HTML whose elements are closed in order; which there are, and which addresses they have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def rows(found: Fleet) -> dict[str, Row]:
    return {row.shard: row for row in found.rows}


def test_each_shard_is_a_line_with_the_figures_of_its_census(world: World) -> None:
    client = world.client(TINY)
    make(client, "calm", appends=1)
    make(client, "busy", appends=30)
    reader = client.open_reader("busy")
    client.compact("busy", policy=persist.Policy(weight=1e9, advance=0.01))
    make(client, "busy", appends=9)
    found = report.fleet(client)
    assert list(rows(found)) == ["busy", "calm"]
    for name, row in rows(found).items():
        census = client.census(name)
        assert (row.debt, row.batches, row.bound) == (census.debt, census.batches, census.batch_bound)
        assert (row.updates, row.size, row.seqno) == (census.updates, census.size, census.seqno)
        assert (row.dollars_month, row.collectable) == (census.dollars_month, census.collectable_size)
        assert row.held == census.garbage_size - census.collectable_size
        assert (row.upper, row.table, row.owner, row.kind) == (census.upper.time, name, "", "table")
    assert f"reader {reader.id} may still read" in rows(found)["busy"].held_by
    assert (found.total("updates"), found.waiting, found.gone, found.damaged, found.overdue) == (40, 0, 0, [], {})
    assert [row.shard for row in found.most(lambda row: row.held)] == ["busy"]


def test_dollars_are_those_of_all_that_is_stored_rollups_and_garbage_too(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", appends=30)
    client.roll_up("s", force=True)
    state = client.inspect("s").state
    client.prices = persist.Prices(gib_month=2.0**30)  # a dollar a byte
    (row,) = report.fleet(client).rows
    stored = state.size + sum(one.size for one in state.garbage.values())
    stored += sum(one.size for one in state.rollups.values())
    assert row.dollars_month == row.stored == stored == client.census("s").dollars_month
    assert stored > state.size


def test_known_damage_comes_oldest_first_and_an_unreadable_shard_says_why(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", "t", "broken", appends=4)
    test_scrub.damage(client, world, 2)
    client.scrub("s")
    mend = test_survey.damage(world, "broken")
    found = report.fleet(world.client())
    assert [row.shard for row in found.damaged] == ["s", "broken"]
    first = rows(found)["s"]
    assert (first.damaged, first.damaged_ms) == (1, world.clock() // 1_000_000)
    assert "bytes do not match the digest in the state" in first.damage
    assert rows(found)["broken"].unread.startswith("Corrupt: ")
    text = report.markdown(report.shown(found))
    assert "2 shards damaged or not readable" in text
    mend()


def test_what_scrubs_remember_and_cannot_be_read_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    make(client, "s")
    lost = {persist.ids.ShardId("s"): Remembered(unreadable="it is in a newer format")}
    monkeypatch.setattr("persist_lib.report.fleet_report.known_damage", lambda *_: lost)
    (row,) = report.fleet(client).damaged
    assert row.unread == "what scrubs remember cannot be read: it is in a newer format"


def test_overdue_duties_are_those_of_health_and_a_pause_is_said_beside_them(world: World) -> None:
    config = persist.Config(rollup_every=8)
    client = world.client(config)
    make(client, "a", "b", "calm")
    for name in "ab":
        with client.open_writer(name, SCHEMA) as write:
            append(write, 40)
    client.pause("b*", owner="ann", reason="the bucket is copied", only=["compaction"])
    found = report.fleet(client, Limits(overdue_s=3600))
    assert {duty: [row.shard for row in late] for duty, late in found.overdue.items()} == {"compaction": ["a", "b"]}
    assert rows(found)["b"].overdue["compaction"] == f"{rows(found)['a'].overdue['compaction']}, and it is paused"
    assert [row.shard for row in found.rows if row.paused] == ["b"]
    assert "compaction of b*: paused by ann" in rows(found)["b"].paused[0]


def test_a_minted_name_shows_whose_it_is_and_what_was_dropped_is_left_out(world: World) -> None:
    client = world.client()
    with client.controller() as controller:
        controller.create("orders", CLOCK, shards=2, mode="compare_and_append")
        controller.create("gone", CLOCK, shards=1, mode="compare_and_append")
        controller.drop("gone")
    client.table("plain", CLOCK)
    found = report.fleet(client)
    assert sorted(row.owner for row in found.only("orders").rows) == [
        "collection orders, rendition 1, shard 0", "collection orders, rendition 1, shard 1",
        "collection orders: renditions",
    ]  # fmt: skip
    assert found.gone == 2
    assert "gone" not in {row.table for row in found.rows}
    own = report.look(client, "orders")
    assert isinstance(own, Fleet)
    assert own.rows == found.only("orders").rows
    assert isinstance(report.look(client, "plain"), report.ShardPage)
    with pytest.raises(NotFound, match="Did you mean orders"):
        report.look(client, "order")
    with pytest.raises(NotFound, match="no shard, table or source '<script>'"):
        report.look(client, "<script>")


def test_a_thousand_shards_cost_a_few_requests_once_they_are_known(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n:04}" for n in range(1000)))
    first = report.fleet(client)
    assert len(report.shown(first, picture=True).picture) > 10_000
    assert len(first.rows) == 1000
    again: list[Fleet] = []
    idle = asked(world, lambda: again.append(report.fleet(client)))
    assert idle == {"list": 3, "heads": 1, "head": 2, "scan": 2}
    assert again[0].rows == first.rows
    make(client, "s0007", "s0011")
    moved = asked(world, lambda: report.fleet(client))
    assert sum(moved.values()) <= sum(idle.values()) + 2 * 3 + 2
    page = report.markdown(report.shown(first))
    assert len(page) < 20_000, "a thousand shards stay one page"


def test_rules_are_on_the_page_with_how_many_shards_have_them_and_what_is_spent(world: World) -> None:
    client = world.client(TINY)
    make(client, "a1", "a2", "b", appends=6)
    client.set_rules(
        [
            {"pattern": "a*", "bytes_day": 1 << 30, "still": "1 hour"}, {"pattern": "a1", "still": "2 hours"},
            {"pattern": "c*", "order": "newest"},
        ]
    )  # fmt: skip
    client.compact("a1")
    found = report.fleet(world.client(TINY))
    assert [(one.rule.pattern, one.shards) for one in found.rules] == [("a*", 2), ("a1", 1), ("c*", 0)]
    ((budget,), *others) = [one.budgets for one in found.rules]
    assert (budget.limit, others) == (1 << 30, [(), ()])
    assert budget.spent > 0
    (table,) = (one for one in report.shown(found).tables if one.title == "Rules")
    assert table.rows[0][:3] == ("a*", f"bytes_day {1 << 30}; still 1 hour", "2")
    assert table.rows[0][3].endswith(" KiB of 1.0 GiB")
    client.set_rules([])
    assert report.fleet(client).rules == ()


def test_shards_that_there_was_no_time_for_are_counted(world: World) -> None:
    client = world.client()
    make(client, "a", "b")
    found = report.fleet(client, Limits(seconds=0))
    assert found.waiting == 2
    assert "2 shards moved and were not looked at" in report.markdown(report.shown(found))


HOSTILE = "<script>alert(1)</script>|`x`\n](http://x)"


def test_what_people_wrote_is_text_and_never_markup() -> None:
    row = Row(
        shard=HOSTILE, table=HOSTILE, owner=HOSTILE, debt=5, held=7, held_by=HOSTILE, damaged=1, damaged_ms=5,
        damage=HOSTILE, overdue={"scrub": HOSTILE}, paused=(HOSTILE,), dollars_month=1.0,
    )  # fmt: skip
    ruled = Ruled(Rule(HOSTILE, quiet=(HOSTILE,)), 1, (Budget(HOSTILE, "bytes_day", 5, 7),))
    document = report.shown(Fleet(f"file:{HOSTILE}", 0, (row,), rules=(ruled,)), picture=True)
    text = report.html(document, lambda name: f'javascript:"{name}"')
    checked = Checked(text)
    assert "script" not in checked.seen
    assert not [url for url in checked.addresses if not url.startswith(("data:image/png;base64,", "javascript:"))]
    assert checked.seen <= {
        "html", "head", "meta", "title", "style", "body", "h1", "ul", "li", "p", "img", "table", "caption", "thead",
        "tbody", "tr", "th", "td", "a",
    }  # fmt: skip
    shown = report.markdown(document)
    assert "<script" not in shown
    assert not re.search(r"(?<!\\)[|`]", re.sub(r"^\||\|$| \| |\|[-:|]+\||data:\S+", "", shown, flags=re.MULTILINE))
    for line in shown.splitlines():
        assert "](http" not in line.replace("\\]", "")


def test_the_page_of_a_location_is_one_file_that_needs_no_other(world: World) -> None:
    client = world.client()
    make(client, "a")
    checked = Checked(report.html(report.shown(report.fleet(client), picture=True)))
    assert checked.addresses
    assert all(url.startswith("data:image/png;base64,") for url in checked.addresses)


def test_each_line_links_to_its_shard() -> None:
    fleet = Fleet("memory:", 0, (Row(shard="a_b", table="a_b", debt=5),))
    text = report.markdown(report.shown(fleet), lambda name: f"/assets/x?partition={name}")
    assert "| [a\\_b](/assets/x?partition=a_b) |" in text
    assert '<a href="/x?a_b">a_b</a>' in report.html(report.shown(fleet), lambda name: f"/x?{name}")


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "persist_lib.report.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    empty = Fleet("memory:", 0, ())
    assert report.html(report.shown(empty))
    with pytest.raises(InvalidUsage, match=re.escape("pip install 'persist-lib[pictures]'")):
        report.shown(empty, picture=True)


def test_it_is_json_as_a_whole(world: World) -> None:
    client = world.client()
    make(client, "a")
    found = report.fleet(client)
    assert msgspec.json.decode(msgspec.json.encode(found))["rows"][0]["shard"] == "a"
