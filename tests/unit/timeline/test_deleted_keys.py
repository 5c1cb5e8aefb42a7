"""Tables that keep deleted keys: what counts, what is late, what is forgotten, and who is kept from going past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog.records import OF_DELETES, CollectionRecord, encode
from persist_lib.relation.deleted_keys import FLOOR
from persist_lib.schema.schema import Column
from persist_lib.table.table import Table
from persist_lib.testing import Rival
from persist_lib.timeline import Tables
from tests.worlds import DiesAt, Killed, World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "word": "string"}, unique=True)
SPAN_S = 60.0


@pytest.fixture
def tables(world: World) -> Tables:
    tables = world.client().controller().tables()
    tables.create("a", SCHEMA, mode="wal", keep_deletes=("seq", f"{SPAN_S:g} s"))
    return tables


@pytest.fixture
def table(tables: Tables) -> Table:
    return tables.client.table("a")


def row(id_: int, seq: int | None, word: str = "w") -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": word}


def gone(id_: int, seq: int) -> dict[str, Any]:
    return {"id": id_, "seq": seq}


def rows(table: Table) -> dict[int, int | None]:
    return {each["id"]: each["seq"] for each in table.read().to_pylist()}


def marks(table: Table) -> dict[int | None, int]:
    """The deleted keys that are remembered, and under None the floor."""
    kept = table.describe().keep_deletes
    assert kept is not None
    found = persist.Client.table(table._carrier.client, kept.table).read().to_pylist()
    return {None if each[FLOOR] else each["id"]: each["seq"] for each in found}


def counted(done: Any) -> dict[str, int]:
    names = ("inserted", "updated", "unchanged", "deleted", "late")
    return {name: getattr(done, name) for name in names if getattr(done, name)}


def test_a_late_upsert_after_a_delete_does_not_bring_the_row_back(table: Table) -> None:
    table.apply([row(1, 1)])
    assert counted(table.apply(deletes=[gone(1, 9)])) == {"deleted": 1}
    late = table.apply([row(1, 8)])
    assert (counted(late), late.time, rows(table), marks(table)) == ({"late": 1}, None, {}, {1: 9})
    assert counted(table.apply([row(1, 9)])) == {"unchanged": 1}, "where they tie, the delete counts"
    assert counted(table.apply([row(1, 10)])) == {"inserted": 1}
    assert (rows(table), marks(table)) == ({1: 10}, {})


def test_a_delete_is_late_where_the_row_or_the_mark_is_newer(table: Table) -> None:
    table.apply([row(1, 5)], [gone(2, 5)])
    assert counted(table.apply(deletes=[gone(1, 4), gone(2, 4)])) == {"late": 2}
    assert (rows(table), marks(table)) == ({1: 5}, {2: 5})
    done = table.apply(deletes=[gone(1, 5), gone(2, 5)])
    assert counted(done) == {"deleted": 1, "unchanged": 1}, "as much as the row takes it away"
    assert (rows(table), marks(table)) == ({}, {1: 5, 2: 5})
    assert counted(table.apply(deletes=[gone(1, 7)])) == {"unchanged": 1}
    assert marks(table)[1] == 7


def test_a_delete_of_a_key_that_has_no_row_is_remembered(table: Table) -> None:
    done = table.apply(deletes=[gone(1, 3)])
    assert (counted(done), done.count, done.time is not None) == ({"unchanged": 1}, 0, True)
    assert counted(table.apply([row(1, 2)])) == {"late": 1}


def test_of_a_key_in_both_and_several_times_the_greatest_counts(table: Table) -> None:
    done = table.apply(
        [row(1, 1), row(1, 4), row(2, 4), row(3, 2), row(3, 1)], [gone(1, 3), gone(1, 2), gone(2, 4), gone(4, 1)]
    )
    assert counted(done) == {"inserted": 2, "unchanged": 2}
    assert (rows(table), marks(table)) == ({1: 4, 3: 2}, {2: 4, 4: 1})
    with pytest.raises(persist.InvalidUsage, match="same 'seq'"):
        table.apply([row(9, 1, "a"), row(9, 1, "b")])


def test_deletes_may_be_whole_rows_and_frames_and_upserts_may_lack_columns(table: Table) -> None:
    table.apply([row(1, 1, "first"), row(2, 1, "second")])
    table.apply([{"id": 1, "seq": 2}], pa.table({"id": [2], "word": ["second"], "seq": [3]}))
    assert table.read().to_pylist() == [row(1, 2, "first")]
    table.apply([{"id": 1, "seq": 9}], iter([gone(1, 8)]))
    assert table.read().to_pylist() == [{"id": 1, "seq": 9, "word": None}], "it was deleted in between"


@pytest.mark.parametrize(
    ("upserts", "deletes"),
    [
        (None, [1]), (None, [{"id": 1, "word": "w"}]), (None, [gone(1, 1), {"id": 2}]), (None, [row(1, None)]),
        ([row(1, None)], None), ([{"id": 1, "word": "w"}], None),
    ],
)  # fmt: skip
def test_changes_that_do_not_say_their_order_are_refused(table: Table, upserts: Any, deletes: Any) -> None:
    with pytest.raises(persist.InvalidUsage, match="delete\\(keys\\) takes the value of the row"):
        table.apply(upserts, deletes)
    with pytest.raises(persist.InvalidUsage, match="order_by='word'"):
        table.apply([row(1, 1)], order_by="word")
    assert (rows(table), marks(table)) == ({}, {})


def test_a_condition_is_asked_of_rows_that_are_there_in_addition(table: Table) -> None:
    table.apply([row(1, 1, "a"), row(2, 1, "b")])
    only_if = pc.field("word") > persist.old("word")
    done = table.apply([row(1, 2, "0"), row(2, 2, "z"), row(3, 2)], [gone(4, 1)], only_if=only_if, order_by="seq")
    assert counted(done) == {"inserted": 1, "updated": 1, "unchanged": 2}
    assert rows(table) == {1: 1, 2: 2, 3: 2}
    table.apply([row(1, 9, "0")], [gone(1, 8)], only_if=only_if)
    assert rows(table)[1] == 9, "the row goes before, so that no row is left to ask about"


def test_rows_to_append_end_what_is_remembered_of_their_keys(table: Table) -> None:
    table.apply(deletes=[gone(1, 9), gone(2, 9)])
    table.apply([row(3, 1)], [gone(2, 10)], appends=[row(1, 1)])
    assert (rows(table), marks(table)) == ({1: 1, 3: 1}, {2: 10})
    with pytest.raises(persist.InvalidUsage, match="rows to append"):
        table.apply(deletes=[gone(5, 1)], appends=[row(5, 1)])


def test_other_verbs_take_the_rows_own_value_or_ask_for_no_order(table: Table) -> None:
    table.append([row(1, 5), row(2, 6), row(3, None), row(4, 7)])
    table.delete([1])
    table.delete(filter=pc.field("seq") == 6)
    table.delete([3])
    assert marks(table) == {1: 5, 2: 6}, "a row without a value says nothing about others"
    assert counted(table.apply([row(1, 5), row(2, 6), row(3, 1)])) == {"unchanged": 2, "inserted": 1}
    table.upsert([row(1, 1)])
    table.append([row(2, 1)])
    assert (rows(table), marks(table)) == ({1: 1, 2: 1, 3: 1, 4: 7}, {})
    table.update({"seq": 3}, keys=[4])
    table.apply(deletes=[gone(4, 4)])
    assert marks(table) == {4: 4}


def test_keys_of_several_rows_are_refused(world: World) -> None:
    tables = world.client().controller().tables()
    tables.create("b", persist.Schema(SCHEMA.key, SCHEMA.value), mode="wal", keep_deletes=("seq", "1 day"))
    table = tables.client.table("b")
    table.append([row(1, 1), row(1, 2)])
    with pytest.raises(persist.InvalidUsage, match="a key has several rows"):
        table.apply([row(1, 3)])
    table.delete(filter=pc.field("seq") == 2)
    assert counted(table.apply([row(1, 2)])) == {"unchanged": 1}, "the mark counts beside a row"
    assert counted(table.apply([row(1, 3)])) == {"updated": 1}
    assert (rows(table), marks(table)) == ({1: 3}, {})


def test_what_was_kept_for_the_span_is_forgotten_and_the_floor_stays(
    world: World, tables: Tables, table: Table
) -> None:
    table.apply([row(5, 1)], [gone(1, 9), gone(2, 4)])
    world.clock.advance(SPAN_S / 2)
    table.apply(deletes=[gone(3, 2)])
    world.clock.advance(SPAN_S / 2 + 1)
    tables.apply()
    assert [step.subject for step in tables.controller.tend(dry_run=True).steps if step.action == "forget"] == [
        "2 deleted keys"
    ]
    assert marks(table) == {1: 9, 2: 4, 3: 2}
    tables.controller.tend()
    assert marks(table) == {3: 2, None: 9}
    assert "forget" not in [step.action for step in tables.controller.tend().steps]
    with pytest.raises(persist.DeletesForgotten) as refused:
        table.apply([row(1, 9), row(3, 3), row(8, 1), row(9, 10)])
    fields = {"table": "a", "column": "seq", "keys": [{"id": 1}, {"id": 8}], "count": 2, "floor": 9}
    assert refused.value.fields == fields
    assert rows(table) == {5: 1}, "nothing was written"
    assert counted(table.apply([row(3, 3), row(5, 2), row(9, 10)])) == {"inserted": 2, "updated": 1}
    table.apply(deletes=[gone(8, 7), gone(5, 8)])
    assert marks(table) == {None: 9}, "at or below the floor that decides, and a mark would say too much"
    with pytest.raises(persist.DeletesForgotten):
        table.apply([row(8, 8)])
    table.upsert([row(8, 8)])
    table.delete([8])
    assert marks(table) == {None: 9}


def test_restore_brings_back_what_was_remembered_then(world: World, tables: Tables, table: Table) -> None:
    table.apply([row(1, 5)], [gone(2, 9)])
    then = tables.read_time()
    table.apply([row(2, 10)], [gone(1, 6)])
    world.clock.advance(SPAN_S + 1)
    tables.apply()
    tables.controller.tend()
    assert (rows(table), marks(table)) == ({2: 10}, {None: 6})
    assert table.restore(then, dry_run=True).count == 2
    table.restore(then)
    assert (rows(table), marks(table)) == ({1: 5}, {2: 9})
    assert table.restore(then).time is None


def test_a_transaction_that_looked_at_a_key_conflicts_with_who_deletes_it(tables: Tables) -> None:
    t = tables.transaction()
    t.apply("a", [row(1, 5)])
    other = tables.client.table("a")
    other.apply(deletes=[gone(1, 9)])  # no row is there, so that this changes the mark alone
    with pytest.raises(persist.WriteConflict):
        t.commit()
    with tables.transaction() as t:
        assert counted(t.apply("a", [row(2, 1)], [gone(3, 1)])) == {"inserted": 1, "unchanged": 1}
        assert counted(t.apply("a", [row(3, 1), row(1, 3)], [gone(2, 2)])) == {"unchanged": 1, "late": 1, "deleted": 1}
        t.upsert("a", [row(3, 1)])
    assert (rows(other), marks(other)) == ({3: 1}, {1: 9, 2: 2})


def test_a_lost_race_computes_it_again(world: World, tables: Tables) -> None:
    rival = Rival(world.inner.consensus)
    mine, theirs = world.client(rival=rival).table("a"), tables.client.table("a")
    mine.apply([row(1, 1)])
    rival.before_next(lambda: theirs.apply(deletes=[gone(2, 9)]))
    assert counted(mine.apply([row(2, 8)])) == {"late": 1}
    rival.before_next(lambda: theirs.apply([row(1, 7)]))
    assert counted(mine.apply(deletes=[gone(1, 6)])) == {"late": 1}
    assert (rival.waiting, rows(mine), marks(mine)) == (0, {1: 7}, {2: 9})


def test_a_token_answers_the_first_outcome(table: Table) -> None:
    first = table.apply([row(1, 1)], [gone(2, 2)])
    table.apply(deletes=[gone(1, 5)])
    again = table.apply([row(1, 1)], [gone(2, 2)], token=first.token)
    assert (again.time, rows(table), marks(table)) == (first.time, {}, {1: 5, 2: 2})


def test_who_did_not_know_the_setting_yet_follows_it(world: World) -> None:
    """The catalog says so first, then a mark in the WAL: what was read before that is read again."""
    rival = Rival(world.inner.consensus)
    mine, others = (world.client(rival=rival), world.client())
    others.controller().tables().create("b", SCHEMA, mode="wal")
    table = mine.table("b")
    table.append([row(1, 1), row(2, 2)])
    t = mine.controller().tables().transaction()
    t.delete("b", [2])
    rival.before_next(lambda: others.table("b").set_keep_deletes("seq", "1 day"))
    table.delete([1])
    assert (rival.waiting, marks(table)) == (0, {1: 1})
    with pytest.raises(persist.WriteConflict, match="keeps deleted keys"):
        t.commit()
    assert rows(table) == {2: 2}


def test_a_look_that_is_older_than_the_mark_reads_the_catalog_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of several shards are not asked for at one moment, so the catalog's may be from before the WAL's."""
    mine, others = (world.client().controller().tables() for _ in range(2))
    others.create("b", SCHEMA, mode="wal")
    mine.insert("b", [row(1, 1), row(2, 2)])
    line = mine._timelines.line("default")
    catalog, heads = mine.controller.catalog.shard, dict(line.heads._newest)
    others.client.table("b").set_keep_deletes("seq", "1 day")
    consensus, ask = line.client.consensus, line.client.consensus.heads
    with monkeypatch.context() as patched:
        patched.setattr(consensus, "heads", lambda shards: {**ask(shards), catalog: heads[catalog]})
        mine.delete("b", [1])
    assert marks(others.client.table("b")) == {1: 1}


