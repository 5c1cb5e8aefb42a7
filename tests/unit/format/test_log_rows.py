"""The bytes of rows and rollups: fixed for ever, the same in any process, and refused when a single bit is off.

The golden files were written once, by this file run as a program. They are never written again for a format that was
released.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from persist_lib.core.diff import OutcomesEdit, StateDiff, TraceEdit
from persist_lib.core.formats import DIFF_FIELDS, NEWEST, PART_FIELDS, STATE_FIELDS, WRITER_FIELDS, needed
from persist_lib.core.pending import PendingName
from persist_lib.core.state import (
    Batch,
    Garbage,
    Hold,
    Outcome,
    Part,
    Pin,
    Produced,
    Reader,
    Rollup,
    State,
    ValueBounds,
    Writer,
)
from persist_lib.core.sums import Sums
from persist_lib.errors import Corrupt, InvariantViolated, NewerFormat
from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.log import (
    GENESIS,
    GROUP,
    ROLLUP_MAGIC,
    ROW_MAGIC,
    LogRow,
    Step,
    StoredState,
    decode_row,
    decode_state,
    encode_row,
    encode_state,
    row_digest,
    row_format,
)
from persist_lib.frontier import MAX_TIME, MINIMUM, TOP, at
from persist_lib.ids import PUBLISHED, PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Column, Schema
from tests.counted import count
from tests.framing import framed

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"

SCHEMA = Schema(key={"id": "int64 not null", "größe": "decimal128(18, 2)"}, value={"at": "timestamp[us, UTC]"})
PART = Part(PartKey("w00000000000000ab/0000000000000001.parquet"), 123, 45, bytes(range(16)), b"\x00a", b"\xff", 0,
            MAX_TIME - 1, 0, earliest=44)  # fmt: skip
INLINE = Part(PartKey(""), 3, 1, bytes(range(16, 32)), b"", b"", 7, 7, 1, b"\x00\xff\x80", 1)
BATCH = Batch(3, 5, at(7), TOP, at(2), 45, -(2**63), 2**64 - 1, (PART, INLINE), (0, 1), exact=False, born=SeqNo(6))
OUTCOME = Outcome(b"\x00token", SeqNo(9), TOP)
WRITER = Writer("maintenance", 1_700_000_000_000, (OUTCOME,))
READER = Reader(at(1), SeqNo(4), 2**62, "dashboard ☃")
ROLLUP = Rollup(PartKey("rollup/v00000000000000000008-00000000000000ff"), 77, bytes(range(32, 48)))
W1, W2, R1 = WriterId("w00000000000000ab"), WriterId("w0000000000000001"), ReaderId("r00000000000000cd")

ROW = LogRow(
    seqno=SeqNo(11), token=b"\xfftoken\x00", command="CompareAndAppend", now=1_700_000_000_123,
    previous=bytes(range(16)), rollup=(SeqNo(8), ROLLUP),
    diff=StateDiff(
        since=(MINIMUM, TOP), trace=TraceEdit(((3, 4), (4, 5)), (BATCH,)), schemas=(SCHEMA,),
        writers=((W1, None, WRITER), (W2, WRITER, None)), readers=((R1, READER, READER),),
        holds=(("audit", Hold(at(1)), Hold(TOP, b"\x00")),), retired=(("w01", None, SeqNo(3)),),
        garbage=((PART.key, None, Garbage(SeqNo(11), 123)),), rollups=((SeqNo(2), ROLLUP, None),), retention=(None, 5),
    ),
)  # fmt: skip
STORED = StoredState(
    SeqNo(10), bytes(range(16)),
    State(
        since=at(2), trace=(Batch(0, 3, MINIMUM, at(7), MINIMUM, 0, 0, 0), BATCH), schemas=(SCHEMA,),
        writers={W2: WRITER, W1: Writer("ingest", 0)}, readers={R1: READER},
        holds={"b": Hold(at(1), b"x"), "a": Hold(TOP)},
        retired={"w02": SeqNo(1), "w01": SeqNo(300)},
        garbage={PartKey("w/2"): Garbage(SeqNo(7), 1), PartKey("w/1"): Garbage(SeqNo(70_000), 2)},
        rollups={SeqNo(300): ROLLUP, SeqNo(8): ROLLUP}, retention=MAX_TIME, inline_size=3, fingerprint=2**64 - 1,
        count=45, size=126,
    ),
)  # fmt: skip
OUTCOMES = (Outcome(b"", SeqNo(2), at(3)), OUTCOME)
ROW_2 = msgspec.structs.replace(
    ROW, command="Upgrade",
    diff=msgspec.structs.replace(ROW.diff, format=(1, 2), outcomes=OutcomesEdit(1, OUTCOMES)),
)  # fmt: skip
STORED_2 = msgspec.structs.replace(
    STORED, state=msgspec.structs.replace(STORED.state, format=2, outcomes=OUTCOMES)
)  # fmt: skip
ROW_3 = msgspec.structs.replace(ROW_2, diff=msgspec.structs.replace(ROW_2.diff, format=(2, 3), outcomes=None))
STORED_3 = msgspec.structs.replace(
    STORED_2, state=msgspec.structs.replace(STORED_2.state, format=3, appended_bytes=70_000, maintained_bytes=2**40)
)  # fmt: skip
OLDEST = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 10: 10, 11: 11, 12: 12}
"""These rows of formats 3 and 4 say no more than those of format 2."""
CLOCK = Schema(SCHEMA.key, SCHEMA.value, times="us")
ROW_CLOCK = msgspec.structs.replace(ROW, command="Create", diff=StateDiff(schemas=(CLOCK,), format=(1, 3)))
STORED_CLOCK = msgspec.structs.replace(STORED_3, state=msgspec.structs.replace(STORED_3.state, schemas=(CLOCK,)))
"""A shard whose times are a clock."""
PRODUCED = Produced(2**63 - 1, SeqNo(9), at(8), 1_700_000_000_456)
AT = msgspec.structs.replace(PART, time_lower=7, time_upper=7, earliest=45, at=7)
BATCH_AT = msgspec.structs.replace(BATCH, parts=(AT, INLINE))
ROW_PRODUCERS = msgspec.structs.replace(
    ROW,
    diff=msgspec.structs.replace(
        ROW.diff, trace=TraceEdit(((3, 4), (4, 5)), (BATCH_AT,)),
        producers=(("nightly ☃", None, PRODUCED), ("b", PRODUCED, None)),
    ),
)  # fmt: skip
STORED_PRODUCERS = msgspec.structs.replace(
    STORED_3,
    state=msgspec.structs.replace(
        STORED_3.state, trace=(STORED_3.state.trace[0], BATCH_AT), producers={"nightly ☃": PRODUCED, "b": PRODUCED}
    ),
)  # fmt: skip
"""A shard with producers, and with a part that counts at a time of its own."""
OWNED = msgspec.structs.replace(WRITER, owner="the loader ☃")
ROW_OWNER = msgspec.structs.replace(ROW, diff=msgspec.structs.replace(ROW.diff, writers=((W1, WRITER, OWNED),)))
STORED_OWNER = msgspec.structs.replace(
    STORED_3, state=msgspec.structs.replace(STORED_3.state, writers={W1: WRITER, W2: OWNED})
)  # fmt: skip
"""A shard with a writer that has an owner."""

REMEMBERING = msgspec.structs.replace(OWNED, staged=(Outcome(b"\x00an answer", SeqNo(7), at(9)),))
ROW_STAGED = msgspec.structs.replace(
    ROW_OWNER, diff=msgspec.structs.replace(ROW.diff, writers=((W1, WRITER, REMEMBERING),))
)
STORED_STAGED = msgspec.structs.replace(
    STORED_OWNER, state=msgspec.structs.replace(STORED_OWNER.state, writers={W1: REMEMBERING})
)
"""A shard with a stage that remembers an answer of a task."""
PENDING = PendingName("edge-7", 7, at(MAX_TIME), 45, bytes(range(16)).hex())
LATE = PendingName("edge_8", 0, at(7), 0, "0" * 32).key
ADOPTED = msgspec.structs.replace(BATCH, parts=(msgspec.structs.replace(PART, key=PENDING.key, time_lower=7), INLINE))
ROW_PENDING = msgspec.structs.replace(
    ROW, command="Absorb",
    diff=msgspec.structs.replace(
        ROW.diff, trace=TraceEdit((), (ADOPTED,)), garbage=((LATE, None, Garbage(SeqNo(11), 123)),)
    ),
)  # fmt: skip
STORED_PENDING = msgspec.structs.replace(
    STORED_3,
    state=msgspec.structs.replace(
        STORED_3.state, trace=(STORED_3.state.trace[0], ADOPTED), garbage={LATE: Garbage(SeqNo(7), 1)}
    ),
)  # fmt: skip
"""A shard with a pending area: it refers to a batch that it adopted, and has garbage there."""
ROW_4 = msgspec.structs.replace(ROW_3, diff=msgspec.structs.replace(ROW_3.diff, format=(3, 4)))
TOGETHER = (Outcome(b"", SeqNo(2), at(3)), Outcome(b"one", SeqNo(9), at(4)), Outcome(b"two", SeqNo(9), TOP))
STORED_4 = msgspec.structs.replace(
    STORED_3, state=msgspec.structs.replace(STORED_3.state, format=4, outcomes=TOGETHER)
)  # fmt: skip
STEPS = (
    Step(b"\x00one", "CompareAndAppend", "the loader ☃", ROW_PRODUCERS.diff),
    Step(b"two", "SetHold", "", None, "the hold has another fencing value"),
    Step(b"", "RegisterWriter", "b", StateDiff(writers=((W1, None, OWNED),))),
)
ROW_GROUP = msgspec.structs.replace(ROW, token=b"", command=GROUP, diff=StateDiff(), group=STEPS)
"""A row of several commands: one that changed much, one that was refused, and another one."""
ROW_5 = msgspec.structs.replace(
    ROW_PRODUCERS, command="Adopt",
    diff=msgspec.structs.replace(ROW_PRODUCERS.diff, member=("", "c00000000000000ef/1")),
)  # fmt: skip
STORED_5 = msgspec.structs.replace(
    STORED_PRODUCERS,
    state=msgspec.structs.replace(STORED_PRODUCERS.state, format=5, outcomes=TOGETHER, member="c00000000000000ef/1"),
)
"""A member of a collection."""
AHEAD = Batch(
    0, 5, MINIMUM, at(8), at(7), 45, 5, 2**64 - 1, (msgspec.structs.replace(AT, at=None),), (0,), born=SeqNo(6)
)
ROW_6 = msgspec.structs.replace(
    ROW_5, command="KeepContents", diff=msgspec.structs.replace(ROW_5.diff, contents=(AHEAD, None))
)
STORED_6 = msgspec.structs.replace(STORED_5, state=msgspec.structs.replace(STORED_5.state, format=6, contents=AHEAD))
"""A shard that keeps contents ahead."""
PIN = Pin((PART.key,), b"\x00fence", 7, 10, follows=True)
OPEN = msgspec.structs.replace(
    AHEAD, parts=(msgspec.structs.replace(AHEAD.parts[0], key=PartKey(f"{PUBLISHED}/{AHEAD.parts[0].key}")),)
)
ROW_7 = msgspec.structs.replace(
    ROW_6, command="PinKeys",
    diff=msgspec.structs.replace(ROW_6.diff, contents=(AHEAD, OPEN), pins=(("iceberg", None, PIN),)),
)  # fmt: skip
STORED_7 = msgspec.structs.replace(
    STORED_6, state=msgspec.structs.replace(STORED_6.state, format=7, contents=OPEN, pins={"iceberg": PIN})
)
"""A shard with a publication, whose contents stand below its folder."""
EVOLVED = Schema(
    (Column("id", "int64", False), Column("größe", "decimal128(18, 2)")),
    (
        Column("when", "timestamp[us, UTC]", first_name="at"), Column("n", "float64", False, "-0.5", "", "float32"),
        Column("gone", "string", True, "", "n~", "", True),
    ),
)  # fmt: skip
ROW_8 = msgspec.structs.replace(
    ROW_7, command="EvolveSchema", diff=msgspec.structs.replace(ROW_7.diff, schemas=(EVOLVED,))
)
STORED_8 = msgspec.structs.replace(
    STORED_7, state=msgspec.structs.replace(STORED_7.state, format=8, schemas=(SCHEMA, EVOLVED))
)
"""A shard with columns that were renamed, widened and dropped, and with a default."""
SUMMED = msgspec.structs.replace(AT, key=PartKey(f"{PUBLISHED}/{AT.key}"), sums=Sums(45, -9, 2**64 - 5))
PROVEN = msgspec.structs.replace(OPEN, parts=(SUMMED,))
ROW_9 = msgspec.structs.replace(
    ROW_8, command="KeepContents", diff=msgspec.structs.replace(ROW_8.diff, contents=(OPEN, PROVEN))
)
STORED_9 = msgspec.structs.replace(STORED_8, state=msgspec.structs.replace(STORED_8.state, format=9, contents=PROVEN))
"""A shard whose contents have a part that says its sums."""
FILLED = Schema(
    (Column("id", "fixed_size_binary[16]", False, fill="uuid()"),),
    (Column("when", "timestamp[us, UTC]", first_name="at", fill="now()"), Column("word", "string", default="-")),
)
ROW_10 = msgspec.structs.replace(
    ROW_8, command="EvolveSchema", diff=msgspec.structs.replace(ROW_8.diff, schemas=(FILLED,))
)
STORED_10 = msgspec.structs.replace(
    STORED_9, state=msgspec.structs.replace(STORED_9.state, format=10, schemas=(FILLED,))
)
"""A shard with columns that writers fill."""
REORDERED = FILLED.reorder("word").whole
ROW_11 = msgspec.structs.replace(ROW_10, diff=msgspec.structs.replace(ROW_10.diff, schemas=(REORDERED,)))
STORED_11 = msgspec.structs.replace(
    STORED_10, state=msgspec.structs.replace(STORED_10.state, format=11, schemas=(FILLED, REORDERED))
)
"""A shard whose columns are shown in another order."""
VALUES = (
    ValueBounds(2, -(2**63), 2**64 - 1),
    ValueBounds(3, -0.5, 1e300, has_null=True),
    ValueBounds(4, None, None, has_null=True),
)
COUNTED = Schema((Column("id", "int64", False, fill="identity()"),), FILLED.value)
TOLD = msgspec.structs.replace(SUMMED, values=VALUES)
ROW_12 = msgspec.structs.replace(
    ROW_11,
    command="Reserve",
    diff=msgspec.structs.replace(
        ROW_11.diff,
        schemas=(COUNTED,),
        identities=(("id", None, 2), ("größe~", 2**63 - 1, 2**63)),
        contents=(PROVEN, msgspec.structs.replace(PROVEN, parts=(TOLD,))),
        trace=TraceEdit(
            (), (msgspec.structs.replace(BATCH, parts=(msgspec.structs.replace(PART, values=VALUES[:1]),)),)
        ),
    ),
)
STORED_12 = msgspec.structs.replace(
    STORED_11,
    state=msgspec.structs.replace(
        STORED_11.state,
        format=12,
        schemas=(FILLED, COUNTED),
        identities={"id": 2**63, "b": 2},
        contents=msgspec.structs.replace(PROVEN, parts=(TOLD,)),
    ),
)
"""A shard whose parts say bounds of their values, and whose key counts up."""
DOCUMENTS = FILLED.add({"doc": "json default '{}'"}).whole
ROW_JSON = msgspec.structs.replace(ROW_12, diff=msgspec.structs.replace(ROW_12.diff, schemas=(DOCUMENTS,)))
ROWS = {
    1: ROW, 2: ROW_2, 3: ROW_3, 4: ROW_4, 5: ROW_5, 6: ROW_6, 7: ROW_7, 8: ROW_8, 9: ROW_9, 10: ROW_10, 11: ROW_11,
    12: ROW_12,
}  # fmt: skip
STATES = {
    1: STORED, 2: STORED_2, 3: STORED_3, 4: STORED_4, 5: STORED_5, 6: STORED_6, 7: STORED_7, 8: STORED_8, 9: STORED_9,
    10: STORED_10, 11: STORED_11, 12: STORED_12,
}  # fmt: skip
FORMATS = pytest.mark.parametrize("format_", range(1, NEWEST + 1))


def golden(name: str, format_: int) -> bytes:
    return (GOLDEN / f"{name}_v{format_}.bin").read_bytes()


def test_every_field_of_what_is_stored_has_a_value_of_its_own_in_the_golden_files():
    group = (ROW_GROUP, STEPS[1])
    stored = (STORED_7, STORED_12.state, PIN, BATCH, TOLD, REMEMBERING, READER, ROLLUP, OUTCOME, PRODUCED)
    diff = msgspec.structs.replace(
        ROW_2.diff,
        producers=ROW_5.diff.producers,
        member=ROW_5.diff.member,
        contents=ROW_6.diff.contents,
        pins=ROW_7.diff.pins,
        identities=ROW_12.diff.identities,
    )
    for value in (*group, *stored, diff):
        plain = type(value)
        for name, default in zip(plain.__struct_fields__[::-1], plain.__struct_defaults__[::-1], strict=False):
            unset = default.factory() if hasattr(default, "factory") else default
            assert getattr(value, name) != unset or (plain, name) == (Part, "inline"), (plain, name)


@FORMATS
def test_the_row_of_each_format_still_decodes_to_what_was_written(format_):
    data = golden("row", format_)
    assert decode_row(data, "golden") == ROWS[format_]
    assert encode_row(ROWS[format_], format_) == data
    assert needed(ROWS[format_].command, ROWS[format_].diff) == OLDEST[format_], "the oldest format that can say it"
    assert row_format(data) == format_


@FORMATS
def test_the_rollup_of_each_format_still_decodes_to_what_was_written(format_):
    data = golden("rollup", format_)
    assert decode_state(data, "golden") == STATES[format_]
    assert encode_state(STATES[format_]) == data
    assert encode_state(decode_state(data, "golden")) == data


CONSTRAINED = Schema(key={"id": "int64 not null"}, value={"word": "string"}, unique=True, non_negative=True)
CONSTRAINED_ROW = LogRow(
    SeqNo(1), b"token", "Create", 1_700_000_000_123, GENESIS, None,
    StateDiff(schemas=(CONSTRAINED,), format=(1, 3), outcomes=OutcomesEdit(0, (Outcome(b"", SeqNo(1), MINIMUM),))),
)  # fmt: skip
CONSTRAINED_STATE = StoredState(SeqNo(1), bytes(range(16)), State(schemas=(CONSTRAINED,), format=3))


IN_FORMAT_3 = {
    "{}_v3_constraints": (CONSTRAINED_ROW, CONSTRAINED_STATE), "{}_clock_v3": (ROW_CLOCK, STORED_CLOCK),
    "{}_producers_v3": (ROW_PRODUCERS, STORED_PRODUCERS), "{}_owner_v3": (ROW_OWNER, STORED_OWNER),
    "{}_staged_v3": (ROW_STAGED, STORED_STAGED), "{}_pending_v3": (ROW_PENDING, STORED_PENDING),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FORMAT_3)
def test_what_format_3_brought_still_decodes_to_what_was_written_and_is_in_it_by_itself(name):
    data, rollup = ((GOLDEN / f"{name.format(kind)}.bin").read_bytes() for kind in ("row", "rollup"))
    row, state = IN_FORMAT_3[name]
    assert (decode_row(data, "golden"), decode_state(rollup, "golden")) == (row, state)
    assert (encode_row(row), encode_state(state)) == (data, rollup)


def test_a_column_of_documents_still_decodes_to_what_was_written():
    row = golden("row_json", 12)
    assert decode_row(row, "golden") == ROW_JSON
    assert encode_row(ROW_JSON, 12) == row
    with pytest.raises(InvariantViolated, match="only format 12"):
        encode_row(ROW_JSON, 11)


GARBAGE = StateDiff(garbage=ROW_PENDING.diff.garbage)
ONLY_FORMAT_3: dict[str, tuple[str, StateDiff, dict[str, Any]]] = {
    **{command: (command, GARBAGE, {"trace": (ADOPTED,)}) for command in ("Absorb", "DiscardPending", "CloneReader")},
    "an adopted batch": ("ApplyCompaction", ROW_PENDING.diff, {"trace": (ADOPTED,)}),
    "an owner": (ROW_OWNER.command, ROW_OWNER.diff, {"writers": {W2: OWNED}}),
    "producers": (
        "CompareAndAppend", StateDiff(producers=ROW_PRODUCERS.diff.producers), {"producers": {"b": PRODUCED}},
    ),
    "at": (
        "CompareAndAppend", msgspec.structs.replace(ROW_PRODUCERS.diff, producers=()), {"trace": (BATCH_AT,)},
    ),
    "a clock": ("Create", StateDiff(schemas=(CLOCK,)), {"schemas": (CLOCK,)}),
    "constraints": ("Create", StateDiff(schemas=(CONSTRAINED,)), {"schemas": (CONSTRAINED,)}),
    "later constraints": ("EvolveSchema", StateDiff(schemas=(CONSTRAINED,)), {"schemas": (CONSTRAINED,)}),
}  # fmt: skip


@pytest.mark.parametrize("format_", [1, 2])
@pytest.mark.parametrize("what", ONLY_FORMAT_3)
def test_an_older_format_cannot_say_what_format_3_brought(format_, what):
    """Not by the row, nor by the rollup, nor by damage: an older program would take it for nothing."""
    command, diff, more = ONLY_FORMAT_3[what]
    row = msgspec.structs.replace(ROW, command=command, diff=diff)
    assert needed(command, diff) == 3
    with pytest.raises(InvariantViolated, match="only format 3"):
        encode_row(row, format_)
    with pytest.raises(Corrupt, match="only format 3"):
        decode_row(framed(ROW_MAGIC, format_, encode_row(row, 3)[HEADER_BYTES:]), "key")
    older = msgspec.structs.replace(STATES[format_].state, **more)
    with pytest.raises(InvariantViolated, match="only format 3"):
        encode_state(msgspec.structs.replace(STORED, state=older))


def test_what_says_none_of_it_has_no_fields_for_it():
    stored = msgspec.msgpack.decode(encode_row(ROW_3, 3)[HEADER_BYTES:])
    assert [len(part) for part in stored[6]["trace"][1][0][8]] == [PART_FIELDS, PART_FIELDS]
    assert "producers" not in stored[6]
    both = msgspec.msgpack.decode(encode_row(ROW_PRODUCERS, 3)[HEADER_BYTES:])
    assert [len(part) for part in both[6]["trace"][1][0][8]] == [PART_FIELDS + 1, PART_FIELDS]
    assert len(msgspec.msgpack.decode(encode_state(STORED_3)[HEADER_BYTES:], strict=False)[2]) == STATE_FIELDS[3]
    for row, more in ((ROW_OWNER, 1), (ROW_STAGED, 2)):
        [[_, before, after]] = msgspec.msgpack.decode(encode_row(row)[HEADER_BYTES:])[6]["writers"]
        assert (len(before), len(after)) == (WRITER_FIELDS, WRITER_FIELDS + more)
    assert len(encode_state(STORED_CLOCK)) == len(encode_state(STORED_3)) + len(b"\xa2us")


def test_a_program_that_knows_no_clocks_refuses_such_a_row_and_rollup_before_anything_else(monkeypatch):
    for data, decode in ((golden("row_clock", 3), decode_row), (golden("rollup_clock", 3), decode_state)):
        monkeypatch.setattr("persist_lib.format.log.NEWEST", 2)
        with pytest.raises(NewerFormat, match="has format 3, and this release knows formats up to 2"):
            decode(data, "key")


def test_what_an_old_format_can_say_is_written_in_a_newer_one_where_the_shard_was_told_to():
    data = encode_row(ROW, 2)
    assert row_format(data) == 2
    assert decode_row(data, "key") == ROW


def test_a_format_cannot_say_what_came_later():
    with pytest.raises(InvariantViolated, match="only format 2 can"):
        encode_row(ROW_2, 1)
    with pytest.raises(InvariantViolated):
        encode_state(msgspec.structs.replace(STORED_2, state=msgspec.structs.replace(STORED_2.state, format=1)))
    with pytest.raises(Corrupt, match="only format 2 can"):
        decode_row(framed(ROW_MAGIC, 1, encode_row(ROW_2)[HEADER_BYTES:]), "key")
    with pytest.raises(Corrupt, match="a state of format 2, in format 1"):
        decode_state(framed(ROLLUP_MAGIC, 1, encode_state(STORED_2)[HEADER_BYTES:]), "key")


def test_what_each_format_brought_is_declared():
    """A field that is added without a format would be taken for "nothing changed" by older programs."""
    assert max(STATE_FIELDS) == NEWEST
    assert len(State.__struct_fields__) == STATE_FIELDS[NEWEST]
    assert State.__struct_fields__[STATE_FIELDS[4] : -4] == ("producers",), "before format 5 only when there are some"
    assert State.__struct_fields__[STATE_FIELDS[5] :] == ("contents", "pins", "identities")
    assert Part.__struct_fields__[PART_FIELDS:] == ("at", "sums", "values"), "stored only when it is set"
    assert Writer.__struct_fields__[WRITER_FIELDS:] == ("owner", "staged"), "stored only when they are set"
    first = {"since", "trace", "schemas", "writers", "readers", "holds", "retired", "garbage", "rollups", "retention"}
    assert set(StateDiff.__struct_fields__) == first | DIFF_FIELDS.keys()


def with_steps(*steps):
    return msgspec.structs.replace(ROW_GROUP, group=steps)


@pytest.fixture(scope="module")
def group() -> bytes:
    return golden("row_group", 4)


def test_a_group_still_decodes_to_what_was_written(group):
    assert decode_row(group, "golden") == ROW_GROUP
    assert encode_row(ROW_GROUP) == group, "in format 4, by itself"
    assert ROW_GROUP.steps == STEPS
    assert ROW_GROUP.diffs == (STEPS[0].diff, STEPS[2].diff)
    assert ROW.diffs == (ROW.diff,)
    assert ROW.steps == (Step(ROW.token, ROW.command, "", ROW.diff),)


@pytest.mark.parametrize("format_", [1, 2, 3])
def test_a_group_is_never_in_a_format_that_older_programs_read(format_, group):
    with pytest.raises(InvariantViolated, match="format 4"):
        encode_row(ROW_GROUP, format_)
    with pytest.raises(Corrupt, match="format 4"):
        decode_row(framed(ROW_MAGIC, format_, group[HEADER_BYTES:]), "key")


@pytest.mark.parametrize("format_", [3, 4])
def test_a_row_of_one_command_has_its_old_form_in_every_format(format_):
    assert len(msgspec.msgpack.decode(encode_row(ROW_PRODUCERS, format_)[HEADER_BYTES:])) == 7
    assert encode_row(ROW_PRODUCERS, format_)[HEADER_BYTES:] == golden("row_producers", 3)[HEADER_BYTES:]


NO_GROUPS = {
    "a token of its own": msgspec.structs.replace(ROW_GROUP, token=b"x"),
    "a change of its own": msgspec.structs.replace(ROW_GROUP, diff=StateDiff(retention=(None, 5))),
    "a command of its own": msgspec.structs.replace(ROW_GROUP, command="SetHold"),
    "one command": with_steps(STEPS[0]),
    "only refusals": with_steps(STEPS[1], STEPS[1]),
    "a refusal that changes something": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], refusal="no")),
    "neither": with_steps(STEPS[0], msgspec.structs.replace(STEPS[1], refusal="")),
    "the creation": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], command="Create")),
    "an upgrade": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], command="Upgrade")),
    "a format": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], diff=StateDiff(format=(3, 4)))),
    "a group": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], command=GROUP)),
    "a token that is a text": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], token="x")),
    "a sender that is none": with_steps(STEPS[0], msgspec.structs.replace(STEPS[2], sender=None)),
}


@pytest.mark.parametrize("row", NO_GROUPS.values(), ids=NO_GROUPS.keys())
def test_a_group_that_means_nothing_is_never_written_and_refused_when_read(row):
    with pytest.raises(InvariantViolated, match="Nothing was written"):
        encode_row(row, 4)
    fields = msgspec.msgpack.decode(golden("row_group", 4)[HEADER_BYTES:])
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.astuple(row)))
    fields[1], fields[2], fields[7] = told[1], told[2], told[7]
    fields[6] = {} if row.diff == StateDiff() else {"retention": [None, 5]}
    for step, meant in zip(fields[7], row.group, strict=True):
        step[3] = msgspec.to_builtins(meant.diff) if meant.diff in (None, StateDiff(format=(3, 4))) else {}
    with pytest.raises((Corrupt, NewerFormat)):
        decode_row(framed(ROW_MAGIC, 4, msgspec.msgpack.encode(fields)), "key")


WRONG = {
    "a token that is a text": msgspec.structs.replace(ROW, token="batch-1"),
    "a token that is a number": msgspec.structs.replace(ROW, token=5),
    "a fencing value that is a text": msgspec.structs.replace(
        ROW,
        diff=StateDiff(holds=(("a", None, Hold(at(1), "x")),)),  # type: ignore[arg-type]
    ),
    "a purpose that is a number": msgspec.structs.replace(
        ROW,
        diff=StateDiff(readers=((R1, None, Reader(at(1), SeqNo(1), 1, 5)),)),  # type: ignore[arg-type]
    ),
    "a schema that is a mapping": msgspec.structs.replace(
        ROW,
        diff=StateDiff(schemas=({"id": "int64"},)),  # type: ignore[arg-type]
    ),
    "a number of numpy's": msgspec.structs.replace(ROW, now=np.int64(5)),
    "a truth value for a number": msgspec.structs.replace(ROW, now=True),
    "a fraction": msgspec.structs.replace(ROW, now=1.5),
    "a number that is too large": msgspec.structs.replace(ROW, now=2**64),
    "half a surrogate pair": msgspec.structs.replace(ROW, command="\ud800"),
    "an unknown command": msgspec.structs.replace(ROW, command="Levitate"),
    "a list for a tuple": msgspec.structs.replace(ROW, diff=StateDiff(schemas=[SCHEMA])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("row", WRONG.values(), ids=WRONG.keys())
def test_what_a_reader_could_not_read_is_never_written(row):
    with pytest.raises(InvariantViolated, match="Nothing was written"):
        encode_row(row, NEWEST)


def test_a_rollup_that_a_reader_could_not_read_is_never_written():
    wrong = msgspec.structs.replace(STORED.state, readers={R1: Reader(at(1), SeqNo(1), 1, 5)})  # type: ignore[arg-type]
    with pytest.raises(InvariantViolated, match="Nothing was written"):
        encode_state(msgspec.structs.replace(STORED, state=wrong))


def with_more(value: object, path: list[int | str]) -> object:
    """`value`, as stored, with one more field in the list or mapping at `path`."""
    found = value
    for step in path:
        found = found[step]  # type: ignore[index]
    if isinstance(found, dict):
        found["levitation"] = 1
    else:
        found.append("more")  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ([6], "StateDiff with the field 'levitation'"),
        ([6, "trace"], "TraceEdit with 3 fields"),
        ([6, "trace", 1, 0], "Batch with 13 fields"),
        ([6, "trace", 1, 0, 8, 0], "Part with 15 fields"),
        ([6, "trace", 1, 0, 8, 0, 13, 0], "ValueBounds with 5 fields"),
        ([6, "producers", 0, 2], "Produced with 5 fields"),
        ([6, "writers", 0, 2], "Writer with 6 fields"),
        ([6, "writers", 0, 2, 2, 0], "Outcome with 4 fields"),
        ([6, "readers", 0, 1], "Reader with 5 fields"),
        ([6, "holds", 0, 1], "Hold with 3 fields"),
        ([6, "schemas", 0], "Schema with 7 fields"),
        ([6, "schemas", 0, 1, 0], "Column with 10 fields"),
        ([6, "since", 0], "Antichain with 2 fields"),
        ([5, 1], "Rollup with 4 fields"),
        ([6, "garbage", 0, 2], "Garbage with 3 fields"),
    ],
    ids=str,
)
def test_a_field_that_this_release_does_not_know_is_a_newer_format_and_never_nothing(path, named):
    schemas = (msgspec.structs.replace(CLOCK, value=REORDERED.value, unique=True, non_negative=True),)
    writers = ((W1, None, REMEMBERING),)
    trace = TraceEdit(((3, 4), (4, 5)), (msgspec.structs.replace(PROVEN, parts=(TOLD,)),))
    diff = msgspec.structs.replace(ROW_PRODUCERS.diff, schemas=schemas, writers=writers, trace=trace)
    row = msgspec.structs.replace(ROW, diff=diff)
    stored = msgspec.msgpack.decode(encode_row(row)[HEADER_BYTES:])
    with pytest.raises(NewerFormat, match=named):
        decode_row(framed(ROW_MAGIC, 3, msgspec.msgpack.encode(with_more(stored, path))), "key")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ([], "LogRow with 9 fields"),
        ([7, 0], "Step with 6 fields"),
        ([7, 2, 3], "StateDiff with the field 'levitation'"),
        ([7, 0, 3, "producers", 0, 2], "Produced with 5 fields"),
    ],
    ids=str,
)
def test_a_field_of_a_group_that_this_release_does_not_know_is_a_newer_format(path, named, group):
    stored = msgspec.msgpack.decode(group[HEADER_BYTES:])
    with pytest.raises(NewerFormat, match=named):
        decode_row(framed(ROW_MAGIC, 4, msgspec.msgpack.encode(with_more(stored, path))), "key")


def test_a_command_of_a_group_that_this_release_does_not_know_is_a_newer_format(group):
    body = group[HEADER_BYTES:].replace(b"RegisterWriter", b"RegisterWraith")
    with pytest.raises(NewerFormat, match="RegisterWraith"):
        decode_row(framed(ROW_MAGIC, 4, body), "key")


def test_a_command_that_this_release_does_not_know_is_a_newer_format():
    body = encode_row(ROW)[HEADER_BYTES:].replace(b"CompareAndAppend", b"CompareAndLevity")
    with pytest.raises(NewerFormat, match="CompareAndLevity"):
        decode_row(framed(ROW_MAGIC, 1, body), "key")


@pytest.mark.parametrize("path", [[], [2], [2, 3, "w0000000000000001"], [2, 9], [2, 18, "b"]], ids=str)
def test_a_field_of_a_rollup_that_this_release_does_not_know_is_a_newer_format(path):
    owned = msgspec.structs.replace(STORED_12.state, writers={W2: REMEMBERING})
    state = msgspec.structs.replace(STORED_12, state=owned)
    stored = msgspec.msgpack.decode(encode_state(state)[HEADER_BYTES:], strict=False)
    if path == [2, 9]:
        stored[2][9] = [1]
        with pytest.raises(Corrupt):  # a value of another type is damage
            decode_state(framed(ROLLUP_MAGIC, 12, msgspec.msgpack.encode(stored)), "key")
        return
    with pytest.raises(NewerFormat):
        decode_state(framed(ROLLUP_MAGIC, 12, msgspec.msgpack.encode(with_more(stored, path))), "key")


@pytest.mark.slow
def test_another_process_writes_the_same_bytes_whatever_its_hash_seed_zone_and_locale():
    program = (
        "import sys; sys.path.insert(0, '.'); from tests.unit.format import test_log_rows as t;"
        "sys.stdout.buffer.write(t.encode_row(t.ROW_3, 3) + t.encode_state(t.STORED_3))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4242", "TZ": "Pacific/Apia", "LC_ALL": "C"}
    written = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, check=True).stdout
    assert written == golden("row", 3) + golden("rollup", 3)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_a_state_came_about_does_not_show_in_its_bytes(seed):
    state = STORED_PRODUCERS.state
    shuffled = {}
    for name in ("writers", "readers", "holds", "retired", "garbage", "rollups", "producers"):
        entries = list(getattr(state, name).items())
        Random(seed).shuffle(entries)
        shuffled[name] = dict(entries)
    other = msgspec.structs.replace(state, **shuffled)
    assert encode_state(StoredState(SeqNo(10), STORED.digest, other)) == encode_state(STORED_PRODUCERS)


def decodes(decode, data):
    try:
        decode(data, "some key")
    except Corrupt as corrupt:
        return corrupt.key != "some key"
    return True


DAMAGED = pytest.mark.parametrize(
    ("data", "decode"),
    [
        (encode_row(ROW_PRODUCERS), decode_row),
        (encode_row(ROW_GROUP), decode_row),
        (encode_state(STORED_PRODUCERS), decode_state),
    ],
    ids=["row", "group", "rollup"],
)


@DAMAGED
def test_every_flipped_bit_is_found(data, decode):
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            assert not decodes(decode, bytes(damaged))
    count("corruptions", made=8 * len(data))


@DAMAGED
def test_every_truncation_and_every_appended_byte_is_found(data, decode):
    assert not any(decodes(decode, data[:end]) for end in range(len(data)))
    assert not any(decodes(decode, data + extra) for extra in (b"\x00", b"\xc0", data))
    assert decodes(decode, data)
    count("corruptions", made=len(data) + 3)


def test_a_row_is_not_taken_for_a_rollup_nor_the_other_way_round():
    with pytest.raises(Corrupt):
        decode_state(encode_row(ROW), "key")
    with pytest.raises(Corrupt):
        decode_row(encode_state(STORED), "key")


@pytest.mark.parametrize(("magic", "decode"), [(ROW_MAGIC, decode_row), (ROLLUP_MAGIC, decode_state)])
def test_a_newer_format_is_refused_before_its_body_is_looked_at(magic, decode):
    with pytest.raises(NewerFormat, match="upgrade") as caught:
        decode(framed(magic, NEWEST + 1, b"anything at all"), "some key")
    assert (caught.value.found, caught.value.known) == (NEWEST + 1, NEWEST)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x93\x01",
        msgspec.msgpack.encode([1, b"", b"\xff", 0, b"", None, {}])[:-1],
        encode_row(ROW)[HEADER_BYTES:].replace(b"CompareAndAppend", b"CompareAndAppen\xff"),
        encode_row(ROW)[HEADER_BYTES:].replace(b"decimal128(18, 2)", b"decimal128(99, 2)"),
        encode_row(ROW)[HEADER_BYTES:] + b"\xc0",
    ],
    ids=["empty", "null", "short", "cut", "no utf-8", "no type", "more"],
)
def test_a_body_that_is_no_row_is_corrupt_even_if_its_checksum_is_right(body):
    with pytest.raises(Corrupt, match="some key"):
        decode_row(framed(ROW_MAGIC, 1, body), "some key")


def test_a_format_that_never_was_is_corrupt():
    with pytest.raises(Corrupt):
        decode_row(framed(ROW_MAGIC, 0, encode_row(ROW)[HEADER_BYTES:]), "key")


def test_the_digest_of_a_row_depends_on_all_of_it():
    other = msgspec.structs.replace(ROW, now=ROW.now + 1)
    assert row_digest(encode_row(ROW)) != row_digest(encode_row(other))
    assert len(row_digest(encode_row(ROW))) == 16


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    files = {f"row_v{format_}.bin": encode_row(row, format_) for format_, row in ROWS.items()}
    files |= {f"rollup_v{format_}.bin": encode_state(stored) for format_, stored in STATES.items()}
    for name, (one, state) in IN_FORMAT_3.items():
        files |= {f"{name.format('row')}.bin": encode_row(one), f"{name.format('rollup')}.bin": encode_state(state)}
    files["row_json_v12.bin"] = encode_row(ROW_JSON, 12)
    files["row_group_v4.bin"] = encode_row(ROW_GROUP)
    for name, data in files.items():
        if not (GOLDEN / name).exists():  # what was written once is read for ever
            (GOLDEN / name).write_bytes(data)
