"""The page of a shard: each day by its log, exactly; what was truncated is counted, and no day is made up."""

from __future__ import annotations

import datetime as dt

import pytest

import persist_lib as persist
from persist_lib import report
from persist_lib.errors import Corrupt, InvalidUsage, NotFound
from persist_lib.report import shard_page
from persist_lib.report.shard_page import DAY_MS, ShardPage
from tests.shards import TINY
from tests.unit.maintain import test_scrub, test_survey
from tests.unit.maintain.surveys import append, asked, make
from tests.unit.report.test_fleet import Checked
from tests.worlds import SCHEMA, World

DAY_S = 86_400


def actions(page: ShardPage) -> dict[str, report.Action]:
    return {one.duty: one for one in page.actions}


def aged(world: World) -> persist.Client:
    """Four appends on one day; nothing on the next; a compaction, and then three appends on the third."""
    client = world.client(TINY)
    make(client, "s", appends=4)
    world.clock.advance(2 * DAY_S)
    client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
    make(client, "s", appends=3)
    return client


def test_each_day_has_what_the_log_says(world: World) -> None:
    client = aged(world)
    client.prices = persist.Prices(put=1.0, commit=100.0, gib_month=0.0)
    page, state = report.shard(client, "s"), client.inspect("s").state
    today = world.clock() // 1_000_000_000 // DAY_S
    names = [(dt.date(1970, 1, 1) + dt.timedelta(days=today + n)).isoformat() for n in (-2, -1, 0)]
    first, idle, last = page.days
    assert [day.day for day in page.days] == names
    assert (page.missing, page.unread, [day.is_whole for day in page.days]) == (0, 0, [True] * 3)
    assert (first.levels, first.batches, idle.levels, last.levels) == ({0: 4}, 4, {0: 4}, {0: 3, 2: 1})
    # Create, register, four appends and retire; then the compactor's register and retire around its own, and five.
    assert (first.commits, idle.commits, first.commits + last.commits) == (7, 0, page.census.seqno)
    assert (first.puts, idle.puts, last.puts) == (4, 0, 4)
    assert (first.deletes, last.deletes) == (0, 0)
    assert first.rewritten == idle.appended == idle.rewritten == 0
    assert first.appended + last.appended == state.appended_bytes
    assert last.rewritten == state.maintained_bytes > 0
    assert (last.stored, last.garbage) == (report.fleet(client).rows[0].stored, page.census.garbage_size)
    assert (first.stored, first.garbage) == (first.appended, 0)
    assert (first.dollars, idle.dollars, last.dollars) == (704.0, 0.0, 4.0 + 100 * last.commits)


def test_storage_costs_a_thirtieth_of_a_month_each_day(world: World) -> None:
    client = aged(world)
    client.prices = persist.Prices(put=0.0, gib_month=30 * 2.0**30)  # a dollar a byte and day
    for day in report.shard(client, "s").days:
        assert day.dollars == pytest.approx(day.stored)


def test_a_page_goes_back_as_many_days_as_asked(world: World) -> None:
    client = aged(world)
    assert report.shard(client, "s", 2).days[0].commits == 0
    assert [day.batches for day in report.shard(client, "s", 1).days] == [4]
    for wrong in (0, 367, True):
        with pytest.raises(InvalidUsage, match="days"):
            report.shard(client, "s", wrong)
    with pytest.raises(NotFound, match="no shard"):
        report.shard(client, "t")


def test_what_was_truncated_is_counted_and_no_day_is_made_up(world: World) -> None:
    client = aged(world)
    before = client.inspect("s").seqno
    client.maintain("s")
    world.clock.advance(DAY_S)
    make(client, "s", appends=2)
    page = report.shard(client, "s")
    oldest = world.inner.consensus.scan("s", 0, 1)[0]  # type: ignore[arg-type]
    assert oldest.seqno > 1
    assert (page.missing, page.unread) == (oldest.seqno - 1, 0)
    assert page.missing + sum(day.commits for day in page.days) + 1 == page.census.seqno
    assert page.missing >= before - 1, "the days before are not known any more"
    assert [day.is_whole for day in page.days] == [False, True]
    assert page.known_ms // DAY_MS == world.clock() // 1_000_000 // DAY_MS - 1
    text = report.markdown(report.shown(page))
    assert f"{page.missing} transitions before that are truncated from the log, so what happened" in text
    assert f"{page.days[0].day}, in part" in text


