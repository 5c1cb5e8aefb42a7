"""Taking turns at a contended shard: who waits, for whom, for how long."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.state import Outcome, State, Version, Writer
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, WriterId, format_writer_id
from persist_lib.location.around import AroundConsensus, Operation
from persist_lib.machine import LONGEST_PAUSE_S, Machine
from persist_lib.pace import IN_A_ROW, RECENT, Pace
from persist_lib.testing.recording import RecordingConsensus
from persist_lib.testing.rival import Rival
from tests.unit.core_shard import Store, always, appending, batch

RIVAL = format_writer_id(2)


def version(seqno, *appended):
    """One whose writers have appended last at these seqnos."""
    writers = {
        WriterId(f"w{n}"): Writer("ingest", 0, (Outcome(b"t", SeqNo(found), at(1)),))
        for n, found in enumerate(appended)
    }
    return Version(SeqNo(seqno), msgspec.structs.replace(State(), writers=writers), b"")


def test_who_lost_lets_each_other_writer_of_late_go_first_for_as_long_as_an_attempt_took():
    pace = Pace()
    assert pace.lost(version(10, 10, 9, 8), 0.002) == 0.006
    assert pace.lost(version(10, 10, 9, 8), 0.002) == 0.006  # and no longer when it lost again
    pace.won(SeqNo(9))  # by a writer of this process
    assert pace.lost(version(10, 10, 9, 8), 0.002) == 0.004
    assert pace.lost(version(10 + RECENT, 10, 9, 8, 100), 0.002) == 0.002


def test_who_has_no_others_beside_it_never_waits():
    pace = Pace()
    for seqno in range(1, 100):
        pace.won(SeqNo(seqno))
        assert not pace.has_had_its_turn() or pace.gives_way(version(seqno, seqno)) == 0
    assert pace.lost(version(99, 99, 98), 0.002) == 0
    assert not pace.is_others_duty(version(100, 99))


def test_what_a_version_calls_for_is_the_duty_of_whose_it_is():
    pace = Pace()
    pace.won(SeqNo(9))
    assert pace.is_others_duty(version(10, 9, 10))
    assert not pace.is_others_duty(version(9, 9, 8))


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
    rival.before_next(lambda: append(other, RIVAL))
    append(machine, format_writer_id(1))
    rival.before_next(lambda: append(other, RIVAL))
    begun = store.clock.monotonic()
    assert append(machine, format_writer_id(1)).attempts == 2
    # Two attempts and a read are 3 ms; one other writer and an attempt of 1 ms are a pause of 0.5 to 1.5 ms.
    assert 0.0034 < store.clock.monotonic() - begun < 0.0046


def test_who_has_won_several_times_in_a_row_lets_the_others_go_first_once():
    store, machine, rival, seen = contended()
    other = store.machine()
    rival.before_next(lambda: append(other, RIVAL))
    for _ in range(IN_A_ROW):
        append(machine, format_writer_id(1))
    seen.clear()
    begun = store.clock.monotonic()
    for _ in range(IN_A_ROW):
        append(machine, format_writer_id(1))
    assert [request.kind for request in seen if request.kind != "now"] == ["scan", *["compare_and_set"] * IN_A_ROW]
    assert store.clock.monotonic() - begun > 0.001 * (IN_A_ROW + 1)


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
    assert 20 < store.clock.monotonic() - begun <= 20.01 + 1.5 * LONGEST_PAUSE_S
