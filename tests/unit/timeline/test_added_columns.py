"""Columns that are added to a table of a timeline: each process has them from one time on, and loses none of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog.wal import EVOLVED
from persist_lib.core.formats import GROUPS, MEMBERS, SCHEMAS_SAY_MORE
from persist_lib.errors import InvariantViolated
from persist_lib.format import log
from persist_lib.timeline.wal_apply import apply_table
from tests.circles import by_day, has_met
from tests.worlds import DiesAt, Killed, World

OLD = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True, times="ms")
NEW = persist.Schema({"id": "int64 not null"}, {"n": "int64", "x": "string"}, unique=True, times="ms")
BOTH = pytest.mark.parametrize("mode", ["wal", "yolo"])


def made(world: World, mode: Any, shards: int = 2) -> persist.Client:
    """A table `t` with two rows, and `u` beside it."""
    client = world.client()
    for name in ("t", "u"):
        client.controller().tables().create(name, OLD, mode=mode, shards=shards)
    client.table("t").upsert([{"id": 1, "n": 1}, {"id": 2, "n": 2}])
    return client


def rows(found: Any) -> dict[int, tuple[Any, ...]]:
    return {row["id"]: tuple(row.values())[1:] for row in found.to_pylist()}


def tables_of(client: persist.Client) -> Any:
    return client.controller().tables()


@BOTH
def test_older_rows_are_null_in_it_and_open_handles_stay_in_their_columns(world: World, mode: str) -> None:
    client = made(world, mode)
    old, before = world.client().table("t"), client.table("t").read().as_of
    listening = old.listen(before)
    table = client.table("t")
    assert table.evolve(NEW, dry_run=True) == ("x",)
    assert rows(table.read()) == {1: (1,), 2: (2,)}
    assert table.evolve(NEW) == ("x",)
    assert table.describe().schema == NEW
    assert table.evolve(NEW) == ()
    assert rows(table.read()) == {1: (1, None), 2: (2, None)} == rows(table.read(before))
    table.upsert([{"id": 2, "n": 2, "x": "b"}, {"id": 3, "n": 3, "x": "c"}])
    table.update({"x": "a"}, keys=[1])
    assert rows(table.read(filter=pc.field("x") > "a")) == {2: (2, "b"), 3: (3, "c")}
    assert rows(old.read()) == {1: (1,), 2: (2,), 3: (3,)} == rows(old.read(old.read().as_of))
    assert old.read(columns=["n"], diff=True).to_arrow().num_rows == 3
    assert old.upsert([{"id": 4, "n": 4}]).inserted == 1
    with pytest.raises(persist.InvalidUsage, match="no columns"):
        old.read(columns=["x"])
    for change in (
        lambda: old.upsert([{"id": 1, "n": 5}]), lambda: old.delete([1]), lambda: old.update({"n": 3}, keys=[1]),
    ):  # fmt: skip
        with pytest.raises(persist.SchemaMismatch, match=r"has the columns \['x'\]"):
            change()
    assert old.update({"n": 5}, keys=[4]).updated == 1
    assert rows(table.read()) == {1: (1, "a"), 2: (2, "b"), 3: (3, "c"), 4: (5, None)}
    assert set(old.changes(before).to_arrow().column_names) == {"id", "n", "_time", "_diff"}
    assert "x" in table.changes(before).to_arrow().column_names
    heard: Counter[tuple[int, int]] = Counter()
    for event in listening.poll():
        if isinstance(event, persist.Updates):
            assert event.table.column_names == ["id", "n", "_time", "_diff"]
            for row in event.table.to_pylist():
                heard[row["id"], row["n"]] += row["_diff"]
    assert +heard == {(3, 3): 1, (4, 5): 1}, "a change of the new column alone is not seen in the old ones"


@BOTH
def test_who_had_the_table_open_applies_and_reads_the_new_columns(world: World, mode: str) -> None:
    """It knows the older ones, and learns of the others by the mark."""
    client, other = made(world, mode), tables_of(world.client())
    listening = other.listen("t", client.table("t").read().as_of)
    assert rows(other.read("t")) == {1: (1,), 2: (2,)}
    other.apply()
    other.upsert("t", [{"id": 9, "n": 9}])
    other.apply()  # its writers of the shards are open, too
    client.table("t").evolve(NEW)
    client.table("t", NEW).upsert([{"id": 2, "n": 2, "x": "b"}])
    assert rows(other.read("t")) == {1: (1, None), 2: (2, "b"), 9: (9, None)}, "from the WAL"
    client.table("t", NEW).upsert([{"id": 3, "n": 3, "x": "c"}])
    other.apply()
    other.tidy()
    listening.poll()
    expected = {1: (1, None), 2: (2, "b"), 3: (3, "c"), 9: (9, None)}
    for one in (other, tables_of(world.client())):
        assert rows(one.read("t")) == expected
    other.upsert("t", [{"id": 1, "n": 1, "x": "a"}])
    assert rows(client.table("t").read()) == expected | {1: (1, "a")}


def test_an_applier_that_knows_the_older_columns_loses_none(world: World) -> None:
    """It sees the mark and what comes after it at one look, and its writers are older."""
    client, other = made(world, "wal"), tables_of(world.client())
    other.apply()
    client.table("t").evolve(NEW)
    client.table("t", NEW).upsert([{"id": 2, "n": 2, "x": "b"}])
    other.apply()
    other.tidy()
    assert tables_of(client).lag().rows == 0
    assert rows(world.client().table("t").read()) == {1: (1, None), 2: (2, "b")}


@pytest.mark.parametrize("then", ["read", "apply", "upsert", "transaction"])
def test_who_looked_just_before_the_mark_and_reads_the_wal_just_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """What was asked about the shards is older than the mark, the WAL is not: so the shards are read again."""
    client, other = made(world, "wal"), tables_of(world.client())
    other.read("t").to_pylist()
    other.apply()
    heads, done = other._timelines.line("default").heads, list[Any]()
    look = heads.look

    def look_early() -> None:
        if not done:
            client.table("u").upsert([{"id": 1, "n": 1}])  # so that the WAL is read again
        look()
        if not done:
            done.append(client.table("t").evolve(NEW))
            client.table("t", NEW).upsert([{"id": 2, "n": 2, "x": "b"}])

    monkeypatch.setattr(heads, "look", look_early)
    expected: dict[int, Any] = {1: (1, None), 2: (2, "b")}
    if then == "read":
        assert rows(other.read("t")) == expected
    elif then == "apply":
        other.apply()
    elif then == "upsert":
        other.upsert("t", [{"id": 1, "n": 1, "x": "a"}])
        expected[1] = (1, "a")
    else:
        with other.transaction() as t:
            assert rows(t.read("t")) == expected
            t.update("t", {"n": 7}, keys=[2])
        expected[2] = (7, "b")
    assert done == [("x",)]
    other.apply()
    other.tidy()
    assert rows(other.read("t")) == rows(tables_of(world.client()).read("t")) == expected


def test_who_applies_by_a_view_of_before_writes_in_the_newest_columns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a listener may, which stays in the columns in which it began. If its writers stayed, too, it would refuse."""
    client, other = made(world, "wal"), tables_of(world.client())
    line: Any = other._timelines.line("default")
    line.look()
    view, deadline = line.view("t"), line.client.runtime.deadline(5)
    apply_table(line, view, deadline)
    client.table("t").evolve(NEW)
    for word in ("b", "c"):
        client.table("t", NEW).upsert([{"id": 2, "n": 2, "x": word}])
        line.look()
        if word == "c":
            with monkeypatch.context() as patch:
                patch.setattr(type(view), "writer", lambda *_: SimpleNamespace(schema=OLD))
                with pytest.raises(InvariantViolated, match=r"columns \['x'\]"):
                    apply_table(line, view, deadline)
        apply_table(line, view, deadline)
        other.tidy()
        assert rows(tables_of(world.client()).read("t")) == {1: (1, None), 2: (2, word)}


