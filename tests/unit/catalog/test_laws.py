"""The laws of handovers: each is a story that holds, and fails with the mutant that it is there to find.

They are the rules that the exhaustive model of handovers needs; a mutant is the code without one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.catalog import answers, committing, effects, maintenance, writer
from persist_lib.catalog.catalog import setting
from persist_lib.catalog.controller import Controller
from persist_lib.catalog.difference_cache import difference
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.renditions import schema_for
from persist_lib.client import Client
from persist_lib.frontier import at
from persist_lib.testing import Model, contents_of
from tests.renditions import Listening, Told, check, create, handed, write
from tests.worlds import World, row, updates

Law = Callable[[World], None]
Plant = Callable[[pytest.MonkeyPatch], None]


def every_time_can_be_read_that_the_rendition_shard_keeps(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(5))
    for shard in controller.describe("c").renditions[0].shards:  # somebody reads on, and gives up what was before
        with world.client().open_reader(shard) as read:
            read.downgrade_since(4)
    check(controller, told, 0, 4)


def no_hold(patch: pytest.MonkeyPatch) -> None:
    kept = effects._hold
    patch.setattr(effects, "_hold", lambda client, shard: None if ".s" in shard else kept(client, shard))


def an_old_rendition_stays_as_long_as_its_times_can_be_read(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    handed(controller, told)
    write(controller, told, range(3, 5))
    controller.set_hold("c", "mine", 1)
    controller.alter("c", retention=0)
    controller.tend("c")
    check(controller, told, 1, 4)
    controller.release_hold("c", "mine")
    controller.tend("c")
    controller.tend("c")
    assert [rendition.number for rendition in controller.describe("c").renditions] == [2], "and goes after that"
    check(controller, told, 4, 4)


def drop_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(maintenance, "_is_over", lambda record, timeline: record.begun and timeline.last.rendition != record)

    def mark(self: Any, record: Any) -> None:
        gone = setting(msgspec.structs.replace(record, state="dropping"))
        self._catalog.change(lambda _: (gone, None), self._deadline)

    patch.setattr(maintenance._Tending, "_mark", mark)


def a_listener_needs_nothing_of_the_old_rendition_at_the_handover(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    with controller.open_reader("c") as reader:
        listening = Listening(reader, 0, told)
        handed(controller, told)
        write(controller, told, range(3, 6))
        listening.poll()
        assert listening.frontier == 6


def diff_at_th(patch: pytest.MonkeyPatch) -> None:
    def handed_over(reader: Any, old: Any, new: Any, time: int, deadline: Any) -> Iterator[pa.Table]:
        with ExitStack() as held:
            sides = [
                [
                    held.enter_context(h.snapshot(time, timeout=0.1, diff=True)).batches()
                    for h in reader.shards_of(span.rendition)
                ]
                for span in (old, new)
            ]
            yield from difference(reader.schema, sides[0], sides[1], time, reader.client.config.merge_bytes)

    patch.setattr(answers, "handed_over", handed_over)


def asking_for_a_time_far_ahead_puts_no_handover_off(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    with controller.open_reader("c") as reader, pytest.raises(persist.TimedOut):
        reader.snapshot(1000, timeout=0.1, diff=True)
    handed(controller, told)
    assert told.starts[-1][0] == 3
    write(controller, told, range(3, 6))
    check(controller, told, 0, 5)


def promise_as_asked(patch: pytest.MonkeyPatch) -> None:
    known = RenditionReader.known

    def promising(self: Any, time: int, deadline: Any, **how: Any) -> Any:
        self.promise(at(time + 1), deadline)
        return known(self, time, deadline, **how)

    patch.setattr(RenditionReader, "known", promising)


def a_handover_below_a_promise_is_refused(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    new = controller.make_rendition("c").number
    other = world.client().controller()

    def promise() -> None:  # after the controller has looked, and before its handover is there
        write(other, told, range(3, 6))

    rival_client = world.client(rival=world.rival)
    late = rival_client.controller()
    late.list()
    world.rival.before_next(lambda: None)  # deciding it
    world.rival.before_next(promise)
    with pytest.raises(persist.HandoverRefused, match="promised already"):
        late.hand_over("c", new, at=3, force=True)
    assert world.rival.waiting == 0
    check(controller, told, 0, 5)


def handover_below_promise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects, "_never", lambda timeline, command: "")


def a_rendition_can_be_read_from_any_time_at_which_it_may_follow(world: World) -> None:
    told, controller = Told(), create(world.client())
    controller.make_rendition("c")
    told.renditions[2] = Model()
    with controller.open_writer("c", rendition=2) as second:
        for time in range(20):
            made = [row(time, "second", time)]
            second.compare_and_append(made, time, time + 1)
            told.renditions[2].append(updates(made), at(time), at(time + 1))
    write(controller, told, range(5))
    controller.alter("c", retention=0)
    controller.tend("c")
    for shard in controller.describe("c").renditions[1].shards:
        with world.client().open_reader(shard) as read:
            read.downgrade_since(19)
    start = controller.hand_over("c", 2)
    assert start == 5
    told.hand_over(2, start)
    check(controller, told, 4, 19)


def no_hold_before(patch: pytest.MonkeyPatch) -> None:
    kept = maintenance._hold_of

    def hold_of(record: Any, timeline: Any, upper: Any) -> tuple[int, str]:
        starts = [span for span in timeline.spans if span.rendition.number == record.number]
        return kept(record, timeline, upper) if starts else (19, "nobody reads it yet")

    patch.setattr(maintenance, "_hold_of", hold_of)


def who_registers_first_can_read_what_it_found(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    handed(controller, told)
    write(controller, told, range(3, 6))
    controller.alter("c", retention=3)
    controller.tend("c")  # since is 2: the old rendition is still needed there

    def everything_goes() -> None:
        controller.alter("c", retention=0)
        for _ in range(3):
            controller.tend("c")

    shards_of, acts = RenditionReader.shards_of, [everything_goes]

    def late(self: Any, rendition: Any) -> Any:
        while acts:
            acts.pop()()
        return shards_of(self, rendition)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RenditionReader, "shards_of", late)
        with world.client().controller().open_reader("c") as reader:
            assert not acts
            for time in (2, 3, 5):
                assert contents_of(reader.snapshot(time, diff=True).to_arrow()) == told.contents(time)


def hold_R_late(patch: pytest.MonkeyPatch) -> None:  # noqa: N802 - as the model calls it
    opened = Client.open_reader

    def open_reader(self: Any, name: str, schema: Any = None, **options: Any) -> Any:
        if name.endswith(".renditions"):
            return unheld(self, name, schema_for(None))
        return opened(self, name, schema, **options)

    patch.setattr(Client, "open_reader", open_reader)


def no_handover_is_below_what_was_acknowledged(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(4))
    controller.make_rendition("c")
    with pytest.raises(persist.HandoverRefused, match="promised already"):
        controller.hand_over("c", 2, at=3, force=True)
    assert controller.hand_over("c", 2, at=4, force=True) == 4
    check(controller, told, 0, 3)


def nor_below_what_definite_writers_appended(world: World) -> None:
    told, controller = Told(), create(world.client(), "append")
    write(controller, told, range(4))
    controller.make_rendition("c")
    with pytest.raises(persist.HandoverRefused, match="promised already"):
        controller.hand_over("c", 2, at=3, force=True)
    check(controller, told, 0, 3)


def write_unpromised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committing, "_promise_for", lambda table, lower, upper: at(0))
    patch.setattr(writer.CollectionWriter, "_promise", lambda self, upper, deadline: None)


def a_copy_can_be_handed_over_to_while_the_old_one_is_written(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    made = controller.make_rendition("c", copy=True, shards=2).number
    controller.copy_rendition("c", made)
    write(controller, told, range(3, 6))
    start = controller.hand_over("c", made)
    told.copy(made, 1)
    told.hand_over(made, start)
    controller.copy_rendition("c", made, to_end=True)
    write(controller, told, range(6, 8))
    check(controller, told, 0, 7)


def need_complete(patch: pytest.MonkeyPatch) -> None:
    kept = Controller._check_reach

    def check_reach(self: Any, name: str, new: Any, time: int, slack: int, *, force: bool) -> None:
        kept(self, name, msgspec.structs.replace(new, copies=None), time, slack, force=force)

    patch.setattr(Controller, "_check_reach", check_reach)


LAWS: list[tuple[Law, Plant]] = [
    (every_time_can_be_read_that_the_rendition_shard_keeps, no_hold),
    (an_old_rendition_stays_as_long_as_its_times_can_be_read, drop_early),
    (a_listener_needs_nothing_of_the_old_rendition_at_the_handover, diff_at_th),
    (asking_for_a_time_far_ahead_puts_no_handover_off, promise_as_asked),
    (a_handover_below_a_promise_is_refused, handover_below_promise),
    (a_rendition_can_be_read_from_any_time_at_which_it_may_follow, no_hold_before),
    (who_registers_first_can_read_what_it_found, hold_R_late),
    (no_handover_is_below_what_was_acknowledged, write_unpromised),
    (nor_below_what_definite_writers_appended, write_unpromised),
    (a_copy_can_be_handed_over_to_while_the_old_one_is_written, need_complete),
]
NAMES = [f"{law.__name__}-{plant.__name__}" for law, plant in LAWS]


@pytest.mark.parametrize("law", [law for law, _ in LAWS], ids=NAMES)
def test_a_law_holds(world: World, law: Law) -> None:
    law(world)


@pytest.mark.parametrize(("law", "plant"), LAWS, ids=NAMES)
def test_a_law_finds_its_mutant(world: World, law: Law, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:  # each mutant breaks something else
        law(world)
    print(type(found.value).__name__, found.value)
