"""Taking turns at a contended shard: who waits, for whom, for how long."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, State, Version, Writer
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, ShardId, WriterId, format_writer_id
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.shard.commit import Committed, Machine, Wanted, try_commit_all
from persist_lib.shard.contention import (
    FIRST_PAUSE_S,
    JITTER,
    LONGEST_PAUSE_S,
    RECENT,
    ROUND,
    ROUND_S,
    SELDOM,
    SHORTEST,
    SHORTEST_ROUND,
    STRETCH,
    Pace,
)
from persist_lib.testing.faults import RecordingConsensus, Rival
from tests.unit.core.core_shard import CREATE, Store, always, appending, batch

RIVAL = format_writer_id(2)


def version(seqno, *appended):
    """One whose writers have appended last at these seqnos."""
    writers = {
        WriterId(f"w{n}"): Writer("ingest", 0, (Outcome(b"t", SeqNo(found), at(1)),))
        for n, found in enumerate(appended)
    }
    return Version(SeqNo(seqno), msgspec.structs.replace(State(), writers=writers), b"")


def paced(*own, took_s=0.001):
    """A process that has won these."""
    pace = Pace()
    for seqno in own:
        pace.won(SeqNo(seqno), took_s)
    return pace


def lost(pace, *versions):
    """What it waits at last after having lost these races, one after the other, of 1 ms each."""
    return [pace.lost(one, 0.001) for one in versions][-1]


def test_a_first_race_lost_costs_no_more_than_an_attempt_takes_whoever_is_before():
    assert lost(paced(100), version(100, 97, 98, 99, 100)) == pytest.approx(0.001)


def test_who_has_waited_longest_tries_again_soon_and_the_others_after_a_turn_of_each_before_them():
    turn_s = ROUND_S / 4  # four contenders
    newest = version(100, 97, 98, 99, 100)
    assert lost(paced(97), newest, newest) == pytest.approx(0.002)
    assert lost(paced(98), newest, newest) == pytest.approx(0.002 + turn_s)
    assert lost(paced(100), newest, newest) == pytest.approx(0.002 + 3 * turn_s)


def test_who_appended_long_ago_is_not_waited_for():
    late, later = version(RECENT, 1, 2, RECENT), version(RECENT + 1, 1, 2, RECENT + 1)
    assert lost(paced(2), late, late) == pytest.approx(0.002 + 0.033)
    assert lost(paced(2), later, later) == pytest.approx(0.002)


def test_the_next_one_looks_more_than_once_while_its_predecessor_lets_it_begin():
    for contenders in (2, 4, 16, 100):
        newest = version(200, *range(201 - contenders, 201))
        waiting, leaving = paced(201 - contenders), paced(*[200] * 1_000)
        for _ in range(10):
            often_s = waiting.lost(newest, 0.001)
        # It sleeps, looks, and is too late once more.
        assert often_s * (1 + JITTER) + 2 * 0.001 <= leaving.gives_way(newest)


def test_a_turn_is_a_share_of_the_round_or_what_there_is_time_for():
    quick, medium = (0.0006, 2, ROUND / 2), (0.003, 2, ROUND_S / 2 // 0.003)
    slow = [(0.1, 2, SHORTEST_ROUND / 2), (0.1, 16, SHORTEST)]
    for took_s, contenders, versions in (quick, medium, *slow):
        pace, won = Pace(), 0
        while not pace.gives_way(version(1000 + won, *range(1001 - contenders, 1000), 1000 + won)):
            won += 1
            pace.won(SeqNo(1000 + won), took_s)
        assert won == versions


def test_who_had_its_turn_waits_for_one_of_each_other_if_the_next_one_began_meanwhile():
    turn_s = ROUND_S / 4
    pace = paced(*range(64, 96))
    gap_s = pace.gives_way(version(95, 33, 34, 35, 95))
    pace.overtaken()
    assert gap_s + pace.still_waits(version(96, 96, 34, 35, 95)) == pytest.approx(3 * turn_s)
    # One of those before it began on time. It waits for the other, once, whether that one comes or not.
    assert pace.still_waits(version(150, 96, 150, 35, 95)) == pytest.approx(turn_s)
    assert pace.still_waits(version(150, 96, 150, 35, 95)) == 0


def test_when_nobody_came_it_goes_on_for_longer():
    pace = paced(*range(1, ROUND))
    newest = version(ROUND - 1, ROUND - 1, 0)
    assert pace.gives_way(newest) > 0
    assert pace.still_waits(newest) == 0
    turns = 0
    while not pace.gives_way(newest):
        pace.won(SeqNo(ROUND + turns), 0.001)
        turns += 1
    assert turns == STRETCH * ROUND_S / 2 / 0.001


def test_who_has_no_others_beside_it_never_waits():
    pace = Pace()
    for seqno in range(1, 3 * SELDOM):
        pace.won(SeqNo(seqno), 0.001)
        assert pace.gives_way(version(seqno, seqno)) == 0
    assert pace.lost(version(seqno, seqno), 0.002) == 0


def test_those_who_live_and_have_not_appended_of_late_are_let_go_first_once_in_a_long_while():
    for idle in (), (1,):
        pace = Pace()
        waits = []
        for seqno in range(2, 3 * SELDOM):
            state = version(seqno, *idle, seqno)
            if not idle:
                registered = {WriterId("idle"): Writer("ingest", 0), **state.state.writers}
                state = Version(state.seqno, msgspec.structs.replace(state.state, writers=registered), b"")
            pace.won(SeqNo(seqno), 0.001)
            if waited_s := pace.gives_way(state):
                assert pace.still_waits(state) == 0
                waits.append((seqno, waited_s))
        late = [one for one in waits if one[0] > RECENT]
        assert len(late) == 2
        assert all(waited_s == pytest.approx(ROUND_S / 2 / 4) for _, waited_s in late)


def test_who_contends_with_others_than_writers_pauses_twice_as_long_each_time_but_the_first():
    pace = paced(1)
    pauses = [pace.lost(version(9, 1), 0.001) for _ in range(4)]
    assert pauses == [0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]


def test_what_a_version_calls_for_is_the_duty_of_whose_it_is():
    pace = paced(9)
    assert pace.is_others_duty(version(10, 9, 10))
    assert not pace.is_others_duty(version(9, 9, 8))
    assert not pace.is_others_duty(version(RECENT + 10, 9, 9))


class Slow(AroundConsensus):
    """Every operation takes a millisecond."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.consensus)
        self.clock = store.clock

    def around(self, operation, call):
        if operation.kind != "now":
            self.clock.advance(0.001)
        return call()


