"""What every Consensus promises."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location.api import START_BYTES, Consensus, Newest, Row
from persist_lib.location.contract import is_newest, next_seqno
from persist_lib.location.memory.location import MemoryConsensus
from tests.conformance import racers
from tests.conformance.conftest import PROCESSES, Race
from tests.conformance.history import violations
from tests.conformance.stores import FORKED_CONSENSUSES, SHARED_CONSENSUSES, TRANSACTIONAL, ConsensusKind
from tests.logs import after

EVERYTHING = 1_000_000
AWKWARD = ["a b", "ümläut-日本語-🦉", "it's", 'say "no"', "a;b--c", "%_like", "A", "a", "x" * 200, "1", "null"]


def scan_all(consensus: Consensus, key: str) -> list[Row]:
    return consensus.scan(key, SeqNo(0), EVERYTHING)


def fill(consensus: Consensus, key: str, rows: int) -> None:
    for n in range(rows):
        assert consensus.compare_and_set(key, after(n), f"{key}{n + 1}".encode())


def test_a_key_that_was_never_set_has_no_rows(consensus: Consensus) -> None:
    assert consensus.head("s") is None
    assert scan_all(consensus, "s") == []
    assert [*consensus.list_keys()] == []


def test_the_first_row_is_1_and_each_next_one_follows(consensus: Consensus) -> None:
    fill(consensus, "s", 5)
    assert consensus.head("s") == Row(SeqNo(5), b"s5")
    assert scan_all(consensus, "s") == [Row(SeqNo(n), f"s{n}".encode()) for n in range(1, 6)]


@pytest.mark.parametrize("expected", [None, 0, 1, 2, 4, 99, -1])
def test_who_expects_another_seqno_than_the_newest_loses_and_changes_nothing(
    consensus: Consensus, expected: int | None
) -> None:
    fill(consensus, "s", 3)
    before = scan_all(consensus, "s")
    assert not consensus.compare_and_set("s", expected if expected is None else Newest(SeqNo(expected)), b"late")
    assert scan_all(consensus, "s") == before


def test_who_follows_another_row_than_the_one_that_is_there_loses(
    consensus: Consensus, consensus_kind: ConsensusKind
) -> None:
    """After an older copy was restored, a seqno that a client has seen is there again, with another row."""
    fill(consensus, "s", 3)
    for start in (b"S", b"s4", b"s3 and more", b"\0"):
        other = Newest(SeqNo(3), start)
        assert not consensus.compare_and_set("s", other, b"!")
        if consensus_kind.has_transactions:
            assert not consensus.compare_and_set_many({"s": (other, b"!"), "t": (None, b"!")})
            assert not consensus.compare_and_set_many({"t": (None, b"!"), "s": (other, b"!")})
    assert consensus.head("t") is None
    assert consensus.compare_and_set("s", Newest(SeqNo(3), b"s"), b"s4")
    assert consensus.compare_and_set("s", Newest(SeqNo(4), b"s4"), b"s5")
    if consensus_kind.has_transactions:
        assert consensus.compare_and_set_many({"s": (Newest(SeqNo(5), b"s5"), b"s6"), "t": (None, b"t1")})
        assert consensus.compare_and_set("t", Newest(SeqNo(1), b"t1"), b"t2")
        assert consensus.compare_and_set("s", Newest(SeqNo(6), b"s6"), b"s7")
    rows = 7 if consensus_kind.has_transactions else 5
    assert scan_all(consensus, "s") == [Row(SeqNo(n), b"s%d" % n) for n in range(1, rows + 1)]


def test_only_so_much_of_a_row_is_compared_as_every_store_keeps(consensus: Consensus) -> None:
    data = os.urandom(100)
    assert consensus.compare_and_set("s", None, data)
    newest = Row(SeqNo(1), data).newest
    assert newest.start == data[:START_BYTES]
    for changed in (0, START_BYTES - 1):
        wrong = bytearray(newest.start)
        wrong[changed] ^= 1
        assert not consensus.compare_and_set("s", Newest(SeqNo(1), bytes(wrong)), b"2")
    assert consensus.compare_and_set("s", newest, b"")
    assert consensus.compare_and_set("s", Newest(SeqNo(2), b""), b"3"), "an empty row starts with nothing"


@pytest.mark.parametrize("expected", [0, 1, 5, -1])
def test_who_expects_a_row_of_a_key_that_was_never_set_loses(consensus: Consensus, expected: int) -> None:
    assert not consensus.compare_and_set("s", Newest(SeqNo(expected)), b"x")
    assert consensus.head("s") is None
    assert [*consensus.list_keys()] == []


def test_keys_do_not_know_each_other(consensus: Consensus) -> None:
    fill(consensus, "a", 3)
    fill(consensus, "ab", 1)
    assert consensus.truncate("a", SeqNo(3)) == 2
    assert consensus.head("ab") == Row(SeqNo(1), b"ab1")
    assert sorted(consensus.list_keys()) == ["a", "ab"]


def test_a_scan_answers_at_most_its_limit_in_order_from_where_it_is_told(consensus: Consensus) -> None:
    fill(consensus, "s", 6)
    for start in range(8):
        for limit in (0, 1, 2, 6, 100):
            expected = [n for n in range(1, 7) if n >= start][:limit]
            assert [row.seqno for row in consensus.scan("s", SeqNo(start), limit)] == expected


def test_a_negative_limit_is_refused_and_not_taken_for_none(consensus: Consensus) -> None:
    fill(consensus, "s", 1)
    with pytest.raises(InvalidUsage):
        consensus.scan("s", SeqNo(1), -1)


def test_rows_keep_their_bytes_whatever_they_are(consensus: Consensus) -> None:
    payloads = [b"", b"\0", b"\xff\xfe", bytes(range(256)) * 10, os.urandom(3 * 1024 * 1024)]
    for n, payload in enumerate(payloads):
        assert consensus.compare_and_set("s", after(n), payload)
    assert [row.data for row in scan_all(consensus, "s")] == payloads


@pytest.mark.parametrize("key", AWKWARD)
def test_awkward_keys_are_keys(consensus: Consensus, key: str) -> None:
    fill(consensus, key, 2)
    fill(consensus, "other", 1)
    assert consensus.truncate(key, SeqNo(2)) == 1
    assert [row.seqno for row in scan_all(consensus, key)] == [2]
    assert sorted(consensus.list_keys()) == sorted([key, "other"])


def test_truncate_deletes_the_rows_below_and_answers_how_many(consensus: Consensus) -> None:
    fill(consensus, "s", 6)
    assert consensus.truncate("s", SeqNo(4)) == 3
    assert [row.seqno for row in scan_all(consensus, "s")] == [4, 5, 6]
    assert [row.seqno for row in consensus.scan("s", SeqNo(1), 2)] == [4, 5]
    assert consensus.truncate("s", SeqNo(4)) == 0
    assert consensus.truncate("s", SeqNo(2)) == 0
    assert consensus.truncate("s", SeqNo(6)) == 2
    assert consensus.head("s") == Row(SeqNo(6), b"s6")


def test_more_rows_than_a_page_are_scanned_and_truncated(consensus: Consensus, consensus_kind: ConsensusKind) -> None:
    rows = consensus_kind.more_than_a_page
    fill(consensus, "s", rows)
    assert [row.seqno for row in scan_all(consensus, "s")] == [*range(1, rows + 1)]
    assert [row.seqno for row in consensus.scan("s", SeqNo(2), rows - 2)] == [*range(2, rows)]
    assert consensus.head("s") == Row(SeqNo(rows), f"s{rows}".encode())
    assert consensus.truncate("s", SeqNo(rows - 1)) == rows - 2
    assert [row.seqno for row in scan_all(consensus, "s")] == [rows - 1, rows]


def test_more_keys_than_a_page_are_listed(consensus: Consensus, consensus_kind: ConsensusKind) -> None:
    keys = [f"s{n}" for n in range(consensus_kind.more_than_a_page)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: consensus.compare_and_set(key, None, b"x"), keys))
    assert sorted(consensus.list_keys()) == sorted(keys)


@pytest.mark.parametrize(("rows", "seqno"), [(3, 4), (3, 99), (0, 1), (0, 5)])
def test_truncate_never_passes_the_newest_row(consensus: Consensus, rows: int, seqno: int) -> None:
    fill(consensus, "s", rows)
    with pytest.raises(InvalidUsage):
        consensus.truncate("s", SeqNo(seqno))
    assert len(scan_all(consensus, "s")) == rows


def test_a_truncated_key_goes_on_where_it_was_and_can_never_be_created_again(consensus: Consensus) -> None:
    fill(consensus, "s", 5)
    consensus.truncate("s", SeqNo(5))
    for expected in (0, 1, 4):
        assert not consensus.compare_and_set("s", after(expected), b"again")
    assert consensus.compare_and_set("s", after(5), b"s6")
    assert [row.seqno for row in scan_all(consensus, "s")] == [5, 6]
    assert [*consensus.list_keys()] == ["s"]


def test_rewind_takes_back_the_newest_rows_if_it_names_the_newest(consensus: Consensus) -> None:
    fill(consensus, "s", 6)
    fill(consensus, "other", 2)
    consensus.truncate("s", SeqNo(2))
    for wrong in (Newest(SeqNo(5), b"s5"), Newest(SeqNo(6), b"other"), Newest(SeqNo(7))):
        assert consensus.rewind("s", SeqNo(4), wrong) == 0
    for beyond in (1, 7, 99):
        with pytest.raises(InvalidUsage):
            consensus.rewind("s", SeqNo(beyond), Newest(SeqNo(6), b"s6"))
    assert [row.seqno for row in scan_all(consensus, "s")] == [2, 3, 4, 5, 6]
    assert consensus.rewind("s", SeqNo(6), Newest(SeqNo(6), b"s6")) == 0
    assert consensus.rewind("s", SeqNo(4), Newest(SeqNo(6), b"s6")) == 2
    assert consensus.head("s") == Row(SeqNo(4), b"s4")
    assert [row.seqno for row in scan_all(consensus, "s")] == [2, 3, 4]
    assert not consensus.compare_and_set("s", Newest(SeqNo(6), b"s6"), b"from before")
    assert consensus.compare_and_set("s", Newest(SeqNo(4), b"s4"), b"another v5")
    assert consensus.head("s") == Row(SeqNo(5), b"another v5")
    assert len(scan_all(consensus, "other")) == 2


def test_rewound_to_nothing_a_key_is_as_if_it_was_never_set(consensus: Consensus) -> None:
    fill(consensus, "s", 3)
    assert consensus.rewind("nobody", SeqNo(0), Newest(SeqNo(1))) == 0
    assert consensus.rewind("s", SeqNo(0), Newest(SeqNo(3), b"s3")) == 3
    assert consensus.head("s") is None
    assert [*consensus.list_keys()] == []
    assert consensus.compare_and_set("s", None, b"s1")


def test_heads_are_the_newest_seqnos_of_all_keys(consensus: Consensus) -> None:
    assert consensus.heads() == {}
    fill(consensus, "s", 1)
    assert consensus.heads() == {"s": 1}
    fill(consensus, "a", 12)
    fill(consensus, "a-b", 2)
    fill(consensus, "a.b", 3)
    assert consensus.heads() == {"s": 1, "a": 12, "a-b": 2, "a.b": 3}
    assert consensus.compare_and_set("s", after(1), b"s2")
    assert consensus.heads() == {"s": 2, "a": 12, "a-b": 2, "a.b": 3}


def test_heads_of_some_keys_are_those_alone(consensus: Consensus) -> None:
    assert consensus.heads(["s"]) == consensus.heads([]) == {}
    fill(consensus, "s", 3)
    fill(consensus, "a-b", 2)
    fill(consensus, 'it\'s "a" key, \\u0041', 1)
    assert consensus.heads(["s", "never", 'it\'s "a" key, \\u0041']) == {"s": 3, 'it\'s "a" key, \\u0041': 1}
    assert consensus.compare_and_set("s", after(3), b"s4")
    assert consensus.heads(["s"]) == {"s": 4}
    assert consensus.heads([]) == {}


def test_heads_do_not_move_when_rows_are_truncated_and_go_back_with_a_rewind(consensus: Consensus) -> None:
    fill(consensus, "s", 6)
    fill(consensus, "t", 3)
    consensus.truncate("s", SeqNo(6))
    assert consensus.heads() == {"s": 6, "t": 3}
    assert consensus.rewind("t", SeqNo(1), Newest(SeqNo(3), b"t3")) == 2
    assert consensus.heads() == {"s": 6, "t": 1}
    assert consensus.rewind("t", SeqNo(0), Newest(SeqNo(1), b"t1")) == 1
    assert consensus.heads() == {"s": 6}
    assert consensus.rewind("s", SeqNo(0), Newest(SeqNo(6), b"s6")) == 1
    assert consensus.heads() == {}


def test_heads_name_keys_as_they_were_set(consensus: Consensus) -> None:
    for n, key in enumerate(AWKWARD):
        fill(consensus, key, 1 + n % 3)
    assert consensus.heads() == {key: 1 + n % 3 for n, key in enumerate(AWKWARD)}


def test_heads_of_more_keys_and_rows_than_a_page(consensus: Consensus, consensus_kind: ConsensusKind) -> None:
    """Pages end in the middle of a key's rows, and at their end."""
    keys = {f"s{n:04d}": 1 + n % 3 for n in range(consensus_kind.more_than_a_page)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: fill(consensus, *item), keys.items()))
    assert consensus.heads() == keys
    assert consensus.heads(["s0001", "s0005"]) == {"s0001": 2, "s0005": 3}


