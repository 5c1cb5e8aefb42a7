"""Columns that are added to a collection: all shards get them, and whoever is at work continues."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import evolution
from persist_lib.frontier import at
from persist_lib.shard.admin import evolve_schema
from persist_lib.shard.commit import Machine
from persist_lib.testing import contents_of
from tests.renditions import Listening, Told, check, create, handed, write
from tests.worlds import SCHEMA, WIDER, World, row

WIDEST = persist.Schema(key=WIDER.key, value={"word": "string", "more": "int64", "x": "bool"})


def rows_of(controller: Any, **options: Any) -> list[dict[str, Any]]:
    with controller.open_reader("c") as reader:
        return sorted(reader.snapshot(**options, diff=True).to_pylist(), key=lambda one: one["id"])


def test_readers_listeners_and_writers_go_on_in_their_columns(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    with controller.open_reader("c") as reader, controller.open_writer("c") as old:
        listening = Listening(reader, 0, told)
        done = controller.evolve("c", WIDER)
        assert (done.added, done.renditions) == (("more",), (1,))
        assert controller.describe("c").schema == WIDER
        with controller.open_writer("c") as new:
            assert new.schema == WIDER
            new.upsert([{"id": 500, "word": "n", "more": 7}])
        told.last.append([((500, "n"), 2, 1)], at(2), at(3))
        old.upsert([{"id": 501, "word": "o"}])
        told.last.append([((501, "o"), 3, 1)], at(3), at(4))
        listening.poll()
        assert listening.frontier == 4
        assert contents_of(reader.snapshot(3, diff=True).to_arrow()) == told.contents(3)
        with pytest.raises(persist.SchemaMismatch, match="have something in them"):
            old.upsert([{"id": 500, "word": "m"}])
        assert old.upsert([{"id": 501, "word": "p"}]).updated == 1
        told.last.append([((501, "o"), 4, -1), ((501, "p"), 4, 1)], at(4), at(5))
        assert contents_of(reader.snapshot(4, diff=True).to_arrow()) == told.contents(4)
    found = {one["id"]: one["more"] for one in rows_of(controller)}
    assert found.pop(500) == 7
    assert set(found.values()) == {None}
    assert rows_of(controller, as_of=1)[0]["more"] is None, "also before it"


def test_the_same_again_changes_nothing_and_a_dry_run_neither(world: World) -> None:
    controller = create(world.client())
    before = world.client().inspect("_catalog").seqno
    assert controller.evolve("c", WIDER, dry_run=True) == controller.evolve("c", WIDER, dry_run=True)
    assert world.client().inspect("_catalog").seqno == before
    done = controller.evolve("c", WIDER, command="one")
    assert controller.evolve("c", WIDER, command="one") == done
    assert controller.evolve("c", WIDER).added == ()
    assert controller.evolve("c", WIDEST).added == ("x",)
    assert controller.evolve("c", WIDER, command="one") == done, "repeated after another one"
    with pytest.raises(persist.InvalidUsage, match="another command"):
        controller.evolve("c", WIDEST, command="one")


def test_other_renditions_of_the_same_columns_get_them_and_later_ones_are_made_with_them(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    handed(controller, told)
    write(controller, told, range(2, 4))
    controller.make_rendition("c", shards=2)
    other = persist.Schema(key=SCHEMA.key, value={"letters": "int64"})
    controller.make_rendition("c", schema=other)
    assert controller.evolve("c", WIDER).renditions == (1, 3, 2), "the active one last"
    found = {one.number: one.schema for one in controller.describe("c").renditions}
    assert found == {1: WIDER, 2: WIDER, 3: WIDER, 4: other}
    assert controller.make_rendition("c", copy=True).schema == WIDER
    controller.copy_rendition("c", 5)
    assert controller.compare("c", 5).is_equal
    controller.hand_over("c", 5, advance=True)
    assert controller.describe("c").schema == WIDER
    told.copy(5, 2)
    told.hand_over(5, 4)
    with controller.open_reader("c", SCHEMA) as reader:
        for time in range(5):
            assert contents_of(reader.snapshot(time, diff=True).to_arrow()) == told.contents(time)


def test_a_copy_under_way_is_in_the_way(world: World) -> None:
    """Who copies may have begun before, and would leave out what is in the new columns."""
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    controller.make_rendition("c", copy=True)
    for _ in range(2):
        with pytest.raises(persist.InvalidUsage, match="rendition 2 is a copy"):
            controller.evolve("c", WIDER)
        controller.copy_rendition("c", 2)
    assert controller.describe("c").schema == SCHEMA
    controller.hand_over("c", 2, advance=True)
    assert controller.evolve("c", WIDER).renditions == (1, 2)


BAD = {
    "another type": ({"word": "int64"}, "not|differ|change"),
    "a column less": ({}, "word: string.* is missing; say schema.drop"),
    "not null": ({"word": "string", "more": "int64 not null"}, "must be nullable"),
    "in front": ({"more": "int64", "word": "string"}, "in another order"),
}


@pytest.mark.parametrize(("value", "says"), BAD.values(), ids=BAD)
def test_what_is_no_addition_is_refused(world: World, value: Any, says: str) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    schema = persist.Schema(key=SCHEMA.key, value=value)
    for is_dry in (True, False):
        with pytest.raises(persist.SchemaMismatch, match=says):
            controller.evolve("c", schema, dry_run=is_dry)
    check(controller, told, 0, 1)
    assert controller.describe("c").pending == ()


def test_wrong_arguments_are_refused(world: World) -> None:
    controller: Any = create(world.client())
    for call in (
        lambda: controller.evolve("c", {"more": "int64"}),
        lambda: controller.evolve("c", WIDER, dry_run="yes"),
        lambda: controller.evolve("d", WIDER),
        lambda: controller.evolve("", WIDER),
        lambda: controller.evolve("c", WIDER, command=""),
        lambda: world.client(read_only=True).controller().evolve("c", WIDER),
    ):
        with pytest.raises(persist.PersistError):
            call()


def test_whoever_opens_a_collection_while_columns_are_being_added_reads_all_of_it_in_the_old_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    evolve, calls = evolve_schema, iter((False, True))

    def interrupted(machine: Machine, schema: persist.Schema, number: int | None) -> None:
        if next(calls):
            raise KeyboardInterrupt
        evolve(machine, schema, number)

    with monkeypatch.context() as patch:
        patch.setattr(evolution, "evolve_schema", interrupted)
        with pytest.raises(KeyboardInterrupt):
            controller.evolve("c", WIDER)
    check(controller, told, 0, 1)
    with controller.open_writer("c") as writer, controller.open_reader("c") as reader:
        assert writer.schema == reader.schema == SCHEMA
        writer.upsert([{"id": n, "word": "u"} for n in range(60)])
        assert {one["word"] for one in reader.snapshot(diff=True).to_pylist() if one["id"] < 60} == {"u"}
        tables = [table for split in reader.snapshot(diff=True).splits(4) for table in split.batches()]
        assert {tuple(table.column_names) for table in tables} == {("id", "word", "_diff")}
    with controller.open_writer("c") as writer:
        writer.compare_and_append([row(1, "x", 3)], 3, 4)
    controller.tend("c")
    assert controller.describe("c").schema == WIDER


def test_a_column_that_is_renamed_and_renamed_back_has_its_name_again(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    before, other = rows_of(controller), SCHEMA.rename({"word": "text"})
    assert controller.evolve("c", other).renditions == (1,)
    assert controller.evolve("c", other.rename({"text": "word"})).renditions == (1,)
    assert controller.describe("c").schema.value[0].name == "word"
    assert rows_of(controller) == before