def test_a_transaction_that_began_in_the_older_columns_is_committed_or_gets_a_conflict(world: World) -> None:
    client = made(world, "wal")
    other = world.client()
    first, second, third = (other.transaction() for _ in range(3))
    first.upsert("t", [{"id": 1, "n": 10}])
    first.upsert("u", [{"id": 1, "n": 10}])
    second.update("t", {"n": 20}, keys=[2])
    client.table("t").evolve(NEW)
    client.table("t", NEW).upsert([{"id": 2, "n": 2, "x": "b"}])
    first.upsert("t", [{"id": 3, "n": 3, "x": "c"}])  # it has the new ones from here on
    assert rows(first.read("t")) == {1: (10, None), 2: (2, None), 3: (3, "c")}
    third.delete("t", [1])
    first.commit()
    for late in (second, third):
        with pytest.raises(persist.WriteConflict, match="changed keys"):
            late.commit()
    expected = {1: (10, None), 2: (2, "b"), 3: (3, "c")}
    assert rows(tables_of(client).read("t")) == expected
    tables_of(other).apply()
    assert rows(tables_of(world.client()).read("t")) == expected


def test_an_evolution_between_the_look_and_the_commit_of_a_statement(world: World) -> None:
    """The statement was made in the older columns: it is done against what is there in the newer ones."""
    client, other = made(world, "wal"), tables_of(world.client())
    done: list[Any] = []

    def change(table: Any) -> Any:
        if not done:
            done.append(client.table("t").evolve(NEW))
            client.table("t", NEW).upsert([{"id": 5, "n": 5, "x": "e"}])
        return table.set_column(1, "n", pc.add(table.column("n"), 1))

    assert other.update("t", change, keys=[1, 2]).updated == 2
    assert done == [("x",)]
    assert rows(other.read("t")) == {1: (2, None), 2: (3, None), 5: (5, "e")}


