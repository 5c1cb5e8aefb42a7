"""A table that is dropped while transactions on it are open, by a process that is killed: no commit vanishes."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.timeline import Tables
from tests.circles import by_day
from tests.unit.timeline.banks import UNIQUE, read, rows
from tests.worlds import DiesAt, Killed, World


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