def test_heads_know_every_row_that_another_opening_set_before(
    consensus: Consensus, consensus_kind: ConsensusKind, consensus_url: str
) -> None:
    """It is not stale, also while others set and truncate."""
    other = consensus_kind.open(consensus_url)
    done = looks = 0

    def write() -> None:
        nonlocal done
        while done < consensus_kind.rows_to_race_for or looks < 3:
            assert other.compare_and_set("s", after(done), b"s%d" % (done + 1))
            done += 1
            if done % 7 == 0:
                other.truncate("s", SeqNo(done))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            before = done
            assert before <= consensus.heads().get("s", 0) <= done + 1
            looks += 1
        writing.result()
    assert consensus.heads() == {"s": done}
    other.close()


def test_many_are_set_all_or_none(consensus: Consensus, consensus_kind: ConsensusKind) -> None:
    if not consensus_kind.has_transactions:
        with pytest.raises(InvalidUsage):
            consensus.compare_and_set_many({"a": (None, b"x")})
        return
    fill(consensus, "a", 2)
    assert consensus.compare_and_set_many({"a": (after(2), b"a3"), "b": (None, b"b1")})
    for losing in ({"a": (after(3), b"!"), "b": (None, b"!")}, {"c": (None, b"!"), "a": (after(2), b"!")}):
        assert not consensus.compare_and_set_many(losing)
    assert consensus.head("a") == Row(SeqNo(3), b"a3")
    assert consensus.head("b") == Row(SeqNo(1), b"b1")
    assert consensus.head("c") is None
    assert sorted(consensus.list_keys()) == ["a", "b"]
    assert consensus.compare_and_set_many({})