def test_rows_that_are_not_read_are_counted_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client(persist.Config(rollup_every=8))
    with client.open_writer("s", SCHEMA) as write:
        append(write, 60)
    monkeypatch.setattr(shard_page.fetch_log, "__defaults__", (20,))
    page = report.shard(client, "s")
    assert page.missing == 0
    assert page.unread + sum(day.commits for day in page.days) + 1 == page.census.seqno
    assert 20 <= sum(day.commits for day in page.days) <= 20 + 8
    assert not page.days[0].is_whole
    assert "are in the log and were not read" in report.markdown(report.shown(page))


def test_each_duty_says_what_it_did_last_and_why_the_next_is_not_due(world: World) -> None:
    client = aged(world)
    client.scrub("s")
    client.survey(done={"scrub": ["s"]})
    now = world.clock() // 1_000_000
    found = actions(report.shard(client, "s"))
    expected = ["leases", "retention", "compaction", "publication", "rollups", "garbage", "orphans", "scrub", "census"]
    assert list(found) == expected
    assert found["compaction"].last_ms == now
    assert (found["rollups"].last_ms, found["rollups"].seqno) == (None, None)
    assert (found["scrub"].last_ms, found["scrub"].why) == (now, "nothing is due: the shard has not moved since then")
    assert found["census"].why == "it is due: surveys remember no pass that did it"
    assert found["retention"].why == "there is no policy: all history is kept until something gives it up"
    make(client, "s")
    assert actions(report.shard(client, "s"))["scrub"].why == "it is due: 3 transitions since then"
    client.set_retention("s", 2)
    client.retain("s")
    assert actions(report.shard(client, "s"))["retention"].seqno == client.inspect("s").seqno


def test_an_audit_is_due_again_after_a_week_also_where_nothing_moved(world: World) -> None:
    client = aged(world)
    client.survey(done={"orphans": ["s"]})
    world.clock.advance(8 * DAY_S)
    assert "it was done 8 days ago" in actions(report.shard(client, "s"))["orphans"].why


def test_a_paused_duty_says_who_paused_it(world: World) -> None:
    client = aged(world)
    client.pause("s", owner="ann", reason="the bucket is copied", only=["compaction"])
    found = actions(report.shard(client, "s"))
    assert found["compaction"].paused.startswith("paused by ann since")
    assert found["scrub"].paused == ""
    assert "paused by ann" in report.markdown(report.shown(report.shard(client, "s")))


def test_known_damage_and_holders_are_on_it(world: World) -> None:
    client = aged(world)
    test_scrub.damage(client, world, 0)
    client.scrub("s")
    client.open_reader("s", purpose="<script>alert(1)</script>")
    page = report.shard(client, "s")
    assert page.damage[0].startswith("batch 0..4: ")
    assert page.damaged_ms == world.clock() // 1_000_000
    assert [one.kind for one in page.holders] == ["reader", "rollup"]
    document = report.shown(page, picture=True)
    assert "script" not in Checked(report.html(document)).seen
    assert document.picture.startswith(b"\x89PNG")
    assert len(document.picture) < 100_000


def test_a_state_that_cannot_be_read_is_damage(world: World) -> None:
    aged(world)
    test_survey.damage(world, "s")
    with pytest.raises(Corrupt):
        report.shard(world.client(), "s")


def test_a_page_costs_a_few_requests_and_changes_nothing(world: World) -> None:
    client = aged(world)
    client.survey()
    before = world.bytes("s")
    assert sum(asked(world, lambda: report.shard(client, "s")).values()) <= 20
    assert world.bytes("s") == before


def test_a_finished_shard_has_a_page(world: World) -> None:
    client = aged(world)
    client.finish("s")
    page = report.shard(client, "s")
    assert {one.why for one in page.actions} == {"it is finished for good, and only its log and a rollup are kept"}
    assert page.days[-1].batches == 0


def test_a_page_says_by_what_it_is_looked_after_and_where_that_is_from(world: World) -> None:
    client = world.client(TINY.model_copy(update={"compaction_ahead": 0.5}))
    make(client, "s", appends=8)
    assert report.shard(client, "s").census.debt > 0
    client.set_rules([{"pattern": "s", "compaction_weight": 0.001}, {"pattern": "*", "bytes_day": 1024}])
    page = report.shard(client, "s")
    assert page.census.debt == 0, "as the rule says, and as upkeep does"
    (table,) = (one for one in report.shown(page).tables if one.title == "How it is looked after")
    assert table.rows == (
        ("compaction_weight", "0.001", "the rule 's'"), ("compaction_advance", "0.333333", "default"),
        ("compaction_ahead", "0.5", "settings"), ("bytes_day", "1024; 0 B of 1.0 KiB today", "the rule '*'"),
    )  # fmt: skip
