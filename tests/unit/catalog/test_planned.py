"""Plans of collections: what would be given up is shown, written down, and done exactly; nothing else waits."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

import persist_lib as persist
from persist_lib.catalog.controller import Controller
from persist_lib.catalog.planned import apply
from persist_lib.core.plan.written import Plan, parse_plan
from persist_lib.errors import InvalidUsage, NotFound, PlanMoved
from tests.worlds import SCHEMA, World, row


def made(world: World, *names: str, retention: int | None = 2) -> Controller:
    """Collections with ten times each, of whose history two are to stay."""
    controller = world.client().controller()
    for name in names:
        controller.create(name, SCHEMA, retention=retention)
        write(controller, name, 0, 10)
    return controller


def write(controller: Controller, name: str, start: int, end: int) -> None:
    with controller.open_writer(name) as writer:
        for time in range(start, end):
            writer.append([row(time, "x", time)], time, time + 1)


def since(controller: Controller, name: str) -> int | None:
    return controller.describe(name).since.time


def test_a_plan_has_what_is_given_up_and_is_done_exactly(world: World) -> None:
    controller = made(world, "a", "b")
    steps = controller.plan()
    assert {step.exactly[1] for step in steps} == {"move hold"}
    assert {step.exactly[0] for step in steps} == {"a", "b"}
    assert all(step.why and step.what.startswith("move hold ") for step in steps)
    assert [since(controller, name) for name in "ab"] == [0, 0], "a plan changes nothing"
    assert controller.plan("a") == tuple(step for step in steps if step.exactly[0] == "a")
    done = controller.apply(controller.plan("a"))
    assert [since(controller, name) for name in "ab"] == [7, 0]
    assert [step.subject.partition(".r1.")[2] for step in done.steps if step.action == "move hold"] == ["", "s0 to [7]"]
    assert {step.collection for step in done.steps if step.action == "move hold"} == {"a"}, "and what follows from it"
    left = [step for step in done.waiting if step.collection == "b"]
    assert left
    assert all("a person decides" in step.reason for step in left)
    assert controller.plan("a") == ()


def test_a_plan_is_refused_after_an_append_and_when_it_was_carried_out(world: World) -> None:
    controller = made(world, "a", "b")
    steps = controller.plan()
    write(controller, "a", 10, 11)
    with pytest.raises(PlanMoved, match="collection a: it has moved"):
        controller.apply(steps)
    assert [since(controller, name) for name in "ab"] == [0, 0]
    controller.apply(controller.plan())
    assert [since(controller, name) for name in "ab"] == [8, 7]
    with pytest.raises(PlanMoved):
        controller.apply(steps)


def test_a_rival_amid_it_makes_that_less_is_done_and_never_another_thing(world: World) -> None:
    client = world.client(rival=world.rival)
    controller = client.controller()
    other = made(world, "a")
    steps, looked = controller.plan(), 0
    tend = type(controller).tend

    class Interrupted:
        """The controller, with an append after the plan was compared."""

        def tend(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal looked
            looked += 1
            if looked == 2:
                write(other, "a", 10, 15)
            return tend(controller, *args, **kwargs)

    done = apply(cast(Controller, Interrupted()), steps, None)
    assert looked == 2
    assert since(controller, "a") == 0, "what is due now was not planned"
    assert [step.subject for step in done.waiting if "a person decides" in step.reason]


def test_a_dropped_collection_is_taken_away_by_plan_alone(world: World) -> None:
    controller = made(world, "a", retention=None)
    reader = controller.open_reader("a")
    controller.drop("a")
    reader.close()
    before = world.bytes(controller.client.shards()[0])
    steps = controller.plan()
    assert {"finish", "forget"} <= {step.exactly[1] for step in steps}
    controller.tend(planned=())
    assert before == world.bytes(controller.client.shards()[0])
    assert controller.plan() == steps
    controller.apply(steps)
    assert controller.plan() == ()
    assert all(controller.client.inspect(name).state.is_finished() for name in controller.client.shards()[1:])


def test_what_gives_nothing_up_waits_for_no_person(world: World) -> None:
    controller = made(world, "a", retention=None)
    assert controller.plan() == ()
    found = controller.tend(dry_run=True)
    assert not [step for step in found.steps if step.gives_up]


def test_plans_of_a_location_have_shards_and_collections_and_are_text(world: World) -> None:
    controller = made(world, "a")
    client = controller.client
    plan = client.plan()
    assert plan.collections == controller.plan()
    assert (plan.format, Plan(plan.shards).format) == (2, 1)
    assert parse_plan(plan.to_json()) == plan
    assert client.plan(only=["collections"]).shards == ()
    assert client.plan(only=["garbage"]).collections == ()
    assert client.plan(client.shards()[1]).collections == ()
    with pytest.raises(InvalidUsage, match="cannot be planned"):
        client.plan(only=["pending"])
    assert plan.only(["a"]).shards == ()
    with pytest.raises(InvalidUsage, match="no shard 'x'"):
        plan.only(["a", "x"])
    client.apply(client.plan(only=["collections"]).to_json())
    assert since(controller, "a") == 7
    with pytest.raises(PlanMoved):
        client.apply(plan)


@pytest.mark.parametrize("exactly", [["a", "close"], [], ["a", "close", "x", "y"]])
def test_a_step_that_is_none_is_refused(world: World, exactly: list[str]) -> None:
    controller = made(world, "a")
    text = controller.client.plan(only=["collections"]).to_json()
    plan = parse_plan(text)
    wrong = with_a_step(plan, exactly)
    with pytest.raises(InvalidUsage, match="a step of a collection has"):
        parse_plan(wrong)
    with pytest.raises(NotFound):
        controller.plan("nothing")


@pytest.mark.parametrize("bad", [5, "a", [("a", "close", "x")], {"a": 1}])
def test_what_is_no_list_of_steps_is_refused(world: World, bad: Any) -> None:
    controller = made(world, "a")
    for call in (controller.apply, lambda steps: controller.tend(planned=steps)):
        with pytest.raises(InvalidUsage, match="steps are what"):
            call(bad)
    assert since(controller, "a") == 0


def test_a_file_makes_upkeep_do_nothing_that_it_would_not_do_by_itself(world: World) -> None:
    controller = made(world, "a")
    plan = controller.client.plan(only=["collections"])
    shard = controller.describe("a").active.shards[0]
    with pytest.raises(PlanMoved):
        controller.client.apply(with_a_step(plan, ["a", "finish", shard]))
    assert since(controller, "a") == 0
    assert not controller.client.inspect(shard).state.is_finished()


def with_a_step(plan: Plan, exactly: list[str]) -> str:
    """The text of the plan, with one more step."""
    found = msgspec.json.decode(plan.to_json())
    found["collections"].append({**found["collections"][0], "exactly": exactly})
    return msgspec.json.encode(found).decode()


def test_a_client_that_only_reads_may_plan(world: World) -> None:
    made(world, "a")
    client = world.client(read_only=True)
    steps = client.plan(only=["collections"]).collections
    assert steps
    with pytest.raises(persist.InvalidUsage):
        client.controller().apply(steps)