def test_it_is_set_changed_and_ended(world: World, tables: Tables, table: Table) -> None:
    table.apply(deletes=[gone(1, 1)])
    table.set_keep_deletes("seq", "2 hours", dry_run=True)
    first = table.describe().keep_deletes
    assert first is not None
    assert (first.column, first.span_ms) == ("seq", int(SPAN_S * 1000))
    table.set_keep_deletes("seq", 7)
    again = table.describe().keep_deletes
    assert again is not None
    assert (again.span_ms, again.table, marks(table)) == (7, first.table, {1: 1})
    table.rename("b")
    assert marks(table) == {1: 1}
    tables.client.maintain()
    table.set_keep_deletes(None)
    table.set_keep_deletes(None)
    assert table.describe().keep_deletes is None
    assert counted(table.apply([row(1, 1)])) == {"inserted": 1}
    with pytest.raises(persist.InvalidUsage, match="set_keep_deletes"):
        table.apply(deletes=[1], only_if=pc.field("seq") > persist.old("seq"))
    with pytest.raises(persist.SchemaMismatch, match="seq"):
        table.apply(deletes=[gone(1, 1)])
    table.set_keep_deletes("seq", 7)
    assert marks(table) == {}
    with pytest.raises(persist.NotFound):
        tables.client.table(first.table)


