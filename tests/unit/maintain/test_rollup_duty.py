"""Of all that append to a shard, one rolls up when that is due: no herd, and none that dies ends it for good."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.testing import Outcome, Rival, check_world
from tests.worlds import SCHEMA, Storm, World, row

EVERY = 16
CONFIG = persist.Config(rollup_every=EVERY)


def append(write: persist.WriteHandle) -> int:
    """Append as contenders do: from the upper that they get. Answers the seqno."""
    while True:
        upper = write.upper.time or 0
        try:
            return write.compare_and_append([row(upper, "x", upper)], upper, upper + 1).seqno
        except persist.UpperMismatch:
            continue


def rollups(world: World) -> int:
    """How many objects were written, linked or not."""
    return sum(1 for request in world.requests if request.kind == "set" and "/rollup/" in request.key)


@pytest.mark.parametrize("processes", [1, 2, 16])
def test_one_rollup_is_written_when_due_however_many_append(world: World, processes: int) -> None:
    writers = [world.client(CONFIG).open_writer("s", SCHEMA) for _ in range(processes)]
    for number in range(400):
        append(writers[number % processes])
    version = writers[0].machine.fetch()
    assert rollups(world) == version.seqno // EVERY
    assert version.seqno - version.state.newest_rollup <= EVERY + 2
    check_world(world.clients[0], "s")


def test_others_append_meanwhile_and_leave_it_to_the_first(world: World) -> None:
    rival = Rival(world.inner.consensus)
    first = world.client(CONFIG, rival=rival).open_writer("s", SCHEMA)
    others = [world.client(CONFIG).open_writer("s", SCHEMA) for _ in range(8)]
    for write in (first, *others):
        append(write)
    while append(first) % EVERY != EVERY - 1:
        pass
    world.requests.clear()
    rival.before_next(lambda: None)  # the append, which finds it due
    rival.before_next(lambda: [append(write) for write in others])  # the link to the rollup
    due = append(first)
    assert due % EVERY == 0
    assert rival.waiting == 0
    assert first.machine.fetch().seqno > due + len(others)
    assert rollups(world) == 1
    assert first.machine.state.newest_rollup == due


def test_what_its_writer_does_not_achieve_the_first_append_of_the_next_ones_does(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "set")
    broken, sound = world.client(CONFIG, plan=storm), world.client(CONFIG)
    dying, other = broken.open_writer("s", SCHEMA), sound.open_writer("s", SCHEMA)
    append(other)
    while append(dying) % EVERY != EVERY - 1:
        pass
    storm.blows = True
    assert append(dying) == EVERY
    world.requests.clear()
    while append(other) < 2 * EVERY:
        assert rollups(world) == 0
    assert rollups(world) == 1
    assert other.machine.fetch().state.newest_rollup == 2 * EVERY


def test_it_is_due_also_where_every_such_seqno_is_something_else_than_an_append(world: World) -> None:
    client = world.client(CONFIG)
    write, read = client.open_writer("s", SCHEMA), client.open_reader("s", SCHEMA)
    for number in range(100):
        while client.inspect("s").seqno % 2 == 0:
            append(write)
        read.downgrade_since(number)
    assert all(seqno % 2 == 1 for seqno in client.inspect("s").state.rollups), "the setting is wrong"
    assert rollups(world) == pytest.approx(client.inspect("s").seqno / EVERY, abs=1)


def test_a_rollup_of_maintenance_a_moment_ago_is_enough(world: World) -> None:
    client = world.client(CONFIG)
    write = client.open_writer("s", SCHEMA)
    while append(write) != EVERY - 4:
        pass
    client.roll_up("s", force=True)
    for _ in range(8):
        append(write)
    assert rollups(world) == 1