def test_now_is_milliseconds_since_the_epoch(consensus: Consensus) -> None:
    assert abs(consensus.now() - time.time() * 1000) < 60_000


def test_another_opening_sees_every_row_at_once(
    consensus: Consensus, consensus_kind: ConsensusKind, consensus_url: str
) -> None:
    other = consensus_kind.open(consensus_url)
    for n in range(10):
        writer, reader = (consensus, other) if n % 2 else (other, consensus)
        assert writer.compare_and_set("s", after(n), b"x")
        assert len(reader.scan("s", SeqNo(0), 99)) == n + 1
    other.close()


def test_closing_twice_is_fine_and_loses_nothing(consensus_kind: ConsensusKind, consensus_url: str) -> None:
    consensus = consensus_kind.open(consensus_url)
    fill(consensus, "s", 3)
    consensus.close()
    consensus.close()
    again = consensus_kind.open(consensus_url)
    assert len(scan_all(again, "s")) == 3
    again.close()


def test_read_only_reads_and_refuses_to_write(
    consensus: Consensus, consensus_kind: ConsensusKind, consensus_url: str
) -> None:
    fill(consensus, "s", 3)
    reader = consensus_kind.open(consensus_url, read_only=True)
    for n in range(3, 6):
        assert reader.head("s") == Row(SeqNo(n), f"s{n}".encode())
        assert consensus.compare_and_set("s", after(n), f"s{n + 1}".encode())
    assert [*reader.list_keys()] == ["s"]
    assert reader.heads() == {"s": 6}
    for write in (
        lambda: reader.compare_and_set("s", after(6), b"x"),
        lambda: reader.compare_and_set_many({"s": (after(6), b"x")}),
        lambda: reader.truncate("s", SeqNo(2)),
    ):
        with pytest.raises(InvalidUsage, match="read_only"):
            write()
    assert len(scan_all(consensus, "s")) == 6
    reader.close()


