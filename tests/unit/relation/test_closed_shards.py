"""What a shard that takes no more says: closed for writing (upper is empty), or finished for good (a tombstone).

And every other call that may find nothing to do: it says what is so.
"""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.errors import HoldConflict, LeaseExpired, ShardFinished, SinceViolation, UpperMismatch
from persist_lib.testing import check_world, contents_of
from tests.worlds import SCHEMA, SMALL, World, row


def closed(world: World, at: int = 5) -> persist.Client:
    """A client, and a shard "s" with an update at 0 that somebody has closed at `at`."""
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, at)
        write.finish()
    return client


@pytest.mark.parametrize("bounds", [(0, 3), (3, 7), (5, 7), (7, 9), (0, persist.TOP), (5, persist.TOP)])
def test_an_append_to_a_closed_shard_never_says_that_its_data_is_there(world: World, bounds: tuple[int, int]) -> None:
    write = closed(world).open_writer("s", SCHEMA)
    before = contents(world)
    for updates in ([row(7, "lost", bounds[0])], [row(7, "lost", bounds[0]), row(8, "lost", bounds[0])]):
        with pytest.raises(UpperMismatch, match="closed for writing") as caught:
            write.append(updates, *bounds)
        assert (caught.value.fields["expected"], caught.value.fields["actual"]) == (persist.at(bounds[0]), persist.TOP)
        assert "from [] on" not in caught.value.message
        with pytest.raises(UpperMismatch, match="closed for writing") as caught:
            write.compare_and_append(updates, *bounds)
        assert "from [] on" not in caught.value.message
    assert contents(world) == before


def test_it_is_the_same_before_and_after_a_compaction(world: World) -> None:
    client = closed(world)
    client.compact("s")
    write = client.open_writer("s", SCHEMA)
    with pytest.raises(UpperMismatch, match="closed for writing"):
        write.append([row(1)], 0, 5)


def test_an_append_of_nothing_misses_nothing_on_a_closed_shard(world: World) -> None:
    write = closed(world).open_writer("s", SCHEMA)
    done = write.append([], 5, 9)
    assert (done.upper, done.count) == (persist.TOP, 0)


def test_an_append_that_closed_the_shard_itself_is_known_by_its_token(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    done = write.append([row(1, time=5)], 0, persist.TOP, token=b"t")
    again = write.append([row(1, time=5)], 0, persist.TOP, token=b"t")
    assert (again.seqno, again.upper, again.count) == (done.seqno, persist.TOP, 1)


def test_saying_again_that_nothing_more_comes_is_true_of_a_closed_shard(world: World) -> None:
    write = closed(world).open_writer("s", SCHEMA)
    before = world.bytes("s")
    for said in (write.finish(), write.finish(), write.advance_upper(9), write.advance_upper(persist.TOP)):
        assert (said.upper, said.count, said.attempts) == (persist.TOP, 0, 0)
    assert world.bytes("s") == before


@pytest.mark.parametrize("knows", [True, False])
def test_a_tombstone_says_so_to_whoever_advances_or_finishes_it(world: World, *, knows: bool) -> None:
    client, other = world.client(), world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 5)
    other.finish("s")
    if knows:
        write.fetch_upper()
    for call in (lambda: write.advance_upper(3), lambda: write.advance_upper(9), write.finish, lambda: write.finish(5)):
        with pytest.raises(ShardFinished, match="finished for good"):
            call()


