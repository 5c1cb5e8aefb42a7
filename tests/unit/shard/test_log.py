"""Fetching a shard: what it costs, and that a history that is not whole never loads."""

from __future__ import annotations

import pytest

from persist_lib.core import commands as c
from persist_lib.core.formats import NEWEST
from persist_lib.core.state import State
from persist_lib.errors import Corrupt, Damage, HistoryRegressed, InvariantViolated, Missing, NewerFormat
from persist_lib.format.log import StoredState, decode_state, encode_state
from persist_lib.format.paths import blob_key
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, format_reader_id
from persist_lib.location.api import Row
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.location.wrap.around import Operation
from persist_lib.shard.log import SCAN_ROWS, fetch_newer, fetch_newest, row_to_follow
from persist_lib.testing.faults import RecordingBlob, RecordingConsensus
from tests.unit.core.core_shard import SHARD, Store, always, append_next, roll_up


def stored(state):
    return encode_state(StoredState(SeqNo(0), b"", state))


def copied(rows):
    """A Consensus with just these rows, whether they fit each other or not."""
    consensus = MemoryConsensus()
    consensus._logs[SHARD] = list(rows)
    return consensus


def requests(store, act):
    """What `act(blob, consensus)` asks of the store, by kind."""
    seen: list[Operation] = []
    act(RecordingBlob(store.blob, seen), RecordingConsensus(store.consensus, seen))
    return [request.kind for request in seen]


@pytest.mark.parametrize("transitions", [3, 40, 1000])
def test_opening_costs_a_head_a_rollup_and_a_scan_however_long_the_history(store, machine, transitions):
    append_next(machine, transitions)
    roll_up(machine)
    append_next(machine, 5)
    seen = requests(store, lambda blob, consensus: fetch_newest(blob, consensus, SHARD))
    assert seen == ["head", "get", "scan"]


def test_without_a_rollup_it_costs_a_head_and_scans_of_the_whole_log(store, machine):
    append_next(machine, SCAN_ROWS + 3)
    seen = requests(store, lambda blob, consensus: fetch_newest(blob, consensus, SHARD))
    assert seen == ["head", "scan", "scan"]
    assert store.machine().fetch() == machine.version


def test_a_refetch_costs_one_scan(store, machine):
    known = machine.version
    append_next(store.machine(), 7)
    seen = requests(store, lambda blob, consensus: fetch_newer(blob, consensus, SHARD, known))
    assert seen == ["scan"]
    assert fetch_newer(store.blob, store.consensus, SHARD, known).seqno == known.seqno + 7


def test_no_such_shard_is_none_and_only_after_a_linearizable_look(store):
    assert fetch_newest(store.blob, store.consensus, SHARD) is None
    append_next(store.created(), 3)

    class Blind(RecordingConsensus):
        def head(self, key):
            return None

    found = fetch_newest(store.blob, Blind(store.consensus, []), SHARD)
    assert found is not None
    assert found.seqno == 5


@pytest.mark.parametrize("rollups", [0, 1, 2, 3])
def test_the_same_state_comes_of_every_way_to_it(store, machine, rollups):
    for number in range(rollups):
        append_next(machine, 10)
        roll_up(machine, number)
    append_next(machine, 4)
    opened = store.machine().fetch()
    assert stored(opened.state) == stored(machine.state)
    assert (opened.seqno, opened.digest, opened.rollup) == (
        machine.version.seqno,
        machine.version.digest,
        machine.version.rollup,
    )
    stepwise = store.machine()
    stepwise.fetch()
    append_next(machine, 4)
    assert stored(stepwise.fetch().state) == stored(machine.state)


def test_a_reader_that_lags_behind_a_truncation_starts_over_from_the_rollup(store, machine):
    known = machine.version
    append_next(machine, 20)
    seqno = roll_up(machine)
    store.consensus.truncate(SHARD, seqno)
    newest = fetch_newer(store.blob, store.consensus, SHARD, known)
    assert stored(newest.state) == stored(machine.state)


def test_rows_and_rollup_that_vanish_while_we_open_are_looked_for_again(store, machine):
    """The head is read; then others roll up, delete the older rollup and truncate, before its rollup is fetched."""
    append_next(machine, 10)
    first = roll_up(machine, 1)
    append_next(machine, 10)

    class Slow(RecordingBlob):
        acted = False

        def get(self, key):
            if not Slow.acted:
                Slow.acted = True
                roll_up(machine, 2)
                append_next(machine, 3)
                store.consensus.truncate(SHARD, roll_up(machine, 3))
                for entry in list(store.blob.list(f"{SHARD}/rollup/")):
                    if f"v{first:020d}" in entry.key:
                        store.blob.delete(entry.key)
            return super().get(key)

    newest = fetch_newest(Slow(store.blob, []), store.consensus, SHARD)
    assert newest is not None
    assert stored(newest.state) == stored(machine.state)