def contended():
    """A process and its rival, who has appended once, on a shard where operations take a millisecond."""
    store = Store()
    store.created().commit(always(c.RegisterWriter(RIVAL, "ingest", 2**62)))
    seen: list[Operation] = []
    rival = Rival(RecordingConsensus(Slow(store), seen))
    return store, store.machine(consensus=rival), rival, seen


def append(machine: Machine, writer: WriterId):
    def build(state, _now):
        lower = state.upper.time or 0
        return c.CompareAndAppend(writer, lower.to_bytes(8, "big"), batch(lower, lower + 1), 0)

    return machine.commit(build)


def test_a_commit_that_lost_pauses_before_it_reads_and_tries_again():
    store, machine, rival, _seen = contended()
    other = store.machine()
    append(other, RIVAL)
    machine.fetch()
    append(machine, format_writer_id(1))
    rival.before_next(lambda: append(other, RIVAL))
    begun = store.clock.monotonic()
    assert append(machine, format_writer_id(1)).attempts == 2
    # Two attempts and a read are 3 ms; an attempt of 1 ms is a pause of 0.75 to 1.25 ms.
    assert 0.0037 < store.clock.monotonic() - begun < 0.0043


def until_it_gives_way(store, seen, act):
    """Do it again and again for a turn; answers what it asked for when it gave way, and how long (s) that took."""
    number, requests = 0, ["compare_and_set"]
    while requests[0] != "scan":
        number += 1
        seen.clear()
        begun = store.clock.monotonic()
        act()
        requests = [request.kind for request in seen if request.kind != "now"]
    assert number == pytest.approx(ROUND_S / 2 / 0.001, abs=3)
    return requests, store.clock.monotonic() - begun


