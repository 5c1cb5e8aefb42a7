"""Upsert, delete and append_now, one call at a time: what they answer, what they refuse, and how they lose a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.formats import CREATED, SCHEMAS_SAY_MORE
from persist_lib.errors import (
    DiffOverflow,
    InvalidUsage,
    Missing,
)
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, contents_of
from tests.worlds import SCHEMA, SMALL, World, row


def one(id_: int, word: str | None = "w") -> dict[str, Any]:
    return {"id": id_, "word": word}


def contents(world: World, shard: str = "s") -> dict[tuple[Any, ...], int]:
    client = world.client()
    with client.open_reader(shard) as read:
        return dict(contents_of(read.snapshot(diff=True).to_arrow()))


def counts(done: persist.Changed) -> tuple[int, int, int, int]:
    return done.inserted, done.updated, done.unchanged, done.deleted


def test_append_now_takes_the_next_time(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.advance_upper(7)
    done = write.append_now([one(1), {**one(1), "_diff": 2}, one(2, "b")])
    assert (done.upper, done.count, type(done)) == (persist.at(8), 2, persist.Appended)
    assert contents(world) == {(1, "w"): 3, (2, "b"): 1}
    with pytest.raises(InvalidUsage, match="next time itself"):
        write.append_now([row(1, time=3)])


# --- races -----------------------------------------------------------------------------------------------------------


def test_after_a_lost_race_only_what_is_new_is_read(world: World) -> None:
    ours = world.client(SMALL, rival=world.rival).open_writer("s", SCHEMA)
    theirs = world.client(SMALL).open_writer("s", SCHEMA)
    for n in range(5):
        ours.compare_and_append([row(i, str(n), n) for i in range(100)], n, n + 1)
    plain = ours.upsert([one(5, "x")])
    assert plain.cost.gets == 5  # an upsert that is not raced reads a part of each append
    world.rival.before_next(lambda: theirs.compare_and_append([row(7, "theirs", 6)], 6, 7))
    raced = ours.upsert([one(5, "y")])
    assert (world.rival.waiting, raced.upper) == (0, persist.at(8))
    assert raced.cost.gets == 6  # with that of the upsert before; what was appended in between has only key 7
    world.rival.before_next(lambda: theirs.compare_and_append([row(5, "theirs", 8)], 8, 9))
    assert ours.upsert([one(5, "z")]).cost.gets == 7 + 1
    assert contents(world)[5, "z"] == 1


def test_what_a_compaction_moved_forward_is_not_taken_for_new(world: World) -> None:
    """The rival's append and a compaction to its time, in which an older row looks as if it were newer."""
    ours = world.client(SMALL, rival=world.rival).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    theirs = other.open_writer("s", SCHEMA)
    ours.upsert([one(1, "old"), one(2, "old")])

    def act() -> None:
        theirs.upsert([one(n, "theirs" * 99) for n in range(3, 999)])
        other.set_retention("s", 0)
        other.maintain("s")
        state = other.inspect("s").state
        assert state.since == persist.at(1)
        assert [batch.lower for batch in state.trace if batch.count] == [persist.at(0)]

    world.rival.before_next(act)
    assert counts(ours.upsert([one(1, "new"), one(2, "old")])) == (0, 1, 1, 0)
    assert [row for row in contents(world) if row[0] < 3] == [(1, "new"), (2, "old")]


def test_objects_that_are_collected_meanwhile_are_looked_for_in_a_newer_state(world: World) -> None:
    plan = Vanishing()
    ours = world.client(SMALL, plan=plan).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    for n in range(4):
        ours.upsert([one(1, str(n)), one(n + 10)])

    def act() -> None:
        before = {entry.key for entry in world.inner.blob.list("s/")}
        other.maintain("s")
        assert len(before - {entry.key for entry in world.inner.blob.list("s/")}) > 1

    plan.acts = [act]
    assert counts(ours.upsert([one(1, "new"), one(10)])) == (0, 1, 1, 0)
    assert not plan.acts
    assert contents(world)[1, "new"] == 1


class Vanishing:
    """A plan that acts before the next read of an object."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []

    def decide(self, operation: Operation) -> Fate:
        if operation.kind == "get" and self.acts:
            self.acts.pop()()
        return Fate()


def test_an_object_that_is_really_gone_is_damage(world: World) -> None:
    write = world.client(SMALL).open_writer("s", SCHEMA)
    write.upsert([one(1)])
    for entry in list(world.inner.blob.list("s/")):
        world.inner.blob.delete(entry.key)
    with pytest.raises(Missing):
        write.upsert([one(1, "b")])


# --- outcomes --------------------------------------------------------------------------------------------------------


def test_a_multiplicity_that_no_update_can_retract_is_told(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1, "x", diff=-(2**63)), row(2)], 0, 1)
    with pytest.raises(DiffOverflow, match="add to it first"):
        write.upsert([one(1)])
    write.append_now([{**one(1, "x"), "_diff": 2}])
    assert counts(write.upsert([one(1, "x"), one(2)])) == (0, 1, 1, 0)
    assert contents(world) == {(1, "x"): 1, (2, "w"): 1}


def test_shards_are_created_in_a_format_that_has_constraints() -> None:
    assert CREATED >= SCHEMAS_SAY_MORE
