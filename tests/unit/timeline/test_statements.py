"""Insert, delete, update and upsert in both modes: what is there afterwards, and what is refused.

A table that is dropped while transactions on it are open, by a process that is killed: no commit vanishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog.records import TableMode
from persist_lib.runtime.ambient import Deadline
from persist_lib.timeline import Tables
from persist_lib.timeline.timeline import Line
from persist_lib.timeline.view import View
from tests.circles import by_day
from tests.unit.timeline.banks import SCHEMA, UNIQUE, read, rows
from tests.worlds import DiesAt, Killed, World


@pytest.fixture(params=["yolo", "wal"])
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    with persist.open("memory:") as client:
        tables = client.controller().tables()
        tables.create("a", UNIQUE, shards=2, mode=request.param)
        tables.create("many", SCHEMA)
        yield tables


def test_rows_of_an_iterator_are_written_where_the_lease_ended_amid_the_statement(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done again, of the same rows: nothing is left in the iterator then."""
    at_newest, ended = Line.at_newest, iter((True, False))

    def end_once(line: Line, view: View, deadline: Deadline) -> AbstractContextManager[int]:
        if next(ended):
            raise persist.LeaseExpired("it ended")
        return at_newest(line, view, deadline)

    monkeypatch.setattr(Line, "at_newest", end_once)
    assert tables.upsert("a", iter(rows((1, 10)))).inserted == 1
    assert read(tables, "a") == {1: 10}


def test_an_update_takes_a_value_an_expression_or_a_function(tables: Tables) -> None:
    tables.insert("a", rows((1, 10), (2, None)))
    tables.update("a", {"cents": 5}, keys=[2])
    tables.update("a", {"cents": lambda table: pc.add(table.column("cents"), table.column("id"))})
    assert read(tables, "a") == {1: 11, 2: 7}
    tables.update("a", lambda table: table.set_column(1, "cents", pc.negate(table.column("cents"))))
    assert read(tables, "a") == {1: -11, 2: -7}


def test_nothing_to_change_is_nothing_written(tables: Tables) -> None:
    tables.insert("a", rows((1, 10)))
    before = tables.read_time()
    for done in (tables.upsert("a", rows((1, 10))), tables.delete("a", [2]), tables.update("a", {"cents": 10})):
        assert (done.time, done.count, done.token) == (None, 0, b"")
    assert tables.read_time() == before


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda t: t.insert("a", [{"id": 1, "cents": 1, "_diff": -1}]), "_diff"),
        (lambda t: t.update("a", {"id": 3}), "value columns"),
        (lambda t: t.update("a", {}), "no column at all"),
        (lambda t: t.update("a", {"sents": 3}), "cents"),
        (lambda t: t.update("a", {"cents": "three"}), "no value of it"),
        (lambda t: t.update("a", 7), "function"),
        (lambda t: t.update("a", lambda table: table.slice(1)), "one row of each row"),
        (lambda t: t.update("a", lambda table: table.set_column(0, "id", pa.array([7]))), "key column"),
        (lambda t: t.delete("a"), "either keys= or filter="),
        (lambda t: t.delete("a", [1], filter=pc.field("id") == 1), "either keys= or filter="),
        (lambda t: t.delete("a", filter="id = 1"), "filter"),
        (lambda t: t.read("a", columns=["sents"]), "Did you mean"),
        (lambda t: t.read(""), "name"),
        (lambda t: t.transaction(""), "name"),
        (lambda t: t.transaction("nowhere"), "no timeline"),
        (lambda t: t.create("b", SCHEMA, mode="fast"), "mode"),
        (lambda t: t.create("b", persist.Schema({"id": "int64"}, times="us")), "milliseconds"),
        (lambda t: t.outcome(b"?"), "token"),
    ],
)
def test_wrong_input_is_named_and_changes_nothing(tables: Tables, call: object, match: str) -> None:
    tables.insert("a", rows((1, 10)))
    with pytest.raises(persist.InvalidUsage, match=match):
        call(tables)  # type: ignore[operator]
    assert read(tables, "a") == {1: 10}
    assert tables.list() == ["a", "many"]


def test_names_are_taken_free_again_and_kept_by_what_is_open(tables: Tables) -> None:
    with pytest.raises(persist.NameTaken):
        tables.create("a", UNIQUE)
    tables.insert("a", rows((1, 10)))
    tables.rename("a", "b")
    assert read(tables, "b") == {1: 10}
    tables.upsert("b", rows((1, 11)))
    with pytest.raises(persist.NotFound):
        tables.read("a")
    tables.drop("b")
    with pytest.raises(persist.NotFound):
        tables.insert("b", rows((2, 2)))
    tables.create("b", UNIQUE)
    assert read(tables, "b") == {}
    assert tables.list() == ["b", "many"]


def test_a_name_may_move_to_a_table_of_another_timeline(tables: Tables) -> None:
    tables.insert("a", rows((1, 10)))
    others = tables.client.controller().tables()
    others.rename("a", "old")
    others.create("a", SCHEMA, timeline="elsewhere")
    others.insert("a", rows((7, 70)))
    assert read(tables, "a") == {7: 70}
    assert tables.upsert("a", rows((7, 71))).updated == 1
    assert read(tables, "old") == {1: 10}