def test_a_head_that_stays_stale_is_not_taken_for_damage(store, machine):
    """Every head names a rollup that was collected long ago; the scan knows better."""
    append_next(machine, 10)
    roll_up(machine, 1)
    stale = store.consensus.head(SHARD)
    assert stale is not None
    for number in (2, 3):
        append_next(machine, 10)
        last = roll_up(machine, number)
    store.consensus.truncate(SHARD, last)
    for key, garbage in machine.state.garbage.items():
        assert garbage.seqno > stale.seqno
        store.blob.delete(blob_key(SHARD, key))

    class Stale(RecordingConsensus):
        def head(self, key):
            return stale

    newest = fetch_newest(store.blob, Stale(store.consensus, []), SHARD)
    assert newest is not None
    assert newest.seqno == machine.version.seqno


def test_a_rollup_that_is_needed_and_gone_is_missing_and_named(store, machine):
    append_next(machine, 10)
    roll_up(machine)
    (entry,) = store.blob.list(f"{SHARD}/rollup/")
    store.blob.delete(entry.key)
    with pytest.raises(Missing, match="rollup/v") as caught:
        store.machine().fetch()
    assert entry.key.endswith(str(caught.value.key))


def test_rows_that_are_needed_and_gone_are_missing(store):
    append_next(store.created(), 10)
    rows = store.consensus.scan(SHARD, SeqNo(1), 100)
    with pytest.raises(Missing):
        fetch_newest(store.blob, copied(rows[4:]), SHARD)


def test_a_log_that_ends_before_the_head_that_was_seen_does_not_load(store, machine):
    """A restored backup between the head and the scan: the rollup is there, the rows after it are not."""
    append_next(machine, 5)
    seqno = roll_up(machine)
    append_next(machine, 5)
    head = store.consensus.head(SHARD)

    class Restored(RecordingConsensus):
        def head(self, key):
            return head

        def scan(self, key, from_seqno, limit):
            return [row for row in super().scan(key, from_seqno, limit) if row.seqno <= seqno]

    with pytest.raises(HistoryRegressed):
        fetch_newest(store.blob, Restored(store.consensus, []), SHARD)


def test_a_log_that_went_backwards_is_refused_by_whoever_has_seen_more(store, machine):
    append_next(machine, 10)
    known = machine.version
    older = copied(store.consensus.scan(SHARD, SeqNo(1), 7))
    with pytest.raises(HistoryRegressed) as caught:
        fetch_newer(store.blob, older, SHARD, known)
    assert (caught.value.seen, caught.value.head) == (known.seqno, 7)
    with pytest.raises(HistoryRegressed):
        fetch_newer(store.blob, MemoryConsensus(), SHARD, known)


@pytest.mark.parametrize("longer", [0, 5])
def test_a_log_that_was_forked_is_refused_at_the_seqno_that_was_seen(store, machine, longer):
    common = store.consensus.scan(SHARD, SeqNo(1), 100)
    append_next(machine, 3)
    fork = Store()
    fork.consensus = copied(common)
    fork.clock.advance(1)
    append_next(fork.machine(), 3 + longer)
    with pytest.raises(HistoryRegressed):
        fetch_newer(fork.blob, fork.consensus, SHARD, machine.version)


def spoiled(rows, how):
    """The same log, tampered with at its fourth row."""
    rows = list(rows)
    if how == "one row missing":
        del rows[3]
        return [Row(SeqNo(i), row.data) for i, row in enumerate(rows, 1)]
    if how == "two rows swapped":
        rows[3], rows[4] = Row(rows[3].seqno, rows[4].data), Row(rows[4].seqno, rows[3].data)
    if how == "a row from another shard":
        other = Store()
        other.clock.advance(5)
        append_next(other.created(), 10)
        rows[3] = other.consensus.scan(SHARD, SeqNo(4), 1)[0]
    if how == "a flipped bit":
        data = bytearray(rows[3].data)
        data[30] ^= 4
        rows[3] = Row(rows[3].seqno, bytes(data))
    if how == "an empty row":
        rows[3] = Row(rows[3].seqno, b"")
    return rows