def test_of_threads_that_race_one_wins_each_row(consensus: Consensus) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = [*chain.from_iterable(pool.map(lambda who: racers.extend(consensus, "s", who, 60), range(8)))]
    rows = scan_all(consensus, "s")
    assert len(rows) == 60
    assert violations("s", claims, rows) == []


def test_of_threads_that_create_a_key_one_wins(consensus: Consensus) -> None:
    with ThreadPoolExecutor(8) as pool:
        for n in range(10):
            won = list(pool.map(lambda who, n=n: consensus.compare_and_set(f"s{n}", None, b"%d" % who), range(8)))
            assert won.count(True) == 1
            assert scan_all(consensus, f"s{n}") == [Row(SeqNo(1), b"%d" % won.index(True))]


def test_of_threads_that_truncate_meanwhile_none_frees_a_row_to_be_won_twice(consensus: Consensus) -> None:
    fill(consensus, "s", 1)
    done = threading.Event()

    def truncate() -> None:
        while not done.is_set():
            head = consensus.head("s")
            consensus.truncate("s", head.seqno if head else SeqNo(0))

    with ThreadPoolExecutor(8) as pool:
        truncating = pool.submit(truncate)
        claims = [*chain.from_iterable(pool.map(lambda who: racers.extend(consensus, "s", who, 60), range(4)))]
        done.set()
        truncating.result()
    rows = [row for row in scan_all(consensus, "s") if row.seqno > 1]  # the first was nobody's claim
    assert rows[-1].seqno == 60
    assert violations("s", claims, rows) == []


