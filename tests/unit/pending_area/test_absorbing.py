"""What absorption does with batches as writers leave them: overlapping, with gaps, damaged, late, in dispute."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.core import commands as c
from persist_lib.errors import InvalidUsage, NotFound, SinceViolation, StillRead
from persist_lib.frontier import TOP, at
from persist_lib.ids import PartKey
from persist_lib.pending_area import absorption, listing, objects
from persist_lib.testing import check_swept, check_world, contents_of
from tests.unit.pending_area.areas import NAME, Area, name_of, plain, said
from tests.worlds import SCHEMA, SMALL, WIDER, World, row


def swept(area: Area) -> None:
    """At rest nothing is left over."""
    area.rest()
    check_swept(area.client, NAME)
    state = area.client.inspect(NAME).state
    assert set(area.pending()) <= {key for batch in state.trace for key in batch.keys}
    assert not state.garbage or all(key.startswith("rollup") for key in state.garbage)


def test_batches_that_follow_one_another_become_one(area: Area):
    for lower in range(0, 30, 3):
        area.put("a", lower, lower + 3)
    done = area.absorb()
    assert (done.batches, done.adopted, done.transitions, done.left, done.upper) == (10, 0, 1, 0, at(30))
    assert area.merged() == plain(said(0, 30), 29)
    assert len(area.client.inspect(NAME).state.garbage) == 10, "in the same transition"
    check_world(area.client, NAME)
    area.reader.close()
    swept(area)
    assert area.pending() == []
    assert area.absorb().batches == 0


@pytest.mark.parametrize(
    "cuts",
    [
        {"a": [(0, 1), (1, 3)], "b": [(0, 2), (2, 3)]},
        {"a": [(0, 9)], "b": [(3, 5), (4, 12)], "c": [(11, 15)]},
        {"a": [(0, 5), (5, 10), (10, 15)], "b": [(0, 5), (5, 10), (10, 15)]},
        {"a": [(0, 4), (2, 6), (1, 3), (0, 4), (5, 15)]},
        {"a": [(0, 1), (1, 2), (2, 3)], "b": [(0, 15)]},
    ],
)
def test_overlaps_within_a_writer_and_between_writers_count_once(area: Area, cuts):
    for writer, bounds in cuts.items():
        for lower, upper in bounds:
            area.put(writer, lower, upper)
    last = max(upper for bounds in cuts.values() for _, upper in bounds)
    done = area.absorb()
    assert (done.upper, done.left, done.disagreements) == (at(last), 0, ())
    assert area.merged() == plain(said(0, last), last - 1)
    check_world(area.client, NAME)
    area.reader.close()
    swept(area)
    assert area.pending() == []


def test_a_gap_stops_it_and_is_named(area: Area):
    area.put("a", 0, 3)
    area.put("b", 5, 8)
    done = area.absorb()
    assert (done.upper, done.gap, done.left) == (at(3), 3, 1)
    area.put("b", 2, 6)
    assert area.absorb().upper == at(8)
    assert area.merged() == plain(said(0, 8), 7)


def test_a_dry_run_says_the_same_and_changes_nothing(area: Area):
    for lower, upper, writer in ((0, 3, "a"), (0, 3, "b"), (3, 9, "a"), (2, 5, "b")):
        area.put(writer, lower, upper)
    before, pending = area.world.bytes(NAME), area.pending()
    planned = area.absorb(dry_run=True)
    assert (area.world.bytes(NAME), area.pending()) == (before, pending)
    done = area.absorb()
    for field in ("upper", "batches", "adopted", "updates", "discarded", "left", "transitions", "size"):
        assert getattr(planned, field) == getattr(done, field), field
    assert planned.cost.commits == 0


def test_a_read_only_client_can_look(area: Area):
    area.put("a", 0, 3)
    looking = area.world.client(read_only=True)
    assert pending_area.absorb(looking, NAME, dry_run=True).batches == 1
    with pytest.raises(InvalidUsage, match="read_only"):
        pending_area.absorb(looking, NAME)


def test_a_damaged_batch_is_skipped_for_anothers(area: Area):
    area.damage(area.put("a", 0, 6))
    area.put("b", 0, 4)
    area.put("c", 4, 6)
    done = area.absorb()
    assert (done.upper, len(done.damaged)) == (at(6), 1)
    assert area.merged() == plain(said(0, 6), 5)
    area.reader.close()
    swept(area)
    assert area.pending() == []


def test_a_damaged_copy_of_a_batch_is_skipped_for_a_sound_one(area: Area):
    for writer in ("a", "b", "c"):
        key = area.put(writer, 0, 6)
        if writer != "c":
            area.damage(key)
    done = area.absorb()
    assert (done.upper, sorted(done.damaged)) == (at(6), [k for k in sorted(done.damaged) if "/c/" not in k])
    assert area.merged() == plain(said(0, 6), 5)


def test_a_damaged_batch_that_no_other_writer_has_stops_it(area: Area):
    area.put("a", 0, 3)
    area.damage(key := area.put("a", 3, 5))
    area.put("a", 5, 9)
    done = area.absorb()
    assert (done.upper, done.gap, list(done.damaged)) == (at(3), 3, [key])
    area.put("b", 3, 5)
    assert area.absorb().upper == at(9)


def test_batches_without_updates_move_upper(area: Area):
    area.writer("a").put([], 0, 5)
    area.writer("a").put([], 5, 9)
    assert area.absorb().upper == at(9)
    area.put("a", 9, 12)
    area.writer("b").put([], 12, 14)
    area.absorb()
    assert area.client.inspect(NAME).state.upper == at(14)
    assert area.merged() == plain(said(9, 12), 13)


def test_a_batch_without_an_end_is_counted_and_not_absorbed(area: Area):
    from msgspec.structs import replace  # noqa: PLC0415

    from persist_lib.format.paths import blob_key  # noqa: PLC0415

    name = replace(name_of(area.put("a", 0, 3)), upper=TOP)
    area.world.inner.blob.set(blob_key(NAME, name.key), b"x")
    area.world.inner.blob.set(f"-pending/{NAME}/a/notes.txt", b"x")
    done = area.absorb()
    assert (done.upper, done.endless.names, done.foreign.count) == (at(3), (name.key,), 1)


def test_a_batch_far_ahead_of_the_stores_clock_waits(world: World):
    schema = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")
    area = Area(world, schema=schema)
    now = world.inner.consensus.now()
    area.writer("a").put([], 0, now)
    area.writer("a").put([], now, now + 2 * 86_400_000)
    done = area.absorb()
    assert (done.upper, done.ahead, done.left) == (at(now), 1, 1)
    world.clock.advance(86_400)
    assert area.absorb().upper == at(now + 2 * 86_400_000)


# --- adoption --------------------------------------------------------------------------------------------------------


@pytest.fixture
def adopting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ADOPT_BYTES", 1)


@pytest.mark.usefixtures("adopting")
def test_a_large_batch_is_referred_to_where_it_is(area: Area):
    keys = [area.put("a", lower, lower + 4) for lower in (0, 4, 8)]
    area.put("b", 0, 4)
    area.world.requests.clear()
    done = area.absorb()
    assert (done.batches, done.adopted, done.transitions, done.discarded) == (3, 3, 1, 1)
    assert area.world.count("set") == 0, "nothing was rewritten"
    state = area.client.inspect(NAME).state
    assert [key for batch in state.trace for key in batch.keys] == keys
    assert not set(keys) & state.garbage.keys()
    assert area.merged() == plain(said(0, 12), 11)
    check_world(area.client, NAME)
    assert area.absorb().discarded == 0, "what is referred to is not discarded as late"
    area.reader.close()
    swept(area)
    assert area.merged() == plain(said(0, 12), 11)


@pytest.mark.usefixtures("adopting")
def test_an_adopted_batch_that_begins_before_upper_counts_from_there(area: Area):
    area.put("a", 0, 4)
    area.put("b", 2, 9)
    area.put("c", 8, 12)
    done = area.absorb()
    assert (done.adopted, done.transitions) == (3, 3), "only the first of a batch can be cut"
    assert area.merged() == plain(said(0, 12), 11)
    check_world(area.client, NAME)
    with area.client.open_reader(NAME) as read:
        for time in range(12):
            with read.snapshot(time, diff=True) as snapshot:
                assert snapshot.to_arrow().num_rows == len(plain(said(0, 12), time))


@pytest.mark.usefixtures("adopting")
def test_whatever_reads_shards_reads_what_was_adopted(area: Area):
    for lower in (0, 40):
        area.put("a", lower, lower + 40)
    area.absorb()
    assert area.client.scrub(NAME).damaged == ()
    with area.client.open_reader(NAME) as read, read.snapshot(79, diff=True) as snapshot:
        splits = [pickle.loads(pickle.dumps(split)) for split in snapshot.splits(3)]
        found = sum((contents_of(split.to_arrow(area.client.blob)) for split in splits), Counter[Any]())
        assert found == plain(said(0, 80), 79)
        one = [row for row in plain(said(0, 80), 79).items() if row[0][0] == 3]
    with area.client.open_reader(NAME) as read:
        assert contents_of(read.snapshot(79, key=(3,), diff=True).to_arrow()) == Counter(dict(one))


@pytest.mark.usefixtures("adopting")
def test_compaction_replaces_what_was_adopted_and_then_it_goes(area: Area):
    keys = [area.put("a", lower, lower + 4) for lower in range(0, 40, 4)]
    area.absorb()
    area.reader.close()
    area.client.compact(NAME, policy=persist.Policy(weight=1e9))
    assert set(keys) <= area.client.inspect(NAME).state.garbage.keys()
    swept(area)
    assert area.pending() == []
    assert area.merged() == plain(said(0, 40), 39)


@pytest.mark.usefixtures("adopting")
def test_a_tombstone_makes_garbage_of_what_was_adopted(area: Area):
    area.put("a", 0, 4)
    area.absorb()
    area.reader.close()
    pending_area.delete(area.client, NAME)
    for _ in range(4):
        area.client.maintain(NAME)
    assert area.pending() == []


# --- late batches ----------------------------------------------------------------------------------------------------


def test_a_late_batch_is_discarded_by_a_transition_and_deleted_later(area: Area):
    area.put("a", 0, 6)
    area.absorb()
    late = area.put("b", 1, 5)
    listener = area.reader.clone()
    done = area.absorb()
    assert (done.discarded, done.disagreements) == (1, ())
    assert late in area.client.inspect(NAME).state.garbage
    area.client.collect(NAME)
    assert late in area.pending(), "a reader holds a version from before"
    listener.close()
    area.reader.close()
    swept(area)
    assert area.pending() == []


def test_a_batch_that_is_discarded_once_more_after_it_was_deleted_is_no_damage(area: Area):
    """A process that absorbs, and was paused since it listed, discards what others have absorbed and deleted."""
    area.put("a", 0, 6)
    area.absorb()
    late = area.put("b", 1, 5)
    area.reader.close()
    swept(area)
    assert area.pending() == []
    reader = pending_area.acquire_read_handle(area.client, NAME)
    area.client.machine(NAME).commit(lambda _state, _now: c.DiscardPending(((PartKey(late), 100),)))
    assert late in area.client.inspect(NAME).state.garbage
    assert [one for one in area.client.verify(NAME, full=True).findings if one.is_damage] == []
    check_world(area.client, NAME)
    reader.close()
    swept(area)


def test_a_batch_that_was_put_again_after_it_was_deleted_goes_again(area: Area):
    """A PUT that was under way for a day."""
    key = area.put("a", 0, 6)
    area.reader.close()
    area.rest()
    assert area.pending() == []
    assert area.put("a", 0, 6) == key
    area.rest()
    assert area.pending() == []
    assert area.merged() == plain(said(0, 6), 5)


def test_a_late_batch_that_says_something_else_is_named_and_stays(area: Area):
    area.put("a", 0, 6)
    area.absorb()
    late = area.put("b", 2, 9, word="x")
    area.put("a", 6, 9)
    blocked = area.absorb()
    assert blocked.is_blocked, "it also reaches beyond upper"
    assert pending_area.choose(area.client, NAME, "a").upper == at(9)
    done = area.absorb()
    assert not done.is_blocked
    other = area.put("c", 3, 5, word="x")
    done = area.absorb()
    [found] = [one for one in done.disagreements if other in one.keys]
    assert (found.time, found.is_late, found.writers) == (3, True, (("c",), ()))
    assert other in area.pending()
    assert late not in area.client.inspect(NAME).state.garbage or late in area.pending()


def test_a_batch_that_disagrees_about_what_is_in_the_shard_already_is_named_when_it_is_late(area: Area):
    """Beyond upper it agrees; so it is not needed, and what it says of earlier times is compared before it goes."""
    area.put("a", 0, 5)
    area.absorb()
    other = area.writer("b").put([*said(0, 5, "x"), *said(5, 8)], 0, 8).key
    area.put("a", 5, 9)
    done = area.absorb()
    assert (done.upper, done.is_blocked) == (at(9), False)
    [found] = done.disagreements
    assert (found.time, found.keys, found.is_late) == (0, (other,), True)
    assert other in area.pending()
    assert pending_area.discard(area.client, NAME, "b", dry_run=True) == 1
    assert pending_area.discard(area.client, NAME, "b") == 1
    assert pending_area.discard(area.client, NAME, "b") == 0
    assert area.absorb().disagreements == ()


def test_a_late_batch_is_compared_only_while_since_allows_it(area: Area):
    area.put("a", 0, 6)
    area.absorb()
    area.reader.downgrade_since(5)
    area.reader.close()
    with area.client.open_reader(NAME) as read:
        read.downgrade_since(5)
    late = area.put("b", 0, 6, word="x")
    done = area.absorb()
    assert (done.discarded, done.disagreements) == (1, ())
    assert late in area.client.inspect(NAME).state.garbage


def test_a_late_batch_that_cancels_out_agrees(area: Area):
    area.writer("a").put([row(1, "w", 0), row(2, "w", 1, -1), row(3, "w", 1)], 0, 2)
    area.absorb()
    area.writer("b").put([row(1, "w", 0), row(3, "w", 1, 2), row(3, "w", 1, -1), row(2, "w", 1, -1)], 0, 2)
    assert area.absorb().disagreements == ()


# --- writers that disagree -------------------------------------------------------------------------------------------


def test_writers_that_disagree_stop_it_until_an_operator_chooses(area: Area):
    area.put("a", 0, 3)
    area.put("b", 0, 3)
    mine, other = area.put("a", 3, 6), area.put("b", 3, 6, word="x")
    area.put("a", 6, 9)
    for _ in range(2):
        done = area.absorb()
        assert (done.upper, done.is_blocked, done.left) == (at(3), True, 3)
        [found] = done.disagreements
        assert (found.time, set(found.keys), set(found.writers)) == (3, {mine, other}, {("a",), ("b",)})
    with pytest.raises(InvalidUsage, match="choose one of"):
        pending_area.choose(area.client, NAME, "nobody")
    before = area.world.bytes(NAME)
    assert pending_area.choose(area.client, NAME, "b", dry_run=True).upper == at(9)
    assert area.world.bytes(NAME) == before
    done = pending_area.choose(area.client, NAME, "b")
    assert (done.upper, done.is_blocked) == (at(9), False)
    assert area.merged() == plain([*said(0, 3), *said(3, 6, "x"), *said(6, 9)], 8)
    assert mine in area.client.inspect(NAME).state.garbage
    with pytest.raises(InvalidUsage, match="no writers disagree"):
        pending_area.choose(area.client, NAME, "b")
    area.reader.close()
    swept(area)
    assert area.pending() == []


def test_times_on_which_all_agree_are_absorbed(area: Area):
    area.put("a", 0, 2)
    area.put("a", 2, 8)
    for lower in range(0, 8, 2):
        area.writer("b").put([*said(lower, lower + 2), *([row(1, "more", lower)] * (lower == 6))], lower, lower + 2)
    done = area.absorb()
    assert (done.upper, done.is_blocked) == (at(6), True)
    assert area.merged() == plain(said(0, 6), 5)


def test_a_choice_is_for_the_times_in_dispute_only(area: Area):
    for writer, word in (("a", "w"), ("b", "x")):
        for lower in range(0, 9, 3):
            area.put(writer, lower, lower + 3, word)
    assert pending_area.choose(area.client, NAME, "a").upper == at(3)
    assert pending_area.choose(area.client, NAME, "a", 4).upper == at(6)
    assert pending_area.choose(area.client, NAME, "b", TOP).upper == at(9)
    assert area.merged() == plain([*said(0, 6), *said(6, 9, "x")], 8)


def test_one_update_more_is_a_disagreement_also_where_the_sums_of_diffs_agree(area: Area):
    area.writer("a").put([row(1, "w", 0), row(2, "w", 0)], 0, 1)
    area.writer("b").put([row(1, "w", 0), row(3, "w", 0)], 0, 1)
    assert area.absorb().is_blocked


# --- several at once, and many ---------------------------------------------------------------------------------------


def test_an_absorber_that_was_late_looks_again(area: Area, monkeypatch):
    for lower in range(0, 12, 3):
        area.put("a", lower, lower + 3)
    other = area.world.client(SMALL)
    commit, met = absorption.Committer.commit, list[Any]()

    def late(self: Any, *arguments: Any) -> Any:
        if not met:
            met.append(None)
            pending_area.absorb(other, NAME)
        return commit(self, *arguments)

    monkeypatch.setattr(absorption.Committer, "commit", late)
    done = area.absorb()
    assert done.upper == at(12)
    assert area.merged() == plain(said(0, 12), 11)
    check_world(area.client, NAME)


def test_a_listing_larger_than_is_kept_takes_several_passes(area: Area, monkeypatch):
    monkeypatch.setattr(listing, "MOST", 10)
    for lower in range(60):
        area.put("a" if lower % 3 else "b", lower, lower + 1)
    assert area.absorb().upper == at(60)
    assert area.merged() == plain(said(0, 60), 59)


def test_a_piece_has_bounds(area: Area, monkeypatch):
    monkeypatch.setattr(absorption, "PIECE_BATCHES", 4)
    for lower in range(10):
        area.put("a", lower, lower + 1)
    assert area.absorb().transitions == 3


def test_much_garbage_is_collected_in_between_or_it_waits(area: Area, monkeypatch):
    monkeypatch.setattr(absorption, "PIECE_BATCHES", 4)
    monkeypatch.setattr(absorption, "MOST_GARBAGE", 8)
    monkeypatch.setattr(absorption, "MOST_HELD", 12)
    for lower in range(40):
        area.put("a", lower, lower + 1)
    done = area.absorb()
    assert "reader" in done.waits
    assert done.left > 0
    assert len(area.client.inspect(NAME).state.garbage) <= 14
    area.reader.close()
    assert area.absorb().upper == at(40)
    assert area.merged() == plain(said(0, 40), 39)


def test_a_large_time_and_the_last_one(area: Area):
    last = 2**64 - 1
    area.writer("a").put([], 0, last - 1)
    area.writer("a").put([row(1, "w", last - 1)], last - 1, last)
    assert area.absorb().upper == at(last)
    area.writer("b").put([row(1, "w", last - 1)], last - 1, last)
    assert area.absorb().discarded == 1


# --- the shard around it ---------------------------------------------------------------------------------------------


def test_other_writers_of_the_shard_and_newer_schemas(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    with area.client.open_writer(NAME, SCHEMA, layer="pending") as write:
        write.compare_and_append(said(3, 5), 3, 5)
    area.client.evolve_schema(NAME, WIDER)
    area.put("a", 4, 7)
    area.put("b", 4, 7)
    assert area.absorb().upper == at(7)
    found = Counter({data[:2]: diff for data, diff in area.merged().items()})
    assert found == plain(said(0, 7), 6)
    check_world(area.client, NAME)


def test_a_closed_shard_discards_what_comes_late(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    with area.client.open_writer(NAME, SCHEMA, layer="pending") as write:
        write.finish()
    area.put("a", 3, 6)
    done = area.absorb()
    assert done.batches == 0
    assert len(done.disagreements) + done.discarded == 1


def test_delete_leaves_nothing_and_what_comes_later_goes_as_well(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    area.put("a", 3, 6)
    area.world.inner.blob.set(f"-pending/{NAME}/a/notes.txt", b"x")
    with pytest.raises(StillRead):
        pending_area.delete(area.client, NAME)
    assert len(area.pending()) == 3
    area.reader.close()
    for _ in range(2):
        pending_area.delete(area.client, NAME)
        area.client.maintain(NAME)
        assert area.pending() == ["-pending/a/notes.txt"]
        area.put("b", 6, 9)
    done = area.absorb(dry_run=True)
    assert (done.deleted, done.foreign.count) == (1, 1)
    assert area.absorb().deleted == 1


def test_a_shard_that_is_not_there_or_too_old_is_named(world: World):
    client = world.client(persist.Config(format=2))
    with pytest.raises(NotFound):
        pending_area.absorb(client, NAME)
    with pytest.raises(NotFound):
        pending_area.acquire_read_handle(client, NAME)
    reader = pending_area.create(client, NAME, SCHEMA)
    pending_area.Writer(world.inner.url, NAME, "a", SCHEMA).put(said(0, 3), 0, 3)
    with pytest.raises(InvalidUsage, match="format 2"):
        pending_area.absorb(client, NAME)
    with pytest.raises(InvalidUsage, match="format 2"):
        reader.clone()
    client.upgrade(NAME)
    assert pending_area.absorb(client, NAME).upper == at(3)


def test_create_refuses_constraints_and_other_schemas(area: Area):
    with pytest.raises(InvalidUsage, match="constraints"):
        pending_area.create(area.client, "t", persist.Schema(SCHEMA.key, SCHEMA.value, unique=True))
    with pytest.raises(persist.SchemaMismatch):
        pending_area.create(area.client, NAME, WIDER)
    with pytest.raises(InvalidUsage):
        pending_area.create("memory:", "t", SCHEMA)  # type: ignore[arg-type]


def test_the_orphan_audit_of_a_shard_leaves_the_pending_area_alone(world: World):
    """Also where a collection is named as writers of shards are, and where a shard is named like the prefix."""
    odd = "w0123456789abcdef"
    client = world.client(SMALL)
    for name in (odd, "pending"):
        pending_area.create(client, name, SCHEMA).close()
        with pending_area.Writer(world.inner.url, name, "w0000000000000001", SCHEMA) as write:
            write.put(said(0, 3), 0, 3)
    for name in (odd, "pending"):
        client.maintain(name)
        assert pending_area.absorb(client, name).batches == 1


def test_a_reader_before_since_is_refused(area: Area):
    area.put("a", 0, 9)
    area.absorb()
    area.reader.downgrade_since(5)
    with pytest.raises(SinceViolation):
        area.reader.contents(3, diff=True)
    with pytest.raises(SinceViolation):
        area.reader.listen(3)
