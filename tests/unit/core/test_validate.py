"""Every invariant of a state is noticed when it is broken, by a sentence that says which."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core.cost import Cost, Prices, storage_dollars
from persist_lib.core.diff import StateDiff, TraceEdit, apply_diff
from persist_lib.core.leases import fold_since
from persist_lib.core.state import Batch, Garbage, Hold, Part, Reader, Rollup, State, Writer
from persist_lib.core.trace import level_of, levels
from persist_lib.core.validate import check_change, check_references, check_state
from persist_lib.errors import InvariantViolated
from persist_lib.format.paths import part_key, rollup_key
from persist_lib.frontier import MINIMUM, TOP, at
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId, format_reader_id, format_writer_id
from persist_lib.schema.schema import Column, Schema

W, R, DEAD = format_writer_id(1), format_reader_id(2), format_writer_id(3)
NOW = SeqNo(20)
OLD = part_key(W, 99)


def part(entropy, rows=2, first=0, last=9):
    return Part(part_key(W, entropy), 50, rows, bytes(16), b"a", b"b", first, last, 0)


def batch(lo, hi, lower, upper, *parts, since=0):
    count = sum(p.rows for p in parts)
    return Batch(lo, hi, at(lower), at(upper), at(since), count, count, count, parts, (0,) if parts else ())


STATE = State(
    since=at(5),
    trace=(batch(0, 2, 0, 10, part(1), since=5), batch(2, 3, 10, 20, part(2, 3, 10, 19)), batch(3, 4, 20, 30)),
    schemas=(Schema(key={"id": "int64"}),),
    writers={W: Writer("ingest", 100)}, readers={R: Reader(at(7), SeqNo(12), 100)}, holds={"audit": Hold(at(5))},
    retired={DEAD: SeqNo(9)}, garbage={OLD: Garbage(SeqNo(11), 50)},
    rollups={SeqNo(8): Rollup(rollup_key(SeqNo(8), 1), 9, bytes(16)),
             SeqNo(15): Rollup(rollup_key(SeqNo(15), 1), 9, bytes(16))},
    fingerprint=5, count=5, size=100,
)  # fmt: skip


def but(**changes):
    return msgspec.structs.replace(STATE, **changes)


def trace_but(index, **changes):
    trace = list(STATE.trace)
    trace[index] = msgspec.structs.replace(trace[index], **changes)
    return but(trace=tuple(trace))


def test_a_sound_state_passes():
    check_state(STATE, NOW)


KEY_HAS_DEFAULT = Schema(key=(Column("id", "int64", default="1"),))
KEY_IS_NESTED = Schema(key=(Column("id", "list<int64>"),))

BROKEN = [
    ("there is no schema", but(schemas=())),
    ("may gain value columns", but(schemas=(*STATE.schemas, Schema(key={"other": "string"})))),
    ("has a default", but(schemas=(KEY_HAS_DEFAULT,))),
    ("has a default", but(schemas=(*STATE.schemas, KEY_HAS_DEFAULT))),
    ("is nested", but(schemas=(KEY_IS_NESTED, STATE.schemas[0]))),
    ("does not start at the minimum", but(trace=STATE.trace[1:], count=3, fingerprint=3, size=50)),
    ("do not meet", but(trace=(STATE.trace[0], STATE.trace[2]), count=2, fingerprint=2, size=50)),
    ("do not meet", trace_but(1, lo=3)),
    ("do not meet", trace_but(1, upper=at(21))),
    ("empty range of ids", trace_but(2, hi=3)),
    ("beyond the shard's", trace_but(0, since=at(6))),
    ("are empty", trace_but(2, upper=at(20))),
    ("updates", trace_but(0, count=3)),
    ("updates", trace_but(0, count=0)),
    ("fingerprint", trace_but(2, fingerprint=1)),
    ("out of range", trace_but(0, fingerprint=2**64)),
    ("out of range", trace_but(0, diff_sum=2**63)),
    ("not ascending", trace_but(0, runs=(0, 0))),
    ("do not fit", trace_but(0, runs=(0, 1))),
    ("times outside", trace_but(0, parts=(part(1, 2, 0, 10),))),
    ("impossible bounds", trace_but(0, parts=(part(1, 2, 5, 4),))),
    ("lacks digests", trace_but(0, parts=(msgspec.structs.replace(part(1), digests=b""),))),
    ("unknown schema", trace_but(0, parts=(msgspec.structs.replace(part(1), schema=1),))),
    ("either an object or inline", trace_but(0, parts=(msgspec.structs.replace(part(1), inline=bytes(50)),))),
    ("not its bytes'", trace_but(0, parts=(msgspec.structs.replace(part(1), key=PartKey(""), inline=b"x"),))),
    ("has no uploader", trace_but(0, parts=(msgspec.structs.replace(part(1), key=PartKey("x/1")),))),
    ("fingerprint is", but(fingerprint=6)),
    ("count is", but(count=6)),
    ("size is", but(size=6)),
    ("inline_size is", but(inline_size=6)),
    ("referred to twice", trace_but(1, parts=(part(1, 3, 10, 19),))),
    ("garbage and referred to", but(garbage={part(1).key: Garbage(SeqNo(3), 50)})),
    ("garbage and referred to", but(garbage={rollup_key(SeqNo(8), 1): Garbage(SeqNo(3), 9)})),
    ("3 rollups", but(rollups={**STATE.rollups, SeqNo(3): Rollup(rollup_key(SeqNo(3), 1), 9, bytes(16))})),
    ("cannot hold v8", but(rollups={SeqNo(8): Rollup(rollup_key(SeqNo(9), 1), 9, bytes(16))})),
    ("cannot hold v20", but(rollups={NOW: Rollup(rollup_key(NOW, 1), 9, bytes(16))})),
    ("before since", but(readers={R: Reader(at(4), SeqNo(12), 100)})),
    ("before since", but(holds={"audit": Hold(MINIMUM)})),
    ("malformed", but(writers={"w1": Writer("ingest", 1)})),
    ("malformed", but(readers={W: Reader(at(7), SeqNo(12), 100)})),
    ("live and retired", but(retired={W: SeqNo(3)})),
    ("beyond 20", but(readers={R: Reader(at(7), SeqNo(21), 100)})),
    ("beyond 20", but(garbage={OLD: Garbage(SeqNo(21), 50)})),
    ("beyond 20", but(retired={DEAD: SeqNo(21)})),
]


@pytest.mark.parametrize(("sentence", "state"), BROKEN, ids=[f"{i} {s}" for i, (s, _) in enumerate(BROKEN)])
def test_a_broken_invariant_is_named(sentence, state):
    with pytest.raises(InvariantViolated) as caught:
        check_state(state, NOW)
    assert sentence in str(caught.value)
    assert "Nothing was written" in str(caught.value)


NEXT = batch(4, 5, 30, 40, part(7, 2, 30, 39))
BACK = StateDiff(retired=((DEAD, SeqNo(9), None),), writers=((DEAD, None, Writer("ingest", 1)),))


def appending(removed=(), **changes):
    return StateDiff(trace=TraceEdit(removed, (msgspec.structs.replace(NEXT, **changes),)))


CHANGES = [
    ("went back", StateDiff(since=(at(5), at(4)))),
    ("went back", appending(((2, 3), (3, 4)), lo=2, lower=at(10), upper=at(15))),
    ("do not meet", appending(lower=at(31), parts=(part(7, 2, 31, 39),))),
    ("do not meet", appending(lo=5, hi=6)),
    ("empty range of ids", appending(hi=4)),
    ("without anything in their place", StateDiff(trace=TraceEdit(((2, 3),), ()))),
    ("has since", appending(since=at(6))),
    ("garbage and referred to", appending(parts=(part(99, 2, 30, 39),))),
    ("updates", appending(count=7)),
    ("before since", StateDiff(since=(at(5), at(9)))),
    ("before since", StateDiff(holds=(("new", None, Hold(at(4))),))),
    ("came back from the retired", BACK),
    ("live and retired", StateDiff(writers=((DEAD, None, Writer("ingest", 1)),))),
    ("malformed", StateDiff(writers=((WriterId("w1"), None, Writer("ingest", 1)),))),
    ("malformed", StateDiff(readers=((ReaderId(W), None, Reader(at(7), NOW, 1)),))),
    ("beyond v20", StateDiff(readers=((format_reader_id(9), None, Reader(at(7), SeqNo(21), 1)),))),
    ("garbage twice", StateDiff(garbage=((OLD, None, Garbage(NOW, 1)),))),
    ("3 rollups", StateDiff(rollups=((SeqNo(16), None, Rollup(rollup_key(SeqNo(16), 1), 1, bytes(16))),))),
    ("cannot hold", StateDiff(rollups=((SeqNo(8), STATE.rollups[SeqNo(8)], Rollup(PartKey("w/1"), 1, bytes(16))),))),
    ("may gain value columns", StateDiff(schemas=(Schema(key={"other": "string"}),))),
    ("out of order", appending(((0, 2),), lo=3, hi=4, lower=at(0), upper=at(10), parts=(part(7),), since=at(5))),
    ("has no uploader", appending(parts=(msgspec.structs.replace(part(7, 2, 30, 39), key=PartKey("x/1")),))),
    ("beyond 20", appending(born=SeqNo(21))),
    ("beyond 20", StateDiff(garbage=((part_key(W, 98), None, Garbage(SeqNo(21), 1)),))),
    ("beyond 20", StateDiff(retired=((format_writer_id(9), None, SeqNo(21)),))),
    ("live and retired", StateDiff(retired=((W, None, NOW),))),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "diff"), CHANGES, ids=[f"{i} {s}" for i, (s, _) in enumerate(CHANGES)])
def test_a_change_that_breaks_an_invariant_is_stopped_before_it_is_written(sentence, diff):
    # What a transition would never write may also not fit the old values: then it is not even applied.
    unchecked = msgspec.structs.replace(diff, garbage=()) if sentence == "garbage twice" else diff
    new = apply_diff(STATE, unchecked)
    with pytest.raises(InvariantViolated) as caught:
        check_change(STATE, diff, new, NOW)
    assert sentence in str(caught.value)


REFERENCES = [
    ("referred to twice", appending(parts=(part(1, 2, 30, 39),))),
    ("garbage and referred to", StateDiff(garbage=((part(1).key, None, Garbage(NOW, 1)),))),
    ("garbage and referred to", StateDiff(garbage=((rollup_key(SeqNo(8), 1), None, Garbage(NOW, 1)),))),
]


@pytest.mark.parametrize(("sentence", "diff"), REFERENCES, ids=[f"{i} {s}" for i, (s, _) in enumerate(REFERENCES)])
def test_whoever_follows_a_log_notices_an_object_that_is_referred_to_twice_or_is_garbage_too(sentence, diff):
    new = apply_diff(STATE, diff)
    check_change(STATE, diff, new, NOW)
    with pytest.raises(InvariantViolated) as caught:
        check_references(new, [StateDiff(), diff], NOW)
    assert sentence in str(caught.value)
    with pytest.raises(InvariantViolated):
        check_state(new, NOW)


def test_a_sound_change_passes():
    diff = StateDiff(trace=TraceEdit((), (NEXT,)))
    check_change(STATE, diff, apply_diff(STATE, diff), NOW)
    check_state(apply_diff(STATE, diff), NOW)


@pytest.mark.parametrize(
    "diff",
    [
        StateDiff(since=(at(4), at(6))),
        StateDiff(retention=(5, 6)),
        StateDiff(trace=TraceEdit(((0, 1),), (NEXT,))),
        StateDiff(trace=TraceEdit(((0, 2), (3, 4)), (NEXT,))),
        StateDiff(writers=((W, None, Writer("ingest", 1)),)),
        StateDiff(writers=((W, Writer("ingest", 99), None),)),
        StateDiff(holds=(("nobody", Hold(at(5)), None),)),
        StateDiff(holds=(("nobody", None, None),)),
    ],
)
def test_a_diff_of_another_state_does_not_apply(diff):
    with pytest.raises(InvariantViolated, match="diff"):
        apply_diff(STATE, diff)


def test_applying_a_diff_leaves_the_state_as_it_was():
    before = msgspec.msgpack.encode(STATE.trace), dict(STATE.writers)
    apply_diff(STATE, StateDiff(writers=((W, STATE.writers[W], None),), trace=TraceEdit((), (NEXT,))))
    assert (msgspec.msgpack.encode(STATE.trace), dict(STATE.writers)) == before


def test_since_does_not_jump_when_nobody_holds_it():
    assert fold_since(but(readers={}, holds={})) is None
    assert fold_since(but(readers={R: Reader(TOP, NOW, 1)}, holds={})) == (at(5), TOP)


@pytest.mark.parametrize(("count", "level"), [(0, -1), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_a_level_is_a_power_of_two_of_updates(count, level):
    assert level_of(count) == level


def test_levels_add_up_to_the_trace():
    found = levels(STATE.trace)
    assert [level.level for level in found] == [2, 1, -1]
    assert sum(level.updates for level in found) == STATE.count
    assert sum(level.size for level in found) == STATE.size
    assert sum(level.batches for level in found) == len(STATE.trace)


def test_costs_add_up_and_have_a_price():
    cost = Cost(bytes_read=10, bytes_written=5, gets=2, puts=1)
    assert cost + cost == Cost(20, 10, 4, 2)
    assert cost.priced(Prices(put=5.0, get=0.5)).dollars == 6.0
    assert storage_dollars(2**30, Prices(gib_month=0.5)) == 0.5
