"""A rule keeps what can be read since the last N appends began: never less, and more where that is not known."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.cli import shared_options as opt
from persist_lib.cli.duty_outcomes import retained
from persist_lib.core.plan.retention import LAST_MOST, plan_retention, retention_of
from persist_lib.core.plan.simulate import Simulation
from persist_lib.core.rules import Told, as_toml, parse_rules, values_of
from persist_lib.core.state import Hold
from persist_lib.errors import InvalidUsage, SinceViolation
from persist_lib.format.frame import version_of
from persist_lib.format.pause_list import Wishes, encode_wishes
from persist_lib.testing import Model
from persist_lib.testing.model import contents_of
from tests.shards import TINY, filled
from tests.worlds import World, updates

CLOCK = persist.Schema({"id": "int64 not null"}, {"word": "string"}, times="ms")
MINUTE = 60_000


def said_of(client: persist.Client, name: str) -> str:
    return next(one.says for one in client.explain(name) if one.about == "retention")


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=25), empty=st.sets(st.integers(0, 24)),
    wanted=st.integers(1, 12), merged=st.sets(st.integers(0, 24)),
)  # fmt: skip
def test_since_never_passes_where_the_last_appends_began(
    lengths: list[int], empty: set[int], wanted: int, merged: set[int]
) -> None:
    """However the batches were merged since, and also for appends without updates."""
    simulation, begins, upper = Simulation(), list[int](), 0
    for number, times in enumerate(lengths):
        begins.append(upper)
        simulation.append(0 if number in empty else 3, times)
        upper += times
        target = plan_retention(simulation.state, f"last {wanted}")
        if len(begins) < wanted:
            assert target is None
        else:
            allowed = min(begins[-wanted], upper - 1)
            assert target is not None
            assert target.time == max(allowed, simulation.state.since.time or 0)
            simulation.advance(target.time)
        if number in merged:
            simulation.maintain()


def test_the_versions_of_the_last_appends_can_be_read_and_no_older_ones(world: World) -> None:
    client, rng, model, ends = world.client(TINY), random.Random(7), Model(), [0]
    client.set_rules([{"pattern": "moments", "retention": "last 4"}])
    with client.open_writer("moments", CLOCK) as write:
        for number in range(20):
            upper = ends[-1] + rng.choice([1, MINUTE, 90 * MINUTE])
            rows: list[Any] = [{"id": rng.randrange(5), "word": str(number), "_time": upper - 1}] if number % 3 else []
            write.compare_and_append(rows, ends[-1], upper)
            model.append(updates([{**one, "_diff": 1} for one in rows]), persist.at(ends[-1]), persist.at(upper))
            ends.append(upper)
            if number % 5 == 4 or number > 14:
                world.clock.advance(60)
                client.maintain("moments")
                with client.open_reader("moments") as read:
                    for end in ends[-4:]:
                        assert contents_of(read.snapshot(end - 1, diff=True).to_arrow()) == model.contents(end - 1)
                    assert read.since == persist.at(min(ends[-5], ends[-1] - 1))
                    if ends[-5]:
                        with pytest.raises(SinceViolation):
                            read.snapshot(ends[-5] - 1, diff=True)
    assert client.survey().due("retention") == []


def test_a_dry_run_a_plan_and_the_sentence_say_the_same_and_change_nothing(world: World) -> None:
    client = world.client(TINY)
    filled(client, 10)
    client.set_rules([{"pattern": "s", "retention": "last 3"}])
    assert client.survey().due("retention") == ["s"]
    assert said_of(client, "s") == "the hold can move to [7], 2 (the last 3 appends by a rule) behind the newest time"
    plan = client.plan("s", only=["retention"])
    (step,) = plan.of("s").steps
    assert (step.what, step.why, step.exactly) == ("give up history before [7]", said_of(client, "s"), ("7",))
    done = client.retain("s", dry_run=True)
    assert (done.after, done.distance, done.says) == (persist.at(7), 2, "2 (the last 3 appends by a rule)")
    assert "policy: 2 (the last 3 appends by a rule) behind upper" in retained(done, client.inspect("s"), True).summary
    assert client.inspect("s").state.since == persist.at(0), "nothing has happened"
    client.apply(plan)
    assert client.inspect("s").state.since == persist.at(7)
    assert said_of(client, "s").startswith("the hold stands at [7], 2 (the last 3 appends by a rule) behind")


def test_a_plan_of_the_last_appends_is_refused_after_another_one(world: World) -> None:
    client = world.client(TINY)
    filled(client, 5)
    client.set_rules([{"pattern": "s", "retention": "last 3"}])
    plan = client.plan("s", only=["retention"])
    with client.open_writer("s", client.inspect("s").state.schemas[-1]) as write:
        write.compare_and_append([], 5, 6)
    with pytest.raises(persist.PlanMoved, match="data"):
        client.apply(plan)
    assert client.inspect("s").state.since == persist.at(0)


def test_where_appends_are_forgotten_all_history_stays_and_that_is_said(world: World) -> None:
    simulation = Simulation()
    for _ in range(LAST_MOST + 20):
        simulation.append(1)
    state = simulation.state
    assert plan_retention(state, f"last {LAST_MOST}") == persist.at(20), "the oldest one whose beginning is known"
    forgotten = msgspec.structs.replace(state, outcomes=state.outcomes[-6:])
    assert plan_retention(forgotten, "last 5") == persist.at(LAST_MOST + 15)
    assert plan_retention(forgotten, "last 6") is None
    kept = retention_of(forgotten, "last 6")
    assert kept is not None
    assert kept.says == "the last 6 appends by a rule, and 5 of them are remembered, so all history stays"
    client = world.client(TINY)
    filled(client, 5)
    client.set_rules([{"pattern": "s", "retention": "last 6"}])
    assert said_of(client, "s") == f"it keeps {kept.says}"
    done = client.maintain("s").retained
    assert (done.distance, done.before) == (None, done.after)
    assert retained(done, client.inspect("s"), False).summary == f"policy: {kept.says}"
    value = values_of(client.rules_of("s"), client.inspect("s").state, {}, {})[0]
    assert (value.value, value.source) == ("last 6", "the rule 's'"), "it counts, though it gives nothing up yet"


def test_holds_readers_and_what_a_shard_says_count_over_it(world: World) -> None:
    client = world.client(TINY)
    for name in ("held", "own"):
        filled(client, 10, shard=name)
    client.set_hold("held", "audit", 2)
    client.set_retention("own", 5)
    client.set_rules([{"pattern": "*", "retention": "last 1"}])
    client.maintain()
    assert [client.inspect(name).state.since.time for name in ("held", "own")] == [2, 4]
    held = msgspec.structs.replace(client.inspect("held").state, holds={"collection": Hold(persist.at(0))})
    assert retention_of(held, "last 1") is None, "it is of a layer"


@pytest.mark.parametrize("bad", ["last 0", "last", "last -1", "last ten", f"last {LAST_MOST + 1}", "the last 5"])
def test_what_is_no_number_of_last_appends_is_refused(world: World, bad: str) -> None:
    with pytest.raises(InvalidUsage, match="retention"):
        world.client().set_rules([{"pattern": "*", "retention": bad}])


def test_it_is_of_rules_alone(world: World) -> None:
    client = world.client(TINY)
    filled(client, 3)
    with client.controller() as controller:
        controller.create("c", CLOCK, shards=2)
        calls: list[Callable[[Any], object]] = [
            client.table("s").set_retention, partial(client.set_retention, "s"), client.table("c").set_retention,
            opt.parse_distance,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(InvalidUsage, match="by a rule"):
                call("last 5")
    assert client.inspect("s").state.retention is None


def test_it_is_stored_so_that_older_releases_begin_no_duty() -> None:
    rules = parse_rules([{"pattern": "*", "retention": "last 5"}])
    assert version_of(encode_wishes(Wishes((), rules))) == 3
    assert parse_rules(as_toml(rules)) == rules
    assert Told("last 5", "*").shown == "last 5"