@pytest.mark.parametrize("consensus_name", TRANSACTIONAL, indirect=True)
def test_of_threads_that_set_many_at_once_none_wins_half(consensus: Consensus) -> None:
    def attempt(who: int) -> int:
        wins = 0
        for n in range(12):
            wins += consensus.compare_and_set_many({"a": (after(n), b"%d" % who), "b": (after(n), b"%d" % who)})
        return wins

    with ThreadPoolExecutor(4) as pool:
        wins = sum(pool.map(attempt, range(4)))
    rows = scan_all(consensus, "a")
    assert rows == scan_all(consensus, "b")
    assert len(rows) == wins


@pytest.mark.parametrize("consensus_name", SHARED_CONSENSUSES, indirect=True)
def test_of_processes_that_create_extend_and_truncate_one_wins_each_row(
    consensus: Consensus, consensus_name: str, consensus_kind: ConsensusKind, consensus_url: str, race: Race
) -> None:
    until = consensus_kind.rows_to_race_for
    calls = [(racers.extend_in_process, consensus_name, consensus_url, "s", who, until) for who in range(PROCESSES - 1)]
    calls.append((racers.truncate_in_process, consensus_name, consensus_url, "s", PROCESSES - 1, until))
    claims = [*chain.from_iterable(race(calls))]
    rows = scan_all(consensus, "s")
    assert rows[-1].seqno == until
    assert violations("s", claims, rows) == []
    winners = {claim.data.split(b":")[0] for claim in claims if claim.won}
    assert len(winners) > 1, "no two of the processes raced"  # beside a load, few may get to run in so few rows


