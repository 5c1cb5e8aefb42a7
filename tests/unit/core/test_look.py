"""A look is a pure function of a version and of the settings: it says which duties the state calls for."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core.duties import NAMES
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.look import BY_MARK, BY_STATE, Look, Signs, leases_until, look_at, settings_of
from persist_lib.core.plan.upkeep import LONGEST_LEASE_MS, plan_expiry
from persist_lib.core.state import Batch, Garbage, Hold, Part, Reader, Rollup, State, Version, Writer
from persist_lib.frontier import TOP, at
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId

NOW = 1_700_000_000_000
PART, OLD = PartKey("w0000000000000001/0000000000000001.parquet"), PartKey(f"rollup/v{2:020d}-{1:016x}")
ROLLUPS = {SeqNo(40): Rollup(PartKey(f"rollup/v{40:020d}-{1:016x}"), 5, bytes(16))}


def batch(number: int, count: int) -> Batch:
    return Batch(number, number + 1, at(number), at(number + 1), at(0), count, count, 0)


CALM = State(trace=(batch(0, 100),), rollups=ROLLUPS)


def look(state: State, seqno: int = 50, begins: int = 40, every: int = 128) -> Look:
    return look_at(Version(SeqNo(seqno), state, bytes(16)), NOW, Policy(), every, SeqNo(begins))


def changed(**fields: object) -> State:
    return msgspec.structs.replace(CALM, **fields)


def test_the_duties_are_those_of_the_table() -> None:
    assert {"leases", *BY_STATE, *BY_MARK} == set(NAMES)


def test_a_calm_shard_calls_for_nothing() -> None:
    signs = Signs(batches=1, bound=16, rollup_lag=10, stored=5, upper=1)
    assert look(CALM) == Look(SeqNo(50), NOW, (), 0, "1.0", 0, {"garbage": (SeqNo(40), NOW)}, signs)


def test_a_shard_without_rollups_and_garbage_waits_for_its_first_rollup() -> None:
    assert [look(changed(rollups={}), seqno, every=30).due for seqno in (1, 29, 30)] == [(), (), ("rollups",)]


@pytest.mark.parametrize(
    ("state", "due"),
    [
        (changed(retention=0), ("retention",)),
        (changed(trace=(batch(0, 9), batch(1, 9)), retention=0), ("retention",)),
        (changed(trace=(batch(0, 9), batch(1, 9)), retention=0, holds={"retention": Hold(at(1))}), ()),
        (changed(trace=(batch(0, 9), batch(1, 90))), ("compaction",)),
        (changed(garbage={PART: Garbage(SeqNo(45), 7)}), ("rollups",)),
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}), ("garbage",)),
        (changed(garbage={OLD: Garbage(SeqNo(45), 7)}), ("garbage",)),
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}, readers={ReaderId("r"): Reader(at(0), SeqNo(20), NOW)}), ()),
    ],
)
def test_what_a_state_calls_for_is_due(state: State, due: tuple[str, ...]) -> None:
    assert look(state).due == due


def test_rollups_are_due_when_the_newest_lags() -> None:
    assert look(CALM, seqno=40 + 127).due == ()
    assert look(CALM, seqno=40 + 128).due == ("rollups",)
    assert look(CALM, every=10).due == ("rollups",)


def test_rows_that_can_be_truncated_are_garbage() -> None:
    assert look(CALM, begins=39).due == ("garbage",)
    assert look(CALM, begins=40).due == ()
    held = changed(readers={ReaderId("r"): Reader(at(0), SeqNo(39), NOW + 1)})
    assert look(held, begins=1).due == ()


def test_debt_is_what_compaction_would_rewrite() -> None:
    found = look(changed(trace=(batch(0, 1000), batch(1, 9), batch(2, 90))))
    assert (found.due, found.debt) == (("compaction",), 99)


def test_the_mark_changes_with_data_and_since_and_not_with_leases() -> None:
    leased = changed(
        writers={WriterId("w"): Writer("ingest", NOW)}, readers={ReaderId("r"): Reader(at(0), SeqNo(9), 5)}
    )
    assert look(leased).mark == look(CALM).mark
    assert look(CALM, seqno=51).mark == look(CALM).mark
    marks = {
        look(changed(**fields)).mark
        for fields in ({}, {"trace": (batch(0, 9), batch(1, 0))}, {"since": at(1)}, {"since": TOP})
    }
    assert len(marks) == 4


@pytest.mark.parametrize("late", [-5, 0, 1, 5, LONGEST_LEASE_MS])
@pytest.mark.parametrize(
    "until", [0, 1, NOW - 1, NOW, NOW + 3, NOW + LONGEST_LEASE_MS, NOW + LONGEST_LEASE_MS + 1, 2**62]
)
def test_a_lease_is_due_exactly_when_it_would_be_expired(until: int, late: int) -> None:
    """As long as the clock does not go back by more than the look is old."""
    state = changed(writers={WriterId("w"): Writer("ingest", until)})
    found = leases_until(state, NOW)
    assert found > 0
    now = NOW + max(0, late)
    if until <= NOW + LONGEST_LEASE_MS:
        assert (found <= now) == bool(plan_expiry(state, now))
    else:
        assert found <= NOW


def test_the_first_of_several_leases_counts() -> None:
    writers = {WriterId("w1"): Writer("ingest", NOW + 9), WriterId("w2"): Writer("maintenance", NOW + 5)}
    readers = {ReaderId("r"): Reader(at(0), SeqNo(9), NOW + 7)}
    assert look(changed(writers=writers, readers=readers)).leases_until == NOW + 6
    assert look(changed(readers=readers)).leases_until == NOW + 8


def test_a_look_of_other_settings_is_another_one() -> None:
    settings = [
        (Policy(), 128),
        (Policy(weight=0.6), 128),
        (Policy(advance=0.6), 128),
        (Policy(inline_fill=0.6), 128),
        (Policy(), 64),
    ]
    assert len({settings_of(*one) for one in settings}) == len(settings)
    assert settings_of(Policy(part_bytes=5), 128) == settings_of(Policy(), 128), "it does not say what is due"


def test_what_a_call_answers_is_shown_without_the_bytes_of_rows():
    part = Part(PartKey(""), 408, 1, bytes(16), b"\x01", b"\x01", 0, 0, 0, inline=bytes(1234))
    assert repr(part) == "Part(1,234 B inline, size=408, rows=1)"
    assert repr(msgspec.structs.replace(part, key=PartKey("s/w/p.parquet"), inline=None)).startswith(
        "Part(s/w/p.parquet"
    )
