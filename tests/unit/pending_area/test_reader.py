"""A reader uses the shard up to its upper, beyond it one writer at a time, and checks what it gave."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.errors import Diverged, InvalidUsage, LeaseExpired, Missing, ShardFinished, TimedOut
from persist_lib.format.paths import blob_key
from persist_lib.frontier import at
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import contents_of, updates_of
from tests.unit.pending_area.areas import NAME, Area, plain, said
from tests.worlds import SCHEMA, World


class Heard:
    """What a listener gave, checked as it comes: progress never before data, no update twice."""

    def __init__(self, listener: pending_area.PendingListen, start: int = 0) -> None:
        self.listener, self.frontier = listener, at(start)
        self.updates: Counter[Any] = Counter()

    def poll(self) -> Heard:
        for event in self.listener.poll():
            self.take(event)
        return self

    def take(self, event: Any) -> None:
        if isinstance(event, persist.Updates):
            for data, time, diff in updates_of(event.table):
                assert self.frontier.is_before(time)
                self.updates[data, time] += diff
        else:
            assert self.frontier < event.frontier
            self.frontier = event.frontier


def expected(lower: int, upper: int, word: str = "w") -> Counter[Any]:
    found: Counter[Any] = Counter()
    for one in said(lower, upper, word):
        found[(one["id"], one["word"]), one["_time"]] += one["_diff"]
    return found


def test_contents_are_those_of_a_plain_list_at_every_time_before_and_after_absorption(area: Area):
    for lower in range(0, 12, 3):
        area.put("a", lower, lower + 3)
    area.put("b", 4, 14)
    for _ in range(2):
        for time in (0, 2, 5, 9, 11, 13):
            assert contents_of(area.reader.contents(time, diff=True)) == plain(said(0, 14), time)
        area.absorb()
    assert area.reader.upper == at(14)


def test_what_is_not_put_yet_is_waited_for(area: Area):
    area.put("a", 0, 3)
    with pytest.raises(TimedOut, match="have come to"):
        area.reader.contents(3, timeout=0.2, diff=True)
    with pytest.raises(TimedOut):
        area.reader.contents(1, merged_only=True, timeout=0.2, diff=True)
    area.absorb()
    assert contents_of(area.reader.contents(1, merged_only=True, diff=True)) == plain(said(0, 3), 1)


def test_a_listener_follows_the_shard_then_a_writer_then_another(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    area.put("a", 3, 6)
    area.put("b", 0, 4)
    with area.reader.listen(0) as listener:
        heard = Heard(listener, 1).poll()
        assert (heard.frontier, listener.writer) == (at(6), "a")
        area.put("b", 4, 9)
        assert heard.poll().frontier == at(6), "the others are looked at now and then only"
        area.world.clock.advance(2)
        assert heard.poll().frontier == at(9)
        assert listener.writer == "b"
        area.absorb()
        area.put("b", 9, 12)
        heard.poll()
        assert heard.updates == expected(1, 12)
    assert listener.frontier == at(12)


def test_following_one_writer_is_one_listing_and_one_get_a_batch(area: Area):
    for writer in "abcdef":
        area.put(writer, 0, 3)
    with area.reader.listen(0) as listener:
        listener.poll()
        for lower in range(3, 30, 3):
            area.put(listener.writer or "", lower, lower + 3)
            area.world.requests.clear()
            listener.poll()
            lists = [one for one in area.world.requests if one.kind == "list"]
            assert {one.key for one in lists} == {f"-pending/{NAME}/{listener.writer}/"}
            assert (len(lists), area.world.count("get")) <= (4, 1)


def test_until_ends_it_also_in_the_middle_of_a_batch(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    area.put("a", 3, 9)
    heard = Heard(area.reader.listen(0, until=5), 1)
    for event in heard.listener:
        heard.take(event)
    assert (heard.frontier, heard.updates) == (at(5), expected(1, 5))


def test_it_waits_and_gives_up_in_time(area: Area):
    area.put("a", 0, 3)
    listener = area.reader.listen(0, timeout=0.5)
    assert [type(next(listener)) for _ in range(2)] == [persist.Updates, persist.Progress]
    with pytest.raises(TimedOut, match="nothing came"):
        next(listener)
    area.put("a", 3, 6)
    assert isinstance(next(listener), persist.Updates)


def test_merged_only_reads_nothing_from_the_pending_area(area: Area):
    area.put("a", 0, 3)
    listener = area.reader.listen(0, merged_only=True)
    assert listener.poll() == []
    area.absorb()
    assert len(listener.poll()) == 2


def test_what_was_absorbed_otherwise_raises_diverged_again_and_again(area: Area):
    area.put("a", 0, 3)
    listener, merged = area.reader.listen(0), area.reader.listen(0, merged_only=True)
    listener.poll()
    assert area.reader.contents(2, diff=True).num_rows
    with area.client.open_writer(NAME, SCHEMA, layer="pending") as write:
        write.compare_and_append([*said(0, 2), *said(2, 3, "x")], 0, 3)
    for _ in range(2):
        with pytest.raises(Diverged, match="Drop what was read") as raised:
            listener.poll()
        assert (raised.value.time, raised.value.collection) == (2, NAME)
        assert "/a/" in raised.value.keys[0]
    merged.poll()
    with pytest.raises(Diverged):
        area.reader.contents(3, timeout=0.1, diff=True)


def test_what_is_read_twice_from_writers_that_disagree_raises_diverged_at_once(area: Area):
    area.put("a", 0, 3)
    assert area.reader.contents(2, diff=True).num_rows
    area.put("b", 0, 6, word="x")
    with pytest.raises(Diverged, match="/b/"):
        area.reader.contents(4, diff=True)


def test_history_is_kept_until_what_was_read_is_checked(area: Area):
    area.put("a", 0, 6)
    assert area.reader.contents(5, diff=True).num_rows
    area.reader.downgrade_since(5)
    assert area.reader.since == at(0)
    area.absorb()
    assert area.reader.contents(5, diff=True).num_rows
    area.reader.downgrade_since(5)
    assert area.reader.contents(7 - 2, merged_only=True, diff=True).num_rows
    assert area.reader.since == at(5)


def test_a_listener_lets_history_go_as_far_as_the_retention_and_what_is_checked(area: Area):
    """Without a retention all is kept."""
    area.put("a", 0, 6)
    listener = area.reader.listen(0)
    area.reader.close()
    listener.poll()
    area.client.heartbeat()
    area.absorb()
    listener.poll()
    area.client.heartbeat()
    assert area.client.inspect(NAME).state.since == at(0), "it was not asked to give anything up"
    area.put("a", 6, 9)
    listener.poll()  # checked up to 6, and ahead up to 9
    area.client.set_retention(NAME, 0)
    area.client.maintain(NAME)
    area.client.heartbeat()
    assert area.client.inspect(NAME).state.since == at(5)
    area.absorb()
    area.client.maintain(NAME)
    area.client.heartbeat()
    assert area.client.inspect(NAME).state.since == at(5), "not checked yet"
    listener.poll()
    area.put("a", 9, 10)
    listener.poll()
    area.client.heartbeat()
    assert area.client.inspect(NAME).state.since == at(8)


def test_a_clone_has_the_version_and_the_since_of_the_original(area: Area):
    area.put("a", 0, 3)
    area.reader.downgrade_since(0)
    held = area.client.inspect(NAME).state.readers[area.reader.merged.id].seqno  # type: ignore[index]
    area.absorb()
    with area.reader.clone() as clone:
        state = area.client.inspect(NAME).state
        assert state.readers[clone.merged.id].seqno == held  # type: ignore[index]
        assert clone.since == area.reader.since
        area.reader.downgrade_since(2)
        area.reader.close()
        assert area.client.inspect(NAME).state.since == at(0)
        assert contents_of(clone.contents(1, diff=True)) == plain(said(0, 3), 1)
    with pytest.raises(LeaseExpired):
        area.reader.clone()


def test_a_clone_checks_what_its_original_was_given(area: Area):
    area.put("a", 0, 3)
    assert area.reader.contents(2, diff=True).num_rows
    clone = area.reader.clone()
    with area.client.open_writer(NAME, SCHEMA, layer="pending") as write:
        write.compare_and_append(said(0, 3, "x"), 0, 3)
    area.put("a", 3, 6)
    with pytest.raises(Diverged):
        clone.contents(5, diff=True)


def test_a_damaged_batch_is_skipped_for_anothers(area: Area, caplog):
    area.damage(area.put("a", 0, 9))
    area.put("b", 0, 4)
    assert contents_of(area.reader.contents(3, diff=True)) == plain(said(0, 4), 3)
    assert "/a/" in caplog.text


def test_a_live_reader_that_misses_a_listed_batch_says_so(area: Area, monkeypatch):
    key = area.put("a", 0, 3)
    get = type(area.client.blob).around

    def gone(self: Any, operation: Operation, call: Any) -> Any:
        if operation.kind == "get" and operation.key == blob_key(NAME, key):  # type: ignore[arg-type]
            area.world.inner.blob.delete(operation.key)
        return get(self, operation, call)

    monkeypatch.setattr(type(area.client.blob), "around", gone)
    with pytest.raises(Missing, match="live reader"):
        area.reader.contents(2, diff=True)


def test_a_read_only_client_reads_and_clones(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    area.put("a", 3, 6)
    looking = pending_area.acquire_read_handle(area.world.client(read_only=True), NAME)
    assert contents_of(looking.contents(4, diff=True)) == plain(said(0, 6), 4)
    heard = Heard(looking.clone().listen(0), 1).poll()
    assert heard.updates == expected(1, 6)
    with pytest.raises(InvalidUsage):
        looking.downgrade_since(3)


def test_closed_and_deleted_ends_it(area: Area):
    area.put("a", 0, 3)
    area.absorb()
    with area.client.open_writer(NAME, SCHEMA, layer="pending") as write:
        write.finish()
    heard = Heard(area.reader.listen(0), 1)
    for event in heard.listener:
        heard.take(event)
    assert heard.frontier.is_top()
    looking = pending_area.acquire_read_handle(area.world.client(read_only=True), NAME)
    area.reader.close()
    pending_area.delete(area.client, NAME)
    with pytest.raises(ShardFinished):
        looking.contents(2, diff=True)
    with pytest.raises(LeaseExpired):
        area.reader.contents(2, diff=True)


def test_times_of_a_clock_are_shown(world: World):
    schema = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")
    area = Area(world, schema=schema)
    area.writer("a").put([{"id": 1, "word": "w", "_time": "1970-01-01T00:00:01Z"}], 0, "1970-01-01T00:00:02Z")
    updates, _ = area.reader.listen("1970-01-01T00:00:00Z").poll()
    assert isinstance(updates, persist.Updates)
    assert str(updates.table.schema.field("_time").type) == "timestamp[ms, tz=UTC]"
    assert area.reader.contents("1970-01-01T00:00:01Z", diff=True).num_rows == 1


def test_a_reader_whose_lease_ended_says_so_wherever_what_it_held_is_gone(area: Area):
    """Not that something is missing: what it read from the shard, from the pending area, and what it checks."""
    area.put("a", 0, 9)
    assert area.reader.contents(8, diff=True).num_rows
    listener = area.reader.listen(0)
    listener.poll()
    area.absorb()
    other = area.world.client()
    area.world.clock.advance(1_000_000)
    other.expire(NAME)
    for _ in range(3):
        pending_area.absorb(other, NAME)
        other.maintain(NAME, policy=persist.Policy(weight=1e9, advance=0.01))
    for act in (lambda: area.reader.contents(8, diff=True), listener.poll, lambda: area.reader.downgrade_since(3)):
        with pytest.raises(LeaseExpired):
            act()


def test_where_since_is_upper_the_shard_is_waited_for(area: Area):
    area.put("a", 0, 6)
    area.absorb()
    area.reader.downgrade_since(6)
    area.put("a", 6, 9)
    with pytest.raises(TimedOut):
        area.reader.contents(7, timeout=0.1, diff=True)
    area.absorb()
    assert contents_of(area.reader.contents(7, diff=True)) == plain(said(0, 9), 7)
