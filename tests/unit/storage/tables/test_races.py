"""A statement that loses a race: it takes what the other one did into account, and loses nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.storage.records import TableMode
from persist_lib.storage.tables import Tables
from persist_lib.testing import Rival
from tests.unit.storage.tables.banks import UNIQUE, read, rows
from tests.worlds import World

More = pc.add(pc.field("cents"), 1)


def racing(mode: TableMode) -> tuple[Rival, Tables, Tables]:
    """A rival, the tables that it races against, and its own."""
    world = World()
    others = world.client().controller().tables()
    others.create("a", UNIQUE, mode=mode, shards=2)
    others.insert("a", rows((1, 10), (2, 20)))
    rival = Rival(world.inner.consensus)
    tables = world.client(rival=rival).controller().tables()
    tables.upsert("a", rows((2, 21)))  # its writers are registered
    others.upsert("a", rows((2, 20)))
    tables.read("a")
    return rival, tables, others


@pytest.mark.parametrize("mode", ["yolo", "wal"])
@pytest.mark.parametrize(
    ("theirs", "mine", "after"),
    [
        (lambda t: t.update("a", {"cents": More}, [1]), lambda t: t.update("a", {"cents": More}, [1]), {1: 12, 2: 20}),
        (lambda t: t.upsert("a", rows((1, 5))), lambda t: t.upsert("a", rows((1, 7))), {1: 7, 2: 20}),
        (lambda t: t.upsert("a", rows((3, 30))), lambda t: t.upsert("a", rows((3, 31))), {1: 10, 2: 20, 3: 31}),
        (lambda t: t.upsert("a", rows((1, 7))), lambda t: t.upsert("a", rows((1, 7))), {1: 7, 2: 20}),
        (lambda t: t.insert("a", rows((3, 30))), lambda t: t.delete("a", [1, 3]), {2: 20}),
        (
            lambda t: t.insert("a", rows((3, 30))),
            lambda t: t.update("a", {"cents": 0}, filter=pc.field("cents") >= 20),
            {1: 10, 2: 0, 3: 0},
        ),
        (
            lambda t: t.update("a", {"cents": 1}, [2]),
            lambda t: t.delete("a", filter=pc.field("cents") >= 20),
            {1: 10, 2: 1},
        ),
        (lambda t: t.delete("a", [1]), lambda t: t.update("a", {"cents": More}), {2: 21}),
        (lambda t: t.delete("a", [1]), lambda t: t.insert("a", rows((3, 3))), {2: 20, 3: 3}),
    ],
)
def test_what_the_other_did_is_seen(
    mode: TableMode, theirs: Callable[[Tables], object], mine: Callable[[Tables], object], after: dict[int, int]
) -> None:
    rival, tables, others = racing(mode)
    rival.before_next(lambda: theirs(others))
    mine(tables)
    assert rival.waiting == 0
    assert read(tables, "a") == read(others, "a") == after


@pytest.mark.parametrize("mode", ["yolo", "wal"])
def test_a_constraint_that_the_other_made_bind_refuses(mode: TableMode) -> None:
    rival, tables, others = racing(mode)
    rival.before_next(lambda: others.insert("a", rows((3, 30))))
    with pytest.raises(persist.ConstraintViolated):
        tables.insert("a", rows((3, 31)))
    assert read(tables, "a") == {1: 10, 2: 20, 3: 30}


@pytest.mark.parametrize("mode", ["yolo", "wal"])
def test_many_that_are_first_do_not_starve_a_statement(mode: TableMode) -> None:
    rival, tables, others = racing(mode)
    for number in range(5):
        rival.before_next(lambda number=number: others.upsert("a", rows((2, number))))  # type: ignore[misc]
    tables.update("a", {"cents": More}, [1, 2])
    assert read(tables, "a") == {1: 11, 2: 5}


def test_a_transaction_goes_on_where_others_changed_other_keys() -> None:
    rival, tables, others = racing("wal")
    t = tables.transaction()
    t.upsert("a", rows((1, 11)))
    rival.before_next(lambda: others.upsert("a", rows((2, 22))))
    t.commit()
    assert read(others, "a") == {1: 11, 2: 22}
    t = tables.transaction()
    t.upsert("a", rows((1, 12)))
    rival.before_next(lambda: others.upsert("a", rows((1, 13))))
    with pytest.raises(persist.WriteConflict):
        t.commit()
    assert read(others, "a") == {1: 13, 2: 22}