@pytest.mark.parametrize("consensus_name", SHARED_CONSENSUSES, indirect=True)
def test_of_processes_that_extend_none_loses_an_acknowledged_row(
    consensus: Consensus, consensus_name: str, consensus_kind: ConsensusKind, consensus_url: str, race: Race
) -> None:
    until = consensus_kind.rows_to_race_for
    claims = [
        *chain.from_iterable(
            race(
                [(racers.extend_in_process, consensus_name, consensus_url, "s", who, until) for who in range(PROCESSES)]
            )
        )
    ]
    rows = scan_all(consensus, "s")
    assert len(rows) == until
    assert violations("s", claims, rows) == []


@pytest.mark.parametrize("consensus_name", FORKED_CONSENSUSES, indirect=True)
@pytest.mark.parametrize("child_writes_first", [True, False])
def test_what_a_forked_child_was_told_to_be_done_is_there_after_its_parent_closed(
    consensus_kind: ConsensusKind, consensus_url: str, child_writes_first: bool
) -> None:
    """A connection, or only what the library remembers of it, must not be shared with the parent's."""
    consensus = consensus_kind.open(consensus_url)
    fill(consensus, "s", 1)
    connected, closed = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            newest = 1
            if child_writes_first:
                newest += consensus.compare_and_set("s", after(1), b"s2")
            assert consensus.head("s") is not None
            os.write(connected[1], b"!")
            os.read(closed[0], 1)
            os._exit(0 if consensus.compare_and_set("s", after(newest), b"last") else 1)
        finally:
            os._exit(2)
    os.read(connected[0], 1)
    assert len(scan_all(consensus, "s")) == 1 + child_writes_first
    consensus.close()
    os.write(closed[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = consensus_kind.open(consensus_url)
    assert [row.data for row in scan_all(again, "s")] == [b"s1", b"s2", b"last"][:: 1 if child_writes_first else 2]
    again.close()
    for fd in (*connected, *closed):
        os.close(fd)


class LosesUpdates(MemoryConsensus):
    """Looks, and only then writes: what a first version over any store does."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        if not is_newest(expected, self.head(key)):
            return False
        time.sleep(0.002)
        seqno = next_seqno(expected)
        rows = [row for row in self._logs.get(key, []) if row.seqno < seqno]
        self._logs[key] = [*rows, Row(seqno, data)]
        return True


class TruncatesAll(MemoryConsensus):
    """Forgets the newest row as well, so that its seqno, or even the key, can be won again."""

    def truncate(self, key: str, seqno: SeqNo) -> int:
        return len(self._logs.pop(key, []))


def test_the_checker_sees_a_store_that_loses_updates() -> None:
    consensus = LosesUpdates()
    with ThreadPoolExecutor(8) as pool:
        claims = [*chain.from_iterable(pool.map(lambda who: racers.extend(consensus, "s", who, 20), range(8)))]
    assert any("two winners" in v for v in violations("s", claims, scan_all(consensus, "s")))


def test_the_checker_sees_a_store_whose_truncation_frees_a_row() -> None:
    consensus = TruncatesAll()
    claims = racers.extend(consensus, "s", 0, 3)
    consensus.truncate("s", SeqNo(3))
    claims += racers.extend(consensus, "s", 1, 3)
    assert any("two winners" in v for v in violations("s", claims, scan_all(consensus, "s")))