def test_what_cannot_be_is_refused_with_a_sentence(world: World, tables: Tables, table: Table) -> None:
    client = tables.client
    wide = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "share": "float64", FLOOR: "int64"})
    other = persist.Schema(SCHEMA.key, {"word": "string"}, times="ms")
    tables.create("w", wide)
    tables.create("y", SCHEMA, timeline="quick", mode="yolo")
    client.controller().create("c", SCHEMA, mode="compare_and_append")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: client.table("s", SCHEMA).set_keep_deletes("seq", 7), "is on one shard.*promote\\(timeline"),
        (lambda: client.table("c").set_keep_deletes("seq", 7), "is on a collection.*promote\\(timeline"),
        (lambda: client.table("y").set_keep_deletes("seq", 7), "without a WAL.*make a table"),
        (lambda: tables.create("z", SCHEMA, timeline="quick", keep_deletes=("seq", 7)), "without a WAL"),
        (lambda: tables.create("z", SCHEMA, timeline="none", keep_deletes=("seq", 7)), "without a WAL"),
        (lambda: tables.create("z", SCHEMA, timeline="none", mode="wal", keep_deletes=("sec", 7)), "Did you mean"),
        (lambda: tables.create("z", SCHEMA, keep_deletes="seq"), "as in"),  # type: ignore[arg-type]
        (lambda: tables.create("z", SCHEMA, keep_deletes=("sec", 7)), "Did you mean"),
        (lambda: table.set_keep_deletes("word", 7), "by the column 'seq'.*end it first"),
        (lambda: table.set_keep_deletes("seq", "soon"), "for which a deleted key is remembered"),
        (lambda: table.set_keep_deletes("seq"), "for which a deleted key is remembered"),
        (lambda: table.set_keep_deletes(None, 7), "goes with the column"),
        (lambda: client.table("w").set_keep_deletes("share", 7), "is float64"),
        (lambda: client.table("w").set_keep_deletes("seq", 7), "has the name '_floor'"),
        (lambda: tables.create("j", persist.Schema.json(), keep_deletes=("value", 7)), "value columns, \\[\\]"),
        (lambda: tables.controller.make_rendition("a", schema=other), "each rendition"),
    ]  # fmt: skip
    before = world.bytes("_catalog")
    for call, says in cases:
        with pytest.raises(persist.InvalidUsage, match=f"(?s){says}"):
            call()
    assert world.bytes("_catalog") == before
    client.table("s").set_keep_deletes(None)  # as it is