@BOTH
def test_whoever_dies_at_whichever_request_leaves_the_old_columns_or_the_new(mode: str) -> None:
    left = Counter[int]()
    for number in by_day(range(1, 1_000), 3):
        world = World(seed=number)
        made(world, mode)
        other = tables_of(world.client())
        other.read("t").to_pylist()
        plan = DiesAt(number)
        table = world.client(plan=plan).table("t")
        plan.is_armed = True
        try:
            table.evolve(NEW)
        except Killed:
            plan.is_armed = False
        else:
            break
        fresh, reader = tables_of(world.client()), tables_of(world.client(read_only=True))
        found = {len(next(iter(rows(one.read("t")).values()))) for one in (other, fresh, reader)}
        assert len(found) == 1, (number, found)
        left[found.pop()] += 1
        other.upsert("u", [{"id": 1, "n": 1}])
        if mode == "wal":
            world.client().transaction().rollback()
        other.apply()
        fresh.controller.tend()
        assert world.client().table("t").evolve(NEW) in {(), ("x",)}
        assert not fresh.controller.describe("t").pending
        fresh.upsert("t", [{"id": 2, "n": 2, "x": "b"}])
        other.apply()
        assert rows(other.read("t")) == {1: (1, None), 2: (2, "b")} == rows(tables_of(world.client()).read("t")), number
        world.close()
    assert has_met(left, {1, 2}), left


@BOTH
def test_programs_of_the_release_before_refuse_the_table(
    world: World, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would drop what is in columns that they do not know. Other tables are theirs, but on the same WAL."""
    monkeypatch.setattr("persist_lib.core.formats.CREATED", SCHEMAS_SAY_MORE)
    client, before = made(world, mode), tables_of(world.client())
    client.table("alone", OLD).append([{"id": 1, "n": 1}])
    before.read("t").to_pylist()
    client.table("t").evolve(NEW)
    names = client.controller().describe("t").active.shards
    assert {client.inspect(name).state.format for name in names} == {MEMBERS}
    monkeypatch.setattr(log, "NEWEST", GROUPS)
    for one in (before, tables_of(world.client())):
        for call in (
            lambda one=one: one.read("t").to_pylist(), lambda one=one: one.upsert("t", [{"id": 3, "n": 3}]),
            lambda one=one: one.controller.evolve("t", NEW),
        ):  # fmt: skip
            with pytest.raises(persist.NewerFormat):
                call()
        if mode == "wal":
            with pytest.raises(persist.NewerFormat):
                one.apply()
    assert rows(world.client().table("alone").read()) == {1: (1,)}


def test_a_program_of_the_release_before_does_not_finish_an_evolution(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would add the columns without the mark: whatever is pending is finished by anyone who looks."""
    client = made(world, "wal")
    names = client.controller().describe("t").active.shards
    plan = DiesAt(1)
    dying = world.client(plan=plan)
    for number in range(1, 60):
        plan.number, plan.seen, plan.is_armed = number, 0, True
        with pytest.raises(Killed):
            dying.table("t").evolve(NEW)
        plan.is_armed = False
        if client.controller().describe("t").pending:
            break
    with monkeypatch.context() as patch:
        patch.setattr(log, "NEWEST", GROUPS)
        with pytest.raises(persist.NewerFormat):
            world.client().controller().evolve("t", NEW)
    assert {client.inspect(name).state.schemas for name in names} == {(OLD,)}
    assert world.client().table("t").evolve(NEW) == ()
    assert client.table("t").describe().schema == NEW


def test_there_is_one_mark_and_it_goes_with_the_rest_of_the_wal(world: World) -> None:
    client = made(world, "wal")
    client.table("t").evolve(NEW)
    tables = tables_of(client)
    tables.transaction().rollback()
    wal = f"{next(iter(client.controller().catalog.fetch().timelines))}.wal"

    def marks() -> list[int]:
        with client.open_reader(wal) as reader:
            return [one["chunk"] for one in reader.snapshot().to_pylist() if one["chunk"] < 0]

    assert marks() == [EVOLVED]
    tables.apply()
    tables.tidy()
    assert marks() == []
    assert rows(tables.read("t")) == {1: (1, None), 2: (2, None)}
