"""Rules of collections beside those of the model: what is refused, what is repeated, what comes in between."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import catalog as catalogs
from persist_lib.catalog import collection_status, effects
from persist_lib.catalog.reader import inner_of
from persist_lib.catalog.records import HOLD
from persist_lib.frontier import at
from persist_lib.testing import Model, contents_of
from tests.renditions import Listening, Told, check, create, handed, write
from tests.worlds import SCHEMA, World, row, updates

OTHER = persist.Schema(key={"id": "int64 not null"}, value={"letters": "int64"})


def test_a_copy_of_what_is_not_the_collection_any_more_is_refused(world: World) -> None:
    """Else what was written between the two handovers would be lost."""
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    stale = controller.make_rendition("c", copy=True).number
    controller.copy_rendition("c", stale)
    handed(controller, told)
    write(controller, told, range(2, 4))
    with pytest.raises(persist.HandoverRefused, match="is a copy of rendition 1"):
        controller.hand_over("c", stale, force=True)
    check(controller, told, 0, 3)


def test_a_copy_that_was_the_collection_before_is_refused(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    handed(controller, told)
    write(controller, told, range(2, 4))
    handed(controller, told, of=2)
    write(controller, told, range(4, 5))
    with pytest.raises(persist.HandoverRefused, match="was the collection before"):
        controller.hand_over("c", 2)
    with pytest.raises(persist.HandoverRefused, match="has data up to"):
        controller.hand_over("c", 1)
    check(controller, told, 0, 4)


def test_a_collection_of_definite_data_is_handed_over_and_back(world: World) -> None:
    """Both renditions are written all the time, each by its own instance."""
    told, controller = Told(), create(world.client(), "append")
    controller.make_rendition("c", shards=2)
    told.renditions[2] = Model()
    with controller.open_reader("c") as reader, controller.open_writer("c") as old:
        old.append([row(0, "one", 0)], 0, 1)
        told.renditions[1].append(updates([row(0, "one", 0)]), at(0), at(1))
        listening = Listening(reader, 0, told)
        with controller.open_writer("c", rendition=1) as one, controller.open_writer("c", rendition=2) as two:
            for time in range(1, 40):
                for number, writer, word in ((1, one, "one"), (2, two, "two")):
                    if time == 1 and number == 2:
                        writer.append([row(0, word, 0)], 0, 1)
                        told.renditions[2].append(updates([row(0, word, 0)]), at(0), at(1))
                    writer.append([row(time % 7, word, time)], time, time + 1)
                    told.renditions[number].append(updates([row(time % 7, word, time)]), at(time), at(time + 1))
                if time % 10 == 0:
                    number = 2 if time % 20 else 1
                    told.hand_over(number, controller.hand_over("c", number, at=time))
                listening.poll()
        assert listening.frontier == 40
    check(controller, told, 0, 39)


def test_an_upsert_that_a_handover_overtakes_looks_again(world: World) -> None:
    """SUBTLE: what it has to retract is what the new rendition has, not the old one."""
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    made = controller.make_rendition("c").number
    told.renditions[made] = Model()
    with controller.open_writer("c", rendition=made) as second:
        second.compare_and_append([row(0, "corrected", 2)], 0, 3)
    told.renditions[made].append(updates([row(0, "corrected", 2)]), at(0), at(3))
    with world.client(rival=world.rival).controller().open_writer("c") as writer:
        writer.upsert([{"id": 20, "word": "before"}], dry_run=True)

        def hand_over() -> None:
            told.hand_over(made, controller.hand_over("c", made, force=True))

        world.rival.before_next(lambda: None)  # its registrations
        for _ in range(3):
            world.rival.before_next(lambda: None)
        world.rival.before_next(hand_over)
        written = writer.upsert([{"id": 0, "word": "mine"}])
    assert world.rival.waiting == 0
    assert written.updated == 1
    told.last.append([((0, "corrected"), 3, -1), ((0, "mine"), 3, 1)], at(3), at(4))
    check(controller, told, 0, 3)


def test_what_is_written_before_a_later_handover_goes_to_the_old_rendition(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    made = controller.make_rendition("c", copy=True, shards=2).number
    assert controller.hand_over("c", made, at=6) == 6
    with controller.open_writer("c") as writer:
        assert writer.upsert([{"id": 100, "word": "x"}]).time == 3
    told.last.append([((100, "x"), 3, 1)], at(3), at(4))
    write(controller, told, range(4, 6))
    controller.copy_rendition("c", made, to_end=True)
    told.copy(made, 1)
    told.hand_over(made, 6)
    write(controller, told, range(6, 8))
    check(controller, told, 0, 7)


def test_history_is_kept_behind_the_data_and_not_behind_a_promise_ahead_of_it(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(5))
    controller.make_rendition("c", copy=True)
    controller.hand_over("c", 2, at=1000)
    controller.alter("c", retention=2)
    controller.tend("c")
    assert controller.describe("c").since == at(2)
    check(controller, told, 2, 4)


def test_a_rule_says_how_much_history_a_collection_keeps_that_says_nothing_itself(world: World) -> None:
    controller = create(world.client())
    told = Told()
    write(controller, told, range(8))
    client = controller.client
    client.set_rules([{"pattern": "d*", "retention": 0}, {"pattern": "*", "retention": "1 day"}])
    assert not [step for step in controller.tend("c").steps if step.action == "move hold"], "its times are integers"
    client.set_rules([{"pattern": "c", "retention": "last 2"}])
    assert not [step for step in controller.tend("c").steps if step.action == "move hold"], "only shards count appends"
    client.set_rules([{"pattern": "c", "retention": 3}])
    steps = controller.plan("c")
    assert {step.why for step in steps} >= {"the rule 'c' keeps history of 3"}, steps
    assert controller.describe("c").since == at(0), "a plan changes nothing"
    controller.tend("c")
    assert controller.describe("c").since == at(4)
    controller.alter("c", retention=1)
    controller.tend("c")
    assert controller.describe("c").since == at(6), "what it says itself counts"
    check(controller, told, 6, 7)


def test_a_rule_keeps_a_length_of_time_of_a_table_of_a_clock(world: World) -> None:
    client = world.client()
    controller = client.controller()
    schema = persist.Schema(key=SCHEMA.key, value=SCHEMA.value, times="ms")
    controller.create("clock", schema, mode="compare_and_append")
    with controller.open_writer("clock") as writer:
        times = []
        for number in range(4):
            times.append(writer.upsert([{"id": number, "word": "a"}]).time or 0)
            world.clock.advance(60)
    client.set_rules([{"pattern": "*", "retention": "90 s"}])
    controller.tend("clock")
    assert controller.describe("clock").since == at(times[-1] - 90_000)


def test_an_append_beyond_a_gap_promises_nothing(world: World) -> None:
    told, controller = Told(), create(world.client(), "append")
    write(controller, told, range(3))
    with controller.open_writer("c") as writer, pytest.raises(persist.UpperMismatch, match="there is a gap"):
        writer.append([], 10**9, 10**9 + 1)
    assert controller.describe("c").promised == at(3)


def test_a_reader_that_lets_go_of_more_than_there_is_waits_for_it(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    with controller.open_reader("c") as reader:
        reader.downgrade_since(4)
        with pytest.raises(persist.TimedOut, match="waited"):
            reader.snapshot(4, timeout=0.1, diff=True)
        write(controller, told, range(2, 6))
        assert contents_of(reader.snapshot(4, diff=True).to_arrow()) == told.contents(4)


def test_two_handovers_at_once_are_one(world: World) -> None:
    """The second controller built its handover on what the first one has replaced meanwhile."""
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    for _ in range(2):
        controller.make_rendition("c", copy=True)
    other = world.client(rival=world.rival).controller()
    other.list()
    world.rival.before_next(lambda: None)
    world.rival.before_next(lambda: controller.tend("c"))  # finishes the other's
    assert other.hand_over("c", 2) == 3
    assert world.rival.waiting == 0
    with pytest.raises(persist.HandoverRefused):
        controller.hand_over("c", 3)
    assert [one.active for one in controller.describe("c").renditions] == [False, True, False]


def test_a_repeated_command_is_about_what_it_was_about_at_first(world: World) -> None:
    told, controller = Told(), world.client().controller()
    make = {"schema": SCHEMA, "shards": 2, "mode": "compare_and_append"}
    first = controller.create("c", command="create", **make)  # type: ignore[arg-type]
    write(controller, told, range(2))
    made = controller.make_rendition("c", copy=True, command="make")
    controller.rename("c", "d", command="rename")
    controller.create("c", SCHEMA)
    assert controller.create("c", command="create", **make).id == first.id  # type: ignore[arg-type]
    assert controller.make_rendition("c", copy=True, command="make").number == made.number
    assert controller.rename("c", "d", command="rename").id == first.id
    start = controller.hand_over("d", made.number, command="hand")
    controller.copy_rendition("d", made.number, to_end=True)
    assert controller.hand_over("d", made.number, command="hand") == start
    assert controller.make_rendition("c", copy=True, command="make").number == made.number, "also after the handover"
    with pytest.raises(persist.InvalidUsage, match="was used for another command"):
        controller.make_rendition("d", copy=True, shards=3, command="make")
    controller.drop("d", command="drop")
    assert controller.drop("d", command="drop").steps == ()
    with pytest.raises(persist.NotFound, match="dropped since"):
        controller.create("c", command="create", **make)  # type: ignore[arg-type]
    assert controller.list() == ["c"]


def test_a_slow_helper_of_a_command_meets_what_others_did_meanwhile(world: World) -> None:
    """It is at the steps of a create that others have finished, dropped and swept."""
    controller = world.client().controller()
    controller.create("c", SCHEMA, shards=2)
    contents = controller.catalog.fetch()
    collection = contents.find("c")
    rendition = contents.renditions[collection.id, 1]
    controller.drop("c")
    assert controller.tend().steps == ()
    effects.make_shards(controller.client, rendition)
    effects.begin(controller.client, collection, rendition)
    for shard in world.client().shards():
        assert shard == "_catalog" or controller.client.inspect(shard).state.is_finished()


def test_a_handover_between_two_looks_of_a_description(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog was read before the rendition was made, and the rendition shard after it was handed over to."""
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    other, looked = world.client().controller(), collection_status.timeline_of

    def later(*args: Any) -> Any:
        monkeypatch.setattr(collection_status, "timeline_of", looked)
        handed(other, told)
        return looked(*args)

    monkeypatch.setattr(collection_status, "timeline_of", later)
    found = controller.describe("c")
    assert (found.active.number, found.active.state) == (2, "live")


