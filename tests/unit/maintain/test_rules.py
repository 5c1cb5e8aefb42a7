"""Rules: how shards of some names are looked after, in the location, and obeyed by whatever looks after them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.rules import Rule, Told, as_toml, parse_rules, quiet_at, told, values_of
from persist_lib.errors import InvalidUsage, NewerFormat, Paused
from persist_lib.format.frame import version_of
from persist_lib.format.pause_list import PREFIX, Wishes, decode_wishes, encode_wishes
from tests.framing import framed
from tests.shards import TINY, filled
from tests.unit.maintain.surveys import asked, make
from tests.worlds import World

GOLDEN = (
    "50535470025f583680b58051ec70cb7a2a2d6736b492909283a77061747465726ea76f72646572732aa9726574656e74696f6ea637206461"
    "7973a5717569657491ab30383a30302d31383a303082a77061747465726ea66f7264657273b1636f6d70616374696f6e5f776569676874cb"
    "3fd0000000000000"
)
MORE = Rule(
    "events_*", bytes_day=10 << 30, dollars_day=2.5, order="coldest", engine="spark", verify_reads=0, still="1 hour",
    kept=1 << 30, garbage=5,
)  # fmt: skip
MORE_GOLDEN = (
    "5053547003c1c4df22859ba58aec9a4d3df58ce4eb92909383a77061747465726ea76f72646572732aa9726574656e74696f6ea637206461"
    "7973a5717569657491ab30383a30302d31383a303082a77061747465726ea66f7264657273b1636f6d70616374696f6e5f776569676874cb"
    "3fd000000000000089a77061747465726ea86576656e74735f2aa962797465735f646179cf0000000280000000ab646f6c6c6172735f6461"
    "79cb4004000000000000a56f72646572a7636f6c64657374a6656e67696e65a5737061726bac7665726966795f726561647300a57374696c"
    "6ca63120686f7572a46b657074ce40000000a76761726261676505"
)
RULES = (Rule("orders*", retention="7 days", quiet=("08:00-18:00",)), Rule("orders", compaction_weight=0.25))
TOML = """
[[rule]]
pattern = "orders*"
retention = "7 days"
quiet = "08:00-18:00"