def test_a_closed_handle_does_not_say_that_upper_has_come_so_far(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.advance_upper(5)
    write.close()
    with pytest.raises(LeaseExpired, match="this writer was closed"):
        write.advance_upper(3)


def test_releasing_a_hold_twice_says_that_there_is_none(world: World) -> None:
    client = world.client()
    client.open_writer("s", SCHEMA)
    client.set_hold("s", "audit", 0, opaque=b"mine")
    client.set_hold("s", "dash", 0)
    client.release_hold("s", "audit")
    before = world.bytes("s")
    for expected in ("any", b"mine", b""):
        with pytest.raises(HoldConflict, match="there is no hold 'audit'") as caught:
            client.release_hold("s", "audit", expected=expected)
        assert "omebody else moved it" not in caught.value.message
    with pytest.raises(HoldConflict, match="there is no hold 'audit'"):
        client.set_hold("s", "audit", 0, expected=b"mine")
    with pytest.raises(HoldConflict, match="there is a hold 'dash' already"):
        client.set_hold("s", "dash", 0, expected=None)
    with pytest.raises(HoldConflict, match="fencing value b'', not b'mine'"):
        client.release_hold("s", "dash", expected=b"mine")
    assert world.bytes("s") == before
    client.downgrade_hold("s", "dash", 0, expected=b"", opaque=b"mine")
    client.release_hold("s", "dash", expected=b"mine")


def test_what_is_so_already_changes_nothing(world: World) -> None:
    client = world.client()
    client.open_writer("s", SCHEMA)
    client.set_retention("s", 5)
    client.set_hold("s", "audit", 0)
    before = world.bytes("s")
    client.set_retention("s", 5)
    client.set_hold("s", "audit", 0)
    client.evolve_schema("s", SCHEMA)
    assert client.expire("s").overdue == ()
    assert world.bytes("s") == before


def test_every_call_on_a_tombstone_says_what_is_so(world: World) -> None:
    client = closed(world)
    with client.open_reader("s"), pytest.raises(persist.StillRead):
        client.finish("s")
    client.finish("s")
    for call in (
        lambda: client.finish("s"),
        lambda: client.set_retention("s", 5),
        lambda: client.set_retention("s", None),
        lambda: client.set_hold("s", "audit", 0),
        lambda: client.release_hold("s", "audit"),
        lambda: client.evolve_schema("s", SCHEMA),
        lambda: client.open_reader("s"),
        lambda: client.open_writer("s", SCHEMA).append([row(1)], 0, 5),
        lambda: client.open_writer("s", SCHEMA).compare_and_append([row(1, time=5)], 5, 6),
        lambda: client.open_writer("s", SCHEMA).append([], 0, 5),
        lambda: client.open_writer("s", SCHEMA).upsert([]),
        lambda: client.open_writer("s", SCHEMA).append_now([{"id": 1, "word": "w"}]),
    ):
        with pytest.raises(ShardFinished, match="finished for good"):
            call()
    assert not client.expire("s").overdue
    assert client.retain("s").before == persist.TOP
    assert not client.compact("s").applied
    assert client.maintain("s").after.finished
    assert client.scrub("s").batches == 0
    client.maintain("s")  # the rollup that the last one has replaced
    assert not client.collect("s").keys, "maintain did it"
    assert not client.audit_orphans("s").orphans
    assert len([*world.inner.blob.list("s/")]) == 1, "one rollup remains"
    assert "s" in client.shards()
    check_world(client, "s")


def contents(world: World) -> object:
    with world.client().open_reader("s") as read:
        return contents_of(read.snapshot(2**64 - 1, diff=True).to_arrow())


def test_a_hold_that_cannot_move_back_is_not_said_to_hold_what_is_given_up(world: World) -> None:
    client = world.client()
    client.open_writer("s", SCHEMA).advance_upper(6)
    client.downgrade_hold("s", "audit", 5)
    with pytest.raises(SinceViolation, match=r"the hold is there already and never moves back. Hold \[5\] or later"):
        client.set_hold("s", "audit", 3)


def test_a_reader_that_gave_up_everything_is_not_told_to_read_at_the_empty_frontier(world: World) -> None:
    client = world.client()
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 5)
    with client.open_reader("s") as other, client.open_reader("s") as read:
        read.downgrade_since(persist.TOP)
        with pytest.raises(SinceViolation, match="Nothing can be read any more"):
            read.snapshot(3, diff=True)
        assert contents_of(other.snapshot(3, diff=True).to_arrow()) == {(1, "w"): 1}