def test_a_mode_belongs_to_its_timeline_and_a_collection_is_no_table(tables: Tables) -> None:
    mode: TableMode = "wal" if tables.controller.catalog.fetch().named("a").timeline.startswith("ty") else "yolo"  # type: ignore[union-attr]
    with pytest.raises(persist.InvalidUsage, match="for all of its tables"):
        tables.create("b", SCHEMA, mode=mode)
    tables.controller.create("c", SCHEMA)
    with pytest.raises(persist.InvalidUsage, match="no table"):
        tables.insert("c", rows((1, 1)))
    with pytest.raises(persist.InvalidUsage, match=r"controller.tables\(\)"):
        tables.controller.open_writer("a")


def test_a_read_sees_what_another_table_was_acknowledged_before_it(tables: Tables) -> None:
    """The read time is that of the timeline: the table that was written earlier is read as of it, too."""
    tables.insert("a", rows((1, 10)))
    done = tables.insert("many", rows((1, 1)))
    assert tables.read_time() == done.time
    found = tables.read("a")
    assert (found.as_of, found.to_pylist()) == (done.time, [{"id": 1, "cents": 10}])
    later = tables.insert("a", rows((2, 20)))
    assert later.time is not None
    assert later.time > done.time
    assert read(tables, "a", done.time) == {1: 10}


def world_with(kept: int = 1) -> tuple[World, Tables]:
    world = World()
    tables = world.client().controller().tables()
    for name in ("a", "b"):
        tables.create(name, UNIQUE, mode="wal")
        tables.insert(name, rows((1, 10)))
    for _ in range(kept):
        tables.apply()
        tables.tidy()
        tables.read_time()  # it looks, and lets go
    return world, tables


def attempt(tables: Tables, cents: int) -> bool:
    """Whether a transaction over both tables was committed."""
    try:
        with tables.transaction() as t:
            t.upsert("a", rows((1, cents)))
            t.upsert("b", rows((1, cents)))
    except (persist.WriteConflict, persist.NotFound):
        return False
    return True


def is_there(tables: Tables) -> bool:
    try:
        read(tables, "a")
    except persist.NotFound:
        return False
    return True


def give_up_all_history(world: World, tables: Tables) -> None:
    """All leases end, and what the WAL can do without goes from it. The mark of a drop is needed until all know."""
    world.clock.advance(3600)
    tables.apply()
    for _ in range(2):
        tables.tidy()
        tables.read_time()  # it looks, and lets go
        tables.client.heartbeat()
        for shard in tables.client.shards():
            tables.client.expire(shard)


def test_a_commit_that_was_acknowledged_is_read_until_the_drop_and_none_is_after_it() -> None:
    world, _ = world_with()
    plan = DiesAt(1 << 30)
    tables = world.client(plan=plan).controller().tables()
    plan.is_armed = True
    tables.drop("a")
    outcomes = []
    for number in by_day(range(1, plan.seen + 1), 3):
        world, others = world_with()
        opened = others.transaction()
        opened.upsert("a", rows((1, 11)))
        opened.upsert("b", rows((1, 11)))
        plan = DiesAt(number)
        tables = world.client(plan=plan).controller().tables()
        plan.is_armed = True
        with pytest.raises(Killed):
            tables.drop("a")
        fresh = [world.client().controller().tables(), world.client(read_only=True).controller().tables()]
        was_there = is_there(fresh[0])
        try:
            opened.commit()
        except (persist.WriteConflict, persist.NotFound):
            assert not any(is_there(one) for one in (*fresh, others)), f"killed at request {number}"
            expected = 10
        else:
            assert was_there, f"killed at request {number}: nobody could read the table, and a commit to it is accepted"
            assert [read(one, "a") for one in (*fresh, others)] == [{1: 11}] * 3
            expected = 11
        assert read(fresh[0], "b") == {1: expected}
        if attempt(fresh[0], 12):
            assert [read(one, "a") for one in (*fresh, others)] == [{1: 12}] * 3
            expected = 12
        give_up_all_history(world, fresh[0])
        late = world.client().controller().tables()
        assert is_there(late) == is_there(others) == is_there(fresh[1])
        late.controller.tend()
        world.clock.advance(3600)
        late.controller.tend()
        outcomes.append(is_there(late))
        assert is_there(others) == is_there(late) == ("a" in late.list())
        assert attempt(late, 13) == is_there(late)
        assert read(late, "b") == {1: 13 if is_there(late) else expected}
        if not is_there(late):
            late.create("a", UNIQUE)
            assert read(late, "a") == {}
    assert outcomes == sorted(outcomes, reverse=True), "once it is decided, whoever comes next finishes it"
    assert (outcomes[0], outcomes[-1]) == (True, False)


def test_a_drop_that_was_left_is_finished_by_who_wants_the_name() -> None:
    world, others = world_with()
    plan = DiesAt(1 << 30)
    tables = world.client(plan=plan).controller().tables()
    read(tables, "a")
    plan.is_armed, plan.number = True, 4
    while not others.controller.catalog.fetch().pending():
        with pytest.raises(Killed):
            tables.drop("a")
        plan.seen, plan.number = 0, plan.number + 1
        tables = world.client(plan=plan).controller().tables()
    others.create("a", UNIQUE)
    assert read(others, "a") == {}
    others.insert("a", rows((7, 7)))
    others.controller.tend()
    assert (read(others, "a"), read(others, "b")) == ({7: 7}, {1: 10})


def test_a_drop_by_its_command_is_one_drop() -> None:
    _, tables = world_with()
    tables.drop("a", command="d1")
    tables.create("a", UNIQUE)
    tables.drop("a", command="d1")
    assert tables.list() == ["a", "b"]
    with pytest.raises(persist.NotFound):
        tables.drop("nowhere")