def test_the_deleted_keys_are_hidden_and_nobody_elses(tables: Tables, table: Table) -> None:
    table.apply(deletes=[gone(1, 1)])
    client, kept = tables.client, table.describe().keep_deletes
    assert kept is not None
    assert client.tables() == tables.list() == tables.controller.list() == ["a"]
    assert client.table(kept.table).count() == 1
    theirs: list[Callable[[], object]] = [
        lambda: client.table(kept.table).delete([(0, 1)]), lambda: client.table(kept.table).drop(),
        lambda: client.table(kept.table).rename("b"), lambda: client.table(kept.table).set_retention(5),
        lambda: tables.transaction().delete(kept.table, [(0, 1)]),
    ]  # fmt: skip
    for call in theirs:
        with pytest.raises(persist.InvalidUsage, match="deleted keys of another table"):
            call()


def test_drop_and_retention_take_it_along(world: World, tables: Tables, table: Table) -> None:
    table.apply(deletes=[gone(1, 1)])
    table.set_retention("1 hour")
    contents = tables.controller.catalog.fetch()
    assert {one.retention for one in contents.collections.values()} == {3_600_000}
    table.drop()
    assert {one.state for one in tables.controller.catalog.fetch().collections.values()} <= {"dropping"}
    tables.create("a", SCHEMA, keep_deletes=("seq", 7))
    assert marks(tables.client.table("a")) == {}
    tables.client.table("a").drop()
    world.clock.advance(3600)  # no lease lasts so long
    for _ in range(2):
        tables.controller.tend()
    assert not tables.controller.catalog.fetch().collections


