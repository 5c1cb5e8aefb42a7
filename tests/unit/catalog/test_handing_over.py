"""A handover in one call, and what is said before: what would happen, when readers see it, and why it is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.catalog.maintenance import _Tending
from persist_lib.frontier import at
from tests.renditions import Told, check, create, write
from tests.worlds import World


def with_a_copy(world: World, mode: str = "compare_and_append") -> tuple[Controller, Told]:
    told, controller = Told(), create(world.client(), mode)
    write(controller, told, range(3))
    controller.make_rendition("c", copy=True, shards=2)
    return controller, told


def test_one_call_copies_the_rest_and_readers_see_it(world: World) -> None:
    controller, told = with_a_copy(world)
    with controller.open_reader("c") as reader:
        listen = reader.listen(2)
        assert controller.hand_over("c", 2, advance=True, wait=True, command="one") == 3
        told.copy(2, 1)
        told.hand_over(2, 3)
        assert controller.describe("c").upper == at(4)
        assert [event.frontier for event in listen.poll() if isinstance(event, persist.Progress)] == [at(4)]
    told.last.upper = at(4)
    assert controller.hand_over("c", 2, advance=True, wait=True, command="one") == 3, "the same call again"
    write(controller, told, range(4, 6))
    check(controller, told, 0, 5)


def test_a_copy_that_was_handed_over_to_and_lacks_rows_is_not_handed_over_from(world: World) -> None:
    """Closing it for the next one would leave out for ever what was not copied to it yet."""
    controller, told = with_a_copy(world)
    controller.copy_rendition("c", 2)
    write(controller, told, range(3, 5))
    assert controller.hand_over("c", 2, command="one") == 5
    told.hand_over(2, 5)
    controller.make_rendition("c", copy=True)
    with pytest.raises(persist.HandoverRefused, match="lacks what was written before 5"):
        controller.hand_over("c", 3)
    assert controller.describe("c").active.number == 2
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    assert controller.hand_over("c", 3, advance=True) == 6
    told.copy(3, 2)
    told.hand_over(3, 6)
    told.last.upper = at(7)
    check(controller, told, 0, 6)


def test_a_copy_that_began_with_what_was_there_before_a_handover_is_finished(world: World) -> None:
    """It has the contents as of just before, and reads on from there: the rendition that it copies must keep that."""
    controller, told = with_a_copy(world)
    controller.hand_over("c", 2)
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    told.hand_over(2, 3)
    controller.make_rendition("c", copy=True)
    controller.copy_rendition("c", 3)
    write(controller, told, range(3, 6))
    controller.tend("c")
    assert controller.hand_over("c", 3, advance=True) == 6
    told.copy(3, 2)
    told.hand_over(3, 6)
    told.last.upper = at(7)
    check(controller, told, 0, 6)


def test_all_history_that_can_be_read_is_said_after_a_handover_too(world: World) -> None:
    controller, told = with_a_copy(world)
    controller.hand_over("c", 2, advance=True)
    told.copy(2, 1)
    told.hand_over(2, 3)
    told.last.upper = at(4)
    controller.tend("c")
    check(controller, told, 0, 3)
    assert controller.describe("c").since == at(0)
    assert controller.client.table("c").history()["_time"].to_pylist() == [2, 1, 0]


def begun_and_left(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stretch of a new copy is in one of its shards, when its process dies."""
    append, made = persist.WriteHandle.append, controller.make_rendition("c", copy=True, shards=2).number
    calls = iter(range(9))

    def once(write: Any, *args: Any, **more: Any) -> Any:
        if next(calls):
            raise RuntimeError("the process dies")
        return append(write, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(persist.WriteHandle, "append", once)
        with pytest.raises(RuntimeError, match="dies"):
            controller.copy_rendition("c", made)


@pytest.mark.parametrize("loses", ["to a tender that looked before it began", "to a person who may do so"])
def test_a_copy_whose_hold_is_gone_continues_as_it_began(
    world: World, loses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun again as of another time, it would have the rows of the first shard twice."""
    told, controller = Told(), create(world.client(), "compare_and_append")
    write(controller, told, range(3))
    move = _Tending._move_holds
    if loses.startswith("to a tender"):

        def slowly(tending: Any, renditions: Any) -> Any:
            begun_and_left(controller, monkeypatch)
            return move(tending, renditions)

        with monkeypatch.context() as patch:
            patch.setattr(_Tending, "_move_holds", slowly)
            world.client().controller().tend("c")
        shard = f"{controller.describe('c').id}.renditions"
        assert "copy-r2" in controller.client.inspect(shard).state.holds, "it is at work"
    else:
        begun_and_left(controller, monkeypatch)
        controller.client.release_hold(f"{controller.describe('c').id}.renditions", "copy-r2")
    write(controller, told, range(3, 5))
    controller.hand_over("c", 2, advance=True)
    told.copy(2, 1)
    told.hand_over(2, 5)
    told.last.upper = at(6)
    check(controller, told, 0, 5)


def test_without_it_readers_see_a_handover_once_a_writer_has_come_there(world: World) -> None:
    controller, told = with_a_copy(world)
    controller.copy_rendition("c", 2)
    with pytest.raises(persist.TimedOut, match="readers do not see it yet"):
        controller.hand_over("c", 2, wait=True, timeout=1, command="one")
    assert controller.describe("c").active.number == 2
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    told.hand_over(2, 3)
    write(controller, told, range(3, 4))
    assert controller.hand_over("c", 2, wait=True, timeout=1, command="one") == 3
    check(controller, told, 0, 3)


def test_a_transformation_goes_on_in_the_rest(world: World) -> None:
    import pyarrow.compute as pc  # noqa: PLC0415

    controller, told = with_a_copy(world)

    def loud(table: Any) -> Any:
        return table.set_column(table.schema.get_field_index("word"), "word", pc.utf8_upper(table.column("word")))

    controller.copy_rendition("c", 2, transform=loud)
    write(controller, told, range(3, 4))
    controller.hand_over("c", 2, advance=True, transform=loud)
    with controller.open_reader("c") as reader:
        assert set(reader.snapshot(3, diff=True).to_arrow()["word"].to_pylist()) == {"w"}
        assert set(reader.snapshot(4, diff=True).to_arrow()["word"].to_pylist()) == {"W"}


def test_in_definite_collections_a_handover_is_seen_when_writers_come_there(world: World) -> None:
    controller, _ = with_a_copy(world, "append")
    assert controller.hand_over("c", 2, advance=True) == 3
    assert controller.describe("c").upper == at(3)
    with controller.open_writer("c") as writer:
        writer.append([], 3, 4)
    assert controller.hand_over("c", 1, force=True, dry_run=True) == 4


def test_a_plan_says_what_would_happen_and_why_not(world: World) -> None:
    controller, told = with_a_copy(world)
    seqno = controller.client.inspect("_catalog").seqno
    plan = controller.plan_handover("c", 2)
    assert (plan.rendition, plan.follows, plan.at, plan.upper, plan.reached) == (2, 1, 3, at(3), at(0))
    assert (plan.is_copy, plan.refused) == (True, "")
    assert "promised already" in controller.plan_handover("c", 2, at=1).refused
    assert "is the collection already" in controller.plan_handover("c", 1).refused
    controller.make_rendition("c")
    assert "has data up to" in controller.plan_handover("c", 3).refused
    assert controller.plan_handover("c", 3, force=True).refused == ""
    reading = world.client(read_only=True).controller()
    assert reading.plan_handover("c", 2, at=9).at == 9
    assert controller.client.inspect("_catalog").seqno == seqno + 2, "only the rendition was made"
    assert controller.hand_over("c", 2) == plan.at
    with pytest.raises(persist.NotFound):
        controller.plan_handover("c", 9)
    check(controller, told, 0, 2)


def test_a_dry_run_of_giving_up_a_rendition_says_what_goes_and_who_is_in_the_way(world: World) -> None:
    controller, told = with_a_copy(world)
    with controller.client.open_reader(controller.describe("c").renditions[1].shards[0]) as raw:
        plan = controller.drop_rendition("c", 2, dry_run=True)
        assert [step.action for step in plan.steps if "r2" in step.subject] == ["wait", "finish"]
        assert raw.id is not None
        assert raw.id in plan.waiting[0].reason
    plan = world.client(read_only=True).controller().drop_rendition("c", 2, dry_run=True)
    assert controller.describe("c").renditions[1].state == "live"
    assert controller.drop_rendition("c", 2).steps == plan.steps
    for number, says in ((1, "is the collection at times"), (2, "has no rendition")):
        with pytest.raises(persist.PersistError, match=says):
            controller.drop_rendition("c", number, dry_run=True)
    check(controller, told, 0, 2)


def test_wrong_ways_to_ask_are_refused(world: World) -> None:
    controller: Any = with_a_copy(world)[0]
    for options in (
        {"advance": True, "at": 9},
        {"advance": "yes"},
        {"wait": 1},
        {"transform": len},
        {"advance": True, "transform": "fixes:loud"},
        {"dry_run": "no"},
        {"timeout": "1"},
    ):
        with pytest.raises(persist.InvalidUsage):
            controller.hand_over("c", 2, **options)
    assert controller.describe("c").active.number == 1


def test_a_writer_that_waits_for_the_copy_is_let_go_by_the_call(tmp_path: Any) -> None:
    """In real time: the writer waits in one thread for what the other one does."""
    with persist.open(f"file:{tmp_path}/data") as client:
        told, controller = Told(), create(client)
        write(controller, told, range(3))
        controller.make_rendition("c", copy=True, shards=2)
        with controller.open_writer("c") as writer:
            handed = threading.Event()
            written: list[Any] = []

            def upsert() -> None:
                handed.wait(30)
                written.append(writer.upsert([{"id": 1, "word": "late"}], timeout=60))

            thread = threading.Thread(target=upsert)
            thread.start()
            handed.set()
            assert controller.hand_over("c", 2, advance=True, wait=True, timeout=60) >= 3
            thread.join(60)
            assert written[0].time is not None
        with controller.open_reader("c") as reader:
            assert {"id": 1, "word": "late", "_diff": 1} in reader.snapshot(diff=True).to_pylist()
