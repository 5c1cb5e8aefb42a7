"""What is wrong in a location: each kind of trouble is said with what helps, and nothing of what is well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import health, pending_area, streams
from persist_lib.cli.root import RENAMED
from persist_lib.errors import Corrupt, InvalidUsage, NotFound
from persist_lib.health import Limits
from persist_lib.sources import Limits as OfSources
from persist_lib.testing import Fate
from tests.shards import TINY
from tests.streaming import SCHEMA as OF_STREAM
from tests.streaming import start, update
from tests.unit.maintain import test_scrub, test_survey
from tests.unit.maintain.surveys import append, asked, make
from tests.unit.pending_area.areas import NAME, Area
from tests.unit.sources.test_running import Place, row
from tests.worlds import SCHEMA, World

DAY_S = 86_400
CLOCK = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")


def told(found: health.Health) -> list[tuple[str, str, str]]:
    """The check, and what it is about, of each problem. Each one says what helps, and where the manual has more."""
    for one in found.problems:
        assert one.says
        assert one.do.startswith("persist ")
        page, _, section = one.page.partition("#")
        heads = [line.lstrip("# ").strip() for line in Path(page).read_text().splitlines() if line.startswith("#")]
        assert section in {head.lower().replace(" ", "-") for head in heads}, one.page
    assert len({one.key for one in found.problems}) == len(found.problems)
    return [(one.check, one.about, one.name) for one in found.problems]


def wrong(world: World, **limits: Any) -> list[tuple[str, str, str]]:
    return told(health.check(world.client(), Limits(**limits)))


def test_nothing_is_wrong_where_nothing_is_and_an_idle_location_costs_a_few_requests(world: World) -> None:
    assert wrong(world) == []
    client = world.client()
    make(client, *(f"s{n}" for n in range(30)))
    found = health.check(client)
    assert (told(found), found.is_sound, found.is_damaged, found.looked_at["shards"]) == ([], True, False, 30)
    idle = asked(world, lambda: health.check(client))
    assert idle == {"list": 5, "heads": 1, "head": 4, "scan": 4, "get": 3}
    assert health.check(client).cost.requests == 17


def test_what_a_scrub_found_damaged_is_known_until_it_is_mended(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", "t", appends=4)
    key, data = test_scrub.damage(client, world, 3)
    assert wrong(world) == [], "only a scrub reads the data"
    client.scrub("s")
    found = health.check(world.client())
    assert told(found) == [("damage", "table", "s")]
    assert found.is_damaged
    assert "1 batch is damaged, known since 20" in found.problems[0].says
    assert found.problems[0].do == "persist shard scrub s"
    assert told(health.check(world.client(), names=["t"])) == []
    test_scrub.put(world, key, data)
    client.scrub("s")
    assert wrong(world) == []


def test_a_shard_whose_state_cannot_be_read_is_damage_and_stops_none_of_the_others(world: World) -> None:
    make(world.client(), "a", "b")
    mend = test_survey.damage(world, "b")
    client = world.client()
    found = health.check(client)
    assert (told(found), found.is_damaged) == ([("unread", "table", "b")], True)
    assert "Corrupt: " in found.problems[0].says
    assert found.problems[0].do == "persist shard repair b --dry-run"
    mend()
    assert told(health.check(client)) == [], "also where the survey remembers that it could not"


def test_upkeep_that_is_missing_is_one_problem_a_duty(world: World) -> None:
    client = world.client(persist.Config(rollup_every=8))
    make(client, "a", "b", "c")
    with client.open_writer("a", SCHEMA) as write:
        append(write, 80)
    client.survey(done={"scrub": ["a", "b"]})
    writers = [client.open_writer(name, SCHEMA) for name in ("a", "b")]
    for write in writers:
        append(write)
    limits = Limits(overdue_s=3600)
    assert told(health.check(client, limits)) == [("upkeep", "location", "compaction")]
    world.clock.advance(30 * DAY_S)
    found = health.check(world.client(persist.Config(rollup_every=8)), limits)
    assert told(found) == [
        ("upkeep", "location", "compaction"), ("upkeep", "location", "scrub"), ("leases", "location", "leases"),
    ]  # fmt: skip
    assert [one.do for one in found.problems] == [
        "persist maintain --only compaction", "persist shard scrub --all", "persist maintain --only leases",
    ]  # fmt: skip
    assert "on 2 of the shards, such as a: " in found.problems[1].says
    for write in writers:
        write.close()
    for name in "abc":
        client.maintain(name)
    client.survey(done={"scrub": ["a", "b", "c"]})
    assert told(health.check(client, limits)) == []


def test_garbage_that_waits_names_who_it_waits_for(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", appends=30)
    reader = client.open_reader("s")
    client.compact("s", policy=persist.Policy(weight=1e9, advance=0.01))
    assert wrong(world, garbage=0) == [("garbage", "table", "s")]
    assert wrong(world) == [], "it is a few bytes"
    reader.close()
    client.maintain("s")
    assert wrong(world, garbage=0) == []


def test_handles_that_are_never_closed_are_seen(world: World) -> None:
    client = world.client()
    make(client, "s")
    readers = [client.open_reader("s") for _ in range(4)]
    assert wrong(world, holders=3) == [("holders", "table", "s")]
    assert wrong(world, holders=4) == []
    del readers


@pytest.mark.parametrize("carrier", ["shard", "collection", "timeline"])
def test_an_upper_that_stands_still_is_wrong_where_that_is_asked(world: World, carrier: str) -> None:
    client = world.client()
    if carrier == "shard":
        client.table("orders", CLOCK)
    elif carrier == "collection":
        client.controller().create("orders", CLOCK, shards=2, mode="compare_and_append")
    else:
        client.controller().tables().create("orders", CLOCK, mode="wal")
    client.table("orders").append([{"id": 1, "n": 1}])
    make(client, "plain")
    assert wrong(world, still={"*": "1 hour"}) == []
    world.clock.advance(3700)
    assert wrong(world, still={"ord*": "1 hour"}) == [("still", "table", "orders")]
    assert wrong(world, still={"*": 3599.0, "other": 1}) == [("still", "table", "orders")], "integers are no clock"
    assert wrong(world, still={"orders": "2 hours"}) == wrong(world) == []


def test_a_store_that_is_slow(world: World) -> None:
    class Slow:
        def decide(self, operation: Any) -> Fate:
            return Fate(delay_s=3.0 if operation.kind == "get" else 0.0)

    found = health.check(world.client(plan=Slow()))
    assert told(found) == [("slow", "location", "blob")]
    assert "3.0 s" in found.problems[0].says
    assert wrong(world) == []


def test_what_stays_in_the_wal(world: World) -> None:
    client = world.client()
    tables = client.controller().tables()
    tables.create("accounts", CLOCK, mode="wal")
    client.table("accounts").append([{"id": 1, "n": 1}])
    assert wrong(world) == []
    world.clock.advance(2 * DAY_S)
    assert ("wal", "timeline", "default") in wrong(world)
    tables.apply()
    tables.tidy()
    assert "wal" not in {check for check, _, _ in wrong(world)}


def test_a_writer_of_streams_that_died(world: World) -> None:
    runtime = start(world)
    write, _ = runtime.create_or_load("readings", OF_STREAM)
    write.write([update(1, 1)])
    assert wrong(world) == []
    world.clock.advance(DAY_S)
    assert wrong(world)[0] == ("writer", "stream", "all")
    with streams.open(world.client(), reentrance_id="other") as other:
        assert [one for one in wrong(world) if one[0] == "writer"] == []
        other.create_or_load("readings", OF_STREAM)
    assert [one for one in wrong(world) if one[0] == "writer"] == [], "it was closed, and did not die"


def test_writers_of_a_pending_area_that_disagree_and_what_is_damaged(world: World) -> None:
    area = Area(world)
    area.put("a", 0, 6)
    assert wrong(world) == []
    area.put("b", 0, 6, word="other")
    found = health.check(world.client())
    assert told(found) == [("disagree", "pending area", NAME)]
    assert "a and b say something else of 0" in found.problems[0].says
    assert told(health.check(world.client(), names=[NAME])) == told(found)
    pending_area.choose(area.client, NAME, "a")
    area.absorb()
    assert wrong(world) == []
    area.damage(area.put("a", 6, 9))
    found = health.check(world.client())
    assert (told(found), found.is_damaged) == ([("damage", "pending area", NAME)], True)


def test_a_pending_area_that_nothing_absorbs(world: World) -> None:
    area = Area(world, schema=persist.Schema(SCHEMA.key, SCHEMA.value, times="ms"))
    area.put("a", 0, 6)
    found = health.check(world.client())
    assert told(found) == [("pending", "pending area", NAME)]
    assert "1 batches wait there" in found.problems[0].says


def test_sources_are_judged_by_their_own_limits(world: World, tmp_path: Path) -> None:
    place = Place(world, tmp_path / "in")
    place.write("a.jsonl", row(1))
    place.create()
    assert wrong(world) == [("instances", "source", "s"), ("lag", "source", "s")]
    place.catch_up()
    assert [one[0] for one in wrong(world)] == ["instances"]
    relaxed = Limits(sources=OfSources(instances=0))
    assert told(health.check(world.client(), relaxed)) == []
    assert told(health.check(world.client(), names=["s"])) == [("instances", "source", "s")]
    (tmp_path / "in" / "a.jsonl").write_text("")
    found = health.check(world.client(), relaxed)
    assert told(found) == [("unread", "source", "s")]
    assert found.problems[0].page == "docs/sources.md#watch", "not that of a shard"


def test_what_cannot_be_looked_at_is_a_problem_and_the_others_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_client: object) -> Any:
        raise Corrupt("it is gone", key="x")

    client = world.client()
    make(client, "s")
    readers = [client.open_reader("s") for _ in range(2)]
    monkeypatch.setattr(pending_area, "pending_collections", broken)
    found = health.check(world.client(), Limits(holders=1))
    assert told(found) == [("unread", "location", "pending areas"), ("holders", "table", "s")]
    assert found.is_damaged
    del readers


def test_shards_that_there_was_no_time_for_are_counted(world: World) -> None:
    class Slow:
        def decide(self, operation: Any) -> Fate:
            return Fate(delay_s=0.5 if operation.kind == "scan" else 0.0)

    make(world.client(), *(f"s{n}" for n in range(40)))
    found = health.check(world.client(plan=Slow()), Limits(seconds=3.0))
    assert told(found) == [("unread", "location", "shards")]
    assert found.looked_at["shards"] < 40


@pytest.mark.parametrize(
    "made",
    [
        lambda: Limits(overdue_s=-1), lambda: Limits(garbage=-1), lambda: Limits(holders="many"),  # type: ignore[arg-type]
        lambda: Limits(still=["orders"]), lambda: Limits(still={"orders": "soon"}), lambda: Limits(still={1: "1 hour"}),  # type: ignore[arg-type, dict-item]
        lambda: Limits(still={"orders": True}),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_right_are_refused(made: Callable[[], Limits]) -> None:
    with pytest.raises(InvalidUsage):
        made()


def test_a_name_that_is_nowhere_is_refused(world: World) -> None:
    make(world.client(), "orders")
    with pytest.raises(NotFound, match="Did you mean orders"):
        health.check(world.client(), names=["ordrs"])


def test_the_earlier_command_is_told() -> None:
    assert RENAMED["source check"] == "health NAME"


def test_limits_are_by_rule_where_a_rule_says_them(world: World) -> None:
    client = world.client(TINY)
    make(client, "s", "t", appends=30)
    readers = [client.open_reader(name) for name in "st"]
    for name in "st":
        client.compact(name, policy=persist.Policy(weight=1e9, advance=0.01))
    assert wrong(world) == []
    client.set_rules([{"pattern": "s", "garbage": 0}, {"pattern": "t", "kept": 1}])
    assert sorted(wrong(world)) == [("garbage", "table", "s"), ("kept", "table", "t")]
    both = [("garbage", "table", "s"), ("garbage", "table", "t"), ("kept", "table", "t")]
    assert sorted(wrong(world, garbage=0, kept=1 << 40)) == both, "options are for what no rule says"
    del readers


def test_a_rule_says_how_far_an_upper_may_be_behind(world: World) -> None:
    client = world.client()
    for name in ("orders", "people"):
        client.table(name, CLOCK).append([{"id": 1, "n": 1}])
    world.clock.advance(7200)
    assert wrong(world) == []
    client.set_rules([{"pattern": "ord*", "still": "1 hour"}])
    assert wrong(world) == [("still", "table", "orders")]
    assert wrong(world, still={"orders": "3 hours"}) == [("still", "table", "orders")], "the strictest counts"
    assert health.check(client).problems[0].says.endswith("3,600 s are allowed by the rule 'ord*'")
    client.set_rules([{"pattern": "ord*", "still": 10_000}])
    assert wrong(world) == []