def test_upkeep_of_one_table_is_that_of_its_deleted_keys(world: World, tables: Tables, table: Table) -> None:
    table.apply([row(2, 1)], [gone(1, 1)])
    world.clock.advance(SPAN_S * 2)
    assert marks(table) == {1: 1}, "in the WAL alone"
    dry = table.maintain(dry_run=True)
    kept = table.describe().keep_deletes
    assert kept is not None
    assert set(kept.shards) <= dry.keys() == table.maintain().keys()
    assert marks(table) == {None: 1}
    assert tables.lag().tables == () or {one.table for one in tables.lag().tables} == {kept.table}


def test_what_begun_it_and_died_is_finished_by_the_next_writer(world: World) -> None:
    for step in range(1, 60):
        name, plan = f"t{step}", DiesAt(step)
        dying = world.client(plan=plan).controller().tables()
        dying.create(name, SCHEMA, mode="wal")
        dying.insert(name, [row(1, 1)])
        found = dying.client.table(name)
        plan.is_armed = True
        try:
            found.set_keep_deletes("seq", "1 day")
        except Killed:
            is_done = False
        else:
            is_done = True
        plan.is_armed = False
        others = world.client().table(name)
        others.delete([1])
        if others.describe().keep_deletes is not None:
            assert marks(others) == {1: 1}
        else:
            assert not is_done
        if is_done:
            return
    raise AssertionError("it takes more requests than this looks at")


def test_programs_of_the_release_before_refuse_the_catalog(tables: Tables) -> None:
    records = tables.controller.catalog.fetch().collections.values()
    assert {one.v for one in records} == {OF_DELETES}
    assert "keep_deletes" not in encode(CollectionRecord(id="c", name="a"))


def test_older_columns_than_the_one_that_orders_are_refused(world: World) -> None:
    tables = world.client().controller().tables()
    old = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True)
    tables.create("b", old, mode="wal")
    before, after = tables.client.table("b", old), tables.client.table("b")
    after.evolve(persist.Schema(old.key, [*old.value, Column("seq", "int64")], times="ms", unique=True))
    after.set_keep_deletes("seq", "1 day")
    with pytest.raises(persist.InvalidUsage, match="opened in older columns"):
        before.upsert([{"id": 1, "word": "w"}])
    after.apply(deletes=[gone(1, 1)])
    assert marks(after) == {1: 1}