def test_who_has_had_its_turn_lets_the_others_go_first_once_and_looks_who_came():
    store, machine, _rival, seen = contended()
    other = store.machine()
    append(other, RIVAL)
    machine.fetch()
    requests, took_s = until_it_gives_way(store, seen, lambda: append(machine, format_writer_id(1)))
    assert requests == ["scan", "compare_and_set"]
    assert took_s > 0.002 + ROUND_S / 2 / 4 * (1 - JITTER) - 0.001


def test_who_changes_several_shards_at_once_takes_turns_at_each_of_them():
    store, machine, rival, seen = contended()
    other = store.machine()
    append(other, RIVAL)
    machine.fetch()
    elsewhere = Machine(ShardId("elsewhere"), store.blob, rival, Config(), store.clock.runtime(9))
    elsewhere.commit(always(CREATE))
    elsewhere.commit(always(c.RegisterWriter(format_writer_id(1), "ingest", 2**62)))

    def both():
        def build(state, _now):
            lower = state.upper.time or 0
            return c.CompareAndAppend(format_writer_id(1), lower.to_bytes(8, "big"), batch(lower, lower + 1), 0)

        deadline = store.clock.runtime().deadline(60)
        done = try_commit_all([Wanted(machine, build), Wanted(elsewhere, build)], deadline, b"t" * 16)
        assert isinstance(done, list)
        assert isinstance(done[0], Committed)
        return done[0].attempts

    requests, took_s = until_it_gives_way(store, seen, both)
    assert requests == ["scan", "scan", "compare_and_set_many"]
    assert took_s > 0.003 + ROUND_S / 2 / 4 * (1 - JITTER) - 0.001
    # Three attempts and two reads of two shards are 7 ms; the pauses are of 1 and of 2 ms.
    for _ in range(2):
        rival.before_next(lambda: append(other, RIVAL))
    begun = store.clock.monotonic()
    assert both() == 3
    assert store.clock.monotonic() - begun > 0.007 + 0.003 * (1 - JITTER) - 0.0001


def test_after_an_attempt_however_slow_no_pause_is_longer_than_the_longest():
    store, machine, rival, _seen = contended()
    other = store.machine()
    append(other, RIVAL)
    machine.fetch()

    def slow_rival() -> None:
        append(other, RIVAL)
        store.clock.advance(20)

    rival.before_next(slow_rival)
    begun = store.clock.monotonic()
    machine.try_commit(appending(1, 2, b"t"), timeout_s=60)
    assert 20 < store.clock.monotonic() - begun <= 20.01 + (1 + JITTER) * LONGEST_PAUSE_S


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_full_shard_that_another_process_flushes_is_waited_for_as_long_as_that_may_take(
    store, machine, monkeypatch, makes_room
):
    machine.commit(appending(0, 1, b"a"))
    monkeypatch.setattr(Pace, "is_others_duty", lambda *_: True)
    full, asked = machine.version, []

    def fetch():
        asked.append(store.clock.monotonic())
        return emptied if makes_room and len(asked) == 3 else full

    emptied = msgspec.structs.replace(full, state=State())
    monkeypatch.setattr(machine, "fetch", fetch)
    assert full.state.inline_size > 0
    assert machine.others_made_room(r.InlineFull(1), machine.runtime.deadline(60)) is makes_room
    assert len(asked) == 3 if makes_room else len(asked) > 3
    assert not machine.others_made_room(r.WrongUpper(at(0), at(1)), machine.runtime.deadline(60))
