"""Budgets a day: what a rule allows compaction to read and write, counted before it begins, for all processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core.budgets import KEPT_CHARGES, KEPT_DAYS, Budget, Entry, Spent, charge, exhausted
from persist_lib.core.cost import S3_LIST, Cost
from persist_lib.core.plan.compaction import Skipped
from persist_lib.core.rules import DAY_MS, Told
from persist_lib.errors import Corrupt, Damage, NewerFormat, Paused
from persist_lib.format.pause_list import SPENT_FORM, SPENT_PREFIX
from tests.framing import framed
from tests.servers import s3_url, use_test_credentials
from tests.shards import TINY, filled
from tests.unit.maintain import test_scrub
from tests.unit.maintain.surveys import Rival, asked, make
from tests.worlds import World

SPENT = Spent((Entry(20_000, "bytes_day", "orders*", 5000, 7), Entry(20_001, "dollars_day", "*", 0.25, 8)), (3, 9))
GOLDEN = (
    "5053546201ab9cdfa3a1b7b54abfd483393d2c1741929295cd4e20a962797465735f646179a76f72646572732acd13880795cd4e21ab646f"
    "6c6c6172735f646179a12acb3fd000000000000008920309"
)


def spent_today(client: persist.Client) -> float:
    (budget,) = client.budgets()
    return budget.spent


def test_shards_of_a_rule_spend_together_until_the_day_ends(world: World) -> None:
    client = world.client(TINY)
    for name in ("a", "b", "free"):
        filled(client, 8, shard=name)
    client.set_rules([{"pattern": "[ab]", "bytes_day": 1}])
    assert client.budgets() == (Budget("[ab]", "bytes_day", 1, 0),)
    first, second = client.compact("a", dry_run=True).plan.requests
    done = client.compact("a")
    assert [one.ids for one in done.applied] == [first.ids], "something is left, so one begins, and ends above it"
    assert done.plan.skipped[-1] == Skipped(second.ids, "the budget of the day is spent")
    assert spent_today(client) == first.cost.bytes_read + first.cost.bytes_written > 1
    other = world.client(TINY)
    with pytest.raises(Paused, match=r"b: compaction is paused by the rule '\[ab\]' since .*: .* of 1 B a day") as no:
        other.compact("b")
    assert "`persist config --rules FILE` changes the rule" in str(no.value)
    survey = other.survey()
    assert survey.due("compaction") == ["free"]
    assert survey.paused("compaction").keys() == {"a", "b"}
    assert "b" in survey.due("garbage") or other.collect("b") is not None, "other duties are free"
    assert other.maintain("b").paused.keys() == {"compaction"}
    world.clock.advance(DAY_MS / 1000)
    assert spent_today(other) == 0
    assert set(other.survey().due("compaction")) == {"a", "b", "free"}
    assert other.compact("b").applied


def test_dollars_count_at_the_prices_of_the_client(world: World) -> None:
    client = persist.open(world.inner, config=TINY, prices=S3_LIST, runtime=world.runtime(7))
    filled(client, 8)
    filled(client, 8, shard="t")
    client.set_rules([{"pattern": "*", "dollars_day": 0.000001, "bytes_day": 1 << 40}])
    dollars = client.compact("s", dry_run=True).plan.requests[0].cost.dollars
    assert client.compact("s").applied
    assert {one.field: one.spent for one in client.budgets()}["dollars_day"] == pytest.approx(dollars)
    with pytest.raises(Paused, match="dollars_day"):
        client.compact("t")


def test_a_budget_of_nothing_begins_nothing_and_a_person_may_pass_it_by_and_is_counted(world: World) -> None:
    client = world.client(TINY)
    filled(client, 8)
    client.set_rules([{"pattern": "*", "bytes_day": 0}])
    with pytest.raises(Paused):
        client.compact("s")
    assert spent_today(client) == 0
    with client.even_if_paused():
        assert client.compact("s").applied
    assert spent_today(client) > 0


def test_what_fails_each_time_spends_each_time(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", appends=4)
    test_scrub.damage(client, world, 3)
    client.set_rules([{"pattern": "s", "bytes_day": 1 << 40}])
    cost = client.compact("s", dry_run=True).plan.cost
    for times in (1, 2):
        with pytest.raises(Damage):
            client.compact("s")
        assert spent_today(client) == times * (cost.bytes_read + cost.bytes_written)


def test_a_plan_begins_whole_or_not_at_all(world: World) -> None:
    client = world.client(TINY)
    filled(client, 8)
    filled(client, 8, shard="t")
    plans = {name: client.plan(name, only=["compaction"]) for name in "st"}
    client.set_rules([{"pattern": "*", "bytes_day": 1}])
    assert client.apply(plans["s"])["s"].compacted.applied
    before = client.inspect("t").seqno
    with pytest.raises(Paused):
        client.apply(plans["t"])
    assert client.inspect("t").seqno == before
    client.set_rules([])
    assert client.apply(plans["t"])["t"].compacted.applied, "budgets are no settings of a plan"


@pytest.mark.parametrize("after", [False, True])
def test_of_charges_at_once_each_is_counted_once(world: World, *, after: bool) -> None:
    other = world.client(TINY)
    make(other, "s", "t")
    other.set_rules([{"pattern": "*", "bytes_day": 250}])
    assert other._pauses.allot("t", [Cost(bytes_read=1)]) == 1
    rival = Rival(world.inner.blob, after=after)
    client = persist.open(replace(world.inner, blob=rival), config=TINY, runtime=world.runtime(8))
    client.survey()
    rival.act = lambda: other._pauses.allot("t", [Cost(bytes_read=100)] * 2)
    assert client._pauses.allot("s", [Cost(bytes_read=100)] * 2) == (2 if after else 1)
    assert spent_today(other) == 301
    assert len(list(world.inner.blob.list(SPENT_PREFIX))) == 1


def test_the_last_bytes_of_a_budget_are_taken_by_one_of_two_processes(world: World) -> None:
    other = world.client(TINY)
    make(other, "s")
    other.set_rules([{"pattern": "*", "bytes_day": 100}])
    rival = Rival(world.inner.blob)
    client = persist.open(replace(world.inner, blob=rival), config=TINY, runtime=world.runtime(9))
    client.survey()
    granted: list[int] = []
    rival.act = lambda: granted.append(other._pauses.allot("s", [Cost(bytes_written=100)]))
    granted.append(client._pauses.allot("s", [Cost(bytes_written=100)]))
    assert granted == [1, 0]


def test_without_a_budget_nothing_is_asked_for_more(world: World) -> None:
    client = world.client(TINY)
    filled(client, 8)
    client.set_rules([{"pattern": "s", "compaction_weight": 0.4}])
    client.survey()
    idle = asked(world, client.survey)
    client.set_rules([{"pattern": "s", "compaction_weight": 0.4, "bytes_day": 5}])
    client.survey()
    assert sum(asked(world, client.survey).values()) == sum(idle.values()) + 1, "a listing, while nothing new is spent"


def test_days_and_charges_are_forgotten_and_budgets_are_apart() -> None:
    said = {"bytes_day": Told(100, "a*"), "dollars_day": Told(1.0, "*")}
    spent = Spent()
    for day in range(40):
        spent, _ = charge(spent, said, [Cost(bytes_read=60, dollars=0.1)], day * DAY_MS, day)
    assert {one.day for one in spent.entries} == set(range(40 - KEPT_DAYS, 40))
    for id_ in range(200):
        spent, _ = charge(spent, {"bytes_day": Told(1, "b")}, [Cost()], 39 * DAY_MS, id_)
    assert spent.charges == tuple(range(200 - KEPT_CHARGES, 200))
    assert spent.on(39, "bytes_day", "a*").amount == 60
    assert exhausted(said, spent, 39 * DAY_MS) is None
    spent, granted = charge(spent, said, [Cost(bytes_read=60), Cost(bytes_read=60)], 39 * DAY_MS + 5, 7)
    assert granted == 1
    pause = exhausted(said, spent, 39 * DAY_MS + 6)
    assert pause is not None
    assert (pause.patterns, pause.duties, pause.set_ms, pause.until_ms) == (
        ("a*",), ("compaction",), 39 * DAY_MS + 5, 40 * DAY_MS,
    )  # fmt: skip
    assert exhausted({"bytes_day": Told(100, "b*")}, spent, 39 * DAY_MS) is None


def test_the_bytes_of_what_was_spent_are_the_same_for_ever(world: World) -> None:
    assert SPENT_FORM.encode(SPENT).hex() == GOLDEN
    data = bytes.fromhex(GOLDEN)
    assert SPENT_FORM.decode(data, "k") == SPENT
    with pytest.raises(NewerFormat):
        SPENT_FORM.decode(framed(data[:4], 2, b""), "k")
    client = world.client(TINY)
    filled(client, 8)
    client.set_rules([{"pattern": "s", "bytes_day": 5}])
    world.inner.blob.set(f"{SPENT_PREFIX}{1:020d}", b"x" * 50)
    with pytest.raises(Corrupt, match="no compaction begins"):
        client.compact("s")


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_many_processes_take_each_byte_once(kind: str, tmp_path: Path) -> None:
    """As many clients, each with what it knows: that they are threads makes it quick."""
    use_test_credentials()
    url = f"file:{tmp_path}" if kind == "file" else s3_url("s3+cas", name=f"budgets-{tmp_path.name}")
    with persist.open(url, config=TINY, create=True) as client:
        make(client, "s")
        client.set_rules([{"pattern": "*", "bytes_day": 600}])

    def one(_: int) -> int:
        with persist.open(url, config=TINY) as other:
            return sum(other._pauses.allot("s", [Cost(bytes_read=10)]) for _ in range(25))

    with ThreadPoolExecutor(4) as pool:
        granted = sum(pool.map(one, range(4)))
    with persist.open(url) as client:
        assert (granted, spent_today(client)) == (60, 600)
        assert len(list(client.blob.list(SPENT_PREFIX))) == 1