def test_a_lost_hold_is_set_again(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    shards = controller.describe("c").renditions[0].shards
    for shard in shards:
        controller.client.release_hold(shard, HOLD)
    controller.tend("c")
    for shard in shards:
        assert HOLD in controller.client.inspect(shard).state.holds


def test_a_copy_that_is_given_up_holds_nothing(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    controller.make_rendition("c", copy=True)
    controller.copy_rendition("c", 2)
    write(controller, told, range(3, 6))
    controller.alter("c", retention=0)
    controller.tend("c")
    assert controller.describe("c").since == at(2), "what is still to be copied"
    controller.drop_rendition("c", 2)
    controller.tend("c")
    assert controller.describe("c").since == at(5)


def test_a_copy_that_nobody_finished_keeps_no_dropped_collection(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    made = controller.make_rendition("c", copy=True).number
    controller.copy_rendition("c", made)
    [collection] = controller.catalog.fetch().collections.values()
    assert f"copy-r{made}" in world.client().inspect(collection.shard).state.holds
    controller.drop("c")
    for _ in range(3):
        controller.tend()
    assert not controller.catalog.fetch().collections
    assert controller.tend().steps == ()


def test_two_copiers_copy_the_same_once(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    controller.make_rendition("c", copy=True, shards=2)
    other = world.client(rival=world.rival).controller()
    other.list()

    def more() -> None:
        write(controller, told, range(3, 5))
        controller.copy_rendition("c", 2)

    for _ in range(5):
        world.rival.before_next(lambda: None)
    world.rival.before_next(more)
    other.copy_rendition("c", 2)
    assert world.rival.waiting == 0
    start = controller.hand_over("c", 2)
    controller.copy_rendition("c", 2, to_end=True)
    told.copy(2, 1)
    told.hand_over(2, start)
    write(controller, told, range(5, 6))
    check(controller, told, 0, 5)


def test_a_rendition_is_finished_before_it_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker died before its shards had a hold."""
    controller = create(world.client())
    with monkeypatch.context() as patch:
        patch.setattr(effects, "_hold", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            controller.make_rendition("c", shards=2)
    other = world.client().controller()
    with other.open_writer("c", rendition=2) as writer:
        for shard in (one for one in other.client.shards() if ".r2." in one):
            assert HOLD in other.client.inspect(shard).state.holds
        writer.compare_and_append([row(1, "x", 0)], 0, 1)


def test_a_schema_that_changes_ends_a_listener_or_replaces_all(world: World) -> None:
    import pyarrow.compute as pc  # noqa: PLC0415

    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    with controller.open_reader("c") as reader:
        controller.make_rendition("c", schema=OTHER, copy=True)

        def letters(table: Any) -> Any:
            words = pc.utf8_length(table.column("word")).cast("int64")
            return table.set_column(table.schema.get_field_index("word"), "letters", words)

        controller.copy_rendition("c", 2, transform=letters)
        controller.hand_over("c", 2)
        controller.copy_rendition("c", 2, transform=letters, to_end=True)
        with controller.open_writer("c") as writer:
            writer.upsert([{"id": 1000, "letters": 4}])
        assert contents_of(reader.snapshot(1, diff=True).to_arrow()) == told.contents(1)
        with reader.listen(0) as ends, pytest.raises(persist.SchemaChanged):
            ends.poll()
        with reader.listen(0, replace=True) as goes_on:
            tables = [event.table for event in goes_on.poll() if isinstance(event, persist.Updates)]
        old, new = ([t for t in tables if name in t.column_names] for name in ("word", "letters"))
        total = told.contents(0)
        for table in old:
            for one in table.to_pylist():
                total[one["id"], one["word"]] += one["_diff"]
        assert not any(total.values()), "all old rows are out"
        assert sum(t.num_rows for t in new) == 11


def test_polling_by_a_read_only_client_waits_for_nobody(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    reading = world.client(read_only=True).controller()
    assert reading.list() == ["c"]
    assert reading.describe("c").upper == at(3)
    assert reading.tend(dry_run=True).steps == ()
    with reading.open_reader("c") as reader:
        listening = Listening(reader, 0, told)
        for shard in controller.describe("c").renditions[0].shards:  # data that nobody has promised
            with controller.client.open_writer(shard, SCHEMA, layer="collection") as raw:
                raw.advance_upper(5)
        listening.poll()
        assert listening.frontier == 3
        controller.tend("c")
        told.last.upper = at(5)
        listening.poll()
        assert listening.frontier == 5
    for command in (
        lambda: reading.create("d", SCHEMA),
        lambda: reading.drop("c"),
        lambda: reading.hand_over("c", 2),
        reading.tend,
        lambda: reading.open_writer("c"),
        lambda: reading.set_hold("c", "h", 0),
    ):
        with pytest.raises(persist.InvalidUsage, match="read_only"):
            command()


def test_a_producer_appends_a_number_once_whatever_is_promised(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    controller.make_rendition("c", copy=True)
    start = controller.hand_over("c", 2, at=4)  # promised ahead of the data
    with controller.open_writer("c") as writer:
        writer.compare_and_append([row(1, "p", 2)], 2, 3, producer=("p", 0))
        for lower in (2, 3):
            with pytest.raises(persist.AlreadyProduced):
                writer.compare_and_append([row(1, "p", lower)], lower, lower + 1, producer=("p", 0))
    assert start == 4
    told.last.append(updates([row(1, "p", 2)]), at(2), at(3))
    check(controller, told, 0, 2)


def test_nothing_goes_on_after_close_and_nothing_is_pickled(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(2))
    writer, reader = controller.open_writer("c"), controller.open_reader("c")
    snapshot, listen = reader.snapshot(diff=True), reader.listen(0)
    for one in (writer, reader, snapshot, listen):
        with pytest.raises(persist.InvalidUsage, match="cannot be pickled"):
            pickle.dumps(one)
    for one in (writer, writer, reader, reader, listen, listen):
        one.close()  # twice
    with pytest.raises(persist.InvalidUsage, match="was closed"):
        writer.upsert([{"id": 1, "word": "x"}])
    with pytest.raises(persist.InvalidUsage, match="was closed"):
        writer.fetch_upper()
    with pytest.raises(persist.LeaseExpired, match="was closed"):
        reader.snapshot(1, diff=True)
    assert listen.poll() == list(listen) == []
    controller.close()
    assert controller.list() == ["c"], "a controller opens again what it needs"


def test_a_catalog_costs_a_request_to_look_at_and_few_to_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = world.client().controller()
    for number in range(5):
        controller.create(f"n{number}", SCHEMA)
    controller.list()
    world.requests.clear()
    assert len(controller.list()) == 5
    assert len(world.requests) == 1
    world.requests.clear()
    controller.create("one", SCHEMA)
    assert len(world.requests) < 40
    monkeypatch.setattr(catalogs, "MOST_COMMANDS", 10)
    for number in range(30):
        controller.alter("one", retention=number)
    assert len(controller.catalog.fetch().commands) <= 11


def test_a_reader_does_not_pause_where_its_shards_have_come_further_meanwhile(world: World) -> None:
    told, controller = Told(), create(world.client())
    write(controller, told, range(3))
    with controller.open_reader("c") as reader:
        inner, deadline = inner_of(reader), controller.client.runtime.deadline(5)
        span = inner.known(1, deadline)
        started = world.clock()
        inner.pause(span, 1, deadline)
        assert world.clock() == started