[[rule]]
pattern = "orders"
compaction_weight = 0.25
"""


def at(hour: int, minute: int = 0) -> int:
    return int(dt.datetime(2026, 11, 27, hour, minute, tzinfo=dt.UTC).timestamp() * 1000)


def test_the_most_specific_rule_counts_for_each_field() -> None:
    rules = parse_rules(
        [
            {"pattern": "orders", "quiet": []}, {"pattern": "*", "retention": 5, "quiet": ["00:00-12:00"]},
            {"pattern": "ord*", "retention": 3, "compaction_weight": 0.1}, {"pattern": "orders*", "retention": 2},
        ]
    )  # fmt: skip
    assert told(rules) == {
        "retention": Told(2, "orders*"), "compaction_weight": Told(0.1, "ord*"), "quiet": Told((), "orders"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("window", "quiet", "not_quiet"),
    [
        ("08:00-18:00", [at(8), at(17, 59)], [at(7, 59), at(18)]),
        ("22:00-06:00", [at(22), at(0), at(5, 59)], [at(6), at(21, 59)]),
    ],
)
def test_a_window_is_of_the_day_also_over_midnight(window: str, quiet: list[int], not_quiet: list[int]) -> None:
    said = Told((window,), "*")
    for now in quiet:
        found = quiet_at(said, now)
        assert found is not None
        assert found.set_ms <= now < (found.until_ms or 0) <= now + 86_400_000
    assert [quiet_at(said, now) for now in not_quiet] == [None, None]


@pytest.mark.parametrize(
    "bad",
    [
        "[[rule]]\nretention = 5", "rule = 5", "[[rule]]\npattern = 5", "[[rules]]\npattern = 'a'", "{", 5, [5], [{}],
        [{"pattern": "a"}, {"pattern": "a"}], [{"pattern": "a", "retain": 5}], [{"pattern": "a", "retention": -1}],
        [{"pattern": "a", "retention": "7 day s"}], [{"pattern": "a", "retention": True}],
        [{"pattern": "a", "compaction_weight": "x"}], [{"pattern": "a", "compaction_weight": -1}],
        [{"pattern": "a", "quiet": "8-18"}], [{"pattern": "a", "quiet": ["08:00-08:00"]}],
        [{"pattern": "a", "quiet": ["24:00-08:00"]}], [{"pattern": "a", "quiet": [5]}],
        [{"pattern": "a", "bytes_day": -1}], [{"pattern": "a", "dollars_day": "2"}], [{"pattern": "a", "order": "old"}],
        [{"pattern": "a", "engine": "ray"}], [{"pattern": "a", "verify_reads": 1.5}], [{"pattern": "a", "still": "x"}],
        [{"pattern": "a", "kept": True}], [{"pattern": "a", "garbage": -1}], [{"pattern": "a", "still": -1}],
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_and_changes_nothing(world: World, bad: Any) -> None:
    client = world.client()
    client.set_rules(TOML)
    with pytest.raises(InvalidUsage):
        client.set_rules(bad)
    assert client.rules() == RULES


def test_rules_are_stored_beside_the_pauses_and_stay_with_them(world: World) -> None:
    client = world.client()
    client.pause("x", owner="ann", reason="why")
    assert client.set_rules(TOML) == RULES
    client.pause("y", owner="ann", reason="why")
    other = world.client()
    assert other.rules() == RULES
    assert [one.patterns for one in other.pauses()] == [("x",), ("y",)]
    client.resume("x")
    client.resume("y")
    assert world.client().rules() == RULES
    client.set_rules([])
    (key,) = [entry.key for entry in world.inner.blob.list(PREFIX)]
    assert world.inner.blob.get(key) == encode_wishes(Wishes()), "older releases read what has no rules"
    assert encode_wishes(Wishes((), RULES)).hex() == GOLDEN
    assert decode_wishes(bytes.fromhex(GOLDEN), "k") == Wishes((), RULES)


def test_rules_that_say_more_are_in_a_format_that_older_releases_refuse(world: World) -> None:
    data = encode_wishes(Wishes((), (*RULES, MORE)))
    assert data.hex() == MORE_GOLDEN
    assert decode_wishes(data, "k") == Wishes((), (*RULES, MORE))
    assert (version_of(bytes.fromhex(GOLDEN)), version_of(data)) == (2, 3)
    with pytest.raises(NewerFormat, match="no duty begins"):
        decode_wishes(framed(data[:4], 4, b""), "k")


def test_rules_are_written_as_the_file_that_they_are_read_from() -> None:
    odd = Rule('a"\\é*', quiet=(), still=90.5)
    assert parse_rules(as_toml((*RULES, MORE, odd))) == (*RULES, MORE, odd)
    assert as_toml(()) == ""


def test_what_counts_for_a_name_says_where_it_is_from(world: World) -> None:
    client = world.client(TINY)
    filled(client, 3, shard="orders")
    client.set_rules([{"pattern": "*", "retention": 5, "order": "newest"}, {"pattern": "o*", "compaction_weight": 0.1}])
    state = client.inspect("orders").state
    found = {
        one.field: (one.shown, one.source)
        for one in values_of(client.rules_of("orders"), state, {"compaction_ahead": (0.5, "PERSIST_CONFIG")}, {})
    }
    assert found["retention"] == ("5", "the rule '*'")
    assert found["compaction_weight"] == ("0.1", "the rule 'o*'")
    assert found["compaction_ahead"] == ("0.5", "PERSIST_CONFIG")
    assert found["engine"] == ("none", "default")
    client.set_retention("orders", 7)
    said = values_of(client.rules_of("orders"), client.inspect("orders").state, {}, {})
    assert (said[0].value, said[0].source) == ("7", "set-retention")


def test_debt_is_paid_in_the_order_that_a_rule_says(world: World) -> None:
    client = world.client(TINY)
    for number, name in enumerate(("a1", "a2", "a3", "b1", "b2")):
        make(client, name, appends=4 + 3 * number)
        client.survey()
        world.clock.advance(60)
    assert client.survey().due("compaction") == ["b2", "b1", "a3", "a2", "a1"], "most debt first"
    client.set_rules([{"pattern": "a*", "order": "coldest"}])
    assert client.survey().due("compaction") == ["b2", "b1", "a1", "a2", "a3"]
    client.set_rules([{"pattern": "*", "order": "coldest"}, {"pattern": "b*", "order": "debt"}])
    assert client.survey().due("compaction") == ["b2", "b1", "a1", "a2", "a3"]
    client.set_rules([{"pattern": "a*", "order": "newest"}])
    assert client.survey().due("compaction") == ["b2", "b1", "a3", "a2", "a1"]
    assert client.survey().due("census") == ["a1", "a2", "a3", "b1", "b2"], "it is about compaction"


def test_a_rule_keeps_less_history_where_the_shard_says_nothing(world: World) -> None:
    client = world.client(TINY)
    for name in ("orders", "orders-eu", "payments"):
        filled(client, 10, shard=name)
    client.set_retention("orders-eu", 7)
    client.set_rules([{"pattern": "orders*", "retention": 2}])
    survey = world.client(TINY).survey()
    assert set(survey.due("retention")) == {"orders", "orders-eu"}
    for name in ("orders", "orders-eu", "payments"):
        client.maintain(name)
    assert [client.inspect(name).state.since.time for name in ("orders", "orders-eu", "payments")] == [7, 2, 0]
    assert client.survey().due("retention") == []
    assert "2 by a rule behind" in next(one.says for one in client.explain("orders") if one.about == "retention")
    client.set_rules([])
    filled_more = client.open_writer("orders", client.inspect("orders").state.schemas[-1])
    filled_more.compare_and_append([], 10, 20)
    world.clock.advance(11)
    client.maintain("orders")
    assert client.inspect("orders").state.since.time == 7, "without the rule, nothing more is given up"


def test_lengths_of_time_are_for_clocks_alone(world: World) -> None:
    client = world.client(TINY)
    filled(client, 5, shard="numbers")
    schema = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms")
    day = 86_400_000
    with client.open_writer("moments", schema) as write:
        for n in range(10):
            write.compare_and_append([{"id": n, "n": n, "_time": n * day}], n * day, (n + 1) * day)
    client.set_rules([{"pattern": "*", "retention": "2 days"}])
    client.maintain()
    assert client.inspect("numbers").state.since.time == 0
    assert client.inspect("moments").state.since.time == 8 * day - 1


def test_rules_leave_what_belongs_to_a_layer_alone(world: World) -> None:
    client = world.client(TINY)
    with client.controller() as controller:
        controller.create("c", persist.Schema({"id": "int64 not null"}, {"n": "int64"}), shards=2)
    before = {name: client.plan(name, only=["retention"]).of(name).steps for name in client.shards()}
    client.set_rules([{"pattern": "*", "retention": 0}])
    for name, steps in before.items():
        assert client.plan(name, only=["retention"]).of(name).steps == steps
        assert len(steps) == (name == "_catalog"), "which has a retention of its own"


def test_thresholds_of_compaction_are_by_rule_in_every_door(world: World) -> None:
    client = world.client(TINY)
    make(client, "orders", "payments", appends=8)
    before = client.survey().due("compaction")
    assert set(before) == {"orders", "payments"}
    client.set_rules([{"pattern": "orders", "compaction_weight": 0.01}])
    for other in (client, world.client(TINY)):
        assert other.survey().due("compaction") == ["payments"]
    assert client.compact("orders").applied == ()
    assert client.census("orders").debt == 0
    assert client.maintain("orders").compacted.applied == ()
    assert client.plan("orders", only=["compaction"]).of("orders").steps == ()
    assert client.compact("orders", policy=persist.Policy()).applied, "what a call says counts over rules"
    client.set_rules([])
    assert client.survey().due("compaction") == ["payments"]


def test_nothing_begins_in_a_quiet_window(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    now = client.consensus.now()
    begins = dt.datetime.fromtimestamp(now / 1000, dt.UTC)
    window = f"{begins:%H:%M}-{begins + dt.timedelta(hours=2):%H:%M}"
    client.set_rules([{"pattern": "*", "quiet": window}, {"pattern": "t", "quiet": []}])
    with pytest.raises(Paused, match=rf"s: compaction is paused by the rule '\*' since .*: it is quiet {window} UTC"):
        client.compact("s")
    filled(client, 6, shard="t")
    assert client.survey().due("compaction") == ["t"]
    assert client.survey().paused("compaction").keys() == {"s"}
    assert client.maintain("s").paused.keys() >= {"compaction", "garbage"}
    with client.even_if_paused():
        assert client.compact("t").applied
    world.clock.advance(2 * 3600 + 60)
    assert client.survey().due("compaction") == ["s"]
    assert client.compact("s").applied


def test_rules_cost_what_a_pause_does(world: World) -> None:
    client = world.client(TINY)
    make(client, *(f"s{n}" for n in range(30)))
    client.pause("s2*", owner="ann", reason="why")
    client.survey()
    without = asked(world, client.survey)
    client.resume("s2*")
    client.set_rules([{"pattern": "s1*", "quiet": "08:00-18:00", "retention": 5, "compaction_weight": 0.1}])
    client.survey()
    assert asked(world, client.survey) == without


def test_a_plan_is_refused_once_rules_change(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    plan = client.plan("s")
    client.set_rules([{"pattern": "s", "compaction_weight": 0.3}])
    with pytest.raises(persist.PlanMoved, match="settings"):
        client.apply(plan)


def test_what_rules_say_of_a_name_and_where_it_is_from(world: World) -> None:
    client = world.client(TINY)
    client.set_rules(TOML)
    assert client.rules_of("orders") == {
        "retention": Told("7 days", "orders*"), "quiet": Told(("08:00-18:00",), "orders*"),
        "compaction_weight": Told(0.25, "orders"),
    }  # fmt: skip
    assert client.rules_of("payments") == {}
