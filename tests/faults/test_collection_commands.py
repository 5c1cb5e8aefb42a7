"""A process at a collection that dies before any one of its requests, or after: another one goes on, and all is right.

Each story is one process's work: a command of the controller, a copy, a write, a round of the duty. It is run once to
count its requests that change something, and then again for each of them: dead from that request on, which itself
happens or does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.catalog.staging import CollectionStaged
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome
from tests import circles
from tests.renditions import Listening, Told, check, write
from tests.worlds import SCHEMA, WIDER, World, row, updates

CHANGING = {"compare_and_set", "compare_and_set_many", "set", "delete", "truncate", "point", "delete_many"}
CONFIG = persist.Config(timeout_s=2, inline_bytes=0)
PARTS: list[CollectionStaged] = []
"""What was staged before the process that dies."""


class Died(BaseException):
    """The process is gone."""


class Dying:
    """From the k-th request that changes something on, nothing reaches the location; that one may still happen."""

    def __init__(self, k: int | None, *, happens: bool) -> None:
        self.k, self.happens, self.seen = k, happens, 0

    def decide(self, operation: Operation) -> Fate:
        if self.k is not None and self.seen >= self.k:
            raise Died
        if operation.kind in CHANGING:
            self.seen += 1
            if self.seen == self.k and not self.happens:
                raise Died
        return Fate(Outcome.DONE)


class Story(NamedTuple):
    """`before` is what there is, `work` what the process that dies does, `after` what another one does to continue."""

    before: Callable[[Controller, Told], object]
    work: Callable[[Controller], object]
    after: Callable[[Controller, Told], object]


def nothing(_controller: Controller, _told: Told) -> None:
    """There is nothing."""


def some_history(controller: Controller, told: Told) -> None:
    controller.create("c", SCHEMA, shards=2, mode="compare_and_append")
    write(controller, told, range(3))


def with_a_copy(controller: Controller, told: Told) -> None:
    some_history(controller, told)
    controller.make_rendition("c", copy=True, shards=3)


def with_two_stretches(controller: Controller, told: Told) -> None:
    with_a_copy(controller, told)
    controller.copy_rendition("c", 2)
    write(controller, told, range(3, 5))


def after_a_handover(controller: Controller, told: Told) -> None:
    with_two_stretches(controller, told)
    start = controller.hand_over("c", 2)
    told.copy(2, 1)
    told.hand_over(2, start)


def after_a_whole_handover(controller: Controller, told: Told) -> None:
    after_a_handover(controller, told)
    controller.copy_rendition("c", 2, to_end=True)


def with_an_old_rendition(controller: Controller, told: Told) -> None:
    after_a_handover(controller, told)
    controller.copy_rendition("c", 2, to_end=True)
    write(controller, told, range(5, 7))
    controller.alter("c", retention=0)


def create_and_write(controller: Controller, told: Told) -> None:
    """Whether the first one decided it or not, the same command is done once."""
    controller.create("c", SCHEMA, shards=2, mode="compare_and_append", command="one")
    write(controller, told, range(3))


def made(controller: Controller, told: Told) -> None:
    assert controller.make_rendition("c", copy=True, shards=3, command="one").number == 2
    assert [one.number for one in controller.describe("c").renditions] == [1, 2]
    hand_on(controller, told)


def hand_on(controller: Controller, told: Told) -> None:
    start = controller.hand_over("c", 2, command="hand")
    assert controller.hand_over("c", 2, command="hand") == start
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    told.hand_over(2, start)
    upper = controller.describe("c").upper.time or 0
    told.last.upper = persist.at(upper)
    write(controller, told, range(upper, upper + 2))


def advanced(controller: Controller, told: Told) -> None:
    start = controller.hand_over("c", 2, command="hand", advance=True, wait=True)
    told.copy(2, 1)
    told.hand_over(2, start)
    found = controller.describe("c")
    assert found.upper == persist.at(start + 1)
    told.last.upper = found.upper
    write(controller, told, range(start + 1, start + 2))


def given_up(controller: Controller, told: Told) -> None:
    controller.drop_rendition("c", 2, command="one")
    controller.tend()
    assert [one.number for one in controller.describe("c").renditions] == [1]
    assert [hold for shard in controller.client.shards() for hold in held(controller, shard)] == []
    write(controller, told, range(5, 6))


def held(controller: Controller, shard: str) -> list[str]:
    return [hold for hold in controller.client.inspect(shard).state.holds if hold.startswith("copy")]


def copied_to_end(controller: Controller, told: Told) -> None:
    controller.copy_rendition("c", 2, to_end=True)
    write(controller, told, range(5, 7))


def writes_go_on(controller: Controller, told: Told) -> None:
    with controller.open_writer("c") as writer:
        token = b"t" * 16
        made = [row(i, "x", 3) for i in range(9)]
        writer.compare_and_append(made, 3, 4, token=token)
        told.last.append(updates(made), persist.at(3), persist.at(4))
        upserted = writer.upsert([{"id": 1, "word": "y"}])
        assert upserted.time == 4
    old = [(data, 4, -n) for data, n in told.contents(3).items() if data[0] == 1]
    told.last.append([*old, ((1, "y"), 4, 1)], persist.at(4), persist.at(5))


def write_by_token(controller: Controller) -> None:
    with controller.open_writer("c") as writer:
        writer.compare_and_append([row(i, "x", 3) for i in range(9)], 3, 4, token=b"t" * 16)


def write_staged(controller: Controller) -> None:
    with controller.open_writer("c") as writer, writer.stage() as stage:
        staged = [stage.write([{"id": i, "word": "x"} for i in range(start, 12, 2)]) for start in range(2)]
        writer.upsert_staged(staged, producer=("q", 1))


def with_parts_for_an_old_rendition(controller: Controller, told: Told) -> None:
    with_two_stretches(controller, told)
    with controller.open_writer("c") as writer:
        PARTS[:] = [writer.stage().write([{"id": i, "word": "x"} for i in range(12)])]
    start = controller.hand_over("c", 2)
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    told.hand_over(2, start)


def write_parts_for_an_old_rendition(controller: Controller) -> None:
    with controller.open_writer("c") as writer:
        writer.upsert_staged(PARTS, producer=("q", 1))


def staged_again(controller: Controller, told: Told) -> None:
    """Whether the first one committed or not, the same epoch of a producer is written once."""
    with suppress(persist.AlreadyProduced):
        write_staged(controller)
    with pytest.raises(persist.AlreadyProduced):
        write_staged(controller)
    upper = controller.describe("c").upper
    time = (upper.time or 0) - 1
    old = [(data, time, -n) for data, n in told.contents(time).items() if int(data[0] or 0) < 12]
    told.last.append([*old, *(((i, "x"), time, 1) for i in range(12))], told.last.upper, upper)


def tended(controller: Controller, _told: Told) -> None:
    for _ in range(2):
        controller.tend()
    found = controller.describe("c")
    assert [one.number for one in found.renditions] == [2]
    assert found.since.time == 6


def dropped(controller: Controller, told: Told) -> None:
    controller.drop("c", command="one")
    controller.tend()
    controller.create("c", SCHEMA, shards=2, mode="compare_and_append")
    told.__init__()  # type: ignore[misc]
    write(controller, told, range(2))


def evolved(controller: Controller, told: Told) -> None:
    told.schema = SCHEMA
    assert controller.evolve("c", WIDER, command="one").added == ("more",)
    assert controller.evolve("c", WIDER, command="one").added == ("more",)
    found = controller.describe("c")
    assert {one.schema for one in found.renditions} == {WIDER}
    for shard in (shard for one in found.renditions for shard in one.shards):
        assert controller.client.inspect(shard).state.schemas == (SCHEMA, WIDER)
    write(controller, told, range(5, 7))


def renamed(controller: Controller, told: Told) -> None:
    controller.rename("c", "d", command="one")
    controller.rename("d", "c", command="two")
    assert controller.rename("c", "d", command="one").name == "c", (
        "it is repeated, and it is that collection's name now"
    )
    write(controller, told, range(3, 4))


STORIES = {
    "create": Story(
        nothing,
        lambda c: c.create("c", SCHEMA, shards=2, mode="compare_and_append", command="one"),
        create_and_write,
    ),
    "make a rendition": Story(some_history, lambda c: c.make_rendition("c", copy=True, shards=3, command="one"), made),
    "begin to copy": Story(with_a_copy, lambda c: c.copy_rendition("c", 2), hand_on),
    "copy on": Story(with_two_stretches, lambda c: c.copy_rendition("c", 2), hand_on),
    "hand over": Story(with_two_stretches, lambda c: c.hand_over("c", 2, command="hand"), hand_on),
    "copy to the end": Story(after_a_handover, lambda c: c.copy_rendition("c", 2, to_end=True), copied_to_end),
    "write": Story(some_history, write_by_token, writes_go_on),
    "write what was staged": Story(some_history, write_staged, staged_again),
    "write what was staged for an old rendition": Story(
        with_parts_for_an_old_rendition, write_parts_for_an_old_rendition, staged_again
    ),
    "tend": Story(with_an_old_rendition, lambda c: c.tend(), tended),
    "drop": Story(with_an_old_rendition, lambda c: c.drop("c", command="one"), dropped),
    "evolve": Story(after_a_whole_handover, lambda c: c.evolve("c", WIDER, command="one"), evolved),
    "hand over and advance": Story(
        with_two_stretches, lambda c: c.hand_over("c", 2, command="hand", advance=True), advanced
    ),
    "drop a rendition": Story(with_two_stretches, lambda c: c.drop_rendition("c", 2, command="one"), given_up),
    "rename": Story(some_history, lambda c: c.rename("c", "d", command="one"), renamed),
}


@pytest.mark.parametrize("name", STORIES)
def test_another_process_goes_on_where_one_died(
    place: Callable[[str], tuple[str, str | None]], name: str, request: pytest.FixtureRequest
) -> None:
    story, seed = STORIES[name], 0
    total = run(place("whole"), story, Dying(None, happens=True), seed)
    assert total > 0
    is_memory = "memory" in request.node.name
    for k in circles.by_day(range(1, total + 1), 8):
        for happens in (True, False) if is_memory else (k % 2 == 0,):
            run(place(f"{k}-{happens}"), story, Dying(k, happens=happens), seed)


def run(place: tuple[str, str | None], story: Story, dying: Dying, seed: int) -> int:
    """The story, with a process that dies so. Answers how many requests it got through."""
    world, told = World(place[0], seed, place[1]), Told()
    try:
        first = world.client(CONFIG).controller()
        story.before(first, told)
        listening = None
        if told.last.updates:
            reader = first.open_reader("c")
            listening = Listening(reader, (told.last.upper.time or 1) - 1 if len(told.starts) == 1 else 0, told)
            reader.close()
        client = world.client(CONFIG, plan=dying)
        with suppress(Died):
            story.work(client.controller())
        if listening is not None and story.after in {tended, dropped}:
            listening.listen.close()
            listening = None
        story.after(world.client(CONFIG).controller(), told)
        other = world.client(CONFIG).controller()
        found = other.describe("c")
        assert found.pending == ()
        check(other, told, found.since.time or 0, (told.last.upper.time or 1) - 1)
        if listening is not None:
            listening.poll()
            assert listening.frontier == told.last.upper.time
        return dying.seen
    finally:
        dying.k = None  # its connections are closed at last
        world.close()