@pytest.mark.parametrize(
    "how", ["one row missing", "two rows swapped", "a row from another shard", "a flipped bit", "an empty row"]
)
def test_a_broken_chain_is_corrupt_and_names_the_row(store, machine, how):
    known = machine.version
    append_next(machine, 8)
    rows = store.consensus.scan(SHARD, SeqNo(1), 100)
    with pytest.raises(Corrupt, match=r"orders v[45]") as caught:
        fetch_newest(store.blob, copied(spoiled(rows, how)), SHARD)
    assert str(caught.value.key).startswith("orders v")
    with pytest.raises(Damage):
        fetch_newer(store.blob, copied(spoiled(rows, how)), SHARD, known)


def test_a_damaged_or_exchanged_rollup_is_corrupt(store, machine):
    append_next(machine, 3)
    roll_up(machine, 1)
    append_next(machine, 3)
    roll_up(machine, 2)
    older, newer = sorted(entry.key for entry in store.blob.list(f"{SHARD}/rollup/"))
    assert isinstance(store.blob, MemoryBlob)
    objects = store.blob._objects
    whole = objects[newer]
    found = decode_state(whole, newer)
    foreign = encode_state(StoredState(found.seqno, found.digest, State()))  # sound, but of another shard
    for damaged in (objects[older], foreign, whole[:-1], b"", bytes([whole[0] ^ 1]) + whole[1:]):
        objects[newer] = damaged
        with pytest.raises(Corrupt, match="rollup/v"):
            store.machine().fetch()
    objects[newer] = whole
    assert store.machine().fetch().seqno == machine.version.seqno


def test_a_newer_format_is_refused_and_nothing_is_written(store, machine):
    rows = store.consensus.scan(SHARD, SeqNo(1), 100)
    from tests.framing import framed  # noqa: PLC0415 - only here

    consensus = copied([*rows, Row(SeqNo(3), framed(b"PSTr", NEWEST + 1, b"whatever"))])
    for attempt in (
        lambda: fetch_newest(store.blob, consensus, SHARD),
        lambda: fetch_newer(store.blob, consensus, SHARD, machine.version),
        lambda: append_next(store.machine(consensus=consensus)),
    ):
        with pytest.raises(NewerFormat):
            attempt()
    assert len(consensus.scan(SHARD, SeqNo(1), 100)) == 3


def test_whoever_follows_refuses_a_row_that_whoever_loads_afresh_refuses():
    """A row with the right checksum and chain that makes since pass a live reader's."""
    from persist_lib.core.diff import StateDiff  # noqa: PLC0415 - only here
    from persist_lib.format.log import LogRow, encode_row  # noqa: PLC0415 - only here

    store = Store()
    machine = store.created()
    reader = format_reader_id(7)
    machine.commit(always(c.RegisterReader(reader, 2**62)))
    append_next(machine, 9)
    known = machine.version
    diff = StateDiff(since=(at(0), at(5)))
    row = encode_row(LogRow(SeqNo(known.seqno + 1), b"", "SetHold", 0, known.digest, None, diff))
    assert store.consensus.compare_and_set(SHARD, row_to_follow(known), row)
    with pytest.raises(InvariantViolated, match="before since"):
        fetch_newest(store.blob, store.consensus, SHARD)
    with pytest.raises(InvariantViolated, match="before since"):
        fetch_newer(store.blob, store.consensus, SHARD, known)
    with pytest.raises(InvariantViolated):
        append_next(machine)
    assert machine.version == known


def test_a_state_that_breaks_its_invariants_does_not_load(store, machine):
    """A row that no transition would write, with all its checksums right."""
    machine._version = type(machine.version)(SeqNo(0), State(), bytes(16))
    consensus = MemoryConsensus()
    bad = Store().machine(consensus=consensus)
    from persist_lib.core.diff import StateDiff  # noqa: PLC0415 - only here
    from persist_lib.format.log import GENESIS, LogRow, encode_row  # noqa: PLC0415 - only here

    diff = StateDiff(since=(State().since, type(State().since)(5)))
    consensus.compare_and_set(SHARD, None, encode_row(LogRow(SeqNo(1), b"", "Create", 0, GENESIS, None, diff)))
    with pytest.raises(InvariantViolated, match="no schema"):
        bad.fetch()
    with pytest.raises(InvariantViolated):
        bad.commit(always(c.SetRetention(5)))
