"""The epoch rule at both boundaries: what is deleted at X goes when seqno_since and some rollup are beyond X."""

from __future__ import annotations

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.plan.upkeep import rollup_is_due
from persist_lib.core.state import Garbage, Reader, Rollup, State
from persist_lib.format.paths import part_key, rollup_key
from persist_lib.frontier import MINIMUM
from persist_lib.ids import PartKey, SeqNo, format_reader_id, format_writer_id, parse_rollup_key
from persist_lib.testing import check_swept
from tests.worlds import SCHEMA, SMALL, World, row

X = 50
PART = part_key(format_writer_id(1), 1)
OLD_ROLLUP = rollup_key(SeqNo(3), 1)


def deleted(key: PartKey, *, newest: int, held: int | None) -> State:
    """A state in which `key` was deleted at X: its newest rollup, and the oldest state that a reader holds."""
    readers = {} if held is None else {format_reader_id(1): Reader(MINIMUM, SeqNo(held), 0)}
    rollups = {SeqNo(newest): Rollup(rollup_key(SeqNo(newest), 1), 1, bytes(16))}
    return State(schemas=(SCHEMA,), garbage={key: Garbage(SeqNo(X), 7)}, rollups=rollups, readers=readers)


@pytest.mark.parametrize(("newest", "is_free"), [(X - 1, False), (X, False), (X + 1, True), (X + 2, True)])
@pytest.mark.parametrize("held", [X + 1, X + 9, None])
def test_a_part_waits_for_a_rollup_beyond_its_deletion(newest, is_free, held):
    state = deleted(PART, newest=newest, held=held)
    plan = plan_garbage(state, SeqNo(X + 10))
    assert (plan.keys == {PART: 7}) is is_free
    assert [held.why for held in plan.held] == (
        [] if is_free else [f"no rollup beyond v{X} yet; the newest is v{newest}"]
    )
    assert rollup_is_due(state, SeqNo(X + 10), every=1000) is not is_free, (
        "a rollup is due exactly while garbage waits for it"
    )


@pytest.mark.parametrize("key", [PART, OLD_ROLLUP])
@pytest.mark.parametrize(("since", "is_free"), [(X - 1, False), (X, False), (X + 1, True)])
@pytest.mark.parametrize("is_held", [True, False])
def test_what_a_reader_may_still_read_from_waits(key, since, is_free, is_held):
    """With a reader, or without one at the very seqno of the state."""
    state = deleted(key, newest=X + 5, held=since if is_held else None)
    plan = plan_garbage(state, SeqNo(X + 9 if is_held else since))
    assert (plan.keys == {key: 7}) is is_free
    assert len(plan.held) == (not is_free)


@pytest.mark.parametrize("newest", [X - 2, X - 1, X, X + 1])
def test_an_old_rollup_waits_for_readers_but_for_no_further_rollup(newest):
    """The rollup that replaces it is older than the transition that deletes it: it would wait for one more for ever."""
    state = deleted(OLD_ROLLUP, newest=newest, held=None)
    assert plan_garbage(state, SeqNo(X + 1)).keys == {OLD_ROLLUP: 7}
    assert not rollup_is_due(state, SeqNo(X + 1), every=1000)


def test_both_wait_for_the_strictest_of_several_readers():
    state = deleted(PART, newest=X + 5, held=X + 1)
    late = msgspec.structs.replace(state, readers={**state.readers, format_reader_id(2): Reader(MINIMUM, SeqNo(X), 0)})
    assert not plan_garbage(late, SeqNo(X + 10)).keys
    assert plan_garbage(state, SeqNo(X + 10)).keys


@pytest.mark.parametrize("is_finished", [False, True])
def test_one_pass_of_maintenance_rolls_up_beyond_what_it_deletes_itself(world: World, is_finished):
    """A copy of the very state that the compaction, or the end, left would free nothing."""
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        for time in range(4):
            write.compare_and_append([row(time, time=time)], time, time + 1)
    if is_finished:
        client.finish("s")
    done = client.maintain("s", policy=persist.Policy(weight=1e9))
    state = client.inspect("s").state
    assert len(done.collected.keys) == 4
    assert [key for key in state.garbage if parse_rollup_key(key) is None] == []
    assert [gone.seqno < state.newest_rollup for gone in done.compacted.applied if gone.seqno] == [True] * (
        not is_finished
    )
    for _ in range(3):
        client.maintain("s")
    check_swept(client, "s")
